//! The program umount.fuse.gpunvme: unmounts, and waits until the daemon has written everything
//! down and let go of the device.
//!
//! umount(8) calls it, where it is installed. Without it umount(8) unmounts just as well, but
//! returns a moment before the volume is clean, since the kernel does not wait for FUSE daemons.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Parser;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::error::MountError;
use super::last_word::Awaited;
use super::place::Place;
use super::question::{Found, Question, is_dead};
use super::utab;
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

/// What is said of a mount whose daemon was asked and does not answer, which has it in use.
const SILENT: &str = "its daemon does not answer; `umount -f` cuts off what is open there, `umount -l` only takes the \
                      mount out of the tree";

/// Why the devices of a mount in another mount namespace are not looked at.
const ELSEWHERE: &str = "its devices are not opened from another namespace";

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
        let dir = self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone());
        let (place, mount) = uppermost(&dir).map_err(|error| self.failed(&error))?;
        if !mount.is_ours() {
            return Err(self.failed(&"not the mount of a gpunvme volume"));
        }
        let others = elsewhere(&mount);
        let result = self.take_down(&place, &mount, &others);
        if self.namespace.is_none() {
            change_entries(&mount, &others, result.is_ok() && utab::is_called_by("umount"));
        }
        result
    }

    fn failed(&self, why: &dyn std::fmt::Display) -> MountError {
        MountError::Failed(format!("{}: {why}", self.dir.display()))
    }

    fn take_down(&self, place: &Place, mount: &Mount, others: &[Mount]) -> Result<(), MountError> {
        let mut flags = UnmountFlags::empty();
        flags.set(UnmountFlags::DETACH, self.lazy);
        flags.set(UnmountFlags::FORCE, self.force);
        // In another namespace `fusermount3` would be a program of that namespace's owner.
        let by_helper = self.namespace.is_none();
        let detach = || release(place, flags, by_helper);
        let why_not = |error: ReleaseError| self.failed(&error.of(mount, self.force));
        // Before anything is asked: a daemon that dies meanwhile leaves its file without a word.
        let last_word = Awaited::of(mount.dev, mount.source.as_os_str());
        // umount(2) of such a mount waits for its daemon, unless the mount is in use. A question
        // without an answer keeps it in use: so it is asked before `-l` too.
        let limit = if self.lazy { GLANCE_LIMIT } else { WORD_LIMIT };
        let answers = !mount.claims_its_device() || self.force || is_dead(mount, limit).is_some();
        if self.lazy {
            // Nothing is waited for, so nothing else is looked at.
            return detach().map_err(why_not);
        }
        if !answers {
            return Err(self.failed(&SILENT));
        }
        // What a mount in another namespace names, its owner has chosen.
        let ask = |question: Question, limit| {
            if by_helper { question.ask(mount, limit) } else { Some(Found::Unknown(ELSEWHERE.to_owned())) }
        };
        let may_lose = last_word.is_some() || may_lose(mount, self.force, &ask).ok_or_else(|| self.failed(&SILENT))?;
        if let Err(error) = detach() {
            // A daemon that was cut off takes its mount away in the end, or did before umount(2)
            // could.
            let is_cut_off = self.force && matches!(error.errno(), Errno::BUSY | Errno::INVAL);
            if let Some(word) = last_word.as_ref().filter(|_| is_cut_off) {
                word.wait(WORD_LIMIT);
            }
            if !is_cut_off || !is_gone(mount) {
                let is_lost = last_word.as_ref().and_then(Awaited::is_clean) == Some(false);
                return Err(if is_lost { self.failed(&format_args!("not unmounted, and {LOST}")) } else { why_not(error) });
            }
        }
        let is_said = |word: &Awaited| word.is_clean().is_some();
        let has_died = |word: &Awaited| !word.has_speaker() && !is_said(word);
        if !self.force && stays(others) && !last_word.as_ref().is_some_and(|word| is_said(word) || has_died(word)) {
            return Ok(());
        }
        if let Some(word) = &last_word {
            word.wait(WORD_LIMIT);
        }
        let is_clean = match &last_word {
            Some(word) if word.has_speaker() => Err(STILL_BUSY.to_owned()),
            word => {
                // Having the device, if only for a moment, means that its daemon is done. A mount
                // that claimed it has it for as long as something is open there.
                let may_stay = self.force && mount.claims_its_device() && word.as_ref().is_some_and(is_said);
                let limit = if may_stay { GLANCE_LIMIT } else { ANSWER_LIMIT };
                let released = ask(Question::IsReleased, limit);
                match word.as_ref().and_then(Awaited::is_clean) {
                    Some(is_clean) => Ok(is_clean),
                    None if may_lose => look(mount, released, &ask),
                    None => Ok(true),
                }
            }
        };
        match is_clean {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.failed(&format_args!("unmounted, but {LOST}"))),
            Err(why) => Err(MountError::Unknown(format!(
                "{}: unmounted, but whether the volume was written down cannot be told: {why}",
                self.dir.display()
            ))),
        }
    }
}

