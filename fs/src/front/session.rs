//! A mount: from the system call to the last answer.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::mount::MountFlags;

use super::housekeeping::Housekeeping;
use super::ioctl::Direct;
use super::nodes::Nodes;
use super::parts::Parts;
use super::rings::serving_threads;
use super::room::Room;
use super::workers::Workers;
use super::{Front, GENERAL_THREADS, INVALIDATION_THREADS, PARKED, ROOM, fuse};
use crate::data::Filesystem;
use crate::error::FsError;

/// How a filesystem is mounted.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What the mount table says is mounted.
    pub source: String,
    /// Let users other than the one who mounts in.
    pub allow_other: bool,
    /// Mount read-only.
    pub read_only: bool,
    /// What else the kernel is asked to do with the mount (`nodev`, `nosuid`, ...).
    pub flags: MountFlags,
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
    /// Mounts the filesystem on a directory and begins to serve it.
    ///
    /// # Errors
    /// Those of mounting, and of threads that the system has not got.
    pub fn mount(fs: Arc<Filesystem>, dir: &Path, settings: &Settings) -> io::Result<Session> {
        let serving_threads = serving_threads(settings.loops, fs.volume().device().geometry());
        let front = Arc::new(Front {
            nodes: Nodes::default(),
            room: Room::new(ROOM),
            parts: Parts::new(PARKED),
            general: Workers::new("worker", GENERAL_THREADS)?,
            invalidations: Workers::new("invalidation", INVALIDATION_THREADS)?,
            direct: Direct::new(&fs, &settings.source, serving_threads)?,
            kernel: std::sync::OnceLock::new(),
            fs,
        });
        let housekeeping = Housekeeping::start(front.clone(), settings.commit)?;
        let served = fuse::mount(&front, dir, settings)?;
        Ok(Session { front, served: Mutex::new(Some(served)), housekeeping })
    }

    /// Waits until the kernel has let go of the mount.
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
