//! Requests that were begun and are waited for later, if at all.

use crate::error::raised;
use crate::process;
use crate::stream::{Busy, wait_for};
use crate::transfer::Transfer;
use gpunvme::Result;
use parking_lot::{Condvar, Mutex};
use pyo3::exceptions::{PyChildProcessError, PyTimeoutError};
use pyo3::prelude::*;
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a wait goes on before it asks for signals (Ctrl-C).
const SLICE: Duration = Duration::from_millis(100);
/// Of a wait for a stream: how long it sleeps at most before it looks again.
const NAP: Duration = Duration::from_millis(1);

/// The objects that keep the memory of a request in existence.
pub type Kept = Vec<Py<PyAny>>;

/// What comes of a request: its result, and what kept its memory in existence, which goes with it.
#[derive(Default)]
pub struct Answer {
    there: Mutex<Option<(Result<gpunvme::Transfer>, Kept)>>,
    changed: Condvar,
}

impl Answer {
    pub fn set(&self, result: Result<gpunvme::Transfer>, keep: Kept) {
        *self.there.lock() = Some((result, keep));
        self.changed.notify_all();
    }

    fn is_there(&self) -> bool {
        self.there.lock().is_some()
    }

    /// Waits until it is there; false after `deadline`.
    fn wait_until(&self, deadline: Instant) -> bool {
        let mut there = self.there.lock();
        while there.is_none() {
            if self.changed.wait_until(&mut there, deadline).timed_out() {
                return there.is_some();
            }
        }
        true
    }

    fn take(&self) -> Option<Result<gpunvme::Transfer>> {
        let (result, keep) = self.there.lock().take()?;
        drop(keep);
        Some(result)
    }
}

/// Waits for the answer to a request of a caller that has nothing else to do.
///
/// # Errors
/// What became of it, or what a handler of signals raised: the request goes on then.
pub fn wait(py: Python<'_>, answer: &Answer) -> PyResult<gpunvme::Transfer> {
    while !py.detach(|| answer.wait_until(Instant::now() + SLICE)) {
        py.check_signals()?;
    }
    let result = answer.take().expect("it is there, and only this thread takes it");
    result.map_err(|error| raised(py, &error))
}

enum State {
    Begun(Arc<Answer>),
    InStream(InStream),
    /// A thread is making a Python object of its result.
    Taken,
    Done(PyResult<Py<Transfer>>),
}

impl State {
    fn is_done(&self) -> bool {
        match self {
            State::Begun(answer) => answer.is_there(),
            State::InStream(request) => request.pending.is_done(),
            State::Taken => false,
            State::Done(_) => true,
        }
    }
}

/// A request in the order of a stream.
pub struct InStream {
    pub pending: gpunvme::gpu::Pending,
    /// The stream, with an address of the memory.
    pub stream: Busy,
    pub keep: Kept,
}

impl InStream {
    /// What became of a request that is done. Its memory may go then: after an error the stream
    /// may still have copies of it to make, and is waited for.
    fn result(self, py: Python<'_>) -> Result<gpunvme::Transfer> {
        let InStream { pending, stream, keep } = self;
        let result = pending.wait();
        if result.is_err() {
            py.detach(|| {
                // Where the context has ended nothing is in use.
                let _ = wait_for(Path::new(""), &[stream]);
            });
        }
        drop(keep);
        result
    }
}

/// Requests in streams that no caller waits for: what keeps their memory is let go of when they
/// are found to be done.
struct LeftBehind {
    /// The process that they are of.
    process: u32,
    requests: Vec<InStream>,
}

static LEFT_BEHIND: Mutex<LeftBehind> = Mutex::new(LeftBehind { process: 0, requests: Vec::new() });

impl LeftBehind {
    /// Those of this process. What it inherited is its parent's, whose CUDA a child cannot use.
    fn of_this_process(&mut self) -> &mut Vec<InStream> {
        if self.process != process::id() {
            std::mem::forget(std::mem::take(&mut self.requests));
            self.process = process::id();
        }
        &mut self.requests
    }
}

/// Lets go of the memory of requests in streams that are done and that no caller waits for.
pub fn sweep(py: Python<'_>) {
    let mut left = LEFT_BEHIND.lock();
    let requests = left.of_this_process();
    if requests.is_empty() {
        return;
    }
    let (done, pending) = std::mem::take(requests).into_iter().partition::<Vec<_>, _>(|request| request.pending.is_done());
    *requests = pending;
    // What an object does when it goes may be a request of this thread's.
    drop(left);
    for request in done {
        // Its caller did not want to know.
        let _ = request.result(py);
    }
}

