//! The interface between the driver and a controller: registers, DMA and interrupts. The driver
//! ([`crate::nvme`]) is written against this trait alone, so that the code that runs on hardware
//! behind VFIO is the code that the tests run on the software controller.
#[allow(unsafe_code)]
pub(crate) mod barrier;
pub(crate) mod event;

use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;

use event::Event;

use crate::{NoPeerToPeer, Result};

/// How the driver reaches one controller. Everything may be called from any thread.
pub(crate) trait Transport: Send + Sync {
    /// The DEVICE's controller, for messages: `vfio:0000:01:00.0`.
    fn name(&self) -> &str;

    /// Bytes of BAR0 that can be reached: registers and doorbells.
    fn registers_len(&self) -> usize;

    /// Reads a register. All ones where the controller is gone, as on PCI Express.
    ///
    /// # Panics
    ///
    /// This and the three below: if the access is misaligned or reaches beyond
    /// [`Transport::registers_len`].
    fn read32(&self, offset: usize) -> u32;

    /// Writes a register or doorbell. What this thread wrote to memory before is visible to the
    /// controller first.
    fn write32(&self, offset: usize, value: u32);

    /// Reads a register of 8 bytes.
    fn read64(&self, offset: usize) -> u64;

    /// Writes a register of 8 bytes, ordered as [`Transport::write32`].
    fn write64(&self, offset: usize, value: u64);

    /// The IOVAs that may be mapped: inclusive ranges, ascending, disjoint, each at least a page
    /// long.
    fn iova_ranges(&self) -> Vec<RangeInclusive<u64>>;

    /// Makes `len` bytes of this process's memory at `address` reachable by the controller at
    /// `iova`. All three are multiples of the page size. Without `writable` the controller can
    /// only read it. The memory stays reachable until [`Transport::unmap`], whatever happens to
    /// the address: type1 does not follow munmap. Memory of another device (VM_PFNMAP) may be
    /// refused; the error says why.
    ///
    /// # Safety
    ///
    /// The memory is mapped in this process, stays so until it is unmapped here, and nothing in it
    /// is borrowed in Rust while a command names it.
    #[allow(unsafe_code)] // only declares it
    unsafe fn map(&self, address: *mut u8, len: usize, iova: u64, writable: bool) -> Result<()>;

    /// Undoes one [`Transport::map`], given the same `iova` and `len`. When it returns, the
    /// controller cannot reach the memory any more, whatever state it is in.
    fn unmap(&self, iova: u64, len: usize) -> Result<()>;

    /// Whether [`Transport::map`] takes other devices' memory, and if not, why.
    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer>;

    /// The most interrupt vectors. 0 where there are none: then everything is polled.
    fn max_interrupts(&self) -> u32;

    /// Sets up as many vectors as there are elements, in place of all that were set up before:
    /// vector `i` adds 1 to eventfd `i` from now on. Empty turns interrupts off. The transport
    /// keeps its own handle on the eventfds.
    fn set_interrupts(&self, events: &[BorrowedFd<'_>]) -> Result<()>;

    /// An eventfd that is signalled when the host asks for the device back (hot-unplug,
    /// unbinding), where it can ask.
    fn release_requested(&self) -> Option<BorrowedFd<'_>>;

    /// An event that is signalled when the bus reports an error of the device that it did not
    /// correct, where it can tell. The device may have been reset since, and answers or not.
    fn bus_error(&self) -> Option<&Event>;

    /// Function-level reset. Afterwards the registers are as after power-on, and no command is in
    /// flight. A function that has no such reset is only made reachable again. It may take some
    /// seconds, while the host recovers the bus. The caller stops the controller afterwards.
    fn reset(&self) -> Result<()>;
}
