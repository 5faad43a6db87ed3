//! The undo list of an operation: its changes so far, and the state before each.
//!
//! Most operations change an item or two in each of a few leaves, and almost none of those changes
//! is ever taken back. So the first change of a leaf keeps just the item: a copy of a block takes
//! longer than the rest of the change, and the threads that wait for the metadata lock wait for
//! it, too. Whatever else happens to a block keeps all of it.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use gpunvme_layout::{Block, Key, node};

use super::cache::{Cache, Entry};

/// Blocks that one operation may change at the most. Operations on sound volumes change fewer:
/// those that may be long end before, and go on as another.
pub(crate) const OP_BLOCKS_MAX: usize = 160;
/// Blocks that a thread keeps for the copies of later operations. Most operations change fewer.
const SPARE_MAX: usize = 16;

/// Buffers that a thread's operations leave to its next one, so that as a rule an operation
/// allocates nothing. They are not shared like the metadata: to write memory that another core has
/// just written takes as long as the rest of an operation.
#[derive(Default)]
struct Leftovers {
    /// Blocks that are in no use, for copies.
    blocks: Vec<Arc<Block>>,
    /// Lists, empty.
    undo: Vec<Undo>,
    values: Vec<u8>,
}

thread_local! {
    static LEFTOVERS: RefCell<Leftovers> = RefCell::default();
}

/// An undo record: a change of one block, to be taken back.
struct Undo {
    address: u64,
    /// The running transaction had changed it before.
    running: bool,
    before: Before,
}

/// State of a block before a change.
enum Before {
    /// Not in memory.
    Absent,
    /// The whole block.
    Block(Arc<Block>),
    /// A leaf without the item that is in this slot now.
    Without(usize),
    /// A leaf with this item in a slot.
    With(usize, Key, Range<usize>),
    /// A leaf with another value in a slot.
    Value(usize, Range<usize>),
}

/// A change of one item of a leaf.
pub(super) enum Change {
    /// An item comes into this slot.
    Insert(usize),
    /// The item in this slot goes.
    Remove(usize),
    /// The value in this slot becomes another of the same length.
    Value(usize),
}

/// Changes of one operation.
pub(super) struct Changes {
    /// Number of the operation: marks the blocks that it has changed.
    operation: u64,
    undo: Vec<Undo>,
    /// Former values of items, one after the other.
    values: Vec<u8>,
    blocks: usize,
}

impl Changes {
    /// An empty list of changes, for the operation of that number.
    pub fn new(operation: u64) -> Changes {
        let (undo, values) = LEFTOVERS.with_borrow_mut(|left| (std::mem::take(&mut left.undo), std::mem::take(&mut left.values)));
        Changes { operation, undo, values, blocks: 0 }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Whether this block, or a new one, may not change, because too many others have.
    pub fn are_full(&self, entry: Option<&Entry>) -> bool {
        // One more is the state block.
        self.blocks + 1 >= OP_BLOCKS_MAX && entry.is_none_or(|entry| entry.operation != self.operation)
    }

    /// A block that is about to change in any way.
    pub fn block<'e>(&mut self, address: u64, entry: &'e mut Entry, running: &mut Vec<u64>) -> &'e mut Block {
        if entry.operation != self.operation || !entry.copied {
            let copy = LEFTOVERS.with_borrow_mut(|left| left.copy(&entry.block));
            // Images share a block's content: then it is the copy that changes.
            let before = if Arc::get_mut(&mut entry.block).is_some() { copy } else { std::mem::replace(&mut entry.block, copy) };
            self.note(address, entry, running, Before::Block(before));
        }
        Arc::get_mut(&mut entry.block).expect("made its own above")
    }

    /// A leaf that is about to change in this way, and in no other.
    pub fn leaf<'e>(&mut self, address: u64, entry: &'e mut Entry, running: &mut Vec<u64>, change: Change) -> &'e mut Block {
        if entry.operation == self.operation || Arc::get_mut(&mut entry.block).is_none() {
            return self.block(address, entry, running);
        }
        let before = match change {
            Change::Insert(slot) => Before::Without(slot),
            Change::Remove(slot) => Before::With(slot, node::key(&entry.block, slot), self.keep(node::value(&entry.block, slot))),
            Change::Value(slot) => Before::Value(slot, self.keep(node::value(&entry.block, slot))),
        };
        self.note(address, entry, running, before);
        Arc::get_mut(&mut entry.block).expect("it has one owner, as seen above")
    }

    /// A block that was put into the place of `old`, or of none, in memory.
    pub fn created(&mut self, address: u64, entry: &mut Entry, running: &mut Vec<u64>, old: Option<Arc<Block>>) {
        if entry.operation != self.operation || !entry.copied {
            self.note(address, entry, running, old.map_or(Before::Absent, Before::Block));
        }
    }

    fn keep(&mut self, value: &[u8]) -> Range<usize> {
        let start = self.values.len();
        self.values.extend_from_slice(value);
        start..self.values.len()
    }

    fn note(&mut self, address: u64, entry: &mut Entry, running: &mut Vec<u64>, before: Before) {
        if entry.operation != self.operation {
            entry.operation = self.operation;
            self.blocks += 1;
        }
        entry.copied = matches!(before, Before::Absent | Before::Block(_));
        self.undo.push(Undo { address, running: entry.running, before });
        if !entry.running {
            running.push(address);
            entry.running = true;
        }
    }

    /// Takes everything back. A leaf then holds what it held, though its values may lie elsewhere
    /// in it.
    pub fn take_back(&mut self, cache: &mut Cache) {
        for Undo { address, running, before } in self.undo.drain(..).rev() {
            if let Before::Absent = before {
                cache.remove(address);
                continue;
            }
            let entry = cache.get_mut(address).expect("changed blocks stay in memory");
            entry.running = running;
            if let Before::Block(block) = before {
                entry.block = block;
                continue;
            }
            let leaf = Arc::get_mut(&mut entry.block).expect("a changed block has one owner");
            match before {
                Before::Without(slot) => node::remove(leaf, slot),
                Before::With(slot, key, value) => node::leaf_insert(leaf, slot, key, &self.values[value]),
                Before::Value(slot, value) => node::value_mut(leaf, slot).copy_from_slice(&self.values[value]),
                Before::Absent | Before::Block(_) => unreachable!("done above"),
            }
        }
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        let (undo, values) = (std::mem::take(&mut self.undo), std::mem::take(&mut self.values));
        LEFTOVERS.with_borrow_mut(|left| left.take(undo, values));
    }
}

