//! Files and buffers, and requests that are waited for.

use super::{as_pointer, count, list, status};
use crate::abi::{Descriptor, KIND_FD, KIND_USERSPACE, Status, Vector};
use crate::failure::{Code, Result};
use crate::files::Direction;
use crate::statistics::{self, Event};
use crate::transfer::{self, Range};
use crate::{driver, memory, vectors};
use std::ffi::{c_int, c_uint, c_void};

/// Registers a file, which decides who serves it. Opens the driver.
///
/// # Safety
/// Each is NULL, or points to what it is declared to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut *mut c_void, descriptor: *const Descriptor) -> Status {
    let register = || -> Result<usize> {
        // SAFETY: as the caller says.
        let descriptor = unsafe { descriptor.as_ref() }.filter(|_| !handle.is_null()).ok_or(Code::InvalidValue)?;
        match descriptor.kind {
            KIND_FD => {}
            KIND_USERSPACE => return Err(Code::NotSupported.into()),
            _ => return Err(Code::InvalidValue.into()),
        }
        let open = driver::open_if_needed()?;
        open.files.register(&open, descriptor.handle as u32 as c_int)
    };
    let registered = register();
    if let Err(failure) = &registered {
        tracing::error!(%failure, "a file is not registered");
    }
    statistics::event(Event::HandleRegister, &registered);
    // SAFETY: it is not NULL where a file was registered, and the caller vouches for the room.
    status(registered.map(|number| unsafe { handle.write(as_pointer(number)) }))
}

/// Takes a file back. What is unknown is left alone.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: *mut c_void) {
    let removed = driver::opened().and_then(|open| open.files.remove(handle as usize));
    statistics::event(Event::HandleDeregister, &removed);
}

/// Registers memory, of a GPU or of the host. Opens the driver. Flags are for RDMA.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(base: *const c_void, len: usize, _flags: c_int) -> Status {
    let (address, len) = (base as u64, len as u64);
    let register = || -> Result<()> {
        if address == 0 || len == 0 {
            return Err(Code::InvalidValue.into());
        }
        let open = driver::open_if_needed()?;
        memory::check(address, len)?;
        open.buffers.add(address, len)?;
        open.mounts.all().iter().for_each(|mount| mount.warm_up(address));
        Ok(())
    };
    let registered = register();
    statistics::buffer_added(address, len, &registered);
    status(registered)
}

/// Takes memory back: the application may free it then.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(base: *const c_void) -> Status {
    let deregister = || -> Result<()> {
        if base.is_null() {
            return Err(Code::InvalidValue.into());
        }
        let open = driver::opened()?;
        let len = open.buffers.remove(base as u64)?;
        let allocation = |address| memory::at(address).ok().flatten().map(|found| (found.base, found.len));
        let unused = open.buffers.unused_around(base as u64, len, allocation);
        for mount in open.mounts.all() {
            unused.iter().for_each(|&(address, len)| mount.forget(address, len));
        }
        Ok(())
    };
    let removed = deregister();
    statistics::buffer_removed(base as u64, &removed);
    status(removed)
}

/// # Safety
/// The memory is the application's, and nothing else uses it until this returns.
unsafe fn perform(direction: Direction, handle: *mut c_void, base: usize, len: usize, file: i64, offset: i64) -> Result<usize> {
    let open = driver::opened()?;
    let found = open.files.get(handle as usize)?;
    let range = Range::new(base, len, file, offset)?;
    // SAFETY: as the caller says.
    unsafe { transfer::perform(&open, &found, direction, range) }
}

/// Reads from a file into memory, and returns how many bytes: fewer where the file ends.
///
/// # Safety
/// The memory is the application's, and nothing else uses it until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileRead(
    handle: *mut c_void,
    base: *mut c_void,
    len: usize,
    file_offset: i64,
    memory_offset: i64,
) -> isize {
    // SAFETY: as the caller says.
    count(unsafe { perform(Direction::Read, handle, base as usize, len, file_offset, memory_offset) })
}

/// Writes from memory to a file, and returns how many bytes.
///
/// # Safety
/// The memory is the application's, and nothing changes it until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWrite(
    handle: *mut c_void,
    base: *const c_void,
    len: usize,
    file_offset: i64,
    memory_offset: i64,
) -> isize {
    // SAFETY: as the caller says.
    count(unsafe { perform(Direction::Write, handle, base as usize, len, file_offset, memory_offset) })
}

/// One range of a file, and many of memory, one after the other, which are all in flight at once.
///
/// # Safety
/// `vectors` is NULL or of `len` values; their memory as for [`cuFileRead`].
unsafe fn perform_all(
    direction: Direction,
    handle: *mut c_void,
    vectors: *const Vector,
    len: usize,
    file_offset: i64,
    flags: c_uint,
) -> Result<usize> {
    if flags != 0 {
        return Err(Code::InvalidValue.into());
    }
    let open = driver::opened()?;
    let found = open.files.get(handle as usize)?;
    // SAFETY: as the caller says.
    let vectors = unsafe { list(vectors, len) }?;
    let mut at = file_offset;
    let mut ranges = Vec::with_capacity(vectors.len());
    for &Vector { memory, len } in vectors.iter().filter(|vector| vector.len > 0) {
        ranges.push(Range::new(memory as usize, len, at, 0)?);
        at = at.checked_add_unsigned(len as u64).ok_or(Code::InvalidValue)?;
    }
    // SAFETY: as the caller says.
    unsafe { vectors::perform(&open, &found, direction, &ranges) }
}

/// Reads one range of a file into many of memory.
///
/// # Safety
/// As for [`cuFileRead`]; `vectors` is NULL or of `len` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileReadv(
    handle: *mut c_void,
    vectors: *const Vector,
    len: usize,
    file_offset: i64,
    flags: c_uint,
) -> isize {
    // SAFETY: as the caller says.
    count(unsafe { perform_all(Direction::Read, handle, vectors, len, file_offset, flags) })
}

/// Writes one range of a file from many of memory.
///
/// # Safety
/// As for [`cuFileWrite`]; `vectors` is NULL or of `len` values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWritev(
    handle: *mut c_void,
    vectors: *const Vector,
    len: usize,
    file_offset: i64,
    flags: c_uint,
) -> isize {
    // SAFETY: as the caller says.
    count(unsafe { perform_all(Direction::Write, handle, vectors, len, file_offset, flags) })
}
