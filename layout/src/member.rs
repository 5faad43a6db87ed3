//! The member superblock: what a device that is one of several of a volume says of itself. It
//! stands where a volume of one device has its superblock, and looks like one whose feature
//! "several devices" is set, so that programs which do not know members refuse it by name.
//!
//! The members are of one *set* or of several, which were added one after the other: the volume's
//! own blocks, its superblock among them, go on in the next set where those of a set end. In a set
//! they lie in *units*: unit `u` of a set of `n` members is unit `u / n` of the data area of member
//! `u % n`.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 64 | block header, with the volume's UUID |
//! | 64 | 16 | `gpunvme volume\x1a\n` |
//! | 80 | 4 | format version |
//! | 104 | 8 | incompatible features: bit 3, several devices |
//! | 112 | 8 | blocks of the volume |
//! | 160 | 64 | label of the volume |
//! | 224 | 16 | UUID of the member |
//! | 240 | 2 | index of the member in its set |
//! | 242 | 2 | members of the set |
//! | 244 | 2 | number of the set, from 0 |
//! | 246 | 2 | sets of the volume |
//! | 248 | 4 | unit, in blocks |
//! | 252 | 2 | members of the sets before it |
//! | 254 | 2 | members of all sets; 0 where there is one set |
//! | 256 | 8 | blocks of the member |
//! | 264 | 8 | first block of its data area |
//! | 272 | 8 | blocks of its data area |
//! | 280 | 8 | first block of the volume that the set holds |
//! | 288 | 8 | generation |
//! | 296 | 16 | stamp |
//! | 312 | 16 | changed UUID, as in a superblock |

use crate::block::{BLOCK_SIZE, BlockKind, Uuid};
use crate::features::{INCOMPATIBLE, SEVERAL_DEVICES};
use crate::geometry::{SUPERBLOCK, TOTAL_BLOCKS_MAX};
use crate::superblock::{LABEL_MAX, Names, VERSION, head, names, recognize};
use crate::{Block, Corrupt, le};

/// The most members of a volume.
pub const MEMBERS_MAX: u16 = 16;
/// First block of the data area on each member: 2 MiB, so that what is aligned on the volume is
/// aligned on the member.
pub const DATA: u64 = 512;
/// The unit that mkfs takes where it is told none, in blocks: 128 KiB.
pub const UNIT_DEFAULT: u32 = 32;
/// Smallest and largest unit in blocks, both powers of two as all units are: 64 KiB and 16 MiB.
pub const UNIT_RANGE: [u32; 2] = [16, 4096];

const AT_INCOMPAT: usize = 104;
const AT_TOTAL: usize = 112;
const AT_LABEL: usize = 160;
const AT_MEMBER_UUID: usize = 224;
const AT_INDEX: usize = 240;
const AT_MEMBERS: usize = 242;
const AT_SET: usize = 244;
const AT_SETS: usize = 246;
const AT_UNIT: usize = 248;
const AT_MEMBERS_BEFORE: usize = 252;
const AT_ALL_MEMBERS: usize = 254;
const AT_BLOCKS: usize = 256;
const AT_DATA: usize = 264;
const AT_DATA_BLOCKS: usize = 272;
const AT_FIRST: usize = 280;
const AT_GENERATION: usize = 288;
const AT_STAMP: usize = 296;

/// How the blocks of a set lie on its members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Striping {
    /// Members.
    pub members: u16,
    /// Blocks that lie on one member before those of the next begin.
    pub unit: u32,
    /// First block of the data area on each member.
    pub data: u64,
    /// Blocks of the data area on each member.
    pub data_blocks: u64,
}

impl Striping {
    /// The largest volume on one set of members of these sizes, in blocks. None where the smallest
    /// is too small, or the numbers are out of range.
    pub fn new(blocks: &[u64], unit: u32) -> Option<Striping> {
        Striping::behind(0, blocks, unit)
    }

    /// The largest set on members of these sizes, behind so many blocks of a volume. None as with
    /// [`Striping::new`].
    pub fn behind(before: u64, blocks: &[u64], unit: u32) -> Option<Striping> {
        Striping { members: u16::try_from(blocks.len()).ok()?, unit, data: DATA, data_blocks: 0 }.filling(before, blocks)
    }

    /// The same, behind so many blocks of the volume, on members that have become so large, in
    /// blocks, and have room for more. None where the smallest has not.
    pub fn grown(&self, before: u64, blocks: &[u64]) -> Option<Striping> {
        self.filling(before, blocks).filter(|grown| grown.data_blocks > self.data_blocks)
    }

