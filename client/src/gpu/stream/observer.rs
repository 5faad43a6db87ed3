//! What a request in the order of a stream asks and tells while the stream works on it.
//!
//! It guards that an observer is not called any more once the call that made the request has
//! returned an error: what it refers to may be gone then. Before that it may have been, because the
//! stream may come to a part of the request while CUDA refuses the rest. And it guards that an
//! observer can tell an outcome that comes before the stream goes on from one that comes after the
//! stream's context died, when the application may have freed what the observer refers to.
//!
//! Locks: [`Watch`]'s own is held while the observer is called.

use crate::error::Result;
use crate::gpu::request::Segment;
use crate::transfer::Transfer;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Watches one request in the order of a stream ([`super::super::Transfers::read_on_stream_with`]).
///
/// It is called on the thread that serves the requests of all streams: it must neither wait nor
/// call CUDA.
pub trait Observer: Send {
    /// The stream has come to the request: by how many bytes its file offsets have to be moved. It
    /// must be a multiple of [`crate::Info::block_size`].
    ///
    /// # Errors
    /// The error number that the request is to fail with. Nothing is moved then.
    fn begins(&mut self) -> std::result::Result<i64, Errno> {
        Ok(0)
    }

    /// The stream has come to a request that was made with the most that it may be
    /// ([`super::super::Transfers::read_on_stream_late`]): what is to be read or written.
    ///
    /// # Errors
    /// As for [`Observer::begins`].
    fn segment(&mut self, most: Segment) -> std::result::Result<Segment, Errno> {
        let file_offset = most.file_offset.checked_add_signed(self.begins()?).ok_or(Errno::INVAL)?;
        Ok(Segment { file_offset, ..most })
    }

    /// The outcome is known. The stream has not passed the request: what is put into it afterwards
    /// comes after this call.
    fn ends(&mut self, outcome: &Result<Transfer>);

    /// As [`Observer::ends`], but that the stream's context died, with an error that every call
    /// for the stream has returned since: the stream never passes the request, and the application
    /// may have freed meanwhile what it had to keep until then.
    fn abandoned(&mut self, outcome: &Result<Transfer>) {
        self.ends(outcome);
    }
}

/// The observer of a request, if it has one and was not told the outcome.
#[derive(Clone, Default)]
pub struct Watch(Arc<Mutex<Option<Box<dyn Observer>>>>);

impl Watch {
    pub fn new(observer: Option<Box<dyn Observer>>) -> Watch {
        Watch(Arc::new(Mutex::new(observer)))
    }

    /// Asks by how many bytes file offsets are to be moved.
    pub fn begins(&self) -> std::result::Result<i64, Errno> {
        self.ask(|observer| observer.begins()).unwrap_or(Ok(0))
    }

    /// Asks what is to be done.
    pub fn segment(&self, most: Segment) -> std::result::Result<Segment, Errno> {
        self.ask(|observer| observer.segment(most)).unwrap_or(Ok(most))
    }

    /// None where there is no observer.
    fn ask<T>(
        &self,
        ask: impl FnOnce(&mut dyn Observer) -> std::result::Result<T, Errno>,
    ) -> Option<std::result::Result<T, Errno>> {
        let mut observer = self.0.lock();
        let observer = observer.as_mut()?;
        Some(catch_unwind(AssertUnwindSafe(|| ask(observer.as_mut()))).unwrap_or_else(|_| {
            tracing::error!("the observer of a request in a stream panicked");
            Err(Errno::IO)
        }))
    }

    /// Tells the outcome, once, before the stream has passed the request.
    pub fn ends(&self, outcome: &Result<Transfer>) {
        self.tell(|observer| observer.ends(outcome));
    }

    /// Tells the outcome, once, of a request that the stream never passes.
    pub fn abandoned(&self, outcome: &Result<Transfer>) {
        self.tell(|observer| observer.abandoned(outcome));
    }

    fn tell(&self, tell: impl FnOnce(&mut dyn Observer)) {
        let mut observer = self.0.lock();
        let Some(mut observer) = observer.take() else { return };
        // It is the application's, and no stream stops because of it.
        if catch_unwind(AssertUnwindSafe(|| tell(observer.as_mut()))).is_err() {
            tracing::error!("the observer of a request in a stream panicked");
        }
    }

    /// It is not called any more when this returns.
    pub fn forget(&self) {
        self.0.lock().take();
    }
}
