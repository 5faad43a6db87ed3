//! How a request fits into the order of an application's stream.
//!
//! It guards against every way to wait for oneself. The stream writes a word when it comes to the request, waits for another that is written when the request is done, and writes a
//! third when it has passed. Nothing of the library waits in a stream, and nothing of a request is begun before its stream came to it, so a request takes no slot from those that it
//! waits for. Words are in memory that the stream uses: it stays until the stream has passed.

use super::staging::Staging;
use crate::buffer::Shared;
use gpunvme_gpupath::cuda::{CudaError, Stream};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Bytes of the words of one gate: a cache line.
const GATE: usize = 64;
/// Gates of a pool, which are as many requests that streams wait for at once.
pub(super) const GATES: usize = 256;
/// Bytes of all.
pub(super) const LEN: usize = GATE * GATES;

/// Where in a gate its words are, in bytes.
const REACHED: usize = 0;
const DONE: usize = 4;
const PASSED: usize = 8;

/// The gates of one pool.
pub(super) struct Gates {
    staging: Arc<Shared<Staging>>,
    /// Where in the pool's memory they begin.
    at: usize,
    /// How often each was used: what its words are written with.
    uses: Mutex<Vec<u32>>,
}

/// One use of a gate.
pub(super) struct Gate {
    staging: Arc<Shared<Staging>>,
    at: usize,
    use_number: u32,
}

impl Gate {
    /// Whether the stream has come to the request.
    pub fn is_reached(&self) -> bool {
        has(&self.staging, self.at + REACHED, self.use_number)
    }

    /// Lets the stream pass.
    pub fn open(&self) {
        self.staging.memory().mapping.word(self.at + DONE).store(self.use_number, Ordering::Release);
    }
}

/// Whether a word has come to a number, which wraps.
fn has(staging: &Shared<Staging>, at: usize, number: u32) -> bool {
    staging.memory().mapping.word(at).load(Ordering::Acquire).wrapping_sub(number).cast_signed() >= 0
}

impl Gates {
    /// For a pool with room for [`LEN`] bytes of them at `at`.
    pub fn new(staging: Arc<Shared<Staging>>, at: usize) -> Gates {
        Gates { staging, at, uses: Mutex::new(vec![0; GATES]) }
    }

    /// Puts a gate into a stream. What is put into the stream afterwards waits for [`Gate::open`]. None if all are in use.
    pub fn put(&self, stream: &Stream) -> Result<Option<Gate>, CudaError> {
        let mut uses = self.uses.lock();
        let Some(gate) = (0..GATES).find(|&gate| self.is_free(gate, uses[gate])) else { return Ok(None) };
        let (at, use_number) = (self.at + gate * GATE, uses[gate].wrapping_add(1));
        let address = self.staging.memory().device_address + at as u64;
        // SAFETY: the words are registered with CUDA, and stay so until the stream has passed them all: see `drop`.
        unsafe { stream.write_value(address + REACHED as u64, use_number) }?;
        // From here on the stream knows the gate: nobody else gets it before the stream has passed.
        uses[gate] = use_number;
        let gate = Gate { staging: self.staging.clone(), at, use_number };
        // SAFETY: as above. `DONE` is written by the worker, which waits for no stream.
        let put = unsafe {
            stream
                .wait_value(address + DONE as u64, use_number)
                .and_then(|()| stream.write_value(address + PASSED as u64, use_number))
        };
        if let Err(error) = put {
            gate.open(); // the stream may wait already, and no request will ever let it pass
            return Err(error);
        }
        Ok(Some(gate))
    }

    /// Whether the stream that used a gate last has passed it.
    fn is_free(&self, gate: usize, last_use: u32) -> bool {
        has(&self.staging, self.at + gate * GATE + PASSED, last_use)
    }
}

impl Drop for Gates {
    /// All requests are done, so streams pass soon, if they live. If they do not, the memory is left to them.
    fn drop(&mut self) {
        let start = Instant::now();
        let uses = std::mem::take(self.uses.get_mut());
        while !uses.iter().enumerate().all(|(gate, &last_use)| self.is_free(gate, last_use)) {
            if start.elapsed() > Duration::from_secs(1) {
                std::mem::forget(self.staging.clone());
                return;
            }
            std::thread::yield_now();
        }
    }
}
