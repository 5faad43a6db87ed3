//! The layers of a model that is larger than the memory it is given, loaded in their order while
//! those before are computed.
//!
//! A layer stays in one of three tiers: in memory of the GPU, in pinned host memory, or on the SSD.
//! Layers of the second and third have buffers in the GPU's memory, in turns. What fills them is
//! put into a stream of the loader's own, by a thread, because a stream takes a limited number of
//! operations: the thread waits for room, and the application's does not. Two events order each
//! buffer: the application's stream waits until it is filled, and the loader's until it was used.
//!
//! The application's stream never waits for what is not in the loader's stream yet: a call that
//! waits for the whole GPU (`cudaFree`) ends, wherever the thread is. The mutex is held for no call
//! of CUDA.
//!
//! It guards that no layer is taken for loaded of which the file had less: in the rest of its
//! memory are the bytes of another.

mod placement;

pub use self::placement::Tier;
use self::placement::{Placed, place};
use super::answer::Pending;
use super::transfers::Transfers;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::file::File;
use crate::transfer::Transfer;
use gpunvme_cuda::{Cuda, CudaError, DeviceAllocation, Event, Gpu, HostRegistration, Stream, Which};
use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;

/// What a [`LayerLoader`] may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSettings {
    /// Bytes of GPU memory for layers that stay there, besides the buffers. None unless told.
    pub resident: u64,
    /// Bytes of pinned host memory for layers that stay there. None unless told.
    pub pinned: u64,
    /// Buffers of the size of the longest layer that does not stay in the GPU's memory: at least 2,
    /// of which one is filled while another is used. 2 unless told.
    pub buffers: usize,
}

impl Default for LayerSettings {
    fn default() -> Self {
        LayerSettings { resident: 0, pinned: 0, buffers: 2 }
    }
}

/// A layer that is in the GPU's memory for what is put into the stream next.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its number, from 0 on.
    pub number: usize,
    /// Where it came from.
    pub tier: Tier,
    /// The device addresses of its tensors, in the order of their ranges.
    pub tensors: Vec<u64>,
}

/// Loads the layers of a model in a circle: layer 0 to the last, and again.
///
/// ```no_run
/// use gpunvme::gpu::{LayerLoader, LayerSettings, Transfers};
/// use gpunvme::{File, Mount};
///
/// let transfers = Transfers::new(&Mount::open("/data")?)?;
/// // Of each layer, where its tensors are in the file.
/// let layers = vec![vec![4096..8192, 8192..20480], vec![20480..24576, 24576..36864]];
/// let file = File::open("/data/model.safetensors")?;
/// let mut loader = LayerLoader::new(&transfers, file, 0, &layers, LayerSettings::default())?;
/// # let stream = 0;
/// for _ in 0..layers.len() {
///     // SAFETY: the stream lives.
///     let layer = unsafe { loader.next(stream) }?;
///     // Kernels that use layer.tensors are put into the stream here.
/// }
/// unsafe { loader.finish(stream) }?;
/// # Ok::<(), gpunvme::Error>(())
/// ```
///
/// Dropping it waits for what was put into streams.
#[derive(Debug)]
pub struct LayerLoader {
    layers: Vec<Placed>,
    /// Layers that were handed out.
    count: u64,
    /// Uses of buffers that were handed out.
    uses: u64,
    /// The buffer of the layer that was handed out last, where it has one.
    in_use: Option<usize>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    // Memory goes after the thread.
    _resident: Vec<DeviceAllocation>,
}

/// What the thread uses.
struct Feeder {
    transfers: Transfers,
    file: File,
    /// Those that need buffers, in their order.
    layers: Vec<Placed>,
    shared: Arc<Shared>,
    _pinned: Vec<(HostRegistration, Buffer)>,
}

/// Between the thread and the application's.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    state: Mutex<State>,
    changed: Condvar,
    stream: Stream,
    buffers: Vec<FilledBuffer>,
}

#[derive(Debug)]
struct FilledBuffer {
    memory: DeviceAllocation,
    /// Reached by the loader's stream when it is filled.
    filled: Event,
    /// Reached by the application's stream when it was used.
    used: Event,
}

#[derive(Debug, Default)]
struct State {
    /// Fillings that are in the stream.
    begun: u64,
    /// Uses that the application's stream has the end of.
    ended: u64,
    /// Reads in the stream, oldest first.
    reads: VecDeque<Reading>,
    /// Why there will be no more.
    failed: Option<Error>,
    stop: bool,
}

/// A read in the stream.
#[derive(Debug)]
struct Reading {
    filling: u64,
    /// The number of the layer, and what it has.
    layer: usize,
    bytes: u64,
    pending: Pending,
}

