//! The page map: the blocks of a file that are in memory. Blocks side by side that came together
//! share one entry: a megabyte that was written at once is one entry, and not 256, and an operation
//! on it takes as long as on one block.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use super::pages::Pages;

/// An entry of the page map: a run of blocks side by side.
pub(crate) trait Entry {
    /// Its memory.
    fn pages(&self) -> &Pages;

    /// How many blocks.
    fn blocks(&self) -> u64 {
        self.pages().len() as u64
    }
}

impl Entry for Arc<Pages> {
    fn pages(&self) -> &Pages {
        self
    }
}

/// A run of blocks of a file that are in memory and may be written to.
pub(crate) struct BufferedPages {
    /// Content of the blocks.
    pub pages: Pages,
    /// Whether the blocks differ from the device.
    pub dirty: bool,
    /// Whether blocks were promised for them: the file has none there yet.
    pub promised: bool,
}

impl Entry for BufferedPages {
    fn pages(&self) -> &Pages {
        &self.pages
    }
}

/// Entries by their first block. No two overlap.
pub(crate) struct PageMap<T>(BTreeMap<u64, T>);

impl<T> Default for PageMap<T> {
    fn default() -> Self {
        PageMap(BTreeMap::new())
    }
}

impl<T: Entry> PageMap<T> {
    /// Whether the map has no entry.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an entry where there is none.
    pub fn insert(&mut self, start: u64, entry: T) {
        debug_assert!(!self.overlaps(start..start + entry.blocks()));
        self.0.insert(start, entry);
    }

    /// Removes the entry that begins with a block.
    pub fn remove(&mut self, start: u64) -> Option<T> {
        self.0.remove(&start)
    }

    /// The pages that hold a block, and the index of the block's page in them.
    pub fn find(&self, block: u64) -> Option<(&Pages, usize)> {
        self.overlapping(block..block + 1).next().map(|(blocks, entry)| (entry.pages(), (block - blocks.start) as usize))
    }

    /// Whether a block is in memory.
    pub fn contains(&self, block: u64) -> bool {
        self.find(block).is_some()
    }

    /// Whether any of these blocks is in memory.
    pub fn overlaps(&self, blocks: Range<u64>) -> bool {
        self.overlapping(blocks).next().is_some()
    }

    /// All entries, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Range<u64>, &T)> {
        self.0.iter().map(|(start, entry)| (*start..start + entry.blocks(), entry))
    }

    /// The entries that hold some of these blocks, in order.
    pub fn overlapping(&self, blocks: Range<u64>) -> impl Iterator<Item = (Range<u64>, &T)> {
        let before = self.0.range(..=blocks.start).next_back().filter(|(start, entry)| *start + entry.blocks() > blocks.start);
        let first = before.map_or(blocks.start, |(start, _)| *start);
        self.0.range(first..blocks.end.max(first)).map(|(start, entry)| (*start..start + entry.blocks(), entry))
    }

    /// The parts of this range that are not in memory.
    pub fn gaps(&self, blocks: Range<u64>) -> SmallVec<[Range<u64>; 2]> {
        without(blocks.clone(), self.overlapping(blocks).map(|(held, _)| held))
    }
}

impl PageMap<BufferedPages> {
    /// Makes a block the first of its entry.
    pub fn split(&mut self, block: u64) {
        let Some((start, entry)) = self.0.range_mut(..block).next_back() else { return };
        if start + entry.blocks() > block {
            let pages = entry.pages.split_off((block - start) as usize);
            let rest = BufferedPages { pages, ..*entry };
            self.0.insert(block, rest);
        }
    }

    /// Takes out blocks that all lie in one entry.
    pub fn take(&mut self, blocks: &Range<u64>) -> BufferedPages {
        self.split(blocks.start);
        self.split(blocks.end);
        self.0.remove(&blocks.start).expect("they are in memory")
    }

    /// Takes out everything from a block on.
    pub fn take_from(&mut self, block: u64) -> impl Iterator<Item = BufferedPages> + use<> {
        self.split(block);
        self.0.split_off(&block).into_values()
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Changes the state of these blocks, of whole entries where possible. Returns the number of
    /// blocks that `change` returned true for.
    pub fn change(
        &mut self,
        blocks: Range<u64>,
        wants: impl Fn(&BufferedPages) -> bool,
        change: impl Fn(&mut BufferedPages),
    ) -> u64 {
        let entries: SmallVec<[Range<u64>; 4]> =
            self.overlapping(blocks.clone()).filter(|(_, entry)| wants(entry)).map(|(held, _)| held).collect();
        let mut changed = 0;
        for held in entries {
            let (start, end) = (held.start.max(blocks.start), held.end.min(blocks.end));
            self.split(start);
            self.split(end);
            change(self.0.get_mut(&start).expect("split above"));
            changed += end - start;
            self.join(start);
        }
        changed
    }

    /// Joins an entry with the one before it, if they are alike and their memory lies side by side.
    fn join(&mut self, start: u64) {
        let Some(entry) = self.0.get(&start) else { return };
        let Some((first, before)) = self.0.range(..start).next_back() else { return };
        let alike = (before.dirty, before.promised) == (entry.dirty, entry.promised);
        if !alike || first + before.blocks() != start || !before.pages.is_before(&entry.pages) {
            return;
        }
        let first = *first;
        let entry = self.0.remove(&start).expect("looked at above");
        self.0.get_mut(&first).expect("looked at above").pages.join(entry.pages);
    }
}

/// The parts of a range that are left without others, which come in order.
pub(crate) fn without(blocks: Range<u64>, others: impl Iterator<Item = Range<u64>>) -> SmallVec<[Range<u64>; 2]> {
    let mut left = SmallVec::new();
    let mut at = blocks.start;
    for other in others {
        if at < other.start.min(blocks.end) {
            left.push(at..other.start.min(blocks.end));
        }
        at = at.max(other.end);
    }
    if at < blocks.end {
        left.push(at..blocks.end);
    }
    left
}

#[cfg(test)]
mod tests {
    use gpunvme_layout::block::BLOCK_SIZE;

