//! Where the bytes of a stripe lie, and how a request is cut. Pure arithmetic.
use smallvec::SmallVec;

use crate::{Request, Span, Spans};

/// One set of members of a stripe: unit `u` of what the set holds is unit `u / members` of the data
/// of its member `u % members`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StripeSet {
    /// Number of members.
    pub members: usize,
    /// Bytes that lie on one member before those of the next begin.
    pub unit: u64,
    /// Where the data begins on each member, in bytes.
    pub data: u64,
    /// Bytes of data on each member, a multiple of the unit. Of the last set, more may follow.
    pub data_len: u64,
}

/// How a stripe lies on its members: what its first set holds, then what the next one does. The
/// members are numbered through all sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StripeMap {
    sets: SmallVec<[Set; 1]>,
}

/// A set, and what lies before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Set {
    lies: StripeSet,
    first_member: usize,
    /// The first byte of the stripe that it holds.
    start: u64,
}

/// Where a byte of a stripe lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The member, by its number.
    pub member: usize,
    /// The byte's offset on that member.
    pub offset: u64,
    /// Bytes from there to the end of the unit.
    pub left: u64,
}

/// A part of a request: all of it that lies on one member.
pub(super) type Part = (usize, Request);

impl StripeMap {
    /// A stripe of these sets, in their order.
    ///
    /// # Panics
    /// Unless there are sets, members, and bytes in a unit.
    pub fn new(sets: &[StripeSet]) -> StripeMap {
        assert!(!sets.is_empty(), "a stripe has a set");
        let (mut first_member, mut start) = (0, 0u64);
        let set = |lies: &StripeSet| {
            let StripeSet { members, unit, data_len, .. } = *lies;
            assert!(members > 0 && unit > 0, "{members} members with units of {unit} bytes");
            let set = Set { lies: *lies, first_member, start };
            first_member += members;
            start = start.saturating_add(data_len.saturating_mul(members as u64));
            set
        };
        StripeMap { sets: sets.iter().map(set).collect() }
    }

    /// Number of members.
    pub fn members(&self) -> usize {
        let last = self.last();
        last.first_member + last.lies.members
    }

    /// Number of sets.
    pub fn sets(&self) -> usize {
        self.sets.len()
    }

    /// Bytes that lie on one member of the first set before those of the next begin.
    pub fn unit(&self) -> u64 {
        self.sets[0].lies.unit
    }

    /// Where a byte of the stripe lies.
    pub fn place(&self, offset: u64) -> Place {
        let set = self.set_at(offset);
        set.place(offset)
    }

    /// The byte of the stripe at an offset of a member; none where the member has no data there.
    pub fn volume_offset(&self, member: usize, offset: u64) -> Option<u64> {
        let set = self.sets.iter().rfind(|set| set.first_member <= member)?;
        let StripeSet { members, unit, data, .. } = set.lies;
        let (at, index) = (offset.checked_sub(data)?, member - set.first_member);
        Some(set.start + (at / unit * members as u64 + index as u64) * unit + at % unit)
    }

    /// Where the data of a stripe of `len` bytes ends on each member, and what has to divide where
    /// its parts begin.
    pub(super) fn needs(&self, len: u64) -> impl Iterator<Item = (u64, StripeSet)> {
        self.sets.iter().zip(self.ends()).flat_map(move |(set, end)| {
            let StripeSet { members, unit, data, .. } = set.lies;
            let held = len.min(end).saturating_sub(set.start);
            let row = unit.saturating_mul(members as u64);
            let end = held.div_ceil(row).saturating_mul(unit).saturating_add(data);
            std::iter::repeat_n((end, set.lies), members)
        })
    }

    /// Cuts a request into its parts, all with that tag. Offset and length lie on the stripe.
    pub(super) fn cut(&self, request: Request, tag: u64) -> SmallVec<[Part; 1]> {
        let Request { op, offset, len, mut spans, .. } = request;
        let first = self.place(offset);
        if len <= first.left {
            return SmallVec::from_iter([(first.member, Request { op, offset: first.offset, len, spans, tag })]);
        }
        let mut parts: SmallVec<[Part; 1]> = SmallVec::new();
        let mut memory = Memory { spans: &mut spans, index: 0 };
        let (mut at, end) = (offset, offset + len);
        for (set, set_end) in self.sets.iter().zip(self.ends()) {
            let (parts_before, mut number) = (parts.len(), 0);
            while at >= set.start && at < end.min(set_end) {
                let place = set.place(at);
                let taken = place.left.min(end - at);
                if number < set.lies.members {
                    let part = Request { op, offset: place.offset, len: 0, spans: Spans::new(), tag };
                    parts.push((place.member, part));
                }
                // A member's units follow one another there, as they do here.
                let (_, part) = &mut parts[parts_before + number % set.lies.members];
                part.len += taken;
                memory.take(taken as usize, &mut part.spans);
                at += taken;
                number += 1;
            }
        }
        parts
    }

    /// Where each set ends on the stripe; the last one never does.
    fn ends(&self) -> impl Iterator<Item = u64> {
        self.sets[1..].iter().map(|set| set.start).chain([u64::MAX])
    }