    /// With as much data as there is room for.
    fn filling(self, before: u64, blocks: &[u64]) -> Option<Striping> {
        let smallest = blocks.iter().copied().min()?.checked_sub(self.data + 1)?;
        let most = TOTAL_BLOCKS_MAX.checked_sub(before)?.checked_div(self.members.into())?;
        let room = smallest.min(most);
        Striping { data_blocks: room - room % u64::from(self.unit.max(1)), ..self }.checked()
    }

    /// Blocks of the set.
    pub fn total_blocks(&self) -> u64 {
        self.data_blocks * u64::from(self.members)
    }

    fn checked(self) -> Option<Striping> {
        let unit = self.unit.is_power_of_two() && (UNIT_RANGE[0]..=UNIT_RANGE[1]).contains(&self.unit);
        let members = (1..=MEMBERS_MAX).contains(&self.members);
        let data = self.data_blocks > 0 && self.data_blocks.checked_mul(self.members.into())? <= TOTAL_BLOCKS_MAX;
        (unit && members && data && self.data >= 1 && self.data_blocks.is_multiple_of(self.unit.into())).then_some(self)
    }
}

/// Where a set is among those of its volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetPlace {
    /// Its number, from 0.
    pub number: u16,
    /// Sets of the volume.
    pub sets: u16,
    /// Members of the sets before it.
    pub members_before: u16,
    /// Members of all sets.
    pub members: u16,
    /// First block of the volume that it holds.
    pub first: u64,
    /// Blocks of the volume.
    pub total: u64,
}

impl SetPlace {
    /// Those of all sets of a volume, in their order.
    pub fn all(sets: &[Striping]) -> Vec<SetPlace> {
        let members = sets.iter().map(|set| set.members).sum();
        let total = sets.iter().map(Striping::total_blocks).sum();
        let (mut members_before, mut first) = (0, 0);
        let place = |(set, number): (&Striping, u16)| {
            let place = SetPlace { number, sets: sets.len() as u16, members_before, members, first, total };
            members_before += set.members;
            first += set.total_blocks();
            place
        };
        sets.iter().zip(0..).map(place).collect()
    }

    /// Whether a set that lies so can be there.
    fn holds(&self, set: &Striping) -> bool {
        let SetPlace { number, sets, members_before, members, first, total } = *self;
        let is_first = number == 0;
        let is_last = number.checked_add(1) == Some(sets);
        let end = first.checked_add(set.total_blocks());
        number < sets
            && members <= MEMBERS_MAX
            && total <= TOTAL_BLOCKS_MAX
            && (is_first == (first == 0) && is_first == (members_before == 0))
            && end.is_some_and(|end| if is_last { end == total } else { end < total })
            && members_before.checked_add(set.members).is_some_and(|end| if is_last { end == members } else { end < members })
    }
}

/// The count of openings for writing, and which opening it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Generation {
    /// 1 from mkfs; one more, or several, at each opening for writing.
    pub number: u64,
    /// Random, and new with each number: two volumes that were copies of one another get different
    /// ones.
    pub stamp: [u8; 16],
}

/// What a member says of itself, in one of its two superblocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// UUID that mkfs gave the volume.
    pub volume: Uuid,
    /// What people call the volume by.
    pub names: Names,
    /// UUID of the member.
    pub uuid: Uuid,
    /// Its index in its set, from 0.
    pub index: u16,
    /// Where its set is among those of the volume.
    pub place: SetPlace,
    /// How the set lies on its members.
    pub striping: Striping,
    /// Blocks of the member: the last one is the other superblock.
    pub blocks: u64,
    /// The generation that this superblock belongs to.
    pub generation: Generation,
}

impl Member {
    /// UUID of the volume, as people know it.
    pub fn volume_uuid(&self) -> Uuid {
        self.names.changed_uuid.unwrap_or(self.volume)
    }

    /// Its number among the members of all sets, from 0.
    pub fn number(&self) -> u16 {
        self.place.members_before + self.index
    }

    /// Addresses of the two superblocks of a member: first and last block.
    pub fn addresses(&self) -> [u64; 2] {
        [SUPERBLOCK, self.blocks - 1]
    }