impl LayerLoader {
    /// For the layers of a file, each as the ranges of its tensors there, and a GPU by its number
    /// among those that the process may use. Layers for the first two tiers are read now; which
    /// those are is spread evenly over the model.
    ///
    /// # Errors
    /// [`Error::Path`] with `EINVAL` where there is no layer, or one of no bytes;
    /// [`Error::NotDone`] with `EIO` where the file ends before a layer does; [`Error::Memory`] and
    /// [`Error::Cuda`] where there is not as much memory; as [`Transfers::read`].
    pub fn new(
        transfers: &Transfers,
        file: File,
        gpu: u32,
        layers: &[Vec<Range<u64>>],
        settings: LayerSettings,
    ) -> Result<LayerLoader> {
        let (path, gpu) = (file.path().to_owned(), Cuda::load()?.gpu(Which::Index(gpu))?);
        let failed = |error| Error::on_gpu(&path, "load layers into the memory of", &gpu, error);
        let mut placed = place(&path, layers, settings.resident, settings.pinned)?;
        let size = file.size()?;
        if let Some(layer) = placed.iter().find(|layer| layer.ranges.iter().any(|range| range.end > size)) {
            return Err(ends_before(&path, layer.number));
        }
        let (mut resident, mut pinned) = (Vec::new(), Vec::new());
        for layer in &mut placed {
            match layer.tier {
                Tier::Resident => {
                    let memory = gpu.alloc(layer.len as usize).map_err(failed)?;
                    layer.address = memory.address();
                    resident.push(memory);
                }
                Tier::Pinned => {
                    let pages = (layer.len as usize).checked_next_multiple_of(4096);
                    let mut memory = Buffer::memfd(pages.unwrap_or(usize::MAX))?;
                    let (address, len) = (NonNull::from(&mut memory[..]).cast(), memory.len());
                    // SAFETY: it is before the buffer in the pair, and dropped before it.
                    let registration = unsafe { HostRegistration::new(&gpu, address, len) }.map_err(failed)?;
                    layer.address = registration.device_address(&gpu).map_err(failed)?;
                    pinned.push((registration, memory));
                }
                Tier::Ssd => continue,
            }
            // SAFETY: the memory was allocated just now, and is as long as the layer.
            let read = unsafe { transfers.read(&file, &layer.segments(layer.address)) };
            is_whole(&path, layer.number, layer.bytes(), read)?;
        }
        let streamed: Vec<_> = placed.iter().filter(|layer| layer.tier != Tier::Resident).cloned().collect();
        let longest = streamed.iter().map(|layer| layer.len).max();
        let count = if longest.is_some() { settings.buffers.clamp(2, streamed.len().max(2)) } else { 0 };
        let buffers = (0..count).map(|_| FilledBuffer::new(&gpu, longest.unwrap_or(0) as usize));
        let shared = Arc::new(Shared {
            path: path.clone(),
            state: Mutex::default(),
            changed: Condvar::new(),
            stream: gpu.stream().map_err(failed)?,
            buffers: buffers.collect::<std::result::Result<_, _>>().map_err(failed)?,
        });
        let mut loader = LayerLoader {
            layers: placed,
            count: 0,
            uses: 0,
            in_use: None,
            shared: shared.clone(),
            thread: None,
            _resident: resident,
        };
        if !streamed.is_empty() {
            let feeder = Feeder { transfers: transfers.clone(), file, layers: streamed, shared, _pinned: pinned };
            let spawned = std::thread::Builder::new().name("gpunvme-layers".into()).spawn(move || feeder.run());
            let failed = |error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
                Error::Path { path, action: "start a thread for layers", errno }
            };
            loader.thread = Some(spawned.map_err(failed)?);
        }
        Ok(loader)
    }

    /// As [`LayerLoader::new`], for a file of safetensors: each layer as the names of its tensors.
    ///
    /// # Errors
    /// As [`LayerLoader::new`] and [`File::safetensors`]; [`Error::Path`] with `ENOENT` where the
    /// file has no tensor of a name.
    pub fn by_names<Name: AsRef<str>>(
        transfers: &Transfers,
        file: File,
        gpu: u32,
        layers: &[Vec<Name>],
        settings: LayerSettings,
    ) -> Result<LayerLoader> {
        let tensors: HashMap<_, _> = file.safetensors()?.into_iter().map(|tensor| (tensor.name, tensor.range)).collect();
        let range = |name: &Name| {
            tensors.get(name.as_ref()).cloned().ok_or_else(|| {
                tracing::debug!(name = name.as_ref(), "no such tensor");
                let action = "load a layer from it: it has no tensor of one of the names";
                Error::Path { path: file.path().to_owned(), action, errno: Errno::NOENT }
            })
        };
        let ranges = layers.iter().map(|names| names.iter().map(range).collect()).collect::<Result<Vec<_>>>()?;
        LayerLoader::new(transfers, file, gpu, &ranges, settings)
    }

    /// How many layers there are.
    #[allow(clippy::len_without_is_empty)] // there is at least one
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of the GPU's memory that it takes.
    pub fn gpu_bytes(&self) -> u64 {
        let resident = self.layers.iter().filter(|layer| layer.tier == Tier::Resident).map(|layer| layer.len);
        resident.chain(self.shared.buffers.iter().map(|buffer| buffer.memory.len() as u64)).sum()
    }

    /// The next layer: what is put into the stream from now on sees it, until the next call. What
    /// was put into the stream since the last call was the work with the layer before; its memory
    /// is filled anew when the stream has done that.
    ///
    /// The call waits until the layer's filling is in the loader's stream, not for the filling.
    /// A read that fails is told by a later call, or by [`LayerLoader::finish`]: what was computed
    /// with its layer is void.
    ///
    /// # Safety
    /// `stream` is a `CUstream` or `cudaStream_t` of the GPU, the same for all calls, which
    /// outlives this; 0 is the default stream.
    ///
    /// # Errors
    /// Of a read before, as [`Transfers::read`], or [`Error::NotDone`] with `EIO` where the file
    /// became so short that it ends before a layer; [`Error::Cuda`]. After one there are no more
    /// layers. [`Error::StreamCaptured`], which changes nothing.
    pub unsafe fn next(&mut self, stream: usize) -> Result<Layer> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { self.stream(stream) }?;
        self.end_use(&stream)?;
        let number = (self.count % self.layers.len() as u64) as usize;
        let layer = &self.layers[number];
        let mut address = layer.address;
        if layer.tier == Tier::Resident {
            self.shared.wait_for(0)?;
        } else {
            self.shared.wait_for(self.uses + 1)?;
            let at = (self.uses % self.shared.buffers.len() as u64) as usize;
            let buffer = &self.shared.buffers[at];
            stream.wait(&buffer.filled).map_err(|error| self.failed(error))?;
            address = buffer.memory.address();
            self.uses += 1;
            self.in_use = Some(at);
        }
        self.count += 1;
        Ok(Layer { number, tier: layer.tier, tensors: layer.offsets.iter().map(|offset| address + offset).collect() })
    }

    /// Ends the work with the last layer, and waits until all that was handed out was loaded and
    /// used. [`LayerLoader::next`] goes on with the next layer after it.
    ///
    /// # Safety
    /// As for [`LayerLoader::next`].
    ///
    /// # Errors
    /// As for [`LayerLoader::next`].
    pub unsafe fn finish(&mut self, stream: usize) -> Result<()> {
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { self.stream(stream) }?;
        self.end_use(&stream)?;
        stream.synchronize().map_err(|error| self.failed(error))?;
        self.shared.wait_for_answers(self.uses);
        let mut state = self.shared.state.lock();
        self.shared.take_answers(&mut state); // of those ahead some may be done
        state.failed.take().map_or(Ok(()), |error| {
            state.stop = true;
            Err(error)
        })
    }

    /// Has the stream reach the end of the use of the buffer that was handed out last. Until that
    /// is in the stream the use goes on, and nothing is read into the buffer.
    fn end_use(&mut self, stream: &Stream) -> Result<()> {
        if let Some(at) = self.in_use {
            stream.record(&self.shared.buffers[at].used).map_err(|error| self.failed(error))?;
            self.in_use = None;
            self.shared.state.lock().ended += 1;
            self.shared.changed.notify_all();
        }
        Ok(())
    }

    /// A stream of the application's, which is not captured: the events would be in a graph then,
    /// which runs at any time, and any number of times.
    unsafe fn stream(&self, number: usize) -> Result<Stream> {
        let failed = |error| Error::in_stream(&self.shared.path, "load layers", number, error);
        // SAFETY: the caller vouches for the stream.
        let stream = unsafe { Cuda::load()?.application_stream(number) }.map_err(failed)?;
        if stream.is_captured().map_err(failed)? {
            return Err(Error::StreamCaptured { path: self.shared.path.clone(), action: "load layers", stream: number });
        }
        Ok(stream)
    }

    /// CUDA refused something: there are no more layers.
    fn failed(&self, error: CudaError) -> Error {
        self.shared.state.lock().stop = true;
        self.shared.changed.notify_all();
        Error::in_stream(&self.shared.path, "load layers", self.shared.stream.number(), error)
    }
}

