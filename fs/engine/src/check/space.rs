//! Compares the blocks that are in use with bitmaps, descriptors and the counters of the volume,
//! group by group; and mends those while it goes, when it may: what is in use is known, so there
//! is one right answer.

use std::ops::Range;
use std::sync::Arc;

use gpunvme_layout::geometry::{CHUNK_BLOCKS, GROUP_BLOCKS, GROUP_CHUNKS};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::key::INO_NONE;
use gpunvme_layout::{Block, BlockKind, Geometry};

use super::finding::{Findings, Fix, Kind, Place};
use super::items::UseRecord;
use super::spool::Sorted;
use super::walk::{Reader, reason};
use crate::error::FsError;
use crate::volume::Volume;

/// Bitmaps that are read at once.
const BATCH: usize = 128;
/// Runs of data in one group that are looked at for whether they lie in a chunk of metadata.
const RUNS_MAX: usize = 100_000;

/// Says whether findings of a kind may be mended.
pub(crate) type May<'m> = &'m mut dyn FnMut(Kind) -> bool;

/// The comparison of one volume.
pub(crate) struct Space<'a, 'm> {
    volume: &'a Volume,
    reader: &'a Reader<'a>,
    geometry: Geometry,
    findings: &'a mut Findings,
    /// All that is in use is known. Else nothing is free for sure but what is marked so.
    whole: bool,
    may: Option<May<'m>>,
    /// Of the runs in use that went by, the one that reaches farthest: what any of them has of the
    /// groups to come, it has, too.
    cover: Option<UseRecord>,
}

/// A group as it is stored.
struct Stored {
    /// None when its block is damaged.
    descriptor: Option<Descriptor>,
    /// None when it is damaged.
    bitmap: Option<Arc<Block>>,
}

impl<'a, 'm> Space<'a, 'm> {
    /// A comparison that reports to `findings`.
    pub fn new(
        volume: &'a Volume,
        reader: &'a Reader<'a>,
        findings: &'a mut Findings,
        whole: bool,
        may: Option<May<'m>>,
    ) -> Space<'a, 'm> {
        Space { geometry: volume.geometry(), volume, reader, findings, whole, may, cover: None }
    }

