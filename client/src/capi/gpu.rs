//! The part of the C ABI that is about GPU memory.

use super::{CFinished, CResult, clear, fail, free, keep, null, require, store, store_handle, told, wait, wrong_flags};
use crate::error::Result;
use crate::file::File;
use crate::gpu::{Caching, Finished, Observer, Pending, Queue, Segment, Settings, Transfers};
use crate::mount::Mount;
use crate::transfer::{Require, Transfer};
use gpunvme_abi::{Reason, Route};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};

/// `gpunvme_done`.
type Done = unsafe extern "C" fn(user_data: *mut c_void, error: c_int, result: *const CResult);

/// `gpunvme_queue`: with what is done and did not fit into the array of the last call.
pub struct CQueue {
    queue: Queue,
    finished: VecDeque<Finished>,
    taken: Vec<Finished>,
}

/// A number that a callback gets back as it was given.
struct UserData(*mut c_void);

// SAFETY: it is the caller's, who knows that another thread calls back.
unsafe impl Send for UserData {}

/// `struct gpunvme_settings`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct CSettings {
    staging: u64,
    registered: u64,
    cached: u64,
    callers: u32,
    caching: u32,
}

/// What `flags` demand, also `GPUNVME_REQUIRE_CACHE`, which is the library's alone; `None` for
/// flags that do not exist, and for two routes.
fn demand(flags: u32) -> Option<Require> {
    const REQUIRE_CACHE: u32 = 1 << 31;
    let require = require(flags & !REQUIRE_CACHE)?;
    match (flags & REQUIRE_CACHE != 0, require.route) {
        (false, _) => Some(require),
        (true, None) => Some(Require { route: Some(Route::Cache), ..require }),
        (true, Some(_)) => None,
    }
}

/// `GPUNVME_CACHING_*`; the inner `None` is `GPUNVME_CACHING_USUAL`, and the outer one is given for
/// no such number.
fn caching(number: u32) -> Option<Option<Caching>> {
    Some(match number {
        0 => None,
        1 => Some(Caching::Never),
        2 => Some(Caching::Resident),
        3 => Some(Caching::ReadAgain),
        _ => return None,
    })
}

fn wrong_caching() -> c_int {
    keep("caching is not one of GPUNVME_CACHING_*".to_owned());
    -Errno::INVAL.raw_os_error()
}

impl CSettings {
    /// None where `caching` is no such number.
    fn settings(self) -> Option<Settings> {
        let mut settings = Settings {
            staging: (self.staging > 0).then_some(usize::try_from(self.staging).unwrap_or(usize::MAX)),
            registered: (self.registered > 0).then_some(self.registered),
            cached: (self.cached > 0).then_some(self.cached),
            ..Settings::default()
        };
        if self.callers > 0 {
            settings.callers = self.callers as usize;
        }
        settings.caching = caching(self.caching)?.unwrap_or(settings.caching);
        Some(settings)
    }
}

/// `struct gpunvme_observer`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CObserver {
    begins: Option<unsafe extern "C" fn(user_data: *mut c_void, moved_by: *mut i64) -> c_int>,
    ends: Option<Done>,
    user_data: *mut c_void,
}

/// Calls functions of C's while a stream works on a request.
struct Watching {
    begins: Option<unsafe extern "C" fn(user_data: *mut c_void, moved_by: *mut i64) -> c_int>,
    ends: Done,
    user_data: UserData,
}

impl Observer for Watching {
    fn begins(&mut self) -> std::result::Result<i64, Errno> {
        let Some(begins) = self.begins else { return Ok(0) };
        let mut moved_by = 0;
        // SAFETY: the header says how it is called.
        match unsafe { begins(self.user_data.0, &mut moved_by) } {
            0 => Ok(moved_by),
            error @ -4095..0 => Err(Errno::from_raw_os_error(-error)),
            _ => Err(Errno::INVAL),
        }
    }

    fn ends(&mut self, outcome: &Result<Transfer>) {
        let (code, result) = told(outcome);
        // SAFETY: the header says how it is called.
        unsafe { (self.ends)(self.user_data.0, code, &result) }
    }
}

