//! The program umount.fuse.gpunvme: unmounts, and waits until the daemon has written everything
//! down and let go of the device.
//!
//! umount(8) calls it, where it is installed. Without it umount(8) unmounts just as well, but
//! returns a moment before the volume is clean, since the kernel does not wait for FUSE daemons.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Parser;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use super::error::MountError;
use super::last_word::Awaited;
use gpunvme_blockdev::OpenMode;
use gpunvme_programs::claim::{ClaimError, await_release, may_have_writer};
use gpunvme_programs::limited::within;
use gpunvme_programs::members;
use gpunvme_programs::mounts::Mount;

/// How long the filesystem of a device may take to answer before the mount is taken away.
const GLANCE_LIMIT: Duration = Duration::from_secs(1);
/// How long a daemon may take to write everything down. It never does where it is mounted in
/// another mount namespace, too.
const WORD_LIMIT: Duration = Duration::from_secs(10);
/// How long the device may take after that: longer than a daemon to let go of it, and a controller
/// to be brought up.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// What is said of a volume that the daemon did not write down.
const LOST: &str = "the volume could not be written down: what was not synced before is lost; \
                    journalctl -t mount.gpunvme says why, and the next mount recovers the rest";

/// Why a daemon was not waited for to its end.
const STILL_BUSY: &str = "the daemon still has the device: mounted in another namespace too, or a slow device";

/// Unmounts a gpunvme volume. Usually called by umount(8)
#[derive(Debug, Parser)]
#[command(name = "umount.fuse.gpunvme", bin_name = "umount.fuse.gpunvme", version)]
#[allow(clippy::struct_excessive_bools, reason = "they are umount(8)'s flags")]
pub(super) struct Arguments {
    /// The directory that the volume is mounted on
    dir: PathBuf,
    /// Detach from the directory tree now, and let what is open go on
    #[arg(short = 'l')]
    lazy: bool,
    /// Cut off what is open
    #[arg(short = 'f')]
    force: bool,
    /// The mount namespace to work in: a process id or the path of a namespace
    #[arg(short = 'N', value_name = "NAMESPACE")]
    pub(super) namespace: Option<String>,
    /// Accepted for umount(8)
    #[arg(short = 'n', short_aliases = ['r', 'v'], action = clap::ArgAction::Count)]
    _ignored: u8,
    /// Accepted for umount(8): the mount table knows better
    #[arg(short = 't', value_name = "TYPE")]
    _fs_type: Option<String>,
}

impl Arguments {
    /// Unmounts as these arguments say.
    pub(super) fn unmount(&self) -> Result<(), MountError> {
        let failed = |why: &dyn std::fmt::Display| MountError::Failed(format!("{}: {why}", self.dir.display()));
        let dir = self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone());
        let mount = Mount::on(&dir).map_err(|error| failed(&error))?;
        if !mount.is_ours() {
            return Err(failed(&"not the mount of a gpunvme volume"));
        }

        let mut flags = UnmountFlags::NOFOLLOW;
        flags.set(UnmountFlags::DETACH, self.lazy);
        flags.set(UnmountFlags::FORCE, self.force);
        let detach = || release(&dir, flags).map_err(|error| failed(&why_not(error, &mount)));
        if self.lazy {
            // Nothing is waited for, so nothing is looked at: its filesystem may not answer.
            return detach();
        }
        let source = mount.source.to_string_lossy().into_owned();
        let last_word = Awaited::of(mount.dev);
        let may_lose = last_word.is_some() || may_lose(&mount, &source);
        if let Err(busy) = detach() {
            // What is open was cut off all the same, and its daemon ends.
            if let Some(word) = last_word.as_ref().filter(|_| self.force) {
                word.wait(WORD_LIMIT);
                if word.is_clean() == Some(false) {
                    return Err(failed(&format_args!("not unmounted, and {LOST}")));
                }
            }
            return Err(busy);
        }
        let is_said = |word: &Awaited| word.is_clean().is_some();
        if !self.force && stays(&mount) && !last_word.as_ref().is_some_and(is_said) {
            return Ok(());
        }
        if let Some(word) = &last_word {
            word.wait(WORD_LIMIT);
        }
        let is_clean = match &last_word {
            Some(word) if word.has_speaker() => Err(STILL_BUSY.to_owned()),
            word => {
                // Having the device, if only for a moment, means that its daemon is done.
                let released = ask(ANSWER_LIMIT, &source, await_release);
                match word.as_ref().and_then(Awaited::is_clean) {
                    Some(is_clean) => Ok(is_clean),
                    None if may_lose => look(&source, released),
                    None => Ok(true),
                }
            }
        };
        match is_clean {
            Ok(true) => Ok(()),
            Ok(false) => Err(failed(&format_args!("unmounted, but {LOST}"))),
            Err(why) => Err(MountError::Unknown(format!(
                "{}: unmounted, but whether the volume was written down cannot be told: {why}",
                self.dir.display()
            ))),
        }
    }
}

