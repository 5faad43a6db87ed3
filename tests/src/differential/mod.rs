//! A differential fuzzer: the same random system calls on gpunvme and on ext4, side by side. What
//! they return, errno and bytes, and what is there afterwards, have to agree, but for the named
//! differences in docs/reference/posix.md.
//!
//! Each side has a few processes of different users, and each step is one call by one of them, on
//! both sides; only the transfers of a batch are in flight together. A seed decides a sequence, and
//! one that disagrees is shrunk to a short program.

pub mod call;
pub mod differences;
pub mod facts;
pub mod generate;
pub mod pair;
pub mod process;
#[allow(unsafe_code)]
pub mod raw;
pub mod run;
pub mod shrink;
pub mod transfers;
pub mod trees;
