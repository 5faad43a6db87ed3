//! Removing inodes that have no name, once the kernel has forgotten them.

use std::sync::Arc;

use gpunvme_engine::error::{Fail, FsError};

use crate::front::messages;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;

impl Front {
    /// Removes an orphan that the kernel has forgotten.
    pub(crate) fn remove(self: &Arc<Self>, ino: u64) {
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

    /// As [`Front::remove`], on a thread that may wait.
    pub(crate) fn remove_waiting(&self, ino: u64) {
        let remove = || -> Result<(), FsError> {
            while self.fs.wait(|| self.fs.reap_step(ino))? {}
            Ok(())
        };
        self.removed(ino, remove());
    }

    pub(crate) fn removed(&self, ino: u64, result: Result<(), FsError>) {
        if let Err(error) = result {
            messages::not_removed(ino, &error);
        }
        self.lookups.removed(ino);
    }
}
