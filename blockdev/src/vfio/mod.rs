//! A controller behind VFIO (the kernel's Documentation/driver-api/vfio.rst): its group on a
//! container of type1, its registers mapped, its interrupts as eventfds. It guards that only one
//! process has the device (a group can be opened once), and that the IOMMU is between the
//! controller and everything that was not mapped for it.
//!
//! What the crate vfio-ioctls leaves out is called here: mappings for reading only, the IOMMU's
//! ranges, a reset whose result is known, and whether the container is a real one.
#[deny(unsafe_code)]
mod pci_windows;

use std::fs;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use vfio_bindings::bindings::vfio::*;
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError, VfioRegionInfoCap};
use vmm_sys_util::eventfd::EventFd;

use pci_windows::without_pci;

use crate::spec::reg;
use crate::transport::event::{Event, is_signalled};
use crate::transport::{Transport, barrier};
use crate::{Error, NoPeerToPeer, Result};

/// PCI class of an NVM Express controller.
const NVME_CLASS: &str = "0x010802";
/// The PCI command register, in configuration space.
const COMMAND: u64 = 4;
/// Memory space enable and bus master enable in it.
const MEMORY_AND_MASTER: u16 = 0b110;
/// What every IOMMU can do, for kernels that do not tell (before Linux 5.4): 39 bits, without the
/// interrupt window of x86.
const COMMON_IOVAS: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1];

/// ioctl numbers (linux/vfio.h): `_IO(';', 100 + n)`.
const fn vfio_io(n: u32) -> libc::Ioctl {
    ((VFIO_TYPE as u32) << 8 | (VFIO_BASE + n)) as libc::Ioctl
}
const DEVICE_RESET: libc::Ioctl = vfio_io(11);
/// How long the kernel may keep a device from being reset, and how often that is tried.
const RESET_PATIENCE: Duration = Duration::from_secs(10);
const RESET_NAP: Duration = Duration::from_millis(10);
const IOMMU_GET_INFO: libc::Ioctl = vfio_io(12);
const IOMMU_MAP_DMA: libc::Ioctl = vfio_io(13);
/// IOMMU_VFIO_IOAS of linux/iommufd.h, which only an iommufd answers: `_IO(';', 0x88)`.
const IOMMUFD_VFIO_IOAS: libc::Ioctl = 0x3b88;

/// A controller that VFIO gave us.
pub(crate) struct VfioTransport {
    name: Arc<str>,
    /// Dropped before the device, which its mapping keeps open.
    registers: Registers,
    iovas: Vec<RangeInclusive<u64>>,
    iommufd_compat: bool,
    device: OpenDevice,
    container: Arc<VfioContainer>,
}

/// The device's descriptor.
struct OpenDevice {
    /// Signalled when the host wants the device back.
    release: Option<Event>,
    /// Signalled when the bus reports an uncorrectable error (AER).
    bus_error: Option<Event>,
    /// `None` only while being dropped.
    device: Option<VfioDevice>,
}

impl VfioTransport {
    /// Opens the controller at a PCI address, such as `0000:01:00.0` or `01:00.0`.
    ///
    /// # Errors
    /// They say what keeps the device from being used, and what to do.
    pub(crate) fn open(name: Arc<str>, address: &str) -> Result<Self> {
        let pci = PciFunction::find(&name, address)?;
        pci.check(&name)?;
        let container = VfioContainer::new(None).map_err(|error| pci.explain(&name, &error))?;
        let container = Arc::new(container);
        let device = VfioDevice::new(&pci.path, container.clone()).map_err(|error| pci.explain(&name, &error))?;

        switch_on(&device);
        let registers = Registers::map(&name, &device)?;
        let iovas = without_pci(iova_ranges(container.as_raw_fd()));
        let release = watch(&device, VFIO_PCI_REQ_IRQ_INDEX);
        let bus_error = watch(&device, VFIO_PCI_ERR_IRQ_INDEX);
        let iommufd_compat = is_iommufd(container.as_raw_fd());
        tracing::debug!(%name, bytes = registers.len, ?iovas, iommufd_compat, "opened through VFIO");
        let device = OpenDevice { release, bus_error, device: Some(device) };
        Ok(Self { name, registers, iovas, iommufd_compat, device, container })
    }

