//! The stages of a mount, and what a signal means in each.
//!
//! - Starting: a SIGTERM, SIGINT or SIGHUP ends the program at once. Nothing is mounted, and the
//!   volume recovers as from a crash.
//! - Live: it unmounts. If the mount is in use, it tries again for a moment, then cuts off its
//!   users. Other mounts on the directory stay; then only the connection ends.
//! - Ended: it does nothing. The volume is being closed, which is what the signal asks for.
//!
//! The signals are blocked in every thread and taken by one of their own, so that they interrupt
//! nothing.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::attachment::Attachment;
use super::background::Report;
use super::error::MountError;

/// How long a mount in use may stay after a signal before it is cut off.
const GRACE: Duration = Duration::from_secs(5);
/// How long what programs have stored in mappings may take to reach the daemon then.
const WRITE_BACK: Duration = Duration::from_secs(5);
/// Time between two attempts to unmount.
const GRACE_POLL: Duration = Duration::from_millis(50);

/// Stage of a mount's life.
pub struct Lifecycle {
    device: String,
    stage: Mutex<Stage>,
}

enum Stage {
    /// Not mounted yet. Holds the report to make when the mount is live or has failed.
    Starting(Report),
    /// Mounted.
    Live(Arc<Attachment>),
    /// The kernel has released the mount, or is about to.
    Ended,
}

impl Lifecycle {
    /// Begins to take signals. Must be called before the process starts other threads: they
    /// inherit the blocked signals.
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

    /// Mounts by calling `mount`, and tells the waiting caller that the mount is live. A signal in
    /// between waits.
    ///
    /// # Errors
    /// The error of `mount`; [`MountError::Interrupted`] where no caller waits any more.
    pub fn go_live<S>(&self, mount: impl FnOnce() -> Result<(S, Attachment), MountError>) -> Result<S, MountError> {
        let mut stage = self.stage.lock();
        if matches!(&*stage, Stage::Starting(report) if report.is_unwanted()) {
            return Err(MountError::Interrupted);
        }
        let (session, mount) = mount()?;
        let mount = Arc::new(mount);
        if let Stage::Starting(report) = std::mem::replace(&mut *stage, Stage::Live(Arc::clone(&mount)))
            && let Err(error) = report.live()
        {
            tracing::warn!("{}: the caller is gone ({error}): unmounting", mount.dir().display());
            // By another thread: of a block device this waits until the session has ended, which
            // the caller of this sees to.
            let release = move || match mount.release(UnmountFlags::DETACH) {
                Ok(()) => {}
                Err(error) => tracing::error!("{}: unmounting: {error}", mount.dir().display()),
            };
            let name = thread::Builder::new().name("release".to_owned());
            name.spawn(release).map_err(|error| MountError::System(format!("starting a thread: {error}")))?;
        }
        Ok(session)
    }

    /// To be called when the kernel's last request has come, with whether umount(2) waits for its
    /// answer. Otherwise a mount that is still there leads nowhere, and is taken away; a device
    /// that it claimed is claimed again, for as long as what is returned.
    ///
    /// # Errors
    /// Another program has the device already, and nothing may be written any more.
    pub fn ended(&self, is_awaited: bool) -> Result<Option<File>, MountError> {
        let stage = std::mem::replace(&mut *self.stage.lock(), Stage::Ended);
        let Stage::Live(mount) = stage else { return Ok(None) };
        if is_awaited {
            return Ok(None);
        }
        if mount.is_in_place() {
            // The daemon no longer answers what unmounting asks.
            let _ = mount.abort();
            if let Err(error) = mount.release(UnmountFlags::DETACH) {
                tracing::warn!("{}: the mount has ended, but cannot be released: {error}", mount.dir().display());
            }
        }
        mount.claim_again().map_err(|error| {
            MountError::Failed(format!("was cut off, and is another program's now ({error}): what was not synced is lost"))
        })
    }

    /// Reports why it went wrong: to the caller while there is one, later to the log.
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
                *stage = Stage::Live(Arc::clone(&mount));
                drop(stage);
                tracing::info!("{signal}: unmounting {}", mount.dir().display());
                if let Err(error) = self.unmount(&mount) {
                    tracing::error!("{}: unmounting: {error}", mount.dir().display());
                }
            }
            Stage::Ended => {}
        }
    }

    /// Unmounts, and cuts off processes that use the mount for longer than [`GRACE`]: with open
    /// files, or in another mount namespace.
    fn unmount(&self, mount: &Attachment) -> io::Result<()> {
        let until = Instant::now() + GRACE;
        while !self.has_ended() && Instant::now() < until {
            match mount.release(UnmountFlags::empty()) {
                // Released, in use, or not ours to release: others may still have it.
                Ok(()) | Err(Errno::BUSY | Errno::INVAL) => {}
                Err(error) => return Err(error.into()),
            }
            thread::sleep(GRACE_POLL);
        }
        if self.has_ended() {
            return Ok(());
        }
        tracing::warn!("{}: still in use: cutting off what is open", mount.dir().display());
        // What is dirty in shared mappings goes to the daemon while it can still be reached.
        if let Err(error) = mount.sync(WRITE_BACK) {
            tracing::error!("{}: what programs have written may be lost: {error}", mount.dir().display());
        }
        match mount.release(UnmountFlags::DETACH) {
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
        mount.abort()
    }

    fn has_ended(&self) -> bool {
        matches!(*self.stage.lock(), Stage::Ended)
    }
}
