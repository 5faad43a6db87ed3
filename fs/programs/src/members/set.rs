//! Judges whether devices are the members of one volume, all of them, and all of the same moment.

use std::sync::Arc;

use gpunvme_blockdev::BlockDevice;
use gpunvme_layout::member::Generation;
use gpunvme_layout::superblock::Names;
use gpunvme_layout::{Member, Striping};
use uuid::Uuid;

use super::copies::{self, Copies};
use super::generation;

/// All members of a volume, by their index.
pub(super) struct Set {
    members: Vec<(Arc<dyn BlockDevice>, Copies)>,
    /// The generation that all of them know of.
    current: Generation,
    /// How the volume lies on them in that one.
    striping: Striping,
    /// The highest number of a generation that any of them has seen.
    highest: u64,
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
        if let Some((other, ..)) = found.iter().find(|(_, _, other)| other.any().index == member.index) {
            return Err(twice(member, other, &name));
        }
        found.push((name, device, copies));
    }
    found.sort_by_key(|(_, _, copies)| copies.any().index);
    let shape = |copies: &Copies| {
        let Striping { members, unit, data, .. } = copies.any().striping;
        (members, unit, data)
    };
    let differs = |name: &str, one: Striping, other: Striping| {
        let first = &found[0].0;
        Err(format!("{name} and {first} say different things of how the volume lies on its members: {one:?}, {other:?}"))
    };
    let striping = found[0].2.any().striping;
    if let Some((name, _, copies)) = found.iter().find(|(_, _, copies)| shape(copies) != shape(&found[0].2)) {
        return differs(name, copies.any().striping, striping);
    }
    let missing = |index: &u16| !found.iter().any(|(_, _, copies)| copies.any().index == *index);
    let missing: Vec<u16> = (0..striping.members).filter(missing).collect();
    if !missing.is_empty() {
        return Err(lacks(found[0].2.any(), &missing));
    }
    let all: Vec<(&str, &Copies)> = found.iter().map(|(name, _, copies)| (&name[..], copies)).collect();
    let (current, highest) = same_generation(&all)?;
    // A generation may have changed how much of the members the volume has.
    let of_current = |copies: &Copies| copies.of(current).map(|member| member.striping);
    let striping = found.iter().find_map(|(_, _, copies)| of_current(copies)).expect("it is the generation of one of them");
    if let Some((name, other)) =
        found.iter().find_map(|(name, _, copies)| Some((name, of_current(copies)?)).filter(|s| s.1 != striping))
    {
        return differs(name, other, striping);
    }
    let members = found.into_iter().map(|(_, device, copies)| (device, copies)).collect();
    Ok(Set { members, current, striping, highest })
}

/// The message where a member is there twice.
pub(super) fn twice(member: &Member, one: &str, other: &str) -> String {
    let number = member.index + 1;
    format!(
        "member {number} of volume {} is there twice: {one} and {other}; detach one of them, or name the members that count with -o device=NAME (fsck.gpunvme: --with NAME)",
        volume_name(member)
    )
}

/// The message where members are missing.
pub(super) fn lacks(member: &Member, missing: &[u16]) -> String {
    let count = member.striping.members;
    let numbers: Vec<String> = missing.iter().map(|index| (index + 1).to_string()).collect();
    let (noun, verb) = if missing.len() == 1 { ("member", "is") } else { ("members", "are") };
    format!(
        "{noun} {} of the {count} of volume {} {verb} missing; attach what is missing, or name it with -o device=NAME (fsck.gpunvme: --with NAME)",
        numbers.join(", "),
        volume_name(member)
    )
}

fn volume_name(member: &Member) -> String {
    let uuid = Uuid::from_bytes(member.volume_uuid());
    if member.names.label.is_empty() { uuid.to_string() } else { format!("{:?} ({uuid})", member.names.label) }
}