/// Whether a daemon that says nothing may lose data. One that is gone has left the volume as it
/// was, and one that only reads has nothing to lose.
fn may_lose(mount: &Mount, source: &str) -> bool {
    !mount.is_dead() && ask(GLANCE_LIMIT, source, may_have_writer).unwrap_or(true)
}

/// Whether the daemon stays, because it is mounted elsewhere too: unless it was cut off.
fn stays(mount: &Mount) -> bool {
    let is_same = |other: &Mount| (other.dev, &other.source, &other.fs_type) == (mount.dev, &mount.source, &mount.fs_type);
    Mount::all().is_ok_and(|mounts| mounts.iter().any(is_same))
}

/// What a question about a device is answered with; `None` where its filesystem, or its driver,
/// does not answer.
fn ask<T: Send + 'static>(limit: Duration, device: &str, question: fn(&str) -> T) -> Option<T> {
    let device = device.to_owned();
    within(limit, move || question(&device))
}

/// Whether a volume was left with nothing in its journal, which this program can see for itself
/// where it has its devices. The error says why it cannot.
fn look(source: &str, released: Option<Result<(), ClaimError>>) -> Result<bool, String> {
    let silent = || format!("{source} does not answer");
    match released.ok_or_else(silent)? {
        // It went on from what there was.
        Err(ClaimError::Mounted(_)) => Ok(true),
        Err(ClaimError::Held) => Err(STILL_BUSY.to_owned()),
        Err(error) => Err(format!("{source}: {error}")),
        Ok(()) => ask(ANSWER_LIMIT, source, is_clean).ok_or_else(silent)?,
    }
}

fn is_clean(source: &str) -> Result<bool, String> {
    let device = members::open(source, &[], OpenMode::ReadOnly).map_err(|error| format!("{source}: {error}"))?;
    gpunvme_engine::is_clean(&device).map_err(|error| error.to_string())
}

/// Why a mount is not to be unmounted by this user.
fn why_not(errno: Errno, mount: &Mount) -> String {
    let here = rustix::process::getuid().as_raw();
    match mount.user {
        Some(user) if errno == Errno::PERM || (errno == Errno::BUSY && here != 0 && user != here) => {
            format!("mounted by the user {user}: they or root may unmount it")
        }
        _ => errno.to_string(),
    }
}

/// Unmounts `dir`. Where only root may do so by itself, fusermount3 does it, which knows no other
/// flag than [`UnmountFlags::DETACH`].
pub(super) fn release(dir: &Path, flags: UnmountFlags) -> rustix::io::Result<()> {
    match unmount(dir, flags) {
        Err(Errno::PERM) => {
            let mut helper = Command::new("fusermount3");
            helper.args(["-u", "-q"]);
            if flags.contains(UnmountFlags::DETACH) {
                helper.arg("-z");
            }
            match helper.arg("--").arg(dir).status() {
                Ok(status) if status.success() => Ok(()),
                Ok(_) => Err(Errno::BUSY),
                Err(_) => Err(Errno::PERM),
            }
        }
        result => result,
    }
}
