//! A mount's connection to the kernel: from the first request to the last answer.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use gpunvme_fuse::{LastRequest, Served};
use parking_lot::Mutex;

use super::append_order::AppendOrder;
use super::fuse;
use super::housekeeping::Housekeeping;
use super::kernel::{Lookups, MountState};
use super::operations::appends::LateFragments;
use super::resources::device_shares::DeviceShares;
use super::resources::endpoint::{Endpoint, serving_threads};
use super::resources::listing_budget::ListingBudget;
use super::resources::removals::Removals;
use super::resources::request_budget::RequestBudget;
use super::resources::snapshot_budget::SnapshotBudget;
use super::resources::syncs::Syncs;
use super::resources::workers::Workers;
use super::settings::Settings;
use super::shared::Front;
use gpunvme_engine::data::Filesystem;
use gpunvme_engine::error::FsError;

/// Threads for operations that wait. One user who is not root has 70 of them at the most: as many
/// as keep a device busy.
const GENERAL_THREADS: usize = 160;
/// Bytes of requests that wait or are in flight: as much as the kernel has in flight by itself at
/// the most (`fuse.rs`, MAX_BACKGROUND).
const REQUEST_BYTES: usize = 256 << 20;
/// Fragments of appends that may wait for an earlier fragment, which may never come, at a mebibyte
/// each at the most: a quarter of the requests that the kernel has in flight in the background, and
/// of their bytes.
const PARKED: usize = 64;
/// Threads that work for long direct transfers. They wait for nothing, and fill memory at its full
/// speed.
const TRANSFER_THREADS: usize = 2;
/// Threads that wait for the kernel before they answer a write. Rarely needed.
const OVERTAKEN_THREADS: usize = 16;
/// Threads that wait for the kernel.
const INVALIDATION_THREADS: usize = 16;

/// A live mount.
pub struct Session {
    front: Arc<Front>,
    served: Mutex<Option<Served>>,
    housekeeping: Housekeeping,
    late_fragments: LateFragments,
}

impl Session {
    /// Begins to serve a filesystem to the kernel. `connection` is the open `/dev/fuse` of a mount
    /// that is not served yet; it is closed when the session ends. The mount itself stays in place.
    ///
    /// # Errors
    /// The kernel and this program have no protocol in common, or the system has not got the
    /// threads.
    pub fn start(fs: Arc<Filesystem>, connection: OwnedFd, settings: &Settings) -> io::Result<Session> {
        let serving_threads = serving_threads(settings.loops, fs.volume().device().geometry());
        let transfers = Workers::new("transfers", TRANSFER_THREADS)?;
        let front = Arc::new(Front {
            lookups: Lookups::default(),
            removals: Removals::default(),
            request_budget: RequestBudget::new(REQUEST_BYTES),
            append_order: AppendOrder::new(PARKED),
            syncs: Syncs::default(),
            general: Workers::with_quotas("worker", GENERAL_THREADS)?,
            overtaken: Workers::with_quotas("overtaken", OVERTAKEN_THREADS)?,
            invalidations: Workers::with_quotas("invalidation", INVALIDATION_THREADS)?,
            device_shares: DeviceShares::new(transfers.clone()),
            transfers,
            plan_budget: Arc::default(),
            snapshot_budget: SnapshotBudget::default(),
            listing_budget: ListingBudget::new(settings.cache),
            direct: Endpoint::new(&fs, settings, serving_threads)?,
            mount_state: MountState::new()?,
            kernel: OnceLock::new(),
            log: settings.log.clone(),
            devices: settings.devices.clone(),
            growth: Mutex::default(),
            discarding: Arc::default(),
            fs,
        });
        let housekeeping = Housekeeping::start(front.clone(), settings.commit)?;
        let late_fragments = LateFragments::start(front.clone())?;
        let served = fuse::serve(&front, connection, settings)?;
        Ok(Session { front, served: Mutex::new(Some(served)), housekeeping, late_fragments })
    }

    /// Files on the mount show this device number. Until that is said, the mount is taken to stay
    /// writable.
    pub fn is_device(&self, dev: u64) {
        self.front.mount_state.mounted(dev);
        self.front.direct.server.mounted(dev);
    }

    /// Waits until the kernel's last request has come. To be called once.
    pub fn join(&self) -> LastRequest {
        self.served.lock().take().expect("a session is joined once").join()
    }

    /// Ends what goes on besides requests, after [`Session::join`]. The filesystem is then ready to
    /// be closed, which removes the inodes that only the kernel had, as far as it has time.
    ///
    /// # Errors
    /// The device failed.
    pub fn end(self) -> Result<(), FsError> {
        let Session { front, housekeeping, late_fragments, .. } = self;
        // Before the workers: transfers that stalled go on there, and are waited for. Attached
        // files go with the rings, which may be the last of an inode.
        front.direct.rings.end();
        drop(housekeeping);
        front.transfers.end();
        front.general.end();
        drop(late_fragments);
        front.overtaken.end();
        front.invalidations.end();
        // Not worth writing back.
        let drop_content = |ino| front.fs.wait(|| front.fs.drop_content(ino));
        front.lookups.orphans().into_iter().map(drop_content).fold(Ok(()), Result::and)
    }
}
