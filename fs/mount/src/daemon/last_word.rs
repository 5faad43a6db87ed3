//! The last word of a daemon: whether the volume was written down in the end.
//!
//! umount(8)'s helper (`unmount`) cannot always see that for itself: members of a volume may lie
//! anywhere, and a controller takes seconds to ask. So a daemon has a file in the folder of this
//! machine's daemons for as long as it serves a mount, named after the number that files on the
//! mount show in `st_dev`, and a lock on it. The helper opens it before it unmounts. The daemon
//! writes its last word into it, before it lets go of the device, and removes it. A file without a
//! lock is that of a daemon that was killed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::run_folder::{self, RunFolderError};

const CLEAN: &[u8] = b"clean\n";
const LOST: &[u8] = b"lost\n";

/// The last word of this process, before it is said.
pub struct LastWord(Option<(PathBuf, File)>);

impl LastWord {
    /// Of the daemon that serves the mount with this number. Of an ordinary user's there is none:
    /// nobody else could believe it.
    pub fn of(dev: u64) -> LastWord {
        let made = run_folder::made().and_then(|folder| Ok(make(path(folder, dev))?));
        LastWord(made.inspect_err(|error: &RunFolderError| error.log("umount(8) has to look at the device")).ok())
    }

    /// Says it: everything is on the device, or something was lost.
    pub fn say(self, is_clean: bool) {
        let Some((path, mut file)) = self.0 else { return };
        if let Err(error) = file.write_all(if is_clean { CLEAN } else { LOST }) {
            tracing::debug!("{}: {error}", path.display());
        }
        // The number may be that of another mount by now.
        let inode = |status: io::Result<fs::Metadata>| status.map(|status| (status.dev(), status.ino())).ok();
        if inode(fs::symlink_metadata(&path)) == inode(file.metadata()) {
            let _ = fs::remove_file(path); // another program may have removed it before
        }
    }
}

/// The last word of the daemon behind a mount, which is waited for.
pub struct Awaited(File);

impl Awaited {
    /// Of the daemon of the mount with this number; `None` where no word of it can be had. To be
    /// called before the mount is taken away: then no other has the number.
    pub fn of(dev: u64) -> Option<Awaited> {
        open(&path(run_folder::existing().ok()?, dev)).ok().flatten().map(Awaited)
    }

    /// Whether the daemon lives that would say it.
    pub fn has_speaker(&self) -> bool {
        flock(&self.0, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// Whether everything is on the device; `None` as long as nothing was said.
    pub fn is_clean(&self) -> Option<bool> {
        let mut word = [0; LOST.len() + CLEAN.len()];
        let len = self.0.read_at(&mut word, 0).ok()?;
        match &word[..len] {
            CLEAN => Some(true),
            LOST => Some(false),
            _ => None,
        }
    }
}

fn path(folder: &Path, dev: u64) -> PathBuf {
    folder.join(format!("{}:{}.last-word", rustix::fs::major(dev), rustix::fs::minor(dev)))
}

/// A new file, in place of one that a daemon left which was killed.
fn make(path: PathBuf) -> io::Result<(PathBuf, File)> {
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
    // Before others can open it, and have a lock.
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.set_permissions(fs::Permissions::from_mode(0o644))?;
    Ok((path, file))
}

/// A file in which nothing is said yet.
fn open(path: &Path) -> io::Result<Option<File>> {
    let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let status = file.metadata()?;
    Ok((status.is_file() && status.len() == 0).then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_by_who_waited() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path(), rustix::fs::makedev(0, 57));
        for is_clean in [true, false] {
            let word = LastWord(Some(make(path.clone()).unwrap()));
            let awaited = Awaited(open(&path).unwrap().unwrap());
            assert!(awaited.is_clean().is_none() && awaited.has_speaker());
            word.say(is_clean);
            assert_eq!(awaited.is_clean(), Some(is_clean));
            assert!(!awaited.has_speaker() && !path.exists());
        }
    }

    #[test]
    fn the_word_of_another_mount_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path(), 1);
        let killed = make(path.clone()).unwrap();
        let later = LastWord(Some(make(path.clone()).unwrap()));
        LastWord(Some(killed)).say(true);
        let awaited = Awaited(open(&path).unwrap().unwrap());
        later.say(false);
        assert_eq!(awaited.is_clean(), Some(false));
        fs::write(&path, CLEAN).unwrap();
        assert!(open(&path).unwrap().is_none(), "that was said before it was waited for");
    }
}
