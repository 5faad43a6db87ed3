//! Where applications come in: it looks up what lies at their addresses, and hands the worker requests that can be done.

use super::Queue;
use super::lane::Lane;
use super::registered::Registrations;
use super::request::{Allocation, Answer, End, Part, Pending, Request, Segment};
use super::worker::{Inbox, Message, PIECES, Worker};
use crate::error::{Error, Result};
use crate::file::{File, Require, Transfer};
use crate::mount::Mount;
use crate::ring::{Ring, RingName};
use crate::{Reason, Route};
use gpunvme_gpupath::abi::MAX_OFFSET;
use gpunvme_gpupath::cuda::{self, Cuda, Gpu, Place};
use gpunvme_gpupath::pieces::{Blocks, Direction, piece_len};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

/// How much of the machine [`Transfers`] may use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settings {
    /// Bytes of the staging pool of each GPU that is used: whole MiB, at least one. It is host memory, pinned, on the GPU's NUMA node.
    pub staging: usize,
    /// Bytes of each GPU's memory that may be registered with the mount at once, where its SSD reaches them: by default as much as the GPU's BAR shows.
    pub registered: Option<u64>,
}

impl Default for Settings {
    /// A pool of 64 MiB: what the daemon lets one ring have under way.
    fn default() -> Settings {
        Settings { staging: 64 << 20, registered: None }
    }
}

/// Moves bytes between the files of a mount and GPU memory. One of it serves a whole application: copies of it are the same. It ends with the last copy, when everything is done.
///
/// A process that forks must not use it in the child.
#[derive(Clone)]
pub struct Transfers(Arc<Inner>);

struct Inner {
    cuda: &'static Cuda,
    mount: Mount,
    path: PathBuf,
    settings: Settings,
    /// What slots are aligned to.
    alignment: usize,
    registrations: Registrations,
    ring: RingName,
    inbox: Arc<Inbox>,
    worker: Option<JoinHandle<()>>,
    /// GPUs that the worker knows.
    lanes: Mutex<Vec<Gpu>>,
}

impl Transfers {
    /// For the files of a mount, with the usual settings.
    ///
    /// # Errors
    /// [`Error::NoCuda`] where there is none; what [`Ring::new`] says.
    pub fn new(mount: &Mount) -> Result<Transfers> {
        Transfers::with(mount, Settings::default())
    }

    /// For the files of a mount.
    ///
    /// # Errors
    /// As [`Transfers::new`].
    pub fn with(mount: &Mount, settings: Settings) -> Result<Transfers> {
        let cuda = Cuda::load()?;
        let info = mount.info()?;
        let path = mount.connection().path.clone();
        let ring = Ring::new(mount, PIECES as u32)?;
        let name = ring.name().clone();
        let failed = |errno| Error::Path { path: path.clone(), action: "start a thread for transfers", errno };
        let inbox = Arc::new(Inbox::new().map_err(failed)?);
        let blocks = Blocks { read: info.logical_block.into(), write: info.block_size.into() };
        let worker = Worker::new(ring, inbox.clone(), blocks);
        let thread = std::thread::Builder::new().name("gpunvme".into());
        let thread = thread
            .spawn(move || {
                // Without it a capture of the application's would end; that is no reason to do nothing.
                let _ = cuda.leave_captures_alone();
                worker.run();
            })
            .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok(Transfers(Arc::new(Inner {
            cuda,
            mount: mount.clone(),
            registrations: Registrations::new(cuda, mount, info.reason, settings.registered),
            settings,
            alignment: (info.memory_alignment.max(info.logical_block) as usize).max(512),
            ring: name,
            inbox,
            worker: Some(thread),
            lanes: Mutex::default(),
            path,
        })))
    }

    /// Reads each segment, and waits for it. A segment that reaches past the end of the file is read as far as the file goes: the sum says less than was asked for then.
    ///
    /// # Safety
    /// The memory of the segments is the caller's to write to, does not overlap, and nobody else uses it until this returns: no kernel, no copy.
    ///
    /// # Errors
    /// [`Error::UnknownMemory`] before anything was read; [`Error::Transfer`] and [`Error::Copy`] say what was, and any segment may have changed in part then.
    pub unsafe fn read(&self, file: &File, segments: &[Segment]) -> Result<Transfer> {
        self.pending(Direction::Read, file, segments, Require::default())?.wait()
    }

