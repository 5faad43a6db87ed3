//! Whether the driver is open, and what there is while it is.
//!
//! It opens by itself with the first file or buffer that is registered, and `cuFileDriverOpen`
//! counts: `cuFileDriverClose_v2` closes with the last count, `cuFileDriverClose` at once. Closing
//! waits for what is in flight, which holds an [`Open`].
//!
//! In a process that was forked from one that had opened it, it is closed for good ([`fork`]).
//!
//! Locks: `STATE`, for moments, but while NVIDIA's library opens or closes.

use crate::abi::{self, Properties};
use crate::batch::Batches;
use crate::buffers::Buffers;
use crate::failure::{Code, Result};
use crate::files::Files;
use crate::fork;
use crate::mounts::Mounts;
use crate::parameters::{self, Size};
use crate::real::Library;
use crate::report;
use crate::streams::Registrations;
use crate::workers::Workers;
use parking_lot::{Mutex, RwLock, RwLockWriteGuard};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often a thread that closes the driver looks whether all is done.
const NAP: Duration = Duration::from_micros(200);

/// What there is while the driver is open.
pub struct Open {
    pub files: Files,
    pub buffers: Buffers,
    pub mounts: Mounts,
    pub batches: Batches,
    pub streams: Registrations,
    pub workers: Workers,
    properties: Mutex<Properties>,
}

struct State {
    open: Option<Arc<Open>>,
    /// What there was before it was closed, for as long as requests of it are in flight.
    closing: Vec<Weak<Open>>,
    uses: i64,
}

static STATE: RwLock<State> = RwLock::new(State { open: None, closing: Vec::new(), uses: 0 });

/// What there is, if the driver is open.
///
/// # Errors
/// [`Code::DriverNotInitialized`].
pub fn opened() -> Result<Arc<Open>> {
    if fork::is_forked() {
        return Err(Code::DriverNotInitialized.into());
    }
    Ok(STATE.read().open.clone().ok_or(Code::DriverNotInitialized)?)
}

/// What there is, and before it what other threads are closing: for calls that end something of
/// it, and wait until nothing uses its memory any more.
///
/// # Errors
/// As [`opened`].
pub fn opened_or_closing() -> Result<impl Iterator<Item = Arc<Open>>> {
    let open = opened();
    let mut all: Vec<_> =
        if fork::is_forked() { Vec::new() } else { STATE.read().closing.iter().filter_map(Weak::upgrade).collect() };
    match open {
        Err(failure) if all.is_empty() => return Err(failure),
        open => all.extend(open),
    }
    Ok(all.into_iter())
}

/// What there is; opens the driver if need be.
///
/// # Errors
/// [`Code::DriverNotInitialized`] in a process that was forked from one that had opened it.
pub fn open_if_needed() -> Result<Arc<Open>> {
    if let Ok(open) = opened() {
        return Ok(open);
    }
    Ok(start(&mut *to_be_opened()?))
}

/// Opens the driver, or counts one more use.
///
/// # Errors
/// As [`open_if_needed`].
pub fn open() -> Result<()> {
    let mut state = to_be_opened()?;
    let was_open = state.open.is_some();
    start(&mut state);
    if was_open {
        state.uses += 1;
    }
    Ok(())
}

fn to_be_opened() -> Result<RwLockWriteGuard<'static, State>> {
    if fork::is_forked() {
        return Err(Code::DriverNotInitialized.into());
    }
    fork::watch();
    Ok(STATE.write())
}

fn start(state: &mut State) -> Arc<Open> {
    if let Some(open) = &state.open {
        return open.clone();
    }
    report::start();
    let open = Arc::new(Open {
        files: Files::default(),
        buffers: Buffers::default(),
        mounts: Mounts::default(),
        batches: Batches::default(),
        streams: Registrations::default(),
        workers: Workers::default(),
        properties: Mutex::new(properties()),
    });
    (state.open, state.uses) = (Some(open.clone()), 1);
    open
}

