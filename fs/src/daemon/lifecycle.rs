//! The stages of a mount, and what a signal means in each.
//!
//! | stage    | SIGTERM, SIGINT, SIGHUP                                                                       |
//! | -------- | --------------------------------------------------------------------------------------------- |
//! | starting | end at once; nothing is mounted, and the volume recovers from this like from a crash          |
//! | live     | unmount; if files are open, detach from the directory tree and give their owners a moment     |
//! | ended    | nothing: the volume is being written down, which is what the signal asks for                  |
//!
//! The signals are blocked in every thread and taken by one of their own, so that they interrupt nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::background::Report;
use super::error::MountError;
use super::unmount::release;

/// How long files may stay open after a signal before they are cut off.
const GRACE: Duration = Duration::from_secs(5);

/// Where a mount is in its life.
pub struct Lifecycle {
    device: String,
    stage: Mutex<Stage>,
    changed: Condvar,
}

enum Stage {
    /// Not mounted yet. Holds whom to tell when it is, or fails to be.
    Starting(Report),
    /// Mounted on this directory.
    Live(PathBuf),
    /// A signal came: what is still open at this time is cut off.
    Stopping(Instant),
    /// The kernel has let go of the mount.
    Ended,
}

/// How a live mount ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The kernel has let go of it.
    Unmounted,
    /// After a signal, with files still open.
    CutOff,
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
        let lifecycle =
            Arc::new(Self { device: device.to_owned(), stage: Mutex::new(Stage::Starting(report)), changed: Condvar::new() });
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

    /// Mounts on `dir` by calling `mount`, and tells the caller who waits that the mount is live. A signal in between waits.
    ///
    /// # Errors
    /// What `mount` returns, or that nobody waits any longer; then the session just made must be dropped.
    pub fn go_live<S>(&self, dir: &Path, mount: impl FnOnce() -> Result<S, MountError>) -> Result<S, MountError> {
        let mut stage = self.stage.lock();
        let session = mount()?;
        if let Stage::Starting(report) = std::mem::replace(&mut *stage, Stage::Live(dir.to_owned()))
            && report.live().is_err()
        {
            *stage = Stage::Ended;
            return Err(MountError::Interrupted);
        }
        Ok(session)
    }

    /// To be called when the kernel has let go of the mount.
    pub fn ended(&self) {
        *self.stage.lock() = Stage::Ended;
        self.changed.notify_all();
    }

    /// Waits until a live mount ends.
    pub fn wait(&self) -> End {
        let mut stage = self.stage.lock();
        loop {
            match *stage {
                Stage::Ended => return End::Unmounted,
                Stage::Stopping(until) => {
                    if self.changed.wait_until(&mut stage, until).timed_out() && matches!(*stage, Stage::Stopping(_)) {
                        return End::CutOff;
                    }
                }
                _ => self.changed.wait(&mut stage),
            }
        }
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
            Stage::Live(dir) => {
                tracing::info!("{signal}: unmounting {}", dir.display());
                detach(&dir);
                *stage = Stage::Stopping(Instant::now() + GRACE);
            }
            other => *stage = other,
        }
        self.changed.notify_all();
    }
}

/// Takes the mount out of the directory tree, whether or not files on it are open.
fn detach(dir: &Path) {
    let result = match release(dir, UnmountFlags::empty()) {
        Err(Errno::BUSY) => {
            tracing::warn!("{}: in use; what is open there is cut off in {} seconds", dir.display(), GRACE.as_secs());
            release(dir, UnmountFlags::DETACH)
        }
        result => result,
    };
    if let Err(error) = result {
        tracing::error!("{}: unmounting: {error}", dir.display());
    }
}
