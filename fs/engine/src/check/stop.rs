//! A user's wish that a check or a repair ends: looked at wherever records are kept or given back,
//! blocks are read, and between operations, so that no phase goes on for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::FsError;

/// Ends a check or a repair from another thread. Clones are one.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks for the end.
    pub fn ask(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked for.
    pub fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Goes on, or ends.
    ///
    /// # Errors
    /// [`FsError::Cancelled`] when the end was asked for.
    pub fn check(&self) -> Result<(), FsError> {
        if self.is_asked() { Err(FsError::Cancelled) } else { Ok(()) }
    }
}
