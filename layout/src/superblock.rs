//! The superblock: identity, size and features of a volume. mkfs writes it in three copies; a
//! mount does not change it.
//!
//! The UUID that mkfs gave stays in the header of every metadata block. Where the volume was given
//! another one later, that is a field of the superblock, and a feature tells so.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 64 | block header |
//! | 64 | 16 | `gpunvme volume\x1a\n` |
//! | 80 | 4 | format version |
//! | 84 | 4 | reserved, zero |
//! | 88 | 8 | compatible features: a mount may ignore those it does not know |
//! | 96 | 8 | read-only compatible features: unknown ones allow reading only |
//! | 104 | 8 | incompatible features: unknown ones refuse the mount |
//! | 112 | 8 | blocks of the first region |
//! | 120 | 8 | journal blocks |
//! | 128 | 16 | key of the name hash |
//! | 144 | 12 | time of creation: seconds (8), nanoseconds (4) |
//! | 156 | 4 | reserved, zero |
//! | 160 | 64 | label, UTF-8, padded with zeros |
//! | 312 | 16 | changed UUID, where that feature is set |
//! | 328 | 2 | regions behind the first, where that feature is set |
//! | 336 | 8 each | the block behind the last one of each, 15 at the most |
//!
//! The features themselves are in [`crate::features`].

use std::ops::Range;

use crate::block::{BLOCK_SIZE, BlockKind, Uuid};
use crate::features::{CHANGED_UUID, INCOMPATIBLE, READ_ONLY_COMPATIBLE, REPLACED_NAMES, SEVERAL_DEVICES, SEVERAL_REGIONS};
use crate::geometry::{REGIONS_MAX, SUPERBLOCK};
use crate::key::NameHash;
use crate::{Block, Corrupt, Geometry, Timestamp, le};

/// Version of the format that this code reads and writes.
pub const VERSION: u32 = 1;
/// Longest label in bytes.
pub const LABEL_MAX: usize = 64;

/// What is said of a device whose superblock and its copy at the end are none.
const NO_VOLUME: &str =
    "no gpunvme filesystem is here: mkfs.gpunvme makes one; where there was one, `fsck.gpunvme -n` looks for what is left of it";

/// Bytes by which a superblock is recognized, intact or not.
pub const SIGNATURE: Range<usize> = AT_SIGNATURE..AT_SIGNATURE + 16;

const MARK: &[u8; 16] = b"gpunvme volume\x1a\n";
const AT_SIGNATURE: usize = 64;
const AT_VERSION: usize = 80;
const AT_COMPAT: usize = 88;
const AT_RO_COMPAT: usize = 96;
const AT_INCOMPAT: usize = 104;
const AT_TOTAL: usize = 112;
const AT_JOURNAL: usize = 120;
const AT_HASH_KEY: usize = 128;
const AT_CREATED: usize = 144;
const AT_LABEL: usize = 160;
const AT_CHANGED_UUID: usize = 312;
const AT_REGIONS: usize = 328;
const AT_REGION_ENDS: usize = 336;

/// Bytes of the block that mean something, besides the header.
const FIELDS: [Range<usize>; 6] = [
    AT_SIGNATURE..AT_VERSION + 4,
    AT_COMPAT..AT_CREATED + 12,
    AT_LABEL..AT_LABEL + LABEL_MAX,
    AT_CHANGED_UUID..AT_CHANGED_UUID + 16,
    AT_REGIONS..AT_REGIONS + 2,
    AT_REGION_ENDS..AT_REGION_ENDS + 8 * (REGIONS_MAX - 1),
];

/// Makes of bytes a number that says nothing of them but whether they are the same.
pub type Digest<'a> = &'a dyn Fn(&[u8]) -> u128;

/// What people call a volume by; it can be changed after mkfs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// Label, at most [`LABEL_MAX`] bytes, empty where there is none.
    pub label: String,
    /// UUID instead of the one that mkfs gave.
    pub changed_uuid: Option<Uuid>,
}

