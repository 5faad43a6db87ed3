//! Blocks of metadata without what a volume keeps for people: values of attributes, targets of
//! links, what is left of older items, and names, where they are to be replaced.

use std::ops::Range;

use gpunvme_layout::block::{BLOCK_SIZE, Uuid};
use gpunvme_layout::item::{EXTENT_SIZE, INODE_SIZE};
use gpunvme_layout::key::{NameHash, XATTR_PIECES};
use gpunvme_layout::superblock::SIGNATURE;
use gpunvme_layout::{
    Block, BlockKind, Corrupt, Dirent, Geometry, Key, Kind, Superblock, XattrHead, anchor, group, journal, node, state,
};

use super::alias::Aliases;

/// Bytes of an entry before its name, and of the head of an attribute.
const DIRENT_HEAD: usize = 9;
const XATTR_HEAD: usize = 5;
/// What the targets of links are made of: zeros would lead to the directory that the link is in.
const TARGET: u8 = b'x';
/// Namespaces of attributes; what follows is a name that a person or a program chose.
const CHOSEN: [&[u8]; 2] = [b"user.", b"trusted."];
/// ACLs say who may do what, as mode and owner do.
const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];

/// What takes the place of the blocks of a volume in its dump.
pub struct Scrub {
    geometry: Geometry,
    uuid: Uuid,
    names: NameHash,
    /// Other names, unless they are kept.
    aliases: Option<Aliases>,
    /// Names under another one's hash, which cannot be told of replaced names.
    pub misplaced: u64,
}

impl Scrub {
    /// For the blocks of that volume.
    pub fn new(superblock: &Superblock, aliases: Option<Aliases>) -> Scrub {
        let (geometry, uuid) = (superblock.geometry(), superblock.uuid);
        Scrub { geometry, uuid, names: superblock.name_hash(), aliases, misplaced: 0 }
    }

    /// What the dump has of a block of that kind that was read from its home. None where no block
    /// of metadata is there.
    pub fn at_home(&mut self, block: &Block, kind: BlockKind, home: u64) -> Option<Block> {
        match block.verify(kind, home, &self.uuid) {
            Ok(()) => Some(self.sound(block, kind)),
            Err(why) => stand_in(block, &why, &[]),
        }
    }

    /// What the dump has of a superblock that was read from its home, where `good` is the one that
    /// counts: a copy that differs from it does in the dump, too.
    pub fn superblock(&self, block: &Block, home: u64, good: &Block) -> Option<Block> {
        let mut scrubbed = self.copy(block, home)?;
        let is_same = self.copy(good, good.address()).is_some_and(|good| good.moved_to(home) == scrubbed);
        if is_same && *block != good.moved_to(home) {
            scrubbed.bytes_mut()[BLOCK_SIZE - 1] = 1;
            scrubbed.seal(block.sequence());
        }
        Some(scrubbed)
    }

    /// A superblock without what has no meaning.
    fn copy(&self, block: &Block, home: u64) -> Option<Block> {
        let signature = if Superblock::recognize(block.bytes()) { &[SIGNATURE][..] } else { &[] };
        match block.verify(BlockKind::Superblock, home, &self.uuid) {
            // Where it is of another version, its fields may mean anything.
            Ok(()) if Superblock::decode(block, home, u64::MAX).is_err() => Some(block.reduced_to(signature)),
            Ok(()) => match &self.aliases {
                Some(aliases) => Some(Superblock::of_dump(block, Some(&|bytes| aliases.digest(bytes)))),
                None => Some(Superblock::of_dump(block, None)),
            },
            Err(why) => stand_in(block, &why, signature),
        }
    }

    /// What the dump has of a block that verifies and is of that kind, at home or in the journal.
    pub fn sound(&mut self, block: &Block, kind: BlockKind) -> Block {
        match kind {
            BlockKind::Superblock => unreachable!("it has a home, where it is read as what it is"),
            BlockKind::Anchor => block.reduced_to(&[anchor::FIELDS]),
            BlockKind::State => block.reduced_to(&[state::FIELDS]),
            BlockKind::Descriptors => block.reduced_to(&[group::descriptor_fields(&self.geometry, block.address())]),
            BlockKind::Bitmap => block.reduced_to(&group::BITMAP_FIELDS),
            BlockKind::Journal => block.reduced_to(&journal::descriptor_fields(block)),
            BlockKind::Node => self.node(block),
        }
    }

    /// A leaf keeps the place and length of each value. One that makes no sense keeps no values.
    fn node(&mut self, block: &Block) -> Block {
        let mut scrubbed = node::without_values(block);
        if node::level(block) == 0 && node::check(block).is_ok() {
            for slot in 0..node::count(block) {
                let value = self.value(node::key(block, slot), node::value(block, slot));
                node::value_mut(&mut scrubbed, slot).copy_from_slice(&value);
            }
            scrubbed.seal(block.sequence());
        }
        scrubbed
    }

