//! The table of files in memory.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::state::{File, Truncation};
use crate::sharded::Sharded;
use crate::volume::Run;

/// The files in memory.
///
/// Locks: a shard's, then a file's state, then `dirty`, each for moments.
#[derive(Default)]
pub(crate) struct Files {
    table: Sharded<FxHashMap<u64, Arc<File>>>,
    /// Inodes of files that became dirty, in that order; also of such as are clean or gone by now.
    dirty: Mutex<VecDeque<u64>>,
}

impl Files {
    /// The file, if it is in memory.
    pub fn find(&self, ino: u64) -> Option<Arc<File>> {
        self.table.lock(ino).get(&ino).cloned()
    }

    /// Whether each of several files is in memory.
    pub fn are_in_memory(&self, inos: &[u64]) -> Vec<bool> {
        let mut found = vec![false; inos.len()];
        self.table
            .lock_all(inos, |places, shard| places.iter().for_each(|place| found[*place] = shard.contains_key(&inos[*place])));
        found
    }

    /// The file, taken into memory when it was not there.
    pub fn get(&self, ino: u64) -> Arc<File> {
        let mut shard = self.table.lock(ino);
        shard.entry(ino).or_insert_with(|| Arc::new(File::new(ino))).clone()
    }

    /// Drops a file from memory if it is not in use and has nothing to write. Returns the blocks
    /// that it had reserved ahead.
    pub fn release(&self, file: &Arc<File>) -> Option<Run> {
        let mut shard = self.table.lock(file.ino);
        // A thread that has the lock is using the file. Completions call this too, so it does not
        // wait.
        let mut state = file.state.try_lock()?;
        // Two handles: the table's, and the caller's. With more, another thread is about to use it.
        let idle = !state.is_in_use() && state.is_clean() && state.buffer.pages.is_empty() && state.errors.is_empty();
        let idle = idle && matches!(state.truncation, Truncation::Unknown | Truncation::Over);
        if !idle || Arc::strong_count(file) > 2 {
            return None;
        }
        let ahead = state.allocation.ahead.take();
        drop(state);
        shard.remove(&file.ino);
        ahead
    }

    /// Notes that a file became dirty.
    pub fn became_dirty(&self, ino: u64) {
        self.dirty.lock().push_back(ino);
    }

    /// Takes the inode from the list that has been on it for the longest.
    pub fn next_dirty(&self) -> Option<u64> {
        self.dirty.lock().pop_front()
    }

    /// Length of the list of inodes that became dirty.
    pub fn dirty(&self) -> usize {
        self.dirty.lock().len()
    }

    /// All files in memory.
    pub fn all(&self) -> Vec<Arc<File>> {
        self.table.lock_each().flat_map(|shard| shard.values().cloned().collect::<Vec<_>>()).collect()
    }
}