    use super::super::pages::PagePool;
    use super::*;

    /// State of a block in the model: dirty, promised, and a byte of its content.
    type Known = Option<(bool, bool, u8)>;

    fn known(entries: &PageMap<BufferedPages>, block: u64) -> Known {
        let (_, entry) = entries.overlapping(block..block + 1).next()?;
        let (pages, at) = entries.find(block)?;
        let mut byte = [0];
        pages.read(at * BLOCK_SIZE, &mut byte).unwrap();
        Some((entry.dirty, entry.promised, byte[0]))
    }

    /// A map whose entries are added, changed, cut and taken out in any order agrees, block by
    /// block, with an array of blocks.
    #[test]
    fn entries_are_what_their_blocks_are() {
        const BLOCKS: u64 = 64;
        let pool = PagePool::of_a_file(2 * BLOCKS as usize);
        let mut state = 7_u64;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        let mut entries: PageMap<BufferedPages> = PageMap::default();
        let mut model: [Known; BLOCKS as usize] = [None; BLOCKS as usize];
        for step in 0..20_000_u64 {
            let start = below(BLOCKS);
            let range = start..(start + 1 + below(12)).min(BLOCKS);
            let held = |model: &[Known], range: Range<u64>| range.filter(|block| model[*block as usize].is_some()).count() as u64;
            match below(5) {
                0 => {
                    for gap in entries.gaps(range) {
                        let mut at = gap.start;
                        for pages in pool.take((gap.end - gap.start) as usize).unwrap() {
                            pages.zero(0..pages.len() * BLOCK_SIZE).unwrap();
                            let start = at;
                            at += pages.len() as u64;
                            for block in start..at {
                                assert_eq!(model[block as usize], None);
                                pages.write((block - start) as usize * BLOCK_SIZE, &[step as u8]).unwrap();
                                model[block as usize] = Some((false, false, step as u8));
                            }
                            entries.insert(start, BufferedPages { pages, dirty: false, promised: false });
                        }
                    }
                }
                1 => {
                    let clean = range.clone().filter(|block| model[*block as usize].is_some_and(|known| !known.0)).count() as u64;
                    assert_eq!(entries.change(range.clone(), |entry| !entry.dirty, |entry| entry.dirty = true), clean);
                    range.for_each(|block| model[block as usize].iter_mut().for_each(|known| known.0 = true));
                }
                2 => {
                    entries.change(range.clone(), |entry| !entry.promised, |entry| entry.promised = true);
                    range.for_each(|block| model[block as usize].iter_mut().for_each(|known| known.1 = true));
                }
                3 => {
                    // The blocks to take out have to be in one entry.
                    let Some((blocks, _)) = entries.overlapping(range.clone()).next() else { continue };
                    let part = blocks.start.max(range.start)..blocks.end.min(range.end);
                    assert_eq!(entries.take(&part).blocks(), part.end - part.start);
                    part.for_each(|block| model[block as usize] = None);
                }
                _ if below(8) == 0 => {
                    let gone = held(&model, start..BLOCKS);
                    assert_eq!(entries.take_from(start).map(|entry| entry.blocks()).sum::<u64>(), gone);
                    model[start as usize..].fill(None);
                }
                _ => {}
            }
            assert!((0..BLOCKS).all(|block| known(&entries, block) == model[block as usize]), "step {step}");
        }
    }

    #[test]
    fn blocks_that_are_written_one_after_the_other_become_one_piece() {
        let pool = PagePool::of_a_file(64);
        let mut entries: PageMap<BufferedPages> = PageMap::default();
        for block in 5..25 {
            let pages = pool.take(1).unwrap().remove(0);
            entries.insert(block, BufferedPages { pages, dirty: false, promised: false });
            entries.change(block..block + 1, |_| true, |entry| (entry.dirty, entry.promised) = (true, block < 15));
        }
        assert_eq!(
            entries.iter().map(|(blocks, _)| blocks).collect::<Vec<_>>(),
            [5..15, 15..25],
            "no block of the second was promised"
        );
    }
}
