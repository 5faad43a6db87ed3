//! How much memory the entries of a connection take: a bound for all of them, however many
//! processors the machine may have.

/// Bytes that the payloads of all entries take at the most. They are touched as they are used.
pub(super) const MOST_MEMORY: usize = 256 << 20;
/// The most entries of a queue: requests of one processor that are in work at once.
const DEEPEST: usize = 64;
/// Entries that a queue keeps as long as its payloads can shrink for them: read-ahead sends
/// several requests at once.
const WANTED: usize = 4;
/// What the kernel asks for where all requests are smaller (`FUSE_MIN_READ_BUFFER`).
const LEAST: usize = 8192;
/// The smallest payload, where the largest request is not smaller itself. It has room for a name
/// and the largest extended attribute, 64 KiB, and for the kernel's default read-ahead.
const SMALLEST: usize = 128 << 10;

/// The entries of each queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// Number of entries.
    pub depth: usize,
    /// Bytes of the payload of each.
    pub payload: usize,
}

impl Size {
    /// For so many queues, and requests of at most `largest` bytes. Up to 4 queues have 64 entries
    /// of 1 MiB; more have fewer, and beyond 64 smaller ones; none if [`MOST_MEMORY`] is not enough
    /// for one entry each.
    pub fn of(queues: usize, largest: usize) -> Option<Size> {
        let share = MOST_MEMORY / queues.max(1);
        let affordable = 1 << (share / WANTED).max(1).ilog2();
        let payload = largest.max(LEAST).min(SMALLEST.max(affordable));
        let depth = (share / payload).min(DEEPEST);
        (depth > 0).then_some(Size { depth, payload })
    }

    /// Requests that no process waits for, at once, in all queues together: they leave a quarter of
    /// the entries of any queue to others. (The kernel sends one a queue beyond that.)
    pub fn background(&self) -> u16 {
        let most = self.depth - self.depth.div_ceil(4);
        u16::try_from(most.max(1)).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn few_processors_have_deep_queues_of_the_largest_requests() {
        for (queues, depth) in [(1, 64), (4, 64), (8, 32), (16, 16), (32, 8)] {
            assert_eq!(Size::of(queues, MIB), Some(Size { depth, payload: MIB }), "{queues}");
        }
        assert_eq!(Size::of(16, 4096), Some(Size { depth: 64, payload: 8192 }));
    }

    #[test]
    fn requests_in_the_background_leave_entries_to_others() {
        let background = |depth| Size { depth, payload: MIB }.background();
        assert_eq!([1, 2, 4, 8, 16, 64].map(background), [1, 1, 3, 6, 12, 48]);
    }

    #[test]
    fn many_processors_have_fewer_entries_and_then_smaller_ones() {
        let size = |queues| Size::of(queues, MIB).map(|Size { depth, payload }| (depth, payload >> 10));
        assert_eq!(size(48), Some((5, 1024)));
        assert_eq!(size(64), Some((4, 1024)));
        assert_eq!(size(128), Some((4, 512)));
        assert_eq!(size(512), Some((4, 128)));
        assert_eq!(size(1024), Some((2, 128)));
        assert_eq!(size(2048), Some((1, 128)));
        assert_eq!(size(2049), None);
        assert_eq!(size(usize::MAX), None);
    }

    #[test]
    fn no_number_of_processors_takes_more_than_the_bound() {
        for queues in 1..5000 {
            for largest in [8192, 65_536, 1_000_000, MIB, 16 * MIB] {
                let Some(Size { depth, payload }) = Size::of(queues, largest) else { continue };
                assert!(queues * depth * payload <= MOST_MEMORY, "{queues} {largest}");
                assert!(payload <= largest && (payload == largest || payload >= SMALLEST && payload.is_multiple_of(4096)));
            }
        }
    }
}
