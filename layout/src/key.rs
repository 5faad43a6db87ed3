//! Keys of the tree.
//!
//! A key is (inode, kind, offset), ordered in that order, packed into 16 bytes:
//! `inode << 8 | kind` and the offset, so that a comparison is one comparison of 128-bit integers.
//! All that belongs to an inode lies side by side.

use std::hash::Hasher;
use std::ops::RangeInclusive;

use siphasher::sip::SipHasher13;

/// Highest inode number that a key can hold.
pub const INO_MAX: u64 = (1 << 56) - 1;
/// Inode number under which the filesystem keeps items that belong to no inode.
pub const INO_NONE: u64 = 0;
/// The root directory.
pub const INO_ROOT: u64 = 1;

/// What an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// [`crate::Inode`]; offset 0.
    Inode = 1,
    /// Target of a symbolic link; offset: number of the piece.
    Symlink = 2,
    /// [`crate::Dirent`]; offset: [`dirent_offset`].
    Dirent = 3,
    /// [`crate::item::XattrHead`] and the pieces that follow; offset: [`xattr_offset`].
    Xattr = 4,
    /// [`crate::Extent`]; offset: first block of the file that it maps.
    Extent = 5,
    /// An inode without a name, or one whose truncation was not finished; under [`INO_NONE`],
    /// offset: the inode. Empty payload.
    Orphan = 6,
    // 7: checksums of data, 8: shared extents, 9: inline data. Not in use; volumes that have them
    // say so in a feature bit.
}

/// Key of an item.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u128);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "({}, {}, {:#x})", self.ino(), self.kind(), self.offset())
    }
}

impl Key {
    /// The lowest key.
    pub const MIN: Key = Key(0);

    /// The key of an item.
    #[inline]
    pub fn new(ino: u64, kind: Kind, offset: u64) -> Key {
        assert!(ino <= INO_MAX, "inode numbers have 56 bits");
        Key(u128::from(ino << 8 | kind as u64) << 64 | u128::from(offset))
    }

    /// The key of an inode.
    #[inline]
    pub fn inode(ino: u64) -> Key {
        Key::new(ino, Kind::Inode, 0)
    }

    /// The two words that are stored; ordered as keys are.
    #[inline]
    pub fn words(self) -> (u64, u64) {
        ((self.0 >> 64) as u64, self.0 as u64)
    }

    /// The key that is stored as these words.
    #[inline]
    pub fn from_words(object: u64, offset: u64) -> Key {
        Key(u128::from(object) << 64 | u128::from(offset))
    }

    /// Inode that the item belongs to.
    #[inline]
    pub fn ino(self) -> u64 {
        (self.0 >> 72) as u64
    }

    /// Kind, as stored: it may be one that this version does not know.
    #[inline]
    pub fn kind(self) -> u8 {
        (self.0 >> 64) as u8
    }

    /// Whether it is an item of that kind of that inode.
    #[inline]
    pub fn is(self, ino: u64, kind: Kind) -> bool {
        self.ino() == ino && self.kind() == kind as u8
    }

    /// Offset.
    #[inline]
    pub fn offset(self) -> u64 {
        self.0 as u64
    }

    /// The key before, if there is one.
    pub fn predecessor(self) -> Option<Key> {
        self.0.checked_sub(1).map(Key)
    }

    /// The key after; the highest one is its own.
    pub fn successor(self) -> Key {
        Key(self.0.saturating_add(1))
    }
}

/// Bits of a directory offset that tell entries with the same hash apart.
pub const DIRENT_SLOTS: u64 = 1 << 8;
/// Offsets that an entry can have: readers of a directory get them as `off_t`, and the lowest are
/// those of `.` and `..`.
pub const DIRENT_OFFSETS: RangeInclusive<u64> = DIRENT_SLOTS..=i64::MAX as u64;

/// First of the offsets where an entry of that name may be: 55 bits of a keyed hash, then 8 bits
/// that tell names with the same hash apart. Never below 256, so that the offsets 0 to 2 are free
/// for `.` and `..`, and never negative as an `off_t`.
pub fn dirent_offset(hash_key: &[u8; 16], name: &[u8]) -> u64 {
    let hash = name_hash(hash_key, name) >> 9;
    hash.max(1) << 8
}

/// Pieces that the value of an extended attribute can have.
pub const XATTR_PIECES: u64 = 1 << 16;
/// Extended attributes of one inode that may share a hash.
pub const XATTR_SLOTS: u64 = 1 << 8;

/// First of the offsets where an attribute of that name may be: 40 bits of a keyed hash, 8 bits
/// that tell names with the same hash apart, 16 bits for the number of the piece.
pub fn xattr_offset(hash_key: &[u8; 16], name: &[u8]) -> u64 {
    name_hash(hash_key, name) >> 24 << 24
}

/// Where the names of a volume are among its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NameHash {
    /// Key of the hash.
    pub key: [u8; 16],
    /// The names were replaced: each lies where the one did whose place it has, so that a search
    /// has to look everywhere.
    pub replaced: bool,
}

impl NameHash {
    /// Offsets where an entry of that name may be; a new one goes to the first free place from
    /// [`dirent_offset`] on.
    pub fn dirent_offsets(&self, name: &[u8]) -> RangeInclusive<u64> {
        let first = dirent_offset(&self.key, name);
        if self.replaced { DIRENT_OFFSETS } else { first..=first + (DIRENT_SLOTS - 1) }
    }

    /// Offsets where the pieces of an attribute of that name may be; those of a new one go to the
    /// first free place from [`xattr_offset`] on.
    pub fn xattr_offsets(&self, name: &[u8]) -> RangeInclusive<u64> {
        let first = xattr_offset(&self.key, name);
        if self.replaced { 0..=u64::MAX } else { first..=first + (XATTR_SLOTS * XATTR_PIECES - 1) }
    }
}

fn name_hash(hash_key: &[u8; 16], name: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new_with_key(hash_key);
    hasher.write(name);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_by_inode_then_kind_then_offset() {
        let keys = [
            Key::MIN,
            Key::new(1, Kind::Inode, 0),
            Key::new(1, Kind::Dirent, 5),
            Key::new(1, Kind::Dirent, u64::MAX),
            Key::new(1, Kind::Extent, 0),
            Key::new(2, Kind::Inode, 0),
            Key::new(INO_MAX, Kind::Orphan, 0),
        ];
        assert!(keys.windows(2).all(|w| w[0] < w[1]));
        let key = Key::new(77, Kind::Extent, 99);
        assert_eq!((key.ino(), key.kind(), key.offset()), (77, Kind::Extent as u8, 99));
        assert_eq!(Key::from_words(key.words().0, key.words().1), key);
    }

    #[test]
    fn directory_offsets_leave_room_for_dot_and_dotdot_and_are_positive() {
        for i in 0..10_000u32 {
            let offset = dirent_offset(&[3; 16], &i.to_le_bytes());
            assert!((256..1 << 63).contains(&offset));
            assert_eq!(offset % DIRENT_SLOTS, 0);
        }
    }
}
