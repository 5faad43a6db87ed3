//! The stages of a mount, and what a signal means in each.
//!
//! | stage    | SIGTERM, SIGINT, SIGHUP                                                                       |
//! | -------- | --------------------------------------------------------------------------------------------- |
//! | starting | end at once; nothing is mounted, and the volume recovers from this like from a crash          |
//! | live     | unmount; if that fails because the mount is in use, try for a moment, then cut off its users  |
//! | ended    | nothing: the volume is being written down, which is what the signal asks for                  |
//!
//! The signals are blocked in every thread and taken by one of their own, so that they interrupt nothing.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::background::Report;
use super::error::MountError;
use super::fusectl;
use super::mounts::Mount;
use super::unmount::release;

/// How long a mount in use may stay after a signal before it is cut off.
const GRACE: Duration = Duration::from_secs(5);
/// Time between two attempts to unmount.
const GRACE_POLL: Duration = Duration::from_millis(50);

/// Where a mount is in its life.
pub struct Lifecycle {
    device: String,
    stage: Mutex<Stage>,
}

enum Stage {
    /// Not mounted yet. Holds whom to tell when it is, or fails to be.
    Starting(Report),
    /// Mounted.
    Live(Mount),
    /// The kernel has let go of the mount, or is about to.
    Ended,
}

impl Lifecycle {
    /// Begins to take signals. Must be called before the process starts other threads: they inherit the blocked signals.
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn start(device: &str, report: Report) -> Result<Arc<Self>, MountError> {
        let system = |what: &str, error: &dyn ToString| MountError::System(format!("{what}: {}", error.to_string()));
        let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
        signals.thread_block().map_err(|error| system("blocking signals", &error))?;
        let lifecycle = Arc::new(Self { device: device.to_owned(), stage: Mutex::new(Stage::Starting(report)) });
        let shared = Arc::clone(&lifecycle);
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                while let Ok(signal) = signals.wait() {
                    shared.stop(signal);
                }
            })
            .map_err(|error| system("starting a thread", &error))?;
        Ok(lifecycle)
    }

    /// Mounts by calling `mount`, and tells the caller who waits that the mount is live. A signal in between waits.
    ///
    /// # Errors
    /// What `mount` returns.
    pub fn go_live<S>(&self, mount: impl FnOnce() -> Result<(S, Mount), MountError>) -> Result<S, MountError> {
        let mut stage = self.stage.lock();
        let (session, mount) = mount()?;
        let dir = mount.dir.clone();
        if let Stage::Starting(report) = std::mem::replace(&mut *stage, Stage::Live(mount))
            && let Err(error) = report.live()
        {
            tracing::warn!("{}: nobody waits for this mount any more ({error}): unmounting", dir.display());
            release(&dir, UnmountFlags::DETACH).map_err(|error| MountError::Failed(format!("unmounting: {error}")))?;
        }
        Ok(session)
    }

    /// To be called when the kernel has let go of the mount.
    pub fn ended(&self) {
        *self.stage.lock() = Stage::Ended;
    }

    /// Says why it went wrong: to the caller while there is one, later to the log.
    pub fn failed(&self, error: &MountError) {
        match std::mem::replace(&mut *self.stage.lock(), Stage::Ended) {
            Stage::Starting(report) => report.failed(&self.device, error),
            _ => tracing::error!("{}: {error}", self.device),
        }
    }

    fn stop(&self, signal: Signal) {
        let mut stage = self.stage.lock();
        match std::mem::replace(&mut *stage, Stage::Ended) {
            Stage::Starting(report) => {
                let error = MountError::Interrupted;
                report.failed(&self.device, &error);
                std::process::exit(error.exit_code().into());
            }
            Stage::Live(mount) => {
                *stage = Stage::Live(mount.clone());
                drop(stage);
                tracing::info!("{signal}: unmounting {}", mount.dir.display());
                if let Err(error) = self.unmount(&mount) {
                    tracing::error!("{}: unmounting: {error}", mount.dir.display());
                }
            }
            Stage::Ended => {}
        }
    }

    /// Unmounts, and cuts off whoever uses the mount for longer than [`GRACE`]: with open files, or in another mount namespace.
    fn unmount(&self, mount: &Mount) -> io::Result<()> {
        let until = Instant::now() + GRACE;
        let mut released = false;
        while !self.has_ended() && Instant::now() < until {
            if !released {
                match release(&mount.dir, UnmountFlags::empty()) {
                    Ok(()) => released = true,
                    Err(Errno::BUSY) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            thread::sleep(GRACE_POLL);
        }
        if self.has_ended() {
            return Ok(());
        }
        tracing::warn!("{}: still in use: cutting off what is open", mount.dir.display());
        if released {
            return fusectl::abort(mount.dev);
        }
        // What is dirty in shared mappings goes to the daemon while it can still be reached.
        let root = rustix::fs::open(&mount.dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::fs::syncfs(&root)?;
        drop(root);
        release(&mount.dir, UnmountFlags::DETACH)?;
        fusectl::abort(mount.dev)
    }

    fn has_ended(&self) -> bool {
        matches!(*self.stage.lock(), Stage::Ended)
    }
}
