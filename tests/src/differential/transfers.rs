//! Transfers that the two sides make in different ways: direct ones, and those where ext4 is asked
//! without `O_DIRECT` or `O_APPEND`.

use std::io;
use std::os::fd::BorrowedFd;

use gpunvme_abi as abi;
use rustix::fs::{FileType, OFlags};
use rustix::process::{Resource, Rlimit};

use super::facts;
use super::process::{Process, Side, content};

impl Process {
    /// What `O_DIRECT` does with what is not aligned is a named difference (`unaligned-direct`):
    /// ext4 is asked without it.
    pub(super) fn aligned_or_buffered(
        &self,
        slot: u8,
        at: Option<u64>,
        len: usize,
        write: Option<u32>,
        transfer: impl FnOnce(BorrowedFd<'_>) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let fd = self.slot(slot)?;
        if self.side != Side::Ext4 {
            return transfer(fd);
        }
        let Ok(flags) = rustix::fs::fcntl_getfl(fd) else { return transfer(fd) };
        let appends = write.is_some_and(|how| flags.contains(OFlags::APPEND) || how & libc::RWF_APPEND as u32 != 0);
        let place =
            if appends { rustix::fs::fstat(fd)?.st_size as u64 } else { at.unwrap_or_else(|| rustix::fs::tell(fd).unwrap_or(0)) };
        let aligned = (place | at.unwrap_or(0) | len as u64).is_multiple_of(facts::SECTOR);
        // A limit cuts a write where it likes.
        if aligned && !is_limited() || !flags.contains(OFlags::DIRECT) {
            return transfer(fd);
        }
        without(fd, flags, OFlags::DIRECT, transfer)
    }

    /// A regular file: nothing else can be transferred directly.
    fn regular(&self, slot: u8) -> io::Result<BorrowedFd<'_>> {
        let fd = self.slot(slot)?;
        match FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) {
            FileType::RegularFile => Ok(fd),
            _ => Err(io::Error::from_raw_os_error(libc::ENOTTY)),
        }
    }

    pub(super) fn direct_write(&self, slot: u8, seed: u8, segments: &[(u64, u64)]) -> io::Result<i64> {
        let fd = self.regular(slot)?;
        if self.side == Side::Gpunvme {
            let placed = placed(segments);
            for &(at, from, len) in &placed {
                unlimited(|| self.buffer.put(from, &content(seed, at, len as usize)))?;
            }
            match self.buffer.transfer(abi::Command::Write, fd, &placed) {
                // `direct-program`: what a write takes from a file is gone on both.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
                done => return Ok(done?.bytes as i64),
            }
        }
        let flags = rustix::fs::fcntl_getfl(fd)?;
        let mut done = 0;
        for &(at, len) in segments {
            let data = content(seed, at, len as usize);
            // Where the file is open for appending too, it goes to its place.
            match without(fd, flags, OFlags::DIRECT | OFlags::APPEND, |fd| Ok(rustix::io::pwrite(fd, &data, at)?)) {
                Ok(n) if n == data.len() => done += n,
                Ok(n) => return Ok((done + n) as i64),
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done as i64)
    }

    pub(super) fn direct_read(&self, slot: u8, segments: &[(u64, u64)]) -> io::Result<Vec<u8>> {
        let fd = self.regular(slot)?;
        if self.side == Side::Gpunvme {
            let done = self.buffer.transfer(abi::Command::Read, fd, &placed(segments))?;
            return Ok(self.buffer.get(0, done.bytes as usize));
        }
        let flags = rustix::fs::fcntl_getfl(fd)?;
        let mut read = Vec::new();
        for &(at, len) in segments {
            let mut data = vec![0; len as usize];
            let n = without(fd, flags, OFlags::DIRECT, |fd| Ok(rustix::io::pread(fd, &mut data[..], at)?))?;
            read.extend_from_slice(&data[..n]);
            if n < data.len() {
                break;
            }
        }
        Ok(read)
    }

    /// Copies until all is done, or nothing more comes: how much one call copies each filesystem
    /// decides. ext4 is asked without `O_DIRECT` (`unaligned-direct`).
    pub(super) fn copy(
        &self,
        (from, to): (u8, u8),
        len: usize,
        mut piece: impl FnMut(BorrowedFd<'_>, BorrowedFd<'_>, usize) -> io::Result<usize>,
    ) -> io::Result<i64> {
        let (from, to) = (self.slot(from)?, self.slot(to)?);
        let mut all = || {
            let mut done = 0;
            loop {
                match piece(from, to, len - done) {
                    Ok(0) => return Ok(done as i64),
                    Ok(n) => done += n,
                    Err(error) if done == 0 => return Err(error),
                    Err(_) => return Ok(done as i64),
                }
                if done == len {
                    return Ok(done as i64);
                }
            }
        };
        if self.side == Side::Gpunvme {
            return all();
        }
        let flags = |fd| rustix::fs::fcntl_getfl(fd).unwrap_or(OFlags::empty());
        without(from, flags(from), OFlags::DIRECT, |_| without(to, flags(to), OFlags::DIRECT, |_| all()))
    }
}

/// Segments as (file offset, buffer offset, length), one behind the other in the buffer.
fn placed(segments: &[(u64, u64)]) -> Vec<(u64, u64, u64)> {
    let mut end = 0;
    segments
        .iter()
        .map(|&(at, len)| {
            end += len;
            (at, end - len, len)
        })
        .collect()
}

/// Whether files have a limit.
pub(super) fn is_limited() -> bool {
    rustix::process::getrlimit(Resource::Fsize).current.is_some()
}

/// A call for which the limit of files does not hold: it is about memory, which is a file too.
pub(super) fn unlimited<T>(call: impl FnOnce() -> T) -> io::Result<T> {
    let limit = rustix::process::getrlimit(Resource::Fsize);
    rustix::process::setrlimit(Resource::Fsize, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    let result = call();
    rustix::process::setrlimit(Resource::Fsize, limit)?;
    Ok(result)
}

/// A call while flags of the open file are off.
pub(super) fn without<T>(
    fd: BorrowedFd<'_>,
    flags: OFlags,
    off: OFlags,
    call: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>,
) -> io::Result<T> {
    if !flags.intersects(off) {
        return call(fd);
    }
    rustix::fs::fcntl_setfl(fd, flags - off)?;
    let result = call(fd);
    rustix::fs::fcntl_setfl(fd, flags)?;
    result
}
