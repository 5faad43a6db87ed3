//! The system calls that have no safe wrapper: many transfers in flight, mappings of files that may
//! shrink under them, and locks of ranges.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags};

use super::call::Engine;

/// Where direct transfers may begin in memory.
const ALIGNMENT: usize = 4096;

/// Memory that any device can reach directly.
#[derive(Debug)]
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// Zeros.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        Self { bytes, start, len }
    }

    /// With this content.
    pub fn holding(content: &[u8]) -> Self {
        let mut new = Self::new(content.len());
        new.as_mut().copy_from_slice(content);
        new
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl AsMut<[u8]> for Aligned {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// A transfer that is in flight beside others.
#[derive(Debug)]
pub struct Flight {
    /// Or a read.
    pub write: bool,
    /// Place in the file.
    pub at: u64,
    /// What is written, or where it is read to.
    pub memory: Aligned,
    /// Bytes, or the negative errno.
    pub result: i64,
}

/// `struct iocb` (linux/aio_abi.h), little-endian.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

/// `struct io_event` (linux/aio_abi.h).
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

/// `IOCB_CMD_PREAD` and `IOCB_CMD_PWRITE`.
const AIO_READ: u16 = 0;
const AIO_WRITE: u16 = 1;

/// Submits all transfers in one call and waits for all of them.
///
/// # Errors
/// That of the call which makes the queue. Those of transfers are in their results; what was not
/// taken has that of the submission.
pub fn fly(file: BorrowedFd<'_>, engine: Engine, flights: &mut [Flight]) -> io::Result<()> {
    match engine {
        Engine::Aio => aio(file, flights),
        Engine::Uring => uring(file, flights),
    }
}

fn aio(file: BorrowedFd<'_>, flights: &mut [Flight]) -> io::Result<()> {
    let mut context: u64 = 0;
    // SAFETY: the kernel writes one word, the name of the queue.
    checked(unsafe { libc::syscall(libc::SYS_io_setup, flights.len().max(1), &raw mut context) })?;
    let mut blocks: Vec<Iocb> = Vec::new();
    for (number, flight) in flights.iter_mut().enumerate() {
        blocks.push(Iocb {
            data: number as u64,
            opcode: if flight.write { AIO_WRITE } else { AIO_READ },
            fd: file.as_raw_fd() as u32,
            buffer: flight.memory.as_mut().as_mut_ptr() as u64,
            bytes: flight.memory.len as u64,
            offset: flight.at as i64,
            ..Iocb::default()
        });
    }
    let pointers: Vec<*const Iocb> = blocks.iter().map(|block| &raw const *block).collect();
    let mut taken = 0;
    while taken < pointers.len() {
        // SAFETY: the blocks, and the memory that they name, live until all that was taken has
        // ended, below.
        let result = unsafe { libc::syscall(libc::SYS_io_submit, context, pointers.len() - taken, pointers[taken..].as_ptr()) };
        match checked(result) {
            Ok(more) => taken += more as usize,
            Err(error) => {
                // The kernel stops at a block that it does not take; the rest is tried without it.
                flights[taken].result = -i64::from(error.raw_os_error().unwrap_or(0));
                blocks[taken].data = u64::MAX;
                break;
            }
        }
    }
    for flight in flights.iter_mut().skip(taken + 1) {
        flight.result = i64::MIN;
    }
    let mut ended = 0;
    while ended < taken {
        let mut events = [Event::default(); 16];
        // SAFETY: the kernel writes at most as many events as there is room for.
        let result = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                context,
                1,
                events.len(),
                events.as_mut_ptr(),
                std::ptr::null_mut::<libc::timespec>(),
            )
        };
        // Work that an io_uring of this thread left for it interrupts the wait.
        let more = match checked(result) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => result.expect("completions") as usize,
        };
        for event in &events[..more] {
            flights[event.data as usize].result = event.result;
        }
        ended += more;
    }
    // SAFETY: nothing is in flight in it.
    unsafe { libc::syscall(libc::SYS_io_destroy, context) };
    Ok(())
}

fn uring(file: BorrowedFd<'_>, flights: &mut [Flight]) -> io::Result<()> {
    let mut ring = io_uring::IoUring::new((flights.len() as u32).next_power_of_two())?;
    for (number, flight) in flights.iter_mut().enumerate() {
        let fd = io_uring::types::Fd(file.as_raw_fd());
        let (memory, len) = (flight.memory.as_mut().as_mut_ptr(), flight.memory.len as u32);
        let entry = if flight.write {
            io_uring::opcode::Write::new(fd, memory, len).offset(flight.at).build()
        } else {
            io_uring::opcode::Read::new(fd, memory, len).offset(flight.at).build()
        };
        // SAFETY: the memory lives until all has ended, below.
        unsafe { ring.submission().push(&entry.user_data(number as u64)) }.expect("room for all");
    }
    let mut ended = 0;
    while ended < flights.len() {
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            Err(error) => panic!("io_uring_enter: {error}"),
        }
        for entry in ring.completion() {
            flights[entry.user_data() as usize].result = entry.result().into();
            ended += 1;
        }
    }
    Ok(())
}

