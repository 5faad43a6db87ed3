//! Files of a mount, as Python sees them.

use crate::completions::Completions;
use crate::error::raised;
use crate::host;
use crate::interpreter::{Held, release};
use crate::pending::{self, Answer, InStream, Pending};
use crate::request::{Direction, Place, Request, require};
use crate::session::Session;
use crate::stream::{Busy, Marks, handle, wait_for};
use crate::transfer::Transfer;
use gpunvme::gpu::{Caching, Segment};
use gpunvme::{Error, ExtentFlags, Require, Result};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::OsString;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

/// The most bytes of a request that its caller waits for without looking for signals. The library
/// hands longer ones to a thread of its own in any case.
const SHORT: u64 = 1 << 20;

/// An object of Python's that a method is given.
type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// An open file. A file that a parent process opened is not closed in its child: what belongs to
/// it there is of the parent's threads.
pub struct Opened {
    pub file: ManuallyDrop<Arc<gpunvme::File>>,
    pub session: Arc<Session>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if self.session.mount().is_ok() {
            // SAFETY: it is dropped here and nowhere else, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

impl Opened {
    /// Opens a file in a mode of [`File`].
    ///
    /// # Errors
    /// Those of [`gpunvme::File::open`].
    pub fn open(path: &PathBuf, mode: &str) -> Result<Opened> {
        let file = match mode {
            "r" => gpunvme::File::open(path)?,
            "r+" => {
                let failed = |errno| Error::Path { path: path.clone(), action: "open it", errno };
                let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
                gpunvme::File::of(rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?, path)?
            }
            _ => {
                let file = gpunvme::File::create(path)?;
                file.set_size(0)?;
                file
            }
        };
        let session = Session::of(path, Some(&file))?;
        Ok(Opened { file: ManuallyDrop::new(Arc::new(file)), session })
    }

    /// Moves segments, and waits for it.
    ///
    /// # Safety
    /// The memory of the segments exists until this returns, and is the caller's: no stream uses it.
    ///
    /// # Errors
    /// Those of [`host::transfer`], or of [`gpunvme::gpu::Transfers::read`].
    pub unsafe fn perform(
        &self,
        direction: Direction,
        on_gpu: bool,
        segments: &[Segment],
        require: Require,
    ) -> Result<gpunvme::Transfer> {
        if !on_gpu {
            // SAFETY: the caller vouches for the memory.
            return unsafe { host::transfer(&self.session, &self.file, direction, segments, require) };
        }
        let transfers = self.session.transfers()?.requiring(require);
        // SAFETY: the caller vouches for the memory.
        unsafe {
            match direction {
                Direction::Read => transfers.read(&self.file, segments),
                Direction::Write => transfers.write(&self.file, segments),
            }
        }
    }

    /// Begins to move segments, and calls `done` when that is over, on a thread that has no
    /// interpreter.
    ///
    /// # Safety
    /// The memory of the segments exists until `done` is called, and is the caller's.
    unsafe fn begin(
        &self,
        direction: Direction,
        on_gpu: bool,
        segments: Vec<Segment>,
        require: Require,
        done: impl FnOnce(Result<gpunvme::Transfer>) + Send + 'static,
    ) -> Result<()> {
        if !on_gpu {
            let (session, file) = (self.session.clone(), Arc::clone(&self.file));
            let job = move || {
                // SAFETY: the caller vouches for the memory.
                let work = || unsafe { host::transfer(&session, &file, direction, &segments, require) };
                // A request that is not answered would be waited for without end.
                let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
                    let action = "finish a transfer, which panicked (a bug)";
                    Err(Error::Path { path: file.path().to_owned(), action, errno: Errno::IO })
                });
                // A caller that is told may close the file, and unmount.
                drop((session, file));
                done(result);
            };
            let failed = |errno| Error::Path { path: self.file.path().to_owned(), action: "start a thread for transfers", errno };
            return self.session.workers()?.run(Box::new(job)).map_err(failed);
        }
        let transfers = self.session.transfers()?.requiring(require);
        // SAFETY: the caller vouches for the memory.
        unsafe {
            match direction {
                Direction::Read => transfers.read_then(&self.file, &segments, done),
                Direction::Write => transfers.write_then(&self.file, &segments, done),
            }
        }
    }
}

