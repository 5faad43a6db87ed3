//! Bringing what a long listing needs into memory, level by level.

use std::cell::RefCell;
use std::sync::Arc;

use gpunvme_layout::{Block, BlockKind, Key};
use rustc_hash::{FxHashMap, FxHashSet};

use super::dir::{DirEntry, entries};
use super::meta::{Blocks, Meta};
use super::open::Volume;
use super::tree;
use crate::error::{Attempt, Fail, FsError, Stall};

/// Keeps in memory what was brought there for an operation.
#[derive(Default)]
pub struct Preloaded {
    /// By address.
    blocks: FxHashMap<u64, Arc<Block>>,
}

/// The metadata, for a reader that holds each block that it looks at.
struct Holding<'a> {
    meta: &'a Meta,
    held: RefCell<&'a mut Preloaded>,
}

impl Blocks for Holding<'_> {
    fn meta(&self) -> &Meta {
        self.meta
    }

    fn block(&self, address: u64, kind: BlockKind) -> Attempt<&Block> {
        let block = self.meta.block(address, kind)?;
        if let Some(entry) = self.meta.cache.get(address) {
            self.held.borrow_mut().blocks.insert(address, entry.block.clone());
        }
        Ok(block)
    }
}

impl Volume {
    /// Brings the nodes that lead to the next `limit` entries of a directory after `cookie`, and,
    /// if `with_inodes`, to the inodes that they name, into memory: of these each level at once.
    /// They stay there as long as the result lives and nothing changes them, in a cache that has no
    /// room for them too. Damaged nodes of inodes are left out.
    ///
    /// # Errors
    /// The device failed, or the directory is damaged.
    pub fn preload_dir(&self, dir: u64, cookie: u64, limit: usize, with_inodes: bool) -> Result<Preloaded, FsError> {
        let mut held = Preloaded::default();
        let found = loop {
            let meta = self.meta.read();
            let blocks = Holding { meta: &meta, held: RefCell::new(&mut held) };
            match entries(&blocks, dir, cookie, limit) {
                Ok(found) => break found,
                Err(Fail::Error(error)) => return Err(error),
                Err(Fail::Stall(stall)) => {
                    drop(meta);
                    let address = missing(stall);
                    held.blocks.insert(address, self.load(address)?);
                }
            }
        };
        if with_inodes {
            self.preload_inodes(&found, &mut held)?;
        }
        Ok(held)
    }

    fn preload_inodes(&self, of: &[DirEntry], held: &mut Preloaded) -> Result<(), FsError> {
        let mut damaged = FxHashSet::default();
        loop {
            let mut absent: Vec<u64> = Vec::new();
            let meta = self.meta.read();
            let blocks = Holding { meta: &meta, held: RefCell::new(held) };
            for entry in of {
                match tree::get(&blocks, Key::inode(entry.ino)) {
                    Ok(_) | Err(Fail::Error(FsError::Corrupt(_))) => {}
                    Err(Fail::Error(error)) => return Err(error),
                    Err(Fail::Stall(stall)) => absent.push(missing(stall)),
                }
            }
            drop(meta);
            absent.sort_unstable();
            absent.dedup();
            absent.retain(|address| !damaged.contains(address));
            if absent.is_empty() {
                return Ok(());
            }
            let together = self.load_all(&absent);
            match together {
                Ok(loaded) => held.blocks.extend(absent.into_iter().zip(loaded)),
                Err(FsError::Corrupt(_)) => {
                    for address in absent {
                        match self.load(address) {
                            Ok(loaded) => _ = held.blocks.insert(address, loaded),
                            Err(FsError::Corrupt(_)) => _ = damaged.insert(address),
                            Err(error) => return Err(error),
                        }
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The block that a search for an item stalled on.
fn missing(stall: Stall) -> u64 {
    match stall {
        Stall::Load { address } => address,
        other => unreachable!("a search waits for blocks only, not for {other:?}"),
    }
}
