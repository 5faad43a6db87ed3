//! Locks of image files, which keep other processes from opening them.
use std::fs::File;
use std::os::fd::AsRawFd;

use rustix::io::Errno;

use crate::OpenMode;

/// Locks a whole file for its open description (fcntl(2), F_OFD_SETLK): exclusively for writing,
/// shared for reading.
pub(crate) fn lock_file(file: &File, mode: OpenMode) -> rustix::io::Result<()> {
    let kind = match mode {
        OpenMode::ReadOnly => libc::F_RDLCK,
        OpenMode::ReadWrite => libc::F_WRLCK,
    };
    let whole = libc::flock { l_type: kind as _, l_whence: libc::SEEK_SET as _, l_start: 0, l_len: 0, l_pid: 0 };
    // SAFETY: the descriptor is open, and the kernel only reads the structure during the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &whole) } {
        0.. => Ok(()),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
    }
}
