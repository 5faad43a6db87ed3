//! Whether this process was forked from one that had opened the driver: threads, rings and CUDA
//! are the parent's.
//!
//! It guards against waiting for a thread that does not exist: a lock may have been held when the
//! process was forked, so this is asked before any is taken.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);

/// Has processes that are forked from now on know it. To be called before the driver opens.
pub fn watch() {
    static WATCHED: Once = Once::new();
    extern "C" fn child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    // SAFETY: the function stays, because this library is not unloaded, and stores to memory only.
    WATCHED.call_once(|| match unsafe { libc::pthread_atfork(None, None, Some(child)) } {
        0 => {}
        error => tracing::warn!(error, "processes that are forked will not know it"),
    });
}

/// Whether it was.
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}
