//! The rule for what is dropped while the interpreter is held.

use pyo3::prelude::*;

/// Lets go of what may wait for transfers in flight, without holding the interpreter meanwhile.
pub fn release<T: Send>(held: T) {
    Python::attach(|py| py.detach(|| drop(held)));
}
