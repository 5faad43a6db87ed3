//! The program umount.fuse.gpunvme: unmounts, and waits until the daemon has written everything
//! down and let go of the device.
//!
//! umount(8) calls it, where it is installed. Without it umount(8) unmounts just as well, but
//! returns a moment before the volume is clean, since the kernel does not wait for FUSE daemons.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use super::error::MountError;
use gpunvme_blockdev::OpenMode;
use gpunvme_programs::claim::{ClaimError, await_release, is_held};
use gpunvme_programs::members;
use gpunvme_programs::mounts::Mount;
use gpunvme_programs::terminal::complain;

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

        let source = mount.source.to_string_lossy();
        // One that was killed has left the volume as it was.
        let lives = is_held(&source);
        let mut flags = UnmountFlags::empty();
        flags.set(UnmountFlags::DETACH, self.lazy);
        flags.set(UnmountFlags::FORCE, self.force);
        release(&dir, flags).map_err(|error| failed(&why_not(error, &mount)))?;
        if self.lazy {
            return Ok(());
        }
        // Having the device, if only for a moment, means that its daemon is done.
        match await_release(&source) {
            Err(ClaimError::Held) => {
                let why = "the daemon still has the device: mounted in another namespace too, or a slow device";
                complain(format_args!("umount.fuse.gpunvme: {}: unmounted, but {why}", self.dir.display()));
                Ok(())
            }
            Ok(()) if lives && !mount.is_read_only && is_unclean(&source) => Err(failed(
                &"unmounted, but the volume could not be written down: what was not synced before is lost; \
                  journalctl -t mount.gpunvme says why, and the next mount recovers the rest",
            )),
            _ => Ok(()),
        }
    }
}

/// Whether a volume was left with something in its journal; not where it cannot be read.
fn is_unclean(source: &str) -> bool {
    members::open(source, &[], OpenMode::ReadOnly).is_ok_and(|device| matches!(gpunvme_engine::is_clean(&device), Ok(false)))
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