    fn device(&self) -> &VfioDevice {
        self.device.device.as_ref().expect("it is there until the transport is dropped")
    }

    fn failed(&self, action: &'static str, errno: i32) -> Error {
        Error::System { device: self.name.clone(), action, errno }
    }
}

impl Transport for VfioTransport {
    fn name(&self) -> &str {
        &self.name
    }

    fn registers_len(&self) -> usize {
        self.registers.len
    }

    fn read32(&self, offset: usize) -> u32 {
        // SAFETY: inside the mapping and aligned (`at` checks it); the registers stay mapped as
        // long as `self`.
        let value = u32::from_le(unsafe { self.registers.at::<u32>(offset).read_volatile() });
        barrier::after_device_write();
        value
    }

    fn write32(&self, offset: usize, value: u32) {
        barrier::before_doorbell();
        // SAFETY: as in `read32`.
        unsafe { self.registers.at::<u32>(offset).write_volatile(value.to_le()) }
    }

    fn read64(&self, offset: usize) -> u64 {
        // SAFETY: as in `read32`.
        let value = u64::from_le(unsafe { self.registers.at::<u64>(offset).read_volatile() });
        barrier::after_device_write();
        value
    }

    fn write64(&self, offset: usize, value: u64) {
        barrier::before_doorbell();
        // SAFETY: as in `read32`.
        unsafe { self.registers.at::<u64>(offset).write_volatile(value.to_le()) }
    }

    fn iova_ranges(&self) -> Vec<RangeInclusive<u64>> {
        self.iovas.clone()
    }

    unsafe fn map(&self, address: *mut u8, len: usize, iova: u64, writable: bool) -> Result<()> {
        let flags = if writable { VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE } else { VFIO_DMA_MAP_FLAG_READ };
        let request = vfio_iommu_type1_dma_map {
            argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
            flags,
            vaddr: address as u64,
            iova,
            size: len as u64,
        };
        // SAFETY: the descriptor is a container's, and the kernel only reads the structure during
        // the call. What the mapping makes of the memory is the caller's to answer for.
        match Errno::from_ioctl(unsafe { libc::ioctl(self.container.as_raw_fd(), IOMMU_MAP_DMA, &request) }) {
            Ok(_) => Ok(()),
            Err(Errno::NOMEM) => Err(Error::LockedMemory {
                device: self.name.clone(),
                len,
                limit: getrlimit(Resource::Memlock).current.unwrap_or(u64::MAX),
            }),
            Err(errno) => Err(Error::Memory { action: "mapping for DMA", len, errno: errno.raw_os_error() }),
        }
    }

