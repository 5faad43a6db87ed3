//! Files in memory: what is known of a file that is open, or whose data is not on the device yet.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme_layout::Timestamp;
use parking_lot::{Condvar, Mutex};
use rustc_hash::FxHashMap;

use super::errors::Errors;
use super::pages::Pages;
use super::pieces::{FilePages, Pieces};
use crate::sharded::Sharded;
use crate::volume::Run;
use crate::volume::inode::in_order;

/// What the file's lock guards.
#[derive(Default)]
pub(crate) struct FileState {
    /// Times that it is open.
    pub opens: u32,
    /// Times that it is open so that it can be mapped shared and writable: the kernel may hold dirty pages.
    pub mappable: u32,
    /// Pages to be written.
    pub pages: Pieces<FilePages>,
    /// Pages of them that are dirty.
    pub dirty: u64,
    /// Pages of them that a block was promised for.
    pub promised: u64,
    /// Blocks that are being read into pages.
    pub fills: Fills,
    /// The block in which the file ends, as the device has it, for the next append to begin with. Kept from when it was written until content
    /// changes, or until the write buffer needs the page.
    pub last: Option<(u64, Pages)>,
    /// Pages that are being written. They do not change any more.
    pub writing: Pieces<Arc<Pages>>,
    /// Blocks that direct writes under way replace: what the device has there is neither old nor new.
    pub direct: Vec<Range<u64>>,
    /// How often the file was written out as a whole.
    pub flushes: Flushes,
    /// Batches of writes, and direct writes, that are under way.
    pub flights: Flights,
    /// Operations that wait for the flights to end, and hold direct writes back.
    pub holds: u32,
    /// Whether blocks beyond the end wait to be freed.
    pub truncation: Truncation,
    /// Size, when it is larger than the inode says.
    pub size: Option<u64>,
    /// What direct writes made the file longer by, and appends that went behind them, as long as the kernel may still believe that it
    /// ends somewhere in there.
    pub outgrown: Option<Range<u64>>,
    /// Times that the file was made shorter.
    pub shrinks: u64,
    /// Time of the last change of content, if the inode does not know of it. It replaces what the inode has, whatever that is: who sets
    /// that time takes this one away.
    pub changed: Option<Timestamp>,
    /// Time of the last change of content since the file was taken into memory.
    pub last_changed: Option<Timestamp>,
    /// Who may keep attributes of it.
    pub shown: Shown,
    /// Who has it open, and what of it was lost.
    pub errors: Errors,
    /// Where the next new block of the file best goes: (block of the file, block of the device).
    pub goal: Option<(u64, u64)>,
    /// Blocks reserved beyond the last write of a file that grows.
    pub window: Option<Run>,
    /// The bytes beyond the end, in the last block on the device, are known to be zeros.
    pub tail_is_zero: bool,
}

impl FileState {
    /// Whether nothing in memory is newer than the device.
    pub fn is_clean(&self) -> bool {
        self.flights.is_empty() && self.dirty == 0 && self.size.is_none() && self.changed.is_none()
    }

    /// Notes that the content of these blocks on the device changes.
    pub fn content_changes(&mut self, blocks: Range<u64>) {
        self.fills.spoil(blocks);
        self.last = None;
    }

    /// The time of a change of content that is noted now.
    pub fn time_of_change(&self, now: Timestamp) -> Timestamp {
        self.last_changed.map_or(now, |before| in_order(before, now))
    }

    /// Notes the time of a change of content, for the inode to learn of.
    pub fn changes_at(&mut self, now: Timestamp) {
        self.last_changed = Some(self.time_of_change(now));
        self.changed = self.last_changed;
    }

    /// Notes that the inode knows of all changes of content, the last of which was at that time.
    pub fn changed_at(&mut self, at: Timestamp) {
        (self.last_changed, self.changed) = (Some(at), None);
    }

    /// The newest content of a block that is in no page waiting to be written, if it is in memory: the memory, and which page of it.
    pub fn settled(&self, block: u64) -> Option<(&Pages, usize)> {
        let last = || self.last.as_ref().filter(|(number, _)| *number == block).map(|(_, page)| (page, 0));
        self.writing.find(block).or_else(last)
    }

    /// Notes that these blocks, which are in memory, have to be written.
    pub fn mark_dirty(&mut self, blocks: Range<u64>) {
        self.dirty += self.pages.change(blocks, |piece| !piece.dirty, |piece| piece.dirty = true);
    }

    /// Notes that the file becomes, or will become, longer by this, of which the kernel does not know.
    pub fn outgrows(&mut self, by: Range<u64>) {
        let known = self.outgrown.get_or_insert_with(|| by.clone());
        *known = known.start.min(by.start)..known.end.max(by.end);
    }

    /// Forgets an error that a caller knows of when none is left that could learn of it.
    pub fn forget_known_error(&mut self) {
        if self.opens == 0 {
            self.errors.closed();
        }
    }
}

/// Blocks that are being read from the device into pages, as long as nothing changes what is there.
#[derive(Default)]
pub(crate) struct Fills {
    begun: u64,
    /// Number and block of each.
    good: Vec<(u64, u64)>,
}

impl Fills {
    /// A block is about to be read. Returns the number of the fill.
    pub fn begin(&mut self, block: u64) -> u64 {
        self.begun += 1;
        self.good.push((self.begun, block));
        self.begun
    }

