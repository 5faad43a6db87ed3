//! What this process has of a mount, once for all its files: the transfers of GPU memory, staging
//! memory and threads for host memory, and the registered buffers.
//!
//! A process that forks cannot use any of it in the child: sessions of another process are refused
//! by name, and left as they are when the child drops them.

use crate::buffer::HostMemory;
use crate::process;
use crate::staging::Staging;
use crate::workers::Workers;
use gpunvme::gpu::Transfers;
use gpunvme::{Error, Mount, Result};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

/// The sessions that something uses. A child that was forked while a thread held it would wait for
/// ever, so no thread waits for it long.
static KNOWN: Mutex<Vec<Weak<Session>>> = Mutex::new(Vec::new());
const MOMENT: std::time::Duration = std::time::Duration::from_millis(10);

/// How many threads serve requests of host memory that their callers do not wait for.
const WORKERS: usize = 4;

pub struct Session {
    /// The number of its filesystem (`st_dev`).
    filesystem: u64,
    process: u32,
    /// Dropped only by the process that made it.
    shared: ManuallyDrop<Shared>,
}

struct Shared {
    mount: Mount,
    path: PathBuf,
    transfers: Mutex<Option<Transfers>>,
    staging: Staging,
    workers: Workers,
    buffers: Mutex<Vec<Weak<HostMemory>>>,
}

impl Session {
    /// The session of the mount that a path lies on; `file` is open there, if it is a file.
    pub fn of(path: &Path, file: Option<&gpunvme::File>) -> Result<Arc<Session>> {
        let lost = |errno: Errno| Error::Path { path: path.to_owned(), action: "ask what it is", errno };
        let stat = match file {
            Some(file) => rustix::fs::fstat(file),
            None => rustix::fs::stat(path),
        };
        let (filesystem, process) = (stat.map_err(lost)?.st_dev, process::id());
        let is_it = |session: &Arc<Session>| session.filesystem == filesystem && session.process == process;
        let known = || KNOWN.try_lock_for(MOMENT)?.iter().filter_map(Weak::upgrade).find(is_it);
        if let Some(session) = known() {
            return Ok(session);
        }
        let mount = match file {
            // By its folder, so that a file that is closed and removed is not kept.
            Some(file) => path.parent().and_then(|folder| Mount::open(folder).ok()).map_or_else(|| file.mount(), Ok)?,
            None => Mount::open(path)?,
        };
        let shared = Shared {
            mount,
            path: path.to_owned(),
            transfers: Mutex::default(),
            staging: Staging::default(),
            workers: Workers::new(WORKERS, "gpunvme-host"),
            buffers: Mutex::default(),
        };
        let session = Arc::new(Session { filesystem, process, shared: ManuallyDrop::new(shared) });
        let mut known = KNOWN.try_lock_for(MOMENT);
        if let Some(known) = &mut known {
            // Threads that open the first files of a mount at once share one session.
            if let Some(other) = known.iter().filter_map(Weak::upgrade).find(is_it) {
                return Ok(other);
            }
            known.retain(|session| session.strong_count() > 0);
            known.push(Arc::downgrade(&session));
        }
        Ok(session)
    }

    /// What is shared, for the process that made it.
    fn shared(&self) -> Result<&Shared> {
        if self.process == process::id() {
            return Ok(&self.shared);
        }
        let action = "use in a child process what its parent opened; open it again in the child";
        Err(Error::Path { path: self.shared.path.clone(), action, errno: Errno::CHILD })
    }

    pub fn mount(&self) -> Result<&Mount> {
        Ok(&self.shared()?.mount)
    }

    /// For memory of GPUs, made the first time: CUDA is loaded then.
    pub fn transfers(&self) -> Result<Transfers> {
        let shared = self.shared()?;
        let mut transfers = shared.transfers.lock();
        if let Some(transfers) = &*transfers {
            return Ok(transfers.clone());
        }
        Ok(transfers.insert(Transfers::new(&shared.mount)?).clone())
    }

    /// The transfers of GPU memory, if there were any.
    pub fn transfers_so_far(&self) -> Option<Transfers> {
        self.shared().ok()?.transfers.lock().clone()
    }

    /// Staging memory, for host memory that is not registered.
    pub fn staging(&self) -> Result<&Staging> {
        Ok(&self.shared()?.staging)
    }

    /// The threads that serve requests of host memory that their callers do not wait for.
    pub fn workers(&self) -> Result<&Workers> {
        Ok(&self.shared()?.workers)
    }

    /// Registered host memory.
    pub fn register(&self, len: usize) -> Result<Arc<HostMemory>> {
        let shared = self.shared()?;
        // Before there is any, which the machine may not have.
        if len as u64 > shared.mount.info()?.max_buffer_bytes {
            return Err(Error::Memory { len, errno: Errno::NOMEM });
        }
        let memory = Arc::new(HostMemory::new(&shared.mount, len)?);
        let mut buffers = shared.buffers.lock();
        buffers.retain(|buffer| buffer.strong_count() > 0);
        buffers.push(Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The registered memory that a range lies in, if it does.
    pub fn registered(&self, address: u64, len: u64) -> Option<Arc<HostMemory>> {
        let buffers = self.shared().ok()?.buffers.lock();
        buffers.iter().filter_map(Weak::upgrade).find(|memory| memory.holds(address, len))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.process == process::id() {
            // SAFETY: it is dropped here and nowhere else, and not used afterwards.
            unsafe {
                ManuallyDrop::drop(&mut self.shared);
            }
        }
    }
}
