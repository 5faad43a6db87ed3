//! The last word of a daemon: whether the volume was written down in the end.
//!
//! umount(8)'s helper (`unmount`) cannot always see that for itself: members of a volume may lie
//! anywhere, and a controller takes seconds to ask. So a daemon has a file in the folder of this
//! machine's daemons for as long as it serves a mount, named after the number that files on the
//! mount show in `st_dev`, and a lock on it. It begins with the mount's source: the number may be
//! another mount's while a daemon still writes down. The helper opens it before it unmounts. The
//! daemon writes its last word into it, before it lets go of the device, and removes it. A file
//! without a lock is that of a daemon that was killed, perhaps of another mount: it tells nothing.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::run_folder::{self, RunFolderError};

const CLEAN: &[u8] = b"clean\n";
const LOST: &[u8] = b"lost\n";
/// More bytes than any source of a mount has (mount(2): a page).
const LONGEST_SOURCE: u64 = 1 << 16;
/// Time between two looks at whether it was said.
const POLL: Duration = Duration::from_millis(5);

/// The last word of this process, before it is said.
pub struct LastWord(Option<(PathBuf, File)>);

impl LastWord {
    /// Of the daemon that serves the mount with this number and source. Of an ordinary user's there
    /// is none: no other user could believe it.
    pub fn of(dev: u64, source: &str) -> LastWord {
        let made = run_folder::made().and_then(|folder| Ok(make(path(folder, dev), &beginning(source.as_ref()))?));
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
pub struct Awaited {
    file: File,
    /// Where in it the word will be.
    at: u64,
}

impl Awaited {
    /// Of the daemon of the mount with this number and source; `None` where there is none that
    /// lives and will say one. To be called before the mount is taken away: then no other has the
    /// number.
    pub fn of(dev: u64, source: &OsStr) -> Option<Awaited> {
        open(&path(run_folder::existing().ok()?, dev), &beginning(source)).ok()?.filter(Awaited::has_speaker)
    }

    /// Whether the daemon lives that would say it.
    pub fn has_speaker(&self) -> bool {
        flock(&self.file, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// Waits until it is said, or the daemon is gone, but not for longer than `limit`.
    pub fn wait(&self, limit: Duration) {
        let start = Instant::now();
        while self.has_speaker() && start.elapsed() < limit {
            thread::sleep(POLL);
        }
    }

    /// Whether everything is on the device; `None` as long as nothing was said.
    pub fn is_clean(&self) -> Option<bool> {
        let mut word = [0; LOST.len() + CLEAN.len()];
        let len = self.file.read_at(&mut word, self.at).ok()?;
        match &word[..len] {
            CLEAN => Some(true),
            LOST => Some(false),
            _ => None,
        }
    }
}

/// The sources of the mounts whose daemons live, and have their last word still to say.
pub fn speakers() -> Vec<OsString> {
    let Some(files) = run_folder::existing().ok().and_then(|folder| fs::read_dir(folder).ok()) else { return Vec::new() };
    let is_word = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "last-word");
    let source = |path: PathBuf| {
        let mut said = Vec::new();
        opened(&path).ok()?.take(LONGEST_SOURCE).read_to_end(&mut said).ok()?;
        let source = said.split(|byte| *byte == 0).next().map(|source| OsStr::from_bytes(source).to_owned())?;
        let awaited = open(&path, &beginning(&source)).ok()??;
        awaited.has_speaker().then_some(source)
    };
    files.filter_map(|file| Some(file.ok()?.path())).filter(is_word).filter_map(source).collect()
}

fn path(folder: &Path, dev: u64) -> PathBuf {
    folder.join(format!("{}:{}.last-word", rustix::fs::major(dev), rustix::fs::minor(dev)))
}

/// What a file begins with: the mount's source, which has no byte of zeros, and one.
fn beginning(source: &OsStr) -> Vec<u8> {
    [source.as_encoded_bytes(), &[0]].concat()
}

/// A new file, in place of one that a daemon left which was killed. It is root's alone, so that no
/// other user can have a lock on it, and has the lock when it appears.
fn make(path: PathBuf, beginning: &[u8]) -> io::Result<(PathBuf, File)> {
    // One number has one mount at a time, so no other daemon makes this file now.
    let new = path.with_extension("new");
    let mut file =
        File::options().write(true).create(true).truncate(true).custom_flags(libc::O_NOFOLLOW).mode(0o600).open(&new)?;
    let named = flock(&file, FlockOperation::NonBlockingLockExclusive)
        .map_err(io::Error::from)
        .and_then(|()| file.write_all(beginning))
        .and_then(|()| fs::rename(&new, &path));
    if let Err(error) = named {
        let _ = fs::remove_file(new); // that there is no word matters more
        return Err(error);
    }
    Ok((path, file))
}

fn opened(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// A file of that beginning, in which nothing is said yet.
fn open(path: &Path, beginning: &[u8]) -> io::Result<Option<Awaited>> {
    let file = opened(path)?;
    let status = file.metadata()?;
    if !status.is_file() || status.len() != beginning.len() as u64 {
        return Ok(None);
    }
    let mut found = vec![0; beginning.len()];
    file.read_exact_at(&mut found, 0)?;
    Ok((found == beginning).then_some(Awaited { file, at: beginning.len() as u64 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_by_who_waited() {
        let folder = tempfile::tempdir().unwrap();
        let (path, of) = (path(folder.path(), rustix::fs::makedev(0, 57)), beginning("/image".as_ref()));
        for is_clean in [true, false] {
            let word = LastWord(Some(make(path.clone(), &of).unwrap()));
            let awaited = open(&path, &of).unwrap().unwrap();
            assert!(open(&path, &beginning("/imagE".as_ref())).unwrap().is_none(), "of another source");
            assert!(open(&path, &beginning("/image2".as_ref())).unwrap().is_none(), "of another source");
            assert!(awaited.is_clean().is_none() && awaited.has_speaker());
            awaited.wait(Duration::from_millis(1));
            assert!(awaited.has_speaker(), "not for longer");
            let speaker = thread::spawn(move || {
                thread::sleep(Duration::from_millis(20));
                word.say(is_clean);
            });
            awaited.wait(Duration::from_secs(60));
            speaker.join().unwrap();
            assert_eq!(awaited.is_clean(), Some(is_clean));
            assert!(!awaited.has_speaker() && !path.exists());
        }
    }

    #[test]
    fn the_word_of_another_mount_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (path, of) = (path(folder.path(), 1), beginning("/image".as_ref()));
        let killed = make(path.clone(), &of).unwrap();
        let later = LastWord(Some(make(path.clone(), &of).unwrap()));
        LastWord(Some(killed)).say(true);
        let awaited = open(&path, &of).unwrap().unwrap();
        later.say(false);
        assert_eq!(awaited.is_clean(), Some(false));
        fs::write(&path, [&of[..], CLEAN].concat()).unwrap();
        assert!(open(&path, &of).unwrap().is_none(), "that was said before it was waited for");
    }
}
