//! Whether any other process has a file open, or mapped: the kernel says so when it is asked for a
//! lease (fcntl_locking(2)). While the lease is held, who opens the file waits.

use rustix::io::Errno;
use std::fs::File;
use std::os::fd::AsRawFd;

/// `include/uapi/asm-generic/fcntl.h`; which signal says that a lease is wanted.
const F_SETSIG: libc::c_int = 10;

/// Takes a lease of a file that no one else has open, until `file` is closed. False where somebody
/// has, also by another descriptor of this process.
///
/// # Errors
/// What the kernel says: `EACCES` for the file of another user, without `CAP_LEASE`.
pub fn take(file: &File) -> Result<bool, Errno> {
    // Who opens the file meanwhile has the kernel signal this process: with a signal that is
    // ignored unless it is asked for, and not with SIGIO, which ends it.
    set(file, F_SETSIG, libc::SIGURG)?;
    match set(file, libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[allow(unsafe_code)]
fn set(file: &File, command: libc::c_int, value: libc::c_int) -> Result<(), Errno> {
    // SAFETY: both commands take a number and touch no memory; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, value) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn an_open_file_is_not_taken() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let file = File::open(named.path()).unwrap();
        assert_eq!(take(&file), Ok(false), "the test has it open too");
        let (other, path) = named.into_parts();
        drop(other);
        assert_eq!(take(&file), Ok(true));
        assert!(File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path).is_err(), "who opens it waits");
    }
}