    fn unmap(&self, iova: u64, len: usize) -> Result<()> {
        self.container.vfio_dma_unmap(iova, len).map_err(|error| {
            let errno = match error {
                VfioError::IommuDmaUnmap(error) => error.errno(),
                _ => libc::EINVAL, // something else was mapped there
            };
            Error::Memory { action: "unmapping from DMA", len, errno }
        })
    }

    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        if self.iommufd_compat { Err(NoPeerToPeer::IommufdCompat) } else { Ok(()) }
    }

    fn max_interrupts(&self) -> u32 {
        self.device().get_irq_info(VFIO_PCI_MSIX_IRQ_INDEX).map_or(0, |info| info.count)
    }

    fn set_interrupts(&self, events: &[BorrowedFd<'_>]) -> Result<()> {
        let device = self.device();
        // The kernel takes a set of vectors as a whole, and refuses one larger than what is there.
        let _ = device.disable_msix(); // nothing was enabled, the first time
        if events.is_empty() {
            return Ok(());
        }
        let events = events.iter().map(duplicate).collect::<std::result::Result<Vec<EventFd>, Errno>>();
        let events = events.map_err(|errno| self.failed("duplicating an eventfd", errno.raw_os_error()))?;
        device
            .enable_msix(events.iter().collect())
            .map_err(|_| self.failed("setting up its MSI-X interrupts", last_errno().raw_os_error()))
    }

    fn release_requested(&self) -> Option<BorrowedFd<'_>> {
        Some(self.device.release.as_ref()?.as_fd())
    }

    fn bus_error(&self) -> Option<&Event> {
        self.device.bus_error.as_ref()
    }

    fn reset(&self) -> Result<()> {
        let reset = until_free(RESET_PATIENCE, || {
            // SAFETY: the descriptor is a VFIO device's, and the call takes no argument.
            Errno::from_ioctl(unsafe { libc::ioctl(self.device().as_raw_fd(), DEVICE_RESET) })
        });
        match reset {
            Ok(_) => {}
            Err(Errno::INVAL) => tracing::warn!(device = %self.name, "its function has no reset"),
            Err(errno) => return Err(self.failed("resetting its function", errno.raw_os_error())),
        }
        // A reset of the bus, as after an error, may have left the function switched off.
        switch_on(self.device());
        Ok(())
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let releasing = self.release.as_ref().is_some_and(|release| is_signalled(release.as_fd()));
        let Some(device) = self.device.take() else { return };
        if releasing {
            // Closing the device lets its directory in sysfs go, which the crate's own way of
            // dropping it then fails to read.
            let fd = device.as_raw_fd();
            std::mem::forget(device);
            // SAFETY: the device that owned the descriptor was forgotten above, so that only this
            // closes it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

/// BAR0, mapped.
struct Registers {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range that stays mapped until it is dropped, only accessed by volatile loads
// and stores of aligned words, which any thread may do.
unsafe impl Send for Registers {}
// SAFETY: as above.
unsafe impl Sync for Registers {}

impl Registers {
    fn map(name: &Arc<str>, device: &VfioDevice) -> Result<Self> {
        let bar = VFIO_PCI_BAR0_REGION_INDEX;
        let flags = device.get_region_flags(bar);
        // Where the kernel keeps the page with the MSI-X table from being mapped, the part before
        // it has to do.
        let len = device
            .get_region_caps(bar)
            .into_iter()
            .find_map(|capability| match capability {
                VfioRegionInfoCap::SparseMmap(sparse) => {
                    Some(sparse.areas.iter().find(|area| area.offset == 0).map_or(0, |area| area.size))
                }
                _ => None,
            })
            .unwrap_or_else(|| device.get_region_size(bar)) as usize;
        if flags & VFIO_REGION_INFO_FLAG_MMAP == 0 || len < reg::DOORBELLS + 16 {
            let reason = "its registers cannot be mapped; a kernel without VFIO_PCI_MMAP, or no NVMe controller".into();
            return Err(Error::Unsupported { device: name.clone(), reason });
        }
        // SAFETY: the descriptor is open; the mapping made of it lives on its own.
        let fd = unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) };
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), len, access, MapFlags::SHARED, fd, device.get_region_offset(bar))
        };
        let failed =
            |errno: Errno| Error::System { device: name.clone(), action: "mapping its registers", errno: errno.raw_os_error() };
        let base = NonNull::new(base.map_err(failed)?.cast()).ok_or_else(|| failed(Errno::NOMEM))?;
        let registers = Self { base, len };
        // A child would keep the controller from others for as long as it lives.
        // SAFETY: it is this mapping, whose content stays as it is.
        unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxDontFork) }.map_err(failed)?;
        Ok(registers)
    }

    /// The address of a register. Panics if it lies outside, or is misaligned.
    #[inline]
    fn at<T>(&self, offset: usize) -> *mut T {
        let size = size_of::<T>();
        assert!(offset.is_multiple_of(size) && offset + size <= self.len, "register at {offset:#x} of {:#x}", self.len);
        self.base.as_ptr().wrapping_add(offset).cast()
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping; pointers into it live as long as an
        // access, which borrows it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::error!(%error, "cannot unmap the controller's registers");
        }
    }
}

/// A PCI function in sysfs.
struct PciFunction {
    address: String,
    path: PathBuf,
}

