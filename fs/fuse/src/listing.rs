//! Entries of a directory, as READDIR and READDIRPLUS are answered.

use zerocopy::IntoBytes;

use crate::reply::{Times, entry_out};
use crate::wire::{Attr, Dirent};

/// Entries begin at multiples of this (`FUSE_DIRENT_ALIGN`).
const ALIGNMENT: usize = 8;

/// Entries of a directory, up to the length that was asked for.
#[derive(Debug)]
pub struct Listing {
    bytes: Vec<u8>,
    size: usize,
}

impl Listing {
    /// An empty listing for a request of `size` bytes.
    pub fn new(size: u32) -> Listing {
        Listing { bytes: Vec::new(), size: size as usize }
    }

    /// Adds an entry for READDIR: its inode, the type in `mode`, and the cookie that the next
    /// request goes on from. Returns whether there was room.
    #[must_use]
    pub fn add(&mut self, ino: u64, mode: u32, cookie: u64, name: &[u8]) -> bool {
        self.push(&[], ino, mode, cookie, name)
    }

    /// Adds an entry for READDIRPLUS. Without attributes the kernel learns the name only.
    #[must_use]
    pub fn add_plus(&mut self, (ino, mode): (u64, u32), cookie: u64, name: &[u8], attr: Option<&Attr>, times: Times) -> bool {
        let entry = entry_out(attr.unwrap_or(&Attr::default()), times);
        self.push(entry.as_bytes(), ino, mode, cookie, name)
    }

    fn push(&mut self, before: &[u8], ino: u64, mode: u32, off: u64, name: &[u8]) -> bool {
        let len = (before.len() + size_of::<Dirent>() + name.len()).next_multiple_of(ALIGNMENT);
        let (Some(end), Ok(namelen)) = (self.bytes.len().checked_add(len), u32::try_from(name.len())) else { return false };
        if end > self.size {
            return false;
        }
        // A DT_ of readdir(3) is the type of st_mode, shifted.
        let dirent = Dirent { ino, off, namelen, r#type: (mode & 0o170_000) >> 12 };
        for part in [before, dirent.as_bytes(), name] {
            self.bytes.extend_from_slice(part);
        }
        self.bytes.resize(end, 0);
        true
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn entries_lie_at_multiples_of_eight_and_end_where_there_is_no_room() {
        let mut listing = Listing::new(72);
        assert!(listing.add(5, 0o100_644, 1, b"a"));
        assert!(listing.add(6, 0o040_755, 2, b"directory"));
        assert!(!listing.add(7, 0, 3, b"x"), "32 and 40 bytes are all there is room for");
        let bytes = listing.bytes();
        assert_eq!((bytes.len(), bytes[20], bytes[32], bytes[52]), (72, 8, 6, 4), "a file, inode 6, a directory");
    }

    #[test]
    fn an_entry_with_attributes_has_them_before_it() {
        let times = Times { entry: Duration::from_secs(1), attributes: Duration::from_secs(2) };
        let mut listing = Listing::new(4096);
        assert!(listing.add_plus((9, 0o100_600), 4, b"name", Some(&Attr { ino: 9, ..Attr::default() }), times));
        assert!(listing.add_plus((1, 0o040_000), 5, b".", None, times));
        let bytes = listing.bytes();
        assert_eq!(bytes.len(), 160 + 160);
        assert_eq!((bytes[0], bytes[128], bytes[144], &bytes[152..160]), (9, 9, 4, &b"name\0\0\0\0"[..]));
        assert_eq!((bytes[160], bytes[160 + 128], bytes[160 + 148]), (0, 1, 4), "inode 0: the kernel takes the name only");
    }
}
