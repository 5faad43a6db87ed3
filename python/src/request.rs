//! A request: what a caller named, its memory found.

use crate::memory::{self, Ask};
use crate::stream::Busy;
use gpunvme::gpu::Segment;
use gpunvme::{Require, Route};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// What is to be moved.
pub struct Request {
    pub segments: Vec<Segment>,
    /// Whether the memory is CUDA's; else it is host memory.
    pub on_gpu: bool,
    /// Sum of the segments' lengths.
    pub bytes: u64,
    /// Streams to wait for before the memory is touched.
    pub busy: Vec<Busy>,
    /// What keeps the memory in existence.
    pub keep: Vec<Py<PyAny>>,
}

impl Request {
    /// Of an object that holds memory and an offset in the file, or of a list of such pairs.
    ///
    /// # Errors
    /// Those of [`memory::of`]; `ValueError` for memory of a GPU and of the host in one call.
    pub fn new(target: &Bound<'_, PyAny>, offset: u64, direction: Direction, stream: Option<usize>) -> PyResult<Request> {
        let ask = Ask { writable: direction == Direction::Read, stream };
        let mut request =
            Request { segments: Vec::new(), on_gpu: stream.is_some(), bytes: 0, busy: Vec::new(), keep: Vec::new() };
        if !(target.is_exact_instance_of::<PyList>() || target.is_exact_instance_of::<PyTuple>()) {
            request.add(target, offset, ask)?;
            return Ok(request);
        }
        if offset != 0 {
            return Err(PyValueError::new_err("a list of (memory, offset) pairs has its offsets: leave out offset="));
        }
        for pair in target.try_iter()? {
            let pair = pair?;
            let pair = pair.cast::<PyTuple>().ok().filter(|pair| pair.len() == 2);
            let pair = pair.ok_or_else(|| PyTypeError::new_err("a list must hold (memory, offset) pairs"))?;
            request.add(&pair.get_item(0)?, pair.get_item(1)?.extract()?, ask)?;
        }
        Ok(request)
    }

    fn add(&mut self, object: &Bound<'_, PyAny>, file_offset: u64, ask: Ask) -> PyResult<()> {
        let found = memory::of(object, ask)?;
        if found.len == 0 {
            return Ok(());
        }
        // What goes into a stream CUDA has to know, host memory too.
        let on_gpu = found.on_gpu || ask.stream.is_some();
        if self.segments.is_empty() {
            self.on_gpu = on_gpu;
        } else if self.on_gpu != on_gpu {
            return Err(PyValueError::new_err("memory of a GPU and host memory need a call each"));
        }
        if let Some(busy) = found.busy.filter(|_| ask.stream.is_none())
            && !self.busy.iter().any(|known| known.is_same(&busy))
        {
            self.busy.push(busy);
        }
        self.segments.push(Segment { file_offset, address: found.address, len: found.len });
        self.bytes = self.bytes.saturating_add(found.len);
        self.keep.push(found.keep);
        Ok(())
    }
}

/// The demands of `require=`.
///
/// # Errors
/// `ValueError` for a word that is none.
pub fn require(word: Option<&str>) -> PyResult<Require> {
    let route = match word {
        None => return Ok(Require::default()),
        Some("direct") => return Ok(Require { route: None, direct: true }),
        Some("p2p") => Route::P2p,
        Some("bounce") => Route::Bounce,
        Some("host") => Route::Host,
        Some(other) => {
            let known = "p2p, bounce, host or direct";
            return Err(PyValueError::new_err(format!("require must be {known}, not {other:?}")));
        }
    };
    Ok(Require { route: Some(route), direct: false })
}
