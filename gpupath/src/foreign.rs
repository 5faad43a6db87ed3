//! File descriptors that come from other processes.
//!
//! It guards the daemon's threads: almost any system call on a stranger's fd can wait for whoever serves that file, `close` included (it asks a FUSE
//! server to flush), and that may be a hostile process, or this daemon itself. So a descriptor is asked only what the kernel answers from
//! memory until it has proved to be a memfd, and everything else is closed on a thread of its own.

use crate::abi::Reason;
use rustix::fs::{OFlags, SealFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The most foreign descriptors that may be waiting to be closed.
const MAX_CLOSING: usize = 64;

/// `include/uapi/linux/magic.h`.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

static CLOSING: AtomicUsize = AtomicUsize::new(0);

/// A memfd whose first `len` bytes cannot vanish while they are mapped, open for reading and writing.
#[derive(Debug)]
pub(crate) struct Memory {
    pub fd: OwnedFd,
    pub len: usize,
}

/// Whether another foreign descriptor may be taken in. Not when too many are stuck on their way out.
pub(crate) fn may_accept() -> bool {
    CLOSING.load(Ordering::Relaxed) < MAX_CLOSING
}

/// Takes a descriptor as memory, or says why it cannot be, and gets rid of it.
pub(crate) fn accept(fd: OwnedFd, len: u64) -> Result<Memory, Reason> {
    match check(&fd, len) {
        Ok(len) => Ok(Memory { fd, len }),
        Err(reason) => {
            discard(fd);
            Err(reason)
        }
    }
}

fn check(fd: &OwnedFd, len: u64) -> Result<usize, Reason> {
    // Only memory filesystems have seals, and they answer from the inode (mm/memfd.c): every other kind of file is EINVAL here.
    let Ok(seals) = rustix::fs::fcntl_get_seals(fd) else {
        return Err(if is_dma_buf(fd) { Reason::NoVfio } else { Reason::NotABuffer });
    };
    // hugetlbfs has no write(), which is how the daemon fills in what is not aligned.
    if rustix::fs::fstatfs(fd).is_ok_and(|filesystem| filesystem.f_type == HUGETLBFS_MAGIC) {
        return Err(Reason::NotABuffer);
    }
    if !seals.contains(SealFlags::SHRINK) {
        return Err(Reason::NotSealed);
    }
    let mode = rustix::fs::fcntl_getfl(fd).map_err(|_| Reason::NotABuffer)?;
    if mode & OFlags::RWMODE != OFlags::RDWR || seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(Reason::NotWritable);
    }
    let stat = rustix::fs::fstat(fd).map_err(|_| Reason::NotABuffer)?;
    match usize::try_from(len) {
        Ok(len) if len as u64 <= u64::try_from(stat.st_size).unwrap_or(0) => Ok(len),
        _ => Err(Reason::TooSmall),
    }
}

/// By the name that the kernel gives it (drivers/dma-buf/dma-buf.c, `dmabuffs_dname`); no other file's link begins so.
fn is_dma_buf(fd: &OwnedFd) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|link| link.to_string_lossy().starts_with("/dmabuf:"))
}

/// Closes a descriptor without waiting for it.
pub(crate) fn discard(fd: OwnedFd) {
    CLOSING.fetch_add(1, Ordering::Relaxed);
    let closing = std::thread::Builder::new().name("close-foreign".into()).spawn(move || {
        drop(fd);
        CLOSING.fetch_sub(1, Ordering::Relaxed);
    });
    if let Err(error) = closing {
        // The closure, and the descriptor in it, was dropped here instead.
        CLOSING.fetch_sub(1, Ordering::Relaxed);
        tracing::warn!(%error, "no thread to close a foreign descriptor on; closed it in place");
    }
}