/// Where bytes of a file lie on the device.
#[pyclass(frozen, get_all, module = "gpunvme")]
pub struct Extent {
    /// Where in the file it begins, in bytes.
    file_offset: u64,
    /// How many bytes it has.
    length: u64,
    /// Which device of the volume it lies on.
    device: u32,
    /// Where it begins on that device, in bytes.
    device_offset: u64,
    /// Whether it is allocated and was never written: it reads as zeros.
    unwritten: bool,
}

#[pymethods]
impl Extent {
    fn __repr__(&self) -> String {
        let Extent { file_offset, length, device, device_offset, .. } = self;
        let unwritten = if self.unwritten { ", unwritten" } else { "" };
        format!("Extent({length} bytes at {file_offset}: byte {device_offset} of device {device}{unwritten})")
    }
}

/// What the argument `caching` may be.
const CACHING: [(&str, Caching); 3] =
    [("never", Caching::Never), ("resident", Caching::Resident), ("read-again", Caching::ReadAgain)];

/// The arguments by which a file is opened again: path, mode and caching.
type Reopened = (PathBuf, &'static str, Option<&'static str>);

/// A file of a mount. Any number of threads may use it at once.
///
/// What is called *memory* below is anything that holds contiguous memory: a tensor of PyTorch, an
/// array of CuPy, NumPy, JAX or Numba, whatever has ``__cuda_array_interface__``, ``__dlpack__`` or
/// the buffer protocol; or a list of ``(memory, offset)`` pairs, which are moved in one request. All
/// memory of a request lies on GPUs, or all in the host. Offsets and lengths need no alignment.
///
/// A call first waits for the stream that the memory's library puts its work on (PyTorch's current
/// stream, the stream that ``__cuda_array_interface__`` names, what DLPack orders), so that a tensor
/// may be read into, or written from, right after the code that uses it. With ``stream=`` it does
/// not wait: the request takes its place in the order of that stream.
#[pyclass(frozen, subclass, weakref, module = "gpunvme._native")]
pub struct File {
    path: PathBuf,
    mode: &'static str,
    caching: Option<&'static str>,
    opened: Mutex<Option<Arc<Opened>>>,
}

impl File {
    fn opened(&self) -> PyResult<Held<Opened>> {
        let opened = self.opened.lock().clone();
        opened.map(Held::from).ok_or_else(|| PyValueError::new_err(format!("{}: the file is closed", self.path.display())))
    }

    /// The library's file, which stays open while it is used.
    ///
    /// # Errors
    /// `ValueError` where it was closed.
    pub fn library(&self) -> PyResult<Held<gpunvme::File>> {
        Ok(Arc::clone(&self.opened()?.file).into())
    }

    fn transfer(
        &self,
        direction: Direction,
        memory: Object,
        place: Place<'_, '_>,
        stream: Option<Object>,
        demand: Option<&str>,
    ) -> PyResult<Py<PyAny>> {
        let py = memory.py();
        pending::sweep(py);
        let (opened, demand) = (self.opened()?, require(demand)?);
        if let Some(stream) = stream {
            let pending = put_into_stream(&opened, direction, memory, place, stream, demand)?;
            return Ok(Py::new(py, pending)?.into_any());
        }
        let request = Request::new(memory, place, direction, None)?;
        let done = if request.bytes > SHORT {
            let answer = begin(py, &opened, direction, request, demand)?;
            pending::wait(py, &answer)?
        } else {
            let done = py.detach(|| {
                wait_for(opened.file.path(), &request.busy)?;
                // SAFETY: `request` keeps the memory until the call is over. That no other code
                // uses it meanwhile is the rule of the Python call, as for every buffer of Python's.
                unsafe { opened.perform(direction, request.on_gpu, &request.segments, demand) }
            });
            done.map_err(|error| raised(py, &error))?
        };
        Ok(Py::new(py, Transfer::from(done))?.into_any())
    }

    fn submit(&self, direction: Direction, memory: Object, offset: u64, demand: Option<&str>) -> PyResult<Pending> {
        let py = memory.py();
        pending::sweep(py);
        let (opened, demand) = (self.opened()?, require(demand)?);
        let request = Request::new(memory, Place::At(offset), direction, None)?;
        Ok(Pending::begun(begin(py, &opened, direction, request, demand)?))
    }
}

/// Begins a request, to be waited for.
fn begin(py: Python<'_>, opened: &Opened, direction: Direction, request: Request, demand: Require) -> PyResult<Arc<Answer>> {
    let answer = Arc::new(Answer::default());
    let Request { segments, on_gpu, busy, keep, .. } = request;
    let set = {
        let answer = answer.clone();
        move |result| answer.set(result, keep)
    };
    let begun = py.detach(|| {
        wait_for(opened.file.path(), &busy)?;
        // SAFETY: the callback keeps the memory until it is called.
        unsafe { opened.begin(direction, on_gpu, segments, demand, set) }
    });
    begun.map_err(|error| raised(py, &error))?;
    Ok(answer)
}

