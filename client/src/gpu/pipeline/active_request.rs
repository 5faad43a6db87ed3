//! A request that an executor works on: how much of it was cut into pieces.

use super::copy_stream::SlotUser;
use crate::gpu::outcome::Outcome;
use crate::gpu::page_cache::cached_file::Cached;
use crate::gpu::page_cache::gpu_reads::BY_KERNEL;
use crate::gpu::request::Request;
use gpunvme_cuda::Gpu;

/// A request that is being done.
pub struct ActiveRequest {
    pub request: Request,
    /// The part to be cut next, and how much of it was.
    pub part: usize,
    pub within: u64,
    /// What was copied from a cached range in vain, and comes first.
    pub again: Vec<Uncut>,
    pub in_flight: usize,
    /// The request waits for a turn, and is not answered before it.
    pub in_turns: bool,
    /// The page cache had not got all of the piece for which it was last asked.
    pub was_absent: bool,
    pub outcome: Outcome,
}

/// A range of a part that is to be cut.
#[derive(Clone, Copy)]
pub struct Uncut {
    pub part: usize,
    pub within: u64,
    pub len: u64,
    /// Whether it may be copied from a cached range.
    pub cached: bool,
}

impl ActiveRequest {
    /// One of which nothing was cut, and for which `was_absent` is a guess.
    pub fn new(request: Request, was_absent: bool) -> ActiveRequest {
        let (again, outcome) = (Vec::new(), Outcome::default());
        ActiveRequest { request, part: 0, within: 0, again, in_flight: 0, in_turns: true, was_absent, outcome }
    }

    /// What is to be cut next.
    pub fn next(&self) -> Option<Uncut> {
        if self.outcome.is_failed() {
            return None;
        }
        self.again.last().copied().or_else(|| {
            let part = self.request.parts.get(self.part)?;
            Some(Uncut { part: self.part, within: self.within, len: part.len - self.within, cached: true })
        })
    }

    /// The GPU whose copies the next piece needs.
    pub fn next_gpu(&self) -> Option<Gpu> {
        let part = &self.request.parts[self.next()?.part];
        part.registered.is_err().then_some(part.allocation.gpu)
    }

    /// What will most likely use a range's slot: whether the page cache has it is asked for each
    /// piece when it has one.
    pub fn slot_user(&self, range: Uncut) -> SlotUser {
        let is_asked = range.cached && self.request.resident.is_ok();
        if is_asked && !self.was_absent { SlotUser::PageCache } else { SlotUser::Device }
    }

    /// So much of what is next was cut.
    pub fn advance(&mut self, len: u64) {
        match self.again.last_mut() {
            Some(again) if again.len > len => (again.within, again.len) = (again.within + len, again.len - len),
            Some(_) => drop(self.again.pop()),
            None => self.within += len,
        }
    }

    /// The cached range that a range begins in, if it may be read from there, and how far the range
    /// goes without another.
    pub fn cached_range(&self, range: Uncut) -> (Option<Cached>, u64) {
        let part = &self.request.parts[range.part];
        match &self.request.cached {
            Some((file, now)) if range.cached && part.is_copied_to() => {
                let (cached_range, left) = file.range_at(part.file_offset + range.within, *now);
                let left = left.min(range.len);
                // Few bytes are moved by a kernel, if kernels reach where they go.
                (cached_range.filter(|_| left > BY_KERNEL || part.allocation.by_kernel), left)
            }
            _ => (None, range.len),
        }
    }
}