/// The arguments that all requests have, or the answer to give.
macro_rules! call {
    ($transfers:ident, $file:ident, $segments:ident, $count:ident, $flags:ident) => {{
        let (transfers, file) = (get!($transfers), get!($file));
        if $segments.is_null() && $count > 0 {
            return null("segments");
        }
        // SAFETY: it is not NULL, and the header asks for `count` segments that no other thread
        // changes during the call.
        let segments = if $count == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts($segments, $count) } };
        let Some(require) = demand($flags) else { return wrong_flags() };
        (transfers.requiring(require), file, segments)
    }};
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_transfers_open(
    mount: *const Mount,
    settings: *const CSettings,
    transfers: *mut *mut Transfers,
) -> c_int {
    let mount = get!(mount);
    if transfers.is_null() {
        return null("transfers");
    }
    // SAFETY: the header asks for NULL or the structure.
    let settings = unsafe { settings.as_ref() }.copied().unwrap_or_default();
    let Some(settings) = settings.settings() else { return wrong_caching() };
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(transfers, Transfers::with(mount, settings)) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_set_caching(file: *const File, caching: u32) -> c_int {
    let file = get!(file);
    let Some(caching) = self::caching(caching) else { return wrong_caching() };
    file.set_caching(caching);
    0
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_prepare(
    transfers: *const Transfers,
    file: *const File,
    offset: u64,
    len: u64,
    prepared: *mut u64,
) -> c_int {
    let (transfers, file) = (get!(transfers), get!(file));
    if prepared.is_null() {
        return null("prepared");
    }
    // SAFETY: it is not NULL, and the header asks for room for a number.
    unsafe { store(prepared, transfers.prepare(file, offset, len)) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_transfers_close(transfers: *mut Transfers) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(transfers) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_route(
    transfers: *const Transfers,
    address: *const c_void,
    route: *mut u32,
    reason: *mut u32,
) -> c_int {
    let transfers = get!(transfers);
    if route.is_null() || reason.is_null() {
        return null("route and reason");
    }
    let found = transfers.route(address as u64).map(|(route, reason)| (route.code(), reason.code()));
    let why = found.as_ref().map_or(Reason::None.code(), |(_, reason)| *reason);
    // SAFETY: neither is NULL, and the header asks for room for a number each.
    unsafe {
        reason.write(why);
        store(route, found.map(|(route, _)| route))
    }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_forget(transfers: *const Transfers, address: *const c_void, len: u64) {
    // SAFETY: the header asks for NULL or an open handle.
    if let Some(transfers) = unsafe { transfers.as_ref() } {
        transfers.forget(address as u64, len);
    }
}

macro_rules! requests {
    (
        $now:ident, $then:ident, $on_stream:ident, $on_stream_with:ident, $queued:ident,
        $rust:ident, $rust_then:ident, $rust_on_stream:ident, $rust_on_stream_with:ident
    ) => {
        /// See the header.
        ///
        /// # Safety
        /// Pointers are as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $now(
            transfers: *const Transfers,
            file: *const File,
            segments: *const Segment,
            count: usize,
            flags: u32,
            result: *mut CResult,
        ) -> c_int {
            // SAFETY: the header asks for NULL or room for the structure.
            unsafe { clear(result) };
            let (transfers, file, segments) = call!(transfers, file, segments, count, flags);
            // SAFETY: the header asks the same of the memory.
            let (code, told) = told(&unsafe { transfers.$rust(file, segments) });
            if !result.is_null() {
                // SAFETY: it is not NULL, and the header asks for room for the structure.
                unsafe { result.write(told) };
            }
            code
        }

        /// See the header.
        ///
        /// # Safety
        /// Pointers are as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $then(
            transfers: *const Transfers,
            file: *const File,
            segments: *const Segment,
            count: usize,
            flags: u32,
            done: Option<Done>,
            user_data: *mut c_void,
        ) -> c_int {
            let (transfers, file, segments) = call!(transfers, file, segments, count, flags);
            let Some(done) = done else { return null("done") };
            let user_data = UserData(user_data);
            let call = move |outcome: Result<Transfer>| {
                let (code, result) = told(&outcome);
                let UserData(user_data) = { user_data };
                // SAFETY: the header says how it is called.
                unsafe { done(user_data, code, &result) };
            };
            // SAFETY: the header asks the same of the memory.
            unsafe { transfers.$rust_then(file, segments, call) }.map_or_else(|error| fail(&error), |()| 0)
        }

        /// See the header.
        ///
        /// # Safety
        /// Pointers are as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $on_stream(
            transfers: *const Transfers,
            file: *const File,
            segments: *const Segment,
            count: usize,
            flags: u32,
            stream: *mut c_void,
            pending: *mut *mut Pending,
        ) -> c_int {
            let (transfers, file, segments) = call!(transfers, file, segments, count, flags);
            if pending.is_null() {
                return null("pending");
            }
            // SAFETY: the header asks the same of the memory and the stream, and for room for a
            // pointer.
            unsafe { store_handle(pending, transfers.$rust_on_stream(file, segments, stream as usize)) }
        }

        /// See the header.
        ///
        /// # Safety
        /// Pointers are as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $on_stream_with(
            transfers: *const Transfers,
            file: *const File,
            segments: *const Segment,
            count: usize,
            flags: u32,
            stream: *mut c_void,
            observer: *const CObserver,
        ) -> c_int {
            let (transfers, file, segments) = call!(transfers, file, segments, count, flags);
            let CObserver { begins, ends, user_data } = *get!(observer);
            let Some(ends) = ends else { return null("ends") };
            let observer = Watching { begins, ends, user_data: UserData(user_data) };
            // SAFETY: the header asks the same of the memory and the stream.
            let begun = unsafe { transfers.$rust_on_stream_with(file, segments, stream as usize, observer) };
            begun.map_or_else(|error| fail(&error), |_| 0) // the observer is told how it ends
        }

        /// See the header.
        ///
        /// # Safety
        /// Pointers are as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $queued(
            queue: *mut CQueue,
            file: *const File,
            segments: *const Segment,
            count: usize,
            user_data: u64,
        ) -> c_int {
            let file = get!(file);
            // SAFETY: the header asks for an open handle that no other thread uses meanwhile.
            let Some(queue) = (unsafe { queue.as_mut() }) else { return null("queue") };
            if segments.is_null() && count > 0 {
                return null("segments");
            }
            // SAFETY: it is not NULL, and the header asks for `count` segments that no other thread
            // changes during the call.
            let segments = if count == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(segments, count) } };
            // SAFETY: the header asks the same of the memory.
            unsafe { queue.queue.$rust(file, segments, user_data) }.map_or_else(|error| fail(&error), |()| 0)
        }
    };
}