/// Puts a request into the order of a stream.
fn put_into_stream(
    opened: &Opened,
    direction: Direction,
    memory: Object,
    place: Place<'_, '_>,
    stream: Object,
    demand: Require,
) -> PyResult<Pending> {
    let py = memory.py();
    let raw = handle(stream)?;
    let Request { segments, mut keep, .. } = Request::new(memory, place, direction, Some(raw))?;
    let stream_of = Busy { stream: raw, gpu: None, address: segments.first().map_or(0, |segment| segment.address) };
    // Whatever can fail comes first: what is in the stream uses the memory.
    for object in &keep {
        record(object.bind(py), stream)?;
    }
    // The stream must not go before the request has passed.
    keep.push(stream.clone().unbind());
    let put = py.detach(|| {
        let transfers = opened.session.transfers()?.requiring(demand);
        // SAFETY: `Pending` keeps the memory until the stream has passed the request; that the
        // stream is one, and lives as long, is the rule of the Python call.
        let put = unsafe {
            match direction {
                Direction::Read => transfers.read_on_stream(&opened.file, &segments, raw),
                Direction::Write => transfers.write_on_stream(&opened.file, &segments, raw),
            }
        };
        if let Err(Error::Cuda { .. }) = put {
            // A part of it may be in the stream, and the memory in use until that is through.
            let _ = wait_for(opened.file.path(), &[stream_of]);
        }
        put
    });
    let pending = put.map_err(|error| raised(py, &error))?;
    Ok(Pending::in_stream(InStream { pending, stream: stream_of, keep }))
}

/// Has PyTorch give memory of a GPU that is let go of to other tensors only after a stream, if that
/// is one of its own, has passed what was put there until then.
fn record(tensor: Object, stream: Object) -> PyResult<()> {
    let py = tensor.py();
    let on_gpu = tensor.getattr_opt(intern!(py, "is_cuda"))?.map_or(Ok(false), |on_gpu| on_gpu.extract())?;
    if on_gpu && stream.hasattr(intern!(py, "stream_id"))? {
        tensor.call_method1(intern!(py, "record_stream"), (stream,))?;
    }
    Ok(())
}

impl Drop for File {
    fn drop(&mut self) {
        release(self.opened.get_mut().take());
    }
}

#[pymethods]
impl File {
    /// Opens a file of a mount.
    ///
    /// Args:
    ///     path: the file.
    ///     mode: ``"r"`` to read, ``"r+"`` to read and write, ``"w"`` to read and write an empty
    ///         file, which is created where there is none.
    ///     caching: what reads into memory that CUDA knows take of the kernel's page cache, with the
    ///         route ``cache``: ``"resident"``, what it has (the usual); ``"never"``, what
    ///         :meth:`prepare` registered and nothing else; ``"read-again"``, what it has, and the
    ///         kernel reads in what is read again.
    ///
    /// Raises:
    ///     Error: it lies on no mount of gpunvme (ENOTTY), or what open(2) says.
    #[new]
    #[pyo3(signature = (path, mode="r", caching=None))]
    fn new(py: Python<'_>, path: PathBuf, mode: &str, caching: Option<&str>) -> PyResult<File> {
        let policy = CACHING.into_iter().find(|(name, _)| Some(*name) == caching);
        if let (Some(other), None) = (caching, policy) {
            let known = CACHING.map(|(name, _)| name).join(", ");
            return Err(PyValueError::new_err(format!("caching must be one of {known}, not {other:?}")));
        }
        let known = ["r", "r+", "w"].into_iter().find(|known| *known == mode);
        let Some(mode) = known else {
            return Err(PyValueError::new_err(format!("mode must be \"r\", \"r+\" or \"w\", not {mode:?}")));
        };
        let opened = py.detach(|| Opened::open(&path, mode)).map_err(|error| raised(py, &error))?;
        opened.file.set_caching(policy.map(|(_, policy)| policy));
        Ok(File { path, mode, caching: policy.map(|(name, _)| name), opened: Mutex::new(Some(Arc::new(opened))) })
    }

