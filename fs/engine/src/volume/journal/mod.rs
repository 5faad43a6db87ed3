//! The journal: commits, checkpoints and recovery.
//!
//! Four rules hold, and everything in this folder is there to keep them.
//!
//! 1. A metadata block is written home only after the transaction that holds its image is durable.
//! 2. New data is on the device, flushed, before the transaction that exposes it: an operation
//!    that maps data begins after its write completed, and a commit flushes the device first when
//!    data was written since the last flush.
//! 3. Freed blocks are not reused before the free is durable and no transfer touches them
//!    ([`super::epoch`]).
//! 4. A metadata block that was freed is not reused for data while an older image of it is in the
//!    live journal: a chunk of metadata goes back to all uses only after a checkpoint has passed
//!    the transaction that emptied it, and both anchors say so.
//!
//! A commit freezes the running transaction under the metadata lock (content is shared, and copied
//! by the next operation that changes it), then writes it without holding that lock. Commits run
//! one after another; callers that wait for the same one share it ([`group`]). A checkpoint writes
//! home what was durable when it began, while further commits go on.

pub(crate) mod anchors;
mod checkpoint;
mod commit;
mod emptied;
mod group;
mod ownership;
pub(crate) mod recovery;
mod ring;

pub(crate) use anchors::{Anchors, read_anchors};
pub(crate) use group::GroupCommit;
pub(crate) use ring::Journal;
