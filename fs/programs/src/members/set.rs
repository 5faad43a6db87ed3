//! Judges whether devices are the members of one volume, all of them, and all of the same moment.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Error};
use gpunvme_layout::member::Generation;
use gpunvme_layout::superblock::Names;
use gpunvme_layout::{Member, SetPlace, Striping};
use uuid::Uuid;

use super::copies::{self, Copies, WriteFailed};
use super::generation;

/// All members of a volume, by their number.
pub(super) struct Set {
    members: Vec<(Arc<dyn BlockDevice>, Copies)>,
    /// The generation that all of them know of.
    current: Generation,
    /// How the sets of the volume lie on their members in that one.
    sets: Vec<Striping>,
    /// The highest number of a generation that any of them has seen.
    highest: u64,
}

/// Why the members of a volume did not give it more, or did not begin a generation.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GrowError {
    /// It cannot be, or a device failed: a text that names it. The volume is what it was.
    #[error("{0}")]
    Refused(String),
    /// A device of the volume failed a flush: of what was written to the volume before, nobody
    /// knows what is durable.
    #[error(transparent)]
    NotDurable(Error),
}

impl From<String> for GrowError {
    fn from(why: String) -> GrowError {
        GrowError::Refused(why)
    }
}

/// Puts devices together to a volume. `None` stands for a device that is no member.
///
/// # Errors
/// A text that names the device that is missing, foreign, stale or there twice, and the way out.
pub(super) fn judge(devices: Vec<(String, Arc<dyn BlockDevice>, Option<Copies>)>) -> Result<Set, String> {
    let mut found: Vec<(String, Arc<dyn BlockDevice>, Copies)> = Vec::with_capacity(devices.len());
    for (name, device, copies) in devices {
        let copies = copies.ok_or_else(|| format!("{name} is not a member of a volume of several devices"))?;
        let member = copies.any();
        if let Some((_, _, first)) = found.first()
            && first.any().volume != member.volume
        {
            return Err(format!("{name} belongs to another volume, {}; leave it out", volume_name(member)));
        }
        found.push((name, device, copies));
    }
    let Member { place, generation: newest, .. } = current(found.iter().map(|(_, _, copies)| copies)).clone();
    let is_known = |copies: &Copies| copies.any().place.number < place.sets;
    // One that has a first superblock may well have been part of the volume.
    if let Some((name, _, copies)) = found.iter().find(|(_, _, copies)| !is_known(copies) && copies.first.is_some()) {
        let other = found.iter().find(|(_, _, copies)| copies.of(newest).is_some());
        return Err(unknown(copies.any(), name, other.map_or("the others", |(name, ..)| name)));
    }
    found.retain(|(_, _, copies)| is_known(copies));
    for (number, (name, _, copies)) in found.iter().enumerate() {
        let member = copies.any();
        if let Some((other, ..)) = found[..number].iter().find(|(_, _, other)| other.any().number() == member.number()) {
            return Err(twice(member, other, name));
        }
    }
    found.sort_by_key(|(_, _, copies)| copies.any().number());
    let there: Vec<(u16, &str)> = found.iter().map(|(name, _, copies)| (copies.any().number(), &name[..])).collect();
    if let Some(lacks) = lacks(found[0].2.any(), place.members, &there) {
        return Err(lacks);
    }
    let all: Vec<(&str, &Copies)> = found.iter().map(|(name, _, copies)| (&name[..], copies)).collect();
    let (current, highest) = same_generation(&all)?;
    let sets = same_sets(&all, current)?;
    let members = found.into_iter().map(|(_, device, copies)| (device, copies)).collect();
    Ok(Set { members, current, sets, highest })
}

/// What a member of the generation that counts says of itself, where these are members of one
/// volume: of the newest that one of them has in its first superblock. A set that it does not know
/// of was being added when the power failed, and is none.
pub(super) fn current<'a>(members: impl Iterator<Item = &'a Copies> + Clone) -> &'a Member {
    let firsts = members.clone().filter_map(|copies| copies.first.as_ref());
    let newest = firsts.max_by_key(|member| member.generation.number);
    newest.or_else(|| members.map(Copies::any).max_by_key(|member| member.generation.number)).expect("there is a member")
}

