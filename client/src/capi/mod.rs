//! The C ABI, as `include/gpunvme.h` declares and documents it.
//!
//! It guards the border: handles are boxes that C only passes back, every pointer is checked for
//! NULL before use, and a failure is a negative errno with its sentence kept for the thread.

use crate::buffer::{Buffer, Registered};
use crate::codes::reason;
use crate::error::{Error, Result};
use crate::file::File;
use crate::mount::Mount;
use crate::transfer::{Moved, Transfer};
use gpunvme_abi::{self as abi, Command, Extent, Reason, Route, Segment, TransferFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::LazyLock;

thread_local! {
    static LAST_ERROR: RefCell<Option<CString>> = const { RefCell::new(None) };
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
    fn new(done: &Transfer, reason: Option<Reason>, segment: Option<u32>) -> CResult {
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
    if !result.is_null() {
        // SAFETY: the caller of this function says so.
        unsafe { result.write(CResult::new(&Transfer::default(), None, None)) };
    }
}

/// Keeps the sentence, and gives the number.
fn fail(error: &Error) -> c_int {
    keep(error.to_string());
    -error.errno().raw_os_error()
}

fn keep(sentence: String) {
    let sentence = CString::new(sentence.replace('\0', "?")).unwrap_or_default();
    LAST_ERROR.with(|last| *last.borrow_mut() = Some(sentence));
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

mod gpu;

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn gpunvme_last_error() -> *const c_char {
    LAST_ERROR.with(|last| last.borrow().as_ref().map_or(c"".as_ptr(), |sentence| sentence.as_ptr()))
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

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_open(name: *const c_char, mount: *mut *mut Mount) -> c_int {
    if name.is_null() || mount.is_null() {
        return null("path and mount");
    }
    // SAFETY: neither is NULL, and the header asks for a string and for room for a pointer.
    unsafe { store_handle(mount, Mount::open(path(name))) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_info(mount: *const Mount, info: *mut abi::Info) -> c_int {
    let mount = get!(mount);
    if info.is_null() {
        return null("info");
    }
    // SAFETY: it is not NULL, and the header asks for room for the structure.
    unsafe { store(info, mount.connection().raw_info()) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_stats(mount: *const Mount, stats: *mut abi::Stats) -> c_int {
    let mount = get!(mount);
    if stats.is_null() {
        return null("stats");
    }
    // SAFETY: it is not NULL, and the header asks for room for the structure.
    unsafe { store(stats, mount.connection().raw_stats()) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_close(mount: *mut Mount) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(mount) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_create(mount: *const Mount, len: usize, buffer: *mut *mut Registered) -> c_int {
    let mount = get!(mount);
    if buffer.is_null() {
        return null("buffer");
    }
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(buffer, Buffer::memfd(len).and_then(|memory| mount.register(memory))) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_data(buffer: *const Registered) -> *mut c_void {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(std::ptr::null_mut(), |buffer| buffer.mapping().as_ptr().cast())
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_len(buffer: *const Registered) -> usize {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(0, |buffer| buffer.mapping().len())
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_route(buffer: *const Registered) -> u32 {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(Route::None, Registered::route).code()
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_reason(buffer: *const Registered) -> u32 {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(Reason::None, Registered::reason).code()
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_destroy(buffer: *mut Registered) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(buffer) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_file_open(name: *const c_char, flags: c_int, mode: c_uint, file: *mut *mut File) -> c_int {
    if name.is_null() || file.is_null() {
        return null("path and file");
    }
    let flags = OFlags::from_bits_retain(flags as c_uint);
    // SAFETY: neither is NULL, and the header asks for a string and for room for a pointer.
    unsafe { store_handle(file, File::with_flags(path(name), flags, Mode::from_raw_mode(mode))) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_file_from_fd(fd: c_int, file: *mut *mut File) -> c_int {
    if file.is_null() {
        return null("file");
    }
    let name = format!("/proc/self/fd/{fd}");
    let duplicate = || {
        if fd < 0 {
            return Err(Errno::BADF);
        }
        // SAFETY: it is borrowed for the next system call only, which finds out whether it is
        // open.
        rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 0)
    };
    let made = duplicate()
        .map_err(|errno| Error::Path { path: (&name).into(), action: "use it", errno })
        .and_then(|fd| File::of(fd, &name));
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(file, made) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_file_close(file: *mut File) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(file) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_read(
    file: *const File,
    buffer: *mut Registered,
    segments: *const Segment,
    count: usize,
    flags: u32,
    result: *mut CResult,
) -> c_int {
    // SAFETY: the same is asked of the pointers.
    unsafe { transfer(Command::Read, file, buffer, segments, count, flags, result) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_write(
    file: *const File,
    buffer: *const Registered,
    segments: *const Segment,
    count: usize,
    flags: u32,
    result: *mut CResult,
) -> c_int {
    // SAFETY: the same is asked of the pointers.
    unsafe { transfer(Command::Write, file, buffer, segments, count, flags, result) }
}

/// A read or write.
///
/// # Safety
/// Pointers are as the header says of `gpunvme_read`.
unsafe fn transfer(
    command: Command,
    file: *const File,
    buffer: *const Registered,
    segments: *const Segment,
    count: usize,
    flags: u32,
    result: *mut CResult,
) -> c_int {
    // SAFETY: the header asks for NULL or room for the structure.
    unsafe { clear(result) };
    let (file, buffer) = (get!(file), get!(buffer));
    if segments.is_null() && count > 0 {
        return null("segments");
    }
    // SAFETY: it is not NULL, and the header asks for `count` segments that no other thread changes
    // during the call.
    let segments = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(segments, count) } };
    let outcome = file.transfer(command, buffer, segments, TransferFlags::from_bits_retain(flags));
    let (code, told) = match &outcome {
        Ok(done) => (0, CResult::new(done, None, None)),
        Err(error @ Error::Transfer { done, reason, segment, .. }) => (fail(error), CResult::new(done, Some(*reason), *segment)),
        Err(error @ Error::OutsideBuffer { segment, .. }) => {
            (fail(error), CResult::new(&Transfer::default(), Some(Reason::OutsideBuffer), Some(*segment)))
        }
        Err(error) => (fail(error), CResult::new(&Transfer::default(), None, None)),
    };
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
pub unsafe extern "C" fn gpunvme_resolve(
    file: *const File,
    offset: u64,
    len: u64,
    extents: *mut Extent,
    capacity: usize,
    count: *mut usize,
) -> c_int {
    let file = get!(file);
    if (extents.is_null() && capacity > 0) || count.is_null() {
        return null("extents and count");
    }
    let found: Result<Vec<Extent>> = file.resolve(offset, len).take(capacity).collect();
    match found {
        Ok(found) => {
            for (at, extent) in found.iter().enumerate() {
                // SAFETY: `take` made `at` less than the capacity that the header asks for room
                // for.
                unsafe { extents.add(at).write(*extent) };
            }
            // SAFETY: it is not NULL, and the header asks for room for a number.
            unsafe { store(count, Ok(found.len())) }
        }
        Err(error) => fail(&error),
    }
}