impl PciFunction {
    fn find(name: &Arc<str>, address: &str) -> Result<Self> {
        let mut address = address.to_ascii_lowercase();
        if address.matches(':').count() == 1 {
            address.insert_str(0, "0000:");
        }
        let digits = |part: &str, len: usize| part.len() == len && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        let valid = match address.split([':', '.']).collect::<Vec<_>>()[..] {
            [domain, bus, slot, function] => {
                domain.len() >= 4 && digits(domain, domain.len()) && digits(bus, 2) && digits(slot, 2) && digits(function, 1)
            }
            _ => false,
        };
        if !valid {
            let reason = format!("{address:?} is no PCI address; write it as vfio:0000:01:00.0 (lspci -D lists them)");
            return Err(Error::Unsupported { device: name.clone(), reason });
        }
        let path = Path::new("/sys/bus/pci/devices").join(&address);
        if !path.exists() {
            return Err(Error::NotFound { device: name.clone() });
        }
        Ok(Self { address, path })
    }

    /// The name that a link in the function's directory leads to.
    fn link(&self, name: &str) -> Option<String> {
        link_name(&self.path.join(name))
    }

    /// Refuses what VFIO would refuse with less to say.
    fn check(&self, name: &Arc<str>) -> Result<()> {
        let unsupported = |reason: String| Err(Error::Unsupported { device: name.clone(), reason });
        let class = fs::read_to_string(self.path.join("class")).unwrap_or_default();
        if class.trim() != NVME_CLASS {
            return unsupported(format!("is not an NVMe controller (its PCI class is {})", class.trim()));
        }
        let address = &self.address;
        match self.link("driver").as_deref() {
            Some("vfio-pci") => {}
            driver => {
                let driver = driver.unwrap_or("no driver");
                return unsupported(format!("is bound to {driver}, not to vfio-pci; run `gpunvme-vfio bind {address}` first"));
            }
        }
        if self.link("iommu_group").is_none() {
            return unsupported(
                "there is no IOMMU that covers it; switch on VT-d or AMD-Vi in the firmware, and boot with intel_iommu=on where \
                 the kernel does not use it by itself"
                    .into(),
            );
        }
        Ok(())
    }

    /// Says why VFIO did not give the device, and what to do.
    fn explain(&self, name: &Arc<str>, error: &VfioError) -> Error {
        let device = name.clone();
        let group = self.link("iommu_group").unwrap_or_default();
        let errno = |errno: i32, action: &'static str| match errno {
            libc::EBUSY => Error::Busy { device: name.clone() },
            libc::EACCES | libc::EPERM => Error::VfioPermission { device: name.clone(), group: group.clone() },
            libc::ENODEV | libc::ENXIO => Error::Gone { device: name.clone() },
            errno => Error::System { device: name.clone(), action, errno },
        };
        match error {
            VfioError::OpenContainer(error) if error.kind() == std::io::ErrorKind::NotFound => Error::Unsupported {
                device,
                reason: "there is no /dev/vfio/vfio; load the kernel module vfio-pci (modprobe vfio-pci)".into(),
            },
            VfioError::OpenContainer(error) => errno(error.raw_os_error().unwrap_or(libc::EIO), "opening /dev/vfio/vfio"),
            VfioError::OpenGroup(error, _) => errno(error.raw_os_error().unwrap_or(libc::EIO), "opening its VFIO group"),
            VfioError::GroupViable => Error::Unsupported {
                device,
                reason: format!(
                    "shares IOMMU group {group} with {}, which the kernel drives; bind all of them with `gpunvme-vfio bind`, or \
                     move one to a slot with a group of its own",
                    self.others_in_group().join(", ")
                ),
            },
            VfioError::VfioExtension | VfioError::VfioType1V2 => Error::Unsupported {
                device,
                reason: "the kernel has no type1 IOMMU backend; load vfio_iommu_type1 (modprobe vfio_iommu_type1)".into(),
            },
            VfioError::ContainerSetIOMMU(error) if error.errno() == libc::EPERM => Error::Unsupported {
                device,
                reason: "the IOMMU does not isolate interrupts; where that is acceptable, load vfio_iommu_type1 with \
                         allow_unsafe_interrupts=1"
                    .into(),
            },
            VfioError::ContainerSetIOMMU(error) => errno(error.errno(), "setting up its IOMMU address space"),
            VfioError::GroupGetDeviceFD(error) => errno(error.errno(), "getting it from its VFIO group"),
            error => Error::Unsupported { device, reason: format!("VFIO: {error}") },
        }
    }

    /// Other devices in the IOMMU group that belong to a driver of the kernel.
    fn others_in_group(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path.join("iommu_group/devices")).into_iter().flatten().flatten();
        let others = entries.filter_map(|entry| {
            let address = entry.file_name().to_string_lossy().into_owned();
            let driver = link_name(&entry.path().join("driver"))?;
            let harmless = address == self.address || matches!(driver.as_str(), "vfio-pci" | "pcieport" | "pci-stub");
            (!harmless).then(|| format!("{address} ({driver})"))
        });
        let mut others: Vec<String> = others.collect();
        others.sort();
        others
    }
}

