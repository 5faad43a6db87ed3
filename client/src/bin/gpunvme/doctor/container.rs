//! Detects which driver serves /dev/vfio/vfio: the type1 container, which maps device memory, or
//! iommufd's imitation of it, which does not.
//!
//! Both answer VFIO_CHECK_EXTENSION alike. But the imitation is an iommufd, and understands
//! iommufd's own ioctls.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Container {
    Type1,
    IommufdCompat,
    /// VFIO without a driver for this IOMMU: vfio_iommu_type1 is not loaded.
    NoType1,
    /// There is no /dev/vfio/vfio: VFIO is not loaded.
    Absent,
    /// It may not be opened, or answers strangely.
    Unknown(String),
}

// linux/vfio.h: _IO(VFIO_TYPE, VFIO_BASE + n), extension numbers.
const VFIO_GET_API_VERSION: u32 = 0x3b64;
const VFIO_CHECK_EXTENSION: u32 = 0x3b65;
const VFIO_API_VERSION: i32 = 0;
const VFIO_TYPE1V2_IOMMU: u64 = 3;
// linux/iommufd.h: _IO(IOMMUFD_TYPE, IOMMUFD_CMD_DESTROY), and its argument.
const IOMMU_DESTROY: u32 = 0x3b80;

#[repr(C)]
struct IommuDestroy {
    size: u32,
    id: u32,
}

impl Container {
    /// Asks this machine's kernel.
    pub fn probe() -> Container {
        let container = match rustix::fs::open("/dev/vfio/vfio", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Ok(container) => container,
            Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => return Container::Absent,
            Err(errno) => return Container::Unknown(errno.to_string()),
        };
        match ioctl(&container, VFIO_GET_API_VERSION, 0) {
            Ok(VFIO_API_VERSION) => {}
            Ok(version) => return Container::Unknown(format!("it speaks version {version} of VFIO's interface")),
            Err(errno) => return Container::Unknown(errno.to_string()),
        }
        // No object has the number 0, so nothing is destroyed: iommufd says ENOENT, VFIO that it
        // knows no such ioctl.
        let nothing = IommuDestroy { size: size_of::<IommuDestroy>() as u32, id: 0 };
        if ioctl(&container, IOMMU_DESTROY, &raw const nothing as u64) == Err(Errno::NOENT) {
            return Container::IommufdCompat;
        }
        match ioctl(&container, VFIO_CHECK_EXTENSION, VFIO_TYPE1V2_IOMMU) {
            Ok(1) => Container::Type1,
            Ok(_) => Container::NoType1,
            Err(errno) => Container::Unknown(errno.to_string()),
        }
    }

    /// What a copy of another machine's files shows of it.
    pub fn of_another_machine(root: &Path) -> Container {
        if root.join("dev/vfio/vfio").exists() {
            Container::Unknown("it is another machine's".to_owned())
        } else {
            Container::Absent
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Container::Type1 => "type1",
            Container::IommufdCompat => "iommufd-compat",
            Container::NoType1 => "no-type1",
            Container::Absent => "absent",
            Container::Unknown(_) => "unknown",
        }
    }
}

fn ioctl(container: &OwnedFd, request: u32, argument: u64) -> Result<i32, Errno> {
    // SAFETY: two of the requests take a number; IOMMU_DESTROY takes the address of a structure
    // that lives in the caller's frame, and reads `size` bytes of it
    // (drivers/iommu/iommufd/main.c, drivers/vfio/container.c).
    let result = unsafe { libc::ioctl(container.as_raw_fd(), request.into(), argument) };
    if result < 0 { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)) } else { Ok(result) }
}