fn checked(result: libc::c_long) -> io::Result<i64> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A mapping that the kernel, and never this process itself, reads and writes: where a file has no
/// page, that is EFAULT and not SIGBUS.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<u8>,
    len: usize,
    between: File,
}

impl Mapping {
    /// Maps a part of a file; what is moved goes by way of the memfd `between`.
    ///
    /// # Errors
    /// That of mmap(2).
    pub fn new(file: impl AsFd, between: File, how: MapFlags, protection: ProtFlags, at: u64, len: usize) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, how, file, at)? };
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { address, len, between })
    }

    /// Bytes of it.
    #[allow(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// A memfd for [`Mapping::new`].
    pub fn between() -> io::Result<File> {
        Ok(File::from(rustix::fs::memfd_create("between", MemfdFlags::CLOEXEC)?))
    }

    /// Bytes of the mapping, as far as there are pages.
    ///
    /// # Errors
    /// EFAULT where there is none.
    pub fn read(&self, offset: usize, len: usize) -> io::Result<Vec<u8>> {
        assert!(offset + len <= self.len);
        // SAFETY: in bounds as asserted, and the kernel is who looks at it.
        let moved = unsafe { libc::pwrite(self.between.as_raw_fd(), self.address.as_ptr().add(offset).cast(), len, 0) };
        let mut bytes = vec![0; checked(moved as libc::c_long)? as usize];
        self.between.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    /// Changes bytes of the mapping, as far as there are pages; how many.
    ///
    /// # Errors
    /// EFAULT where there is none, or they cannot be written.
    pub fn write(&self, offset: usize, data: &[u8]) -> io::Result<usize> {
        assert!(offset + data.len() <= self.len);
        self.between.write_all_at(data, 0)?;
        // SAFETY: in bounds as asserted, and the kernel is who writes it.
        let moved = unsafe { libc::pread(self.between.as_raw_fd(), self.address.as_ptr().add(offset).cast(), data.len(), 0) };
        Ok(checked(moved as libc::c_long)? as usize)
    }

    /// msync(2) with `MS_SYNC`.
    ///
    /// # Errors
    /// That of the call.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping's own.
        unsafe { rustix::mm::msync(self.address.as_ptr().cast(), self.len, MsyncFlags::SYNC)? };
        Ok(())
    }

    /// `MADV_DONTNEED`.
    ///
    /// # Errors
    /// That of the call.
    pub fn forget(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping's own, and nothing of it is borrowed.
        unsafe { rustix::mm::madvise(self.address.as_ptr().cast(), self.len, Advice::LinuxDontNeed)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nothing borrowed from it outlives it.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// fcntl(2) about a lock of a range; what it says of the lock (`F_GETLK`) as kind, start and
/// length.
///
/// # Errors
/// That of the call.
pub fn lock(file: impl AsFd, open_file: bool, test: bool, kind: i16, start: i64, len: i64) -> io::Result<(i16, i64, i64)> {
    let command = match (open_file, test) {
        (false, false) => libc::F_SETLK,
        (false, true) => libc::F_GETLK,
        (true, false) => libc::F_OFD_SETLK,
        (true, true) => libc::F_OFD_GETLK,
    };
    let mut lock = libc::flock { l_type: kind, l_whence: libc::SEEK_SET as i16, l_start: start, l_len: len, l_pid: 0 };
    // SAFETY: the kernel reads and writes one such structure.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), command, &raw mut lock) };
    checked(result.into())?;
    Ok((lock.l_type, lock.l_start, lock.l_len))
}

/// Errors instead of the signals that would end the process: a file at its limit, a pipe without a
/// reader.
pub fn ignore_signals() {
    for signal in [libc::SIGXFSZ, libc::SIGPIPE] {
        // SAFETY: no handler is installed.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// truncate(2).
///
/// # Errors
/// That of the call.
pub fn truncate(path: Vec<u8>, len: u64) -> io::Result<()> {
    let path = CString::new(path)?;
    // SAFETY: the kernel reads a name that ends with a zero.
    checked(unsafe { libc::truncate(path.as_ptr(), len as i64) }.into())?;
    Ok(())
}
