//! The C ABI, as `include/gpunvme.h` declares and documents it.
//!
//! It guards the border: handles are boxes that C only passes back, every pointer is checked for
//! NULL before use, and a failure is a negative errno with its sentence kept for the thread.

use crate::codes::reason;
use crate::error::{Error, Result};
use crate::ring::Wait;
use crate::transfer::{Moved, Require, Transfer};
use gpunvme_abi::{self as abi, Reason, Route, TransferFlags};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::LazyLock;
use std::time::Duration;

thread_local! {
    static LAST_ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
    static LAST_CACHE_REASON: Cell<Reason> = const { Cell::new(Reason::None) };
}

/// What a transfer moved: `struct gpunvme_result`.
#[repr(C)]
pub struct CResult {
    bytes: u64,
    moved: abi::Moved,
    cache: u64,
    reason: u32,
    failed_segment: u32,
}

impl CResult {
    /// What this thread is told of, which [`gpunvme_last_cache_reason`] adds to.
    fn new(done: &Transfer, reason: Option<Reason>, segment: Option<u32>) -> CResult {
        LAST_CACHE_REASON.set(done.cache_reason.unwrap_or(Reason::None));
        let Moved { p2p, bounce, cache, host, hole, edge } = done.moved;
        CResult {
            bytes: done.bytes(),
            moved: abi::Moved { p2p, bounce, host, hole, edge },
            cache,
            reason: reason.or(done.reason).unwrap_or(Reason::None).code(),
            failed_segment: segment.unwrap_or(u32::MAX),
        }
    }
}

/// Says, where the caller wants to know, that nothing was moved: for what fails before there is
/// anything to tell.
///
/// # Safety
/// `result` is NULL, or may be written to.
unsafe fn clear(result: *mut CResult) {
    let nothing = CResult::new(&Transfer::default(), None, None);
    if !result.is_null() {
        // SAFETY: the caller of this function says so.
        unsafe { result.write(nothing) };
    }
}

/// Keeps the sentence, and gives the number.
fn fail(error: &Error) -> c_int {
    keep(error.to_string());
    -error.errno().raw_os_error()
}

/// Calls may fail while a thread ends, in destructors of what it had: no sentence is kept then.
fn keep(sentence: String) {
    let sentence = CString::new(sentence.replace('\0', "?")).unwrap_or_default();
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = Some(sentence));
}

fn null(what: &str) -> c_int {
    keep(format!("{what} must not be NULL"));
    -Errno::INVAL.raw_os_error()
}

/// The value behind a pointer, or the answer to give.
macro_rules! get {
    ($pointer:ident) => {
        // SAFETY: the header asks for a pointer that this library returned, or to a value of the
        // declared type, that stays valid during the call.
        match unsafe { $pointer.as_ref() } {
            Some(value) => value,
            None => return null(stringify!($pointer)),
        }
    };
}

/// `struct gpunvme_finished`.
#[repr(C)]
pub struct CFinished {
    user_data: u64,
    error: c_int,
    reserved: u32,
    result: CResult,
}

impl CFinished {
    fn new(user_data: u64, outcome: &Result<Transfer>) -> CFinished {
        let (error, result) = told(outcome);
        CFinished { user_data, error, reserved: 0, result }
    }
}

/// The number, and what goes with it. The sentence is kept for this thread.
fn told(outcome: &Result<Transfer>) -> (c_int, CResult) {
    match outcome {
        Ok(done) => (0, CResult::new(done, None, None)),
        Err(error) => {
            let nothing = Transfer::default();
            let result = match error {
                Error::Transfer { done, reason, segment, .. } => CResult::new(done, Some(*reason), *segment),
                Error::Copy { done, segment, .. } => CResult::new(done, None, Some(*segment)),
                Error::OutsideBuffer { segment, .. } => CResult::new(&nothing, Some(Reason::OutsideBuffer), Some(*segment)),
                Error::UnknownMemory { segment, .. } => CResult::new(&nothing, None, Some(*segment)),
                _ => CResult::new(&nothing, None, None),
            };
            (fail(error), result)
        }
    }
}

