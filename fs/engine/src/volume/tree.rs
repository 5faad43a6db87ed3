//! The tree: one B+tree of typed items, in place.
//!
//! Inner nodes route by lowest key; the key in slot 0 counts as lower than any. Leaves split where
//! they are full, and a leaf filled in ascending order stays full. A node that becomes empty is
//! freed, one that becomes thin joins a neighbour under the same parent when that is in memory.

use std::ops::ControlFlow;

use gpunvme_layout::{Block, BlockKind, Corrupt, Key, node};

use super::meta::Blocks;
use super::op::Op;
use super::place::Place;
use crate::error::{Attempt, Fail};

/// Nodes with fewer bytes in use than this look for a neighbour to join.
const THIN: usize = 1000;
/// Two nodes join only when the result has room to grow, so that they do not split again at once.
const JOINED_MAX: usize = 3000;

/// Bytes of a leaf that a search looks at, but for leaves with many small items.
const SEARCHED: usize = 1024;
/// Bytes that a processor fetches at once.
const CACHE_LINE: usize = 64;

/// The root, where every search begins.
fn root(blocks: &impl Blocks) -> Place {
    Place { address: blocks.meta().state.root, lower: Key::MIN, upper: None }
}

/// Goes on from an inner node of that level, on the way to `key`. Returns where to, and the slot
/// that is followed.
fn step(blocks: &impl Blocks, mut place: Place, level: u8, key: Key) -> Attempt<(Place, usize)> {
    let block = load(blocks, place.address, level)?;
    // The key in slot 0 stands for all below it.
    place.check(block, 1)?;
    let (slot, count) = (node::child_slot(block, key), node::count(block));
    if slot > 0 {
        place.lower = node::key(block, slot);
    }
    if slot + 1 < count {
        place.upper = Some(node::key(block, slot + 1));
    }
    place.address = node::child(block, slot);
    Ok((place, slot))
}

/// Goes down to where the leaf is that covers `key`, and calls `visit` with each inner node's
/// address and the slot that is followed.
fn descend(blocks: &impl Blocks, key: Key, mut visit: impl FnMut(u64, usize)) -> Attempt<Place> {
    let mut place = root(blocks);
    for level in (1..=blocks.meta().state.level).rev() {
        let (below, slot) = step(blocks, place, level, key)?;
        visit(place.address, slot);
        place = below;
    }
    Ok(place)
}

/// The leaf that covers `key`.
fn leaf(blocks: &impl Blocks, key: Key) -> Attempt<(&Block, Place)> {
    if let Some(place) = blocks.recall(|place| place.covers(key)) {
        return Ok((blocks.block(place.address, BlockKind::Node)?, place));
    }
    let place = descend(blocks, key, |_, _| {})?;
    let block = load(blocks, place.address, 0)?;
    fetch(block);
    place.check(block, 0)?;
    blocks.remember(place);
    Ok((block, place))
}

/// The node at `address`, which its parent expects to be of that level.
pub(crate) fn load(blocks: &impl Blocks, address: u64, level: u8) -> Attempt<&Block> {
    if !blocks.meta().geometry.contains_data(address, 1) {
        return Err(Corrupt::Field { address, what: "tree points outside the data area" }.into());
    }
    let block = blocks.block(address, BlockKind::Node)?;
    if node::level(block) != level {
        return Err(Corrupt::Field { address, what: "node is not of the level that its parent expects" }.into());
    }
    // Only the root of a tree without items is empty. Below it, any number of parents could point
    // to one empty leaf, of which no key says that it lies elsewhere: a scan would pass it each
    // time.
    if node::count(block) == 0 && level < blocks.meta().state.level {
        return Err(Corrupt::Field { address, what: node::EMPTY }.into());
    }
    Ok(block)
}

/// Has the processor fetch the memory that a search looks at, side by side: the search itself would
/// wait for one line after the other.
fn fetch(leaf: &Block) {
    std::hint::black_box(leaf.bytes()[..SEARCHED].iter().step_by(CACHE_LINE).fold(0, |sum, byte| sum ^ byte));
}

/// Inner nodes from the root down to the leaf that covers `key`, with the slot that is followed.
fn path(blocks: &impl Blocks, key: Key) -> Attempt<Vec<(u64, usize)>> {
    let mut inner = Vec::new();
    descend(blocks, key, |address, slot| inner.push((address, slot)))?;
    Ok(inner)
}

