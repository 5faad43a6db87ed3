//! Files attached to rings: the same transfers as by ioctl, begun by the threads that serve the
//! rings.
//!
//! It guards the life of an attached file. The application may close the file, and another process
//! may unlink it: until it is detached it counts as known to the kernel, and as open.

use std::sync::Arc;

use gpunvme_abi::ring::Attach;
use gpunvme_abi::{Command, Direction, TransferRequest};
use gpunvme_gpupath::registry::Buffer;
use gpunvme_gpupath::ring::{AttachedFile, Taken};
use gpunvme_gpupath::server::Reply;

use super::transfers::{Asked, Way};
use crate::front::caller::Caller;
use crate::front::handles::Handle;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;

/// An open file, as it was when it was attached.
struct Attached {
    front: Arc<Front>,
    ino: u64,
    handle: Handle,
}

/// The user and group of writes by rings: none that exists. Any process that has the ring's memory
/// mapped can submit, and the process that made the ring may have given up the identity it had
/// then; so a write by a ring strips what a write by an unprivileged user strips.
const NOBODY: u32 = u32::MAX;

impl Front {
    /// `ATTACH` on an open file.
    pub(crate) fn attach(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        handle: Handle,
        request: Attach,
        done: impl FnOnce(Reply) + Send + 'static,
    ) {
        // A directory has nothing to transfer.
        self.attempt(
            move |fs| fs.resolve(ino, 0, 0, 0).map(drop),
            move |front, regular| {
                if let Err(error) = regular {
                    return done(Reply::new(error.errno(), &request));
                }
                let file = || Arc::new(Attached::new(front, ino, handle)) as Arc<dyn AttachedFile>;
                done(front.direct.rings.attach(caller.thread, &request, file));
            },
        );
    }
}

impl Attached {
    /// The kernel waits for the answer to an ioctl on the file, so it is known, and not being
    /// removed.
    fn new(front: &Arc<Front>, ino: u64, handle: Handle) -> Attached {
        let known = front.lookups.look_up(ino);
        debug_assert!(known, "an open file is being removed");
        let handle = handle.of(front.fs.open_file(ino, false));
        Attached { front: front.clone(), ino, handle }
    }
}

impl AttachedFile for Attached {
    fn transfer(&self, command: Command, request: TransferRequest, buffer: Arc<Buffer>, taken: Taken) {
        let direction = if command == Command::Write { Direction::Write } else { Direction::Read };
        let unseen = (direction == Direction::Write).then(|| self.front.mount_state.unseen_write());
        let limit = if direction == Direction::Write { taken.file_size_limit() } else { u64::MAX };
        let (user, process) = taken.owner();
        let way = Way::Ring { buffer, owner: Owner { user, process }, limit };
        let caller = Caller::now(NOBODY, NOBODY, 0);
        let asked = Asked { direction, caller, ino: self.ino, handle: self.handle, request, way };
        self.front.transfer(asked, move |answer| {
            taken.answer(answer);
            drop(unseen);
        });
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.front.fs.close_file(self.ino, false);
        if self.front.lookups.forget(self.ino, 1) {
            self.front.remove_waiting(self.ino);
        }
    }
}
