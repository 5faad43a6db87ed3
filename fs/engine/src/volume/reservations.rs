//! Reservations: blocks that are kept for data which is in memory, or on its way to the device. The
//! device holds no record of them: a crash forgets them.

use super::meta::Meta;
use super::open::Volume;
use super::promised::{Promised, Splits};
use super::run::Run;
use crate::error::{Attempt, Fail, FsError, Stall};

impl Volume {
    /// Keeps `blocks` blocks free for data that waits in memory, and nodes for its mapping. Freed
    /// blocks that cannot be reused yet count as free: they can when the data needs them.
    ///
    /// # Errors
    /// As [`Meta::promise`](super::meta::Meta::promise).
    pub(crate) fn promise(&self, blocks: u64, splits: Splits) -> Attempt<Promised> {
        self.writable()?;
        if (blocks, splits) == (0, Splits::default()) {
            return Ok(Promised::default());
        }
        self.meta.write().promise(blocks, splits)
    }

    /// Takes a promise back.
    pub(crate) fn forget_promise(&self, promised: Promised) {
        if promised != Promised::default() {
            self.meta.write().promised.forget(promised);
        }
    }

    /// Takes free blocks, `goal` first: at most `want`, and up to `ahead` more behind them. What
    /// it takes beyond `want` is reserved ahead: the caller may need it later, and gives it back
    /// when others need it more.
    pub(crate) fn reserve(&self, goal: Option<u64>, want: u64, ahead: u64) -> Attempt<Run> {
        let mut meta = self.meta.write();
        let run = meta.reserve(goal, want + ahead)?;
        let ahead = run.len.saturating_sub(want);
        meta.pending += ahead;
        meta.ahead += ahead;
        Ok(run)
    }

    /// Turns blocks that were reserved ahead into reserved ones.
    pub(crate) fn take_from_ahead(&self, blocks: u64) {
        self.meta.write().ahead_gone(blocks);
    }

    /// Gives back what was reserved ahead.
    pub(crate) fn unreserve_ahead(&self, ahead: Run) {
        let mut meta = self.meta.write();
        meta.ahead_gone(ahead.len);
        meta.unreserve(ahead);
    }

    /// Whether data can have so many blocks without anything being deleted: now, or when writes in
    /// flight are over and a checkpoint has given back emptied chunks.
    ///
    /// # Errors
    /// [`FsError::NoSpace`]; [`Stall::Orphans`] where earlier mounts left something to be freed.
    pub(crate) fn may_have(&self, blocks: u64) -> Attempt<()> {
        let meta = self.meta.read();
        match () {
            () if blocks <= meta.attainable() => Ok(()),
            () if blocks > meta.most_for_data() => Err(FsError::NoSpace.into()),
            () if meta.orphans.next().is_some() => Err(Fail::Stall(Stall::Orphans)),
            () => Err(FsError::NoSpace.into()),
        }
    }

    /// Gives reserved blocks back.
    pub(crate) fn unreserve(&self, run: Run) {
        self.meta.write().unreserve(run);
    }
}

impl Meta {
    /// Blocks that were reserved ahead are not any more.
    fn ahead_gone(&mut self, blocks: u64) {
        self.pending -= blocks;
        self.ahead -= blocks;
    }
}
