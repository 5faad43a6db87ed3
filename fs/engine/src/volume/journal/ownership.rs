//! Ownership: detects that another program took the volume (formatted, mounted or repaired it)
//! while it is mounted here.
//!
//! A mount remembers the superblock and the anchors as it read or wrote them. It reads them again
//! before it writes an anchor, and before commits as often as [`Volume::look_again`] asks. If the
//! device has others, another program has changed the volume, and nothing more is written.

use std::sync::atomic::Ordering;

use gpunvme_layout::Anchor;

use super::anchors::{Anchors, FRONT};
use crate::error::FsError;
use crate::volume::io::{read_scattered, write_block};
use crate::volume::open::Volume;
use crate::volume::promised::Promised;

impl Volume {
    /// Makes the next commit check whether the volume on the device is still this mount's. Called
    /// by time.
    pub fn look_again(&self) {
        self.look_again.store(true, Ordering::Relaxed);
    }

    /// Checks whether the volume on the device is still this mount's, if there is something to
    /// write.
    ///
    /// # Errors
    /// [`FsError::Taken`]: it is not, and nothing more is written.
    pub fn look_before_writing(&self) -> Result<(), FsError> {
        let waits = {
            let meta = self.meta.read();
            meta.promised != Promised::default() || !meta.running.is_empty()
        };
        if waits { self.look().map_err(|e| self.fail(e)) } else { Ok(()) }
    }

    /// Checks whether the volume on the device is still this mount's.
    ///
    /// # Errors
    /// [`FsError::Taken`]: it is not, and nothing more is written.
    pub fn is_ours(&self) -> Result<(), FsError> {
        let anchors = self.lock(&self.anchors);
        self.is_still_ours(&anchors).map_err(|e| self.fail(e))
    }

    /// Checks whether the volume on the device is still this mount's, if it is time to.
    pub(super) fn look(&self) -> Result<(), FsError> {
        if self.look_again.load(Ordering::Relaxed)
            // A checkpoint that is in flight looks itself.
            && let Some(anchors) = self.anchors.try_lock()
        {
            self.look_again.store(false, Ordering::Relaxed);
            self.is_still_ours(&anchors)?;
        }
        Ok(())
    }

    /// Fails when the superblock or an anchor on the device is another than this mount read or
    /// wrote there.
    pub(in crate::volume) fn is_still_ours(&self, anchors: &Anchors) -> Result<(), FsError> {
        // A device that cannot read is no proof of anything.
        let Ok(now) = read_scattered(&self.io, &FRONT) else { return Ok(()) };
        if anchors.front.iter().zip(&now).any(|(known, now)| known.as_ref().is_some_and(|known| known != now)) {
            return Err(FsError::Taken { device: self.io.device().name().to_owned() });
        }
        Ok(())
    }

    /// Takes for this mount's what is at the start of the device now: a repair has written
    /// superblocks.
    pub(crate) fn know_front(&self) {
        let mut anchors = self.lock(&self.anchors);
        *anchors = Anchors::read(&self.io, anchors.generation);
    }

    pub(super) fn write_anchor(&self, anchors: &mut Anchors, anchor: &Anchor) -> Result<(), FsError> {
        self.is_still_ours(anchors)?;
        let (block, address) = (anchor.encode(&self.superblock.uuid), anchor.address());
        write_block(&self.io, &block, address)?;
        anchors.generation = anchor.generation;
        for (known, _) in anchors.front.iter_mut().zip(FRONT).filter(|(_, of)| *of == address) {
            *known = Some(block.clone());
        }
        Ok(())
    }
}