    /// [`Transfers::read`], with demands on the way it is done.
    ///
    /// # Safety
    /// As for [`Transfers::read`].
    ///
    /// # Errors
    /// Those of [`Transfers::read`].
    pub unsafe fn read_requiring(&self, file: &File, segments: &[Segment], require: Require) -> Result<Transfer> {
        self.pending(Direction::Read, file, segments, require)?.wait()
    }

    /// Writes each segment, and waits for it, extending the file where it ends before. Of segments that overlap in the file it is not defined which is there afterwards.
    ///
    /// # Safety
    /// The memory of the segments is the caller's, and nobody changes it until this returns: no kernel, no copy.
    ///
    /// # Errors
    /// As [`Transfers::read`].
    pub unsafe fn write(&self, file: &File, segments: &[Segment]) -> Result<Transfer> {
        self.pending(Direction::Write, file, segments, Require::default())?.wait()
    }

    /// [`Transfers::write`], with demands on the way it is done.
    ///
    /// # Safety
    /// As for [`Transfers::write`].
    ///
    /// # Errors
    /// Those of [`Transfers::write`].
    pub unsafe fn write_requiring(&self, file: &File, segments: &[Segment], require: Require) -> Result<Transfer> {
        self.pending(Direction::Write, file, segments, require)?.wait()
    }

    /// Begins a read, and calls `done` with what [`Transfers::read`] would have returned. That happens on the thread that serves all requests: it should do little, and must not
    /// wait for another request.
    ///
    /// # Safety
    /// As for [`Transfers::read`], until `done` is called.
    ///
    /// # Errors
    /// As [`Transfers::read`], if nothing was begun; `done` is not called then.
    pub unsafe fn read_then(
        &self,
        file: &File,
        segments: &[Segment],
        done: impl FnOnce(Result<Transfer>) + Send + 'static,
    ) -> Result<()> {
        self.begin(Direction::Read, file, segments, Require::default(), End::Callback(Box::new(done)))
    }

    /// Begins a write, and calls `done` with what [`Transfers::write`] would have returned, as [`Transfers::read_then`] does.
    ///
    /// # Safety
    /// As for [`Transfers::write`], until `done` is called.
    ///
    /// # Errors
    /// As [`Transfers::read_then`].
    pub unsafe fn write_then(
        &self,
        file: &File,
        segments: &[Segment],
        done: impl FnOnce(Result<Transfer>) + Send + 'static,
    ) -> Result<()> {
        self.begin(Direction::Write, file, segments, Require::default(), End::Callback(Box::new(done)))
    }

    /// The route that transfers to and from the memory at an address take now, and why not a faster one. Where that is `p2p` the memory is registered then: what the first transfer
    /// would have to do is done.
    ///
    /// # Errors
    /// [`Error::UnknownMemory`] where CUDA knows none.
    pub fn route(&self, address: u64) -> Result<(Route, Reason)> {
        let mut parts = Vec::with_capacity(1);
        self.0.look_up(0, &Segment { file_offset: 0, address, len: 1 }, None, &mut None, &mut parts)?;
        let registered = parts.first().map(|part| part.registered.as_ref().map(|_| ()));
        Ok(match registered {
            Some(Err(reason)) => (Route::Bounce, *reason),
            _ => (Route::P2p, Reason::None),
        })
    }

    /// Gives up what is registered of a range of memory, as soon as no transfer uses it. Registered memory stays in existence, even if the application frees it: until this is called,
    /// or some other memory is registered. `bounce` needs none of this.
    pub fn forget(&self, address: u64, len: u64) {
        self.0.registrations.forget(address, len);
    }

    /// A queue, for one thread that keeps many requests in flight.
    ///
    /// # Errors
    /// [`Error::Path`] if there are too many descriptors.
    pub fn queue(&self) -> Result<Queue> {
        Queue::new(self)
    }

    pub(super) fn failed(&self, action: &'static str, errno: Errno) -> Error {
        Error::Path { path: self.0.path.clone(), action, errno }
    }

    fn pending(&self, direction: Direction, file: &File, segments: &[Segment], require: Require) -> Result<Pending> {
        let answer = Arc::new(Answer::default());
        self.begin(direction, file, segments, require, End::Pending(answer.clone()))?;
        Ok(Pending(answer))
    }

