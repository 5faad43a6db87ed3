//! Nodes of the tree: leaves with items of any length, inner nodes with children.
//!
//! | offset | size | field |
//! | --- | --- | --- |
//! | 0 | 48 | block header |
//! | 48 | 1 | level: 0 for a leaf |
//! | 49 | 1 | reserved, zero |
//! | 50 | 2 | count of slots |
//! | 52 | 2 | heap: offset of the lowest byte that holds a value (leaf; 4096 when there is none) |
//! | 54 | 2 | garbage: bytes between heap and end that hold no value any more (leaf) |
//! | 56 | 8 | reserved, zero |
//! | 64 | | slots, ascending by key |
//!
//! A slot of a leaf is 20 bytes: key (16), offset of the value (2), its length (2); values lie at
//! the end of the block. A slot of an inner node is 24 bytes: the lowest key that its child may
//! hold (16) and the child's block number (8).
//!
//! [`check`] is run on every node that comes from a device; the other functions rely on what it
//! established.

use crate::block::{BLOCK_SIZE, HEADER_SIZE, KIND_FIELDS};
use crate::{Block, Corrupt, Key, le};

/// Longest value of an item in bytes: four of them fit a leaf, so that a split always makes room.
pub const VALUE_MAX: usize = 960;
/// A tree is never deeper than this: more blocks than an address can name would fit.
pub const LEVEL_MAX: u8 = 16;

const LEVEL: usize = KIND_FIELDS;
const COUNT: usize = KIND_FIELDS + 2;
const HEAP: usize = KIND_FIELDS + 4;
const GARBAGE: usize = KIND_FIELDS + 6;
const LEAF_SLOT: usize = 20;
const INNER_SLOT: usize = 24;
const CAPACITY: usize = BLOCK_SIZE - HEADER_SIZE;
/// What is wrong with a node below the root that has no slots. Of a leaf, [`check`] cannot say
/// whether it is the root.
pub const EMPTY: &str = "node is empty, and not the root";
/// Children that an inner node can hold.
pub const INNER_MAX: usize = CAPACITY / INNER_SLOT;

/// Makes `block` an empty node.
pub fn init(block: &mut Block, level: u8) {
    block.bytes_mut()[KIND_FIELDS..].fill(0);
    block.bytes_mut()[LEVEL] = level;
    put(block, HEAP, BLOCK_SIZE);
}

/// Level of the node: 0 for a leaf.
#[inline]
pub fn level(block: &Block) -> u8 {
    block.bytes()[LEVEL]
}

/// Number of slots.
#[inline]
pub fn count(block: &Block) -> usize {
    get(block, COUNT)
}

/// Checks everything that can be said of a node on its own. `block` was verified.
pub fn check(block: &Block) -> Result<(), Corrupt> {
    let fail = |what| Err(Corrupt::Field { address: block.address(), what });
    let (level, count) = (level(block), count(block));
    if level > LEVEL_MAX {
        return fail("node level is impossible");
    }
    let slots_end = HEADER_SIZE + count * slot_size(block);
    if slots_end > BLOCK_SIZE {
        return fail("node has more slots than fit");
    }
    // It is on the way of every node that is read: the size of a slot is a constant in each loop.
    let ascend = if level == 0 { keys_ascend::<LEAF_SLOT>(block) } else { keys_ascend::<INNER_SLOT>(block) };
    if !ascend {
        return fail("keys of the node do not ascend");
    }
    if level > 0 {
        return if count == 0 { fail("inner node is empty") } else { Ok(()) };
    }
    let heap = get(block, HEAP);
    if heap < slots_end || heap > BLOCK_SIZE {
        return fail("heap of the leaf is out of range");
    }
    let mut used = 0;
    let mut taken = Taken([0; BLOCK_SIZE / 64]);
    for slot in slots::<LEAF_SLOT>(block) {
        let (at, len) = (usize::from(le::get_u16(slot, 16)), usize::from(le::get_u16(slot, 18)));
        // An empty value lies nowhere.
        if (len > 0 && at < heap) || at + len > BLOCK_SIZE || len > VALUE_MAX {
            return fail("value of the leaf is out of range");
        }
        // A change of one of two that share bytes would change the other.
        if len > 0 && !taken.take(at, at + len) {
            return fail("values of the leaf overlap");
        }
        used += len;
    }
    if used + get(block, GARBAGE) != BLOCK_SIZE - heap {
        return fail("space of the leaf does not add up");
    }
    Ok(())
}

/// Key in slot `i`.
#[inline]
pub fn key(block: &Block, i: usize) -> Key {
    let at = HEADER_SIZE + i * slot_size(block);
    Key::from_words(le::get_u64(block.bytes(), at), le::get_u64(block.bytes(), at + 8))
}