/// The mount that the directory shows: of several on it the uppermost, which need not be the
/// newest.
fn uppermost(dir: &Path) -> io::Result<(Place, Mount)> {
    let missing = || io::Error::new(io::ErrorKind::NotFound, "nothing is mounted there");
    let place = Place::of(dir).map_err(|_| missing())?;
    let found = Mount::all()?.into_iter().find(|mount| mount.dir == dir && place.shows(mount));
    found.map(|mount| (place, mount)).ok_or_else(missing)
}

/// Asks of a mount's devices, within a limit.
type Ask<'a> = dyn Fn(Question, Duration) -> Option<Found> + 'a;

/// Whether a daemon that says nothing may lose data; `None` where it does not answer. One that is
/// gone has left the volume as it was, and one that only reads has nothing to lose: neither has its
/// device open for writing.
///
/// Nothing is asked of another user's server: as long as it does not answer, the question itself
/// would have its mount in use. So a daemon is asked only where its device does not tell, and not
/// where it is cut off.
fn may_lose(mount: &Mount, force: bool, ask: &Ask) -> Option<bool> {
    let here = rustix::process::geteuid().as_raw();
    if mount.user.is_some_and(|user| user != here) {
        return Some(true);
    }
    match ask(Question::HasWriter, GLANCE_LIMIT) {
        Some(Found::Yes) => Some(true),
        Some(Found::No) => Some(false),
        _ if force => Some(true),
        _ => is_dead(mount, WORD_LIMIT).map(|dead| dead != Found::Yes),
    }
}

/// Where else a mount's filesystem is mounted.
fn elsewhere(mount: &Mount) -> Vec<Mount> {
    let is_other = |other: &Mount| other.dev == mount.dev && other.id != mount.id;
    Mount::all().unwrap_or_default().into_iter().filter(is_other).collect()
}

/// Whether the daemon stays, because it is mounted elsewhere too: unless it was cut off.
fn stays(others: &[Mount]) -> bool {
    Mount::all().is_ok_and(|mounts| others.iter().any(|other| is_among(other, &mounts)))
}

/// Whether a mount is still there. The filesystem's number does not tell: another may have got it
/// anew.
fn is_among(mount: &Mount, mounts: &[Mount]) -> bool {
    mounts.iter().any(|listed| listed.id == mount.id)
}

fn is_gone(mount: &Mount) -> bool {
    Mount::all().is_ok_and(|mounts| !is_among(mount, &mounts))
}

/// A mount that is gone leaves no entry: umount(8) removes one only where all went well, which
/// `for_umount` says, and not with all options. Where the filesystem stays mounted elsewhere, one
/// of these mounts has an entry after this: so at any time at least one of them has.
fn change_entries(mount: &Mount, others: &[Mount], for_umount: bool) {
    let Ok(mounts) = Mount::all() else { return };
    if is_among(mount, &mounts) {
        return;
    }
    if !mounts.iter().any(|listed| listed.is_ours() && listed.dir == mount.dir) {
        if for_umount { utab::remove_before_umount(&mount.dir) } else { utab::remove(&mount.dir) }
    }
    if let Some(other) = others.iter().find(|other| is_among(other, &mounts)) {
        utab::note(other);
    }
}

