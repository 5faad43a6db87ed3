//! The registration sockets of this machine's mounts, in one directory.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gpunvme_gpupath::server::Server;
use gpunvme_gpupath::socket::Listener;
use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Directory of the sockets.
const DIRECTORY: &str = "/run/gpunvme";
/// A file in it, which a daemon locks while it makes its socket.
const LOCK: &str = "lock";
/// How long a daemon waits for others that make theirs: that takes them moments.
const PATIENCE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);

/// Listens at a name in that directory, and removes the sockets of daemons that were killed.
///
/// # Errors
/// Nothing can be put into the directory.
pub(crate) fn listen(name: &str, server: Arc<Server>) -> io::Result<Listener> {
    fs::create_dir_all(DIRECTORY)?;
    let directory = Path::new(DIRECTORY);
    // A socket that is bound and does not listen yet looks like one that was left. One daemon at a
    // time.
    let _lock = match lock(&directory.join(LOCK), PATIENCE) {
        Ok(lock) => {
            remove_abandoned(directory)?;
            Some(lock)
        }
        Err(error) => {
            tracing::warn!("{DIRECTORY}: sockets of daemons that were killed stay there: {error}");
            None
        }
    };
    // Every user may register: the mount's permissions decide what buffers can be used for.
    Listener::bind(&directory.join(name), Mode::from_raw_mode(0o666), server)
}

/// Locks a file that only its owner can open: a lock of another user would hold up all mounts.
fn lock(path: &Path, patience: Duration) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if begun.elapsed() < patience => thread::sleep(POLL),
            locked => return Ok(locked.map(|()| file)?),
        }
    }
}

fn remove_abandoned(directory: &Path) -> io::Result<()> {
    for left in abandoned(directory)? {
        match fs::remove_file(&left) {
            Ok(()) => tracing::debug!("{}: removed the socket of a daemon that was killed", left.display()),
            Err(error) => tracing::debug!("{}: {error}", left.display()),
        }
    }
    Ok(())
}

/// The sockets in a directory that no daemon listens on.
fn abandoned(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(directory)?.flatten().map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|extension| extension == "sock") && is_abandoned(path)).collect())
}

fn is_abandoned(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) else { return false };
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    connect(&socket, &address) == Err(Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::net::{bind, listen, socket};

    use super::*;

    #[test]
    fn a_lock_that_is_held_holds_up_nobody_for_long() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(LOCK);
        let held = lock(&path, PATIENCE).unwrap();
        assert_eq!(held.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(lock(&path, 2 * POLL).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(held);
        lock(&path, PATIENCE).unwrap();
    }

    #[test]
    fn only_a_socket_without_a_listener_is_abandoned() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let bound = |name: &str| {
            let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            bind(&socket, &SocketAddrUnix::new(path(name)).unwrap()).unwrap();
            socket
        };
        let live = bound("live.sock");
        listen(&live, 1).unwrap();
        drop(bound("left.sock"));
        fs::write(path("file.sock"), "").unwrap();
        drop(bound("other"));
        let mut found = abandoned(directory.path()).unwrap();
        found.sort();
        // Whatever a file of that name is, no daemon listens on it.
        assert_eq!(found, [path("file.sock"), path("left.sock")]);
    }
}
