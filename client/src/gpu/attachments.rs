//! What is kept with an open file: the rings that it is attached to, from its first use on, and the
//! cached ranges of its pages in the page cache.

use super::page_cache::cached_file::CachedFile;
use super::settings::Caching;
use crate::file::File;
use crate::mount::Mount;
use crate::ring::{Attached, RingName};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is kept with an open file.
#[derive(Debug, Default)]
struct Attachments {
    rings: Mutex<Vec<Attached>>,
    /// Whether [`is_first_read`] was asked.
    read: AtomicBool,
    cached: Arc<CachedFile>,
}

/// The file as a ring knows it.
pub(super) fn in_ring(file: &File, ring: &RingName) -> crate::error::Result<Attached> {
    let mut rings = file.kept::<Attachments>().rings.lock();
    if let Some(attached) = rings.iter().find(|attached| attached.is_of(ring)) {
        return Ok(attached.clone());
    }
    rings.retain(|attached| !attached.is_over());
    let attached = ring.attach(file)?;
    rings.push(attached.clone());
    Ok(attached)
}

/// The file's cached ranges.
pub(super) fn cached(file: &File) -> &Arc<CachedFile> {
    &file.kept::<Attachments>().cached
}

impl File {
    /// Sets what reads of this open file take of the kernel's page cache, whatever
    /// [`super::Settings`] say; `None` for what they say. [`File::read`], into host memory, takes
    /// what it has unless this is [`Caching::Never`]. It counts for reads that begin from now on.
    pub fn set_caching(&self, caching: Option<Caching>) {
        cached(self).set_caching(caching);
    }
}

/// A descriptor by which the file is read and mapped as the page cache has it: one that was opened
/// with O_DIRECT would read past the page cache.
///
/// # Errors
/// Those of open(2).
pub(super) fn for_pages(file: &File) -> Result<OwnedFd, Errno> {
    let descriptor = file.as_fd();
    if !rustix::fs::fcntl_getfl(descriptor)?.contains(OFlags::DIRECT) {
        return rustix::io::fcntl_dupfd_cloexec(descriptor, 0);
    }
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Whether a file lies on that mount, and this was not asked of it before.
pub(super) fn is_first_read(file: &File, mount: &Mount) -> bool {
    let read = &file.kept::<Attachments>().read;
    file.filesystem() == mount.connection().filesystem && !read.load(Ordering::Relaxed) && !read.swap(true, Ordering::Relaxed)
}
