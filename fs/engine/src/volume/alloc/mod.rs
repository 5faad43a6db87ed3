//! Allocation: which blocks a file or the tree gets.
//!
//! Data and metadata never share a chunk (2 MiB). Runs of 2 MiB and more take wholly free chunks,
//! so that large files lie in large aligned extents; smaller ones fill chunks that hold data
//! already, where they fit best: a volume that ages would run out of free chunks otherwise, and
//! large files of large extents. Free chunks are taken from both ends, for large runs from the
//! front, for small runs and metadata from the back. Space is taken in two steps: `reserve` marks
//! free blocks busy, in memory only; when their data is on the device, `claim` makes them the
//! file's in the same operation that maps them. A crash in between loses nothing and leaks
//! nothing.

mod bitmaps;
mod claim;
mod nodes;
mod reserve;
mod room;

pub(super) use bitmaps::{bitmap, descriptor};
pub(crate) use nodes::empty_metadata_chunks;
