//! The values of the tree's items: inodes, directory entries, extents, attributes, orphans.

use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Corrupt;
use crate::key::{DIRENT_OFFSETS, INO_MAX};
use crate::node::VALUE_MAX;

/// Longest name of a directory entry in bytes.
pub const NAME_MAX: usize = 255;
/// Longest target of a symbolic link in bytes.
pub const SYMLINK_MAX: usize = 4095;
/// Longest value of an extended attribute in bytes (`XATTR_SIZE_MAX` of linux/limits.h).
pub const XATTR_MAX: usize = 65536;
/// Bytes of a symbolic link, or of an extended attribute's value, in one item.
pub const PIECE: usize = VALUE_MAX;
/// Blocks that one extent can map.
pub const EXTENT_BLOCKS_MAX: u64 = u32::MAX as u64;
/// Highest size of a file in bytes: offsets are signed 64-bit in POSIX, and block numbers times
/// 4096 must not overflow.
pub const FILE_SIZE_MAX: u64 = (1 << 62) - 4096;

/// A point in time: seconds since 1970 and nanoseconds below one second.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Timestamp {
    /// Seconds since the epoch; negative before it.
    pub seconds: i64,
    /// Nanoseconds, 0 to 999,999,999.
    pub nanoseconds: u32,
}

/// Type of a file, numbered as `DT_*` of dirent.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FileType {
    /// FIFO.
    Fifo = 1,
    /// Character device.
    CharDevice = 2,
    /// Directory.
    Directory = 4,
    /// Block device.
    BlockDevice = 6,
    /// Regular file.
    Regular = 8,
    /// Symbolic link.
    Symlink = 10,
    /// Socket.
    Socket = 12,
}

impl FileType {
    /// From the type bits of a mode; they are the `DT_*` number shifted by 12 bits.
    pub fn from_mode(mode: u32) -> Option<FileType> {
        FileType::from_number((mode >> 12 & 0xf) as u8)
    }

    /// From the stored number.
    pub fn from_number(number: u8) -> Option<FileType> {
        use FileType::*;
        [Fifo, CharDevice, Directory, BlockDevice, Regular, Symlink, Socket].into_iter().find(|t| *t as u8 == number)
    }

    /// The type bits of a mode.
    pub fn mode(self) -> u32 {
        u32::from(self as u8) << 12
    }
}

/// An inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inode {
    /// Type and permission bits.
    pub mode: u32,
    /// Names that it has; a directory counts itself and its subdirectories.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, as the kernel's `new_encode_dev` packs it.
    pub rdev: u32,
    /// Bytes of a file or of a link's target; entries of a directory.
    pub size: u64,
    /// Blocks that its extents map.
    pub blocks: u64,
    /// Directory that holds it; directories only, else 0.
    pub parent: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of content.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Creation.
    pub btime: Timestamp,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawTime {
    seconds: I64,
    nanoseconds: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawInode {
    mode: U32,
    nlink: U32,
    uid: U32,
    gid: U32,
    rdev: U32,
    flags: U32,
    size: U64,
    blocks: U64,
    parent: U64,
    atime: RawTime,
    mtime: RawTime,
    ctime: RawTime,
    btime: RawTime,
    reserved: [u8; 8],
}

/// Size of an encoded inode in bytes.
pub const INODE_SIZE: usize = 104;
const _: () = assert!(size_of::<RawInode>() == INODE_SIZE);

impl From<Timestamp> for RawTime {
    fn from(time: Timestamp) -> RawTime {
        RawTime { seconds: time.seconds.into(), nanoseconds: time.nanoseconds.into() }
    }
}

impl Inode {
    /// Type of the file.
    pub fn file_type(&self) -> FileType {
        FileType::from_mode(self.mode).expect("checked when it was decoded or made")
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type() == FileType::Directory
    }

    /// The stored form.
    pub fn encode(&self) -> [u8; INODE_SIZE] {
        let raw = RawInode {
            mode: self.mode.into(),
            nlink: self.nlink.into(),
            uid: self.uid.into(),
            gid: self.gid.into(),
            rdev: self.rdev.into(),
            flags: 0.into(),
            size: self.size.into(),
            blocks: self.blocks.into(),
            parent: self.parent.into(),
            atime: self.atime.into(),
            mtime: self.mtime.into(),
            ctime: self.ctime.into(),
            btime: self.btime.into(),
            reserved: [0; 8],
        };
        raw.as_bytes().try_into().expect("the size is asserted")
    }

    /// Reads the stored form of inode `ino`.
    pub fn decode(ino: u64, bytes: &[u8]) -> Result<Inode, Corrupt> {
        let fail = |what| Err(Corrupt::Item { ino, what });
        let Ok(raw) = RawInode::ref_from_bytes(bytes) else {
            return fail("inode has the wrong length");
        };
        let time = |raw: RawTime| Timestamp { seconds: raw.seconds.get(), nanoseconds: raw.nanoseconds.get() };
        let inode = Inode {
            mode: raw.mode.get(),
            nlink: raw.nlink.get(),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            rdev: raw.rdev.get(),
            size: raw.size.get(),
            blocks: raw.blocks.get(),
            parent: raw.parent.get(),
            atime: time(raw.atime),
            mtime: time(raw.mtime),
            ctime: time(raw.ctime),
            btime: time(raw.btime),
        };
        if inode.mode > 0o177_777 || FileType::from_mode(inode.mode).is_none() {
            return fail("inode has an impossible mode");
        }
        if inode.parent > INO_MAX {
            return fail("directory lies in an impossible one");
        }
        if inode.size > FILE_SIZE_MAX || inode.blocks > crate::geometry::TOTAL_BLOCKS_MAX {
            return fail("inode has an impossible size");
        }
        if [inode.atime, inode.mtime, inode.ctime, inode.btime].iter().any(|t| t.nanoseconds > 999_999_999) {
            return fail("inode has an impossible time");
        }
        Ok(inode)
    }
}

impl Inode {
    /// What a stored form that [`Inode::decode`] refuses still says, taken as an inode of that
    /// type: fields that are impossible become zero. None when it has another length.
    pub fn salvage(bytes: &[u8], file_type: FileType) -> Option<Inode> {
        let raw = RawInode::ref_from_bytes(bytes).ok()?;
        let time = |raw: RawTime| {
            let time = Timestamp { seconds: raw.seconds.get(), nanoseconds: raw.nanoseconds.get() };
            if time.nanoseconds > 999_999_999 { Timestamp::default() } else { time }
        };
        let size = raw.size.get();
        Some(Inode {
            mode: file_type.mode() | raw.mode.get() & 0o7777,
            nlink: raw.nlink.get(),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            rdev: raw.rdev.get(),
            size: if size > FILE_SIZE_MAX { 0 } else { size },
            blocks: 0,
            parent: Some(raw.parent.get()).filter(|parent| *parent <= INO_MAX).unwrap_or(0),
            atime: time(raw.atime),
            mtime: time(raw.mtime),
            ctime: time(raw.ctime),
            btime: time(raw.btime),
        })
    }
}

/// An entry of a directory: ino (8 bytes), type (1 byte), name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dirent<'a> {
    /// Inode it names.
    pub ino: u64,
    /// Type of that inode.
    pub file_type: FileType,
    /// Name, without a terminator.
    pub name: &'a [u8],
}