/// How the sets of a volume lie on their members, which are all there, in their order.
fn same_sets(members: &[(&str, &Copies)], current: Generation) -> Result<Vec<Striping>, String> {
    let mut sets: Vec<Striping> = Vec::new();
    let mut start = 0;
    while let Some((first, rest)) = members.get(start..).and_then(<[_]>::split_first) {
        let own = first.1.any();
        let of_set = rest.iter().take(usize::from(own.striping.members) - 1);
        let all = std::iter::once(first).chain(of_set);
        // A generation may have changed how much of the members the volume has; what all of them
        // know of is that of the members that have it.
        let of_current = |copies: &Copies| copies.of(current).map(|member| member.striping);
        let striping = all.clone().find_map(|(_, copies)| of_current(copies)).unwrap_or(own.striping);
        for (name, copies) in all {
            let Striping { members, unit, data, .. } = copies.any().striping;
            let is_same = (members, unit, data) == (striping.members, striping.unit, striping.data)
                && usize::from(copies.any().place.number) == sets.len()
                && of_current(copies).is_none_or(|other| other == striping);
            if !is_same {
                let (other, first) = (copies.any().striping, first.0);
                return Err(format!(
                    "{name} and {first} say different things of how the volume lies on its members: {other:?}, {striping:?}"
                ));
            }
        }
        sets.push(striping);
        start += usize::from(striping.members);
    }
    let places = SetPlace::all(&sets);
    let wrong = members.iter().find(|(_, copies)| {
        copies.of(current).is_some_and(|member| places.get(usize::from(member.place.number)) != Some(&member.place))
    });
    match wrong {
        Some((name, _)) => Err(format!("{name} and the others say different things of the sets of the volume: {sets:?}")),
        None => Ok(sets),
    }
}

/// The message where a member is there twice.
pub(super) fn twice(member: &Member, one: &str, other: &str) -> String {
    let number = member.number() + 1;
    format!(
        "member {number} of volume {} is there twice: {one} and {other}; detach one of them, or name the members that count with -o device=NAME (fsck.gpunvme: --with NAME)",
        volume_name(member)
    )
}

/// The message where a member is of a set of which a newer one does not know.
pub(super) fn unknown(member: &Member, name: &str, newer: &str) -> String {
    format!(
        "{name} is of set {} of volume {}, of which {newer} does not know. Either {name} was being added when the power failed, and was not: leave it out. Or {newer} is a copy from before: detach it",
        member.place.number + 1,
        volume_name(member)
    )
}

/// The message where not all of `count` members are there; these are, by number and name.
pub(super) fn lacks(member: &Member, count: u16, there: &[(u16, &str)]) -> Option<String> {
    let is_there = |number: &u16| there.iter().any(|(other, _)| other == number);
    let missing: Vec<String> = (0..count).filter(|number| !is_there(number)).map(|number| (number + 1).to_string()).collect();
    let (noun, verb) = if missing.len() == 1 { ("member", "is") } else { ("members", "are") };
    let there: Vec<String> = there.iter().map(|(number, name)| format!("{} is {name}", number + 1)).collect();
    (!missing.is_empty()).then(|| {
        format!(
            "{noun} {} of the {count} of volume {} {verb} missing ({}); attach what is missing, or name it with -o device=NAME (fsck.gpunvme: --with NAME)",
            missing.join(", "),
            volume_name(member),
            there.join(", ")
        )
    })
}

fn volume_name(member: &Member) -> String {
    let uuid = Uuid::from_bytes(member.volume_uuid());
    if member.names.label.is_empty() { uuid.to_string() } else { format!("{:?} ({uuid})", member.names.label) }
}

