//! Chunks of metadata that emptied: a checkpoint gives them back to all uses.

use crate::error::{Fail, FsError, Stall};
use crate::volume::alloc;
use crate::volume::meta::Blocks;
use crate::volume::op::Op;
use crate::volume::open::Volume;

impl Volume {
    /// Gives the chunks of metadata that emptied back to all uses, if there are any: commits, and
    /// makes a checkpoint.
    ///
    /// # Errors
    /// As [`Volume::checkpoint`].
    pub fn give_back(&self) -> Result<(), FsError> {
        if self.meta.read().emptied.is_empty() {
            return Ok(());
        }
        self.commit()?;
        self.checkpoint()
    }

    /// Gives chunks back whose last node was freed by a transaction before `sequence`: no image of
    /// them is live any more.
    pub(super) fn free_emptied_chunks(&self, sequence: u64) {
        let mut meta = self.meta.write();
        let (due, later) = std::mem::take(&mut meta.emptied).into_iter().partition::<Vec<_>, _>(|(_, s)| *s < sequence);
        meta.emptied = later;
        drop(meta);
        for (chunk, emptied) in due {
            let attempt = || {
                let mut op = Op::begin(self.meta.write())?;
                if op.meta().emptied.iter().any(|(later, s)| *later == chunk && *s >= sequence) {
                    // Used and emptied again since: its images are live, and that entry's turn
                    // comes.
                    return Ok(());
                }
                op.free_metadata_chunk(chunk)?;
                op.finish();
                Ok(())
            };
            // Blocks that the attempt needs stay in memory until it is done.
            let mut held = Vec::new();
            loop {
                let attempted = match attempt() {
                    Err(Fail::Stall(Stall::Load { address })) => match self.load(address) {
                        Ok(block) => {
                            held.push(block);
                            continue;
                        }
                        Err(error) => Err(error.into()),
                    },
                    attempted => attempted,
                };
                match attempted {
                    // The running transaction is full: the next checkpoint tries again.
                    Err(Fail::Stall(_)) => self.meta.write().emptied.push((chunk, emptied)),
                    // It stays metadata's, as it is: nothing is half done.
                    Err(Fail::Error(error)) => tracing::warn!(chunk, %error, "an empty chunk of metadata cannot be given back"),
                    Ok(()) => {}
                }
                break;
            }
        }
    }

    /// Finds the empty metadata chunks that are in no list after a crash; later checkpoints give
    /// them back. Waits for the device, for a few blocks of each terabyte.
    ///
    /// # Errors
    /// The device failed, or the volume is damaged.
    pub fn find_emptied_chunks(&self) -> Result<(), FsError> {
        for group in 0..self.geometry().groups {
            let found = self.wait(|| alloc::empty_metadata_chunks(&*self.meta.read(), group))?;
            let mut meta = self.meta.write();
            // One that the running transaction has emptied is listed with its sequence already.
            let sequence = meta.sequence - 1;
            meta.emptied.extend(found.into_iter().map(|chunk| (chunk, sequence)));
        }
        Ok(())
    }
}
