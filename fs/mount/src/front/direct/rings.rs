//! Files attached to rings: the same transfers as by ioctl, begun by the threads that serve the
//! rings.
//!
//! It guards the life of an attached file. The application may close the file, and another process
//! may unlink it: until it is detached it counts as known to the kernel, and as open.

use std::iter;
use std::ops::Range;
use std::sync::Arc;

use gpunvme_abi::Direction;
use gpunvme_abi::ring::Attach;
use gpunvme_engine::data::{InPlaceWrite, system_time};
use gpunvme_gpupath::access::Access;
use gpunvme_gpupath::admission::{Admitted, BegunWrite, Hold, OpenFile, WritePermit};
use gpunvme_gpupath::server::Reply;
use parking_lot::Mutex;
use slab::Slab;

use super::transfers::Transfer;
use crate::front::caller::Caller;
use crate::front::operations::files::has_no_privileges;
use crate::front::resources::snapshot_budget::BudgetedSnapshot;
use crate::front::resources::turns::Owner;
use crate::front::shared::Front;

/// How many transfers look the file up anew between two snapshots of it: a file that changes all
/// the time is not worth one for each change.
const PATIENCE: u32 = 16;

/// An open file, as it was when it was attached.
struct Attached {
    front: Arc<Front>,
    ino: u64,
    access: Access,
    /// The user and thread that attached it.
    owner: Owner,
    /// Locked by the threads that serve the ring: one.
    places: Mutex<Places>,
}

/// What is remembered of where a file lies, and its writes that went there.
#[derive(Default)]
struct Places {
    snapshot: Option<BudgetedSnapshot>,
    /// Whether a write takes privileges from the file, as the snapshot has it.
    has_privileges: bool,
    /// Transfers that are still to be looked up before there is another snapshot.
    patience: u32,
    /// Writes in place on their way to the device.
    writes: Slab<InPlaceWrite>,
}

/// The user and group of writes by rings: none that exists. Any process that has the ring's memory
/// mapped can submit, and the process that made the ring may have given up the identity it had
/// then; so a write by a ring may do what a write by an unprivileged user may.
const NOBODY: u32 = u32::MAX;

impl Front {
    /// `ATTACH` on an open file.
    pub(crate) fn attach(self: &Arc<Self>, caller: Caller, ino: u64, request: Attach, done: impl FnOnce(Reply) + Send + 'static) {
        // A directory has nothing to transfer.
        self.attempt(
            caller.owner(),
            move |fs| fs.resolve(ino, 0, 0, 0).map(drop),
            move |front, regular| {
                if let Err(error) = regular {
                    return done(Reply::new(error.errno(), &request));
                }
                let server = &front.direct.server;
                let front = front.clone();
                server.take_in(caller.context.uid, move |may| {
                    let file = |access| Arc::new(Attached::new(&front, ino, access, caller.owner())) as Arc<dyn OpenFile>;
                    done(match may {
                        Ok(()) => front.direct.rings.attach(caller.thread, &request, ino, file),
                        Err(refusal) => Reply::new(refusal.errno(), &request),
                    });
                });
            },
        );
    }
}

impl Attached {
    /// The kernel waits for the answer to an ioctl on the file, so it is known, and not being
    /// removed.
    fn new(front: &Arc<Front>, ino: u64, access: Access, owner: Owner) -> Attached {
        let known = front.lookups.look_up(ino);
        debug_assert!(known, "an open file is being removed");
        front.fs.hold_file(ino);
        Attached { front: front.clone(), ino, access, owner, places: Mutex::default() }
    }

    /// Has a snapshot that is current, if there can be one now.
    fn look(&self, places: &mut Places) {
        if places.snapshot.as_ref().is_some_and(|snapshot| self.front.fs.is_current(snapshot)) {
            return;
        }
        places.snapshot = None;
        if places.patience > 0 {
            places.patience -= 1;
            return;
        }
        places.patience = PATIENCE;
        // What stalls is looked up by the transfer, on a thread that may wait.
        let limit = self.front.snapshot_budget.most(self.owner.user);
        let found = self.front.fs.snapshot(self.ino, limit).ok().flatten();
        // Asked after the snapshot was made: it is no longer current when this changes.
        places.has_privileges = !has_no_privileges(&self.front.fs, self.ino).is_ok_and(|has_none| has_none);
        places.snapshot = found.and_then(|snapshot| self.front.snapshot_budget.keep(self.owner.user, snapshot));
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

    fn permit_writes(&self) -> WritePermit {
        // In this order: what makes the mount read-only looks for writes after it has.
        let hold = Box::new(self.front.mount_state.unseen_write());
        WritePermit { is_given: !self.front.mount_state.is_read_only(), hold }
    }

    fn hold(&self) -> Hold {
        Box::new(self.front.fs.guard())
    }

    fn place(&self, range: Range<u64>, is_written_back: bool) -> Option<u64> {
        if !self.access.contains(Access::READ)
            || !is_written_back && self.front.lookups.may_have(self.ino, iter::once(range.clone()))
        {
            return None;
        }
        let mut places = self.places.lock();
        self.look(&mut places);
        places.snapshot.as_ref()?.find(range)
    }

    fn begin_write(&self, range: Range<u64>, is_written_back: bool) -> Option<BegunWrite> {
        let (front, block) = (&self.front, self.front.fs.write_alignment().block);
        // A file that is written through is synced by the one that answers.
        let is_plain = self.access.contains(Access::WRITE)
            && !self.access.contains(Access::SYNC)
            && range.start.is_multiple_of(block)
            && range.end.is_multiple_of(block)
            && (is_written_back || !front.lookups.may_have(self.ino, iter::once(range.clone())));
        if !is_plain {
            return None;
        }
        let mut places = self.places.lock();
        self.look(&mut places);
        let Places { snapshot, has_privileges, writes, .. } = &mut *places;
        if *has_privileges {
            return None;
        }
        let write = front.fs.begin_in_place(snapshot.as_ref()?, range, system_time())?;
        Some(BegunWrite { device_offset: write.device_offset, write: writes.insert(write) })
    }

    fn end_write(&self, write: usize, range: Range<u64>, is_written: bool) -> bool {
        let write = self.places.lock().writes.remove(write);
        if !is_written {
            return true;
        }
        let shown = self.front.fs.end_in_place(write);
        // Looked up when the device has the data: pages that the kernel reads from here on are new.
        // A thread is here that completes I/O. It must not tell the kernel anything: the kernel may
        // be evicting the inode, which only such a thread's answer to a write ends.
        !shown && !self.front.lookups.may_have(self.ino, iter::once(range))
    }

    fn forget_pages(&self, range: Range<u64>, then: Box<dyn FnOnce() + Send>) {
        let (front, ino) = (self.front.clone(), self.ino);
        self.front.invalidations.run_for(self.owner, move || {
            front.invalidate(ino, vec![range], None);
            if front.fs.are_attributes_kept(ino) {
                front.attributes_change(ino);
            }
            then();
        });
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // They have the file in memory.
        *self.places.get_mut() = Places::default();
        self.front.fs.let_go_of_file(self.ino);
        if self.front.lookups.forget(self.ino, 1) {
            self.front.remove_waiting(self.ino);
        }
    }
}