/// The value of an item.
pub(crate) fn get(blocks: &impl Blocks, key: Key) -> Attempt<Option<&[u8]>> {
    let (block, _) = leaf(blocks, key)?;
    Ok(node::search(block, key).ok().map(|slot| node::value(block, slot)))
}

/// The values of several items, as [`get`] finds them. It searches for all of them step by step:
/// the processor then fetches many leaves from memory at once, where one search after the other
/// would wait for each leaf.
pub(crate) fn get_all<B: Blocks>(blocks: &B, keys: impl Iterator<Item = Key>) -> Vec<Attempt<Option<&[u8]>>> {
    let mut places: Vec<_> = keys.map(|key| (key, Ok(root(blocks)))).collect();
    for level in (1..=blocks.meta().state.level).rev() {
        for (key, place) in &mut places {
            if let Ok(above) = *place {
                *place = step(blocks, above, level, *key).map(|(below, _)| below);
            }
        }
    }
    let load = |(key, place): (Key, Attempt<Place>)| place.and_then(|place| Ok((key, place, load(blocks, place.address, 0)?)));
    let leaves: Vec<_> = places.into_iter().map(load).collect();
    leaves.iter().flatten().for_each(|(_, _, block)| fetch(block));
    let value = |(key, place, block): (Key, Place, _)| {
        place.check(block, 0)?;
        Ok(node::search(block, key).ok().map(|slot| node::value(block, slot)))
    };
    leaves.into_iter().map(|leaf| leaf.and_then(value)).collect()
}

/// The last item whose key is not above `key`.
pub(crate) fn floor(blocks: &impl Blocks, key: Key) -> Attempt<Option<(Key, &[u8])>> {
    let mut target = key;
    loop {
        let (block, place) = leaf(blocks, target)?;
        let slot = match node::search(block, target) {
            Ok(slot) => Some(slot),
            Err(slot) => slot.checked_sub(1),
        };
        if let Some(slot) = slot {
            return Ok(Some((node::key(block, slot), node::value(block, slot))));
        }
        match place.lower.predecessor() {
            Some(before) => target = before,
            None => return Ok(None),
        }
    }
}

/// Calls `visit` with the items from `from` on, in order, until it breaks.
pub(crate) fn scan<B>(
    blocks: &impl Blocks,
    from: Key,
    mut visit: impl FnMut(Key, &[u8]) -> Attempt<ControlFlow<B>>,
) -> Attempt<Option<B>> {
    let (block, place) = leaf(blocks, from)?;
    let start = node::search(block, from).unwrap_or_else(|slot| slot);
    scan_leaves(blocks, (block, place), start, &mut visit)
}

/// As [`scan`], but from the last item on whose key is not above `from`.
pub(crate) fn scan_floor<B>(
    blocks: &impl Blocks,
    from: Key,
    mut visit: impl FnMut(Key, &[u8]) -> Attempt<ControlFlow<B>>,
) -> Attempt<Option<B>> {
    let (block, place) = leaf(blocks, from)?;
    let start = match node::search(block, from) {
        Ok(slot) => slot,
        // The item before it is in another leaf.
        Err(0) => {
            let first = floor(blocks, from)?.map_or(from, |(key, _)| key);
            return scan(blocks, first, visit);
        }
        Err(slot) => slot - 1,
    };
    scan_leaves(blocks, (block, place), start, &mut visit)
}

/// Calls `visit` with the items of a leaf from slot `start` on, and with those of the leaves
/// behind it.
fn scan_leaves<'a, B, S: Blocks>(
    blocks: &'a S,
    first: (&'a Block, Place),
    start: usize,
    visit: &mut impl FnMut(Key, &[u8]) -> Attempt<ControlFlow<B>>,
) -> Attempt<Option<B>> {
    let ((mut block, mut place), mut start) = (first, start);
    loop {
        for slot in start..node::count(block) {
            if let ControlFlow::Break(result) = visit(node::key(block, slot), node::value(block, slot))? {
                return Ok(Some(result));
            }
        }
        let Some(upper) = place.upper else { return Ok(None) };
        (block, place) = leaf(blocks, upper)?;
        start = node::search(block, upper).unwrap_or_else(|slot| slot);
    }
}

