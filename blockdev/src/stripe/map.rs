//! Where the bytes of a stripe lie, and how a request is cut. Pure arithmetic.
use smallvec::SmallVec;

use crate::{Request, Span, Spans};

/// How a stripe lies on its members: unit `u` is unit `u / members` of the data of member
/// `u % members`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StripeMap {
    members: usize,
    unit: u64,
    data: u64,
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
    /// A stripe of so many members, with units of `unit` bytes, whose data begins at byte `data`
    /// of each.
    ///
    /// # Panics
    /// Unless there are members and bytes in a unit.
    pub fn new(members: usize, unit: u64, data: u64) -> StripeMap {
        assert!(members > 0 && unit > 0, "{members} members with units of {unit} bytes");
        StripeMap { members, unit, data }
    }

    /// Number of members.
    pub fn members(&self) -> usize {
        self.members
    }

    /// Bytes that lie on one member before those of the next begin.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// Where the data begins on each member, in bytes.
    pub fn data(&self) -> u64 {
        self.data
    }

    /// Where a byte of the stripe lies.
    pub fn place(&self, offset: u64) -> Place {
        let (unit, within) = (offset / self.unit, offset % self.unit);
        let row = unit / self.members as u64;
        Place {
            member: (unit % self.members as u64) as usize,
            offset: self.data + row * self.unit + within,
            left: self.unit - within,
        }
    }

    /// The byte of the stripe at an offset of a member; none where the member has no data there.
    pub fn volume_offset(&self, member: usize, offset: u64) -> Option<u64> {
        let at = offset.checked_sub(self.data)?;
        Some((at / self.unit * self.members as u64 + member as u64) * self.unit + at % self.unit)
    }

    /// Where the data of a stripe of `len` bytes ends on each member.
    pub(super) fn member_end(&self, len: u64) -> u64 {
        let row = self.unit.saturating_mul(self.members as u64);
        len.div_ceil(row).saturating_mul(self.unit).saturating_add(self.data)
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
        let (mut at, end, mut number) = (offset, offset + len, 0);
        while at < end {
            let place = self.place(at);
            let taken = place.left.min(end - at);
            if number < self.members {
                let part = Request { op, offset: place.offset, len: 0, spans: Spans::new(), tag };
                parts.push((place.member, part));
            }
            // A member's units follow one another there, as they do here.
            let (_, part) = &mut parts[number % self.members];
            part.len += taken;
            memory.take(taken as usize, &mut part.spans);
            at += taken;
            number += 1;
        }
        parts
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

    proptest! {
        #[test]
        fn each_byte_has_one_place_and_the_way_back(
            members in 1usize..9, unit in 1u64..9, data in 0u64..9, offset in 0u64..1000,
        ) {
            let map = StripeMap::new(members, unit, data);
            let place = map.place(offset);
            prop_assert_eq!(map.volume_offset(place.member, place.offset), Some(offset));
            let next = map.place(offset + 1);
            let same_unit = (next.member, next.offset) == (place.member, place.offset + 1);
            prop_assert_eq!(same_unit, place.left > 1 || members == 1);
            prop_assert!(map.member_end(offset + 1) > place.offset && map.member_end(offset) <= place.offset + unit);
        }

        #[test]
        fn the_parts_of_a_request_cover_it_once_each_on_its_member(
            members in 1usize..6, unit in 1u64..5, offset in 0u64..40, lens in proptest::collection::vec(1usize..9, 1..9),
        ) {
            let map = StripeMap::new(members, unit, 3);
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
        let parts = StripeMap::new(2, 4, 0).cut(Request::discard(2, 8), 1);
        let parts: Vec<_> = parts.iter().map(|(member, part)| (*member, part.offset, part.len)).collect();
        assert_eq!(parts, [(0, 2, 4), (1, 0, 4)]);
    }
}