    /// The stored form of the copy at `address`, sealed.
    pub fn encode(&self, address: u64) -> Block {
        let mut block = head(address, &self.volume, &self.names);
        let Striping { members, unit, data, data_blocks } = self.striping;
        let bytes = block.bytes_mut();
        let features = le::get_u64(bytes, AT_INCOMPAT);
        le::put_u64(bytes, AT_INCOMPAT, features | SEVERAL_DEVICES);
        le::put_u64(bytes, AT_TOTAL, self.place.total);
        bytes[AT_MEMBER_UUID..AT_MEMBER_UUID + 16].copy_from_slice(&self.uuid);
        le::put_u16(bytes, AT_INDEX, self.index);
        le::put_u16(bytes, AT_MEMBERS, members);
        le::put_u16(bytes, AT_SET, self.place.number);
        le::put_u16(bytes, AT_SETS, self.place.sets);
        if self.place.sets > 1 {
            le::put_u16(bytes, AT_MEMBERS_BEFORE, self.place.members_before);
            le::put_u16(bytes, AT_ALL_MEMBERS, self.place.members);
        }
        le::put_u64(bytes, AT_FIRST, self.place.first);
        le::put_u32(bytes, AT_UNIT, unit);
        le::put_u64(bytes, AT_BLOCKS, self.blocks);
        le::put_u64(bytes, AT_DATA, data);
        le::put_u64(bytes, AT_DATA_BLOCKS, data_blocks);
        le::put_u64(bytes, AT_GENERATION, self.generation.number);
        bytes[AT_STAMP..AT_STAMP + 16].copy_from_slice(&self.generation.stamp);
        block.seal(0);
        block
    }

    /// Whether the block is an intact member superblock, written to `address`, of whatever version.
    pub fn is_one(block: &Block, address: u64) -> bool {
        recognize(block.bytes())
            && block.expect(BlockKind::Superblock).is_ok()
            && block.verify_content(address).is_ok()
            && le::get_u64(block.bytes(), AT_INCOMPAT) & SEVERAL_DEVICES != 0
    }

    /// The UUID that an intact member superblock gives its member, of whatever version.
    pub fn uuid_of(block: &Block, address: u64) -> Option<Uuid> {
        let uuid = &block.bytes()[AT_MEMBER_UUID..AT_MEMBER_UUID + 16];
        Self::is_one(block, address).then(|| uuid.try_into().expect("sixteen bytes"))
    }

    /// Reads the superblock at `address`. `device_blocks`: size of the device that it was read
    /// from. None where no intact member superblock is there.
    ///
    /// # Errors
    /// Says what is wrong with the member in words that a user can act on.
    pub fn decode(block: &Block, address: u64, device_blocks: u64) -> Result<Option<Member>, Corrupt> {
        if !Self::is_one(block, address) {
            return Ok(None);
        }
        let fail = |message: String| Err(Corrupt::Superblock(message));
        let bytes = block.bytes();
        let version = le::get_u32(bytes, 80);
        if version != VERSION {
            return fail(format!("format version {version}; this program knows version {VERSION}: use a newer one"));
        }
        let unknown = INCOMPATIBLE.unknown(le::get_u64(bytes, AT_INCOMPAT));
        if unknown != 0 {
            let names = INCOMPATIBLE.names(unknown);
            return fail(format!("uses features that this program does not know: {names}; use a newer one"));
        }
        let striping = Striping {
            members: le::get_u16(bytes, AT_MEMBERS),
            unit: le::get_u32(bytes, AT_UNIT),
            data: le::get_u64(bytes, AT_DATA),
            data_blocks: le::get_u64(bytes, AT_DATA_BLOCKS),
        };
        let sets = le::get_u16(bytes, AT_SETS);
        let place = SetPlace {
            number: le::get_u16(bytes, AT_SET),
            sets,
            members_before: le::get_u16(bytes, AT_MEMBERS_BEFORE),
            members: if sets == 1 { striping.members } else { le::get_u16(bytes, AT_ALL_MEMBERS) },
            first: le::get_u64(bytes, AT_FIRST),
            total: le::get_u64(bytes, AT_TOTAL),
        };
        let (index, blocks) = (le::get_u16(bytes, AT_INDEX), le::get_u64(bytes, AT_BLOCKS));
        let checked = striping.checked().filter(|striping| {
            let end = striping.data.checked_add(striping.data_blocks);
            index < striping.members
                && place.holds(striping)
                && end.is_some_and(|end| end < blocks)
                && (address == SUPERBLOCK || address == blocks - 1)
        });
        let Some(striping) = checked else {
            return fail(format!("impossible geometry: member {index} of {blocks} blocks, {striping:?}, {place:?}"));
        };
        if blocks > device_blocks {
            let [want, have] = [blocks, device_blocks].map(|blocks| blocks.saturating_mul(BLOCK_SIZE as u64));
            return fail(format!("the member has {want} bytes, the device only {have}: it was truncated, or copied in part"));
        }
        Ok(Some(Member {
            volume: block.uuid(),
            names: names(block),
            uuid: bytes[AT_MEMBER_UUID..AT_MEMBER_UUID + 16].try_into().expect("sixteen bytes"),
            index,
            place,
            striping,
            blocks,
            generation: Generation {
                number: le::get_u64(bytes, AT_GENERATION),
                stamp: bytes[AT_STAMP..AT_STAMP + 16].try_into().expect("sixteen bytes"),
            },
        }))
    }
}