/// Whether a volume was left with nothing in its journal, which this program can see for itself
/// where it has its devices. The error says why it cannot.
fn look(mount: &Mount, released: Option<Found>, ask: &Ask) -> Result<bool, String> {
    let silent = || format!("{} does not answer", mount.source.to_string_lossy());
    match released.ok_or_else(silent)? {
        Found::Mounted => Ok(true),
        Found::No => Err(STILL_BUSY.to_owned()),
        Found::Unknown(why) => Err(why),
        Found::Yes => match ask(Question::IsClean, ANSWER_LIMIT).ok_or_else(silent)? {
            Found::Unknown(why) => Err(why),
            found => Ok(found == Found::Yes),
        },
    }
}

/// Why a mount was not unmounted.
#[derive(Debug)]
pub(super) enum ReleaseError {
    /// umount(2) refused.
    System(Errno),
    /// fusermount3 refused: it is in use, or another user's.
    Helper,
    /// fusermount3 could not be started.
    NoHelper(io::Error),
}

impl ReleaseError {
    /// As umount(2) would have it.
    pub(super) fn errno(&self) -> Errno {
        match self {
            ReleaseError::System(errno) => *errno,
            ReleaseError::Helper => Errno::BUSY,
            ReleaseError::NoHelper(_) => Errno::PERM,
        }
    }

    /// Why this user's unmounting of a mount came to nothing.
    fn of(&self, mount: &Mount, force: bool) -> String {
        let here = rustix::process::getuid().as_raw();
        match (self, mount.user) {
            (ReleaseError::System(Errno::PERM), Some(user)) => {
                format!("mounted by the user {user}: they or root may unmount it")
            }
            (ReleaseError::Helper | ReleaseError::NoHelper(_), Some(user)) if here != 0 && user != here => {
                format!("mounted by the user {user}: they or root may unmount it")
            }
            (ReleaseError::NoHelper(error), _) => {
                format!("this takes fusermount3, of the package fuse3, which could not be started: {error}")
            }
            (ReleaseError::System(Errno::BUSY), _) if force => {
                "cut off, and still mounted, since files are open there; `umount -l` takes it away".to_owned()
            }
            (ReleaseError::System(Errno::BUSY), _) if is_dead(mount, GLANCE_LIMIT) == Some(Found::Yes) => {
                let dir = mount.dir.display();
                format!(
                    "its daemon is dead, and a process has it in use; `fuser -vm {dir}` shows which, `umount -l` takes it away"
                )
            }
            (error, _) => error.errno().to_string(),
        }
    }
}

/// Unmounts what a place shows. Where only root may do so by itself, fusermount3 does it, if it
/// may; it knows no other flag than [`UnmountFlags::DETACH`].
pub(super) fn release(place: &Place, flags: UnmountFlags, by_helper: bool) -> Result<(), ReleaseError> {
    match place.unmount(flags) {
        Err(Errno::PERM) if by_helper => {
            let mounted = Mount::on(place.dir());
            let mut helper = Command::new("fusermount3");
            helper.args(["-u", "-q"]);
            if flags.contains(UnmountFlags::DETACH) {
                helper.arg("-z");
            }
            let mut child = helper.arg("--").arg(place.dir()).spawn().map_err(ReleaseError::NoHelper)?;
            // If its exit code cannot be had, the mount table tells.
            let is_gone = || mounted.is_ok_and(|mount| is_gone(&mount));
            match child.wait().map_or_else(|_| is_gone(), |status| status.success()) {
                true => Ok(()),
                false => Err(ReleaseError::Helper),
            }
        }
        result => result.map_err(ReleaseError::System),
    }
}
