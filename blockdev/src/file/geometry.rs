//! Finds out what an image file or a kernel block device can do, so that the kernel takes every
//! request that the geometry allows.
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{AtFlags, FallocateFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use super::claim::{IntoErrno, explain, no_direct_io};
use super::target::Kind;
use crate::{Error, Geometry, Length, OpenMode, Result};

const MAX_LOGICAL_BLOCK: u32 = 4096;
const MAX_TRANSFER: u32 = 8 << 20;
const QUEUE_DEPTH: u32 = 256;
const MAX_QUEUES: u32 = 64;

/// What an open file or block device can do.
pub(super) fn probe(name: &Arc<str>, file: &File, kind: Kind, mode: OpenMode) -> Result<Geometry> {
    match kind {
        Kind::Block => block_geometry(name, file, mode),
        Kind::File => file_geometry(name, file, mode),
    }
}

fn block_geometry(name: &Arc<str>, file: &File, mode: OpenMode) -> Result<Geometry> {
    let failed =
        |errno: Errno| Error::System { device: name.clone(), action: "asking for its size", errno: errno.raw_os_error() };
    let logical_block = rustix::fs::ioctl_blksszget(file).map_err(failed)?;
    // The end of a block device is its size (the kernel keeps st_size at 0).
    let len = rustix::fs::seek(file, SeekFrom::End(0)).map_err(failed)?;
    let (memory, _) = direct_alignment(name, file)?.unwrap_or((logical_block, logical_block));
    let number = rustix::fs::fstat(file).map_err(failed)?.st_rdev;
    let sysfs = Sysfs::of(rustix::fs::major(number), rustix::fs::minor(number));
    let writable = mode == OpenMode::ReadWrite;
    // Some kernels open a write protected device for writing, and then fail each write.
    if writable && sysfs.device("ro").as_deref() == Some("1") {
        return Err(Error::ReadOnly { device: name.clone() });
    }
    // Holes are punched, and ranges zeroed, by the kernel's one write-zeroes command; without it
    // the first fails and the second writes zeroes page by page.
    let zeroes = sysfs.queue("write_zeroes_max_bytes").and_then(|bytes| bytes.parse().ok()).is_some_and(|bytes: u64| bytes > 0);
    geometry(
        name,
        len,
        logical_block,
        memory,
        Geometry {
            volatile_cache: sysfs.queue("write_cache").as_deref() != Some("write through"),
            discard: writable && zeroes,
            write_zeroes: writable && zeroes,
            read_only: !writable,
            queue_depth: sysfs.requests().map_or(QUEUE_DEPTH, |requests| requests.clamp(1, QUEUE_DEPTH)),
            ..base()
        },
    )
}

fn file_geometry(name: &Arc<str>, file: &File, mode: OpenMode) -> Result<Geometry> {
    let len = file.metadata().map_err(|error| explain(name, mode, error.into_errno()))?.size();
    let (memory, block) = match direct_alignment(name, file)? {
        Some(told) => told,
        None if reads_directly(file, 512) => (512, 512),
        None => (MAX_LOGICAL_BLOCK, MAX_LOGICAL_BLOCK),
    };
    let writable = mode == OpenMode::ReadWrite;
    let punches = writable && punches_holes(file, len);
    let geometry_bits =
        Geometry { volatile_cache: true, discard: punches, write_zeroes: punches, read_only: !writable, ..base() };
    geometry(name, len, block.max(512), memory, geometry_bits)
}

/// How long an open file or block device is now, in whole logical blocks.
pub(super) fn length(name: &Arc<str>, file: &File, logical_block: u32) -> Result<u64> {
    // The end of a block device is its size (the kernel keeps st_size at 0).
    let len = rustix::fs::seek(file, SeekFrom::End(0)).map_err(|errno| Error::System {
        device: name.clone(),
        action: "asking for its size",
        errno: errno.raw_os_error(),
    })?;
    Ok(len - len % u64::from(logical_block))
}

/// What every file and block device has in common.
fn base() -> Geometry {
    Geometry {
        len: Length::new(0),
        logical_block: 0,
        memory_alignment: 0,
        max_transfer: MAX_TRANSFER,
        queue_depth: QUEUE_DEPTH,
        max_queues: MAX_QUEUES,
        volatile_cache: true,
        discard: false,
        write_zeroes: false,
        read_only: false,
    }
}

/// Fills in lengths and alignments.
fn geometry(name: &Arc<str>, len: u64, logical_block: u32, memory: u32, rest: Geometry) -> Result<Geometry> {
    // Before Linux 6.18 the length of every piece of memory has to be a multiple of the logical
    // block as well.
    let memory_alignment = memory.max(logical_block);
    for alignment in [logical_block, memory_alignment] {
        if !alignment.is_power_of_two() || alignment > MAX_LOGICAL_BLOCK {
            return Err(Error::Unsupported {
                device: name.clone(),
                reason: format!(
                    "direct I/O on it needs an alignment of {alignment} bytes, and more than {MAX_LOGICAL_BLOCK} is not supported"
                ),
            });
        }
    }
    Ok(Geometry { len: Length::new(len - len % u64::from(logical_block)), logical_block, memory_alignment, ..rest })
}

/// The alignment that direct I/O needs of memory and of offsets (statx(2), STATX_DIOALIGN; Linux
/// 6.1), where the filesystem tells.
fn direct_alignment(name: &Arc<str>, file: &File) -> Result<Option<(u32, u32)>> {
    let Ok(statx) = rustix::fs::statx(file.as_fd(), "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else { return Ok(None) };
    if statx.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(None);
    }
    if statx.stx_dio_mem_align == 0 || statx.stx_dio_offset_align == 0 {
        return Err(no_direct_io(name));
    }
    Ok(Some((statx.stx_dio_mem_align, statx.stx_dio_offset_align)))
}

/// Tries a direct read that is aligned to `block` bytes and no better, on a filesystem that does
/// not tell.
fn reads_directly(file: &File, block: usize) -> bool {
    let mut memory = vec![0u8; 4 * block];
    let aligned = memory.as_ptr().align_offset(2 * block);
    file.read_at(&mut memory[aligned + block..][..block], block as u64).is_ok()
}

/// Whether the filesystem can punch holes: one behind the end of the file changes nothing.
fn punches_holes(file: &File, len: u64) -> bool {
    let behind = len.next_multiple_of(u64::from(MAX_LOGICAL_BLOCK));
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, hole, behind, u64::from(MAX_LOGICAL_BLOCK)).is_ok()
}

/// A block device's directory in sysfs (Documentation/ABI/stable/sysfs-block).
struct Sysfs(PathBuf);

impl Sysfs {
    fn of(major: u32, minor: u32) -> Self {
        Self(PathBuf::from(format!("/sys/dev/block/{major}:{minor}")))
    }

    /// An attribute of the disk or partition.
    fn device(&self, attribute: &str) -> Option<String> {
        Some(std::fs::read_to_string(self.0.join(attribute)).ok()?.trim().to_owned())
    }

    /// An attribute of the request queue. A partition's is that of the disk, in the directory
    /// above.
    fn queue(&self, attribute: &str) -> Option<String> {
        self.device(&format!("queue/{attribute}")).or_else(|| self.device(&format!("../queue/{attribute}")))
    }

    /// How many requests the kernel has for one hardware queue of the disk. Each command beyond
    /// them would get a thread of the kernel that sleeps until one is free. None where a driver
    /// takes commands without requests (device mapper, MD), of which sysfs tells the same number
    /// nevertheless.
    fn requests(&self) -> Option<u32> {
        let has_requests = ["mq", "../mq"].iter().any(|folder| self.0.join(folder).is_dir());
        if has_requests { self.queue("nr_requests")?.parse().ok() } else { None }
    }
}
