//! The rule for what is dropped while the interpreter is held.

use pyo3::prelude::*;
use std::ops::Deref;
use std::sync::Arc;

/// Lets go of what may wait for transfers in flight, without holding the interpreter meanwhile.
pub fn release<T: Send>(held: T) {
    Python::attach(|py| py.detach(|| drop(held)));
}

/// A part in what is shared: if it is the last one, it goes as by [`release`]. A call
/// that has the interpreter may come to hold the last, because another thread closes what it was
/// taken from.
pub struct Held<T: Send + Sync>(Option<Arc<T>>);

impl<T: Send + Sync> Held<T> {
    /// Another part, for what is done without the interpreter.
    pub fn share(&self) -> Arc<T> {
        Arc::clone(self.arc())
    }

    fn arc(&self) -> &Arc<T> {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: Send + Sync> From<Arc<T>> for Held<T> {
    fn from(shared: Arc<T>) -> Held<T> {
        Held(Some(shared))
    }
}

impl<T: Send + Sync> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.arc()
    }
}

impl<T: Send + Sync> Drop for Held<T> {
    fn drop(&mut self) {
        if let Some(last) = self.0.take().and_then(Arc::into_inner) {
            release(last);
        }
    }
}
