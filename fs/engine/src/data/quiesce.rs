//! Quiescing a file: no further direct write of it begins, so that those in flight can be waited
//! for. Direct writes come past the kernel's lock of the file, and in a stream of them one is
//! always in flight.

use std::sync::Arc;

use super::file::File;
use super::filesystem::Filesystem;

/// While it lives, no direct write of a file begins: it stalls.
pub(super) struct Quiesced {
    fs: Arc<Filesystem>,
    file: Arc<File>,
}

impl Filesystem {
    /// Has no further direct write of a file begin.
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
