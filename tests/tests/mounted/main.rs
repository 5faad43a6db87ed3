//! A mounted volume, end to end, in one program: what waits for a device or a daemon leaves the
//! processors to the others.

mod bench;
mod coherence;
mod controllers;
mod direct;
mod direct_refusals;
mod faults;
mod files;
mod front;
mod fsck;
mod kill;
mod log;
mod long_transfers;
mod memory;
mod metadata_dump;
mod mkfs;
mod mount;
mod names;
mod opens;
mod own_memory;
mod privileges;
mod programs;
mod releases;
mod requests;
mod ring;
mod space;
mod stats;
mod storm;
mod stripes;
mod sync;
mod top;
mod transport;
mod tune;
mod unseen_writes;
mod users;