/// Inserts an item. Returns false, and changes nothing, when the key is taken.
pub(crate) fn insert(op: &mut Op, key: Key, value: &[u8]) -> Attempt<bool> {
    op.changes(key);
    let (block, Place { address, .. }) = leaf(op, key)?;
    let Err(slot) = node::search(block, key) else { return Ok(false) };
    if node::leaf_fits(block, value.len()) {
        op.leaf_insert(address, slot, key, value)?;
        return Ok(true);
    }
    // A leaf that grows at its end stays full: the new item begins the next one.
    let count = node::count(block);
    let at = if slot == count { count } else { node::middle(block) };
    let path = path(op, key)?;
    if slot == count && insert_behind(op, &path, key, value)? {
        return Ok(true);
    }
    let mut right = new_node(op, 0)?;
    let left = op.block_mut(address, BlockKind::Node)?;
    node::split(left, at, &mut right);
    if slot < at {
        node::leaf_insert(left, slot, key, value);
    } else {
        node::leaf_insert(&mut right, slot - at, key, value);
    }
    let (first, address) = (node::key(&right, 0), right.address());
    op.create(right)?;
    add_child(op, path, first, address)?;
    Ok(true)
}

/// Puts an item that is to follow a full leaf into the next leaf under the same parent, where that
/// is in memory, has room, and begins with a later item of the same kind: items that come in
/// descending order would get a leaf each. Returns whether it did.
fn insert_behind(op: &mut Op, path: &[(u64, usize)], key: Key, value: &[u8]) -> Attempt<bool> {
    let Some(&(parent, slot)) = path.last() else { return Ok(false) };
    let inner = op.block(parent, BlockKind::Node)?;
    if slot + 1 >= node::count(inner) {
        return Ok(false);
    }
    let next = node::child(inner, slot + 1);
    match load(op, next, 0) {
        Ok(leaf) if node::leaf_fits(leaf, value.len()) && node::key(leaf, 0).words().0 == key.words().0 => {}
        // It is not worth waiting for.
        Ok(_) | Err(Fail::Stall(_)) => return Ok(false),
        Err(error) => return Err(error),
    }
    node::set_key(op.block_mut(parent, BlockKind::Node)?, slot + 1, key);
    op.leaf_insert(next, 0, key, value)?;
    op.forget_places();
    Ok(true)
}

/// Changes the value of an item in place; its length stays. Returns what `change` does; none when
/// there is no such item.
pub(crate) fn update<T>(op: &mut Op, key: Key, change: impl FnOnce(&mut [u8]) -> Attempt<T>) -> Attempt<Option<T>> {
    op.changes(key);
    let (block, Place { address, .. }) = leaf(op, key)?;
    let Ok(slot) = node::search(block, key) else { return Ok(None) };
    change(op.leaf_value(address, slot)?).map(Some)
}

/// Gives an item another value of any length, or inserts it.
pub(crate) fn put(op: &mut Op, key: Key, value: &[u8]) -> Attempt<()> {
    op.changes(key);
    let (block, Place { address, .. }) = leaf(op, key)?;
    match node::search(block, key) {
        Ok(slot) if node::value(block, slot).len() == value.len() => {
            op.leaf_value(address, slot)?.copy_from_slice(value);
            return Ok(());
        }
        Ok(_) => drop(remove(op, key)?),
        Err(_) => {}
    }
    insert(op, key, value).map(drop)
}

/// Removes an item. Returns whether it was there.
pub(crate) fn remove(op: &mut Op, key: Key) -> Attempt<bool> {
    op.changes(key);
    let (block, Place { address, .. }) = leaf(op, key)?;
    let Ok(slot) = node::search(block, key) else { return Ok(false) };
    if node::used(op.leaf_remove(address, slot)?) < THIN {
        let path = path(op, key)?;
        thin_out(op, path, address)?;
    }
    Ok(true)
}

fn new_node(op: &mut Op, level: u8) -> Attempt<Block> {
    let address = op.allocate_node()?;
    let mut block = Block::new(BlockKind::Node, address, &op.meta().uuid);
    node::init(&mut block, level);
    Ok(block)
}

