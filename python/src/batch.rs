//! Many files that are opened, and then read, in one call each: the batches of a data set.
//!
//! Native threads do both, so that a file costs no change between threads of Python's. It guards
//! that memory is kept until no thread reads into it, also when one of the files fails.

use crate::error::raised;
use crate::file::Opened;
use crate::interpreter::release;
use crate::memory::{self, Ask};
use crate::process;
use crate::request::{self, Direction};
use crate::session::Session;
use crate::stream::wait_for;
use crate::workers::Workers;
use gpunvme::gpu::Segment;
use gpunvme::{Error, Result};
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rustix::io::Errno;
use rustix::process::Resource;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Of the descriptors that this process may have: the part of those that stay open between the two
/// calls. Files beyond that are closed, and opened again to be read.
const PART_OF_DESCRIPTORS: u64 = 4;

/// How many files stay open so now.
static STAY_OPEN: AtomicU64 = AtomicU64::new(0);

/// Counts a file that stays open.
struct StaysOpen;

impl StaysOpen {
    /// If one more may.
    fn take(most: u64) -> Option<StaysOpen> {
        let more = |count| (count < most).then_some(count + 1);
        STAY_OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| StaysOpen)
    }
}

impl Drop for StaysOpen {
    fn drop(&mut self) {
        STAY_OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A file whose length was looked up.
struct Found {
    path: PathBuf,
    size: u64,
    /// Device and inode, which no other file has.
    identity: (u64, u64),
    opened: Option<(Opened, StaysOpen)>,
}

impl Found {
    fn new(path: PathBuf, most_open: u64) -> Result<(Found, Arc<Session>)> {
        let opened = Opened::open(&path, "r")?;
        let (identity, size) = looked_at(&path, &opened)?;
        let session = opened.session.clone();
        let opened = StaysOpen::take(most_open).map(|stays| (opened, stays));
        Ok((Found { path, size, identity, opened }, session))
    }

    /// The file, opened again if it did not stay open.
    fn open(&mut self) -> Result<Opened> {
        if let Some((opened, _)) = self.opened.take() {
            return Ok(opened);
        }
        let opened = Opened::open(&self.path, "r")?;
        if looked_at(&self.path, &opened)?.0 != self.identity {
            let action = "open it again: there is another file now";
            return Err(Error::Path { path: self.path.clone(), action, errno: Errno::STALE });
        }
        Ok(opened)
    }
}

/// The identity of a file, and its size.
fn looked_at(path: &Path, opened: &Opened) -> Result<((u64, u64), u64)> {
    let failed = |errno| Error::Path { path: path.to_owned(), action: "ask its size", errno };
    let stat = rustix::fs::fstat(&**opened.file).map_err(failed)?;
    Ok(((stat.st_dev, stat.st_ino), stat.st_size as u64))
}

/// What the threads share with the calls that wait for them.
struct Shared {
    workers: Workers,
    most_open: u64,
    /// Nothing further is to be begun.
    is_over: AtomicBool,
}

impl Shared {
    /// # Errors
    /// It is over.
    fn goes_on(&self, path: &Path) -> Result<()> {
        if !self.is_over.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(Error::Path { path: path.to_owned(), action: "read it: its batch was given up", errno: Errno::CANCELED })
    }

    /// The error of a file for which there can be no thread.
    fn lost(path: PathBuf) -> impl FnOnce(Errno) -> Error {
        |errno| Error::Path { path, action: "start a thread that reads it", errno }
    }
}

/// Threads that open and read the files of batches. Of the package's own use.
///
/// Args:
///     threads: how many there are.
#[pyclass(frozen, module = "gpunvme._native")]
pub struct BatchReader {
    shared: Arc<Shared>,
    /// Of the mounts that files were opened of: what transfers need of them stays ready.
    sessions: Mutex<Vec<Arc<Session>>>,
    process: u32,
}

impl BatchReader {
    fn keep(&self, sessions: Vec<Arc<Session>>) {
        let mut kept = self.sessions.lock();
        for session in sessions {
            if !kept.iter().any(|known| Arc::ptr_eq(known, &session)) {
                kept.push(session);
            }
        }
    }
}

#[pymethods]
impl BatchReader {
    #[new]
    fn new(threads: usize) -> BatchReader {
        let most = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let shared = Shared {
            workers: Workers::new(threads, "gpunvme-read"),
            most_open: most / PART_OF_DESCRIPTORS,
            is_over: AtomicBool::new(false),
        };
        BatchReader { shared: Arc::new(shared), sessions: Mutex::default(), process: process::id() }
    }

    /// Opens files, and looks up their lengths.
    ///
    /// Raises:
    ///     Error: of the first file that cannot be opened.
    fn open(&self, py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<OpenFiles> {
        let shared = self.shared.clone();
        let opened = py.detach(|| {
            let (of, lost) = (shared.clone(), Shared::lost(paths.first().cloned().unwrap_or_default()));
            let work = move |path: PathBuf| {
                of.goes_on(&path)?;
                Found::new(path, of.most_open)
            };
            let found = shared.workers.each(paths, work, lost)?;
            let (found, sessions): (Vec<_>, Vec<_>) = found.into_iter().unzip();
            self.keep(sessions);
            Ok(found)
        });
        let found = opened.map_err(|error| raised(py, &error))?;
        let sizes = found.iter().map(|found| found.size).collect();
        Ok(OpenFiles { shared, sizes, found: Mutex::new(Some(found)) })
    }

    /// Begins nothing further: calls that are waited for end with an error, as soon as no memory is
    /// in use.
    fn stop(&self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

impl Drop for BatchReader {
    fn drop(&mut self) {
        if self.process != process::id() {
            // The threads are the parent's, and whatever they locked when it forked stays locked.
            std::mem::forget(self.shared.clone());
        }
        release(std::mem::take(self.sessions.get_mut()));
    }
}

/// Files that were opened together, to be read once. Of the package's own use.
#[pyclass(frozen, module = "gpunvme._native")]
pub struct OpenFiles {
    shared: Arc<Shared>,
    /// Their lengths in bytes.
    #[pyo3(get)]
    sizes: Vec<u64>,
    found: Mutex<Option<Vec<Found>>>,
}

/// A part of a file and its place in memory: where it begins in the memory and in the file, and
/// how long it is, in bytes.
type Part = (u64, u64, u64);

#[pymethods]
impl OpenFiles {
    /// Reads parts of the files into memory, each file's in one request, and closes the files.
    ///
    /// Args:
    ///     memory: what is read into.
    ///     parts: of each file, which do not overlap in the memory: where each begins there, where
    ///         it begins in the file, and how many bytes it has.
    ///     require: as for ``File.read_into``.
    ///
    /// Returns:
    ///     How many bytes of each file were read; fewer than asked for mean that it ended.
    ///
    /// Raises:
    ///     Error: of the first file that cannot be read. Nothing uses the memory any more.
    #[pyo3(signature = (memory, parts, *, require=None))]
    fn read_into(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        parts: Vec<Vec<Part>>,
        require: Option<&str>,
    ) -> PyResult<Vec<u64>> {
        let demand = request::require(require)?;
        if parts.len() != self.sizes.len() {
            return Err(PyValueError::new_err("there are not as many lists of parts as files"));
        }
        let memory = memory::of(memory, Ask { writable: true, stream: None })?;
        let segment = |(at, file_offset, len): Part| {
            let is_there = at.checked_add(len).is_some_and(|end| end <= memory.len);
            is_there.then(|| Segment { file_offset, address: memory.address + at, len })
        };
        let segments = parts.into_iter().map(|parts| parts.into_iter().map(segment).collect::<Option<Vec<_>>>());
        let segments = segments.collect::<Option<Vec<_>>>();
        let segments = segments.ok_or_else(|| PyValueError::new_err("a part lies outside of the memory"))?;
        let found = self.found.lock().take().ok_or_else(|| PyValueError::new_err("the files are closed"))?;
        let (shared, on_gpu, busy) = (self.shared.clone(), memory.on_gpu, memory.busy);
        let moved = py.detach(|| {
            let path = found.first().map(|found| found.path.clone()).unwrap_or_default();
            wait_for(&path, busy.as_slice())?;
            let (of, lost) = (shared.clone(), Shared::lost(path));
            let work = move |(mut found, segments): (Found, Vec<Segment>)| {
                of.goes_on(&found.path)?;
                if segments.is_empty() {
                    return Ok(0);
                }
                let opened = found.open()?;
                // SAFETY: `memory` is kept until `each` returns, when no thread is in here; the
                // segments were found to lie in it. That no other code uses it, and that they do
                // not overlap, is the rule of the Python call.
                let done = unsafe { opened.perform(Direction::Read, on_gpu, &segments, demand) };
                done.map(|done| done.bytes())
            };
            shared.workers.each(found.into_iter().zip(segments).collect(), work, lost)
        });
        drop(memory);
        moved.map_err(|error| raised(py, &error))
    }

    /// Closes the files that are open.
    fn close(&self) {
        let found = self.found.lock().take();
        release(found);
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, _class: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.close();
    }
}

impl Drop for OpenFiles {
    fn drop(&mut self) {
        release(self.found.get_mut().take());
    }
}