/// What a volume is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// UUID that mkfs gave; in the header of every metadata block.
    pub uuid: Uuid,
    /// What people call it by.
    pub names: Names,
    /// Size in blocks that mkfs gave the volume: the first region.
    pub total_blocks: u64,
    /// The block behind the last one of each region that it has grown by.
    pub grown: Vec<u64>,
    /// Length of the journal in blocks.
    pub journal_blocks: u64,
    /// Key of the hash that orders names: without it names cannot be made to collide.
    pub hash_key: [u8; 16],
    /// When the volume was made.
    pub created: Timestamp,
    /// Read-only compatible features that this code does not know: the volume can be read, not
    /// written.
    pub unknown_ro_compat: u64,
    /// It is a dump of a volume's metadata, with other names than that has.
    pub replaced_names: bool,
}

/// What tells one volume from another, of whatever version of the format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// UUID of the filesystem.
    pub uuid: Uuid,
    /// Label, empty where there is none.
    pub label: String,
    /// Version of the format.
    pub version: u32,
}

impl Superblock {
    /// The layout of the volume.
    pub fn geometry(&self) -> Geometry {
        layout(self.total_blocks, self.journal_blocks, &self.grown).expect("checked when it was decoded or made")
    }

    /// The stored form of the copy at `address`, sealed.
    pub fn encode(&self, address: u64) -> Block {
        let mut block = head(address, &self.uuid, &self.names);
        let bytes = block.bytes_mut();
        le::put_u64(bytes, AT_TOTAL, self.total_blocks);
        le::put_u64(bytes, AT_JOURNAL, self.journal_blocks);
        bytes[AT_HASH_KEY..AT_HASH_KEY + 16].copy_from_slice(&self.hash_key);
        put_regions(&mut block, &self.grown);
        let bytes = block.bytes_mut();
        if self.replaced_names {
            let features = le::get_u64(bytes, AT_INCOMPAT) | REPLACED_NAMES;
            le::put_u64(bytes, AT_INCOMPAT, features);
        }
        le::put_u64(bytes, AT_CREATED, self.created.seconds as u64);
        le::put_u32(bytes, AT_CREATED + 8, self.created.nanoseconds);
        block.seal(0);
        block
    }

    /// Where names are among the keys.
    pub fn name_hash(&self) -> NameHash {
        NameHash { key: self.hash_key, replaced: self.replaced_names }
    }

    /// UUID of the volume, as people know it.
    pub fn volume_uuid(&self) -> Uuid {
        self.names.changed_uuid.unwrap_or(self.uuid)
    }

    /// A superblock, intact and of a known version, with other names, sealed for the same address.
    pub fn renamed(block: &Block, names: &Names) -> Block {
        let mut block = block.clone();
        put_names(&mut block, names);
        block.seal(block.sequence());
        block
    }

    /// A superblock, intact and of a known version, of a volume with these regions, sealed for the
    /// same address.
    pub fn grown(block: &Block, grown: &[u64]) -> Block {
        let mut block = block.clone();
        put_regions(&mut block, grown);
        block.seal(block.sequence());
        block
    }

    /// What a superblock, intact and of a known version, says of a dump of its volume, sealed for
    /// the same address. In a dump with replaced names `digest` makes the label of the label, and
    /// the key of the hash of the key: with the volume's own, names that are guessed could be told
    /// from others.
    pub fn of_dump(block: &Block, digest: Option<Digest>) -> Block {
        let mut dump = block.reduced_to(&FIELDS);
        if let Some(digest) = digest {
            let stored = &block.bytes()[AT_LABEL..AT_LABEL + LABEL_MAX];
            let is_empty = stored.iter().all(|byte| *byte == 0);
            let label = if is_empty { String::new() } else { format!("{:032x}", digest(stored)) };
            put_names(&mut dump, &Names { label, ..names(block) });
            let bytes = dump.bytes_mut();
            let hash_key = digest(&block.bytes()[AT_HASH_KEY..AT_HASH_KEY + 16]);
            bytes[AT_HASH_KEY..AT_HASH_KEY + 16].copy_from_slice(&hash_key.to_le_bytes());
            let features = le::get_u64(bytes, AT_INCOMPAT) | REPLACED_NAMES;
            le::put_u64(bytes, AT_INCOMPAT, features);
        }
        dump.seal(block.sequence());
        dump
    }

