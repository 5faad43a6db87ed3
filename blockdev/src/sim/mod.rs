//! A software NVMe controller: `sim:PATH`. The driver of [`crate::nvme`] runs on it as on
//! hardware: registers, queues, doorbells, PRPs and SGLs are real, and a file is behind them. It
//! follows the specification, has an IOMMU that refuses memory that is not mapped and a volatile
//! write cache that loses data when power is cut, and it fails on demand.
//!
//! From the top: [`SimController`] is the controller for tests, and a `Transport` for the
//! driver; `controller` is its state and registers; `queues` fetches commands and posts
//! completions; `admin`, `nvm`, `logs` and `events` do them; `data` finds their memory, `iommu`
//! reaches it, `medium` keeps their data; `faults` decides which of them fail.
//!
//! There is one lock, on the whole state, and one thread, which does commands, or with `inline=on`
//! only those that are late.
mod admin;
mod controller;
mod data;
mod events;
mod faults;
#[allow(unsafe_code)]
mod iommu;
mod logs;
#[allow(unsafe_code)]
mod medium;
mod nvm;
mod options;
mod queues;
mod random;
mod ranges;
mod status;
#[cfg(test)]
mod tests;

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::EventfdFlags;
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;

pub use faults::{Effect, Fault, On};
pub use iommu::DmaFault;

use controller::Controller;
use iommu::Iommu;
use medium::{Backing, Medium};
use options::{Kept, Options};

use crate::device_name::DeviceName;
use crate::spec::{NSSR_MAGIC, reg};
use crate::transport::Transport;
use crate::transport::event::Event;
use crate::{Error, NoPeerToPeer, OpenMode, Result};

/// A software controller. It has power for as long as it lives, whatever drivers come and go.
///
/// Every method may be called from any thread; each takes the one lock of the controller, which
/// its own thread and a driver's access to registers take as well, for the time of one command.
pub struct SimController {
    name: Arc<str>,
    mode: OpenMode,
    inline: bool,
    registers_len: usize,
    vectors: u32,
    iommu: Arc<Iommu>,
    shared: Arc<Shared>,
    release: OwnedFd,
    bus_error: Event,
    worker: Option<JoinHandle<()>>,
}

/// What the controller and its thread share.
struct Shared {
    state: Mutex<Controller>,
    /// There is something to do, or to wait for.
    work: Condvar,
}

impl SimController {
    /// A controller as a DEVICE string describes it, with none of the driver's options:
    /// `sim:PATH,lba=4096,mdts=5`. It locks its files as [`crate::open()`] does.
    ///
    /// # Errors [`Error::NotFound`], [`Error::Busy`], [`Error::Permission`] and
    /// [`Error::ReadOnly`] of its files; [`Error::Unsupported`] for an option that does not exist;
    /// [`Error::System`] when the kernel has no memory, descriptor or thread for it.
    pub fn new(device: &str, mode: OpenMode) -> Result<Arc<Self>> {
        let mut name = DeviceName::parse(device).ok_or_else(|| Error::NotFound { device: device.into() })?;
        Ok(Arc::new(Self::connect(&mut name, mode)?))
    }

    /// [`SimController::new`], where the driver took its options already.
    pub(crate) fn connect(name: &mut DeviceName<'_>, mode: OpenMode) -> Result<Self> {
        let options = Options::take(name)?;
        name.finish()?;
        Self::start(name.device(), name.target, options, mode)
    }

    /// What it was opened for.
    pub(crate) fn mode(&self) -> OpenMode {
        self.mode
    }

    fn start(name: Arc<str>, target: &str, options: Options, mode: OpenMode) -> Result<Self> {
        let failed = |action, errno: Errno| Error::System { device: name.clone(), action, errno: errno.raw_os_error() };
        let namespaces = (1..=options.namespaces)
            .map(|nsid| {
                let (backing, len) = backing(&name, target, nsid, options.kept, mode)?;
                let seed = options.seed ^ u64::from(nsid) << 32;
                Medium::new(backing, len - len % options.block, options.block, options.volatile_cache, seed)
                    .map_err(|errno| failed("making its cache", errno))
            })
            .collect::<Result<Vec<_>>>()?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let release = rustix::event::eventfd(0, flags).map_err(|errno| failed("making an eventfd", errno))?;
        let bus_error = Event::new().map_err(|errno| failed("making an eventfd", errno))?;
        let (inline, vectors) = (options.inline, options.vectors);
        let state = Controller::new(options, namespaces, mode == OpenMode::ReadOnly);
        let (iommu, registers_len) = (state.iommu.clone(), state.registers_len());
        let shared = Arc::new(Shared { state: Mutex::new(state), work: Condvar::new() });
        let worker = {
            let shared = shared.clone();
            std::thread::Builder::new().name("sim".into()).spawn(move || shared.run(inline))
        };
        let worker = worker.map_err(|error| Error::System {
            device: name.clone(),
            action: "starting the controller's thread",
            errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
        })?;
        Ok(Self { name, mode, inline, registers_len, vectors, iommu, shared, release, bus_error, worker: Some(worker) })
    }

