//! Orphans: inodes that lost their last name while they were still in use, and files whose
//! truncation takes more than one operation. Each has an item in the tree, so that a mount after a
//! crash finishes what was begun.

use std::ops::ControlFlow;

use gpunvme_layout::key::INO_NONE;
use gpunvme_layout::{Key, Kind};

use super::io::blocks_of;
use super::meta::Blocks;
use super::op::Op;
use super::open::Volume;
use super::{extents, inode, tree};
use crate::error::{Attempt, Fail, FsError};

/// Items of one inode that one operation removes at the most.
const ITEMS_PER_OP: usize = 32;

fn key(ino: u64) -> Key {
    Key::new(INO_NONE, Kind::Orphan, ino)
}

/// Remembers an inode; one that is remembered already stays so.
pub(crate) fn add(op: &mut Op, ino: u64) -> Attempt<()> {
    tree::insert(op, key(ino), &[]).map(|_| ())
}

/// Forgets an inode.
pub(crate) fn remove(op: &mut Op, ino: u64) -> Attempt<()> {
    tree::remove(op, key(ino)).map(|_| ())
}

/// Up to `limit` orphans whose number is not below `from`.
fn list(blocks: &impl Blocks, from: u64, limit: usize) -> Attempt<Vec<u64>> {
    let mut found = Vec::new();
    tree::scan(blocks, key(from), |key, _| {
        if !key.is(INO_NONE, Kind::Orphan) || found.len() >= limit {
            return Ok(ControlFlow::Break(()));
        }
        found.push(key.offset());
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

/// Whether an error concerns one inode, and others can go on.
fn is_of_one(error: &FsError) -> bool {
    matches!(error, FsError::Corrupt(_) | FsError::Device(_))
}

impl Volume {
    /// Ends truncations that a crash interrupted, and notes the inodes without a name for removal:
    /// no process can have them open after a crash. A file whose truncation cannot be ended is
    /// noted, too ([`Volume::take_cut_short`]).
    pub(crate) fn finish_truncations(&self) -> Result<(), FsError> {
        let mut from = 0;
        loop {
            let found = self.wait(|| list(&*self.meta.read(), from, 1000))?;
            for ino in &found {
                match self.wait(|| self.stored_attributes(*ino)) {
                    Ok(attributes) if attributes.inode.nlink > 0 => match self.finish_truncation(*ino) {
                        Ok(()) => {}
                        Err(error) if is_of_one(&error) => {
                            tracing::error!(ino, %error, "a truncation cannot be ended: the file cannot grow");
                            self.cut_short.lock().push(*ino);
                        }
                        Err(error) => return Err(error),
                    },
                    Ok(_) | Err(FsError::NotFound) => self.orphans.lock().push(*ino),
                    Err(error) if is_of_one(&error) => tracing::error!(ino, %error, "an inode cannot be read"),
                    Err(error) => return Err(error),
                }
            }
            match found.last().and_then(|last| last.checked_add(1)) {
                Some(next) => from = next,
                None => return Ok(()),
            }
        }
    }

    fn finish_truncation(&self, ino: u64) -> Result<(), FsError> {
        while self.wait(|| self.truncate_step(ino))? {}
        Ok(())
    }

    /// The files with blocks beyond their end that could not be freed: they must not grow.
    pub(crate) fn take_cut_short(&self) -> Vec<u64> {
        std::mem::take(&mut *self.cut_short.lock())
    }

    /// Removes inodes that a crash or the last unmount left without a name, in `limit` operations
    /// at the most. Returns whether none is left. One that cannot be removed stays for the next
    /// mount.
    ///
    /// # Errors
    /// The last error, after the others were removed.
    pub fn reap(&self, limit: usize) -> Result<bool, FsError> {
        let mut reaped = Ok(());
        for _ in 0..limit {
            let Some(ino) = self.orphans.lock().pop() else { return reaped.map(|()| true) };
            match self.wait(|| self.reap_step(ino)) {
                Ok(false) => {}
                Ok(true) => self.orphans.lock().push(ino),
                Err(error) if is_of_one(&error) => {
                    tracing::error!(ino, %error, "an inode without a name cannot be removed");
                    reaped = Err(error);
                }
                Err(error) => return Err(error),
            }
        }
        reaped.map(|()| self.orphans.lock().is_empty())
    }

    /// Removes a part of an inode without a name, as much as one operation can. Returns whether
    /// there is more.
    pub(crate) fn reap_step(&self, ino: u64) -> Attempt<bool> {
        let mut op = self.begin()?;
        let more = reap_part(&mut op, ino)?;
        op.finish();
        Ok(more)
    }

    /// Removes inodes without a name, all of them whole, in one operation. Returns false, and has
    /// changed nothing, where one of them takes more than that.
    pub(crate) fn reap_together(&self, inos: &[u64]) -> Attempt<bool> {
        let mut op = self.begin()?;
        for ino in inos {
            if reap_part(&mut op, *ino)? {
                return Ok(false);
            }
        }
        op.finish();
        Ok(true)
    }

    /// Frees a part of what a file has beyond its size. Returns whether there is more.
    pub(crate) fn truncate_step(&self, ino: u64) -> Attempt<bool> {
        let mut op = self.begin()?;
        let inode = inode::load(&op, ino)?;
        let step = extents::remove(&mut op, ino, blocks_of(inode.size), u64::MAX)?;
        inode::change(&mut op, ino, |inode| inode.blocks = inode.blocks.saturating_sub(step.blocks))?;
        // Without a name it stays an orphan.
        if step.next.is_none() && inode.nlink > 0 {
            remove(&mut op, ino)?;
        }
        op.finish();
        Ok(step.next.is_some())
    }
}

/// Removes a part of an inode, of one with a name nothing. Returns whether there is more.
fn reap_part(op: &mut Op, ino: u64) -> Attempt<bool> {
    let inode = match inode::load(op, ino) {
        Ok(inode) => inode,
        Err(Fail::Error(FsError::NotFound)) => {
            remove(op, ino)?;
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    if inode.nlink > 0 {
        return Ok(false);
    }
    let step = extents::remove(op, ino, 0, u64::MAX)?;
    if step.blocks > 0 {
        inode::change(op, ino, |inode| inode.blocks = inode.blocks.saturating_sub(step.blocks))?;
    }
    if step.next.is_some() || !remove_items(op, ino)? {
        return Ok(true);
    }
    remove(op, ino)?;
    op.state_mut().inodes = op.meta().state.inodes.saturating_sub(1);
    Ok(false)
}

/// Removes items of an inode, the inode itself last. Returns whether all are gone.
fn remove_items(op: &mut Op, ino: u64) -> Attempt<bool> {
    let mut keys = Vec::new();
    tree::scan(op, Key::inode(ino), |key, _| {
        if key.ino() != ino || keys.len() > ITEMS_PER_OP {
            return Ok(ControlFlow::Break(()));
        }
        keys.push(key);
        Ok(ControlFlow::Continue(()))
    })?;
    let all = keys.len() <= ITEMS_PER_OP;
    for key in keys.into_iter().filter(|key| all || *key != Key::inode(ino)) {
        tree::remove(op, key)?;
    }
    Ok(all)
}