    /// Looks up the memory of a request, and hands it to the worker.
    pub(super) fn begin(
        &self,
        direction: Direction,
        file: &File,
        segments: &[Segment],
        require: Require,
        end: End,
    ) -> Result<()> {
        let inner = &*self.0;
        let refused = |errno, reason, segment| Error::Transfer {
            path: file.path().to_owned(),
            action: if direction == Direction::Read { "read" } else { "write" },
            errno,
            reason,
            segment,
            offset: None,
            done: Transfer::default(),
        };
        if require.route == Some(Route::Host) {
            return Err(refused(Errno::OPNOTSUPP, Reason::RouteNotAvailable, None));
        }
        let mut parts = Vec::with_capacity(segments.len());
        let mut bytes = 0u64;
        let mut last = None;
        for (index, segment) in segments.iter().enumerate() {
            if segment.file_offset.checked_add(segment.len).is_none_or(|end| end > MAX_OFFSET) {
                return Err(refused(Errno::INVAL, Reason::None, Some(index as u32)));
            }
            inner.look_up(index as u32, segment, require.route, &mut last, &mut parts)?;
            bytes = bytes.saturating_add(segment.len);
        }
        let staged = parts.iter().find_map(|part| Some((part.segment, *part.registered.as_ref().err()?)));
        if let (Some(Route::P2p), Some((segment, reason))) = (require.route, staged) {
            return Err(refused(Errno::OPNOTSUPP, reason, Some(segment)));
        }
        let file = file.in_ring(&inner.ring)?;
        let request = Request { direction, file, parts, require, piece_len: piece_len(bytes), end };
        inner.inbox.send(Message::Request(Box::new(request)));
        Ok(())
    }
}

impl Inner {
    /// Appends the parts of a segment, one an allocation, or a part of one that is registered. `last` is the allocation that was found last.
    fn look_up(
        &self,
        index: u32,
        segment: &Segment,
        route: Option<Route>,
        last: &mut Option<(cuda::Allocation, Allocation)>,
        parts: &mut Vec<Part>,
    ) -> Result<()> {
        let mut within = 0;
        while within < segment.len {
            let unknown = || Error::UnknownMemory { segment: index, address: segment.address.saturating_add(within) };
            let address = segment.address.checked_add(within).ok_or_else(unknown)?;
            let (found, allocation) = match *last {
                Some(last) if (last.0.base..last.0.base + last.0.len).contains(&address) => last,
                _ => {
                    let failed = |error| Error::Cuda { action: "look up memory", error };
                    let found = self.cuda.memory_at(address).map_err(failed)?.ok_or_else(unknown)?;
                    if !(found.base..found.base + found.len).contains(&address) {
                        return Err(unknown());
                    }
                    *last.insert((found, self.allocation(&found)?))
                }
            };
            let registered = match route {
                Some(Route::Bounce) => Err(Reason::None), // as the caller wishes
                _ => self.registrations.get(&found, address),
            };
            let rest = registered.as_ref().map_or(found.base + found.len - address, |lease| lease.len);
            if registered.is_err() && route != Some(Route::P2p) {
                self.need_lane(allocation.gpu)?;
            }
            let (file_offset, len) = (segment.file_offset + within, rest.min(segment.len - within));
            parts.push(Part { file_offset, address, len, segment: index, allocation, registered });
            within += len;
        }
        Ok(())
    }

    /// What the worker has to know of an allocation.
    fn allocation(&self, found: &cuda::Allocation) -> Result<Allocation> {
        let gpu = match found.place {
            Place::Device(gpu) => gpu,
            // Any GPU reaches it: one that is in use already, if there is one.
            Place::Host | Place::Managed => match self.lanes.lock().first().copied().or_else(|| self.cuda.gpus().next()) {
                Some(gpu) => gpu,
                None => return Err(Error::NoCuda(cuda::Unavailable::NoGpu)),
            },
        };
        let by_kernel = matches!(found.place, Place::Device(_)) && found.primary;
        Ok(Allocation { gpu, by_kernel, base: found.base, buffer_id: found.buffer_id })
    }

    /// Gives a GPU a lane if it has none.
    fn need_lane(&self, gpu: Gpu) -> Result<()> {
        let mut lanes = self.lanes.lock();
        if !lanes.contains(&gpu) {
            let lane = Lane::new(self.cuda, gpu, &self.mount, &self.settings, self.alignment)?;
            self.inbox.send(Message::Lane(gpu.index(), Box::new(lane)));
            lanes.push(gpu);
        }
        Ok(())
    }
}

impl fmt::Debug for Transfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfers({})", self.0.path.display())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.inbox.send(Message::End);
        if let Some(worker) = self.worker.take()
            && worker.thread().id() != std::thread::current().id()
        {
            let _ = worker.join(); // a panic there was reported there
        }
    }
}
