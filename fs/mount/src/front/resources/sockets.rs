//! The registration sockets of this machine's mounts, in one folder.
//!
//! Each has a name that no other ever had, and has it from when it listens until it is removed. So
//! one at which no process listens was left by a daemon that was killed, and any daemon removes it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpunvme_gpupath::server::Server;
use gpunvme_gpupath::socket::{Listener, NOT_LISTENING};
use gpunvme_programs::random::random;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::run_folder::{self, RunFolderError};

/// The extension of a socket's name.
const SOCKET: &str = "sock";
/// How old a socket is at the least that will not listen any more: daemons take moments for that.
const LEFT: Duration = Duration::from_secs(60);

/// Listens for the mount of a volume with this UUID, and removes the sockets of daemons that were
/// killed.
///
/// # Errors
/// Nothing can be put into the folder, or what is in it cannot be trusted.
pub(crate) fn listen(uuid: [u8; 16], server: Arc<Server>) -> Result<Listener, RunFolderError> {
    let folder = run_folder::made()?;
    remove_abandoned(folder)?;
    let name = name(uuid).map_err(io::Error::other)?;
    // Every user may register: the mount's permissions decide what buffers can be used for.
    Ok(Listener::bind(&folder.join(name), Mode::from_raw_mode(0o666), server)?)
}

/// A name for the socket of one mount: copies of a volume share its UUID, and their path where they
/// lie in different mount namespaces.
fn name(uuid: [u8; 16]) -> Result<String, String> {
    let [uuid, random] = [uuid, random()?].map(u128::from_be_bytes);
    Ok(format!("{uuid:032x}-{:016x}.{SOCKET}", random as u64))
}

fn remove_abandoned(folder: &Path) -> io::Result<()> {
    for left in abandoned(folder)? {
        match fs::remove_file(&left) {
            Ok(()) => tracing::debug!("{}: removed the socket of a daemon that was killed", left.display()),
            Err(error) => tracing::debug!("{}: {error}", left.display()),
        }
    }
    Ok(())
}

/// The sockets in a folder that no daemon listens on, nor is about to.
fn abandoned(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let is_left = |path: &PathBuf| match path.extension().and_then(|extension| extension.to_str()) {
        Some(SOCKET) => is_deaf(path),
        Some(NOT_LISTENING) => is_deaf(path) && is_old(path),
        _ => false,
    };
    Ok(paths.filter(is_left).collect())
}

/// Whether no process listens at a socket.
fn is_deaf(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) else { return false };
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    connect(&socket, &address) == Err(Errno::CONNREFUSED)
}

fn is_old(path: &Path) -> bool {
    let made = fs::symlink_metadata(path).and_then(|status| status.modified());
    made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > LEFT))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
    use rustix::net::{bind, listen, socket};

    use super::*;

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
        let _about_to_listen = bound("starting.new");
        drop(bound("stopped.new"));
        let then = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap() - 2 * LEFT;
        let then = Timespec { tv_sec: then.as_secs() as i64, tv_nsec: 0 };
        let times = Timestamps { last_access: then, last_modification: then };
        utimensat(CWD, path("stopped.new"), &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        let mut found = abandoned(directory.path()).unwrap();
        found.sort();
        // Whatever a file of that name is, no daemon listens on it.
        assert_eq!(found, [path("file.sock"), path("left.sock"), path("stopped.new")]);
    }

    #[test]
    fn no_two_mounts_of_copies_share_a_name() {
        let [one, other] = [(); 2].map(|()| name([7; 16]).unwrap());
        assert_ne!(one, other);
        assert!(one.starts_with(&"07".repeat(16)) && one.len() == other.len());
    }
}