impl<'a> Dirent<'a> {
    /// The stored form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(9 + self.name.len());
        bytes.extend(self.ino.to_le_bytes());
        bytes.push(self.file_type as u8);
        bytes.extend(self.name);
        bytes
    }

    /// Reads the stored form of the entry of directory `dir` at `offset`.
    pub fn decode(dir: u64, offset: u64, bytes: &'a [u8]) -> Result<Dirent<'a>, Corrupt> {
        let fail = |what| Err(Corrupt::Item { ino: dir, what });
        if !DIRENT_OFFSETS.contains(&offset) {
            return fail("directory entry lies where none can be");
        }
        let (Some((ino, rest)), true) = (bytes.split_first_chunk::<8>(), bytes.len() > 9) else {
            return fail("directory entry is too short");
        };
        let (ino, name) = (u64::from_le_bytes(*ino), &rest[1..]);
        let Some(file_type) = FileType::from_number(rest[0]) else {
            return fail("directory entry has an impossible type");
        };
        if ino == 0 || ino > INO_MAX {
            return fail("directory entry names an impossible inode");
        }
        if name.len() > NAME_MAX || name.contains(&0) || name.contains(&b'/') {
            return fail("directory entry has an impossible name");
        }
        Ok(Dirent { ino, file_type, name })
    }
}

/// A run of blocks that a file has on a device; the file's first block is the key's offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First block on the device.
    pub block: u64,
    /// Number of blocks.
    pub len: u32,
    /// Preallocated: it reads as zeros, whatever the device holds.
    pub unwritten: bool,
    /// Device; 0 is the only one of a volume today.
    pub device: u16,
}

const UNWRITTEN: u16 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawExtent {
    block: U64,
    len: U32,
    device: U16,
    flags: U16,
}

/// Size of an encoded extent in bytes.
pub const EXTENT_SIZE: usize = 16;
const _: () = assert!(size_of::<RawExtent>() == EXTENT_SIZE);

impl Extent {
    /// The stored form.
    pub fn encode(&self) -> [u8; EXTENT_SIZE] {
        let flags = if self.unwritten { UNWRITTEN } else { 0 };
        let raw = RawExtent { block: self.block.into(), len: self.len.into(), device: self.device.into(), flags: flags.into() };
        raw.as_bytes().try_into().expect("the size is asserted")
    }