/// The generation that all members have or know of, and the highest number that any has seen.
///
/// A first superblock of generation g says that each member had g in its last one, durably. So a
/// member with g in neither has missed it: it was away when the volume was opened for writing, or
/// is an older copy of itself. One that is ahead in its last superblock, and has no first, was
/// there when an opening was cut short while that was written: all others know of its generation.
fn same_generation(members: &[(&str, &Copies)]) -> Result<(Generation, u64), String> {
    let generation = |member: &Option<Member>| member.as_ref().map(|member| member.generation);
    let firsts = members.iter().filter_map(|(_, copies)| generation(&copies.first));
    let lasts = members.iter().filter_map(|(_, copies)| generation(&copies.last));
    let newest = |generations: &mut dyn Iterator<Item = Generation>| generations.max_by_key(|generation| generation.number);
    let current = newest(&mut firsts.clone()).or_else(|| newest(&mut lasts.clone())).expect("each has one of them");
    let own = |copies: &Copies| {
        [&copies.first, &copies.last].into_iter().flatten().map(|member| member.generation.number).max().unwrap_or(0)
    };
    for (name, copies) in members {
        if copies.of(current).is_some() {
            continue;
        }
        let ahead = generation(&copies.last).filter(|last| copies.first.is_none() && last.number > current.number);
        let (name, copies, newest) = match ahead {
            Some(ahead) => match members.iter().find(|(_, other)| other.of(ahead).is_none()) {
                Some((other, copies)) => (other, copies, ahead),
                None => continue,
            },
            None => (name, copies, current),
        };
        let own = own(copies);
        let why = match own < newest.number {
            true => format!("is stale: it is of generation {own}, and others are of {}", newest.number),
            false => format!(
                "is of another copy of the volume: both were opened for writing since they were copied (generation {own})"
            ),
        };
        return Err(format!(
            "{name} {why}; what was written since is not on it: put the device back that was there then{}",
            or_leave_out(members, newest)
        ));
    }
    let highest = firsts.chain(lasts).map(|generation| generation.number).max().expect("each has one of them");
    Ok((current, highest))
}

/// The other way out, where a first superblock of this generation is on members alone that came
/// last.
fn or_leave_out(members: &[(&str, &Copies)], newest: Generation) -> String {
    let knows = |copies: &&Copies| copies.first.as_ref().is_some_and(|first| first.generation == newest);
    let came_last = |copies: &Copies| {
        let place = copies.any().place;
        place.number > 0 && place.number + 1 == place.sets
    };
    let mut of_newest = members.iter().filter(|(_, copies)| knows(copies)).peekable();
    if of_newest.peek().is_none() || !of_newest.clone().all(|(_, copies)| came_last(copies)) {
        return String::new();
    }
    let names: Vec<&str> = of_newest.map(|(name, _)| *name).collect();
    format!(
        ". Or {} was being added when the power failed, and was not: name the others alone, with -o device=NAME (fsck.gpunvme: --with NAME)",
        names.join(", ")
    )
}

