//! The gpunvme mounts in use, and what moves bytes between their files and GPU memory.
//!
//! Locks: `Mounts::list` while a file is registered; `OnMount::transfers` while the first transfer
//! of a mount is begun, since that takes pinned memory and a thread.

use crate::environment;
use crate::failure::{Failure, Result};
use gpunvme::gpu::{Caching, Settings, Transfers};
use gpunvme::{File, Mount, Reason, Require, Route};
use gpunvme_cuda::Cuda;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// A mount with registered files.
pub struct OnMount {
    device: u64,
    mount: Mount,
    /// File offsets may be moved by multiples of it, in bytes.
    pub block: u64,
    /// Whether the mount's SSD may reach GPU memory itself.
    reaches_gpus: bool,
    transfers: OnceLock<Both>,
    making: Mutex<()>,
}

/// Transfers by the fastest route, and by a staging pool.
struct Both {
    fastest: Transfers,
    staged: Transfers,
}

impl OnMount {
    /// What moves bytes to and from memory that CUDA knows. `registered` is whether the application
    /// has registered the memory: only then the SSD may be given it. Memory that is registered with
    /// a mount stays in existence though the application frees it, and only of registered memory
    /// cuFile's users tell when that may end.
    ///
    /// None where there is no CUDA.
    pub fn transfers(&self, registered: bool) -> Result<Option<&Transfers>> {
        let both = match self.transfers.get() {
            Some(both) => both,
            None if Cuda::load().is_err() => return Ok(None),
            None => {
                let _making = self.making.lock();
                match self.transfers.get() {
                    Some(both) => both, // by another thread, meanwhile
                    None => {
                        let made = self.make()?;
                        self.transfers.get_or_init(|| made)
                    }
                }
            }
        };
        Ok(Some(if registered || !self.reaches_gpus { &both.fastest } else { &both.staged }))
    }

    fn make(&self) -> Result<Both> {
        let fastest = Transfers::with(&self.mount, settings()).map_err(|error| {
            tracing::error!(%error, "no transfers on a gpunvme mount");
            Failure::from(&error)
        })?;
        let staged = fastest.requiring(Require { route: Some(Route::Bounce), ..Require::default() });
        Ok(Both { fastest, staged })
    }

    /// Does what the first transfer to or from registered memory would have to do.
    pub fn warm_up(&self, address: u64) {
        if self.reaches_gpus
            && let Ok(Some(transfers)) = self.transfers(true)
            && let Err(error) = transfers.route(address)
        {
            tracing::debug!(%error, "memory that was registered is not ready");
        }
    }

    /// Gives up what is registered with the mount of a range of memory.
    pub fn forget(&self, address: u64, len: u64) {
        if let Some(both) = self.transfers.get() {
            both.fastest.forget(address, len);
        }
    }
}

/// The usual ones, but for what the environment says.
fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.caching = match environment::text("GPUNVME_CUFILE_CACHING").as_deref() {
        None | Some("resident") => Caching::Resident,
        Some("never") => Caching::Never,
        Some("read-again") => Caching::ReadAgain,
        Some(text) => {
            tracing::warn!("GPUNVME_CUFILE_CACHING is not never, resident or read-again: {text:?}");
            Caching::Resident
        }
    };
    settings
}

/// The mounts of this process.
#[derive(Default)]
pub struct Mounts {
    list: Mutex<Vec<Arc<OnMount>>>,
}

impl Mounts {
    /// The mount of a file, whose `st_dev` is `device`.
    pub fn of(&self, file: &File, device: u64) -> Result<Arc<OnMount>> {
        let mut list = self.list.lock();
        if let Some(at) = list.iter().position(|known| known.device == device) {
            // Its number may be that of a mount which is over.
            if Arc::strong_count(&list[at]) > 1 || list[at].mount.info().is_ok() {
                return Ok(list[at].clone());
            }
            list.remove(at);
        }
        let mount = file.mount().map_err(|error| Failure::from(&error))?;
        let info = mount.info().map_err(|error| Failure::from(&error))?;
        let reaches_gpus = info.route == Route::P2p && info.reason == Reason::None;
        let (transfers, making) = (OnceLock::new(), Mutex::default());
        let found = Arc::new(OnMount { device, mount, block: info.block_size.into(), reaches_gpus, transfers, making });
        list.push(found.clone());
        Ok(found)
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<OnMount>> {
        self.list.lock().clone()
    }
}