    /// Reads the stored form of an extent of inode `ino` at block `offset` of the file.
    pub fn decode(ino: u64, offset: u64, bytes: &[u8]) -> Result<Extent, Corrupt> {
        let fail = |what| Err(Corrupt::Item { ino, what });
        let Ok(raw) = RawExtent::ref_from_bytes(bytes) else {
            return fail("extent has the wrong length");
        };
        if raw.flags.get() & !UNWRITTEN != 0 {
            return fail("extent has an unknown flag");
        }
        if raw.len.get() == 0 || offset > FILE_SIZE_MAX / 4096 || raw.block.get().checked_add(raw.len.get().into()).is_none() {
            return fail("extent is out of range");
        }
        if raw.device.get() != 0 {
            return fail("extent lies on a device that the volume does not have");
        }
        Ok(Extent { block: raw.block.get(), len: raw.len.get(), unwritten: raw.flags.get() == UNWRITTEN, device: 0 })
    }
}

/// First piece of an extended attribute: length of the value (4 bytes), length of the name (1
/// byte), name, first bytes of the value; the following pieces hold only bytes of the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XattrHead<'a> {
    /// Length of the whole value in bytes.
    pub value_len: u32,
    /// Name with its namespace.
    pub name: &'a [u8],
    /// The first bytes of the value.
    pub start: &'a [u8],
}

impl<'a> XattrHead<'a> {
    /// Bytes of a value that fit beside the name in the first piece.
    pub fn room(name: &[u8]) -> usize {
        PIECE - 5 - name.len()
    }

    /// The stored form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(5 + self.name.len() + self.start.len());
        bytes.extend(self.value_len.to_le_bytes());
        bytes.push(self.name.len() as u8);
        bytes.extend(self.name);
        bytes.extend(self.start);
        bytes
    }

    /// Reads the stored form of an attribute of inode `ino`.
    pub fn decode(ino: u64, bytes: &'a [u8]) -> Result<XattrHead<'a>, Corrupt> {
        let fail = |what| Err(Corrupt::Item { ino, what });
        let Some((value_len, rest)) = bytes.split_first_chunk::<4>() else {
            return fail("extended attribute is too short");
        };
        let value_len = u32::from_le_bytes(*value_len);
        let Some((name_len, rest)) = rest.split_first() else {
            return fail("extended attribute is too short");
        };
        let Some((name, start)) = rest.split_at_checked(usize::from(*name_len)) else {
            return fail("name of an extended attribute is cut off");
        };
        if name.is_empty() || value_len as usize > XATTR_MAX || start.len() != (value_len as usize).min(Self::room(name)) {
            return fail("extended attribute does not add up");
        }
        Ok(XattrHead { value_len, name, start })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn items_survive_the_round_trip() {
        let time = Timestamp { seconds: -5, nanoseconds: 999_999_999 };
        let inode = Inode {
            mode: 0o100644,
            nlink: 3,
            uid: 1,
            gid: 2,
            rdev: 0,
            size: 1 << 40,
            blocks: 77,
            parent: 0,
            atime: time,
            mtime: Timestamp { seconds: 1 << 40, nanoseconds: 1 },
            ctime: time,
            btime: time,
        };
        assert_eq!(Inode::decode(9, &inode.encode()), Ok(inode));
        let dirent = Dirent { ino: 5, file_type: FileType::Socket, name: b"x" };
        assert_eq!(Dirent::decode(1, 1 << 40, &dirent.encode()), Ok(dirent));
        let extent = Extent { block: 1 << 39, len: u32::MAX, unwritten: true, device: 0 };
        assert_eq!(Extent::decode(1, 0, &extent.encode()), Ok(extent));
        let head = XattrHead { value_len: 3, name: b"user.a", start: b"abc" };
        assert_eq!(XattrHead::decode(1, &head.encode()), Ok(head));
    }

    #[test]
    fn a_parent_or_an_offset_that_cannot_be_is_refused() {
        let time = Timestamp::default();
        let (mode, atime, mtime, ctime, btime) = (0o040755, time, time, time, time);
        let with =
            |parent| Inode { mode, nlink: 2, uid: 0, gid: 0, rdev: 0, size: 0, blocks: 0, parent, atime, mtime, ctime, btime };
        assert!(Inode::decode(9, &with(INO_MAX).encode()).is_ok());
        for parent in [INO_MAX + 1, u64::MAX] {
            assert!(Inode::decode(9, &with(parent).encode()).is_err());
            assert_eq!(Inode::salvage(&with(parent).encode(), FileType::Directory).map(|inode| inode.parent), Some(0));
        }
        let dirent = Dirent { ino: 5, file_type: FileType::Regular, name: b"x" };
        for (offset, is_one) in
            [(0, false), (255, false), (256, true), (i64::MAX as u64, true), (1 << 63, false), (u64::MAX, false)]
        {
            assert_eq!(Dirent::decode(1, offset, &dirent.encode()).is_ok(), is_one, "{offset:#x}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = Inode::decode(1, &bytes);
            let _ = Dirent::decode(1, 1 << 40, &bytes);
            let _ = Extent::decode(1, 0, &bytes);
            let _ = XattrHead::decode(1, &bytes);
        }
    }
}
