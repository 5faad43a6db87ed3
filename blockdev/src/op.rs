//! The operations that a request can ask of a namespace.
use std::fmt;

/// What a command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the device into the spans.
    Read,
    /// From the spans to the device. With `fua` the data is durable when the command completes, as
    /// if a flush of this range alone had followed.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Makes every write durable that *completed before this command was submitted*. Writes in
    /// flight beside it are not covered.
    Flush,
    /// Tells the device that the range's contents are not needed any more. What a read finds there
    /// afterwards is not defined.
    Discard,
    /// Fills the range with zeroes without moving data.
    WriteZeroes,
}

impl Op {
    /// How many kinds of operations are counted apart.
    pub const KINDS: usize = 5;

    /// The number by which operations of its kind are counted ([`crate::Io::meter`]).
    pub fn kind(self) -> usize {
        match self {
            Op::Read => 0,
            Op::Write { .. } => 1,
            Op::Flush => 2,
            Op::Discard => 3,
            Op::WriteZeroes => 4,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Read => "read",
            Op::Write { fua: false } => "write",
            Op::Write { fua: true } => "durable write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "write zeroes",
        })
    }
}
