//! What happens when a thread panics on which others wait.

/// Aborts the process when a thread panics while it runs batches: some would never complete, and
/// threads that wait for them would hang.
pub(super) struct AbortOnPanic {
    /// Whether the thread was panicking before, which is no matter of batches.
    was_panicking: bool,
}

impl AbortOnPanic {
    /// The guard of a thread that begins to run batches.
    pub fn new() -> AbortOnPanic {
        AbortOnPanic { was_panicking: std::thread::panicking() }
    }
}

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.was_panicking {
            tracing::error!(
                "panic on an I/O thread (message above): aborting, because the requests behind it would never complete"
            );
            std::process::abort();
        }
    }
}
