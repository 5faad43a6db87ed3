//! The memory of a ring, mapped. It guards the rule that makes sharing it with a process that may
//! be hostile sound: no reference into it is ever made; words and entries are read and written
//! with atomic operations, 32 or 64 bits at a time, and what was read is a copy.

use crate::ring::{Completion, Submission, Word, completion_offset, ring_bytes, submission_offset};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use zerocopy::transmute;

/// The memory of a ring.
#[derive(Debug)]
pub struct RingMemory {
    base: NonNull<u8>,
    entries: u32,
}

// SAFETY: a mapping belongs to the whole process, and everything in it is accessed atomically.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl RingMemory {
    /// Maps the memory of a ring of `entries` entries, a power of two.
    ///
    /// The file must be a memfd of at least [`ring_bytes`] bytes that cannot become shorter
    /// (`F_SEAL_SHRINK`): touching a page past its end would be a SIGBUS.
    pub fn map(memory: BorrowedFd<'_>, entries: u32) -> Result<RingMemory, Errno> {
        assert!(entries.is_power_of_two(), "a ring has a power of two of entries");
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // Every page is there from the start, so that none has to be found while the ring is used.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let base = unsafe { rustix::mm::mmap(ptr::null_mut(), ring_bytes(entries), access, flags, memory, 0) }?;
        Ok(RingMemory { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, entries })
    }

    /// Entries of each queue.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Its first byte, for who maps it to a device. It is shared memory: what lies there changes at
    /// any time.
    pub fn address(&self) -> NonNull<u8> {
        self.base
    }

    /// The value of a word; what was written before the other side stored it is seen.
    pub fn load(&self, word: Word) -> u32 {
        self.word(word).load(Ordering::Acquire)
    }

    /// Stores a word with release ordering: a side that loads this value sees what was written
    /// before.
    pub fn store(&self, word: Word, value: u32) {
        self.word(word).store(value, Ordering::Release);
    }

    /// Stores a word and returns what it was, with a full barrier.
    pub fn swap(&self, word: Word, value: u32) -> u32 {
        self.word(word).swap(value, Ordering::SeqCst)
    }

    /// A copy of the submission at a position.
    pub fn submission(&self, position: u32) -> Submission {
        transmute!(self.copy_out(submission_offset(self.entries, position)))
    }

    /// Writes the submission at a position.
    pub fn put_submission(&self, position: u32, submission: &Submission) {
        self.copy_in(submission_offset(self.entries, position), transmute!(*submission));
    }

    /// A copy of the completion at a position.
    pub fn completion(&self, position: u32) -> Completion {
        transmute!(self.copy_out(completion_offset(self.entries, position)))
    }

    /// Writes the completion at a position.
    pub fn put_completion(&self, position: u32, completion: &Completion) {
        self.copy_in(completion_offset(self.entries, position), transmute!(*completion));
    }

    fn word(&self, word: Word) -> &AtomicU32 {
        // SAFETY: the word lies inside the mapping, which lives as long as `self`, and is aligned
        // to a cache line. All accesses are atomic.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(word.offset()).cast()) }
    }

    /// An entry, as eight 64-bit words that may be of different moments.
    fn entry(&self, offset: usize) -> &[AtomicU64; 8] {
        // SAFETY: positions are taken modulo the number of entries, so the entry lies inside the
        // mapping, aligned to its 64 bytes. All accesses are atomic.
        unsafe { &*self.base.as_ptr().add(offset).cast() }
    }

    fn copy_out(&self, offset: usize) -> [u64; 8] {
        self.entry(offset).each_ref().map(|word| word.load(Ordering::Relaxed))
    }

    fn copy_in(&self, offset: usize, words: [u64; 8]) {
        self.entry(offset).iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        // SAFETY: this is the range that was mapped; no reference into it outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), ring_bytes(self.entries)) };
        debug_assert!(unmapped.is_ok(), "a mapping of ours was already unmapped");
    }
}