    /// Whether nothing has changed the block since.
    pub fn is_good(&self, number: u64) -> bool {
        self.good.iter().any(|(good, _)| *good == number)
    }

    /// It is over.
    pub fn end(&mut self, number: u64) {
        self.good.retain(|(good, _)| *good != number);
    }

    /// What is being read of these blocks may be out of date.
    pub fn spoil(&mut self, blocks: Range<u64>) {
        self.good.retain(|(_, block)| !blocks.contains(block));
    }
}

/// How long attributes may be on their way to whoever asked for them. (The kernel drops an answer that it was told to be out of date before it came, but not
/// that for a file that it did not know: only for that one the time counts.)
const ON_THE_WAY: Duration = Duration::from_millis(100);

/// When somebody was given attributes of a file, and when those who keep them were last told that they are out of date. Who is told of each write pays a
/// system call for each, and nobody keeps what was taken back.
pub(crate) struct Shown {
    given: Instant,
    taken_back: Option<Instant>,
}

impl Default for Shown {
    /// Somebody may have been given them just before the file was taken into memory.
    fn default() -> Shown {
        Shown { given: Instant::now(), taken_back: None }
    }
}

impl Shown {
    /// Somebody is given attributes.
    pub fn give(&mut self) {
        self.given = Instant::now();
    }

    /// Whoever keeps attributes knows that they are out of date; that was so at `since` already.
    pub fn take_back(&mut self, since: Instant) {
        self.taken_back = self.taken_back.max(Some(since));
    }

    /// Whether somebody may keep some. What was given shortly before the others were taken back may have come to whoever asked for it only after that.
    pub fn are_kept(&self) -> bool {
        self.taken_back.is_none_or(|taken_back| taken_back < self.given + ON_THE_WAY)
    }
}

/// Flushes of a file: each has on the device, when it is over, what was in memory or on its way when it began.
#[derive(Default)]
pub(crate) struct Flushes {
    /// How many have begun.
    pub begun: u64,
    /// The number of the last to have begun of those that are over.
    pub done: u64,
}

/// Writes of a file that are under way, numbered in the order in which they began.
#[derive(Default)]
pub(crate) struct Flights {
    begun: u64,
    /// In order.
    under_way: VecDeque<u64>,
}

impl Flights {
    /// A write begins. Returns its number.
    pub fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.under_way.push_back(self.begun);
        self.begun
    }

    /// A write is over.
    pub fn end(&mut self, number: u64) {
        if let Ok(at) = self.under_way.binary_search(&number) {
            self.under_way.remove(at);
        }
    }

    /// How many have begun so far: the number of the last.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// Whether all up to this number are over.
    pub fn are_over(&self, number: u64) -> bool {
        self.under_way.front().is_none_or(|first| *first > number)
    }

    /// Whether none is under way.
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether this one is all that is under way.
    pub fn is_last(&self, number: u64) -> bool {
        self.under_way.iter().eq([&number])
    }
}

/// Freeing what a file had beyond a new, smaller size takes many operations. Until it is over, the file must not grow: what lies
/// there would be the file's again.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// Nothing is left to be freed.
    #[default]
    Over,
    /// There is, and nobody is at it.
    Pending,
    /// Somebody is at it.
    UnderWay,
}

/// A file in memory.
pub(crate) struct File {
    /// Inode.
    pub ino: u64,
    /// Taken before the journal's and the metadata's locks, and never two files' at a time.
    pub state: Mutex<FileState>,
    /// A batch of writes ended, or what held others back.
    pub landed: Condvar,
}

/// The files in memory.
#[derive(Default)]
pub(crate) struct Files(Sharded<FxHashMap<u64, Arc<File>>>);

impl Files {
    /// The file, if it is in memory.
    pub fn find(&self, ino: u64) -> Option<Arc<File>> {
        self.0.lock(ino).get(&ino).cloned()
    }

    /// Whether each of several files is in memory.
    pub fn are_in_memory(&self, inos: &[u64]) -> Vec<bool> {
        let mut found = vec![false; inos.len()];
        self.0.lock_all(inos, |places, shard| places.iter().for_each(|place| found[*place] = shard.contains_key(&inos[*place])));
        found
    }

    /// The file, taken into memory when it was not there.
    pub fn get(&self, ino: u64) -> Arc<File> {
        let mut shard = self.0.lock(ino);
        let file = || Arc::new(File { ino, state: Mutex::default(), landed: Condvar::new() });
        shard.entry(ino).or_insert_with(file).clone()
    }

    /// Lets go of a file that nobody has open and that has nothing to write. Returns the blocks it had reserved ahead.
    pub fn release(&self, file: &Arc<File>) -> Option<Run> {
        let mut shard = self.0.lock(file.ino);
        // Whoever has the lock is using the file; and nobody waits here, since completions come by.
        let mut state = file.state.try_lock()?;
        // Two handles: the table's, and the caller's. With more, somebody is about to use it.
        let idle = state.opens == 0 && state.is_clean() && state.pages.is_empty() && state.errors.is_empty();
        let idle = idle && state.truncation == Truncation::Over;
        if !idle || Arc::strong_count(file) > 2 {
            return None;
        }
        let window = state.window.take();
        drop(state);
        shard.remove(&file.ino);
        window
    }

    /// All files in memory.
    pub fn all(&self) -> Vec<Arc<File>> {
        self.0.lock_each().flat_map(|shard| shard.values().cloned().collect::<Vec<_>>()).collect()
    }
}