/// A request that was begun. Its memory is in use, and kept, until it is done, even if this object
/// goes before.
#[pyclass(frozen, module = "gpunvme")]
pub struct Pending {
    state: Mutex<State>,
    process: u32,
}

impl Pending {
    fn new(state: State) -> Pending {
        Pending { state: Mutex::new(state), process: process::id() }
    }

    /// # Errors
    /// This is a child of the process that waits for it: no thread here would ever answer.
    fn is_of_this_process(&self) -> PyResult<()> {
        if self.process == process::id() {
            return Ok(());
        }
        let told = "the request is its parent's, and not of this child process";
        Err(PyChildProcessError::new_err((Errno::CHILD.raw_os_error(), told)))
    }

    pub fn begun(answer: Arc<Answer>) -> Pending {
        Pending::new(State::Begun(answer))
    }

    pub fn in_stream(request: InStream) -> Pending {
        Pending::new(State::InStream(request))
    }

    /// Waits for a while; whether it is done.
    fn wait_until(&self, deadline: Instant) -> bool {
        let answer = match &*self.state.lock() {
            State::Begun(answer) => Some(answer.clone()),
            _ => None,
        };
        if let Some(answer) = answer {
            // Another thread may have taken it.
            return answer.wait_until(deadline) || self.state.lock().is_done();
        }
        let begun = Instant::now();
        while !self.state.lock().is_done() {
            let now = Instant::now();
            if now >= deadline {
                return false;
            }
            std::thread::sleep(((now - begun) / 8).min(NAP).min(deadline - now));
        }
        true
    }
}

#[pymethods]
impl Pending {
    /// Whether :meth:`result` would return at once.
    ///
    /// Raises:
    ///     ChildProcessError: it is of the parent process.
    fn done(&self) -> PyResult<bool> {
        self.is_of_this_process()?;
        Ok(self.state.lock().is_done())
    }

    /// Waits until the request is done, and says what it moved.
    ///
    /// Args:
    ///     timeout: seconds to wait at most; without it there is no limit.
    ///
    /// Raises:
    ///     Error: what the request failed with.
    ///     TimeoutError: it is not done by then, and goes on.
    ///     ChildProcessError: it is of the parent process.
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<Transfer>> {
        self.is_of_this_process()?;
        let limit = timeout.map(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX));
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let taken = loop {
            let slice = Instant::now() + SLICE;
            if py.detach(|| self.wait_until(deadline.map_or(slice, |deadline| deadline.min(slice)))) {
                // Nothing of Python's happens while this is locked: a thread that has the
                // interpreter may be waiting for the lock.
                let mut state = self.state.lock();
                match std::mem::replace(&mut *state, State::Taken) {
                    // Another thread makes an object of it, and is soon done.
                    State::Taken => {}
                    State::Done(result) => {
                        let answer = copy(py, &result);
                        *state = State::Done(result);
                        return answer;
                    }
                    begun => break begun,
                }
            }
            py.check_signals()?;
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(PyTimeoutError::new_err("the transfer is not done yet, and goes on"));
            }
        };
        let result = match taken {
            State::Begun(answer) => answer.take().expect("it is there, and taken once"),
            State::InStream(request) => request.result(py),
            State::Taken | State::Done(_) => unreachable!("they are answered above"),
        };
        let result = match result {
            Ok(done) => Py::new(py, Transfer::from(done)),
            Err(error) => Err(raised(py, &error)),
        };
        let answer = copy(py, &result);
        *self.state.lock() = State::Done(result);
        answer
    }

    fn __repr__(&self) -> &'static str {
        if self.state.lock().is_done() { "Pending(done)" } else { "Pending(in flight)" }
    }
}

fn copy(py: Python<'_>, result: &PyResult<Py<Transfer>>) -> PyResult<Py<Transfer>> {
    match result {
        Ok(done) => Ok(done.clone_ref(py)),
        Err(error) => Err(error.clone_ref(py)),
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let State::InStream(request) = std::mem::replace(self.state.get_mut(), State::Taken) {
            if self.process == process::id() {
                LEFT_BEHIND.lock().of_this_process().push(request);
            } else {
                std::mem::forget(request);
            }
        }
    }
}
