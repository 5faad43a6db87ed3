//! Staging memory: host memory that the device reaches, through which other host memory goes.

use gpunvme::{Buffer, Error, Mount, Registered, Result};
use parking_lot::Mutex;

/// Bytes of a piece of staging memory: enough for the device to be busy, little enough to stay in
/// the processor's cache until it is copied on.
pub const PIECE: usize = 4 << 20;

/// Staging memory, in pieces that are used by one request at a time.
#[derive(Default)]
pub struct Staging {
    free: Mutex<Vec<Registered<Buffer>>>,
}

impl Staging {
    /// Does something with a piece that nothing else uses.
    ///
    /// # Errors
    /// What it says; those of [`Mount::register`] where a further piece cannot be had.
    pub fn with<T>(&self, mount: &Mount, work: impl FnOnce(&mut Registered<Buffer>) -> Result<T>) -> Result<T> {
        let free = self.free.lock().pop();
        let mut piece = match free {
            Some(piece) => piece,
            None => mount.register(Buffer::memfd(PIECE)?)?,
        };
        let done = work(&mut piece);
        // One that the daemon knew is nothing to the next.
        if !matches!(done, Err(Error::LostBuffer { .. })) {
            self.free.lock().push(piece);
        }
        done
    }
}
