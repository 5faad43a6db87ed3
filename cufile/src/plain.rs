//! Files by pread(2) and pwrite(2): into ordinary memory as it is, into a GPU's through pinned
//! buffers.
//!
//! Locks: `POOL`, for moments.
#![allow(unsafe_code)]

use crate::failure::Result;
use crate::files::Direction;
use crate::memory;
use crate::transfer::Range;
use gpunvme_cuda::{Cuda, Gpu, HostRegistration, Place, Stream};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// Bytes of a pinned buffer.
const STAGE: usize = 1 << 20;
const PAGE: usize = 4096;
/// Pinned buffers that are kept for later.
const KEPT: usize = 16;

/// Moves bytes between a file and memory of any kind.
///
/// # Safety
/// The range is memory of the application's, which nothing else uses until this returns.
pub unsafe fn transfer(file: BorrowedFd<'_>, direction: Direction, range: Range) -> Result<usize> {
    let found = memory::at(range.address)?;
    if let Some(address) = memory::on_host(found, range.address, range.len as u64)? {
        // SAFETY: the processor finds the same memory there.
        return unsafe { ordinary(file, direction, Range { address, ..range }) };
    }
    let gpu = match found.map(|found| found.place) {
        Some(Place::Device(gpu)) => gpu,
        _ => memory::cuda().and_then(|cuda| cuda.gpus().next()).ok_or(Errno::NODEV)?,
    };
    // Another thread may be capturing a graph, which what follows is none of.
    let _alone = memory::cuda().map(Cuda::leave_captures_alone);
    let stage = Stage::take(gpu)?;
    let mut done = 0;
    while done < range.len {
        let len = (range.len - done).min(STAGE);
        let address = stage.memory.as_ptr() as u64;
        let part = Range { base: address, address, len, file_offset: range.file_offset + done as u64 };
        let device = range.address + done as u64;
        // SAFETY: the buffer is this call's, and its stream is waited for before it is used again;
        // the caller vouches for the other side.
        let moved = unsafe {
            match direction {
                Direction::Read => {
                    let moved = ordinary(file, direction, part)?;
                    stage.stream.copy_in(device, part.address, moved)?;
                    stage.stream.synchronize()?;
                    moved
                }
                Direction::Write => {
                    stage.stream.copy_out(part.address, device, len)?;
                    stage.stream.synchronize()?;
                    ordinary(file, direction, part)?
                }
            }
        };
        done += moved;
        if moved < len {
            break;
        }
    }
    stage.keep();
    Ok(done)
}

/// Moves bytes between a file and memory that the processor reads and writes.
///
/// # Safety
/// As [`transfer`]. An address where there is no memory is an error, `EFAULT`.
pub unsafe fn ordinary(file: BorrowedFd<'_>, direction: Direction, range: Range) -> Result<usize> {
    let mut done = 0;
    while done < range.len {
        let (address, len) = (range.address as usize + done, range.len - done);
        let offset = (range.file_offset + done as u64) as i64;
        // SAFETY: the kernel checks the range; the caller vouches that it may change.
        let moved = unsafe {
            match direction {
                Direction::Read => libc::pread(file.as_raw_fd(), address as *mut libc::c_void, len, offset),
                Direction::Write => libc::pwrite(file.as_raw_fd(), address as *const libc::c_void, len, offset),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => break,
            Ok(moved) => done += moved,
            Err(_) => match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO) {
                Errno::INTR => {}
                errno => return Err(errno.into()),
            },
        }
    }
    Ok(done)
}

/// Waits until a stream of the application has done all that was put into it.
///
/// # Errors
/// [`crate::failure::Code::AsyncNotSupported`] for one that is captured; what CUDA says.
///
/// # Safety
/// It is a stream of this process.
pub unsafe fn wait_for(cuda: &'static Cuda, stream: usize) -> Result<()> {
    // SAFETY: as the caller says.
    let stream = unsafe { cuda.application_stream(stream) }?;
    if stream.is_captured()? {
        return Err(crate::failure::Code::AsyncNotSupported.into());
    }
    Ok(stream.synchronize()?)
}

/// A pinned buffer, with a stream that copies.
struct Stage {
    gpu: Gpu,
    stream: Stream,
    memory: NonNull<u8>,
    /// Declared after the stream, and dropped before the memory is given back.
    registration: Option<HostRegistration>,
}

// SAFETY: the memory is this value's own.
unsafe impl Send for Stage {}

static POOL: Mutex<Vec<Stage>> = Mutex::new(Vec::new());

impl Stage {
    fn layout() -> Layout {
        Layout::from_size_align(STAGE, PAGE).expect("a power of two")
    }

    /// One of the pool, or a new one.
    fn take(gpu: Gpu) -> Result<Stage> {
        let mut pool = POOL.lock();
        if let Some(at) = pool.iter().position(|stage| stage.gpu == gpu) {
            return Ok(pool.swap_remove(at));
        }
        drop(pool);
        let stream = gpu.stream()?;
        // SAFETY: the layout is not empty.
        let memory = NonNull::new(unsafe { alloc_zeroed(Stage::layout()) }).ok_or(Errno::NOMEM)?;
        let mut stage = Stage { gpu, stream, memory, registration: None };
        // SAFETY: the memory is given back after the registration, in `drop`.
        stage.registration = Some(unsafe { HostRegistration::new(&gpu, memory, STAGE) }?);
        Ok(stage)
    }

    fn keep(self) {
        let mut pool = POOL.lock();
        if pool.len() < KEPT {
            pool.push(self);
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = self.stream.synchronize(); // what is in it is not to meet memory that is gone
        self.registration = None;
        // SAFETY: it was allocated with this layout, and nothing refers to it any more.
        unsafe { dealloc(self.memory.as_ptr(), Stage::layout()) }
    }
}