    fn set_at(&self, offset: u64) -> &Set {
        self.sets[1..].iter().rfind(|set| set.start <= offset).unwrap_or(&self.sets[0])
    }

    fn last(&self) -> &Set {
        self.sets.last().expect("a stripe has a set")
    }
}

impl Set {
    fn place(&self, offset: u64) -> Place {
        let StripeSet { members, unit, data, .. } = self.lies;
        let at = offset - self.start;
        let (number, within) = (at / unit, at % unit);
        let row = number / members as u64;
        Place {
            member: self.first_member + (number % members as u64) as usize,
            offset: data + row * unit + within,
            left: unit - within,
        }
    }
}

/// The memory of a request that no part has taken yet.
struct Memory<'a> {
    spans: &'a mut Spans,
    index: usize,
}

impl Memory<'_> {
    /// Moves the next `len` bytes to a part's memory; of a request without memory none.
    fn take(&mut self, mut len: usize, to: &mut Spans) {
        while len > 0
            && let Some(span) = self.spans.get_mut(self.index)
        {
            let taken = len.min(span.len);
            to.push(Span { region: span.region.clone(), offset: span.offset, len: taken });
            span.offset += taken;
            span.len -= taken;
            len -= taken;
            self.index += usize::from(span.len == 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Op, Region};

    /// Sets whose data lies from byte 3 on.
    fn map(sets: &[(usize, u64, u64)]) -> StripeMap {
        let set = |&(members, unit, rows): &(usize, u64, u64)| StripeSet { members, unit, data: 3, data_len: rows * unit };
        StripeMap::new(&sets.iter().map(set).collect::<Vec<_>>())
    }

    fn sets() -> impl Strategy<Value = Vec<(usize, u64, u64)>> {
        proptest::collection::vec((1usize..5, 1u64..9, 1u64..6), 1..4)
    }

    proptest! {
        #[test]
        fn each_byte_has_one_place_and_the_way_back(sets in sets(), offset in 0u64..1000) {
            let map = map(&sets);
            let place = map.place(offset);
            prop_assert_eq!(map.volume_offset(place.member, place.offset), Some(offset));
            let next = map.place(offset + 1);
            let same_unit = (next.member, next.offset) == (place.member, place.offset + 1);
            prop_assert!(same_unit || place.left == 1 || sets.len() > 1, "{place:?} {next:?}");
            let ends = |len| map.needs(len).map(|(end, _)| end).collect::<Vec<_>>();
            prop_assert_eq!(ends(offset).len(), map.members());
            prop_assert!(ends(offset + 1)[place.member] > place.offset);
            prop_assert!(ends(offset)[place.member] <= place.offset + 8);
        }

        #[test]
        fn a_set_takes_no_byte_of_the_one_behind_it(sets in sets()) {
            let map = map(&sets);
            let held: u64 = sets[..sets.len() - 1].iter().map(|(members, unit, rows)| *members as u64 * unit * rows).sum();
            let mut seen = std::collections::HashSet::new();
            for offset in 0..held + 40 {
                let place = map.place(offset);
                prop_assert!(seen.insert((place.member, place.offset)), "byte {} lies where another does", offset);
                let behind = map.members() - sets[sets.len() - 1].0;
                prop_assert_eq!(place.member >= behind, offset >= held);
                prop_assert!(place.offset >= 3);
            }
        }

        #[test]
        fn the_parts_of_a_request_cover_it_once_each_on_its_member(
            sets in sets(), offset in 0u64..40, lens in proptest::collection::vec(1usize..9, 1..9),
        ) {
            let map = map(&sets);
            let len: usize = lens.iter().sum();
            let region = Region::allocate(len).expect("memory");
            let mut at = 0;
            let spans: Vec<Span> = lens.iter().map(|len| { at += len; region.span(at - len..at) }).collect();
            let parts = map.cut(Request::read(offset, spans), 9);
            let mut bytes = vec![None; len];
            for (member, part) in &parts {
                prop_assert_eq!((part.tag, part.op), (9, Op::Read));
                prop_assert_eq!(parts.iter().filter(|(other, _)| other == member).count(), 1, "one request for each member");
                let memory: Vec<usize> = part.spans.iter().flat_map(|span| span.offset..span.offset + span.len).collect();
                prop_assert_eq!(memory.len() as u64, part.len);
                for (at, place) in memory.into_iter().zip(part.offset..) {
                    prop_assert_eq!(bytes[at].replace((*member, place)), None, "a byte of memory is in one part");
                }
            }
            for (at, found) in bytes.into_iter().enumerate() {
                let place = map.place(offset + at as u64);
                prop_assert_eq!(found, Some((place.member, place.offset)));
            }
        }
    }

    #[test]
    fn a_request_without_memory_is_cut_by_its_length() {
        let map = StripeMap::new(&[StripeSet { members: 2, unit: 4, data: 0, data_len: 100 }]);
        let parts = map.cut(Request::discard(2, 8), 1);
        let parts: Vec<_> = parts.iter().map(|(member, part)| (*member, part.offset, part.len)).collect();
        assert_eq!(parts, [(0, 2, 4), (1, 0, 4)]);
    }
}