/// Closes the driver; with `counted` only if that was the last use of it.
///
/// # Errors
/// [`Code::DriverNotInitialized`] where it is not open.
pub fn close(counted: bool) -> Result<()> {
    if fork::is_forked() {
        return Err(Code::DriverNotInitialized.into());
    }
    let open = {
        let mut state = STATE.write();
        if state.open.is_none() {
            return Err(Code::DriverNotInitialized.into());
        }
        state.uses -= 1;
        if counted && state.uses > 0 {
            return Ok(());
        }
        state.uses = 0;
        let open = state.open.take();
        state.closing.retain(|closing| closing.strong_count() > 0);
        state.closing.extend(open.as_ref().map(Arc::downgrade));
        open
    };
    let Some(mut open) = open else { return Ok(()) };
    open.batches.close_all();
    let open = loop {
        match Arc::try_unwrap(open) {
            Ok(open) => break open,
            Err(still) => open = still,
        }
        std::thread::sleep(NAP);
    };
    let Open { files, buffers, .. } = open;
    drop(files);
    // Another thread may have opened the driver meanwhile, and have files of the library.
    let state = STATE.write();
    if let Some(library) = Library::loaded() {
        if state.open.is_none() { library.close() } else { buffers.take_back(library) }
    }
    Ok(())
}

/// How often it was opened and not closed.
pub fn uses() -> i64 {
    if fork::is_forked() { 0 } else { STATE.read().uses }
}

/// Whether it is open, here.
pub fn is_open() -> bool {
    opened().is_ok()
}

fn properties() -> Properties {
    let size = |which| parameters::size(which);
    let narrow = |value: usize| value.min(u32::MAX as usize) as u32;
    Properties {
        // Programs take 0.0 for the sign that files are read by the processor.
        major_version: 2,
        minor_version: 0,
        poll_threshold: size(Size::PollThreshold),
        max_direct_io: size(Size::MaxDirectIo),
        status_flags: abi::STATUS_NVME,
        control_flags: parameters::control_flags(),
        features: abi::FEATURES,
        max_device_cache: narrow(size(Size::MaxDeviceCache)),
        per_buffer_cache: narrow(size(Size::PerBufferCache)),
        max_pinned: narrow(size(Size::MaxPinned)),
        max_batch: narrow(size(Size::Batch)),
        batch_timeout_ms: narrow(size(Size::BatchTimeout)),
    }
}

impl Open {
    /// As the application set them, or as they are by default.
    pub fn properties(&self) -> Properties {
        *self.properties.lock()
    }

    /// Sets whether requests of up to so many KiB are polled for. gpunvme decides by itself, so
    /// that it is only remembered.
    ///
    /// # Errors
    /// [`Code::UnsupportedLimit`].
    pub fn set_poll(&self, poll: bool, threshold: usize) -> Result<()> {
        within(threshold, Size::PollThreshold)?;
        let mut properties = self.properties.lock();
        properties.poll_threshold = threshold;
        properties.control_flags = properties.control_flags & !abi::CONTROL_POLL | u32::from(poll);
        Ok(())
    }

    /// Sets how long requests to the device are at most, in KiB, which is remembered.
    ///
    /// # Errors
    /// [`Code::UnsupportedLimit`].
    pub fn set_max_direct_io(&self, size: usize) -> Result<()> {
        within(size, Size::MaxDirectIo)?;
        self.properties.lock().max_direct_io = size;
        Ok(())
    }

    /// Sets how much memory of a GPU is used for bouncing, in KiB, which is remembered: gpunvme
    /// uses none.
    ///
    /// # Errors
    /// [`Code::UnsupportedLimit`].
    pub fn set_max_cache(&self, size: usize) -> Result<()> {
        within(size, Size::MaxDeviceCache)?;
        self.properties.lock().max_device_cache = size as u32;
        Ok(())
    }

    /// Sets how much memory of a GPU may be registered, in KiB, which is remembered.
    ///
    /// # Errors
    /// [`Code::UnsupportedLimit`].
    pub fn set_max_pinned(&self, size: usize) -> Result<()> {
        within(size, Size::MaxPinned)?;
        self.properties.lock().max_pinned = size.min(u32::MAX as usize) as u32;
        Ok(())
    }
}

fn within(value: usize, which: Size) -> Result<()> {
    let (min, max) = parameters::limits(which).expect("it has limits");
    if (min..=max).contains(&value) { Ok(()) } else { Err(Code::UnsupportedLimit.into()) }
}
