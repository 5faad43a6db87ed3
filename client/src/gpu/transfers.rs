//! The entry point of applications: it looks up what lies at their addresses, and hands requests
//! that can be done to the part that does them (inline, worker or stream).

use super::answer::{Answer, End, Pending};
use super::attachments::{cached, for_pages, in_ring, is_first_read};
use super::memory::pieces::{Blocks, piece_len};
use super::memory::registrations::Registrations;
use super::outcome::action;
use super::page_cache::PageCache;
use super::page_cache::cached_file::CachedFile;
use super::page_cache::cached_range::{Missing, NoRange};
use super::pipeline::copy_stream::CopyStream;
use super::pipeline::executor::Executor;
use super::pipeline::inline::{self, InlineExecutor, InlineExecutors};
use super::pipeline::mailbox::Mailbox;
use super::pipeline::worker::{Mail, PIECES, Worker};
use super::request::{Allocation, Cancel, Found, Parts, Request, Resident, Segment, SegmentPart, Source};
use super::settings::{Caching, Pool, Settings};
use super::stream::observer::{Observer, Watch};
use super::stream::submission::{Streams, Submission};
use crate::error::{Error, Result};
use crate::file::File;
use crate::mount::Mount;
use crate::ring::{Ring, RingName};
use crate::transfer::{Require, Transfer};
use gpunvme_abi::{Direction, MAX_OFFSET, Reason, Route};
use gpunvme_cuda::{self as cuda, Cuda, Gpu, Place, Scatter};
use parking_lot::Mutex;
use rustix::io::Errno;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Bytes of a staging pool beyond which no machine has the memory.
const LONGEST_POOL: usize = 1 << 40;

/// Moves bytes between the files of a mount and GPU memory. One of it serves a whole application:
/// copies of it share everything. It ends with the last copy, when everything is done; a last copy
/// that is dropped in a callback does not wait for that.
///
/// A process that forks must not use it in the child.
#[derive(Clone)]
pub struct Transfers {
    inner: Arc<Inner>,
    require: Require,
    cancel: Option<Cancel>,
}

struct Inner {
    cuda: &'static Cuda,
    mount: Mount,
    path: PathBuf,
    /// The worker's staging pool of each GPU.
    pool: Pool,
    /// What slots are aligned to.
    alignment: usize,
    registrations: Registrations,
    page_cache: Arc<PageCache>,
    /// What reads take of it, where that is not set for their file.
    caching: Caching,
    ring: RingName,
    mailbox: Arc<Mailbox<Mail>>,
    worker: Option<JoinHandle<()>>,
    /// The executors by which callers do their requests themselves.
    inline: InlineExecutors,
    /// GPUs in use, and the kernel of each.
    kernels: Mutex<Vec<(Gpu, Arc<Scatter>)>>,
    /// GPUs of which the worker has a copy stream.
    copy_streams: Mutex<Vec<Gpu>>,
    /// The block sizes of the device and of the filesystem.
    blocks: Blocks,
    /// The service of requests in streams, made for the first one.
    streams: Mutex<Option<Arc<Streams>>>,
}

impl Transfers {
    /// For the files of a mount, with the usual settings.
    ///
    /// # Errors
    /// [`Error::NoCuda`] where there is none; [`Error::Memory`] for a staging pool of more than 1
    /// TiB; what [`Ring::new`] says.
    pub fn new(mount: &Mount) -> Result<Transfers> {
        Transfers::with(mount, Settings::default())
    }

