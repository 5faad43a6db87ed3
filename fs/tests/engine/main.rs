//! The engine without FUSE: on devices in memory and on real files, against a model, through power cuts and failures.

mod common;
mod crash;
mod direct;
mod faults;
mod hostile;
mod model;
mod reuse;
mod threads;