impl Drop for LayerLoader {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there was reported there
        }
        if let Err(error) = self.shared.stream.synchronize() {
            tracing::debug!(%error, "a stream for layers failed");
        }
    }
}

impl FilledBuffer {
    fn new(gpu: &Gpu, len: usize) -> std::result::Result<FilledBuffer, CudaError> {
        Ok(FilledBuffer { memory: gpu.alloc(len)?, filled: gpu.event()?, used: gpu.event()? })
    }
}

impl Shared {
    /// Until so many fillings are in the stream. An error where there are no more.
    fn wait_for(&self, fillings: u64) -> Result<()> {
        let mut state = self.state.lock();
        loop {
            self.take_answers(&mut state);
            if let Some(error) = state.failed.take() {
                state.stop = true;
                self.changed.notify_all();
                return Err(error);
            }
            if state.stop {
                let path = self.path.clone();
                return Err(Error::Path { path, action: "load layers of it after an error", errno: Errno::CANCELED });
            }
            if state.begun >= fillings {
                return Ok(());
            }
            self.changed.wait(&mut state);
        }
    }

    /// Waits for the outcome of the first so many fillings, which the stream has passed: it does so
    /// a little before the outcome is known.
    fn wait_for_answers(&self, fillings: u64) {
        let oldest = || {
            let mut state = self.state.lock();
            let is_one = state.reads.front().is_some_and(|read| read.filling < fillings);
            if is_one { state.reads.pop_front() } else { None }
        };
        while let Some(read) = oldest() {
            if let Err(error) = read.outcome(&self.path) {
                self.state.lock().failed.get_or_insert(error);
            }
        }
    }

