//! Whether the contexts that streams are of live still.
//!
//! It guards that a request is answered whose stream never comes to it: a kernel of the application that crashes ends its context with all streams, and CUDA tells only whoever
//! asks. The thread that serves such requests makes no call of CUDA, so where nothing goes on for a while it asks the thread that copies to ask.
//!
//! Only the primary contexts of GPUs are looked after, which is those of the CUDA runtime and PyTorch. Others the application may destroy as soon as a stream has passed a request,
//! and whoever asked for one then would ask for something that is not there.

use gpunvme_gpupath::cuda::{CudaError, Event, Gpu, Stream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is known of the primary context of a GPU.
pub(super) struct Health {
    pub gpu: Gpu,
    /// In that context, and otherwise idle.
    stream: Stream,
    event: Event,
    /// Somebody is about to look.
    asked: AtomicBool,
    ended: OnceLock<CudaError>,
}

impl Health {
    pub fn new(gpu: Gpu) -> Result<Health, CudaError> {
        let (stream, event) = (gpu.stream()?, gpu.event()?);
        Ok(Health { gpu, stream, event, asked: AtomicBool::new(false), ended: OnceLock::new() })
    }

    /// What ended it, as far as is known.
    pub fn ended(&self) -> Option<&CudaError> {
        self.ended.get()
    }

    /// Whether the caller is to have somebody look, because nobody else has.
    pub fn ask(&self) -> bool {
        !self.asked.swap(true, Ordering::Relaxed)
    }

    /// Asks CUDA. It may wait for whatever CUDA waits for.
    pub fn look(&self) {
        let asked = self.event.done().and_then(|done| if done { self.stream.record(&self.event) } else { Ok(()) });
        if let Err(error) = asked {
            tracing::debug!(%error, "the context of GPU {} ended", self.gpu);
            let _ = self.ended.set(error); // the first is the reason
        }
        self.asked.store(false, Ordering::Relaxed);
    }
}
