//! Identifies the process and the user that connected to a Unix socket. The one module here with
//! `unsafe`: the two socket options have no safe binding that survives a peer whose process id is
//! 0, which is what a process in an invisible pid namespace has.

use crate::process::{Client, Process};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// The user id that connected this socket, as it was then, whichever process holds the connection
/// now.
pub(crate) fn user(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    Ok(credentials(socket)?.uid)
}

/// The process that connected this socket, even if others hold the connection now.
///
/// # Errors
/// `ESRCH` where it is dead, or in a pid namespace that is not visible here.
pub(crate) fn client(socket: BorrowedFd<'_>) -> Result<Client, Errno> {
    let libc::ucred { pid, uid: user, .. } = credentials(socket)?;
    let id = u32::try_from(pid).ok().filter(|&id| id != 0).ok_or(Errno::SRCH)?;
    let mut number: libc::c_int = -1;
    let process = match get(socket, libc::SO_PEERPIDFD, &mut number) {
        Ok(()) => {
            // SAFETY: the kernel installed this descriptor for us just now (net/core/sock.c), and
            // no other code knows its number.
            let pidfd = unsafe { OwnedFd::from_raw_fd(number) };
            Process::with_pidfd(id, pidfd)
        }
        // Before Linux 6.5. A peer whose id is another's by now makes that other process pay for
        // the buffer, and gains nothing.
        Err(Errno::NOPROTOOPT) => Process::open(id),
        Err(errno) => Err(errno),
    };
    Ok(Client { process: process?, user })
}

fn credentials(socket: BorrowedFd<'_>) -> Result<libc::ucred, Errno> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    get(socket, libc::SO_PEERCRED, &mut credentials)?;
    Ok(credentials)
}

/// `getsockopt(2)` of an option that is a plain structure of integers.
fn get<T: Plain>(socket: BorrowedFd<'_>, option: libc::c_int, value: &mut T) -> Result<(), Errno> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, which is that long, and any bytes
    // make a valid T.
    let result =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, std::ptr::from_mut(value).cast(), &mut len) };
    if result == 0 { Ok(()) } else { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)) }
}

/// Types of which every bit pattern is a value.
trait Plain {}
impl Plain for libc::ucred {}
impl Plain for libc::c_int {}