    /// Goes through all groups. `progress` is told how many were done.
    pub fn compare(mut self, mut used: Sorted<UseRecord>, progress: &mut dyn FnMut(u64)) -> Result<(), FsError> {
        let (mut free_blocks, mut free_chunks) = (0, 0);
        let geometry = self.geometry;
        for (address, groups) in geometry.descriptor_blocks() {
            let descriptors = self.descriptors(address, groups.clone())?;
            for batch in groups.collect::<Vec<_>>().chunks(BATCH) {
                let stored = self.stored(batch, descriptors.as_deref())?;
                for (number, stored) in batch.iter().zip(stored) {
                    let (blocks, chunks) = self.group(*number, stored, &mut used)?;
                    free_blocks += blocks;
                    free_chunks += chunks;
                }
                progress(batch[batch.len() - 1] + 1);
            }
        }
        let state = self.volume.meta.read().state;
        if (state.free_blocks, state.free_chunks) != (free_blocks, free_chunks) {
            let counts = format!("counts {} free blocks in {} free chunks", state.free_blocks, state.free_chunks);
            let what = || format!("{counts}, there are {free_blocks} in {free_chunks}");
            self.findings.add(Kind::Counter, Place::State, Fix::Elsewhere, what);
            if self.may(&[Kind::Counter]) {
                self.volume.wait(|| {
                    let mut op = self.volume.begin()?;
                    (op.state_mut().free_blocks, op.state_mut().free_chunks) = (free_blocks, free_chunks);
                    op.finish();
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    fn may(&mut self, kinds: &[Kind]) -> bool {
        self.may.as_mut().is_some_and(|may| kinds.iter().all(|kind| may(*kind)))
    }

    /// A block of descriptors; made anew when it is damaged and may be mended.
    fn descriptors(&mut self, address: u64, groups: Range<u64>) -> Result<Option<Arc<Block>>, FsError> {
        let read = self.reader.read(&[address])?.swap_remove(0);
        let why = match read.and_then(|block| block.expect(BlockKind::Descriptors).map_err(|e| reason(&e)).map(|()| block)) {
            Ok(block) => return Ok(Some(block)),
            Err(why) => why,
        };
        self.findings.add(Kind::Descriptors, Place::Block(address), Fix::Elsewhere, || why);
        if self.may(&[Kind::Descriptors]) {
            // All groups count as used up until their turn comes, a moment later.
            let mut block = Block::new(BlockKind::Descriptors, address, &self.volume.superblock().uuid);
            let none = Descriptor { free_blocks: 0, free_metadata: 0, free_chunks: 0, initialized: true };
            for index in 0..groups.end - groups.start {
                none.store(&mut block, index as usize);
            }
            self.volume.wait(|| {
                let mut op = self.volume.begin()?;
                op.create(block.clone())?;
                op.set_free_nodes(None);
                op.finish();
                Ok(())
            })?;
        }
        Ok(None)
    }

    /// Descriptors and bitmaps of some groups.
    fn stored(&mut self, groups: &[u64], descriptors: Option<&Block>) -> Result<Vec<Stored>, FsError> {
        let geometry = self.geometry;
        let load = |number: u64| descriptors.map(|block| Descriptor::load(block, geometry.descriptor(number).1));
        let wanted: Vec<u64> = groups.iter().copied().filter(|g| load(*g).is_none_or(|d| d.initialized)).collect();
        let addresses: Vec<u64> = wanted.iter().map(|g| geometry.bitmap(*g)).collect();
        let mut read = wanted.iter().copied().zip(self.reader.read(&addresses)?).peekable();
        let mut stored = Vec::with_capacity(groups.len());
        for number in groups {
            let descriptor = load(*number);
            let new = || Arc::new(group::new_bitmap(&geometry, *number, &self.volume.superblock().uuid));
            let bitmap = match read.next_if(|(g, _)| g == number).map(|(_, block)| block) {
                None => Some(new()),
                Some(block) => {
                    let checked = block.and_then(|block| {
                        block.expect(BlockKind::Bitmap).map_err(|e| reason(&e))?;
                        group::check_bitmap(&block).map_err(|e| reason(&e))?;
                        Ok(block)
                    });
                    match (checked, descriptor) {
                        (Ok(block), _) => Some(block),
                        // Without a descriptor it is unknown whether the bitmap was ever written.
                        (Err(_), None) => Some(new()),
                        (Err(why), Some(_)) => {
                            self.findings.add(Kind::Bitmap, Place::Group(*number), Fix::Elsewhere, || format!("bitmap: {why}"));
                            None
                        }
                    }
                }
            };
            stored.push(Stored { descriptor, bitmap });
        }
        Ok(stored)
    }

    /// Compares one group. Returns its free blocks and free chunks.
    fn group(&mut self, number: u64, stored: Stored, used: &mut Sorted<UseRecord>) -> Result<(u64, u64), FsError> {
        let geometry = self.geometry;
        let mut expected = self.expected(number, used)?;
        let mut wrong = Vec::new();
        match &stored.bitmap {
            Some(bitmap) => self.compare_bitmap(number, bitmap, &mut expected, &mut wrong),
            None => wrong.push(Kind::Bitmap),
        }
        let actual = stored.bitmap.as_deref().unwrap_or(&expected);
        let untouched = stored.descriptor.is_some_and(|d| !d.initialized);
        let counted = count(&geometry, number, actual, !untouched);
        match stored.descriptor {
            Some(descriptor) if descriptor == counted => {}
            Some(descriptor) => {
                let what = || format!("descriptor says {}, the bitmap {}", shown(&descriptor), shown(&counted));
                self.findings.add(Kind::Descriptor, Place::Group(number), Fix::Elsewhere, what);
                wrong.push(Kind::Descriptor);
            }
            None => wrong.push(Kind::Descriptors),
        }
        if wrong.is_empty() || !self.may(&wrong) {
            return Ok((counted.free_blocks.into(), counted.free_chunks.into()));
        }
        let right = count(&geometry, number, &expected, true);
        let (address, index) = geometry.descriptor(number);
        self.volume.wait(|| {
            let mut op = self.volume.begin()?;
            op.create(expected.clone())?;
            op.set_free_nodes(None);
            right.store(op.block_mut(address, BlockKind::Descriptors)?, index);
            op.finish();
            Ok(())
        })?;
        Ok((right.free_blocks.into(), right.free_chunks.into()))
    }

    /// The bitmap that a group should have.
    fn expected(&mut self, number: u64, used: &mut Sorted<UseRecord>) -> Result<Block, FsError> {
        let start = self.geometry.group_start(number);
        let end = start + self.geometry.group_chunks(number) * CHUNK_BLOCKS;
        let mut expected = group::new_bitmap(&self.geometry, number, &self.volume.superblock().uuid);
        let mut data = Vec::new();
        let mut mark = |record: &UseRecord| {
            let (from, to) = (record.start.max(start), record.end().min(end));
            if from >= to {
                return;
            }
            group::set(&mut expected, from - start, to - from, true);
            for chunk in (from - start) / CHUNK_BLOCKS..(to - start).div_ceil(CHUNK_BLOCKS) {
                if record.ino == INO_NONE {
                    group::set_kind(&mut expected, chunk, ChunkKind::Metadata);
                } else if group::kind(&expected, chunk) == ChunkKind::Free {
                    group::set_kind(&mut expected, chunk, ChunkKind::Data);
                }
            }
            if record.ino != INO_NONE && data.len() < RUNS_MAX {
                data.push(UseRecord { start: from, len: to - from, ..*record });
            }
        };
        self.cover.iter().for_each(&mut mark);
        while let Some(record) = used.next_if(|record| record.start < end)? {
            mark(&record);
            if let Some(cover) = self.cover.filter(|cover| cover.end() > record.start) {
                self.shared(&cover, &record);
            }
            if self.cover.is_none_or(|cover| cover.end() < record.end()) {
                self.cover = Some(record);
            }
        }
        if (0..GROUP_CHUNKS).any(|chunk| group::kind(&expected, chunk) == ChunkKind::Metadata) {
            for record in data {
                let (from, to) = (record.start - start, record.end() - start);
                for chunk in from / CHUNK_BLOCKS..to.div_ceil(CHUNK_BLOCKS) {
                    if group::kind(&expected, chunk) == ChunkKind::Metadata {
                        let (from, to) = (from.max(chunk * CHUNK_BLOCKS), to.min((chunk + 1) * CHUNK_BLOCKS));
                        let (block, len) = (start + from, to - from);
                        let fix = Fix::Unshare { ino: record.ino, block, len, copy: true, second: false };
                        let what = || format!("{len} blocks of inode {} lie in a chunk of metadata", record.ino);
                        self.findings.add(Kind::Misplaced, Place::Block(block), fix, what);
                    }
                }
            }
        }
        Ok(expected)
    }

    /// Reports blocks that two have. What is a node is no file's; of two files the second gets
    /// blocks of its own.
    fn shared(&mut self, first: &UseRecord, second: &UseRecord) {
        let len = first.end().min(second.end()) - second.start;
        let node = first.ino == INO_NONE || second.ino == INO_NONE;
        let ino = if second.ino == INO_NONE { first.ino } else { second.ino };
        let fix = Fix::Unshare { ino, block: second.start, len, copy: !node, second: first.ino == second.ino };
        let what = || match node {
            true => format!("{len} blocks of inode {ino} hold a node of the tree"),
            false => format!("{len} blocks are in use twice, by inodes {} and {}", first.ino, second.ino),
        };
        self.findings.add(Kind::Shared, Place::Block(second.start), fix, what);
    }

    /// Compares bitmaps. Where not all that is in use is known, what is marked stays so in
    /// `expected`.
    fn compare_bitmap(&mut self, number: u64, bitmap: &Block, expected: &mut Block, wrong: &mut Vec<Kind>) {
        let start = self.geometry.group_start(number);
        for chunk in 0..GROUP_CHUNKS {
            let (is, should) = (group::kind(bitmap, chunk), group::kind(expected, chunk));
            // An empty chunk of metadata stays one until a checkpoint.
            let resting = is == ChunkKind::Metadata && should == ChunkKind::Free;
            if is == should {
                continue;
            }
            if should == ChunkKind::Free && (resting && group::chunk_used(bitmap, chunk) == 0 || !self.whole) {
                group::set_kind(expected, chunk, is);
                continue;
            }
            let what = || format!("chunk {chunk} is {is:?}, holds {should:?}");
            self.findings.add(Kind::ChunkKind, Place::Group(number), Fix::Elsewhere, what);
            wrong.push(Kind::ChunkKind);
        }
        let (mut at, mut run) = (0, None);
        if group::same_bits(bitmap, expected) {
            return;
        }
        while at <= GROUP_BLOCKS {
            let state = (at < GROUP_BLOCKS).then(|| (group::is_used(bitmap, at), group::is_used(expected, at)));
            let differs = state.filter(|(is, should)| is != should).map(|(is, _)| is);
            if let Some((from, is)) = run.filter(|(_, is)| differs != Some(*is)) {
                self.wrong_bits(start, from, at, is, expected, wrong);
                run = None;
            }
            if let (Some(is), None) = (differs, run) {
                run = Some((at, is));
            }
            at += 1;
        }
    }

    fn wrong_bits(&mut self, start: u64, from: u64, to: u64, marked: bool, expected: &mut Block, wrong: &mut Vec<Kind>) {
        let len = to - from;
        if marked && !self.whole {
            group::set(expected, from, len, true);
            return;
        }
        let (kind, what) = match marked {
            true => (Kind::Leaked, "marked in use, and not in use"),
            false => (Kind::Unmarked, "in use, and marked free"),
        };
        self.findings.add(kind, Place::Block(start + from), Fix::Elsewhere, || format!("{len} blocks are {what}"));
        wrong.push(kind);
    }
}

/// The descriptor that a bitmap should have.
fn count(geometry: &Geometry, number: u64, bitmap: &Block, initialized: bool) -> Descriptor {
    let mut counted = Descriptor { free_blocks: 0, free_metadata: 0, free_chunks: 0, initialized };
    for chunk in 0..geometry.group_chunks(number) {
        let free = (CHUNK_BLOCKS - group::chunk_used(bitmap, chunk)) as u16;
        match group::kind(bitmap, chunk) {
            ChunkKind::Metadata => counted.free_metadata += free,
            ChunkKind::Data => counted.free_blocks += free,
            ChunkKind::Free => {
                counted.free_blocks += free;
                counted.free_chunks += 1;
            }
        }
    }
    counted
}

fn shown(descriptor: &Descriptor) -> String {
    let Descriptor { free_blocks, free_metadata, free_chunks, .. } = descriptor;
    format!("{free_blocks} blocks, {free_metadata} blocks for metadata and {free_chunks} chunks are free")
}
