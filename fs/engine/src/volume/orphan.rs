//! Orphans: inodes that lost their last name while they were still in use, and files whose
//! truncation takes more than one operation. Each has an item in the tree, so that a later mount
//! finishes what was begun ([`crate::data::Filesystem::finish_orphans`]).

use std::ops::ControlFlow;

use gpunvme_layout::key::INO_NONE;
use gpunvme_layout::{Key, Kind};

use super::io::blocks_of;
use super::known_orphans::Change;
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
    let was = !tree::insert(op, key(ino), &[])?;
    op.orphans.push((ino, Change::Is { was }));
    Ok(())
}

/// Forgets an inode.
pub(crate) fn remove(op: &mut Op, ino: u64) -> Attempt<()> {
    op.orphans.push((ino, Change::IsNone));
    tree::remove(op, key(ino)).map(|_| ())
}

impl Volume {
    /// The first orphan whose number is not below `from`.
    pub(crate) fn next_orphan(&self, from: u64) -> Attempt<Option<u64>> {
        let found = tree::scan(&*self.meta.read(), key(from), |key, _| Ok(ControlFlow::Break(key)))?;
        Ok(found.filter(|key| key.is(INO_NONE, Kind::Orphan)).map(|key| key.offset()))
    }

    /// The first that an earlier mount left whose number is not below `from`.
    pub(crate) fn next_left_orphan(&self, from: u64) -> Attempt<Option<u64>> {
        let found = self.next_orphan(from)?;
        Ok(found.filter(|ino| self.meta.read().orphans.may_have(*ino)))
    }

    /// The lowest number that an orphan of an earlier mount may have; none where all were looked
    /// at.
    pub(crate) fn left_orphans(&self) -> Option<u64> {
        self.meta.read().orphans.next()
    }

    /// Notes how far the orphans of earlier mounts were looked at, and whether some of them stay.
    pub(crate) fn orphans_are_left(&self, next: Option<u64>, stay: bool) {
        self.meta.write().orphans.are_looked_at(next, stay);
    }

    /// Whether an earlier mount has left blocks beyond the end of a file, as far as is known. Those
    /// that this mount leaves, the file's state in memory tells.
    pub(crate) fn is_cut_short(&self, ino: u64) -> Attempt<bool> {
        is_cut_short(&*self.meta.read(), ino)
    }

    /// Whether this mount made an inode an orphan, while there may be others.
    pub(crate) fn is_our_orphan(&self, ino: u64) -> bool {
        self.meta.read().orphans.ours(ino).is_some()
    }

    /// As [`Volume::reap_step`], of an inode that no process has used since the volume was opened;
    /// of others it removes nothing.
    pub(crate) fn reap_left(&self, ino: u64) -> Attempt<bool> {
        let mut op = self.begin()?;
        let more = op.meta().orphans.ours(ino).is_none() && reap_part(&mut op, ino)?;
        op.finish();
        Ok(more)
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
        match step.next {
            None if inode.nlink > 0 => remove(&mut op, ino)?,
            // Without a name it stays an orphan.
            None => op.orphans.push((ino, Change::IsWhole)),
            Some(_) => {}
        }
        op.finish();
        Ok(step.next.is_some())
    }
}

/// As [`Volume::is_cut_short`].
pub(crate) fn is_cut_short(blocks: &impl Blocks, ino: u64) -> Attempt<bool> {
    let orphans = &blocks.meta().orphans;
    match orphans.ours(ino) {
        Some(is_cut_short) => Ok(is_cut_short),
        None => Ok(orphans.may_have(ino) && tree::get(blocks, key(ino))?.is_some()),
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