    /// For the files of a mount.
    ///
    /// # Errors
    /// As [`Transfers::new`].
    pub fn with(mount: &Mount, settings: Settings) -> Result<Transfers> {
        let longer = settings.staging.filter(|staging| *staging > LONGEST_POOL);
        if let Some(len) = longer {
            return Err(Error::Memory { len, errno: Errno::NOMEM });
        }
        let cuda = Cuda::load()?;
        let info = mount.info()?;
        let path = mount.connection().path.clone();
        let ring = Ring::new(mount, PIECES as u32)?;
        let name = ring.name().clone();
        let failed = |errno| Error::Path { path: path.clone(), action: "start a thread for transfers", errno };
        let mailbox = Arc::new(Mailbox::new().map_err(failed)?);
        let blocks = Blocks { read: info.logical_block.into(), write: info.block_size.into() };
        let page_cache = Arc::new(PageCache::new(cuda, settings.cached));
        let worker = Worker::new(Executor::new(ring, blocks, page_cache.clone()), mailbox.clone());
        let thread = std::thread::Builder::new().name("gpunvme".into());
        let thread = thread
            .spawn(move || {
                // Without it a capture of the application's would end; that is no reason to do
                // nothing.
                let _alone = cuda.leave_captures_alone();
                worker.run();
            })
            .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        let inner = Inner {
            cuda,
            mount: mount.clone(),
            caching: settings.caching,
            registrations: Registrations::new(cuda, mount, info.reason, settings.registered),
            inline: InlineExecutors::new(settings.callers, info.devices, page_cache.clone()),
            page_cache,
            pool: settings.pool(info.devices),
            alignment: (info.memory_alignment.max(info.logical_block) as usize).max(512),
            ring: name,
            mailbox,
            worker: Some(thread),
            kernels: Mutex::default(),
            copy_streams: Mutex::default(),
            blocks,
            streams: Mutex::default(),
            path,
        };
        Ok(Transfers { inner: Arc::new(inner), require: Require::default(), cancel: None })
    }

    /// A copy whose requests come with demands on their route. Where a request cannot meet them it
    /// fails with [`Error::Transfer`] before anything moved.
    #[must_use]
    pub fn requiring(&self, require: Require) -> Transfers {
        Transfers { require, ..self.clone() }
    }

    /// A copy whose requests `cancel` calls off, instead of what called off those of this one.
    /// Requests in the order of a stream are not called off.
    #[must_use]
    pub fn cancellable(&self, cancel: &Cancel) -> Transfers {
        Transfers { cancel: Some(cancel.clone()), ..self.clone() }
    }

    /// Reads each segment into memory, and waits for it. File offsets and addresses need no
    /// alignment. A segment that reaches past the end of the file is read as far as the file goes:
    /// the sum says less than was asked for then.
    ///
    /// # Safety
    /// The memory of the segments is the caller's to write to, does not overlap, and nothing else
    /// uses it until this returns: no thread, no kernel, no copy.
    ///
    /// # Errors
    /// [`Error::UnknownMemory`], [`Error::Cuda`] and [`Error::Memory`] before anything was read;
    /// [`Error::RingClosed`] after the mount's end; [`Error::Transfer`] and [`Error::Copy`] say
    /// what was, and any segment may have changed in part then.
    pub unsafe fn read(&self, file: &File, segments: &[Segment]) -> Result<Transfer> {
        self.perform(Direction::Read, file, segments)
    }

    /// Writes each segment from memory, and waits for it. The file becomes longer where it ends
    /// before. Offsets and addresses need no alignment. Of segments that overlap in the file it is
    /// not defined which is there afterwards.
    ///
    /// # Safety
    /// The memory of the segments is the caller's, and nothing changes it until this returns: no
    /// thread, no kernel, no copy.
    ///
    /// # Errors
    /// As [`Transfers::read`].
    pub unsafe fn write(&self, file: &File, segments: &[Segment]) -> Result<Transfer> {
        self.perform(Direction::Write, file, segments)
    }