requests!(
    gpunvme_gpu_read,
    gpunvme_gpu_read_then,
    gpunvme_gpu_read_on_stream,
    gpunvme_gpu_read_on_stream_with,
    gpunvme_queue_read,
    read,
    read_then,
    read_on_stream,
    read_on_stream_with
);
requests!(
    gpunvme_gpu_write,
    gpunvme_gpu_write_then,
    gpunvme_gpu_write_on_stream,
    gpunvme_gpu_write_on_stream_with,
    gpunvme_queue_write,
    write,
    write_then,
    write_on_stream,
    write_on_stream_with
);

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_pending_is_done(pending: *const Pending) -> c_int {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { pending.as_ref() }.is_some_and(Pending::is_done).into()
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_pending_wait(pending: *mut Pending, result: *mut CResult) -> c_int {
    // SAFETY: the header asks for NULL or room for the structure.
    unsafe { clear(result) };
    if pending.is_null() {
        return null("pending");
    }
    // SAFETY: it is not NULL, and the header asks for an open handle, which this ends.
    let pending = unsafe { Box::from_raw(pending) };
    let (code, told) = told(&pending.wait());
    if !result.is_null() {
        // SAFETY: it is not NULL, and the header asks for room for the structure.
        unsafe { result.write(told) };
    }
    code
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_queue_create(transfers: *const Transfers, flags: u32, queue: *mut *mut CQueue) -> c_int {
    let transfers = get!(transfers);
    if queue.is_null() {
        return null("queue");
    }
    let Some(require) = demand(flags) else { return wrong_flags() };
    let made = transfers.requiring(require).queue();
    let made = made.map(|queue| CQueue { queue, finished: VecDeque::new(), taken: Vec::new() });
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(queue, made) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_queue_destroy(queue: *mut CQueue) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(queue) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_queue_complete(
    queue: *mut CQueue,
    least: usize,
    timeout_ms: c_int,
    finished: *mut CFinished,
    capacity: usize,
    count: *mut usize,
) -> c_int {
    // SAFETY: the header asks for an open handle that no other thread uses meanwhile.
    let Some(queue) = (unsafe { queue.as_mut() }) else { return null("queue") };
    if finished.is_null() || count.is_null() || capacity == 0 {
        return null("finished and count");
    }
    let least = least.min(capacity).saturating_sub(queue.finished.len());
    let completed = queue.queue.complete_at_least(least, wait(timeout_ms), &mut queue.taken);
    queue.finished.extend(queue.taken.drain(..));
    if let Err(error) = completed {
        return fail(&error);
    }
    let there = queue.finished.len().min(capacity);
    for (at, Finished { user_data, result }) in queue.finished.drain(..there).enumerate() {
        // SAFETY: `there` is at most the capacity that the header asks for room for.
        unsafe { finished.add(at).write(CFinished::new(user_data, &result)) };
    }
    // SAFETY: it is not NULL, and the header asks for room for a number.
    unsafe { store(count, Ok(there)) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_queue_cancel(queue: *mut CQueue) {
    // SAFETY: the header asks for NULL or an open handle that no other thread uses meanwhile.
    if let Some(queue) = unsafe { queue.as_mut() } {
        queue.queue.cancel();
    }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_queue_arm(queue: *mut CQueue) -> c_int {
    // SAFETY: the header asks for an open handle that no other thread uses meanwhile.
    let Some(queue) = (unsafe { queue.as_mut() }) else { return 0 };
    (queue.finished.is_empty() && queue.queue.arm()).into()
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_queue_fd(queue: *const CQueue) -> c_int {
    get!(queue).queue.as_fd().as_raw_fd()
}
