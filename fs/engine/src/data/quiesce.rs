//! Holding direct writes of a file back, for who waits until none is under way: they come past the kernel's lock of the file, and
//! in a stream of them there is always one.

use std::sync::Arc;

use super::file::File;
use super::filesystem::Filesystem;

/// While it lives, no direct write of a file begins: it stalls.
pub(super) struct Hold {
    fs: Arc<Filesystem>,
    file: Arc<File>,
}

impl Filesystem {
    /// Holds direct writes of a file back.
    pub(super) fn hold(self: &Arc<Self>, ino: u64) -> Hold {
        let file = self.files.get(ino);
        file.state.lock().holds += 1;
        Hold { fs: self.clone(), file }
    }

    /// Waits until nobody holds direct writes of a file back.
    pub(super) fn wait_while_held(&self, ino: u64) {
        let Some(file) = self.files.find(ino) else { return };
        let mut state = file.state.lock();
        self.wait_until(&file, &mut state, |state| state.holds == 0);
    }
}

impl Hold {
    /// The file that it is about.
    pub fn ino(&self) -> u64 {
        self.file.ino
    }

    /// Waits for the writes of the file that are under way.
    pub fn wait(&self) {
        let mut state = self.file.state.lock();
        let last = state.flights.begun();
        self.fs.wait_until(&self.file, &mut state, |state| state.flights.are_over(last));
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.file.state.lock().holds -= 1;
        self.file.landed.notify_all();
        self.fs.release(&self.file);
    }
}
