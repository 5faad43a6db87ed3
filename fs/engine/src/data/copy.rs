//! Copying between files without a detour through the caller (copy_file_range(2)).

use std::sync::Arc;

use gpunvme_layout::Timestamp;

use super::filesystem::Filesystem;
use crate::error::FsError;

/// Bytes that are copied at once.
const STEP: u64 = 1 << 20;

impl Filesystem {
    /// Copies bytes from one place to another, holes included; returns how many: fewer where the
    /// source ends. Waits for the device.
    ///
    /// # Errors
    /// As reading and writing.
    pub fn copy_range(self: &Arc<Self>, from: (u64, u64), to: (u64, u64), len: u64, now: Timestamp) -> Result<u64, FsError> {
        let mut done = 0;
        while done < len {
            match self.copy_step((from.0, from.1 + done), (to.0, to.1 + done), (len - done).min(STEP), now) {
                Ok(0) => break,
                Ok(copied) => done += copied,
                // Bytes copied before count; the next call meets the error.
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    fn copy_step(self: &Arc<Self>, from: (u64, u64), to: (u64, u64), len: u64, now: Timestamp) -> Result<u64, FsError> {
        let bytes = self.read(from.0, from.1, len as usize)?;
        self.wait(|| self.write(to.0, to.1, &bytes, now))?;
        self.write_behind(to.0);
        Ok(bytes.len() as u64)
    }
}
