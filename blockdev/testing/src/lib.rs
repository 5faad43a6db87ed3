//! Devices for tests, in a crate of their own so that no program that is installed contains them.
//!
//! - [`MemoryDevice`] is a namespace in memory. Its contents, an [`Image`], are cheap to copy.
//! - [`Recorder`] is one that logs what was written and when; from the [`Log`], [`PowerCuts`]
//!   builds every state in which a power cut could have left it.
//! - [`Faulty`] is any device, with commands that fail or stall by [`Rule`]s.
#![forbid(unsafe_code)]

mod completions;
mod faulty;
mod memory;
mod recorder;

pub use faulty::{Faulty, On, Rule};
pub use memory::{Image, MemoryDevice};
pub use recorder::{Event, Log, PowerCuts, Recorder, SECTOR};
