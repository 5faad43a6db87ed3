//! The engine without FUSE: on devices in memory and on real files, against a model, through power
//! cuts and failures.

mod ageing;
mod attack;
mod common;
mod crafted;
mod crash;
mod direct;
mod discard;
mod faults;
mod fragments;
mod fsck;
mod full;
mod hostile;
mod limits;
mod listing;
mod lost;
mod model;
mod orders;
mod orphans;
mod overlap;
mod reuse;
mod ruined;
mod sim;
mod snapshots;
mod spacious;
mod surgeon;
mod taken;
mod threads;
mod times;