impl Leftovers {
    /// A copy of a block, made of a spare one where there is one.
    fn copy(&mut self, block: &Block) -> Arc<Block> {
        let Some(mut copy) = self.blocks.pop() else { return Arc::new(block.clone()) };
        Arc::get_mut(&mut copy).expect("a spare block has one owner").clone_from(block);
        copy
    }

    /// Takes the lists of an operation that is over, and the blocks that it needs no more.
    fn take(&mut self, mut undo: Vec<Undo>, mut values: Vec<u8>) {
        for undo in undo.drain(..) {
            if let Before::Block(mut block) = undo.before
                && self.blocks.len() < SPARE_MAX
                && Arc::get_mut(&mut block).is_some()
            {
                self.blocks.push(block);
            }
        }
        values.clear();
        (self.undo, self.values) = (undo, values);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use gpunvme_layout::{BlockKind, Kind};
    use proptest::prelude::*;

    use super::super::meta::{Blocks, Meta};
    use super::super::op::Op;
    use super::super::tree;
    use crate::error::{Attempt, FsError};
    use crate::volume::format::tests::volume;

    use super::*;

    const INO: u64 = 1000;

    #[derive(Debug, Clone)]
    enum Act {
        Put(u64, usize, u8),
        Update(u64, u8),
        Remove(u64),
    }

    fn acts(most: usize) -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            3 => (0u64..60, 0usize..400, any::<u8>()).prop_map(|(key, len, byte)| Act::Put(key, len, byte)),
            1 => (0u64..60, any::<u8>()).prop_map(|(key, byte)| Act::Update(key, byte)),
            2 => (0u64..60).prop_map(Act::Remove),
        ];
        prop::collection::vec(act, 0..most)
    }

    fn key(number: u64) -> Key {
        Key::new(INO, Kind::Xattr, number)
    }

    fn apply(op: &mut Op, act: &Act) -> Attempt<()> {
        match *act {
            Act::Put(number, len, byte) => tree::put(op, key(number), &vec![byte; len]),
            Act::Update(number, byte) => {
                let fill = |value: &mut [u8]| {
                    value.fill(byte);
                    Ok(())
                };
                tree::update(op, key(number), fill).map(drop)
            }
            Act::Remove(number) => tree::remove(op, key(number)).map(drop),
        }
    }

    /// All items, and what the running transaction has changed.
    fn content(meta: &Meta) -> (Vec<(Key, Vec<u8>)>, Vec<u64>) {
        let mut items = Vec::new();
        let end: Option<()> = tree::scan(meta, Key::MIN, |key, value| {
            items.push((key, value.to_vec()));
            Ok(ControlFlow::Continue(()))
        })
        .expect("a tree that is all in memory");
        assert_eq!(end, None);
        (items, meta.running.clone())
    }

    #[test]
    fn an_operation_that_would_change_too_many_blocks_fails_and_has_changed_nothing() {
        let volume = volume(64 << 20);
        let put = |op: &mut Op, number| tree::put(op, key(number), &[number as u8; 900]);
        for number in 0..1000 {
            volume
                .wait(|| {
                    let mut op = volume.begin()?;
                    put(&mut op, number)?;
                    op.finish();
                    Ok(())
                })
                .unwrap();
        }
        let was = content(&volume.meta.read());
        let many = [(0..1000).rev().collect::<Vec<u64>>(), (1000..2000).collect()];
        for numbers in many {
            let change = || {
                let mut op = volume.begin()?;
                numbers.iter().try_for_each(|number| put(&mut op, *number))?;
                op.finish();
                Ok(())
            };
            let failed = volume.wait(change).unwrap_err();
            assert!(matches!(failed, FsError::TooManyBlocks), "{failed}");
            assert!(content(&volume.meta.read()) == was);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
        #[test]
        fn an_operation_that_does_not_finish_has_changed_nothing(
            before in acts(100), committed in any::<bool>(), finished in acts(4), dropped in acts(30),
        ) {
            let volume = volume(64 << 20);
            for acts in [before, finished] {
                for act in acts {
                    volume.wait(|| { let mut op = volume.begin()?; apply(&mut op, &act)?; op.finish(); Ok(()) }).unwrap();
                }
                if committed {
                    volume.commit().unwrap();
                }
            }
            let was = content(&volume.meta.read());
            volume
                .wait(|| {
                    let mut op = volume.begin()?;
                    dropped.iter().try_for_each(|act| apply(&mut op, act))
                })
                .unwrap();
            let meta = volume.meta.read();
            prop_assert_eq!(content(&meta), was);
            let leaf = meta.block(meta.state.root, BlockKind::Node).unwrap_or_else(|_| panic!("the root is in memory"));
            prop_assert_eq!(node::check(leaf), Ok(()));
        }
    }
}
