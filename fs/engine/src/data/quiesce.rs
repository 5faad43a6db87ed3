//! Quiescing a file: no further direct write of it begins, so that a caller can wait for those in
//! flight. Direct writes do not take the kernel's lock of the file, and in a stream of them one is
//! always in flight.
//!
//! Two callers quiesce: `wait.rs`, for an operation that stalled because writes are in flight (a
//! truncate, a fallocate), and `write.rs`, for a page whose block direct writes keep replacing.

use std::sync::Arc;

use super::file::File;
use super::filesystem::Filesystem;

/// A quiesced file: while this lives, a direct write of the file stalls instead of beginning.
pub(super) struct Quiesced {
    fs: Arc<Filesystem>,
    file: Arc<File>,
}

impl Filesystem {
    /// Keeps further direct writes of a file from beginning.
    pub(super) fn quiesce(self: &Arc<Self>, ino: u64) -> Quiesced {
        let file = self.files.get(ino);
        file.state.lock().in_flight.quiescers += 1;
        Quiesced { fs: self.clone(), file }
    }

    /// Waits until direct writes of a file may begin again.
    pub(super) fn wait_while_quiesced(&self, ino: u64) {
        let Some(file) = self.files.find(ino) else { return };
        let mut state = file.state.lock();
        self.wait_until(&file, &mut state, |state| state.in_flight.quiescers == 0);
    }
}

impl Quiesced {
    /// The file that it is about.
    pub fn ino(&self) -> u64 {
        self.file.ino
    }

    /// Waits for the writes of the file that are in flight.
    pub fn wait(&self) {
        let mut state = self.file.state.lock();
        let last = state.in_flight.writes.begun();
        self.fs.wait_until(&self.file, &mut state, |state| state.in_flight.writes.are_over(last));
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.file.state.lock().in_flight.quiescers -= 1;
        self.file.landed.notify_all();
        self.fs.release(&self.file);
    }
}
