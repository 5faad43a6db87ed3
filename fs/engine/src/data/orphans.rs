//! Finishing orphans: those that earlier mounts left, beside everything else; and at the end of a
//! mount all of them, as far as there is time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::filesystem::Filesystem;
use crate::error::FsError;

/// Operations that one that finds no room waits for, before it tries again.
const STEPS: usize = 64;

/// Which orphans are finished.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// Those that no process can use: earlier mounts left them.
    Left,
    /// All: no process uses the filesystem any more.
    All,
}

/// What came of a part of the work.
struct Finished {
    /// The lowest number that one may have that was not looked at; none where all were.
    next: Option<u64>,
    /// The last error of one that cannot be finished, and stays.
    failed: Option<FsError>,
}

/// Whether an error concerns one inode, and others can go on.
fn is_of_one(error: &FsError) -> bool {
    matches!(error, FsError::Corrupt(_) | FsError::Device(_))
}

impl Filesystem {
    /// Goes on with what earlier mounts left: removes inodes that have no name, and frees what
    /// truncations left beyond the end of files. Takes `limit` operations, about. Returns whether
    /// all were looked at; what cannot be finished stays for the next mount.
    ///
    /// # Errors
    /// The last error, after the others were finished.
    pub fn finish_orphans(self: &Arc<Self>, limit: usize) -> Result<bool, FsError> {
        let _finishing = self.finishing.lock();
        self.finish_left(limit)
    }

    /// As [`Filesystem::finish_orphans`], by the thread whose turn it is.
    fn finish_left(self: &Arc<Self>, limit: usize) -> Result<bool, FsError> {
        let Some(from) = self.volume.left_orphans() else { return Ok(true) };
        let mut steps = 0..limit;
        let Finished { next, failed } = self.finish_from(from, Which::Left, &mut || steps.next().is_some())?;
        self.volume.orphans_are_left(next, failed.is_some());
        failed.map_or(Ok(next.is_none()), Err)
    }

    /// Goes on with what earlier mounts left, for an operation that finds no room before that is
    /// over.
    ///
    /// # Errors
    /// The volume has failed.
    pub(super) fn make_space(self: &Arc<Self>) -> Result<(), FsError> {
        let Some(_finishing) = self.finishing.try_lock() else {
            // Another thread makes some, which may be enough.
            drop(self.finishing.lock());
            return Ok(());
        };
        match self.finish_left(STEPS) {
            // What is left of one inode keeps no other from giving its space.
            Err(error) if !is_of_one(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Finishes what orphans there are when no process uses the filesystem any more, as far as that
    /// goes in this time.
    pub(super) fn finish_last_orphans(self: &Arc<Self>, time: Duration) -> Result<(), FsError> {
        if self.volume.is_read_only() {
            return Ok(());
        }
        // Nothing that was done has to wait for this to be durable.
        self.volume.commit()?;
        let until = Instant::now() + time;
        let Finished { next, failed } = self.finish_from(0, Which::All, &mut || Instant::now() < until)?;
        if next.is_some() {
            tracing::info!("what is left of removed and shortened files is freed by the next mount");
        }
        failed.map_or(Ok(()), Err)
    }

    /// Finishes orphans from a number on, as long as `goes_on` says so, which is asked before each
    /// operation.
    fn finish_from(self: &Arc<Self>, from: u64, which: Which, goes_on: &mut dyn FnMut() -> bool) -> Result<Finished, FsError> {
        let mut finished = Finished { next: Some(from), failed: None };
        while let Some(from) = finished.next
            && goes_on()
        {
            let next = self.volume.wait(|| match which {
                Which::Left => self.volume.next_left_orphan(from),
                Which::All => self.volume.next_orphan(from),
            });
            match next {
                Ok(None) => finished.next = None,
                Ok(Some(ino)) => match self.finish_one(ino, which, goes_on) {
                    Ok(true) => {
                        finished.next = Some(ino);
                        break;
                    }
                    Ok(false) => finished.next = ino.checked_add(1),
                    Err(error) if is_of_one(&error) => {
                        tracing::error!(ino, %error, "what is left of this inode cannot be freed: it stays, and cannot grow");
                        finished = Finished { next: ino.checked_add(1), failed: Some(error) };
                    }
                    Err(error) => return Err(error),
                },
                Err(error) if is_of_one(&error) => {
                    tracing::error!(%error, "the inodes that earlier mounts left cannot be listed");
                    finished = Finished { next: None, failed: Some(error) };
                }
                Err(error) => return Err(error),
            }
        }
        Ok(finished)
    }

    /// Finishes one orphan. Returns whether there is more of it.
    fn finish_one(self: &Arc<Self>, ino: u64, which: Which, goes_on: &mut dyn FnMut() -> bool) -> Result<bool, FsError> {
        match self.volume.wait(|| self.volume.stored_attributes(ino)) {
            // A process may have one open that lost its name in this mount.
            Ok(attributes) if attributes.inode.nlink > 0 || (which == Which::Left && self.volume.is_our_orphan(ino)) => {
                return self.finish_truncation_of(ino, goes_on);
            }
            Ok(_) | Err(FsError::NotFound) => {}
            Err(error) => return Err(error),
        }
        let step = || match which {
            Which::Left => self.volume.wait(|| self.volume.reap_left(ino)),
            Which::All => self.wait(|| self.reap_step(ino)),
        };
        while step()? {
            if !goes_on() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// As [`Filesystem::finish_one`], of a file that has a name. Where another thread is at it, it
    /// is left to that.
    fn finish_truncation_of(self: &Arc<Self>, ino: u64, goes_on: &mut dyn FnMut() -> bool) -> Result<bool, FsError> {
        let file = self.files.get(ino);
        let looked = self.volume.wait(|| self.is_cut_short(&mut file.state.lock(), ino));
        let freed = looked.and_then(|_| self.free_remains(&file, file.state.lock(), goes_on));
        self.release(&file);
        freed
    }
}
