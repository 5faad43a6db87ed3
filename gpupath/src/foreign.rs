//! File descriptors that come from other processes.
//!
//! It guards the daemon's threads: almost any system call on a stranger's descriptor can wait for
//! the process that serves that file, `close` included (it asks a FUSE server to flush), and that
//! may be a hostile one, or this daemon itself. So a descriptor is asked only what the kernel
//! answers from memory until it has proved to be a memfd, a device's memory or an eventfd, and
//! everything else is closed by the [`Intake`].
//!
//! And it guards what the daemon maps: nothing is taken for memory because of its name, which any
//! user can give to a file in a mount namespace of their own.

use crate::access::{self, Access};
use crate::intake::Intake;
use gpunvme_abi::Reason;
use rustix::fs::{AtFlags, OFlags, SealFlags, SeekFrom, StatxFlags};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// `include/uapi/linux/magic.h`.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
/// The same, `DMA_BUF_MAGIC`.
const DMA_BUF_MAGIC: i64 = 0x444d_4142;

/// Exporters of dma-bufs that keep the memory where it is for as long as the dma-buf lives;
/// `DEFINE_DMA_BUF_EXPORT_INFO` names them for their module.
const PINNING: [&[u8]; 2] = [b"nvidia", b"nv_dmabuf"];

/// Memory that was taken in: its descriptor, open for reading and writing, and how much of it.
#[derive(Debug)]
pub(crate) struct Memory {
    pub fd: OwnedFd,
    pub len: usize,
    pub kind: Kind,
}

/// The kind of the memory: of the host or of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A memfd whose bytes cannot vanish while they are mapped.
    Host,
    /// A device's: a dma-buf, or a PCI device's resource file.
    Device,
}

/// A descriptor of which nothing is known. Dropping it waits for nothing.
pub(crate) struct Foreign {
    fd: Option<OwnedFd>,
    user: u32,
    intake: Intake,
}

impl Foreign {
    /// A descriptor that came from a process of `user`.
    pub fn new(fd: OwnedFd, user: u32, intake: &Intake) -> Foreign {
        Foreign { fd: Some(fd), user, intake: intake.clone() }
    }

    /// Takes it as memory, or says why it cannot be. `by_root` is asked for what only root may
    /// register.
    pub fn memory(mut self, len: u64, by_root: impl Fn() -> bool) -> Result<Memory, Reason> {
        let (kind, len) = check(self.get(), len, by_root)?;
        Ok(Memory { fd: self.take(), len, kind })
    }

    /// Takes it as an eventfd, if it is one.
    pub fn eventfd(mut self) -> Option<OwnedFd> {
        // By the name that the kernel gives it (fs/eventfd.c); no path begins so.
        let is_eventfd = link(self.get()).is_some_and(|link| link.as_os_str() == "anon_inode:[eventfd]");
        is_eventfd.then(|| self.take())
    }

    /// Its inode number and what it is open for, if it is a file of this filesystem.
    pub fn shows(&self, filesystem: u64) -> Result<(u64, Access), Reason> {
        access::of_received(self.get(), filesystem)
    }

    fn get(&self) -> &OwnedFd {
        self.fd.as_ref().expect("it goes only with its holder")
    }

    fn take(&mut self) -> OwnedFd {
        self.fd.take().expect("it goes only with its holder")
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.intake.discard(self.user, fd);
        }
    }
}

fn check(fd: &OwnedFd, len: u64, by_root: impl Fn() -> bool) -> Result<(Kind, usize), Reason> {
    // Only memory filesystems have seals, and they answer from the inode (mm/memfd.c): every other
    // kind of file is EINVAL here.
    let seals = rustix::fs::fcntl_get_seals(fd).ok();
    let (kind, size) = match seals {
        Some(seals) => (Kind::Host, memfd_size(fd, seals)?),
        None => match dma_buf_exporter(fd) {
            // An exporter that may move the memory would leave the device with an address that
            // belongs to other memory by then.
            Some(exporter) if PINNING.contains(&exporter.as_slice()) || by_root() => {
                (Kind::Device, rustix::fs::seek(fd, SeekFrom::End(0)).unwrap_or(0))
            }
            // In a container that is not trusted root has none of these open.
            None if by_root() => (Kind::Device, pci_resource_size(fd).ok_or(Reason::NotABuffer)?),
            _ => return Err(Reason::NotABuffer),
        },
    };
    let mode = rustix::fs::fcntl_getfl(fd).map_err(|_| Reason::NotABuffer)?;
    let sealed = seals.is_some_and(|seals| seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE));
    if mode & OFlags::RWMODE != OFlags::RDWR || sealed {
        return Err(Reason::NotWritable);
    }
    match usize::try_from(len) {
        Ok(len) if len as u64 <= size => Ok((kind, len)),
        _ => Err(Reason::TooSmall),
    }
}

