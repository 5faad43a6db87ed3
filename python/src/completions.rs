//! Where requests of an event loop are answered: a list, and a descriptor that becomes readable
//! when something is in it.

use crate::error::exception;
use crate::transfer::Transfer;
use gpunvme::Result;
use parking_lot::Mutex;
use pyo3::prelude::*;
use rustix::event::EventfdFlags;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// A request that is done: its number, its result, and what kept its memory in existence, which
/// goes when a thread that holds the interpreter takes this.
struct Done {
    number: u64,
    result: Result<gpunvme::Transfer>,
    keep: Vec<Py<PyAny>>,
}

/// The list, which any thread adds to.
pub struct Collection {
    done: Mutex<Vec<Done>>,
    event: OwnedFd,
}

impl Collection {
    /// Adds a request that is done.
    pub fn add(&self, number: u64, result: Result<gpunvme::Transfer>, keep: Vec<Py<PyAny>>) {
        let mut done = self.done.lock();
        done.push(Done { number, result, keep });
        if done.len() == 1 {
            // A counter that is full has been signalled.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

/// What one event loop is told of its requests. Of the package's own use.
#[pyclass(frozen, module = "gpunvme._native")]
pub struct Completions {
    pub collection: Arc<Collection>,
}

#[pymethods]
impl Completions {
    #[new]
    fn new() -> PyResult<Completions> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags).map_err(std::io::Error::from)?;
        Ok(Completions { collection: Arc::new(Collection { done: Mutex::default(), event }) })
    }

    /// The descriptor that is readable while there is something to take.
    fn fileno(&self) -> i32 {
        self.collection.event.as_raw_fd()
    }

    /// Takes what is done: pairs of a number and a ``Transfer`` or an exception.
    fn take(&self, py: Python<'_>) -> PyResult<Vec<(u64, Py<PyAny>)>> {
        let _ = rustix::io::read(&self.collection.event, &mut [0u8; 8]); // nonblocking
        let done = std::mem::take(&mut *self.collection.done.lock());
        let answer = |Done { number, result, keep }| {
            drop(keep);
            let result = match result {
                Ok(done) => Py::new(py, Transfer::from(done))?.into_any(),
                Err(error) => exception(py, &error)?.unbind(),
            };
            Ok((number, result))
        };
        done.into_iter().map(answer).collect()
    }
}
