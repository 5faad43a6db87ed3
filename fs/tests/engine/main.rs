//! The engine without FUSE: on devices in memory and on real files, against a model, through power cuts and failures.

mod ageing;
mod attack;
mod common;
mod crash;
mod direct;
mod faults;
mod fsck;
mod hostile;
mod limits;
mod model;
mod overlap;
mod reuse;
mod sim;
mod surgeon;
mod threads;
