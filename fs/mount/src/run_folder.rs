//! The folder of this machine's daemons, `/run/gpunvme`, which has the registration sockets
//! (`front::resources::sockets`), and files for the last words of daemons (`daemon::last_word`).
//!
//! What lies in it is believed, so only root may put anything there.

use std::io;
use std::path::Path;

use rustix::fs::{Mode, OFlags, fchmod, fstat, mkdir, open};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The folder.
pub const RUN_FOLDER: &str = "/run/gpunvme";
/// Its mode: every user may reach a socket in it.
const MODE: Mode = Mode::from_raw_mode(0o755);
/// How a user namespace shows the users that it does not have (user_namespaces(7)).
const OVERFLOW_USER: u32 = 65534;

/// Why the folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunFolderError {
    /// Its owner could put anything there.
    #[error("{RUN_FOLDER} belongs to the user {0}, who could put other files there; `chown root {RUN_FOLDER}`")]
    Owner(u32),
    /// Others than its owner could.
    #[error("others than its owner may write to {RUN_FOLDER} (mode {0:o}); `chmod 755 {RUN_FOLDER}`")]
    Mode(u32),
    /// There is something else: a link may lead to what others may change.
    #[error("{RUN_FOLDER} is a link or a file, and no folder; `rm {RUN_FOLDER}`")]
    NoFolder,
    /// There is nothing in which it could be made.
    #[error("there is no folder /run; `mkdir -m 755 /run`")]
    NoRun,
    /// It cannot be made, or nothing can be made in it.
    #[error("{RUN_FOLDER}: {0}; have it be a folder to which root may write")]
    Io(#[from] io::Error),
}

impl From<Errno> for RunFolderError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOTDIR | Errno::LOOP => RunFolderError::NoFolder,
            Errno::NOENT => RunFolderError::NoRun,
            errno => RunFolderError::Io(errno.into()),
        }
    }
}

impl RunFolderError {
    /// Logs what mounts lack because of it.
    pub fn log(&self, lacking: &str) {
        if self.is_as_it_should_be(geteuid().is_root() && !is_in_user_namespace()) {
            tracing::debug!("{lacking}: {self}");
        } else {
            tracing::warn!("{lacking}: {self}, and mount again");
        }
    }

    /// Whether a daemon has to do without. The folder is the machine's root's: an ordinary user can
    /// neither make nor mend it, and root of a user namespace sees it as the overflow user's.
    fn is_as_it_should_be(&self, is_root: bool) -> bool {
        match self {
            Self::Owner(user) => !is_root && *user == OVERFLOW_USER,
            Self::NoRun | Self::Io(_) => !is_root,
            Self::Mode(_) | Self::NoFolder => false,
        }
    }
}

/// Whether this process is in a user namespace other than the machine's, which maps every user to
/// itself.
fn is_in_user_namespace() -> bool {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    !map.is_empty() && !map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The folder, made where there is none.
///
/// # Errors
/// It cannot be made, or others may change what is in it.
pub fn made() -> Result<&'static Path, RunFolderError> {
    let folder = Path::new(RUN_FOLDER);
    make(folder)?;
    Ok(folder)
}

/// The folder, where there is one.
///
/// # Errors
/// There is none, or others may change what is in it.
pub fn existing() -> Result<&'static Path, RunFolderError> {
    let folder = Path::new(RUN_FOLDER);
    check(folder, false)?;
    Ok(folder)
}

fn make(folder: &Path) -> Result<(), RunFolderError> {
    match mkdir(folder, MODE) {
        Ok(()) => check(folder, true),
        Err(Errno::EXIST) => check(folder, false),
        Err(errno) => Err(errno.into()),
    }
}

/// Insists that only its owner may change a folder, who is root or the caller. A new one gets its
/// mode, of which the caller's umask may have taken something.
fn check(folder: &Path, is_new: bool) -> Result<(), RunFolderError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = open(folder, flags, Mode::empty())?;
    if is_new {
        fchmod(&opened, MODE)?;
    }
    let stat = fstat(&opened)?;
    if stat.st_uid != 0 && stat.st_uid != geteuid().as_raw() {
        return Err(RunFolderError::Owner(stat.st_uid));
    }
    match stat.st_mode & 0o022 {
        0 => Ok(()),
        _ => Err(RunFolderError::Mode(stat.st_mode & 0o7777)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn mode(folder: &Path) -> u32 {
        fs::metadata(folder).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn what_others_may_change_is_not_used() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join("gpunvme");
        make(&folder).unwrap();
        assert_eq!(mode(&folder), 0o755);
        for (others, is_used) in [(0o700, true), (0o755, true), (0o775, false), (0o757, false), (0o1777, false)] {
            fs::set_permissions(&folder, Permissions::from_mode(others)).unwrap();
            let made = make(&folder);
            assert_eq!(made.is_ok(), is_used, "{others:o}: {made:?}");
            assert_eq!(mode(&folder), others, "what is there keeps its mode");
        }
        let error = make(&folder).unwrap_err().to_string();
        assert!(error.ends_with("(mode 1777); `chmod 755 /run/gpunvme`"), "{error}");
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        let link = scratch.path().join("link");
        symlink(&folder, &link).unwrap();
        assert!(matches!(make(&link), Err(RunFolderError::NoFolder)));
        assert!(matches!(make(&scratch.path().join("no/run")), Err(RunFolderError::NoRun)));
        // Only root can give it away.
        if chown(&folder, Some(4711), None).is_ok() {
            assert!(matches!(make(&folder), Err(RunFolderError::Owner(4711))));
        }
    }

    #[test]
    fn root_is_told_of_what_root_can_mend() {
        use RunFolderError::{Io, Mode, NoFolder, NoRun, Owner};
        let read_only = || Io(Errno::ROFS.into());
        for error in [Owner(OVERFLOW_USER), Owner(4711), Mode(0o777), NoFolder, NoRun, read_only()] {
            assert!(!error.is_as_it_should_be(true), "{error}");
        }
        assert!([Owner(OVERFLOW_USER), NoRun, read_only()].iter().all(|error| error.is_as_it_should_be(false)));
        assert!(![Owner(4711), Mode(0o777), NoFolder].iter().any(|error| error.is_as_it_should_be(false)));
    }
}
