//! The table of files in memory.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use super::state::{File, Truncation};
use crate::sharded::Sharded;
use crate::volume::Run;

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
        shard.entry(ino).or_insert_with(|| Arc::new(File::new(ino))).clone()
    }

    /// Drops a file from memory if it is not in use and has nothing to write. Returns the blocks
    /// that it had reserved ahead.
    pub fn release(&self, file: &Arc<File>) -> Option<Run> {
        let mut shard = self.0.lock(file.ino);
        // A thread that has the lock is using the file. Completions call this too, so it does not
        // wait.
        let mut state = file.state.try_lock()?;
        // Two handles: the table's, and the caller's. With more, another thread is about to use it.
        let idle = !state.is_in_use() && state.is_clean() && state.buffer.pages.is_empty() && state.errors.is_empty();
        let idle = idle && state.truncation == Truncation::Over;
        if !idle || Arc::strong_count(file) > 2 {
            return None;
        }
        let ahead = state.allocation.ahead.take();
        drop(state);
        shard.remove(&file.ino);
        ahead
    }

    /// All files in memory.
    pub fn all(&self) -> Vec<Arc<File>> {
        self.0.lock_each().flat_map(|shard| shard.values().cloned().collect::<Vec<_>>()).collect()
    }
}
