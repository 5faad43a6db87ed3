//! Memory of devices, such as GPUs, that files are read into and written from without a stop in
//! host memory.
//!
//! It guards the difference to host memory: nothing of it is ever borrowed as bytes, because a
//! device changes it at any time.

use crate::buffer::{Memory, sealed};
use crate::error::{Error, Result};
use crate::sys::Mapping;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

/// Another device's memory, by a descriptor that stands for it.
///
/// Only a mount whose SSD is driven by gpunvme itself takes it (`mount.gpunvme vfio:ADDRESS`);
/// [`crate::Info::reason`] and the error of [`crate::Mount::register`] say what is missing.
#[derive(Debug)]
pub struct DeviceMemory {
    memory: OwnedFd,
    len: usize,
}

impl DeviceMemory {
    /// The first `len` bytes of a dma-buf, as a GPU's driver exports it. Nothing is checked before
    /// [`crate::Mount::register`].
    pub fn dma_buf(memory: OwnedFd, len: usize) -> DeviceMemory {
        DeviceMemory { memory, len }
    }

    /// The memory behind a BAR of a PCI device that no driver uses: what
    /// `/sys/bus/pci/devices/ADDRESS/resourceN` stands for. `resource` is N, or `N_wc` for a
    /// mapping that combines writes. Mounts take it from root only: it is for laboratories without
    /// a GPU.
    ///
    /// # Errors
    /// [`Error::Path`] where there is no such BAR.
    pub fn pci_resource(address: &str, resource: &str) -> Result<DeviceMemory> {
        let path = PathBuf::from(format!("/sys/bus/pci/devices/{address}/resource{resource}"));
        let open = || {
            let memory = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
            let len = usize::try_from(rustix::fs::fstat(&memory)?.st_size).unwrap_or(0);
            Ok(DeviceMemory { memory, len })
        };
        open().map_err(|errno| Error::Path { path: path.clone(), action: "open it", errno })
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // there is always some
    pub fn len(&self) -> usize {
        self.len
    }

    /// Only its first `len` bytes, or all where it has fewer.
    #[must_use]
    pub fn first(self, len: usize) -> DeviceMemory {
        DeviceMemory { len: len.min(self.len), ..self }
    }

    /// Makes it reachable for the CPU. That is for looking and for tests: it is slow, above all to
    /// read.
    ///
    /// # Errors
    /// [`Error::Memory`] where the device's driver does not allow it.
    pub fn map(&self) -> Result<DeviceMapping> {
        let mapping = Mapping::new(self.memory.as_fd(), self.len).map_err(|errno| Error::Memory { len: self.len, errno })?;
        Ok(DeviceMapping(mapping))
    }
}

impl Memory for DeviceMemory {}

impl sealed::Memory for DeviceMemory {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    fn length(&self) -> usize {
        self.len
    }
}

/// Device memory, mapped for the CPU. If the device goes away meanwhile the process ends by
/// SIGBUS.
#[derive(Debug)]
pub struct DeviceMapping(Mapping);

impl DeviceMapping {
    /// Copies the bytes from `offset` on into `out`.
    ///
    /// # Errors
    /// [`Error::Memory`] with `EINVAL` where they reach past the end.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.check(self.0.copy_out(offset, out))
    }

    /// Copies `data` in, to `offset`.
    ///
    /// # Errors
    /// As [`DeviceMapping::read_at`].
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(self.0.copy_in(offset, data))
    }

    fn check(&self, copied: Option<()>) -> Result<()> {
        copied.ok_or(Error::Memory { len: self.0.len(), errno: Errno::INVAL })
    }
}
