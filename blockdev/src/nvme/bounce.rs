//! Bounce buffers: memory of a queue's own, for requests on memory that the controller cannot
//! reach. Each queue has its own chunks: a request that waits for a chunk waits for a command of
//! the same queue, so that queues cannot wait for each other.
use std::sync::Arc;

use super::dma::{Dma, DmaMemory};
use super::scatter::Cursor;
use crate::{Result, Span};

/// Chunks a queue.
const CHUNKS: usize = 16;

pub(super) struct Bounce {
    memory: DmaMemory,
    /// Bytes of a chunk.
    chunk: usize,
    free: Vec<usize>,
    /// Bytes on their way between chunk and region.
    scratch: Vec<u8>,
}

impl Bounce {
    pub(super) fn new(dma: &Arc<Dma>, chunk: u64) -> Result<Self> {
        let chunk = chunk as usize;
        let memory = dma.allocate(CHUNKS * chunk)?;
        Ok(Self { memory, chunk, free: (0..CHUNKS).collect(), scratch: vec![0; chunk] })
    }

    /// A chunk, if one is free.
    pub(super) fn take(&mut self) -> Option<usize> {
        self.free.pop()
    }

    /// Gives a chunk back.
    pub(super) fn put(&mut self, chunk: usize) {
        self.free.push(chunk);
    }

    /// Where a chunk is.
    pub(super) fn iova(&self, chunk: usize) -> u64 {
        self.memory.iova(chunk * self.chunk)
    }

    /// Copies `len` bytes of the spans, from the cursor on, into a chunk.
    pub(super) fn fill(&mut self, chunk: usize, spans: &[Span], cursor: &Cursor, len: usize) -> Result<()> {
        let scratch = &mut self.scratch[..len];
        cursor.walk(spans, len, |span, offset, range| span.region.read_at(offset, &mut scratch[range]))?;
        self.memory.write(chunk * self.chunk, &*scratch);
        Ok(())
    }

    /// Copies `len` bytes of a chunk to the spans, from the cursor on.
    pub(super) fn empty(&mut self, chunk: usize, spans: &[Span], cursor: &Cursor, len: usize) -> Result<()> {
        let scratch = &mut self.scratch[..len];
        self.memory.read_bytes(chunk * self.chunk, scratch);
        cursor.walk(spans, len, |span, offset, range| span.region.write_at(offset, &scratch[range]))
    }
}