impl Set {
    /// The members' devices, in their order.
    pub fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.members.iter().map(|(device, _)| Arc::clone(device)).collect()
    }

    /// How the sets of the volume lie on their members.
    pub fn sets(&self) -> &[Striping] {
        &self.sets
    }

    /// Whether the device of a member is larger than the member.
    pub fn has_more(&self) -> bool {
        self.members.iter().any(|(device, copies)| {
            let member = copies.of(self.current).unwrap_or_else(|| copies.any());
            copies::blocks_of(device) > member.blocks
        })
    }

    /// The names of the volume: those of the generation that all members know of. One that was cut
    /// short may have brought others to some of them.
    pub fn names(&self) -> &Names {
        let copies = self.members.iter().flat_map(|(_, copies)| [&copies.first, &copies.last]).flatten();
        let current = copies.into_iter().find(|member| member.generation == self.current);
        &current.expect("it is the generation of one of them").names
    }

    /// The UUID that mkfs gave the volume.
    pub fn volume(&self) -> gpunvme_layout::Uuid {
        self.members[0].1.any().volume
    }

    /// Begins a new generation, in which the volume has these names, before anything else is
    /// written. Whenever the power is cut, the members are of the old one or of the new one.
    ///
    /// # Errors
    /// A device failed.
    pub fn begin_generation(&self, names: &Names) -> Result<(), GrowError> {
        self.begin(names, &self.sets, false, &[])
    }

    /// Begins a new generation, in which the volume has as much of the members of its last set as
    /// their devices have become.
    ///
    /// # Errors
    /// A device failed.
    pub fn begin_larger(&self, last: Striping) -> Result<(), GrowError> {
        let before = &self.sets[..self.sets.len() - 1];
        self.begin(self.names(), &[before, &[last]].concat(), true, &[])
    }

    /// Begins a new generation, in which the volume has one set more, of these devices.
    ///
    /// # Errors
    /// A device failed.
    pub fn begin_set(&self, set: Striping, devices: &[Arc<dyn BlockDevice>]) -> Result<(), GrowError> {
        self.begin(self.names(), &[&self.sets[..], &[set]].concat(), false, devices)
    }

    /// `is_larger`: the members of the last set are as large as their devices now. `added`: the
    /// devices of the last set, where it is new. They become members with the others: until a first
    /// superblock of the others is of the new generation, the volume is as good without them.
    fn begin(&self, names: &Names, sets: &[Striping], is_larger: bool, added: &[Arc<dyn BlockDevice>]) -> Result<(), GrowError> {
        let (old, new) = (SetPlace::all(&self.sets), SetPlace::all(sets));
        let now = |copies: &Copies| {
            let member = copies.of(self.current).unwrap_or_else(|| copies.any()).clone();
            let number = usize::from(member.place.number);
            Member {
                generation: self.current,
                names: self.names().clone(),
                place: old[number],
                striping: self.sets[number],
                ..member
            }
        };
        let write = |members: Vec<(&Arc<dyn BlockDevice>, Member)>, copy| {
            copies::write_all(members.iter().map(|(device, member)| (*device, member)), copy).map_err(|failed| match failed {
                // One that is added has nothing of the volume yet.
                WriteFailed::Flush(of, error) if self.members.iter().any(|(device, _)| Arc::ptr_eq(device, of)) => {
                    GrowError::NotDurable(error)
                }
                failed => GrowError::Refused(failed.into_text()),
            })
        };
        // The last superblocks are written first, and may be torn: the first ones have to be whole,
        // and of the generation that counts.
        let is_behind = |copies: &Copies| copies.first.as_ref().is_none_or(|first| first.generation != self.current);
        let behind = self.members.iter().filter(|(_, copies)| is_behind(copies));
        write(behind.map(|(device, copies)| (device, now(copies))).collect(), 0)?;
        let next = self.highest.checked_add(1).ok_or("there is no generation behind the members' last one".to_owned())?;
        let next = generation(next)?;
        let mut all: Vec<(&Arc<dyn BlockDevice>, Member)> = Vec::new();
        for (device, copies) in &self.members {
            let now = now(copies);
            let set = usize::from(now.place.number);
            let blocks = if is_larger && set + 1 == sets.len() { copies::blocks_of(device) } else { now.blocks };
            let member = Member { generation: next, names: names.clone(), place: new[set], striping: sets[set], blocks, ..now };
            all.push((device, member));
        }
        for (device, index) in added.iter().zip(0..) {
            let set = sets.len() - 1;
            let member = Member {
                volume: self.volume(),
                names: names.clone(),
                uuid: Uuid::new_v4().into_bytes(),
                index,
                place: new[set],
                striping: sets[set],
                blocks: copies::blocks_of(device),
                generation: next,
            };
            all.push((device, member));
        }
        write(all.clone(), 1)?;
        // Those that come go first: where one of them fails, the others know nothing of it.
        all.rotate_left(self.members.len());
        write(all, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Generation = Generation { number: 4, stamp: [4; 16] };
    const NOW: Generation = Generation { number: 5, stamp: [5; 16] };
    const NEXT: Generation = Generation { number: 6, stamp: [6; 16] };

    fn copies(first: impl Into<Option<Generation>>, last: impl Into<Option<Generation>>) -> Copies {
        let striping = Striping::new(&[8192, 8192], 64).unwrap();
        let member = |generation| Member {
            volume: [1; 16],
            names: Names::default(),
            uuid: [2; 16],
            index: 0,
            place: SetPlace::all(&[striping])[0],
            striping,
            blocks: 8192,
            generation,
        };
        Copies { first: first.into().map(member), last: last.into().map(member) }
    }

    fn judged(members: &[Copies]) -> Result<(Generation, u64), String> {
        let names = ["a", "b", "c"];
        same_generation(&names.into_iter().zip(members).collect::<Vec<_>>())
    }

    #[test]
    fn an_opening_that_was_cut_short_leaves_members_of_the_old_or_the_new_generation() {
        let done = copies(NOW, NOW);
        // The last superblocks, one after the other, the second torn; then the first ones.
        for (states, current) in [
            ([copies(NOW, NEXT), done.clone(), done.clone()], NOW),
            ([copies(NOW, NEXT), copies(NOW, None), done.clone()], NOW),
            ([copies(NOW, NEXT), copies(NOW, NEXT), copies(NOW, NEXT)], NOW),
            ([copies(None, NEXT), copies(NOW, NEXT), copies(NOW, NEXT)], NOW),
            ([copies(NEXT, NEXT), copies(None, NEXT), copies(NOW, NEXT)], NEXT),
            ([copies(NEXT, NEXT), copies(NEXT, NEXT), copies(NOW, NEXT)], NEXT),
        ] {
            assert_eq!(judged(&states).map(|(current, _)| current), Ok(current), "{states:?}");
        }
        assert_eq!(judged(&[copies(NOW, NEXT), done.clone(), done]).unwrap().1, NEXT.number, "its number is not used again");
        assert_eq!(judged(&[copies(None, NOW), copies(None, NOW), copies(None, NOW)]).unwrap().0, NOW);
    }

    #[test]
    fn a_member_that_missed_a_generation_is_named() {
        let done = copies(NOW, NOW);
        let stale = [
            [done.clone(), copies(OLD, OLD), done.clone()],
            [done.clone(), copies(OLD, None), done.clone()],
            [copies(NOW, NEXT), copies(None, OLD), done.clone()],
        ];
        for states in stale {
            let why = judged(&states).unwrap_err();
            assert!(why.starts_with("b is stale: it is of generation 4, and others are of 5"), "{why}");
        }
        // The only first superblock is that of the one that was away.
        for states in [[copies(None, NOW), copies(OLD, OLD)], [copies(None, NOW), copies(OLD, None)]] {
            let why = judged(&states).unwrap_err();
            assert!(why.starts_with("b is stale: it is of generation 4, and others are of 5"), "{why}");
        }
        // It was there when an opening was cut short, and away at the next.
        let again = Generation { number: 7, stamp: [7; 16] };
        let why = judged(&[copies(again, again), copies(again, again), copies(NOW, NEXT)]).unwrap_err();
        assert!(why.starts_with("c is stale: it is of generation 6, and others are of 7"), "{why}");
        let other = Generation { stamp: [9; 16], ..NOW };
        let why = judged(&[done.clone(), copies(other, other), done]).unwrap_err();
        assert!(why.starts_with("b is of another copy"), "{why}");
    }

    /// Two members of a first set and, in generations from the last of these on, one of a second.
    fn growing(generations: [(Option<Generation>, Option<Generation>); 3]) -> Vec<Copies> {
        let first = Striping::new(&[8192, 8192], 64).unwrap();
        let second = Striping::behind(first.total_blocks(), &[8192], 64).unwrap();
        let sets = |generation: Generation| if generation.number >= NEXT.number { vec![first, second] } else { vec![first] };
        let member = |number: usize, generation: Generation| {
            let (sets, set) = (sets(generation), number / 2);
            let (index, striping) = ((number % 2) as u16, sets[set]);
            let place = SetPlace::all(&sets)[set];
            let (volume, uuid, names) = ([1; 16], [number as u8; 16], Names::default());
            Member { volume, names, uuid, index, place, striping, blocks: 8192, generation }
        };
        let copies = |(number, (first, last)): (usize, (Option<Generation>, Option<Generation>))| Copies {
            first: first.map(|generation| member(number, generation)),
            last: last.map(|generation| member(number, generation)),
        };
        generations.into_iter().enumerate().map(copies).collect()
    }

    #[test]
    fn a_set_counts_from_the_first_superblock_that_knows_of_it() {
        let (old, begun, new) = ((Some(NOW), Some(NOW)), (Some(NOW), Some(NEXT)), (Some(NEXT), Some(NEXT)));
        for (states, sets) in [
            ([begun, old, (None, None)], 1),
            ([begun, begun, (None, Some(NEXT))], 1),
            ([(None, Some(NEXT)), begun, (None, Some(NEXT))], 1),
            ([new, begun, (None, Some(NEXT))], 2),
            ([new, new, (None, Some(NEXT))], 2),
            ([new, new, new], 2),
        ] {
            let members: Vec<Copies> =
                growing(states).into_iter().filter(|copies| copies.first.is_some() || copies.last.is_some()).collect();
            let place = current(members.iter()).place;
            assert_eq!(place.sets, sets, "{states:?}");
            let known: Vec<(&str, &Copies)> =
                members.iter().filter(|copies| copies.any().place.number < sets).map(|copies| ("x", copies)).collect();
            assert_eq!(known.len(), usize::from(place.members), "{states:?}");
            let (generation, _) = same_generation(&known).unwrap();
            assert_eq!(same_sets(&known, generation).unwrap().len(), usize::from(sets), "{states:?}");
        }
    }

    #[test]
    fn members_that_came_last_and_know_alone_of_a_generation_can_be_left_out() {
        // What was being added had its first superblock; another generation, without it, was begun,
        // and did not get to its end.
        let (undone, again) = (Some(Generation { number: 7, stamp: [7; 16] }), (Some(NEXT), Some(NEXT)));
        for (states, can) in
            [([(Some(NOW), undone), (Some(NOW), undone), again], true), ([again, (Some(NOW), undone), again], false)]
        {
            let members = growing(states);
            let all: Vec<(&str, &Copies)> = ["a", "b", "c"].into_iter().zip(&members).collect();
            let why = same_generation(&all).unwrap_err();
            assert!(why.contains("is of another copy of the volume"), "{why}");
            assert_eq!(why.contains("Or c was being added"), can, "{why}");
        }
    }

    #[test]
    fn members_that_do_not_know_of_the_same_sets_are_refused() {
        let new = (Some(NEXT), Some(NEXT));
        let mut members = growing([new, new, new]);
        let wrong = members[1].first.as_mut().unwrap();
        wrong.place.total += 64;
        let known: Vec<(&str, &Copies)> = ["a", "b", "c"].into_iter().zip(&members).collect();
        let why = same_sets(&known, NEXT).unwrap_err();
        assert!(why.starts_with("b and the others say different things of the sets"), "{why}");
    }

    #[test]
    fn members_that_claim_other_sets_than_their_own_are_refused() {
        let new = (Some(NEXT), Some(NEXT));
        let ahead = (None, Some(Generation { number: 9, stamp: [9; 16] }));
        let mut members = growing([new, new, ahead]);
        members[2].last.as_mut().unwrap().place.number = 0;
        let known: Vec<(&str, &Copies)> = ["a", "b", "c"].into_iter().zip(&members).collect();
        let why = same_sets(&known, NEXT).unwrap_err();
        assert!(why.starts_with("c and c say different things"), "{why}");
    }
}
