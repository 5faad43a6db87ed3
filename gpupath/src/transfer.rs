//! Carries out a plan to read: commands straight into the buffer, and beside them reads of the
//! blocks that hold the edges, from which the CPU copies.
//!
//! It guards the buffer's life (it is held until the last byte has arrived) and the daemon's
//! memory: however much of a transfer is edges, they go through at most 1 MiB at a time.

use crate::planner::{Alignment, Plan};
use crate::registry::Buffer;
use gpunvme_blockdev::{BufferPool, Error, Io, Request};
use std::sync::Arc;

/// The most bytes of edges that one transfer reads at once. They are copied on the thread that
/// reaps completions, which others wait for.
const EDGE_BYTES: u64 = 1 << 20;

/// A device's error, and the segment that met it where that can be told.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Failed {
    /// The first error of any command.
    pub error: Error,
    /// Index of the segment that it belongs to.
    pub segment: Option<u32>,
}

impl Failed {
    /// Says which segment of a plan an error belongs to.
    pub fn new(error: Error, plan: &Plan) -> Failed {
        let segment = error.offset().and_then(|offset| plan.segment_at(offset));
        Failed { error, segment }
    }
}

/// Fills holes of a plan to read into `buffer`, at most `most` bytes of them: a caller with many
/// fills them in turns with others. Returns whether none is left.
///
/// # Errors
/// The buffer's memory does not answer.
pub fn fill(plan: &mut Plan, buffer: &Buffer, mut most: u64) -> Result<bool, Failed> {
    // A client that took pages out of its buffer after registering it gets none of the daemon's
    // for holes.
    if !plan.zeroes.is_empty() && !buffer.region.is_allocated() {
        return Err(Failed { error: Error::RegionSparse, segment: None });
    }
    while let Some(last) = plan.zeroes.last_mut() {
        if most == 0 {
            return Ok(false);
        }
        let len = last.len.min(most);
        last.len -= len;
        most -= len;
        let offset = last.buffer_offset + last.len;
        buffer.region.zero_at(offset as usize, len as usize).map_err(|error| Failed { error, segment: None })?;
        if last.len == 0 {
            plan.zeroes.pop();
        }
    }
    Ok(true)
}

/// Carries out a plan to read into `buffer`.
///
/// Holes that are left to [`fill`] are filled on the calling thread, at the speed of memory,
/// before anything is submitted. `done` is called once, from the thread that reaps completions (of
/// [`Io::inline`]: from this one). After an error any part of the segments may have been
/// overwritten.
pub fn read(
    io: &Arc<Io>,
    pool: &Arc<BufferPool>,
    alignment: Alignment,
    mut plan: Plan,
    buffer: Arc<Buffer>,
    done: impl FnOnce(Result<(), Failed>) + Send + 'static,
) {
    if let Err(failed) = fill(&mut plan, &buffer, u64::MAX) {
        return done(Err(failed));
    }
    let requests = std::mem::take(&mut plan.requests);
    if plan.edges.is_empty() {
        return io.submit(requests, move |result| end(result, &plan, buffer, done));
    }
    let pieces = pieces(&plan, alignment.block);
    let read = Read { io: io.clone(), pool: pool.clone(), plan, buffer, pieces, next: 0, done: Box::new(done) };
    read.round(requests.into_vec());
}

/// A part of an edge, and the whole blocks that hold it.
struct EdgePiece {
    device_offset: u64,
    blocks: u64,
    /// Where in the blocks it begins.
    skip: u64,
    len: u64,
    buffer_offset: u64,
}

/// Cuts edges into pieces whose blocks fit a round.
fn pieces(plan: &Plan, block: u64) -> Vec<EdgePiece> {
    let mut pieces = Vec::with_capacity(plan.edges.len());
    for edge in &plan.edges {
        let mut at = edge.device_offset.expect("the edges of a plan to read have a place");
        let end = at + edge.len;
        let mut buffer_offset = edge.buffer_offset;
        while at < end {
            let device_offset = at - at % block;
            let stop = end.min(device_offset + EDGE_BYTES);
            let blocks = stop.next_multiple_of(block) - device_offset;
            pieces.push(EdgePiece { device_offset, blocks, skip: at - device_offset, len: stop - at, buffer_offset });
            buffer_offset += stop - at;
            at = stop;
        }
    }
    pieces
}

struct Read {
    io: Arc<Io>,
    pool: Arc<BufferPool>,
    plan: Plan,
    buffer: Arc<Buffer>,
    pieces: Vec<EdgePiece>,
    /// The first piece not yet read.
    next: usize,
    done: Box<dyn FnOnce(Result<(), Failed>) + Send>,
}

impl Read {
    /// Submits `requests` together with the next pieces, and goes on from their completion.
    fn round(mut self, mut requests: Vec<Request>) {
        let first = self.next;
        let mut bytes = 0;
        while let Some(piece) = self.pieces.get(self.next)
            && bytes + piece.blocks <= EDGE_BYTES
        {
            bytes += piece.blocks;
            self.next += 1;
        }
        if first == self.next {
            let io = self.io.clone();
            return io.submit(requests, move |result| self.finish(result));
        }
        let mut blocks = match self.pool.get(bytes as usize) {
            Ok(blocks) => blocks,
            // Nothing was submitted in this round.
            Err(error) => return self.finish(Err(error)),
        };
        let mut at = 0;
        for piece in &self.pieces[first..self.next] {
            requests.push(Request::read(piece.device_offset, [blocks.span(at..at + piece.blocks as usize)]));
            at += piece.blocks as usize;
        }
        let io = self.io.clone();
        io.submit(requests, move |result| {
            let copied = result.and_then(|()| {
                let mut at = 0;
                for piece in &self.pieces[first..self.next] {
                    let from = at + piece.skip as usize;
                    self.buffer
                        .region
                        .write_at(piece.buffer_offset as usize, &blocks.bytes()[from..from + piece.len as usize])?;
                    at += piece.blocks as usize;
                }
                Ok(())
            });
            match copied {
                Ok(()) if self.next < self.pieces.len() => self.round(Vec::new()),
                result => self.finish(result),
            }
        });
    }

    fn finish(self, result: Result<(), Error>) {
        end(result, &self.plan, self.buffer, self.done);
    }
}

fn end(result: Result<(), Error>, plan: &Plan, buffer: Arc<Buffer>, done: impl FnOnce(Result<(), Failed>)) {
    let result = result.map_err(|error| Failed::new(error, plan));
    // Before the answer: an application that unregisters after it finds the memory free.
    drop(buffer);
    done(result);
}