    /// Whether the bytes look like a gpunvme superblock, intact or not.
    pub fn recognize(bytes: &[u8; BLOCK_SIZE]) -> bool {
        recognize(bytes)
    }

    /// Whether something else lies in the place of a superblock: neither one of whatever state, nor
    /// nothing.
    pub fn is_displaced(block: &Block) -> bool {
        !block.has_magic() && block.bytes().iter().any(|byte| *byte != 0)
    }

    /// Whether the block is a superblock as it was written to `address`, of whatever version.
    pub fn is_intact(block: &Block, address: u64) -> bool {
        let is_one = Self::recognize(block.bytes()) && block.expect(BlockKind::Superblock).is_ok();
        is_one && block.verify_content(address).is_ok()
    }

    /// The identity of the volume that `block`, read from `address`, is an intact superblock of.
    pub fn identify(block: &Block, address: u64) -> Option<Identity> {
        let identity = || {
            let Names { label, changed_uuid } = names(block);
            let uuid = changed_uuid.unwrap_or_else(|| block.uuid());
            Identity { uuid, label, version: le::get_u32(block.bytes(), AT_VERSION) }
        };
        Self::is_intact(block, address).then(identity)
    }

    /// Reads the copy at `address`. `device_blocks`: size of the device that it was read from.
    ///
    /// # Errors
    /// Says what is wrong with the volume in words that a user can act on.
    pub fn decode(block: &Block, address: u64, device_blocks: u64) -> Result<Superblock, Corrupt> {
        let bytes = block.bytes();
        let fail = |message: String| Err(Corrupt::Superblock(message));
        if !Self::recognize(bytes) {
            return fail(NO_VOLUME.into());
        }
        block.verify_content(address)?;
        block.expect(BlockKind::Superblock)?;
        let version = le::get_u32(bytes, AT_VERSION);
        if version != VERSION {
            return fail(format!("format version {version}; this program knows version {VERSION}: use a newer one"));
        }
        let features = le::get_u64(bytes, AT_INCOMPAT);
        let unknown = INCOMPATIBLE.unknown(features);
        if unknown != 0 {
            let names = INCOMPATIBLE.names(unknown);
            return fail(format!("uses features that this program does not know: {names}; use a newer one"));
        }
        if features & SEVERAL_DEVICES != 0 {
            return fail("this is one of several devices of a volume: the others are needed, too".into());
        }
        let total_blocks = le::get_u64(bytes, AT_TOTAL);
        let journal_blocks = le::get_u64(bytes, AT_JOURNAL);
        let grown = if features & SEVERAL_REGIONS != 0 { regions(block) } else { Vec::new() };
        let Some(geometry) = layout(total_blocks, journal_blocks, &grown) else {
            return fail(format!(
                "impossible geometry: {total_blocks} blocks with a journal of {journal_blocks}, grown to {grown:?}"
            ));
        };
        if geometry.total_blocks > device_blocks {
            let (want, have) = (geometry.total_blocks * BLOCK_SIZE as u64, device_blocks * BLOCK_SIZE as u64);
            return fail(format!(
                "the volume has {want} bytes, the device only {have}: it was truncated, or copied in part; copy all of it \
                 again, or, of an image, save what is left: `truncate -s {want}` it, then fsck.gpunvme -y"
            ));
        }
        Ok(Superblock {
            uuid: block.uuid(),
            names: names(block),
            total_blocks,
            grown,
            journal_blocks,
            hash_key: bytes[AT_HASH_KEY..AT_HASH_KEY + 16].try_into().expect("sixteen bytes"),
            created: Timestamp {
                seconds: le::get_u64(bytes, AT_CREATED) as i64,
                nanoseconds: le::get_u32(bytes, AT_CREATED + 8),
            },
            unknown_ro_compat: READ_ONLY_COMPATIBLE.unknown(le::get_u64(bytes, AT_RO_COMPAT)),
            replaced_names: features & REPLACED_NAMES != 0,
        })
    }

