//! Host memory: the library's own, and the application's.

use super::{free, null, require, store_handle};
use crate::buffer::{Buffer, Shared};
use crate::copier::Copier;
use crate::error::{Error, Result};
use crate::file::File;
use crate::host_memory::HostMemory;
use crate::mount::Mount;
use crate::ring::{Attached, Operation};
use crate::transfer::{Require, Transfer};
use gpunvme_abi::{Command, Reason, Route, Segment, TransferFlags};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// `gpunvme_buffer`.
pub enum CBuffer {
    /// Memory of the library's.
    Own(Arc<Shared>),
    /// The application's, registered by its memfd.
    Foreign(Arc<Shared<HostMemory>>),
    /// The application's, which the CPU copies.
    Copied(Copied),
}

/// Memory of the application that is not registered.
pub struct Copied {
    copier: Mutex<Copier>,
    data: *mut u8,
    len: usize,
}

impl CBuffer {
    /// Moves segments between a file and it.
    pub fn transfer(&self, command: Command, file: &File, segments: &[Segment], flags: TransferFlags) -> Result<Transfer> {
        match self {
            CBuffer::Own(memory) if command == Command::Read => file.read_to(memory.registered(), segments, flags),
            CBuffer::Own(memory) => file.transfer(command, memory.registered(), segments, flags),
            CBuffer::Foreign(memory) => file.transfer(command, memory.registered(), segments, flags),
            CBuffer::Copied(memory) => memory.transfer(command, file, segments, flags),
        }
    }

    /// The operation of a ring that moves a part of it; `None` for memory that is not registered.
    pub fn operation<'a>(
        &'a self,
        command: Command,
        file: &'a Attached,
        file_offset: u64,
        buffer_offset: u64,
        len: u64,
    ) -> Option<Operation<'a>> {
        let is_read = command == Command::Read;
        match self {
            CBuffer::Own(memory) if is_read => Some(Operation::read(file, file_offset, memory, buffer_offset, len)),
            CBuffer::Own(memory) => Some(Operation::write(file, file_offset, memory, buffer_offset, len)),
            CBuffer::Foreign(memory) if is_read => Some(Operation::read(file, file_offset, memory, buffer_offset, len)),
            CBuffer::Foreign(memory) => Some(Operation::write(file, file_offset, memory, buffer_offset, len)),
            CBuffer::Copied(_) => None,
        }
    }

    fn len(&self) -> usize {
        match self {
            CBuffer::Own(memory) => memory.len(),
            CBuffer::Foreign(memory) => memory.len(),
            CBuffer::Copied(memory) => memory.len,
        }
    }

    fn data(&self) -> *mut u8 {
        match self {
            CBuffer::Own(memory) => memory.registered().mapping().as_ptr(),
            CBuffer::Foreign(_) => std::ptr::null_mut(),
            CBuffer::Copied(memory) => memory.data,
        }
    }

    /// The route that transfers to and from it take, and why not a faster one.
    fn route(&self) -> (Route, Reason) {
        match self {
            CBuffer::Own(memory) => (memory.registered().route(), memory.registered().reason()),
            CBuffer::Foreign(memory) => (memory.registered().route(), memory.registered().reason()),
            CBuffer::Copied(_) => (Route::Host, Reason::NotRegistered),
        }
    }
}

impl Copied {
    fn transfer(&self, command: Command, file: &File, segments: &[Segment], flags: TransferFlags) -> Result<Transfer> {
        let action = if command == Command::Read { "read" } else { "write" };
        let path = file.path();
        let refused = |errno, reason| {
            let done = Transfer::default();
            Error::Transfer { path: path.to_owned(), action, errno, reason, segment: None, offset: None, done }
        };
        match require((flags - TransferFlags::WRITTEN_BACK).bits()) {
            Some(Require { route: None | Some(Route::Host), direct: false }) => {}
            Some(_) => return Err(refused(Errno::OPNOTSUPP, Reason::NotRegistered)),
            None => return Err(refused(Errno::INVAL, Reason::None)),
        }
        let end = |segment: &Segment| segment.buffer_offset.saturating_add(segment.len);
        if let Some((index, segment)) = segments.iter().enumerate().find(|(_, segment)| end(segment) > self.len as u64) {
            return Err(Error::OutsideBuffer { segment: index as u32, end: end(segment), len: self.len });
        }
        let mut copier = self.copier.lock();
        let mut sum = Transfer::default();
        for (index, segment) in segments.iter().enumerate() {
            let (offset, len) = (segment.buffer_offset as usize, segment.len as usize);
            // SAFETY: it lies in the memory that the header asks for, whose parts that a read
            // covers nothing else uses meanwhile, and those of a write nothing else changes.
            let outcome = unsafe {
                let data = self.data.add(offset);
                match command {
                    Command::Read => copier.read(file, segment.file_offset, std::slice::from_raw_parts_mut(data, len)),
                    _ => copier.write(file, segment.file_offset, std::slice::from_raw_parts(data, len)),
                }
            };
            match outcome {
                Ok(done) => {
                    sum.add(&done);
                    if done.bytes() < segment.len {
                        break; // the file ends here
                    }
                }
                Err(Error::Transfer { path, action, errno, reason, offset, done, .. }) => {
                    sum.add(&done);
                    return Err(Error::Transfer { path, action, errno, reason, segment: Some(index as u32), offset, done: sum });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(sum)
    }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_create(mount: *const Mount, len: usize, buffer: *mut *mut CBuffer) -> c_int {
    let mount = get!(mount);
    if buffer.is_null() {
        return null("buffer");
    }
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(buffer, Buffer::memfd(len).and_then(|memory| Ok(CBuffer::Own(mount.register(memory)?.share())))) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_from_fd(mount: *const Mount, fd: c_int, len: usize, buffer: *mut *mut CBuffer) -> c_int {
    let mount = get!(mount);
    if buffer.is_null() {
        return null("buffer");
    }
    let register = || {
        if fd < 0 {
            return Err(Error::Memory { len, errno: Errno::BADF });
        }
        // SAFETY: it is borrowed for the next system call only, which finds out whether it is
        // open.
        let memory = rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(fd) }, 0);
        let memory = memory.map_err(|errno| Error::Memory { len, errno })?;
        Ok(CBuffer::Foreign(mount.register(HostMemory::memfd(memory, len))?.share()))
    };
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(buffer, register()) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_from_memory(
    mount: *const Mount,
    data: *mut c_void,
    len: usize,
    buffer: *mut *mut CBuffer,
) -> c_int {
    let mount = get!(mount);
    if buffer.is_null() || data.is_null() {
        return null("data and buffer");
    }
    let made = if isize::try_from(len).is_ok() { Copier::new(mount) } else { Err(Error::Memory { len, errno: Errno::INVAL }) };
    let made = made.map(|copier| CBuffer::Copied(Copied { copier: Mutex::new(copier), data: data.cast(), len }));
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(buffer, made) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_data(buffer: *const CBuffer) -> *mut c_void {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(std::ptr::null_mut(), |buffer| buffer.data().cast())
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_len(buffer: *const CBuffer) -> usize {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(0, CBuffer::len)
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_route(buffer: *const CBuffer) -> u32 {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(Route::None, |buffer| buffer.route().0).code()
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_reason(buffer: *const CBuffer) -> u32 {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { buffer.as_ref() }.map_or(Reason::None, |buffer| buffer.route().1).code()
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_buffer_destroy(buffer: *mut CBuffer) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(buffer) }
}
