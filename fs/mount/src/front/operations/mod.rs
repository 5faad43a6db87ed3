//! The operations that the kernel asks for. Each takes a `done` that gets the result, on whatever
//! thread it comes.

pub(super) mod appends;
mod coherence;
pub(super) mod files;
pub(super) mod listing;
pub(super) mod names;
mod removal;
mod xattr;