    fn state(&self) -> MutexGuard<'_, Controller> {
        self.shared.state.lock()
    }

    /// Adds a fault behind the present ones. The first that matches a command decides.
    pub fn inject(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Removes all faults. Commands that are stalled stay so.
    pub fn clear_faults(&self) {
        self.state().faults.clear();
    }

    /// How often a fault hit.
    pub fn hits(&self) -> u64 {
        self.state().hits
    }

    /// Does all commands that are stalled now. Those that are lost do not complete even so.
    pub fn release(&self) {
        self.state().resume(true);
    }

    /// The number of commands that were fetched and are not done.
    pub fn stalled(&self) -> usize {
        self.state().stalled.len()
    }

    /// Cuts power: what is in flight is not done, and each logical block that only the cache has
    /// newer is lost or not, by the seed. Registers read as all ones until
    /// [`SimController::power_on`].
    ///
    /// # Panics
    /// If the file of a namespace cannot be written.
    pub fn power_cut(&self) {
        self.state().power_cut().expect("the medium does not fail");
    }

    /// Gives the controller power after a power cut, or puts it back after it vanished. A driver
    /// that is attached finds it as after power-on, as one does after a brown-out.
    pub fn power_on(&self) {
        self.state().power_on();
    }

    /// Sets the composite temperature, in kelvins. From 343 on, or from the threshold that the
    /// driver set, the controller raises a SMART event (Base 5.2).
    pub fn set_temperature(&self, kelvins: u16) {
        let mut state = self.state();
        state.logs.temperature = kelvins;
        state.check_temperature();
        state.finish_batch();
    }

    /// Resets the NVM subsystem (Base 3.7.1), as another host of it could.
    pub fn subsystem_reset(&self) {
        self.write32(reg::NSSR, NSSR_MAGIC);
    }

    /// Asks the driver to let go of the device, as the host does before a hot-unplug.
    pub fn request_release(&self) {
        rustix::io::write(&self.release, &1u64.to_ne_bytes()).expect("the counter is not full");
    }

    /// Reports an uncorrectable error of the bus (PCI Express AER).
    pub fn report_bus_error(&self) {
        self.bus_error.signal();
    }

    /// What was reported to a driver before is none of the next one's.
    pub(crate) fn forget_bus_errors(&self) {
        self.bus_error.drain();
    }

    /// Resets the function, as the host may do after an error of the bus.
    pub fn reset_function(&self) {
        self.state().reset();
    }

    /// The accesses that its IOMMU refused so far.
    pub fn dma_faults(&self) -> Vec<DmaFault> {
        self.iommu.faults()
    }

    /// The number of mappings in its IOMMU.
    pub fn mapped(&self) -> usize {
        self.iommu.mapped()
    }

    /// How often memory was unmapped that a command in flight was going to use.
    pub fn unmapped_in_flight(&self) -> u64 {
        self.state().unmapped_in_flight
    }

    /// A copy of all bytes of a namespace, as reads see them or, if `durable`, without those that
    /// only the volatile cache has.
    ///
    /// # Panics
    /// If there is no such namespace, or its file cannot be read.
    pub fn contents(&self, nsid: u32, durable: bool) -> Vec<u8> {
        self.state().namespaces[nsid as usize - 1].contents(durable).expect("its file can be read")
    }

    fn check(&self, offset: usize, len: usize) {
        let inside = offset.is_multiple_of(len) && offset + len <= self.registers_len;
        assert!(inside, "{len} bytes at {offset:#x} of registers of {:#x}", self.registers_len);
    }

    /// After registers were written.
    fn go_on(&self, mut state: MutexGuard<'_, Controller>) {
        if self.inline {
            state.run();
        }
        drop(state);
        self.shared.work.notify_one();
    }
}