/// The generation that all members have or know of, and the highest number that any has seen.
///
/// A first superblock of generation g says that each member had g in its last one, durably. So a
/// member with g in neither has missed it: it was away when the volume was opened for writing, or
/// is an older copy of itself. One that is ahead in its last superblock was there when an opening
/// was cut short, before anything was written.
fn same_generation(members: &[(&str, &Copies)]) -> Result<(Generation, u64), String> {
    let generation = |member: &Option<Member>| member.as_ref().map(|member| member.generation);
    let firsts = members.iter().filter_map(|(_, copies)| generation(&copies.first));
    let lasts = members.iter().filter_map(|(_, copies)| generation(&copies.last));
    let newest = |generations: &mut dyn Iterator<Item = Generation>| generations.max_by_key(|generation| generation.number);
    let current = newest(&mut firsts.clone()).or_else(|| newest(&mut lasts.clone())).expect("each has one of them");
    for (name, copies) in members {
        let (first, last) = (generation(&copies.first), generation(&copies.last));
        let is_ahead = first.is_none() && last.is_some_and(|last| last.number > current.number);
        if first == Some(current) || last == Some(current) || is_ahead {
            continue;
        }
        let own = [first, last].into_iter().flatten().map(|generation| generation.number).max().unwrap_or(0);
        let why = match own < current.number {
            true => format!("is stale: it is of generation {own}, and others are of {}", current.number),
            false => format!(
                "is of another copy of the volume: both were opened for writing since they were copied (generation {own})"
            ),
        };
        return Err(format!("{name} {why}; what was written since is not on it: put the device back that was there then"));
    }
    let highest = firsts.chain(lasts).map(|generation| generation.number).max().expect("each has one of them");
    Ok((current, highest))
}

impl Set {
    /// The members' devices, in their order.
    pub fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.members.iter().map(|(device, _)| Arc::clone(device)).collect()
    }

    /// How the volume lies on them.
    pub fn striping(&self) -> Striping {
        self.striping
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
    /// A text with the device's name: it failed.
    pub fn begin_generation(&self, names: &Names) -> Result<(), String> {
        self.begin(names, self.striping, None)
    }

    /// Begins a new generation, in which the volume has as much of its members as their devices
    /// have become, in blocks.
    ///
    /// # Errors
    /// A text with the device's name: it failed.
    pub fn begin_larger(&self, striping: Striping, blocks: &[u64]) -> Result<(), String> {
        self.begin(self.names(), striping, Some(blocks))
    }

    fn begin(&self, names: &Names, striping: Striping, blocks: Option<&[u64]>) -> Result<(), String> {
        let now = |copies: &Copies| Member {
            generation: self.current,
            names: self.names().clone(),
            striping: self.striping,
            ..copies.of(self.current).unwrap_or_else(|| copies.any()).clone()
        };
        let write = |members: Vec<(&Arc<dyn BlockDevice>, Member)>, copy| {
            copies::write_all(members.iter().map(|(device, member)| (*device, member)), copy)
        };
        // The last superblocks are written first, and may be torn: the first ones have to be whole,
        // and of the generation that counts.
        let is_behind = |copies: &Copies| copies.first.as_ref().is_none_or(|first| first.generation != self.current);
        let behind = self.members.iter().filter(|(_, copies)| is_behind(copies));
        write(behind.map(|(device, copies)| (device, now(copies))).collect(), 0)?;
        let next = generation(self.highest + 1)?;
        let member = |(number, (device, copies)): (usize, &'_ (Arc<dyn BlockDevice>, Copies))| {
            let now = now(copies);
            let blocks = blocks.map_or(now.blocks, |blocks| blocks[number]);
            (device.clone(), Member { generation: next, names: names.clone(), striping, blocks, ..now })
        };
        let all: Vec<(Arc<dyn BlockDevice>, Member)> = self.members.iter().enumerate().map(member).collect();
        for copy in [1, 0] {
            write(all.iter().map(|(device, member)| (device, member.clone())).collect(), copy)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Generation = Generation { number: 4, stamp: [4; 16] };
    const NOW: Generation = Generation { number: 5, stamp: [5; 16] };
    const NEXT: Generation = Generation { number: 6, stamp: [6; 16] };

    fn copies(first: impl Into<Option<Generation>>, last: impl Into<Option<Generation>>) -> Copies {
        let member = |generation| Member {
            volume: [1; 16],
            names: Names::default(),
            uuid: [2; 16],
            index: 0,
            striping: Striping::new(&[8192, 8192], 64).unwrap(),
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
        // It was there when an opening was cut short, and away at the next.
        let again = Generation { number: 7, stamp: [7; 16] };
        let why = judged(&[copies(again, again), copies(again, again), copies(NOW, NEXT)]).unwrap_err();
        assert!(why.starts_with("c is stale: it is of generation 6, and others are of 7"), "{why}");
        let other = Generation { stamp: [9; 16], ..NOW };
        let why = judged(&[done.clone(), copies(other, other), done]).unwrap_err();
        assert!(why.starts_with("b is of another copy"), "{why}");
    }
}
