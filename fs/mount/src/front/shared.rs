//! State that the operations of one mount share, and how operations are tried: at once, and after a
//! stall on a thread that may wait, which a loop may be, too.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use gpunvme_engine::data::Filesystem;
use gpunvme_engine::error::{Attempt, Fail, FsError};
use gpunvme_fuse::may_wait;
use parking_lot::Mutex;

use super::append_order::AppendOrder;
use super::kernel::{KernelCache, Lookups, MountState};
use super::resources::device_shares::DeviceShares;
use super::resources::endpoint::Endpoint;
use super::resources::listing_budget::ListingBudget;
use super::resources::plan_budget::PlanBudget;
use super::resources::removals::Removals;
use super::resources::request_budget::RequestBudget;
use super::resources::snapshot_budget::SnapshotBudget;
use super::resources::syncs::Syncs;
use super::resources::turns::Owner;
use super::resources::workers::Workers;
use super::settings::{Devices, Log};

/// State that the operations of one mount share.
pub(crate) struct Front {
    pub(crate) fs: Arc<Filesystem>,
    pub(crate) lookups: Lookups,
    pub(crate) removals: Removals,
    pub(crate) request_budget: Arc<RequestBudget>,
    pub(crate) append_order: AppendOrder,
    pub(crate) syncs: Syncs,
    pub(crate) general: Arc<Workers>,
    /// Before `invalidations`, which may wait for what is answered here.
    pub(crate) overtaken: Arc<Workers>,
    pub(crate) invalidations: Arc<Workers>,
    pub(crate) transfers: Arc<Workers>,
    pub(crate) device_shares: Arc<DeviceShares>,
    pub(crate) plan_budget: Arc<PlanBudget>,
    pub(crate) snapshot_budget: SnapshotBudget,
    pub(crate) listing_budget: ListingBudget,
    pub(crate) direct: Endpoint,
    pub(crate) mount_state: Arc<MountState>,
    /// Set once the mount exists.
    pub(crate) kernel: OnceLock<Box<dyn KernelCache>>,
    pub(crate) log: Arc<dyn Log>,
    pub(crate) devices: Arc<dyn Devices>,
    /// Held by a call that makes the volume larger.
    pub(crate) growth: Mutex<()>,
    /// Freed blocks are being told to the device.
    pub(crate) discarding: Arc<AtomicBool>,
}

impl Front {
    /// Tries an operation here, and if it has to wait, continues it on a thread that may, in turns
    /// with the operations of others. `done` borrows the front end: a new reference to an object
    /// that all threads share takes as long as some operations.
    pub(crate) fn attempt<T>(
        self: &Arc<Self>,
        owner: Owner,
        mut attempt: impl FnMut(&Arc<Filesystem>) -> Attempt<T> + Send + 'static,
        done: impl FnOnce(&Arc<Self>, Result<T, FsError>) + Send + 'static,
    ) {
        self.attempt_for((), move |()| owner, move |fs, ()| attempt(fs), |front, (), result| done(front, result));
    }

    /// As [`Front::attempt`], for something that the operation and `done` both need. `owner` is
    /// asked only if it has to wait.
    pub(crate) fn attempt_for<S: Send + 'static, T>(
        self: &Arc<Self>,
        subject: S,
        owner: impl FnOnce(&S) -> Owner,
        mut attempt: impl FnMut(&Arc<Filesystem>, &S) -> Attempt<T> + Send + 'static,
        done: impl FnOnce(&Arc<Self>, S, Result<T, FsError>) + Send + 'static,
    ) {
        match attempt(&self.fs, &subject) {
            Ok(result) => done(self, subject, Ok(result)),
            Err(Fail::Error(error)) => done(self, subject, Err(error)),
            Err(Fail::Stall(_)) => {
                if let Some(may_wait) = may_wait() {
                    let result = self.fs.wait(|| attempt(&self.fs, &subject));
                    drop(may_wait);
                    return done(self, subject, result);
                }
                let front = self.clone();
                self.general.run_for(owner(&subject), move || {
                    let result = front.fs.wait(|| attempt(&front.fs, &subject));
                    done(&front, subject, result);
                });
            }
        }
    }

    /// As [`Front::wait`], for what is over as soon as a device has answered: here, where this
    /// thread may wait.
    pub(crate) fn wait_briefly<T>(
        self: &Arc<Self>,
        owner: Owner,
        operation: impl FnOnce(&Arc<Filesystem>) -> Result<T, FsError> + Send + 'static,
        done: impl FnOnce(Result<T, FsError>) + Send + 'static,
    ) {
        match may_wait() {
            Some(may_wait) => {
                let result = operation(&self.fs);
                drop(may_wait);
                done(result);
            }
            None => self.wait(owner, operation, done),
        }
    }

    /// Runs an operation on a thread that may wait, in turns with the operations of others.
    pub(crate) fn wait<T>(
        self: &Arc<Self>,
        owner: Owner,
        operation: impl FnOnce(&Arc<Filesystem>) -> Result<T, FsError> + Send + 'static,
        done: impl FnOnce(Result<T, FsError>) + Send + 'static,
    ) {
        let fs = self.fs.clone();
        self.general.run_for(owner, move || done(operation(&fs)));
    }
}