    /// Address of the first copy.
    pub const ADDRESS: u64 = SUPERBLOCK;
}

/// A superblock with what those of volumes and of members have in common, not sealed yet.
pub(crate) fn head(address: u64, uuid: &Uuid, names: &Names) -> Block {
    let mut block = Block::new(BlockKind::Superblock, address, uuid);
    let bytes = block.bytes_mut();
    bytes[SIGNATURE].copy_from_slice(MARK);
    le::put_u32(bytes, AT_VERSION, VERSION);
    put_names(&mut block, names);
    block
}

fn put_names(block: &mut Block, names: &Names) {
    let Names { label, changed_uuid } = names;
    assert!(label.len() <= LABEL_MAX);
    let bytes = block.bytes_mut();
    bytes[AT_LABEL..AT_LABEL + LABEL_MAX].fill(0);
    bytes[AT_LABEL..AT_LABEL + label.len()].copy_from_slice(label.as_bytes());
    let others = le::get_u64(bytes, AT_INCOMPAT) & !CHANGED_UUID;
    le::put_u64(bytes, AT_INCOMPAT, others | if changed_uuid.is_some() { CHANGED_UUID } else { 0 });
    bytes[AT_CHANGED_UUID..AT_CHANGED_UUID + 16].copy_from_slice(&changed_uuid.unwrap_or_default());
}

/// The layout of a volume that mkfs made so large, and that has grown so; `None` where it cannot
/// be.
fn layout(total_blocks: u64, journal_blocks: u64, grown: &[u64]) -> Option<Geometry> {
    let first = Geometry::new(total_blocks, journal_blocks)?;
    grown.iter().try_fold(first, |geometry, end| geometry.grown(*end))
}

fn put_regions(block: &mut Block, grown: &[u64]) {
    assert!(grown.len() < REGIONS_MAX);
    let bytes = block.bytes_mut();
    let others = le::get_u64(bytes, AT_INCOMPAT) & !SEVERAL_REGIONS;
    le::put_u64(bytes, AT_INCOMPAT, others | if grown.is_empty() { 0 } else { SEVERAL_REGIONS });
    le::put_u16(bytes, AT_REGIONS, grown.len() as u16);
    for (number, end) in grown.iter().enumerate() {
        le::put_u64(bytes, AT_REGION_ENDS + 8 * number, *end);
    }
}

/// The ends of the regions behind the first. Of more than there can be, too many.
fn regions(block: &Block) -> Vec<u64> {
    let count = usize::from(le::get_u16(block.bytes(), AT_REGIONS)).clamp(1, REGIONS_MAX);
    (0..count).map(|number| le::get_u64(block.bytes(), AT_REGION_ENDS + 8 * number)).collect()
}

/// Whether the bytes look like a superblock of a volume or a member, intact or not.
pub(crate) fn recognize(bytes: &[u8; BLOCK_SIZE]) -> bool {
    bytes[SIGNATURE] == *MARK
}