/// Slot of `target`, or the slot where it would go.
pub fn search(block: &Block, target: Key) -> Result<usize, usize> {
    // Every operation comes by here a dozen times: the size of a slot is a constant in the loop.
    if level(block) == 0 { search_slots::<LEAF_SLOT>(block, target) } else { search_slots::<INNER_SLOT>(block, target) }
}

fn search_slots<const SIZE: usize>(block: &Block, target: Key) -> Result<usize, usize> {
    slots::<SIZE>(block).binary_search_by(|slot| slot_key(slot).cmp(&target))
}

fn keys_ascend<const SIZE: usize>(block: &Block) -> bool {
    slots::<SIZE>(block).is_sorted_by(|a, b| slot_key(a) < slot_key(b))
}

#[inline]
fn slots<const SIZE: usize>(block: &Block) -> &[[u8; SIZE]] {
    &block.bytes()[HEADER_SIZE..].as_chunks().0[..count(block)]
}

#[inline]
fn slot_key<const SIZE: usize>(slot: &[u8; SIZE]) -> Key {
    Key::from_words(le::get_u64(slot, 0), le::get_u64(slot, 8))
}

/// Value in slot `i` of a leaf.
#[inline]
pub fn value(block: &Block, i: usize) -> &[u8] {
    let (at, len) = value_range(block, i);
    &block.bytes()[at..at + len]
}

/// Value in slot `i` of a leaf, to change in place.
#[inline]
pub fn value_mut(block: &mut Block, i: usize) -> &mut [u8] {
    let (at, len) = value_range(block, i);
    &mut block.bytes_mut()[at..at + len]
}

/// What can still be read in a leaf that [`check`] refuses: the items whose values lie inside the
/// block, in no order. `block` was verified.
pub fn salvage(block: &Block) -> impl Iterator<Item = (Key, &[u8])> {
    let slots = count(block).min(CAPACITY / LEAF_SLOT);
    let item = |i| {
        let (at, len) = value_range(block, i);
        let value = block.bytes().get(at..at + len)?;
        (at >= HEADER_SIZE && len <= VALUE_MAX || len == 0).then(|| (key(block, i), value))
    };
    (0..if level(block) == 0 { slots } else { 0 }).filter_map(item)
}

/// The node with zeros for its values and for all bytes without a meaning, sealed. [`check`] says
/// the same of it, but where slots and values share bytes: then it has no slots.
pub fn without_values(block: &Block) -> Block {
    let slots_end = HEADER_SIZE + count(block) * slot_size(block);
    let end = if level(block) == 0 { get(block, HEAP).min(BLOCK_SIZE) } else { BLOCK_SIZE };
    let slots = if slots_end <= end { HEADER_SIZE..slots_end } else { HEADER_SIZE..HEADER_SIZE };
    block.reduced_to(&[LEVEL..LEVEL + 1, COUNT..GARBAGE + 2, slots])
}

/// Slot of the child that covers `target`.
#[inline]
pub fn child_slot(block: &Block, target: Key) -> usize {
    search(block, target).unwrap_or_else(|slot| slot.saturating_sub(1))
}

/// Child in slot `i` of an inner node.
#[inline]
pub fn child(block: &Block, i: usize) -> u64 {
    le::get_u64(block.bytes(), HEADER_SIZE + i * INNER_SLOT + 16)
}

/// Bytes that slots and values take.
pub fn used(block: &Block) -> usize {
    let slots = count(block) * slot_size(block);
    if level(block) > 0 { slots } else { slots + BLOCK_SIZE - get(block, HEAP) - get(block, GARBAGE) }
}

/// Whether a value of `len` bytes can be inserted into a leaf.
pub fn leaf_fits(block: &Block, len: usize) -> bool {
    used(block) + LEAF_SLOT + len <= CAPACITY
}

/// Whether a child can be inserted into an inner node.
pub fn inner_fits(block: &Block) -> bool {
    count(block) < INNER_MAX
}

/// Inserts a value at slot `i` of a leaf. It must fit.
pub fn leaf_insert(block: &mut Block, i: usize, key: Key, value: &[u8]) {
    assert!(level(block) == 0 && value.len() <= VALUE_MAX && leaf_fits(block, value.len()));
    if HEADER_SIZE + (count(block) + 1) * LEAF_SLOT + value.len() > get(block, HEAP) {
        compact(block);
    }
    let at = get(block, HEAP) - value.len();
    block.bytes_mut()[at..at + value.len()].copy_from_slice(value);
    put(block, HEAP, at);
    open_slot(block, i, key);
    let slot = HEADER_SIZE + i * LEAF_SLOT;
    le::put_u16(block.bytes_mut(), slot + 16, at as u16);
    le::put_u16(block.bytes_mut(), slot + 18, value.len() as u16);
}