    /// Begins a read, and calls `done` with what [`Transfers::read`] would have returned. That
    /// happens on the library's thread, which serves many requests: it should do little, and must
    /// not wait for another request.
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
        self.begin(Direction::Read, file, segments, End::Callback(Box::new(done)))
    }

    /// Begins a write, and calls `done` with what [`Transfers::write`] would have returned, as
    /// [`Transfers::read_then`] does.
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
        self.begin(Direction::Write, file, segments, End::Callback(Box::new(done)))
    }

    /// The route that transfers to and from the memory at an address take now, and why not a
    /// faster one. Where that is `p2p` the memory is registered then: what the first transfer
    /// would have to do is done.
    ///
    /// # Errors
    /// [`Error::UnknownMemory`] where CUDA knows none; [`Error::Cuda`] where it does not answer.
    pub fn route(&self, address: u64) -> Result<(Route, Reason)> {
        let _alone = self.inner.cuda.leave_captures_alone(); // as far as it can be: see `begin`
        let mut parts = Parts::new();
        self.inner.look_up(&self.inner.path, 0, &Segment { file_offset: 0, address, len: 1 }, None, &mut None, &mut parts)?;
        let registered = parts.first().map(|part| part.registered.as_ref().map(|_| ()));
        Ok(match registered {
            Some(Err(reason)) => (Route::Bounce, *reason),
            _ => (Route::P2p, Reason::None),
        })
    }

    /// Has the kernel read `len` bytes of a file into its page cache, from `offset` on, where it
    /// has not got them, and registers them with CUDA: reads of them to any GPU take
    /// [`Route::Cache`] from then on, for as long as the file is open, the kernel keeps them, and
    /// nothing else needs the room. Returns how many bytes can be read so, among them those that
    /// could be before.
    ///
    /// # Errors
    /// [`Error::Path`] if the kernel does not read or map the file; [`Error::NoCuda`] and
    /// [`Error::Cuda`] if no GPU can register it.
    pub fn prepare(&self, file: &File, offset: u64, len: u64) -> Result<u64> {
        let inner = &*self.inner;
        let _alone = inner.cuda.leave_captures_alone();
        let failed = |errno| Error::Path { path: file.path().to_owned(), action: "map its pages", errno };
        let gpu = inner.cuda.gpus().next().ok_or(Error::NoCuda(cuda::Unavailable::NoGpu))?;
        let cached = cached(file);
        let descriptor = cached.descriptor(|| for_pages(file)).map_err(failed)?;
        let len = len.min(file.size()?.saturating_sub(offset));
        inner.page_cache.prepare(cached, gpu, &descriptor, (offset, len), Missing::ReadIn).map_err(|error| match error {
            NoRange::Cuda(error) => {
                let on = "a file's pages".to_owned();
                Error::Cuda { path: file.path().to_owned(), action: "register", on, error }
            }
            NoRange::Map(errno) => failed(errno),
            NoRange::ByProcessor => failed(Errno::OPNOTSUPP),
            NoRange::NotResident | NoRange::NoRoom | NoRange::Hidden => {
                unreachable!("a cached range that is not there is no error")
            }
        })
    }

    /// Gives up what is registered of the `len` bytes of memory at `address`, as soon as no
    /// transfer uses it. Registered memory stays in existence, even if the application frees it:
    /// until this is called, or some other memory is registered. `bounce` needs none of this.
    pub fn forget(&self, address: u64, len: u64) {
        self.inner.registrations.forget(address, len);
    }

    /// What calls off its requests.
    pub(super) fn cancel(&self) -> Option<&Cancel> {
        self.cancel.as_ref()
    }

    pub(super) fn failed(&self, action: &'static str, errno: Errno) -> Error {
        Error::Path { path: self.inner.path.clone(), action, errno }
    }

    /// Looks up the memory of a request, and does it, or waits until the worker has.
    fn perform(&self, direction: Direction, file: &File, segments: &[Segment]) -> Result<Transfer> {
        let _alone = self.inner.cuda.leave_captures_alone(); // as in `begin`
        let found = self.look_up(direction, file, segments)?;
        let answer = Arc::new(Answer::default());
        let end = End::Pending(answer.clone());
        if let Some(mut executor) = self.inner.inline_executor(&found) {
            // What has to come from the page cache, and has left it since it was looked up, does
            // not come from the device.
            let may_call = direction == Direction::Read && self.require.route != Some(Route::Cache);
            let is_one_piece = may_call && found.is_one_piece(self.inner.blocks);
            if is_one_piece && !self.is_cached(file, &found) && is_first_read(file, &self.inner.mount) {
                let request = self.request(direction, (file, Source::Call(file.path().to_owned())), found, end)?;
                return inline::serve(&mut executor, |executor| executor.read_by_call(request, file), &answer);
            }
            // Where its ring takes no further file, the worker's may have this one.
            if let Ok(attached) = in_ring(file, executor.ring()) {
                let mut request = self.request(direction, (file, Source::Ring(attached)), found, end)?;
                request.piece_len = request.piece_len.min(inline::PIECE);
                return inline::serve(&mut executor, |executor| executor.begin(request), &answer);
            }
        }
        self.hand_over(direction, file, found, end)?;
        Pending(answer).wait()
    }

    /// Whether there are cached ranges for all of a read that may use them.
    fn is_cached(&self, file: &File, found: &Found) -> bool {
        let cached = cached(file);
        self.takes_cached() && found.parts.iter().all(|part| part.is_copied_to() && cached.has_all(part.file_offset, part.len))
    }

    /// Looks up the memory of a request, and hands it to the worker.
    pub(super) fn begin(&self, direction: Direction, file: &File, segments: &[Segment], end: End) -> Result<()> {
        // The first use of a GPU or an allocation asks CUDA for what would end a capture, also one
        // on another thread; without it the request is done all the same.
        let _alone = self.inner.cuda.leave_captures_alone();
        let found = self.look_up(direction, file, segments)?;
        self.hand_over(direction, file, found, end)
    }

    fn hand_over(&self, direction: Direction, file: &File, found: Found, end: End) -> Result<()> {
        let inner = &*self.inner;
        for gpu in found.gpus() {
            inner.need_copy_stream(gpu)?;
        }
        let request = self.request(direction, (file, Source::Ring(in_ring(file, &inner.ring)?)), found, end)?;
        inner.mailbox.send(|mail| mail.requests.push(request));
        Ok(())
    }

    fn request(&self, direction: Direction, (file, source): (&File, Source), found: Found, end: End) -> Result<Request> {
        let Found { parts, bytes } = found;
        let is_written_back = file.write_back_all(parts.iter().map(|part| (part.file_offset, part.len)))?;
        let (require, cancel) = (self.require, self.cancel.clone());
        let cached = (direction == Direction::Read && self.takes_cached()).then(|| cached(file).clone());
        let resident = cached.as_ref().map_or(Err(Reason::CachingOff), |cached| self.resident(file, cached));
        if let (Some(cached), Ok(Resident { file, missing: missing @ Missing::ReadIn })) = (&cached, &resident) {
            for part in parts.iter().filter(|part| part.is_copied_to()) {
                self.inner.page_cache.is_read(cached, part.allocation.gpu, file, (part.file_offset, part.len), *missing);
            }
        }
        let cached = cached.map(|cached| (cached, self.inner.page_cache.now()));
        let piece_len = piece_len(bytes);
        Ok(Request { direction, source, parts, require, is_written_back, piece_len, cached, resident, cancel, end })
    }

    /// Whether reads may be copied from cached ranges.
    fn takes_cached(&self) -> bool {
        matches!(self.require.route, None | Some(Route::Cache))
    }

    /// The file of a read, if the read takes what the page cache has, and else why not.
    fn resident(&self, file: &File, cached: &CachedFile) -> std::result::Result<Resident, Reason> {
        if self.require != Require::default() {
            return Err(Reason::CachingOff);
        }
        let missing = match cached.caching().unwrap_or(self.inner.caching) {
            Caching::Never => return Err(Reason::CachingOff),
            Caching::Resident => Missing::Refuse,
            Caching::ReadAgain => Missing::ReadIn,
        };
        let file = cached.descriptor(|| for_pages(file)).map_err(|_| Reason::NotCached)?;
        Ok(Resident { file, missing })
    }

    /// Looks up the memory of a request, and puts it into a stream.
    pub(super) fn begin_on_stream(
        &self,
        direction: Direction,
        file: &File,
        segments: &[Segment],
        stream: usize,
        observer: Option<Box<dyn Observer>>,
        late: bool,
    ) -> Result<Pending> {
        let (inner, require) = (&*self.inner, self.require);
        let _alone = inner.cuda.leave_captures_alone();
        let Found { mut parts, bytes } = self.look_up(direction, file, segments)?;
        let (path, action) = (file.path(), action(direction));
        if require.route == Some(Route::Cache) {
            // Its thread makes no call of CUDA, and could not look at what was copied.
            return Err(Error::Transfer {
                path: path.to_owned(),
                action,
                errno: Errno::OPNOTSUPP,
                reason: Reason::RouteNotAvailable,
                segment: None,
                offset: None,
                done: Transfer::default(),
            });
        }
        let failed = |error| Error::in_stream(path, action, stream, error);
        // SAFETY: the caller of `read_on_stream` or `write_on_stream` vouches for it.
        let handle = unsafe { inner.cuda.application_stream(stream) }.map_err(failed)?;
        // The library would not learn whether a graph is launched, and how often.
        if handle.is_captured().map_err(failed)? {
            return Err(Error::StreamCaptured { path: path.to_owned(), action, stream });
        }
        let of = inner.cuda.gpu_of(&handle).map_err(failed)?;
        for part in parts.iter_mut().filter(|_| direction == Direction::Read) {
            if part.registered.as_ref().is_ok_and(|lease| !lease.is_for_streams_of(&of)) {
                // What the device wrote itself would not be there for the stream.
                part.registered = Err(Reason::None);
            }
        }
        let staged = parts.first().filter(|part| part.registered.is_err()).map(|part| part.allocation.gpu);
        let scatter = staged.map(|gpu| inner.kernel(gpu)).transpose()?;
        let watch = Watch::new(observer);
        let resident = match direction {
            Direction::Read => self.resident(file, cached(file)).map(|resident| (cached(file).clone(), resident.file)),
            Direction::Write => Err(Reason::CachingOff),
        };
        let (name, most) = (stream, segments.first().copied().filter(|_| late));
        let stream = handle;
        let submission = Submission { direction, file, resident, parts, require, bytes, name, stream, of, scatter, watch, most };
        inner.streams()?.submit(submission).map(Pending)
    }

    fn look_up(&self, direction: Direction, file: &File, segments: &[Segment]) -> Result<Found> {
        let (inner, require) = (&*self.inner, self.require);
        let refused = |errno, reason, segment| Error::Transfer {
            path: file.path().to_owned(),
            action: action(direction),
            errno,
            reason,
            segment,
            offset: None,
            done: Transfer::default(),
        };
        if require.route == Some(Route::Host) || (require.route, direction) == (Some(Route::Cache), Direction::Write) {
            return Err(refused(Errno::OPNOTSUPP, Reason::RouteNotAvailable, None));
        }
        let mut parts = Parts::with_capacity(segments.len());
        let mut bytes = 0u64;
        let mut last = None;
        for (index, segment) in segments.iter().enumerate() {
            if segment.file_offset.checked_add(segment.len).is_none_or(|end| end > MAX_OFFSET) {
                return Err(refused(Errno::INVAL, Reason::None, Some(index as u32)));
            }
            inner.look_up(file.path(), index as u32, segment, require.route, &mut last, &mut parts)?;
            bytes = bytes.saturating_add(segment.len);
        }
        if require.route == Some(Route::Cache) {
            let cached = cached(file);
            let missing = parts.iter().find(|part| !part.is_copied_to() || !cached.has_all(part.file_offset, part.len));
            if let Some(part) = missing {
                return Err(refused(Errno::OPNOTSUPP, Reason::NotCached, Some(part.segment)));
            }
        }
        let staged = parts.iter().find_map(|part| Some((part.segment, *part.registered.as_ref().err()?)));
        if let (Some(Route::P2p), Some((segment, reason))) = (require.route, staged) {
            return Err(refused(Errno::OPNOTSUPP, reason, Some(segment)));
        }
        Ok(Found { parts, bytes })
    }
}

