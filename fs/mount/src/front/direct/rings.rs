//! Files attached to rings: the same transfers as by ioctl, begun by the threads that serve the
//! rings.
//!
//! It guards the life of an attached file. The application may close the file, and another process
//! may unlink it: until it is detached it counts as known to the kernel, and as open.

use std::sync::Arc;

use gpunvme_abi::Direction;
use gpunvme_abi::ring::Attach;
use gpunvme_gpupath::access::Access;
use gpunvme_gpupath::admission::{Admitted, OpenFile};
use gpunvme_gpupath::server::Reply;

use super::transfers::Transfer;
use crate::front::caller::Caller;
use crate::front::shared::Front;

/// An open file, as it was when it was attached.
struct Attached {
    front: Arc<Front>,
    ino: u64,
    access: Access,
}

/// The user and group of writes by rings: none that exists. Any process that has the ring's memory
/// mapped can submit, and the process that made the ring may have given up the identity it had
/// then; so a write by a ring strips what a write by an unprivileged user strips.
const NOBODY: u32 = u32::MAX;

impl Front {
    /// `ATTACH` on an open file.
    pub(crate) fn attach(self: &Arc<Self>, caller: Caller, ino: u64, request: Attach, done: impl FnOnce(Reply) + Send + 'static) {
        // A directory has nothing to transfer.
        self.attempt(
            move |fs| fs.resolve(ino, 0, 0, 0).map(drop),
            move |front, regular| {
                if let Err(error) = regular {
                    return done(Reply::new(error.errno(), &request));
                }
                let file = |access| Arc::new(Attached::new(front, ino, access)) as Arc<dyn OpenFile>;
                done(front.direct.rings.attach(caller.thread, &request, ino, file));
            },
        );
    }
}

impl Attached {
    /// The kernel waits for the answer to an ioctl on the file, so it is known, and not being
    /// removed.
    fn new(front: &Arc<Front>, ino: u64, access: Access) -> Attached {
        let known = front.lookups.look_up(ino);
        debug_assert!(known, "an open file is being removed");
        front.fs.hold_file(ino);
        Attached { front: front.clone(), ino, access }
    }
}

impl OpenFile for Attached {
    fn ino(&self) -> u64 {
        self.ino
    }

    fn transfer(&self, admitted: Admitted) {
        let unseen = (admitted.direction() == Direction::Write).then(|| self.front.mount_state.unseen_write());
        let caller = Caller::now(NOBODY, NOBODY, 0);
        self.front.transfer(Transfer { admitted, caller, ino: self.ino, access: self.access, unseen });
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.front.fs.let_go_of_file(self.ino);
        if self.front.lookups.forget(self.ino, 1) {
            self.front.remove_waiting(self.ino);
        }
    }
}