    /// Reads bytes of the file into memory.
    ///
    /// Args:
    ///     memory: what is read into, all of it; or a list of ``(memory, offset)`` pairs.
    ///     offset: where in the file to begin, in bytes.
    ///     stream: a CUDA stream (of PyTorch, CuPy or Numba, or its handle): the read takes its place
    ///         in the stream's order, and the call returns at once.
    ///     require: ``"p2p"``, ``"bounce"``, ``"cache"`` or ``"host"``: this route and no other;
    ///         ``"direct"``: no byte may be copied by the CPU. Where that cannot be met nothing is
    ///         moved.
    ///
    /// Returns:
    ///     A :class:`Transfer`; fewer bytes than the memory has mean that the file ended. With
    ///     ``stream`` a :class:`Pending`.
    ///
    /// Raises:
    ///     Error: with errno, route and reason.
    ///     TypeError: ``memory`` holds none. ValueError: it is strided, or read-only.
    #[pyo3(signature = (memory, offset=0, *, stream=None, require=None))]
    fn read_into(&self, memory: Object, offset: u64, stream: Option<Object>, require: Option<&str>) -> PyResult<Py<PyAny>> {
        self.transfer(Direction::Read, memory, Place::At(offset), stream, require)
    }

    /// Writes memory to the file, which becomes longer where it ends before. Like ``write(2)`` it is
    /// durable after :meth:`sync`.
    ///
    /// Arguments, result and errors are those of :meth:`read_into`.
    #[pyo3(signature = (memory, offset=0, *, stream=None, require=None))]
    fn write_from(&self, memory: Object, offset: u64, stream: Option<Object>, require: Option<&str>) -> PyResult<Py<PyAny>> {
        self.transfer(Direction::Write, memory, Place::At(offset), stream, require)
    }

    /// Reads rows of equal length, each from an offset of its own, in one request.
    ///
    /// Args:
    ///     memory: what is read into: as many rows as there are offsets, side by side.
    ///     offsets: where in the file each begins, in bytes: an array or a sequence of integers.
    ///
    /// Everything else is as for :meth:`read_into`.
    #[pyo3(signature = (memory, offsets, *, stream=None, require=None))]
    fn read_rows(&self, memory: Object, offsets: Object, stream: Option<Object>, require: Option<&str>) -> PyResult<Py<PyAny>> {
        self.transfer(Direction::Read, memory, Place::Rows(offsets), stream, require)
    }

    /// Writes rows of equal length, each to an offset of its own, in one request. Arguments, result and
    /// errors are those of :meth:`read_rows`.
    #[pyo3(signature = (memory, offsets, *, stream=None, require=None))]
    fn write_rows(&self, memory: Object, offsets: Object, stream: Option<Object>, require: Option<&str>) -> PyResult<Py<PyAny>> {
        self.transfer(Direction::Write, memory, Place::Rows(offsets), stream, require)
    }

    /// Begins a :meth:`read_into`, and returns at once with a :class:`Pending`.
    #[pyo3(signature = (memory, offset=0, *, require=None))]
    fn submit_read_into(&self, memory: Object, offset: u64, require: Option<&str>) -> PyResult<Pending> {
        self.submit(Direction::Read, memory, offset, require)
    }

    /// Begins a :meth:`write_from`, and returns at once with a :class:`Pending`.
    #[pyo3(signature = (memory, offset=0, *, require=None))]
    fn submit_write_from(&self, memory: Object, offset: u64, require: Option<&str>) -> PyResult<Pending> {
        self.submit(Direction::Write, memory, offset, require)
    }