impl Inner {
    /// Appends the parts of a segment, one an allocation, or a part of one that is registered.
    /// `last` is the allocation that was found last.
    fn look_up(
        &self,
        path: &Path,
        index: u32,
        segment: &Segment,
        route: Option<Route>,
        last: &mut Option<(cuda::Allocation, Allocation)>,
        parts: &mut Parts,
    ) -> Result<()> {
        let mut within = 0;
        while within < segment.len {
            let unknown = || {
                let address = segment.address.saturating_add(within);
                Error::UnknownMemory { path: path.to_owned(), segment: index, address }
            };
            let address = segment.address.checked_add(within).ok_or_else(unknown)?;
            let (found, allocation) = match *last {
                Some(last) if (last.0.base..last.0.base + last.0.len).contains(&address) => last,
                _ => {
                    let failed = |error| {
                        let on = format!("the memory at {address:#x} (segment {index})");
                        Error::Cuda { path: path.to_owned(), action: "look up", on, error }
                    };
                    let found = self.cuda.memory_at(address).map_err(failed)?.ok_or_else(unknown)?;
                    if !(found.base..found.base + found.len).contains(&address) {
                        return Err(unknown());
                    }
                    *last.insert((found, self.allocation(&found)?))
                }
            };
            let registered = match route {
                Some(Route::Bounce | Route::Cache) => Err(Reason::None), // as the caller wishes
                _ => self.registrations.get(&found, address),
            };
            let rest = registered.as_ref().map_or(found.base + found.len - address, |lease| lease.len);
            let (file_offset, len) = (segment.file_offset + within, rest.min(segment.len - within));
            parts.push(SegmentPart { file_offset, address, len, segment: index, allocation, registered });
            within += len;
        }
        Ok(())
    }