/// Adds a child to the last node of the path; splits upwards as far as needed.
fn add_child(op: &mut Op, mut path: Vec<(u64, usize)>, key: Key, child: u64) -> Attempt<()> {
    let Some((address, slot)) = path.pop() else { return grow(op, key, child) };
    let at = slot + 1;
    let block = op.block_mut(address, BlockKind::Node)?;
    if node::inner_fits(block) {
        node::inner_insert(block, at, key, child);
        return Ok(());
    }
    let (level, count) = (node::level(block), node::count(block));
    let middle = if at == count { count - 1 } else { count / 2 };
    let mut right = new_node(op, level)?;
    let left = op.block_mut(address, BlockKind::Node)?;
    node::split(left, middle, &mut right);
    if at <= middle {
        node::inner_insert(left, at, key, child);
    } else {
        node::inner_insert(&mut right, at - middle, key, child);
    }
    let (first, right_address) = (node::key(&right, 0), right.address());
    op.create(right)?;
    add_child(op, path, first, right_address)
}

/// Puts a new root above the old one.
fn grow(op: &mut Op, key: Key, child: u64) -> Attempt<()> {
    let level = op.meta().state.level + 1;
    if level > node::LEVEL_MAX {
        return Err(Corrupt::Field { address: op.meta().state.root, what: "tree is deeper than it can be" }.into());
    }
    let mut root = new_node(op, level)?;
    node::inner_insert(&mut root, 0, Key::MIN, op.meta().state.root);
    node::inner_insert(&mut root, 1, key, child);
    let state = op.state_mut();
    (state.root, state.level) = (root.address(), level);
    op.create(root)
}

/// After a removal from `address`: frees it when it is empty, joins it with a neighbour when it is
/// thin.
fn thin_out(op: &mut Op, mut path: Vec<(u64, usize)>, address: u64) -> Attempt<()> {
    let Some((parent, slot)) = path.pop() else { return shrink(op) };
    let block = op.block(address, BlockKind::Node)?;
    if node::count(block) == 0 {
        node::remove(op.block_mut(parent, BlockKind::Node)?, slot);
        op.release_node(address)?;
        return thin_out(op, path, parent);
    }
    if node::used(block) >= THIN {
        return Ok(());
    }
    for left in [slot.checked_sub(1), Some(slot)].into_iter().flatten() {
        if join(op, parent, left)? {
            return thin_out(op, path, parent);
        }
    }
    Ok(())
}

/// Joins the children in slots `left` and `left + 1`, when both are in memory and fit well.
fn join(op: &mut Op, parent: u64, left: usize) -> Attempt<bool> {
    let block = op.block(parent, BlockKind::Node)?;
    if left + 1 >= node::count(block) {
        return Ok(false);
    }
    let (a, b, key) = (node::child(block, left), node::child(block, left + 1), node::key(block, left + 1));
    let level = node::level(block) - 1;
    let (first, second) = match (load(op, a, level), load(op, b, level)) {
        (Ok(first), Ok(second)) => (first, second),
        // It is not worth waiting for.
        (Err(Fail::Stall(_)), _) | (_, Err(Fail::Stall(_))) => return Ok(false),
        (Err(error), _) | (_, Err(error)) => return Err(error),
    };
    if node::used(first) + node::used(second) > JOINED_MAX {
        return Ok(false);
    }
    let mut second = second.clone();
    if level > 0 {
        // Slot 0 counted as lower than any; inside the joined node its key has to be true.
        node::set_key(&mut second, 0, key);
    }
    node::append(op.block_mut(a, BlockKind::Node)?, &second, 0);
    node::remove(op.block_mut(parent, BlockKind::Node)?, left + 1);
    op.release_node(b)?;
    Ok(true)
}

/// Takes away a root that has only one child.
fn shrink(op: &mut Op) -> Attempt<()> {
    loop {
        let (root, level) = (op.meta().state.root, op.meta().state.level);
        let block = load(op, root, level)?;
        if level == 0 || node::count(block) != 1 {
            return Ok(());
        }
        let child = node::child(block, 0);
        let state = op.state_mut();
        (state.root, state.level) = (child, level - 1);
        op.release_node(root)?;
        // The next round looks at the child; if it is not in memory, it can wait for another time.
        if matches!(load(op, child, level - 1), Err(Fail::Stall(_))) {
            return Ok(());
        }
    }
}
