//! Orphans: inodes that lost their last name while they were still in use, and files whose
//! truncation takes more than one operation. Each has an item in the tree, so that a later mount
//! finishes what was begun ([`crate::data::Filesystem::finish_orphans`]).

use std::ops::ControlFlow;

use gpunvme_layout::key::INO_NONE;
use gpunvme_layout::{Key, Kind};
use rustc_hash::FxHashSet;

use super::io::blocks_of;
use super::meta::Blocks;
use super::op::Op;
use super::open::Volume;
use super::{extents, inode, tree};
use crate::error::{Attempt, Fail, FsError};

/// Items of one inode that one operation removes at the most.
const ITEMS_PER_OP: usize = 32;

/// What is known of the orphans that earlier mounts left.
#[derive(Default)]
pub(crate) struct Orphans {
    /// The lowest number that may be one's; none where all were looked at.
    next: Option<u64>,
    /// Some of them are not finished by this mount.
    stay: bool,
    /// The orphans of this mount, which processes may use, as long as there may be others.
    ours: FxHashSet<u64>,
}

impl Orphans {
    /// Those of a volume that was just opened, by the first.
    pub fn from(first: Option<u64>) -> Orphans {
        Orphans { next: first, ..Orphans::default() }
    }

    /// Those of a volume that is not written.
    pub fn unknown() -> Orphans {
        Orphans { stay: true, ..Orphans::default() }
    }

    /// Notes that an operation made an inode an orphan, or that it is one no more.
    pub fn change(&mut self, ino: u64, is_orphan: bool) {
        if self.next.is_none() {
            return;
        }
        if is_orphan {
            self.ours.insert(ino);
        } else {
            self.ours.remove(&ino);
        }
    }
}

fn key(ino: u64) -> Key {
    Key::new(INO_NONE, Kind::Orphan, ino)
}

/// Remembers an inode; one that is remembered already stays so.
pub(crate) fn add(op: &mut Op, ino: u64) -> Attempt<()> {
    op.orphans.push((ino, true));
    tree::insert(op, key(ino), &[]).map(|_| ())
}

/// Forgets an inode.
pub(crate) fn remove(op: &mut Op, ino: u64) -> Attempt<()> {
    op.orphans.push((ino, false));
    tree::remove(op, key(ino)).map(|_| ())
}

impl Volume {
    /// The first orphan whose number is not below `from`.
    pub(crate) fn next_orphan(&self, from: u64) -> Attempt<Option<u64>> {
        let found = tree::scan(&*self.meta.read(), key(from), |key, _| Ok(ControlFlow::Break(key)))?;
        Ok(found.filter(|key| key.is(INO_NONE, Kind::Orphan)).map(|key| key.offset()))
    }

    /// The lowest number that an orphan of an earlier mount may have; none where all were looked
    /// at.
    pub(crate) fn left_orphans(&self) -> Option<u64> {
        self.meta.read().orphans.next
    }

    /// Notes how far the orphans of earlier mounts were looked at, and whether some of them stay.
    pub(crate) fn orphans_are_left(&self, next: Option<u64>, stay: bool) {
        let orphans = &mut self.meta.write().orphans;
        orphans.next = next;
        orphans.stay |= stay;
        if next.is_none() {
            orphans.ours = FxHashSet::default();
        }
    }

    /// Whether an earlier mount may have left blocks beyond the end of a file.
    pub(crate) fn is_cut_short(&self, ino: u64) -> Attempt<bool> {
        let meta = self.meta.read();
        let may_be = meta.orphans.next.is_some() || meta.orphans.stay;
        Ok(may_be && tree::get(&*meta, key(ino))?.is_some())
    }

    /// As [`Volume::reap_step`], of an inode that no process has used since the volume was opened;
    /// of others it removes nothing.
    pub(crate) fn reap_left(&self, ino: u64) -> Attempt<bool> {
        let mut op = self.begin()?;
        let more = !op.meta().orphans.ours.contains(&ino) && reap_part(&mut op, ino)?;
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
