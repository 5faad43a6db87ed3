//! Image files and kernel block devices: opening them, locking them and finding out what they can do. It guards that two
//! users never share a device and that every request the geometry allows is one that the kernel takes. [`crate::uring`]
//! runs the requests.
use std::fs::File;
use std::num::NonZero;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::uring::{Submission, UringQueue};
use crate::{BlockDevice, Error, Geometry, OpenMode, Queue, Region, Result};

const MAX_LOGICAL_BLOCK: u32 = 4096;
const MAX_TRANSFER: u32 = 8 << 20;
const QUEUE_DEPTH: u32 = 256;
const MAX_QUEUES: u32 = 64;
/// On a machine with fewer a thread of the kernel that looks for commands takes more from others than it gives.
const PROCESSORS_TO_SPARE_ONE: usize = 8;

/// How long a device that is in use may take to become free. The kernel lets go of the files of an io_uring a moment after
/// its process closed it or ended, so that mounting right after unmounting would otherwise fail now and then.
const PATIENCE: Duration = Duration::from_millis(300);

/// An open image file or block device. The lock goes with the open file.
pub(crate) struct FileDevice {
    target: Arc<Target>,
}

/// What the device and its queues share.
pub(crate) struct Target {
    pub(crate) name: Arc<str>,
    pub(crate) geometry: Geometry,
    pub(crate) file: File,
    pub(crate) kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Block,
    File,
}

impl FileDevice {
    pub(crate) fn open(device: &str, mode: OpenMode) -> Result<Self> {
        let name: Arc<str> = device.into();
        let (file, kind) = open_exclusively(&name, Path::new(device), mode, OFlags::DIRECT)?;
        let geometry = match kind {
            Kind::Block => block_geometry(&name, &file, mode)?,
            Kind::File => file_geometry(&name, &file, mode)?,
        };
        tracing::debug!(device, ?kind, ?geometry, "opened");
        Ok(Self { target: Arc::new(Target { name, geometry, file, kind }) })
    }

    pub(crate) fn queue(&self, submission: Submission) -> Result<UringQueue> {
        UringQueue::new(self.target.clone(), submission)
    }
}

impl BlockDevice for FileDevice {
    fn name(&self) -> &str {
        &self.target.name
    }

    fn geometry(&self) -> &Geometry {
        &self.target.geometry
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(self.queue(Submission::BySystemCall)?))
    }

    fn open_busy_queue(&self) -> Result<Box<dyn Queue>> {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        if processors < PROCESSORS_TO_SPARE_ONE {
            return self.open_queue();
        }
        Ok(Box::new(self.queue(Submission::ByKernelThread)?))
    }

    /// The kernel pins the pages of each request by itself.
    fn map(&self, _region: &Arc<Region>) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, _region: &Region) {}
}

/// Opens an image file or a block device, with further flags, and locks it.
pub(crate) fn open_exclusively(name: &Arc<str>, path: &Path, mode: OpenMode, flags: OFlags) -> Result<(File, Kind)> {
    // Before opening: opening a fifo would wait for its other end.
    let file_type = std::fs::metadata(path).map_err(|error| explain(name, mode, error.into_errno()))?.file_type();
    let kind = match file_type {
        file_type if file_type.is_block_device() => Kind::Block,
        file_type if file_type.is_file() => Kind::File,
        _ => return Err(Error::NotABlockDevice { device: name.clone() }),
    };
    let access = match mode {
        OpenMode::ReadOnly => OFlags::RDONLY,
        OpenMode::ReadWrite => OFlags::RDWR,
    };
    let exclusive = match kind {
        Kind::Block => OFlags::EXCL,
        Kind::File => OFlags::empty(),
    };
    let flags = access | exclusive | flags | OFlags::CLOEXEC;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let attempt = rustix::fs::open(path, flags, Mode::empty()).map(File::from).and_then(|file| {
            if kind == Kind::File {
                crate::lock::lock_file(&file, mode)?;
            }
            Ok(file)
        });
        match attempt {
            Ok(file) => {
                let opened = rustix::fs::fstat(&file).map_err(|errno| explain(name, mode, errno))?;
                let expected = if kind == Kind::Block { FileType::BlockDevice } else { FileType::RegularFile };
                if FileType::from_raw_mode(opened.st_mode) != expected {
                    return Err(Error::NotABlockDevice { device: name.clone() });
                }
                return Ok((file, kind));
            }
            // The lock of a file answers AGAIN, the claim of a block device BUSY.
            Err(Errno::BUSY | Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(PATIENCE / 30),
            Err(errno) => return Err(explain(name, mode, errno)),
        }
    }
}

/// Says why a device could not be opened.
fn explain(name: &Arc<str>, mode: OpenMode, errno: Errno) -> Error {
    let device = name.clone();
    match errno {
        Errno::NOENT | Errno::NOTDIR => Error::NotFound { device },
        Errno::BUSY | Errno::AGAIN => Error::Busy { device },
        Errno::ACCESS | Errno::PERM => Error::Permission { device },
        Errno::ROFS if mode == OpenMode::ReadWrite => Error::ReadOnly { device },
        Errno::NODEV | Errno::NXIO | Errno::NOMEDIUM => Error::Gone { device },
        Errno::INVAL => no_direct_io(name),
        errno => Error::System { device, action: "opening it", errno: errno.raw_os_error() },
    }
}

fn no_direct_io(name: &Arc<str>) -> Error {
    Error::Unsupported {
        device: name.clone(),
        reason: "its filesystem has no direct I/O (O_DIRECT); move the image to ext4, XFS, btrfs or a tmpfs of Linux 6.6 or \
                 newer, or attach it with `losetup --find --show` and name the loop device"
            .into(),
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
    // Holes are punched, and ranges zeroed, by the kernel's one write-zeroes command; without it the first fails and the
    // second writes zeroes page by page.
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
            ..BASE
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
    let geometry_bits = Geometry { volatile_cache: true, discard: punches, write_zeroes: punches, read_only: !writable, ..BASE };
    geometry(name, len, block.max(512), memory, geometry_bits)
}

/// What every file and block device has in common.
const BASE: Geometry = Geometry {
    len: 0,
    logical_block: 0,
    memory_alignment: 0,
    max_transfer: MAX_TRANSFER,
    queue_depth: QUEUE_DEPTH,
    max_queues: MAX_QUEUES,
    volatile_cache: true,
    discard: false,
    write_zeroes: false,
    read_only: false,
};

/// Fills in lengths and alignments.
fn geometry(name: &Arc<str>, len: u64, logical_block: u32, memory: u32, rest: Geometry) -> Result<Geometry> {
    // Before Linux 6.18 the length of every piece of memory has to be a multiple of the logical block as well.
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
    Ok(Geometry { len: len - len % u64::from(logical_block), logical_block, memory_alignment, ..rest })
}

/// The alignment that direct I/O needs of memory and of offsets (statx(2), STATX_DIOALIGN; Linux 6.1), where the filesystem
/// tells.
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

/// Tries a direct read that is aligned to `block` bytes and no better, on a filesystem that does not tell.
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

    /// An attribute of the request queue. A partition's is that of the disk, in the directory above.
    fn queue(&self, attribute: &str) -> Option<String> {
        self.device(&format!("queue/{attribute}")).or_else(|| self.device(&format!("../queue/{attribute}")))
    }
}

trait IntoErrno {
    fn into_errno(self) -> Errno;
}

impl IntoErrno for std::io::Error {
    fn into_errno(self) -> Errno {
        Errno::from_io_error(&self).unwrap_or(Errno::IO)
    }
}