    /// Keeps the first error of reads that are done.
    fn take_answers(&self, state: &mut State) {
        while state.reads.front().is_some_and(|read| read.pending.is_done())
            && let Some(read) = state.reads.pop_front()
        {
            if let Err(error) = read.outcome(&self.path) {
                state.failed.get_or_insert(error);
            }
        }
    }
}

impl Reading {
    /// Waits for it.
    fn outcome(self, path: &Path) -> Result<()> {
        is_whole(path, self.layer, self.bytes, self.pending.wait())
    }
}

impl Feeder {
    /// Puts fillings into the stream, ahead of the layers that are handed out by as many as there
    /// are buffers.
    fn run(self) {
        let buffers = self.shared.buffers.len() as u64;
        for filling in 0.. {
            {
                let mut state = self.shared.state.lock();
                while !state.stop && state.failed.is_none() && state.ended + buffers <= filling {
                    self.shared.changed.wait(&mut state);
                }
                if state.stop || state.failed.is_some() {
                    break;
                }
            }
            let filled = self.fill(filling);
            let mut state = self.shared.state.lock();
            match filled {
                Ok(read) => {
                    state.reads.extend(read);
                    state.begun = filling + 1;
                }
                Err(error) => {
                    state.failed.get_or_insert(error);
                }
            }
            self.shared.changed.notify_all();
        }
        // What is in the stream uses memory of this.
        if let Err(error) = self.shared.stream.synchronize() {
            tracing::debug!(%error, "a stream for layers failed");
        }
    }

    fn fill(&self, filling: u64) -> Result<Option<Reading>> {
        let layer = &self.layers[(filling % self.layers.len() as u64) as usize];
        let (stream, buffers) = (&self.shared.stream, &self.shared.buffers);
        let buffer = &buffers[(filling % buffers.len() as u64) as usize];
        let failed = |error| Error::in_stream(self.file.path(), "load layers", stream.number(), error);
        if filling >= buffers.len() as u64 {
            stream.wait(&buffer.used).map_err(failed)?;
        }
        let address = buffer.memory.address();
        let read = match layer.tier {
            Tier::Ssd => {
                let segments = layer.segments(address);
                // SAFETY: the buffer is as long as any layer, and the stream's until it is filled.
                let pending = unsafe { self.transfers.read_on_stream(&self.file, &segments, stream.number()) }?;
                Some(Reading { filling, layer: layer.number, bytes: layer.bytes(), pending })
            }
            _ => {
                // SAFETY: both are as long, and live until the stream was waited for.
                unsafe { stream.copy(address, layer.address, layer.len as usize) }.map_err(failed)?;
                None
            }
        };
        stream.record(&buffer.filled).map_err(failed)?;
        Ok(read)
    }
}

/// Whether a read brought all bytes of a layer.
fn is_whole(path: &Path, layer: usize, bytes: u64, read: Result<Transfer>) -> Result<()> {
    if read?.bytes() == bytes { Ok(()) } else { Err(ends_before(path, layer)) }
}

fn ends_before(path: &Path, layer: usize) -> Error {
    let why = format!("the file ends before layer {layer} does");
    Error::NotDone { path: path.to_owned(), action: "load layers of it", errno: Errno::IO, why }
}