pub(crate) fn names(block: &Block) -> Names {
    let bytes = block.bytes();
    let label = bytes[AT_LABEL..AT_LABEL + LABEL_MAX].split(|byte| *byte == 0).next().unwrap_or_default();
    let changed = le::get_u64(bytes, AT_INCOMPAT) & CHANGED_UUID != 0;
    // What is no UTF-8 becomes longer.
    let mut label = String::from_utf8_lossy(label).into_owned();
    label.truncate((0..=LABEL_MAX).rev().find(|at| label.is_char_boundary(*at)).unwrap_or(0));
    Names {
        label,
        changed_uuid: changed.then(|| bytes[AT_CHANGED_UUID..AT_CHANGED_UUID + 16].try_into().expect("sixteen bytes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        Superblock {
            uuid: [9; 16],
            names: Names { label: "data".into(), changed_uuid: None },
            total_blocks: 1 << 20,
            grown: Vec::new(),
            journal_blocks: 4096,
            hash_key: [4; 16],
            created: Timestamp { seconds: 5, nanoseconds: 6 },
            unknown_ro_compat: 0,
            replaced_names: false,
        }
    }

    fn changed(change: impl FnOnce(&mut [u8; BLOCK_SIZE])) -> Block {
        let mut block = superblock().encode(0);
        change(block.bytes_mut());
        block.seal(0);
        block
    }

    #[test]
    fn it_survives_the_round_trip() {
        assert_eq!(Superblock::decode(&superblock().encode(7), 7, 1 << 20), Ok(superblock()));
    }

    #[test]
    fn a_volume_of_another_version_has_its_identity() {
        let newer = changed(|bytes| bytes[AT_VERSION] = 2);
        let identity = Identity { uuid: [9; 16], label: "data".into(), version: 2 };
        assert_eq!(Superblock::identify(&newer, 0), Some(identity));
        assert_eq!(Superblock::identify(&newer, 1), None, "it was read from another place");
        assert_eq!(Superblock::identify(&Block::from_bytes(&[0; BLOCK_SIZE]), 0), None);
    }

    #[test]
    fn every_field_is_at_its_offset() {
        let superblock = Superblock {
            uuid: [0x11; 16],
            names: Names { label: "L".repeat(LABEL_MAX), changed_uuid: Some([0x77; 16]) },
            total_blocks: 0x2222_2222,
            grown: vec![0x4444_4444, 0x5555_5555],
            journal_blocks: 0x33_3333,
            hash_key: [0x44; 16],
            created: Timestamp { seconds: 0x5555_5555_5555_5555, nanoseconds: 0x6666_6666 },
            unknown_ro_compat: 0,
            replaced_names: true,
        };
        let block = superblock.encode(0);
        let mut expected = [0; BLOCK_SIZE];
        expected[..64].copy_from_slice(&block.bytes()[..64]); // the header, which `block` tests
        expected[64..80].copy_from_slice(b"gpunvme volume\x1a\n");
        expected[80] = 1;
        expected[104] = 0b111_0000;
        expected[112..116].fill(0x22);
        expected[120..123].fill(0x33);
        expected[128..144].fill(0x44);
        expected[144..152].fill(0x55);
        expected[152..156].fill(0x66);
        expected[160..224].fill(b'L');
        expected[312..328].fill(0x77);
        expected[328] = 2;
        expected[336..340].fill(0x44);
        expected[344..348].fill(0x55);
        let differs = (0..BLOCK_SIZE).find(|&at| block.bytes()[at] != expected[at]);
        assert_eq!(differs, None, "the byte at this offset");
    }

    #[test]
    fn growth_changes_nothing_else_and_what_cannot_be_is_refused() {
        let old = superblock();
        let grown = Superblock::grown(&old.encode(0), &[2 << 20, 3 << 20]);
        let expected = Superblock { grown: vec![2 << 20, 3 << 20], ..old.clone() };
        assert_eq!(Superblock::decode(&grown, 0, 3 << 20), Ok(expected.clone()));
        assert_eq!(expected.geometry().total_blocks, 3 << 20);
        assert!(Superblock::decode(&grown, 0, (3 << 20) - 1).unwrap_err().to_string().contains("truncated"));
        let refused = |ends: &[u64]| Superblock::decode(&Superblock::grown(&old.encode(0), ends), 0, u64::MAX).unwrap_err();
        for ends in [&[1 << 20][..], &[(1 << 20) + 5], &[2 << 20, 2 << 20], &[3 << 20, 2 << 20], &[1 << 45]] {
            assert!(refused(ends).to_string().contains("impossible geometry"), "{ends:?}");
        }
        let mut counts_too_many = grown;
        counts_too_many.bytes_mut()[AT_REGIONS] = 0xff;
        counts_too_many.seal(0);
        assert!(Superblock::decode(&counts_too_many, 0, u64::MAX).unwrap_err().to_string().contains("impossible geometry"));
    }

    #[test]
    fn other_names_change_nothing_else() {
        let stored = changed(|bytes| bytes[88..96].fill(0xff)); // features that this program ignores
        for (label, changed_uuid) in [("x", None), ("", Some([5; 16])), ("data", Some([5; 16]))] {
            let names = Names { label: label.into(), changed_uuid };
            let renamed = Superblock::renamed(&stored, &names);
            let expected = Superblock { names: names.clone(), ..superblock() };
            assert_eq!(Superblock::decode(&renamed, 0, 1 << 20), Ok(expected.clone()));
            assert_eq!(Superblock::identify(&renamed, 0).unwrap().uuid, expected.volume_uuid());
            assert_eq!(Superblock::renamed(&renamed, &superblock().names), stored, "and back");
        }
    }

    #[test]
    fn the_superblock_of_a_dump_tells_no_names() {
        let stored = changed(|bytes| bytes[1000..2000].fill(0xff));
        let kept = Superblock::of_dump(&stored, None);
        assert_eq!(kept, superblock().encode(0), "the same without what has no meaning");
        let digest = |bytes: &[u8]| bytes.iter().map(|byte| u128::from(*byte)).sum();
        let expected = Superblock {
            names: Names { label: format!("{:032x}", digest(b"data")), changed_uuid: None },
            hash_key: 64u128.to_le_bytes(),
            replaced_names: true,
            ..superblock()
        };
        assert_eq!(Superblock::of_dump(&stored, Some(&digest)), expected.encode(0));
        assert_eq!(Superblock::decode(&expected.encode(0), 0, 1 << 20), Ok(expected));
        let nameless = Superblock { names: Names::default(), ..superblock() };
        let dump = Superblock::of_dump(&nameless.encode(0), Some(&digest));
        assert_eq!(names(&dump).label, "", "there was none");
    }

    #[test]
    fn a_label_that_is_no_text_can_be_written_again() {
        let block = changed(|bytes| bytes[AT_LABEL..AT_LABEL + LABEL_MAX].fill(0xff));
        let label = Superblock::decode(&block, 0, 1 << 20).unwrap().names.label;
        assert_eq!(label, "\u{fffd}".repeat(LABEL_MAX / 3));
        let again = Superblock::renamed(&block, &Names { label: label.clone(), changed_uuid: None });
        assert_eq!(names(&again).label, label);
    }

    #[test]
    fn compatible_features_are_ignored() {
        assert_eq!(Superblock::decode(&changed(|b| b[88..96].fill(0xff)), 0, 1 << 20), Ok(superblock()));
    }

    #[test]
    fn what_cannot_be_mounted_is_refused_with_its_reason() {
        let message = |block: &Block, device| Superblock::decode(block, 0, device).unwrap_err().to_string();
        assert!(message(&superblock().encode(0), 1000).contains("truncated"));
        assert!(message(&changed(|b| b[AT_VERSION] = 2), 1 << 20).contains("format version 2"));
        assert!(message(&changed(|b| b[AT_INCOMPAT] = 0b10), 1 << 20).contains("shared extents"));
        assert!(message(&changed(|b| b[AT_INCOMPAT + 7] = 0x80), 1 << 20).contains("bit 63"));
        assert!(message(&changed(|b| b[AT_TOTAL..AT_TOTAL + 8].fill(0xff)), 1 << 20).contains("geometry"));
        assert!(message(&Block::from_bytes(&[0; BLOCK_SIZE]), 1 << 20).contains("no gpunvme filesystem"));
    }

    #[test]
    fn unknown_read_only_features_are_reported() {
        let block = changed(|b| b[AT_RO_COMPAT] = 1);
        assert_eq!(Superblock::decode(&block, 0, 1 << 20).unwrap().unknown_ro_compat, 1);
    }
}
