//! Chunks that data is on its way to. Those that are free by their bitmap are not: metadata cannot
//! have them any more.

use rustc_hash::FxHashMap;

use gpunvme_layout::geometry::CHUNK_BLOCKS;

use super::run::Run;

/// The chunks with reserved blocks, by number: their first block divided by their length.
#[derive(Default)]
pub(crate) struct ReservedChunks {
    chunks: FxHashMap<u64, Reserved>,
    /// Those of them that are free by their bitmap.
    free: u64,
}

struct Reserved {
    /// How many blocks.
    blocks: u64,
    /// The bitmap has the chunk as wholly free.
    is_free: bool,
}

impl ReservedChunks {
    /// How many are free by their bitmap.
    pub fn free(&self) -> u64 {
        self.free
    }

    /// Whether a chunk, by its first block, has reserved blocks.
    pub fn contains(&self, start: u64) -> bool {
        self.chunks.contains_key(&(start / CHUNK_BLOCKS))
    }

    /// Adds blocks of one chunk; `is_free`: the bitmap has that as wholly free.
    pub fn add(&mut self, part: Run, is_free: bool) {
        let chunk = self.chunks.entry(part.start / CHUNK_BLOCKS).or_insert_with(|| {
            self.free += u64::from(is_free);
            Reserved { blocks: 0, is_free }
        });
        chunk.blocks += part.len;
    }

    /// Notes that the bitmap has a chunk with reserved blocks as wholly free.
    pub fn becomes_free(&mut self, start: u64) {
        let chunk = self.chunks.get_mut(&(start / CHUNK_BLOCKS)).expect("it has reserved blocks");
        self.free += u64::from(!chunk.is_free);
        chunk.is_free = true;
    }

    /// Takes reserved blocks out; `claimed`: a file has them now, and their chunks hold data.
    pub fn remove(&mut self, run: Run, claimed: bool) {
        for part in parts(run) {
            let number = part.start / CHUNK_BLOCKS;
            let chunk = self.chunks.get_mut(&number).expect("only reserved blocks are taken out");
            chunk.blocks -= part.len;
            let is_gone = chunk.blocks == 0;
            if chunk.is_free && (claimed || is_gone) {
                chunk.is_free = false;
                self.free -= 1;
            }
            if is_gone {
                self.chunks.remove(&number);
            }
        }
    }
}

/// The parts of a run that lie in one chunk each.
pub(crate) fn parts(run: Run) -> impl Iterator<Item = Run> {
    (run.start / CHUNK_BLOCKS..=(run.end() - 1) / CHUNK_BLOCKS).map(move |chunk| {
        let (start, end) = (run.start.max(chunk * CHUNK_BLOCKS), run.end().min((chunk + 1) * CHUNK_BLOCKS));
        Run { start, len: end - start }
    })
}
