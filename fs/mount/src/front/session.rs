//! A mount's connection to the kernel: from the first request to the last answer.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::housekeeping::Housekeeping;
use super::ioctl::Direct;
use super::lengths::Lengths;
use super::mount_state::MountState;
use super::nodes::Nodes;
use super::parts::Parts;
use super::rings::serving_threads;
use super::room::Room;
use super::workers::Workers;
use super::{Front, GENERAL_THREADS, INVALIDATION_THREADS, PARKED, ROOM, TRANSFER_THREADS, fuse};
use gpunvme_engine::data::Filesystem;
use gpunvme_engine::error::FsError;

/// How a filesystem is served.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The device, as the user called it.
    pub device: String,
    /// Let users other than the one who mounts in.
    pub allow_other: bool,
    /// Loops that take requests.
    pub loops: usize,
    /// Time between two commits of the journal.
    pub commit: Duration,
}

/// A live mount.
pub struct Session {
    front: Arc<Front>,
    served: Mutex<Option<fuser::BackgroundSession>>,
    housekeeping: Housekeeping,
}

impl Session {
    /// Begins to serve a filesystem to the kernel: `connection` is the open `/dev/fuse` of a mount that nobody serves yet. It is
    /// closed when the session ends, and what is mounted stays where it is.
    ///
    /// # Errors
    /// The kernel and this program have no protocol in common, or the system has not got the threads.
    pub fn start(fs: Arc<Filesystem>, connection: OwnedFd, settings: &Settings) -> io::Result<Session> {
        let serving_threads = serving_threads(settings.loops, fs.volume().device().geometry());
        let front = Arc::new(Front {
            nodes: Nodes::default(),
            lengths: Lengths::default(),
            room: Room::new(ROOM),
            parts: Parts::new(PARKED),
            general: Workers::new("worker", GENERAL_THREADS)?,
            invalidations: Workers::new("invalidation", INVALIDATION_THREADS)?,
            transfers: Workers::new("transfers", TRANSFER_THREADS)?,
            plans: Arc::default(),
            direct: Direct::new(&fs, &settings.device, serving_threads)?,
            mount_state: MountState::new()?,
            kernel: std::sync::OnceLock::new(),
            fs,
        });
        let housekeeping = Housekeeping::start(front.clone(), settings.commit)?;
        let served = fuse::serve(&front, connection, settings)?;
        Ok(Session { front, served: Mutex::new(Some(served)), housekeeping })
    }

    /// Files on the mount show this device number. Until that is said, the mount is taken to stay writable.
    pub fn is_device(&self, dev: u64) {
        self.front.mount_state.mounted(dev);
    }

    /// Waits until the kernel has let go of the connection.
    ///
    /// # Errors
    /// Why requests could no longer be taken, where that is what ended it.
    pub fn join(&self) -> io::Result<()> {
        let served = self.served.lock().take();
        served.map_or(Ok(()), fuser::BackgroundSession::join)
    }

    /// Ends what goes on besides requests, after [`Session::join`], and removes the inodes that only the kernel had. The
    /// filesystem is then ready to be closed.
    ///
    /// # Errors
    /// The device failed.
    pub fn end(self) -> Result<(), FsError> {
        let Session { front, housekeeping, .. } = self;
        // Before the workers: transfers that stalled go on there, and are waited for. Attached files go with the rings, which may be the last of an inode.
        front.direct.rings.end();
        drop(housekeeping);
        front.transfers.end();
        front.general.end();
        front.parts.clear();
        front.invalidations.end();
        if !front.fs.volume().is_read_only() {
            for ino in front.nodes.orphans() {
                while front.fs.wait(|| front.fs.reap_step(ino))? {}
            }
        }
        Ok(())
    }
}