fn link_name(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// Has the function answer on the bus, and reach memory by itself.
fn switch_on(device: &VfioDevice) {
    let mut command = [0; 2];
    device.region_read(VFIO_PCI_CONFIG_REGION_INDEX, &mut command, COMMAND);
    let command = u16::from_le_bytes(command) | MEMORY_AND_MASTER;
    device.region_write(VFIO_PCI_CONFIG_REGION_INDEX, &command.to_le_bytes(), COMMAND);
}

/// Repeats a call while the kernel says EAGAIN, as it does to a reset of a function while its own
/// recovery from an error of the bus (AER) holds the device.
fn until_free<T>(patience: Duration, mut call: impl FnMut() -> std::result::Result<T, Errno>) -> std::result::Result<T, Errno> {
    let started = Instant::now();
    loop {
        match call() {
            Err(Errno::AGAIN) if started.elapsed() < patience => std::thread::sleep(RESET_NAP),
            answer => return answer,
        }
    }
}

/// An event that the kernel signals for an interrupt index that stands for a notice of the host,
/// where it has this one.
fn watch(device: &VfioDevice, index: u32) -> Option<Event> {
    device.get_irq_info(index).filter(|info| info.count > 0)?;
    let event = Event::new().ok()?;
    let signalled = duplicate(&event.as_fd()).ok()?;
    device.enable_irq(index, vec![&signalled]).ok()?;
    Some(event)
}

fn duplicate(event: &BorrowedFd<'_>) -> std::result::Result<EventFd, Errno> {
    let fd = rustix::io::fcntl_dupfd_cloexec(event, 0)?;
    // SAFETY: a new descriptor of an eventfd, which only this value closes.
    Ok(unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) })
}

/// The IOVAs that the IOMMU translates (VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE).
fn iova_ranges(container: RawFd) -> Vec<RangeInclusive<u64>> {
    const HEADER: usize = size_of::<vfio_iommu_type1_info>();
    let mut len = HEADER;
    // The first answer says how large the whole is.
    for _ in 0..2 {
        let mut buffer = vec![0u64; len.div_ceil(8)];
        let info = buffer.as_mut_ptr().cast::<vfio_iommu_type1_info>();
        // SAFETY: the buffer is zeroed, aligned and at least as long as the structure.
        unsafe { (*info).argsz = len as u32 };
        // SAFETY: the descriptor is a container's, and the kernel writes at most `argsz` bytes to
        // the buffer.
        if unsafe { libc::ioctl(container, IOMMU_GET_INFO, info) } < 0 {
            break;
        }
        // SAFETY: as above; the kernel has filled it.
        let (needed, capabilities) = unsafe { ((*info).argsz as usize, (*info).cap_offset as usize) };
        if needed > len {
            len = needed;
            continue;
        }
        let bytes: Vec<u8> = buffer.iter().flat_map(|word| word.to_ne_bytes()).collect();
        return find_ranges(&bytes, capabilities).unwrap_or_else(|| COMMON_IOVAS.to_vec());
    }
    COMMON_IOVAS.to_vec()
}

