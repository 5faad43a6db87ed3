//! The system calls that have no safe wrapper: shared mappings, and ioctls with raw bytes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

/// A `MAP_SHARED`, readable and writable mapping of the first `len` bytes of a file.
#[derive(Debug)]
pub struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes from the start of `file`, which must be open for reading and writing and
    /// stay at least that long.
    pub fn shared(file: impl AsFd, len: usize) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let address = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)?
        };
        let address = NonNull::new(address.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { address, len })
    }

    /// Copies `out.len()` bytes at `offset` out of the mapping.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset + out.len() <= self.len);
        for (i, byte) in out.iter_mut().enumerate() {
            // SAFETY: in bounds as asserted; volatile, because other processes and the kernel
            // change these bytes.
            *byte = unsafe { self.address.as_ptr().add(offset + i).read_volatile() };
        }
    }

    /// Copies `data` into the mapping at `offset`.
    pub fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.len);
        for (i, byte) in data.iter().enumerate() {
            // SAFETY: in bounds as asserted; volatile, because other processes and the kernel read
            // these bytes.
            unsafe { self.address.as_ptr().add(offset + i).write_volatile(*byte) };
        }
    }

    /// Writes dirty pages back and waits for it, as msync(2) with `MS_SYNC`.
    pub fn sync(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping's own.
        unsafe { rustix::mm::msync(self.address.as_ptr().cast(), self.len, MsyncFlags::SYNC)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nothing borrowed from it outlives it.
        let _ = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// Sends an ioctl whose argument is `argument`, in place. The size in `command` must not be above
/// the argument's length.
///
/// Tests use it to send what the library would never send.
pub fn ioctl(fd: BorrowedFd<'_>, command: u32, argument: &mut [u8]) -> io::Result<i32> {
    let size = (command >> 16) & 0x3fff;
    assert!(size as usize <= argument.len(), "the command says {size} bytes");
    // SAFETY: the kernel reads and writes at most the size in the command, which the argument has.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), command.into(), argument.as_mut_ptr()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The descriptor that an ioctl made, by its number.
pub fn owned(number: i32) -> OwnedFd {
    // SAFETY: the kernel made it for this process just now, and no other code knows its number.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Has a program run where io_uring is switched off, as in containers that keep to Docker's list of
/// system calls: `io_uring_setup(2)` fails with EPERM.
pub fn without_io_uring(command: &mut Command) -> &mut Command {
    // seccomp(2): the number of the system call is the first word of what the filter looks at.
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let instruction = |code, jt, k| libc::sock_filter { code, jt, jf: 0, k };
    let filter = [
        instruction(LOAD_NUMBER, 0, 0),
        instruction(IF_EQUAL, 1, libc::SYS_io_uring_setup as u32),
        instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW),
        instruction(RETURN, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
        // SAFETY: the kernel copies the program, which lives until then.
        let result = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
                | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec it makes two system calls, and touches memory of its own only.
    unsafe { command.pre_exec(install) }
}

/// Memory for the arguments of ioctls, and none behind it: what lies across its end the kernel
/// cannot read or write.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
}

/// Bytes behind an [`Arena`] that are no memory: more than an ioctl's argument has.
const NO_MEMORY: usize = 32 << 10;

impl Arena {
    /// Zeros, of whole pages.
    pub fn new(len: usize) -> io::Result<Self> {
        assert!(len.is_multiple_of(4096), "whole pages");
        let reserved = len + NO_MEMORY;
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced; then a part
        // of this very mapping changes.
        let base = unsafe {
            let base = rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), MapFlags::PRIVATE)?;
            rustix::mm::mprotect(base, len, rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE)?;
            base
        };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidData)?, len })
    }

    /// Bytes of memory.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies in as many of the bytes as there is memory for at `offset`.
    pub fn put(&mut self, offset: usize, bytes: &[u8]) {
        let len = bytes.len().min(self.len.saturating_sub(offset));
        // SAFETY: `offset + len` is inside the memory where `len` is not 0, and no other code
        // borrows it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(offset.min(self.len)), len) };
    }

    /// Sends an ioctl whose argument begins at `offset`, which may lie up to a page behind the
    /// memory.
    ///
    /// # Errors
    /// The ioctl's errno.
    pub fn ioctl(&mut self, fd: BorrowedFd<'_>, command: u32, offset: usize) -> io::Result<i32> {
        assert!(offset <= self.len + 4096, "an argument in this arena");
        // SAFETY: a command says a size of less than 16 KiB, so that all that the kernel reads or
        // writes is in this mapping.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), command.into(), self.base.as_ptr().add(offset)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nothing borrowed from it outlives it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len + NO_MEMORY) };
    }
}

/// Sends an ioctl whose argument is at an address where a program has no memory: the first page, or
/// the kernel's half.
///
/// # Errors
/// The ioctl's errno.
pub fn ioctl_nowhere(fd: BorrowedFd<'_>, command: u32, address: usize) -> io::Result<i32> {
    assert!(address < 4096 || address > isize::MAX as usize, "{address:#x} may be memory");
    // SAFETY: the kernel can neither read nor write there for this process.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), command.into(), address) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Has a signal that does nothing come again and again, so that system calls that wait are
/// interrupted.
///
/// # Errors
/// Those of sigaction(2) and setitimer(2).
pub fn interrupt_every(microseconds: u32) -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    let time = libc::timeval { tv_sec: 0, tv_usec: microseconds.into() };
    let timer = libc::itimerval { it_interval: time, it_value: time };
    // SAFETY: the handler does nothing, and the structures live during the calls.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut())
            | libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