    /// Begins a request whose end an event loop is told of. Of the package's own use.
    fn _submit_to(
        &self,
        py: Python<'_>,
        write: bool,
        memory: &Bound<'_, PyAny>,
        offset: u64,
        demand: Option<&str>,
        answer_to: (Bound<'_, Completions>, u64),
    ) -> PyResult<()> {
        pending::sweep(py);
        let (opened, demand) = (self.opened()?, require(demand)?);
        let direction = if write { Direction::Write } else { Direction::Read };
        let Request { segments, on_gpu, busy, keep, .. } = Request::new(memory, Place::At(offset), direction, None)?;
        let (collection, number) = (answer_to.0.get().collection.clone(), answer_to.1);
        let begin = {
            let (opened, collection) = (opened.share(), collection.clone());
            let done = move |result| collection.add(number, result, keep);
            // SAFETY: the callback keeps the memory until it is called, and hands it on.
            move || unsafe { opened.begin(direction, on_gpu, segments, demand, done) }
        };
        let begun = py.detach(|| {
            let path = opened.file.path();
            let marks = Marks::put(path, &busy)?;
            if marks.are_reached()? {
                return begin();
            }
            let path = path.to_owned();
            let wait_and_begin = move || {
                if let Err(error) = marks.wait().and_then(|()| begin()) {
                    collection.add(number, Err(error), Vec::new());
                }
            };
            let thread = std::thread::Builder::new().name("gpunvme-wait".into()).spawn(wait_and_begin);
            let failed = |_| Error::Path { path, action: "start a thread that waits for a stream", errno: Errno::AGAIN };
            thread.map(drop).map_err(failed)
        });
        begun.map_err(|error| raised(py, &error))
    }

    /// Where the file's bytes lie on the device: a list of :class:`Extent`. What none covers is a
    /// hole. The answer is no lease: the file may change a moment later.
    ///
    /// Args:
    ///     offset, length: the range of the file, in bytes; without ``length`` all that follows.
    #[pyo3(signature = (offset=0, length=None))]
    fn extents(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<Vec<Extent>> {
        let opened = self.opened()?;
        let len = length.unwrap_or(u64::MAX - offset);
        let found = py.detach(|| opened.file.resolve(offset, len).collect::<Result<Vec<_>>>());
        let extents = found.map_err(|error| raised(py, &error))?.into_iter().map(|extent| Extent {
            file_offset: extent.file_offset,
            length: extent.len,
            device: extent.device,
            device_offset: extent.device_offset,
            unwritten: extent.flags().contains(ExtentFlags::UNWRITTEN),
        });
        Ok(extents.collect())
    }

    /// Has the kernel read a range of the file into its page cache, and registers that with CUDA:
    /// reads of it into GPU memory take the route ``cache`` from then on, for as long as the file
    /// is open and the kernel keeps it. Returns how many bytes can be read so.
    ///
    /// Args:
    ///     offset, length: the range of the file, in bytes; without ``length`` all that follows.
    #[pyo3(signature = (offset=0, length=None))]
    fn prepare(&self, py: Python<'_>, offset: u64, length: Option<u64>) -> PyResult<u64> {
        let opened = self.opened()?;
        let len = length.unwrap_or(u64::MAX - offset);
        let prepared = py.detach(|| opened.session.transfers()?.prepare(&opened.file, offset, len));
        prepared.map_err(|error| raised(py, &error))
    }

    /// Its size in bytes, now.
    #[getter]
    fn size(&self, py: Python<'_>) -> PyResult<u64> {
        let opened = self.opened()?;
        py.detach(|| opened.file.size()).map_err(|error| raised(py, &error))
    }

    /// Sets its size in bytes. Bytes that are added read as zeros.
    fn truncate(&self, py: Python<'_>, size: u64) -> PyResult<()> {
        let opened = self.opened()?;
        py.detach(|| opened.file.set_size(size)).map_err(|error| raised(py, &error))
    }

    /// Makes what was written durable: fsync(2).
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let opened = self.opened()?;
        let failed = |errno: Errno| Error::Path { path: self.path.clone(), action: "make it durable", errno };
        py.detach(|| rustix::fs::fsync(opened.file.as_fd())).map_err(|errno| raised(py, &failed(errno)))
    }

    /// Its descriptor, for calls of the ``os`` module; it stays the file's.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.opened()?.file.as_fd().as_raw_fd())
    }

    /// Closes it. Requests in flight go on.
    fn close(&self) {
        // Not under the lock: a thread that has the interpreter may be waiting for it.
        let opened = self.opened.lock().take();
        release(opened);
    }

    /// Whether it is closed.
    #[getter]
    fn closed(&self) -> bool {
        self.opened.lock().is_none()
    }

    /// The path that it was opened by.
    #[getter]
    fn name(&self) -> OsString {
        self.path.clone().into()
    }

    /// The mode that it was opened in.
    #[getter]
    fn mode(&self) -> &'static str {
        self.mode
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, _class: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close();
    }

    /// A copy in another process opens the file again; a file of mode ``"w"`` is not emptied again.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyType>, Reopened) {
        let this = slf.get();
        (slf.get_type(), (this.path.clone(), if this.mode == "r" { "r" } else { "r+" }, this.caching))
    }

    fn __repr__(&self) -> String {
        let closed = if self.closed() { ", closed" } else { "" };
        format!("File({:?}, mode={:?}{closed})", self.path.display().to_string(), self.mode)
    }
}
