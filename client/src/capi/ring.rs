//! Rings: many transfers in flight from one thread, without a system call for each.

use super::buffer::CBuffer;
use super::{CFinished, fail, free, keep, null, require, store, store_handle, wait, wrong_flags};
use crate::file::File;
use crate::mount::Mount;
use crate::ring::{Attached, Completed, Ring};
use gpunvme_abi::{Command, TransferFlags};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd};

/// `gpunvme_ring`: with what is done and did not fit into the array of the last call.
pub struct CRing {
    ring: Ring,
    finished: VecDeque<Completed>,
    taken: Vec<Completed>,
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_ring_create(mount: *const Mount, entries: u32, ring: *mut *mut CRing) -> c_int {
    let mount = get!(mount);
    if ring.is_null() {
        return null("ring");
    }
    let made = Ring::new(mount, entries).map(|ring| CRing { ring, finished: VecDeque::new(), taken: Vec::new() });
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(ring, made) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_ring_destroy(ring: *mut CRing) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(ring) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_ring_attach(ring: *const CRing, file: *const File, attached: *mut *mut Attached) -> c_int {
    let (ring, file) = (get!(ring), get!(file));
    if attached.is_null() {
        return null("attached");
    }
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(attached, ring.ring.attach(file)) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_attached_release(attached: *mut Attached) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(attached) }
}

macro_rules! operations {
    ($($name:ident $command:expr;)*) => { $(
        /// See the header.
        ///
        /// # Safety
        /// Pointers are as the header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            ring: *mut CRing,
            file: *const Attached,
            file_offset: u64,
            buffer: *const CBuffer,
            buffer_offset: u64,
            len: u64,
            flags: u32,
            user_data: u64,
        ) -> c_int {
            let (file, buffer) = (get!(file), get!(buffer));
            // SAFETY: the header asks for an open handle that no other thread uses meanwhile.
            let Some(ring) = (unsafe { ring.as_mut() }) else { return null("ring") };
            let flags = TransferFlags::from_bits_retain(flags);
            let is_written_back = flags.contains(TransferFlags::WRITTEN_BACK);
            let Some(require) = require((flags - TransferFlags::WRITTEN_BACK).bits()) else { return wrong_flags() };
            let Some(operation) = buffer.operation($command, file, file_offset, buffer_offset, len) else {
                keep("a ring needs registered memory: gpunvme_buffer_create() or gpunvme_buffer_from_fd()".into());
                return -Errno::OPNOTSUPP.raw_os_error();
            };
            let operation = operation.tagged(user_data).requiring(require).written_back(is_written_back);
            ring.ring.push(&operation).map_or_else(|error| fail(&error), |()| 0)
        }
    )* };
}

operations! {
    gpunvme_ring_read Command::Read;
    gpunvme_ring_write Command::Write;
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_ring_submit(ring: *mut CRing) {
    // SAFETY: the header asks for NULL or an open handle that no other thread uses meanwhile.
    if let Some(ring) = unsafe { ring.as_mut() } {
        ring.ring.submit();
    }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_ring_complete(
    ring: *mut CRing,
    least: usize,
    timeout_ms: c_int,
    finished: *mut CFinished,
    capacity: usize,
    count: *mut usize,
) -> c_int {
    // SAFETY: the header asks for an open handle that no other thread uses meanwhile.
    let Some(ring) = (unsafe { ring.as_mut() }) else { return null("ring") };
    if finished.is_null() || count.is_null() || capacity == 0 {
        return null("finished and count");
    }
    let least = least.min(capacity).saturating_sub(ring.finished.len());
    let completed = ring.ring.complete_at_least(least, wait(timeout_ms), &mut ring.taken);
    ring.finished.extend(ring.taken.drain(..));
    let there = ring.finished.len().min(capacity);
    // What came before the end of a ring counts.
    if let Err(error) = completed
        && there == 0
    {
        return fail(&error);
    }
    for (at, Completed { user_data, result, .. }) in ring.finished.drain(..there).enumerate() {
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
pub unsafe extern "C" fn gpunvme_ring_arm(ring: *mut CRing) -> c_int {
    // SAFETY: the header asks for an open handle that no other thread uses meanwhile.
    let Some(ring) = (unsafe { ring.as_mut() }) else { return 0 };
    // A ring that is closed has nothing to wait for: the next call says so.
    (ring.finished.is_empty() && ring.ring.arm().unwrap_or(false)).into()
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_ring_fd(ring: *const CRing) -> c_int {
    get!(ring).ring.as_fd().as_raw_fd()
}