/// Inserts a child at slot `i` of an inner node. It must fit.
pub fn inner_insert(block: &mut Block, i: usize, key: Key, child: u64) {
    assert!(level(block) > 0 && inner_fits(block));
    open_slot(block, i, key);
    le::put_u64(block.bytes_mut(), HEADER_SIZE + i * INNER_SLOT + 16, child);
}

/// Removes slot `i`.
pub fn remove(block: &mut Block, i: usize) {
    let (size, count) = (slot_size(block), count(block));
    assert!(i < count);
    if level(block) == 0 {
        let (at, len) = value_range(block, i);
        if at == get(block, HEAP) {
            put(block, HEAP, at + len);
        } else {
            put(block, GARBAGE, get(block, GARBAGE) + len);
        }
    }
    let at = HEADER_SIZE + i * size;
    block.bytes_mut().copy_within(at + size..HEADER_SIZE + count * size, at);
    put(block, COUNT, count - 1);
    if level(block) == 0 && count == 1 {
        put(block, HEAP, BLOCK_SIZE);
        put(block, GARBAGE, 0);
    }
}

/// Lowers the key of slot `i` of an inner node, when a smaller key enters its child.
pub fn set_key(block: &mut Block, i: usize, key: Key) {
    let (object, offset) = key.words();
    let at = HEADER_SIZE + i * slot_size(block);
    le::put_u64(block.bytes_mut(), at, object);
    le::put_u64(block.bytes_mut(), at + 8, offset);
}

/// Moves the slots from `at` on into `right`, an empty node of the same level.
pub fn split(left: &mut Block, at: usize, right: &mut Block) {
    assert!(at <= count(left) && count(right) == 0 && level(left) == level(right));
    append(right, left, at);
    while count(left) > at {
        remove(left, count(left) - 1);
    }
}

/// Appends the slots of `right` from `from` on to `left`. They must fit.
pub fn append(left: &mut Block, right: &Block, from: usize) {
    for i in from..count(right) {
        let at = count(left);
        if level(left) == 0 {
            leaf_insert(left, at, key(right, i), value(right, i));
        } else {
            inner_insert(left, at, key(right, i), child(right, i));
        }
    }
}

/// Slot at which the two halves of a full leaf weigh most alike.
pub fn middle(block: &Block) -> usize {
    let half = used(block) / 2;
    let mut sum = 0;
    for i in 0..count(block) {
        sum += LEAF_SLOT + value_range(block, i).1;
        if sum >= half {
            return (i + 1).min(count(block) - 1).max(1);
        }
    }
    count(block) / 2
}

/// The bytes of a leaf in which values were found, a bit each.
struct Taken([u64; BLOCK_SIZE / 64]);

impl Taken {
    /// Takes the bytes from `start` to before `end`, at least one. Returns whether all of
    /// them were free.
    fn take(&mut self, start: usize, end: usize) -> bool {
        let (first, last) = (start / 64, (end - 1) / 64);
        let (head, tail) = (u64::MAX << (start % 64), u64::MAX >> (63 - (end - 1) % 64));
        if first == last {
            let free = self.0[first] & head & tail == 0;
            self.0[first] |= head & tail;
            return free;
        }
        let mut before = self.0[first] & head | self.0[last] & tail;
        self.0[first] |= head;
        self.0[last] |= tail;
        for word in &mut self.0[first + 1..last] {
            before |= *word;
            *word = u64::MAX;
        }
        before == 0
    }
}

#[inline]
fn slot_size(block: &Block) -> usize {
    if level(block) == 0 { LEAF_SLOT } else { INNER_SLOT }
}

#[inline]
fn value_range(block: &Block, i: usize) -> (usize, usize) {
    let at = HEADER_SIZE + i * LEAF_SLOT + 16;
    (usize::from(le::get_u16(block.bytes(), at)), usize::from(le::get_u16(block.bytes(), at + 2)))
}

fn open_slot(block: &mut Block, i: usize, key: Key) {
    let (size, count) = (slot_size(block), count(block));
    assert!(i <= count);
    let at = HEADER_SIZE + i * size;
    block.bytes_mut().copy_within(at..HEADER_SIZE + count * size, at + size);
    put(block, COUNT, count + 1);
    set_key(block, i, key);
}

