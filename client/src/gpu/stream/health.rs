//! Checks whether the CUDA contexts of streams with requests still live.
//!
//! It guards that a request is answered whose stream never comes to it: a kernel of the application
//! that crashes ends its context with all streams, and CUDA reports this only to a thread that
//! asks. The thread that serves such requests makes no call of CUDA, and the one that copies must
//! not wait, so where nothing goes on for a while a thread of its own asks.
//!
//! Only the primary contexts of GPUs are looked after, which is those of the CUDA runtime and
//! PyTorch. The application may destroy other contexts as soon as a stream has passed a request,
//! and the thread would then ask for a context that is not there.

use gpunvme_cuda::{Cuda, CudaError, Event, Gpu, Stream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// What is known of the primary context of a GPU.
pub struct Health {
    pub gpu: Gpu,
    /// A stream in that context, otherwise idle.
    stream: Stream,
    event: Event,
    /// A thread is asking CUDA.
    asking: AtomicBool,
    ended: OnceLock<CudaError>,
}

impl Health {
    pub fn new(gpu: Gpu) -> Result<Health, CudaError> {
        let (stream, event) = (gpu.stream()?, gpu.event()?);
        Ok(Health { gpu, stream, event, asking: AtomicBool::new(false), ended: OnceLock::new() })
    }

    /// The error that ended the context, as far as is known.
    pub fn ended(&self) -> Option<&CudaError> {
        self.ended.get()
    }

    /// Has a thread ask CUDA, unless one is asking already: the answer may take as long as all
    /// streams.
    pub fn look(self: &Arc<Health>) {
        if self.asking.swap(true, Ordering::Relaxed) {
            return;
        }
        let health = self.clone();
        let thread = std::thread::Builder::new().name("gpunvme-health".into()).spawn(move || {
            let _alone = Cuda::load().map(Cuda::leave_captures_alone);
            health.ask();
            drop(health); // which makes calls of CUDA, if it is the last
        });
        if let Err(error) = thread {
            tracing::warn!(%error, "whether the context of GPU {} lives is not known", self.gpu);
            self.asking.store(false, Ordering::Relaxed);
        }
    }

    fn ask(&self) {
        match self.event.done().and_then(|done| if done { self.stream.record(&self.event) } else { Ok(()) }) {
            Ok(()) => {}
            Err(error) if error.ends_context() => {
                tracing::debug!(%error, "the context of GPU {} ended", self.gpu);
                let _ = self.ended.set(error); // the first is the reason
            }
            // Streams may go on: the next to ask learns it.
            Err(error) => tracing::debug!(%error, "CUDA does not say whether the context of GPU {} lives", self.gpu),
        }
        self.asking.store(false, Ordering::Relaxed);
    }
}
