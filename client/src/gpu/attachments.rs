//! What is kept with an open file: the rings that it is attached to, from its first use on, and the
//! cached ranges of its pages in the page cache.

use super::page_cache::cached_file::CachedFile;
use crate::error::Result;
use crate::file::File;
use crate::mount::Mount;
use crate::ring::{Attached, RingName};
use parking_lot::Mutex;
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
pub(super) fn in_ring(file: &File, ring: &RingName) -> Result<Attached> {
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

/// Whether a file lies on that mount, and this was not asked of it before.
pub(super) fn is_first_read(file: &File, mount: &Mount) -> bool {
    let read = &file.kept::<Attachments>().read;
    file.filesystem() == mount.connection().filesystem && !read.load(Ordering::Relaxed) && !read.swap(true, Ordering::Relaxed)
}
