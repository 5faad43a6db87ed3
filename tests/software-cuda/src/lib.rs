//! A `libcuda.so` without a GPU: the driver API as far as gpunvme and its tests call it, on the
//! CPU.
//!
//! It is to CUDA what `sim:` is to an NVMe controller: the interface is real, the silicon is not.
//! Memory has addresses that only CUDA reaches, streams run beside their callers, copies from
//! memory that is not registered, and from host memory to host memory, are synchronous, freed
//! memory is refused, and a kernel that touches what it must not ends its context. It knows one
//! kernel, gpunvme's own, by name. It says nothing about speed. Where it and a GPU differ, the GPU
//! is right.
//!
//! It differs in this, at least: a default stream waits for no other stream and none for it; a
//! dma-buf is a memfd, and begins where its allocation begins; GPUs do not reach each other's
//! memory from kernels.
//!
//! Tests select it with `LD_LIBRARY_PATH`, and set it up with `SOFTWARE_CUDA` ([`settings`]).

mod api;
mod memory;
mod pinned;
mod settings;
mod stream;

use cudarc::driver::sys::CUresult;
use cudarc::driver::sys::cudaError_enum::{CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_INITIALIZED};
use memory::{Addresses, Backing, Bars};
use settings::Settings;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use stream::{Mark, Stream};

/// A result of the driver API that is not success.
type Code = CUresult;

/// A context.
struct Context {
    handle: usize,
    gpu: usize,
    /// The primary context that a green context is part of.
    green_of: Option<usize>,
    broken: Mutex<Option<Code>>,
}

impl Context {
    /// What ended it.
    fn broken(&self) -> Option<Code> {
        *self.broken.lock().unwrap()
    }

    fn break_with(&self, code: Code) {
        self.broken.lock().unwrap().get_or_insert(code);
    }
}

/// Everything that handles stand for.
#[derive(Default)]
struct Handles {
    contexts: HashMap<usize, Arc<Context>>,
    primary: HashMap<usize, Arc<Context>>,
    streams: HashMap<usize, Arc<Stream>>,
    /// By context.
    default_streams: HashMap<usize, Arc<Stream>>,
    /// Of streams that were destroyed.
    ends: Vec<Arc<Mark>>,
    /// Handles of such streams, for new ones.
    reused: Vec<usize>,
    /// Where each was recorded last, and in which context it was made.
    events: HashMap<usize, (Arc<Context>, Option<Arc<Mark>>)>,
    modules: HashMap<usize, Vec<u8>>,
    /// Nodes of each.
    graphs: HashMap<usize, usize>,
    /// Kernels, with the context that they were loaded in.
    functions: HashMap<usize, usize>,
    memory: HashMap<u64, Arc<Backing>>,
}

/// The driver.
struct Software {
    settings: Settings,
    initialised: AtomicBool,
    addresses: Mutex<Addresses>,
    handles: Mutex<Handles>,
    last_handle: AtomicUsize,
    copies: AtomicU64,
    waits: AtomicU64,
    queries: AtomicU64,
    /// By GPU: bytes of memory that are free.
    left: Vec<Arc<AtomicU64>>,
    bars: Option<Bars>,
    /// Calls that wait for the whole GPU hold it meanwhile; calls that give a stream something to
    /// do, or make memory known, need it.
    turn: Mutex<()>,
}

thread_local! {
    /// The contexts that this thread entered; the last is current.
    static ENTERED: RefCell<Vec<Arc<Context>>> = const { RefCell::new(Vec::new()) };
}

impl Software {
    /// The driver, whether it was initialised or not.
    fn get() -> &'static Software {
        static SOFTWARE: OnceLock<Software> = OnceLock::new();
        SOFTWARE.get_or_init(|| {
            let settings = Settings::from_environment();
            Software {
                left: (0..settings.gpus).map(|_| Arc::new(AtomicU64::new(settings.memory))).collect(),
                bars: (!settings.bars.is_empty()).then(|| Arc::new(Mutex::new(settings.bars.clone()))),
                settings,
                initialised: AtomicBool::new(false),
                addresses: Mutex::new(Addresses::new()),
                handles: Mutex::default(),
                last_handle: AtomicUsize::new(0x1000),
                copies: AtomicU64::new(0),
                waits: AtomicU64::new(0),
                queries: AtomicU64::new(0),
                turn: Mutex::default(),
            }
        })
    }

    /// The driver for every call that needs `cuInit` before it.
    fn running() -> Result<&'static Software, Code> {
        let software = Software::get();
        if software.initialised.load(Ordering::Acquire) { Ok(software) } else { Err(CUDA_ERROR_NOT_INITIALIZED) }
    }

    fn new_handle(&self) -> usize {
        self.last_handle.fetch_add(16, Ordering::Relaxed)
    }

    fn new_context(&self, gpu: usize, green_of: Option<usize>) -> Arc<Context> {
        let context = Arc::new(Context { handle: self.new_handle(), gpu, green_of, broken: Mutex::new(None) });
        self.handles.lock().unwrap().contexts.insert(context.handle, Arc::clone(&context));
        context
    }

    fn primary(&self, gpu: usize) -> Arc<Context> {
        let found = self.handles.lock().unwrap().primary.get(&gpu).cloned();
        found.unwrap_or_else(|| {
            let context = self.new_context(gpu, None);
            Arc::clone(self.handles.lock().unwrap().primary.entry(gpu).or_insert(context))
        })
    }

    fn context(&self, handle: usize) -> Result<Arc<Context>, Code> {
        self.handles.lock().unwrap().contexts.get(&handle).cloned().ok_or(CUDA_ERROR_INVALID_CONTEXT)
    }

    /// The calling thread's context, which must not be broken.
    fn current(&self) -> Result<Arc<Context>, Code> {
        let context = ENTERED.with_borrow(|entered| entered.last().cloned()).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        context.broken().map_or(Ok(context), Err)
    }

    /// A stream by its handle, or one of the default streams of the current context.
    fn stream(&'static self, handle: usize) -> Result<Arc<Stream>, Code> {
        let current = self.current()?;
        if handle > 2 {
            return self.handles.lock().unwrap().streams.get(&handle).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE);
        }
        let mut handles = self.handles.lock().unwrap();
        let stream = handles.default_streams.entry(current.handle).or_insert_with(|| Arc::new(Stream::new(self, current, None)));
        Ok(Arc::clone(stream))
    }

    /// Memory of a GPU.
    fn take(&self, gpu: usize, len: u64) -> Result<Arc<Backing>, Code> {
        Backing::new(gpu, len, &self.left[gpu], self.bars.as_ref()).map(Arc::new)
    }

    /// Takes the lock for calls that give a stream work or make memory known, and for waits for the
    /// whole GPU.
    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap()
    }

    /// Waits until every stream has finished its work. No thread can add work to a stream
    /// meanwhile, as observed on an H200 (driver 580).
    fn settle(&self) {
        let _turn = self.turn();
        let handles = self.handles.lock().unwrap();
        let streams = handles.streams.values().chain(handles.default_streams.values());
        let marks: Vec<_> = streams.map(|stream| stream.mark()).chain(handles.ends.iter().cloned()).collect();
        drop(handles);
        marks.iter().for_each(|mark| mark.wait());
    }
}
