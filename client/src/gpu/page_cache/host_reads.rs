//! Reads into registered host memory that the page cache answers, on the thread that waits for
//! them: neither the daemon nor a device has a part in them.
//!
//! It guards that nothing else is read so: the kernel is asked first whether it has all of it. If
//! that leaves the page cache meanwhile, read(2) still reads the file's bytes.

use super::view::residency;
use crate::buffer::{Memory, Registered};
use crate::file::File;
use crate::gpu::attachments::{cached, for_pages};
use crate::gpu::outcome::from_cache;
use crate::gpu::settings::Caching;
use crate::transfer::Transfer;
use gpunvme_abi::{Reason, Segment, TransferFlags};
use rustix::fs::OFlags;
use std::os::fd::{AsFd, BorrowedFd};

/// The longest read that one processor copies. Beside an H200 one copied 6 GB/s out of the page
/// cache, and a loop device gave 7.2 to reads of 16 MiB.
const LONGEST: u64 = 4 << 20;

impl File {
    /// Reads a segment out of the page cache, if that has all of it, as far as the file goes. The
    /// caller sees to it that no other code uses that part of the buffer meanwhile. Where it is
    /// `demanded`, the kernel is asked whatever it said of reads before.
    ///
    /// # Errors
    /// Why not; none for calls that never are: of several segments, which devices read side by
    /// side, of many bytes, into memory that is not mapped here, and what the daemon is to judge.
    pub(crate) fn read_resident<M: Memory>(
        &self,
        buffer: &Registered<M>,
        segments: &[Segment],
        flags: TransferFlags,
        demanded: bool,
    ) -> std::result::Result<Transfer, Option<Reason>> {
        let ([segment], true) = (segments, M::IS_MAPPED) else { return Err(None) };
        let memory = &buffer.memory;
        let fits = segment.buffer_offset.saturating_add(segment.len) <= memory.length() as u64;
        if !fits || self.filesystem() != buffer.connection.filesystem {
            return Err(None);
        }
        let mut size = self.known_size().map_err(|_| None)?;
        if segment.file_offset.saturating_add(segment.len) > size {
            // Direct writes may have made it longer than the kernel knows.
            size = self.size().map_err(|_| None)?;
        }
        let len = segment.len.min(size.saturating_sub(segment.file_offset));
        let open_for = rustix::fs::fcntl_getfl(self).map_err(|_| None)?;
        if len > LONGEST || open_for & OFlags::RWMODE == OFlags::WRONLY {
            return Err(None);
        }
        if len == 0 {
            return if demanded { Ok(Transfer::default()) } else { Err(None) };
        }
        let cached = cached(self);
        if !flags.is_empty() || cached.caching() == Some(Caching::Never) {
            return Err(Some(Reason::CachingOff));
        }
        let has_all = |file, offset| if demanded { residency(file, offset, len) } else { cached.residency(file, offset, len) };
        has_all(self.as_fd(), segment.file_offset).map_err(Some)?;
        let read =
            |file: BorrowedFd<'_>| memory.read_file(file, segment.file_offset, segment.buffer_offset as usize, len as usize);
        let read = if open_for.contains(OFlags::DIRECT) {
            cached.descriptor(|| for_pages(self)).and_then(|file| read(file.as_fd()))
        } else {
            read(self.as_fd())
        };
        // The daemon says what is wrong, if it still is.
        read.map(|bytes| from_cache(bytes as u64)).map_err(|_| Some(Reason::NotCached))
    }
}