    /// The facts of an allocation that the worker needs.
    fn allocation(&self, found: &cuda::Allocation) -> Result<Allocation> {
        let gpu = match found.place {
            Place::Device(gpu) => gpu,
            // Any GPU reaches it: one that is in use already, if there is one.
            Place::Host | Place::Managed => {
                match self.kernels.lock().first().map(|(gpu, _)| *gpu).or_else(|| self.cuda.gpus().next()) {
                    Some(gpu) => gpu,
                    None => return Err(Error::NoCuda(cuda::Unavailable::NoGpu)),
                }
            }
        };
        let host = found.host.filter(|_| matches!(found.place, Place::Host));
        Ok(Allocation { gpu, by_kernel: found.by_kernel, host, base: found.base, len: found.len, buffer_id: found.buffer_id })
    }

    /// A free executor for a request, if it is short enough and there is one.
    fn inline_executor(&self, found: &Found) -> Option<InlineExecutor<'_>> {
        let has_all = |executor: &Executor| found.gpus().all(|gpu| executor.has_copy_stream(gpu));
        let mut executor = self.inline.take(&self.mount, self.blocks, (found.bytes, found.parts.len()), has_all)?;
        for gpu in found.gpus() {
            if !executor.has_copy_stream(gpu) {
                executor
                    .add_copy_stream(gpu, self.copy_stream(gpu, inline::POOL).inspect_err(|error| self.inline.fill(error)).ok()?);
            }
        }
        Some(executor)
    }

    /// Gives the worker a copy stream of a GPU if it has none.
    fn need_copy_stream(&self, gpu: Gpu) -> Result<()> {
        let mut copy_streams = self.copy_streams.lock();
        if copy_streams.contains(&gpu) {
            return Ok(());
        }
        let copy_stream = self.copy_stream(gpu, self.pool)?;
        self.mailbox.send(|mail| mail.copy_streams.push((gpu, copy_stream)));
        copy_streams.push(gpu);
        Ok(())
    }

    /// The kernel of a GPU.
    fn kernel(&self, gpu: Gpu) -> Result<Arc<Scatter>> {
        let known = || self.kernels.lock().iter().find(|(known, _)| *known == gpu).map(|(_, kernel)| kernel.clone());
        if let Some(kernel) = known() {
            return Ok(kernel);
        }
        self.need_copy_stream(gpu)?;
        Ok(known().expect("each copy_stream has one"))
    }

    /// A new copy stream of a GPU, with such a pool.
    fn copy_stream(&self, gpu: Gpu, pool: Pool) -> Result<Box<CopyStream>> {
        let new = |kernel| CopyStream::new(self.cuda, gpu, &self.mount, pool, self.alignment, kernel).map(Box::new);
        let mut kernels = self.kernels.lock();
        if let Some((_, kernel)) = kernels.iter().find(|(known, _)| *known == gpu) {
            let kernel = kernel.clone();
            drop(kernels);
            return new(Some(kernel));
        }
        let copy_stream = new(None)?;
        kernels.push((gpu, copy_stream.scatter.clone()));
        Ok(copy_stream)
    }

    /// The service of requests in streams, started if need be.
    fn streams(&self) -> Result<Arc<Streams>> {
        let mut streams = self.streams.lock();
        if let Some(streams) = &*streams {
            return Ok(streams.clone());
        }
        let started = Arc::new(Streams::start(&self.mount, self.blocks, self.alignment, self.page_cache.clone())?);
        Ok(streams.insert(started).clone())
    }
}

impl fmt::Debug for Transfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfers({})", self.inner.path.display())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The last are the worker's and those of windows then, which end when all requests
        // are done: this may be a callback, which waits for neither thread, as it runs on one.
        self.kernels.get_mut().clear();
        let inline = std::mem::replace(&mut self.inline, InlineExecutors::new(0, 1, self.page_cache.clone()));
        self.mailbox.send(|mail| mail.end = Some(inline));
        let streams = self.streams.get_mut().take().and_then(Arc::into_inner).map(Streams::end);
        let threads = || self.worker.iter().chain(&streams);
        if threads().all(|thread| thread.thread().id() != std::thread::current().id()) {
            for thread in streams.into_iter().chain(self.worker.take()) {
                let _ = thread.join(); // a panic there was reported there
            }
        }
    }
}