    /// The value of an item, as long as it was.
    fn value(&mut self, key: Key, value: &[u8]) -> Vec<u8> {
        let is = |kind| key.is(key.ino(), kind);
        let mut scrubbed = vec![if is(Kind::Symlink) { TARGET } else { 0 }; value.len()];
        let whole = is(Kind::Inode) && value.len() == INODE_SIZE || is(Kind::Extent) && value.len() == EXTENT_SIZE;
        let kept = match () {
            () if whole => value.len(),
            () if is(Kind::Dirent) => DIRENT_HEAD,
            () if is(Kind::Xattr) && key.offset().is_multiple_of(XATTR_PIECES) => XATTR_HEAD,
            () => 0,
        };
        let kept = kept.min(value.len());
        scrubbed[..kept].copy_from_slice(&value[..kept]);
        if is(Kind::Dirent) {
            let name = &value[kept..];
            // What cannot be a name has no hash that a check would look at.
            let can_be = Dirent::decode(key.ino(), key.offset(), value).is_ok() && !matches!(name, b"." | b"..");
            self.note(!can_be || self.names.dirent_offsets(name).contains(&key.offset()));
            scrubbed[kept..].copy_from_slice(&self.name(key.ino(), name));
        } else if kept == XATTR_HEAD
            && let Ok(head) = XattrHead::decode(key.ino(), value)
        {
            self.note(self.names.xattr_offsets(head.name).contains(&key.offset()));
            let chosen =
                CHOSEN.iter().find(|prefix| head.name.starts_with(prefix)).map_or(head.name.len(), |prefix| prefix.len());
            let (prefix, rest) = head.name.split_at(chosen);
            let name = [prefix, &self.name(key.ino(), rest)].concat();
            scrubbed[kept..kept + name.len()].copy_from_slice(&name);
            if ACLS.contains(&head.name) && head.start.len() == head.value_len as usize {
                scrubbed[kept + name.len()..].copy_from_slice(head.start);
            }
        }
        scrubbed
    }

    fn note(&mut self, in_place: bool) {
        self.misplaced += u64::from(!in_place && self.aliases.is_some());
    }

    fn name(&self, ino: u64, name: &[u8]) -> Vec<u8> {
        self.aliases.as_ref().map_or_else(|| name.to_vec(), |aliases| aliases.name(ino, name))
    }
}

/// In place of a block that is not what its home says: what is wrong with the header of the one is
/// wrong with that of the other, and besides the bytes in `kept` nothing else is in it.
fn stand_in(block: &Block, why: &Corrupt, kept: &[Range<usize>]) -> Option<Block> {
    match why {
        Corrupt::Magic { .. } => None,
        // Even the header may hold anything.
        Corrupt::Checksum { address } => {
            let mut torn = Block::new(BlockKind::Node, *address, &Uuid::default());
            kept.iter().for_each(|range| torn.bytes_mut()[range.clone()].copy_from_slice(&block.bytes()[range.clone()]));
            torn.seal(0);
            torn.bytes_mut()[BLOCK_SIZE - 1] = 1;
            Some(torn)
        }
        _ => Some(block.reduced_to(kept)),
    }
}

#[cfg(test)]
mod tests {
    use gpunvme_layout::Timestamp;
    use gpunvme_layout::superblock::Names;

    use super::*;

    fn scrub(aliases: Option<Aliases>) -> Scrub {
        let superblock = Superblock {
            uuid: [1; 16],
            names: Names::default(),
            total_blocks: 1 << 14,
            grown: Vec::new(),
            journal_blocks: 1024,
            hash_key: [2; 16],
            created: Timestamp::default(),
            unknown_ro_compat: 0,
            replaced_names: false,
        };
        Scrub::new(&superblock, aliases)
    }

    fn attribute(name: &[u8], value: &[u8]) -> Vec<u8> {
        XattrHead { value_len: value.len() as u32, name, start: value }.encode()
    }

    #[test]
    fn of_attributes_acls_stay_and_names_that_the_kernel_gave() {
        let mut scrub = scrub(Some(Aliases::new([3; 16])));
        let mut scrubbed = |name: &[u8]| {
            let value = scrub.value(Key::new(9, Kind::Xattr, 0), &attribute(name, b"value"));
            let head = XattrHead::decode(9, &value).expect("it is as long as it was");
            (head.name.to_vec(), head.start.to_vec())
        };
        assert_eq!(scrubbed(ACLS[1]), (ACLS[1].to_vec(), b"value".to_vec()));
        assert_eq!(scrubbed(b"security.selinux"), (b"security.selinux".to_vec(), vec![0; 5]));
        for prefix in CHOSEN {
            let (name, value) = scrubbed(&[prefix, b"chosen"].concat());
            assert!(name.starts_with(prefix) && !name.ends_with(b"chosen") && value == [0; 5]);
        }
    }

    #[test]
    fn values_that_are_no_item_become_zeros() {
        let mut scrub = scrub(None);
        let mut scrubbed = |kind, offset, len| {
            let value = scrub.value(Key::new(9, kind, offset), &vec![7; len]);
            (value.len(), value.iter().filter(|byte| **byte == 7).count())
        };
        assert_eq!(scrubbed(Kind::Inode, 0, INODE_SIZE), (INODE_SIZE, INODE_SIZE));
        assert_eq!(scrubbed(Kind::Inode, 0, INODE_SIZE + 1), (INODE_SIZE + 1, 0));
        assert_eq!(scrubbed(Kind::Extent, 0, EXTENT_SIZE), (EXTENT_SIZE, EXTENT_SIZE));
        assert_eq!(scrubbed(Kind::Extent, 0, 700), (700, 0));
        assert_eq!(scrubbed(Kind::Orphan, 0, 10), (10, 0));
        assert_eq!(scrubbed(Kind::Xattr, 1, 960), (960, 0), "a piece of a value");
        assert_eq!(scrubbed(Kind::Xattr, 0, 3), (3, 3), "a part of a length");
        assert_eq!(scrubbed(Kind::Dirent, 300, 9), (9, 9), "without a name");
    }
}
