//! The connection to a mount: an open file of it, and the ioctls on that file that answer with one
//! structure.

use crate::error::{Error, Result};
use crate::{socket, sys};
use gpunvme_abi::{self as abi, Command};
use parking_lot::Mutex;
use rustix::fs::FileType;
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An open file of the mount, through which it is talked to, and what was learnt from it at first.
#[derive(Debug)]
pub(crate) struct Connection {
    pub file: OwnedFd,
    /// The number of its filesystem (`st_dev`).
    pub filesystem: u64,
    pub path: PathBuf,
    pub limits: Limits,
    /// Path of the registration socket; empty where there is none.
    pub socket: String,
}

/// The connections that are open. As long as one is open its filesystem is there, and no other
/// filesystem has its number. No thread waits for this lock long: in a process that was forked
/// meanwhile it may be locked for ever.
static KNOWN: Mutex<Vec<Weak<Connection>>> = Mutex::new(Vec::new());
const MOMENT: Duration = Duration::from_millis(1);

/// What one ioctl may carry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    pub segments: usize,
    pub bytes: u64,
}

impl Connection {
    /// Connects by way of an open file or directory, whose path is for messages. It asks the daemon
    /// what an ioctl may carry.
    pub fn of(file: OwnedFd, path: &Path) -> Result<Connection> {
        let failed = |errno| Error::Path { path: path.to_owned(), action: "ask it about its filesystem", errno };
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        if !matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile | FileType::Directory) {
            return Err(Error::WrongKind {
                path: path.to_owned(),
                needed: "must be a regular file or a directory on a mount; `gpunvme probe` tells of a device",
            });
        }
        let connection =
            Connection { file, filesystem: stat.st_dev, path: path.to_owned(), limits: Limits::default(), socket: String::new() };
        let info = connection.raw_info()?;
        let limits =
            Limits { segments: (info.max_segments as usize).clamp(1, abi::MAX_SEGMENTS), bytes: info.max_transfer.max(1) };
        Ok(Connection { limits, socket: abi::get_text(&info.socket), ..connection })
    }

    /// The connection to the filesystem of this number, if this process has one: the daemon need
    /// not be asked then.
    pub fn known(number: u64) -> Option<Arc<Connection>> {
        let known = KNOWN.try_lock_for(MOMENT)?;
        known.iter().filter_map(Weak::upgrade).find(|connection| connection.filesystem == number)
    }

    /// Makes this connection one that [`Connection::known`] finds.
    pub fn make_known(self: &Arc<Connection>) {
        if let Some(mut known) = KNOWN.try_lock_for(MOMENT) {
            known.retain(|connection| connection.strong_count() > 0);
            known.push(Arc::downgrade(self));
        }
    }

    /// `INFO`, as the daemon answers it.
    pub fn raw_info(&self) -> Result<abi::Info> {
        let info = self.call(Command::Info, abi::Info::default(), "ask it about its filesystem")?;
        if info.magic != abi::INFO_MAGIC {
            return Err(Error::NotGpunvme { path: self.path.clone() });
        }
        Ok(info)
    }

    /// `STATS`, as the daemon answers it.
    pub fn raw_stats(&self) -> Result<abi::Stats> {
        self.call(Command::Stats, abi::Stats::default(), "read its counters")
    }

    /// `METRICS`, as the daemon answers it.
    pub fn raw_metrics(&self) -> Result<(abi::Metrics, Vec<abi::Metric>)> {
        let header = abi::Metrics { capacity: abi::MAX_METRICS as u32, ..abi::Metrics::default() };
        self.list(Command::Metrics, &header, abi::MAX_METRICS, |header| header.count, "read its counters")
    }

    /// `TOP`, as the daemon answers it.
    pub fn raw_top(&self) -> Result<(abi::TopList, Vec<abi::Top>)> {
        let header = abi::TopList { capacity: abi::MAX_TOP as u32, ..abi::TopList::default() };
        self.list(Command::Top, &header, abi::MAX_TOP, |header| header.count, "read who does what")
    }

    /// A command whose answer is a structure, and entries behind it for which there is room:
    /// `count` says how many there are.
    fn list<H: IntoBytes + FromBytes + Immutable, E: FromBytes>(
        &self,
        command: Command,
        header: &H,
        capacity: usize,
        count: impl Fn(&H) -> u32,
        action: &'static str,
    ) -> Result<(H, Vec<E>)> {
        let mut argument = header.as_bytes().to_vec();
        argument.resize(argument.len() + capacity * size_of::<E>(), 0);
        sys::ioctl(self.file.as_fd(), command.request(capacity), &mut argument)
            .map_err(|errno| failed(&self.path, action, errno))?;
        let (header, entries) = H::read_from_prefix(&argument).expect("the argument begins with a header");
        let entries = entries.chunks_exact(size_of::<E>()).take(count(&header) as usize);
        Ok((header, entries.map(|entry| E::read_from_bytes(entry).expect("a chunk has its size")).collect()))
    }

    /// A command whose argument is one structure.
    pub fn call<T: IntoBytes + FromBytes + Immutable>(
        &self,
        command: Command,
        mut argument: T,
        action: &'static str,
    ) -> Result<T> {
        sys::ioctl(self.file.as_fd(), command.request(0), argument.as_mut_bytes())
            .map_err(|errno| failed(&self.path, action, errno))?;
        Ok(argument)
    }

    /// A pidfd of the daemon, where one can be had.
    ///
    /// # Errors
    /// Where no descriptor is left for it: how its end is learnt must not depend on that.
    pub fn daemon(&self) -> std::result::Result<Option<OwnedFd>, Errno> {
        match socket::daemon(&self.socket) {
            Err(errno @ (Errno::MFILE | Errno::NFILE)) => Err(errno),
            daemon => Ok(daemon.ok()),
        }
    }

    /// Unregisters a buffer. A failure is ignored: either the buffer is gone already, or the daemon
    /// is.
    pub fn unregister(&self, buffer: u64) {
        let mut argument = abi::Unregister { buffer, ..abi::Unregister::default() };
        let _ = sys::ioctl(self.file.as_fd(), Command::Unregister.request(0), argument.as_mut_bytes());
    }
}

/// What the errno of an ioctl means before anything is known of the file.
pub(crate) fn failed(path: &Path, action: &'static str, errno: Errno) -> Error {
    let path = path.to_owned();
    match errno {
        // What filesystems say to ioctls that they do not know.
        Errno::NOTTY | Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL => Error::NotGpunvme { path },
        Errno::PROTONOSUPPORT => Error::OtherVersion { path },
        errno => Error::Path { path, action, errno },
    }
}
