//! What a transfer moved, and what its caller insists on.

use gpunvme_abi::{self as abi, Reason, Route, TransferFlags};

/// Bytes that were moved, by route: a disjoint sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Between device and GPU memory.
    pub p2p: u64,
    /// Between device and a staging pool.
    pub bounce: u64,
    /// From the kernel's page cache, by the GPU or a processor. The daemon has no part in it, and
    /// does not count it ([`crate::Stats`]).
    pub cache: u64,
    /// Between device and host memory.
    pub host: u64,
    /// Filled with zeros.
    pub hole: u64,
    /// Copied by the CPU, for lack of alignment.
    pub edge: u64,
}

impl Moved {
    /// Bytes moved by any means.
    pub fn total(&self) -> u64 {
        self.p2p + self.bounce + self.cache + self.host + self.hole + self.edge
    }
}

impl From<abi::Moved> for Moved {
    fn from(abi::Moved { p2p, bounce, host, hole, edge }: abi::Moved) -> Moved {
        Moved { p2p, bounce, cache: 0, host, hole, edge }
    }
}

/// What a transfer moved, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transfer {
    /// Bytes, by route: a disjoint sum.
    pub moved: Moved,
    /// Why not every byte went the fastest way; [`Reason::None`] where each did.
    pub reason: Option<Reason>,
    /// Why not every byte of a read came from the kernel's page cache; [`Reason::None`] where each
    /// did. None of transfers that never do: writes, those of rings, reads into memory that the
    /// device writes to itself, and reads of several segments, or more than 4 MiB, into host
    /// memory.
    pub cache_reason: Option<Reason>,
}

impl Transfer {
    /// How many bytes were moved. Less than was asked for means that the file ended.
    pub fn bytes(&self) -> u64 {
        self.moved.total()
    }

    /// Adds what another transfer moved.
    pub fn add(&mut self, other: &Transfer) {
        for (sum, more) in [
            (&mut self.moved.p2p, other.moved.p2p),
            (&mut self.moved.bounce, other.moved.bounce),
            (&mut self.moved.cache, other.moved.cache),
            (&mut self.moved.host, other.moved.host),
            (&mut self.moved.hole, other.moved.hole),
            (&mut self.moved.edge, other.moved.edge),
        ] {
            *sum += more;
        }
        // Of several, that of bytes which the CPU had to copy says most.
        match (self.reason, other.reason) {
            (Some(Reason::Unaligned), _) | (_, None) | (Some(_), Some(Reason::None)) => {}
            (_, reason) => self.reason = reason,
        }
        if let (None | Some(Reason::None), Some(reason)) = (self.cache_reason, other.cache_reason) {
            self.cache_reason = Some(reason);
        }
    }
}

/// What a caller insists on: instead of falling back the transfer fails, before anything has
/// moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Require {
    /// This route and no other.
    pub route: Option<Route>,
    /// No byte may be copied by the CPU.
    pub direct: bool,
}

impl Require {
    pub(crate) fn flags(self) -> TransferFlags {
        let route = match self.route {
            Some(Route::P2p) => TransferFlags::REQUIRE_P2P,
            Some(Route::Bounce) => TransferFlags::REQUIRE_BOUNCE,
            Some(Route::Host) => TransferFlags::REQUIRE_HOST,
            // The daemon has no part in the page cache.
            Some(Route::None | Route::Cache) | None => TransferFlags::empty(),
        };
        route | if self.direct { TransferFlags::REQUIRE_DIRECT } else { TransferFlags::empty() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_keep_the_reason_that_says_most() {
        let transfer = |host, edge, reason| Transfer {
            moved: Moved { host, edge, ..Moved::default() },
            reason: Some(reason),
            ..Transfer::default()
        };
        let mut sum = transfer(5, 1, Reason::Unaligned);
        sum.add(&transfer(7, 0, Reason::NotGpuMemory));
        assert_eq!((sum.bytes(), sum.reason), (13, Some(Reason::Unaligned)));
        let mut sum = Transfer::default();
        sum.add(&transfer(7, 0, Reason::NotGpuMemory));
        assert_eq!(sum.reason, Some(Reason::NotGpuMemory));
        sum.add(&transfer(3, 0, Reason::None));
        assert_eq!((sum.bytes(), sum.reason), (10, Some(Reason::NotGpuMemory)));
        for (cache_reason, expected) in [
            (None, None),
            (Some(Reason::None), Some(Reason::None)),
            (Some(Reason::NotResident), Some(Reason::NotResident)),
            (Some(Reason::None), Some(Reason::NotResident)),
            (None, Some(Reason::NotResident)),
        ] {
            sum.add(&Transfer { cache_reason, ..Transfer::default() });
            assert_eq!((sum.cache_reason, sum.reason), (expected, Some(Reason::NotGpuMemory)));
        }
    }
}
