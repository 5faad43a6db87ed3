//! A request: what a caller named, its memory found.

use crate::memory::{self, Ask};
use crate::stream::Busy;
use gpunvme::gpu::Segment;
use gpunvme::{Require, Route};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use std::ffi::CStr;

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// Where in the file bytes lie.
#[derive(Clone, Copy)]
pub enum Place<'a, 'py> {
    /// From an offset on.
    At(u64),
    /// Rows of memory, each at an offset of its own.
    Rows(&'a Bound<'py, PyAny>),
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
    /// Of an object that holds memory, or of a list of pairs of such an object and an offset.
    ///
    /// # Errors
    /// Those of [`memory::of`]; `ValueError` for memory of a GPU and of the host in one call, and
    /// for rows that do not divide their memory.
    pub fn new(
        target: &Bound<'_, PyAny>,
        place: Place<'_, '_>,
        direction: Direction,
        stream: Option<usize>,
    ) -> PyResult<Request> {
        let ask = Ask { writable: direction == Direction::Read, stream };
        let mut request =
            Request { segments: Vec::new(), on_gpu: stream.is_some(), bytes: 0, busy: Vec::new(), keep: Vec::new() };
        let offset = match place {
            Place::At(offset) => offset,
            Place::Rows(offsets) => {
                request.add(target, 0, ask)?;
                let offsets = numbers(offsets)?;
                request.cut_into_rows(&offsets)?;
                has_rows(target, offsets.len() as u64)?;
                return Ok(request);
            }
        };
        if !(target.is_exact_instance_of::<PyList>() || target.is_exact_instance_of::<PyTuple>()) {
            request.add(target, offset, ask)?;
            return Ok(request);
        }
        if offset != 0 {
            return Err(PyValueError::new_err("a list of (memory, offset) pairs has its offsets: leave out offset="));
        }
        for (number, item) in target.try_iter()?.enumerate() {
            let item = item?;
            let pair = item.cast::<PyTuple>().ok().filter(|pair| pair.len() == 2);
            let pair = pair.ok_or_else(|| {
                let found = memory::name(&item);
                PyTypeError::new_err(format!("a list must hold (memory, offset) pairs, and its item {number} is of {found}"))
            })?;
            request.add(&pair.get_item(0)?, pair.get_item(1)?.extract()?, ask)?;
        }
        Ok(request)
    }

    /// Makes rows of equal length of the one segment that there is.
    fn cut_into_rows(&mut self, offsets: &[u64]) -> PyResult<()> {
        let count = offsets.len() as u64;
        if count == 0 || !self.bytes.is_multiple_of(count) {
            let bytes = self.bytes;
            return if bytes == 0 { Ok(()) } else { Err(PyValueError::new_err(format!("{bytes} bytes are not {count} rows"))) };
        }
        let len = self.bytes / count;
        let Some(whole) = self.segments.pop() else { return Ok(()) };
        let row = |(at, offset): (u64, &u64)| {
            Ok(Segment { file_offset: checked(*offset, len)?, address: whole.address + at * len, len })
        };
        self.segments = (0..).zip(offsets).map(row).collect::<PyResult<_>>()?;
        Ok(())
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
        self.segments.push(Segment { file_offset: checked(file_offset, found.len)?, address: found.address, len: found.len });
        self.bytes = self.bytes.saturating_add(found.len);
        self.keep.push(found.keep);
        Ok(())
    }
}

/// Passes where an array can be so many rows: it is of one dimension, or that is how many parts its
/// leading dimensions make.
fn has_rows(array: &Bound<'_, PyAny>, count: u64) -> PyResult<()> {
    let shape = array.getattr_opt(intern!(array.py(), "shape"))?;
    let Some(shape) = shape.and_then(|shape| shape.extract::<Vec<u64>>().ok()) else { return Ok(()) };
    let mut rows = 1;
    let leading = shape.iter().map(|size| {
        rows *= size;
        rows
    });
    if shape.len() < 2 || count == 1 || shape.contains(&0) || leading.into_iter().any(|rows| rows == count) {
        return Ok(());
    }
    Err(PyValueError::new_err(format!("{count} offsets are not as many as there are rows in the shape {shape:?}")))
}

/// An offset, where so many bytes from there on can lie in a file.
fn checked(offset: u64, len: u64) -> PyResult<u64> {
    let end = offset.checked_add(len).and_then(|end| i64::try_from(end).ok());
    end.map(|_| offset).ok_or_else(|| PyOverflowError::new_err(format!("no file has {len} bytes from {offset} on")))
}

/// The numbers that an array or a sequence holds.
///
/// # Errors
/// `TypeError` for what holds none, `OverflowError` for one that is negative.
fn numbers(object: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let py = object.py();
    // PyO3 does not look at the order of bytes.
    let as_here = |format: &CStr| !format.to_bytes().starts_with(b">") && !format.to_bytes().starts_with(b"!");
    if let Ok(buffer) = PyBuffer::<i64>::get(object)
        && as_here(buffer.format())
    {
        let numbers = buffer.to_vec(py)?;
        let number = |number| u64::try_from(number).map_err(|_| PyOverflowError::new_err("an offset is negative"));
        return numbers.into_iter().map(number).collect();
    }
    if let Ok(buffer) = PyBuffer::<u64>::get(object)
        && as_here(buffer.format())
    {
        return buffer.to_vec(py);
    }
    match object.getattr_opt(intern!(py, "tolist"))? {
        Some(list) => list.call0()?.extract(),
        None => object.extract(),
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
        Some("cache") => Route::Cache,
        Some(other) => {
            let known = "p2p, bounce, cache, host or direct";
            return Err(PyValueError::new_err(format!("require must be {known}, not {other:?}")));
        }
    };
    Ok(Require { route: Some(route), direct: false })
}
