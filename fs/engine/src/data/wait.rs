//! Waiting: resolves the stalls of operations on data.

use std::sync::Arc;

use super::filesystem::Filesystem;
use super::quiesce::Quiesced;
use crate::error::{Attempt, Fail, FsError, Stall};
use crate::volume::Waiter;

/// How often an operation waits for nodes although the write-back of some file has failed.
const FAILURES_MAX: u32 = 3;

impl Filesystem {
    /// Runs an operation to its end; for threads that may wait.
    ///
    /// # Errors
    /// The operation's own error, or that of what it had to wait for.
    pub fn wait<T>(self: &Arc<Self>, mut attempt: impl FnMut() -> Attempt<T>) -> Result<T, FsError> {
        let mut waiter = Waiter::default();
        let (mut quiesced, mut failures) = (None, 0);
        loop {
            let returns = self.pages.returns();
            match attempt() {
                Ok(result) => return Ok(result),
                Err(Fail::Error(error)) => return Err(error),
                Err(Fail::Stall(Stall::Memory)) => self.make_room(returns)?,
                Err(Fail::Stall(Stall::Nodes)) => {
                    self.release_all_ahead();
                    // Errors are those of other files: they matter where that brings no node.
                    if let Err(error) = self.flush_all() {
                        failures += 1;
                        if failures > FAILURES_MAX {
                            return Err(error);
                        }
                    }
                }
                Err(Fail::Stall(Stall::Orphans)) => {
                    self.make_space()?;
                    // What was waited for in vain may come now.
                    waiter = Waiter::default();
                }
                Err(Fail::Stall(Stall::Page { ino, block })) => self.fill_page(ino, block)?,
                Err(Fail::Stall(Stall::File { ino })) => self.flush_whole(ino)?,
                Err(Fail::Stall(Stall::InFlight { ino })) => {
                    // A name may stand for another file by now.
                    quiesced.take_if(|quiesced: &mut Quiesced| quiesced.ino() != ino);
                    quiesced.get_or_insert_with(|| self.quiesce(ino)).wait();
                }
                Err(Fail::Stall(Stall::Quiesced { ino })) => self.wait_while_quiesced(ino),
                Err(Fail::Stall(stall)) => {
                    if stall == Stall::Reuse {
                        self.release_all_ahead();
                        self.completions.help();
                    }
                    self.volume.resolve(stall, &mut waiter)?;
                }
            }
        }
    }
}