impl Shared {
    fn run(&self, inline: bool) {
        let mut state = self.state.lock();
        while !state.stopping {
            state.resume(false);
            if !inline && state.step() {
                // A thread that rings a doorbell waits for one command at the most.
                MutexGuard::bump(&mut state);
                continue;
            }
            state.finish_batch();
            match state.next_due() {
                Some(due) => {
                    self.work.wait_until(&mut state, due);
                }
                None => self.work.wait(&mut state),
            }
        }
    }
}

/// What a namespace is kept on, and how long that is.
fn backing(name: &Arc<str>, target: &str, nsid: u32, kept: Kept, mode: OpenMode) -> Result<(Backing, u64)> {
    let failed = |action, errno: Errno| Error::System { device: name.clone(), action, errno: errno.raw_os_error() };
    match kept {
        Kept::Nowhere(len) => Ok((Backing::Null, len)),
        Kept::InMemory(len) => {
            let file = medium::file_in_memory(len).map_err(|errno| failed("allocating memory for it", errno))?;
            Ok((Backing::File(file), len))
        }
        Kept::OnFiles => {
            let path = if nsid == 1 { PathBuf::from(target) } else { PathBuf::from(format!("{target}.{nsid}")) };
            let (file, _) = crate::file::open_exclusively(name, &path, mode, crate::file::Claim::Ours, OFlags::empty())?;
            let len = rustix::fs::seek(&file, SeekFrom::End(0)).map_err(|errno| failed("asking for its size", errno))?;
            Ok((Backing::File(file), len))
        }
    }
}

impl Drop for SimController {
    fn drop(&mut self) {
        self.state().stopping = true;
        self.shared.work.notify_one();
        if let Some(worker) = self.worker.take()
            && worker.join().is_err()
        {
            tracing::error!(device = %self.name, "the thread of the software controller panicked");
        }
    }
}

impl Transport for SimController {
    fn name(&self) -> &str {
        &self.name
    }

    fn registers_len(&self) -> usize {
        self.registers_len
    }

    fn read32(&self, offset: usize) -> u32 {
        self.check(offset, 4);
        self.state().read(offset)
    }

    fn write32(&self, offset: usize, value: u32) {
        self.check(offset, 4);
        let mut state = self.state();
        state.write(offset, value);
        self.go_on(state);
    }

    fn read64(&self, offset: usize) -> u64 {
        self.check(offset, 8);
        let state = self.state();
        u64::from(state.read(offset)) | u64::from(state.read(offset + 4)) << 32
    }

    fn write64(&self, offset: usize, value: u64) {
        self.check(offset, 8);
        let mut state = self.state();
        state.write(offset, value as u32);
        state.write(offset + 4, (value >> 32) as u32);
        self.go_on(state);
    }

    fn iova_ranges(&self) -> Vec<RangeInclusive<u64>> {
        Iommu::ranges()
    }

    #[allow(unsafe_code)] // the trait's promise is passed on: `iommu` is where it is used
    unsafe fn map(&self, address: *mut u8, len: usize, iova: u64, writable: bool) -> Result<()> {
        self.iommu.map(address, len, iova, writable).map_err(|errno| self.mapping_failed("mapping memory for DMA", errno))
    }

    fn unmap(&self, iova: u64, len: usize) -> Result<()> {
        let mut state = self.state();
        state.unmapped_in_flight += state.stalled.iter().filter(|stalled| stalled.uses(iova, len)).count() as u64;
        self.iommu.unmap(iova, len).map_err(|errno| self.mapping_failed("unmapping memory", errno))
    }

    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        Ok(())
    }

    fn max_interrupts(&self) -> u32 {
        self.vectors
    }

    fn set_interrupts(&self, events: &[BorrowedFd<'_>]) -> Result<()> {
        if events.len() > self.vectors as usize {
            return Err(self.mapping_failed("setting up interrupts", Errno::INVAL));
        }
        let vectors = events.iter().map(rustix::io::dup).collect::<rustix::io::Result<Vec<_>>>();
        self.state().vectors = vectors.map_err(|errno| self.mapping_failed("setting up interrupts", errno))?;
        Ok(())
    }

    fn release_requested(&self) -> Option<BorrowedFd<'_>> {
        Some(self.release.as_fd())
    }

    fn bus_error(&self) -> Option<&Event> {
        Some(&self.bus_error)
    }

    fn reset(&self) -> Result<()> {
        self.state().reset();
        Ok(())
    }
}

impl SimController {
    fn mapping_failed(&self, action: &'static str, errno: Errno) -> Error {
        Error::System { device: self.name.clone(), action, errno: errno.raw_os_error() }
    }
}