const _: () = assert!(AT_LABEL + LABEL_MAX == AT_MEMBER_UUID);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Superblock;

    const BLOCKS: u64 = 8192;

    fn member() -> Member {
        let striping = Striping::new(&[BLOCKS, BLOCKS + 100, BLOCKS + 1], 64).unwrap();
        Member {
            volume: [9; 16],
            names: Names { label: "data".into(), changed_uuid: None },
            uuid: [7; 16],
            index: 2,
            place: SetPlace::all(&[striping])[0],
            striping,
            blocks: BLOCKS,
            generation: Generation { number: 5, stamp: [6; 16] },
        }
    }

    fn changed(change: impl FnOnce(&mut [u8; BLOCK_SIZE])) -> Block {
        let mut block = member().encode(0);
        change(block.bytes_mut());
        block.seal(0);
        block
    }

    #[test]
    fn it_survives_the_round_trip() {
        for address in member().addresses() {
            assert_eq!(Member::decode(&member().encode(address), address, BLOCKS), Ok(Some(member())));
        }
        assert_eq!(Member::decode(&member().encode(0), 1, BLOCKS), Ok(None), "it was read from another place");
        assert_eq!(Member::uuid_of(&member().encode(0), 0), Some([7; 16]));
    }

    #[test]
    fn every_field_is_at_its_offset() {
        let striping = Striping { members: 0x000b, unit: 0x0400, data: 0x0203, data_blocks: 0x1000_0000 };
        let member = Member {
            names: Names { label: "L".repeat(LABEL_MAX), changed_uuid: Some([0x33; 16]) },
            index: 0x0001,
            place: SetPlace { number: 2, sets: 3, members_before: 5, members: 16, first: 0x88, total: 0xb000_0088 },
            striping,
            blocks: 0x5555_5555_5555,
            generation: Generation { number: 0x6666_6666_6666_6666, stamp: [0x77; 16] },
            ..member()
        };
        let block = member.encode(0);
        let mut expected = [0; BLOCK_SIZE];
        expected[..64].copy_from_slice(&block.bytes()[..64]); // the header, which `block` tests
        expected[64..80].copy_from_slice(b"gpunvme volume\x1a\n");
        expected[80] = 1;
        expected[104] = 0b1_1000;
        expected[112] = 0x88;
        expected[115] = 0xb0;
        expected[160..224].fill(b'L');
        expected[224..240].fill(7);
        expected[240] = 1;
        expected[242] = 0x0b;
        expected[244] = 2;
        expected[246] = 3;
        expected[249] = 4;
        expected[252] = 5;
        expected[254] = 16;
        expected[256..262].fill(0x55);
        expected[264..266].copy_from_slice(&[3, 2]);
        expected[275] = 0x10;
        expected[280] = 0x88;
        expected[288..296].fill(0x66);
        expected[296..312].fill(0x77);
        expected[312..328].fill(0x33);
        let differs = (0..BLOCK_SIZE).find(|&at| block.bytes()[at] != expected[at]);
        assert_eq!(differs, None, "the byte at this offset");
        assert_eq!(Member::decode(&block, 0, u64::MAX), Ok(Some(member)));
    }

    #[test]
    fn a_volume_takes_as_much_of_each_member_as_the_smallest_has() {
        let striping = Striping::new(&[10_000, 9_000, 20_000, 9_001], 64).unwrap();
        assert_eq!((striping.data, striping.data_blocks), (512, (9_000 - 513) / 64 * 64));
        assert_eq!(striping.total_blocks(), 4 * striping.data_blocks);
        assert_eq!(Striping::new(&[1 << 44; 8], 64).unwrap().total_blocks(), TOTAL_BLOCKS_MAX);
        for (blocks, unit) in
            [(&[][..], 64), (&[9000; 17], 64), (&[9000, 500], 64), (&[9000; 2], 48), (&[9000; 2], 8), (&[9000; 2], 0)]
        {
            assert_eq!(Striping::new(blocks, unit), None, "{} members, unit {unit}", blocks.len());
        }
    }

    #[test]
    fn members_that_became_larger_have_more_of_the_volume() {
        let striping = Striping::new(&[10_000, 9_000], 64).unwrap();
        let grown = striping.grown(0, &[20_000, 19_000]).unwrap();
        assert_eq!((grown.data, grown.data_blocks), (striping.data, (19_000 - 513) / 64 * 64));
        assert_eq!(striping.grown(0, &[20_000, 9_000]), None, "the smallest counts");
        assert_eq!(striping.grown(0, &[20_000, 8_000]), None);
        let behind = TOTAL_BLOCKS_MAX - 2 * striping.data_blocks;
        assert_eq!(striping.grown(behind, &[20_000, 20_000]), None, "the volume is as large as one can be");
    }

    #[test]
    fn sets_lie_one_behind_the_other() {
        let first = Striping::new(&[9_000; 3], 64).unwrap();
        let second = Striping::behind(first.total_blocks(), &[7_000], 64).unwrap();
        let third = Striping::behind(0, &[5_000; 2], 64).unwrap();
        let places = SetPlace::all(&[first, second, third]);
        let ends = [first.total_blocks(), first.total_blocks() + second.total_blocks()];
        assert_eq!(places.iter().map(|place| place.first).collect::<Vec<_>>(), [0, ends[0], ends[1]]);
        assert_eq!(places.iter().map(|place| place.members_before).collect::<Vec<_>>(), [0, 3, 4]);
        assert!(places.iter().all(|place| (place.sets, place.members) == (3, 6)));
        assert!(places.iter().all(|place| place.total == ends[1] + third.total_blocks()));
        for (place, striping) in places.into_iter().zip([first, second, third]) {
            let member = Member { index: 0, place, striping, blocks: 9_000, ..member() };
            assert_eq!(Member::decode(&member.encode(0), 0, 9_000), Ok(Some(member.clone())));
            assert_eq!(member.number(), place.members_before);
        }
        let full = Striping::behind(TOTAL_BLOCKS_MAX - 640, &[9_000; 2], 64).unwrap();
        assert_eq!(full.total_blocks(), 640);
        assert_eq!(Striping::behind(TOTAL_BLOCKS_MAX, &[9_000; 2], 64), None);
        assert_eq!(Striping::behind(0, &[], 64), None);
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_its_reason() {
        let message = |block: &Block| Member::decode(block, 0, BLOCKS).unwrap_err().to_string();
        assert!(Member::decode(&member().encode(0), 0, 1000).unwrap_err().to_string().contains("truncated"));
        assert!(message(&changed(|b| b[80] = 2)).contains("format version 2"));
        assert!(message(&changed(|b| b[AT_INCOMPAT] |= 1)).contains("data checksums"));
        for at in [AT_INDEX, AT_MEMBERS, AT_UNIT, AT_DATA_BLOCKS, AT_TOTAL, AT_SET, AT_SETS, AT_MEMBERS_BEFORE, AT_FIRST] {
            assert!(message(&changed(|b| b[at] += 5)).contains("impossible geometry"), "the field at {at}");
        }
        assert!(message(&changed(|b| b[AT_DATA + 7] = 0xff)).contains("impossible geometry"));
        // Whatever numbers: they are never added up before they were looked at.
        for at in AT_INDEX..AT_STAMP {
            for (width, device) in [(2, BLOCKS), (4, BLOCKS), (8, BLOCKS), (2, u64::MAX), (4, u64::MAX), (8, u64::MAX)] {
                let _ = Member::decode(&changed(|b| b[at..at + width].fill(0xff)), 0, device);
            }
        }
    }

    #[test]
    fn a_volume_of_one_device_is_no_member_and_a_member_no_volume() {
        let refused = Superblock::decode(&member().encode(0), 0, BLOCKS).unwrap_err().to_string();
        assert!(refused.contains("one of several devices"), "{refused}");
        let identity = Superblock::identify(&member().encode(0), 0).unwrap();
        assert_eq!((identity.uuid, &identity.label[..]), ([9; 16], "data"));
        assert_eq!(Member::decode(&changed(|b| b[AT_INCOMPAT] = 0), 0, BLOCKS), Ok(None));
    }
}