fn memfd_size(fd: &OwnedFd, seals: SealFlags) -> Result<u64, Reason> {
    // hugetlbfs has no write(), which is how the daemon fills in what is not aligned.
    if rustix::fs::fstatfs(fd).is_ok_and(|filesystem| filesystem.f_type == HUGETLBFS_MAGIC) {
        return Err(Reason::NotABuffer);
    }
    if !seals.contains(SealFlags::SHRINK) {
        return Err(Reason::NotSealed);
    }
    let stat = rustix::fs::fstat(fd).map_err(|_| Reason::NotABuffer)?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// The name that the kernel gives it (drivers/dma-buf/dma-buf.c, `dmabuffs_dname`) is only a reason
/// to ask on: for what no other file's fdinfo has, which only the kernel writes, and then for its
/// filesystem. Gives the name of the driver that exports it.
fn dma_buf_exporter(fd: &OwnedFd) -> Option<Vec<u8>> {
    link(fd).filter(|link| link.to_string_lossy().starts_with("/dmabuf:"))?;
    let exporter = exporter(&std::fs::read(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?)?;
    rustix::fs::fstatfs(fd).is_ok_and(|filesystem| filesystem.f_type == DMA_BUF_MAGIC).then_some(exporter)
}

/// The first such line: a name that its owner gave it (`DMA_BUF_SET_NAME`) comes after it, with
/// line breaks of the owner's choice.
fn exporter(fdinfo: &[u8]) -> Option<Vec<u8>> {
    let mut lines = fdinfo.split(|&byte| byte == b'\n');
    lines.find_map(|line| line.strip_prefix(b"exp_name:")).map(|name| name.trim_ascii().to_vec())
}

/// The length of the memory behind a file like `/sys/devices/pci0000:00/0000:00:03.0/resource2`,
/// which must be that very file of this process's sysfs.
fn pci_resource_size(fd: &OwnedFd) -> Option<u64> {
    let link = link(fd).filter(|link| is_resource(link))?;
    let ours = std::fs::metadata(&link).ok()?;
    // Without a request to the server of a file that only has the name.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let theirs = rustix::fs::statx(fd, "", flags, StatxFlags::INO).ok()?;
    let same = (theirs.stx_ino, rustix::fs::makedev(theirs.stx_dev_major, theirs.stx_dev_minor)) == (ours.ino(), ours.dev());
    same.then_some(ours.len())
}

fn is_resource(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("resource"));
    let number = name.map(|name| name.strip_suffix("_wc").unwrap_or(name));
    path.starts_with("/sys/devices") && matches!(number, Some("0" | "1" | "2" | "3" | "4" | "5"))
}

/// What `/proc` calls the file.
fn link(fd: &OwnedFd) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn resource_files_are_told_by_their_place() {
        let device = "/sys/devices/pci0000:00/0000:00:03.0";
        for name in ["resource0", "resource5", "resource2_wc"] {
            assert!(is_resource(&Path::new(device).join(name)), "{name}");
        }
        for name in ["resource", "resource6", "resource22", "resource2_xx", "rom", "config"] {
            assert!(!is_resource(&Path::new(device).join(name)), "{name}");
        }
        assert!(!is_resource(Path::new("/tmp/sys/devices/pci0000:00/resource2")));
        assert!(!is_resource(Path::new("/dmabuf:resource2")));
    }

    /// `dma_buf_show_fdinfo` prints the exporter before the name, which may be anything.
    #[test]
    fn an_exporter_is_what_the_kernel_says_first() {
        let info = b"pos:\t0\nflags:\t02\nsize:\t4096\ncount:\t2\nexp_name:\tamdgpu\nname:\tx\nexp_name:\tnvidia\n";
        assert_eq!(exporter(info).unwrap(), b"amdgpu");
        assert!(!PINNING.contains(&b"amdgpu".as_slice()));
        assert_eq!(exporter(b"pos:\t0\n"), None);
    }

    /// A file of a foreign filesystem can have any name, so the kernel is asked what the file is.
    #[test]
    fn a_name_proves_nothing() {
        let named = File::create("/dmabuf:a-file-with-this-name");
        // Only root may put it there, and elsewhere it would not have the name.
        if let Ok(file) = named {
            file.set_len(4096).unwrap();
            let refused = Foreign::new(file.into(), 0, &Intake::new().unwrap()).memory(4096, || false).unwrap_err();
            std::fs::remove_file("/dmabuf:a-file-with-this-name").unwrap();
            assert_eq!(refused, Reason::NotABuffer);
        }
    }
}