/// Moves the values together, so that the free space is one piece.
fn compact(block: &mut Block) {
    let old = block.clone();
    let mut heap = BLOCK_SIZE;
    for i in 0..count(&old) {
        let (at, len) = value_range(&old, i);
        heap -= len;
        block.bytes_mut()[heap..heap + len].copy_from_slice(&old.bytes()[at..at + len]);
        le::put_u16(block.bytes_mut(), HEADER_SIZE + i * LEAF_SLOT + 16, heap as u16);
    }
    put(block, HEAP, heap);
    put(block, GARBAGE, 0);
}

fn get(block: &Block, field: usize) -> usize {
    usize::from(le::get_u16(block.bytes(), field))
}

fn put(block: &mut Block, field: usize, value: usize) {
    le::put_u16(block.bytes_mut(), field, value as u16);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{BlockKind, Kind};

    fn leaf() -> Block {
        let mut block = Block::new(BlockKind::Node, 9, &[1; 16]);
        init(&mut block, 0);
        block
    }

    proptest! {
        #[test]
        fn a_leaf_is_a_sorted_map(ops in prop::collection::vec((0u64..40, 0usize..300, any::<bool>()), 0..400)) {
            let mut block = leaf();
            let mut model: BTreeMap<Key, Vec<u8>> = BTreeMap::new();
            for (n, len, put) in ops {
                let key = Key::new(n, Kind::Dirent, n * 3);
                let data = vec![n as u8; len];
                match search(&block, key) {
                    Ok(slot) if !put => {
                        remove(&mut block, slot);
                        model.remove(&key);
                    }
                    Err(slot) if put && leaf_fits(&block, len) => {
                        leaf_insert(&mut block, slot, key, &data);
                        model.insert(key, data);
                    }
                    _ => {}
                }
                prop_assert_eq!(check(&block), Ok(()));
            }
            let found: Vec<_> = (0..count(&block)).map(|i| (key(&block, i), value(&block, i).to_vec())).collect();
            prop_assert_eq!(found, model.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn check_never_panics_and_what_it_accepts_can_be_used(bytes in prop::collection::vec(any::<u8>(), 4096), count_ in 0u16..260) {
            let mut block = Block::from_bytes(bytes.as_slice().try_into().unwrap());
            le::put_u16(block.bytes_mut(), COUNT, count_);
            if check(&block).is_ok() {
                for i in 0..count(&block) {
                    key(&block, i);
                    if level(&block) == 0 { value(&block, i); } else { child(&block, i); }
                }
            }
        }
    }

    /// A leaf with values of these lengths, in the order in which they came, and its check after
    /// the value in slot `of` was put at `at`.
    fn moved(lengths: &[usize], of: usize, at: usize) -> Result<(), Corrupt> {
        let mut block = leaf();
        for (slot, len) in lengths.iter().enumerate() {
            leaf_insert(&mut block, slot, Key::new(slot as u64, Kind::Inode, 0), &vec![slot as u8; *len]);
        }
        assert_eq!(check(&block), Ok(()));
        le::put_u16(block.bytes_mut(), HEADER_SIZE + of * LEAF_SLOT + 16, at as u16);
        check(&block)
    }

    #[test]
    fn values_that_share_bytes_are_refused() {
        let overlap = Err(Corrupt::Field { address: 9, what: "values of the leaf overlap" });
        // The same place, one inside another, the last byte of one and the first of another;
        // inside a word of 64 bytes and across them.
        for (lengths, of, at) in [
            (&[50, 50][..], 0, 3996),
            (&[500, 10], 1, 3700),
            (&[10, 500], 0, 4000),
            (&[300, 200, 100], 2, 3497),
            (&[300, 200, 100], 1, 3597),
            (&[64, 64], 0, 4031),
            (&[1, 1], 0, 4094),
            (&[960, 960, 960, 960], 3, 257),
        ] {
            assert_eq!(moved(lengths, of, at), overlap, "{lengths:?}: value {of} at {at}");
        }
        // An empty one lies nowhere.
        assert_eq!(moved(&[50, 0], 1, 4070), Ok(()));
    }

    #[test]
    fn a_split_leaves_two_halves_and_merging_them_gives_the_whole() {
        let mut left = leaf();
        for n in 0.. {
            if !leaf_fits(&left, 100) {
                break;
            }
            let at = count(&left);
            leaf_insert(&mut left, at, Key::new(n, Kind::Inode, 0), &[n as u8; 100]);
        }
        let whole = left.clone();
        let mut right = leaf();
        let at = middle(&left);
        split(&mut left, at, &mut right);
        assert!(count(&left) > 0 && count(&right) > 0);
        assert!(used(&left).abs_diff(used(&right)) < 300);
        assert!(check(&left).is_ok() && check(&right).is_ok());
        append(&mut left, &right, 0);
        assert!((0..count(&whole)).all(|i| key(&whole, i) == key(&left, i) && value(&whole, i) == value(&left, i)));
    }
}