/// Finds the ranges in a chain of capabilities: a header `{ id: u16, version: u16, next: u32 }`
/// before each.
fn find_ranges(info: &[u8], mut at: usize) -> Option<Vec<RangeInclusive<u64>>> {
    let u16_at = |at: usize| Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_ne_bytes(info.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_ne_bytes(info.get(at..at + 8)?.try_into().ok()?));
    while at != 0 {
        if u32::from(u16_at(at)?) != VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE {
            at = u32_at(at + 4)? as usize;
            continue;
        }
        // The count, four bytes of padding, then start and end of each.
        let count = u32_at(at + 8)? as usize;
        return (0..count).map(|n| Some(u64_at(at + 16 + n * 16)?..=u64_at(at + 24 + n * 16)?)).collect();
    }
    None
}

/// Whether a container is iommufd's imitation of one: it then answers iommufd's own calls too.
fn is_iommufd(container: RawFd) -> bool {
    // struct iommu_vfio_ioas { size, ioas_id, op = IOMMU_VFIO_IOAS_GET, reserved }
    let mut request = [12u32, 0, 0];
    // SAFETY: the descriptor is open, and the kernel accesses at most the 12 bytes of the
    // structure.
    let answer = unsafe { libc::ioctl(container, IOMMUFD_VFIO_IOAS, request.as_mut_ptr()) };
    // Type1 has no such call; an iommufd knows its address space, or says that it has none.
    answer == 0 || last_errno() == Errno::NODEV
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

trait FromIoctl: Sized {
    fn from_ioctl(answer: i32) -> std::result::Result<i32, Self>;
}

impl FromIoctl for Errno {
    fn from_ioctl(answer: i32) -> std::result::Result<i32, Self> {
        if answer < 0 { Err(last_errno()) } else { Ok(answer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> Arc<str> {
        "vfio:x".into()
    }

    #[test]
    fn what_is_no_pci_address_never_becomes_a_path() {
        for address in ["", "../../../etc", "0000:01:00", "0000:01:00.0/driver", "01:0.0", "0000:01:00.0.0", "zzzz:01:00.0"] {
            let Err(Error::Unsupported { reason, .. }) = PciFunction::find(&name(), address) else { panic!("{address}") };
            assert!(reason.contains("no PCI address"), "{reason}");
        }
        for address in ["ffff:ff:1f.7", "FF:1F.7"] {
            assert!(matches!(PciFunction::find(&name(), address), Err(Error::NotFound { .. })), "{address}");
        }
    }

    #[test]
    fn a_device_that_the_kernel_holds_is_waited_for_and_not_for_ever() {
        let mut answers = [Err(Errno::AGAIN), Err(Errno::AGAIN), Ok(7), Ok(8)].into_iter();
        assert_eq!(until_free(Duration::from_secs(60), || answers.next().unwrap()), Ok(7));
        let mut answers = [Err::<i32, _>(Errno::INVAL), Ok(7)].into_iter();
        assert_eq!(until_free(Duration::from_secs(60), || answers.next().unwrap()), Err(Errno::INVAL));
        assert_eq!(until_free::<i32>(Duration::from_millis(30), || Err(Errno::AGAIN)), Err(Errno::AGAIN));
    }

    #[test]
    fn the_ranges_are_found_behind_other_capabilities() {
        let mut info = vec![0u8; 24];
        let capability = |id: u16, next: u32| [id.to_ne_bytes().to_vec(), vec![1, 0], next.to_ne_bytes().to_vec()].concat();
        info.extend(capability(3, 24 + 16));
        info.extend([0; 8]);
        info.extend(capability(1, 0));
        info.extend([2, 0, 0, 0, 0, 0, 0, 0]);
        for edge in [0u64, 0xfedf_ffff, 0xfef0_0000, u64::MAX >> 16] {
            info.extend(edge.to_ne_bytes());
        }
        assert_eq!(find_ranges(&info, 24), Some(vec![0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX >> 16]));
        assert_eq!(find_ranges(&info[..info.len() - 1], 24), None, "cut short");
        assert_eq!(find_ranges(&info, 0), None, "no capabilities");
    }
}