/// What `flags` demand; `None` for flags that do not exist, and for two routes.
fn require(flags: u32) -> Option<Require> {
    let flags = TransferFlags::from_bits(flags)?;
    let direct = flags.contains(TransferFlags::REQUIRE_DIRECT);
    let route = match flags - TransferFlags::REQUIRE_DIRECT {
        none if none.is_empty() => None,
        TransferFlags::REQUIRE_P2P => Some(Route::P2p),
        TransferFlags::REQUIRE_BOUNCE => Some(Route::Bounce),
        TransferFlags::REQUIRE_HOST => Some(Route::Host),
        _ => return None,
    };
    Some(Require { route, direct })
}

fn wrong_flags() -> c_int {
    keep("flags must be GPUNVME_REQUIRE_*, and at most one route".into());
    -Errno::INVAL.raw_os_error()
}

/// How long C waits.
fn wait(timeout_ms: c_int) -> Wait {
    match timeout_ms {
        0 => Wait::No,
        ms => u64::try_from(ms).map_or(Wait::Forever, |ms| Wait::Timeout(Duration::from_millis(ms))),
    }
}

/// Stores a value where the caller wants it.
///
/// # Safety
/// `to` is not NULL, and may be written to.
unsafe fn store<T>(to: *mut T, value: Result<T>) -> c_int {
    match value {
        Ok(value) => {
            // SAFETY: the caller of this function says so. What was there before is not read.
            unsafe { to.write(value) };
            0
        }
        Err(error) => fail(&error),
    }
}

/// Stores a new handle, or the answer `NULL`.
///
/// # Safety
/// As [`store`].
unsafe fn store_handle<T>(to: *mut *mut T, value: Result<T>) -> c_int {
    // SAFETY: the caller of this function says so.
    unsafe {
        to.write(std::ptr::null_mut());
        store(to, value.map(|value| Box::into_raw(Box::new(value))))
    }
}

/// Frees a handle.
///
/// # Safety
/// `handle` is NULL, or what [`store_handle`] stored and the caller has not freed since.
unsafe fn free<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the caller of this function says so.
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// A path of C's, which need not be UTF-8.
///
/// # Safety
/// `path` is not NULL, and ends in a zero byte.
unsafe fn path<'a>(path: *const c_char) -> &'a Path {
    // SAFETY: the caller of this function says so.
    Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()))
}

mod buffer;
mod file;
mod gpu;
mod gpu_array;
mod gpu_ring;
mod mount;
mod ring;

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_last_error() -> *const c_char {
    let kept = LAST_ERROR.try_with(|last| last.borrow().as_ref().map(|sentence| sentence.as_ptr()));
    kept.ok().flatten().unwrap_or(c"".as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_last_cache_reason() -> u32 {
    LAST_CACHE_REASON.get().code()
}

/// Texts with a zero byte at their end, by number.
struct Texts(Vec<(u32, CString)>);

impl Texts {
    fn new(texts: impl Iterator<Item = (u32, &'static str)>) -> Texts {
        Texts(texts.map(|(code, text)| (code, CString::new(text).unwrap_or_default())).collect())
    }

    fn get(&self, code: u32) -> *const c_char {
        self.0.iter().find(|(number, _)| *number == code).map_or(c"unknown".as_ptr(), |(_, text)| text.as_ptr())
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_route_name(route: u32) -> *const c_char {
    static NAMES: LazyLock<Texts> = LazyLock::new(|| Texts::new(Route::ALL.iter().map(|route| (route.code(), route.name()))));
    NAMES.get(route)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_reason_name(code: u32) -> *const c_char {
    static NAMES: LazyLock<Texts> = LazyLock::new(|| Texts::new(Reason::ALL.iter().map(|reason| (reason.code(), reason.name()))));
    NAMES.get(reason(code).code())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_reason_explain(code: u32) -> *const c_char {
    static TEXTS: LazyLock<Texts> =
        LazyLock::new(|| Texts::new(Reason::ALL.iter().map(|reason| (reason.code(), reason.explain()))));
    TEXTS.get(reason(code).code())
}
