//! Removing inodes that have no name, once the kernel has forgotten them.
//!
//! Those that are forgotten while a thread removes others are left to that thread, which removes
//! several in one operation: the metadata lock is taken once for them, and what they share in the
//! tree is changed by one processor.

use std::sync::Arc;

use gpunvme_engine::error::{Fail, FsError};

use crate::front::messages;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;

/// Times that a thread removes some before it leaves the rest to one that has nothing else to do.
const ROUNDS: usize = 4;

impl Front {
    /// Removes orphans that the kernel has forgotten, or leaves them to a thread that removes
    /// others.
    pub(crate) fn remove(self: &Arc<Self>, inos: impl IntoIterator<Item = u64>) {
        if !self.removals.add(inos) {
            return;
        }
        for _ in 0..ROUNDS {
            if !self.remove_some() {
                return;
            }
        }
        let front = self.clone();
        self.general.run(move || while !front.general.is_ending() && front.remove_some() {});
    }

    /// Removes the next orphans. Returns whether there may be more.
    fn remove_some(self: &Arc<Self>) -> bool {
        let inos = self.removals.next();
        if inos.is_empty() {
            return false;
        }
        // What stands in the way of one is that one's own.
        if matches!(self.fs.reap_together(&inos), Ok(true)) {
            inos.iter().for_each(|ino| self.removed(*ino, Ok(())));
        } else {
            inos.iter().for_each(|ino| self.remove_alone(*ino));
        }
        true
    }

    /// Removes an orphan, of which another thread does what takes long.
    fn remove_alone(self: &Arc<Self>, ino: u64) {
        match self.fs.reap_step(ino) {
            Ok(false) => self.removed(ino, Ok(())),
            Err(Fail::Error(error)) => self.removed(ino, Err(error)),
            Ok(true) | Err(Fail::Stall(_)) => {
                // Who made the kernel forget it is not known: the owner's turn it is.
                let user = self.fs.attributes(ino).map_or(0, |now| now.inode.uid);
                let front = self.clone();
                self.general.run_for(Owner { user, process: 0 }, move || front.remove_waiting(ino));
            }
        }
    }

    /// Removes an orphan, on a thread that may wait. At the end of the mount it stays, to be
    /// removed when the filesystem is closed, or by the next mount.
    pub(crate) fn remove_waiting(&self, ino: u64) {
        while !self.general.is_ending() {
            match self.fs.wait(|| self.fs.reap_step(ino)) {
                Ok(true) => {}
                Ok(false) => return self.removed(ino, Ok(())),
                Err(error) => return self.removed(ino, Err(error)),
            }
        }
    }

    fn removed(&self, ino: u64, result: Result<(), FsError>) {
        if let Err(error) = result {
            messages::not_removed(ino, &error);
        }
        self.lookups.removed(ino);
    }
}
