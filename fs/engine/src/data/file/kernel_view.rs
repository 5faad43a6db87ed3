//! The kernel's view of a file: the pages, attributes and length that the kernel may have cached.

use std::ops::Range;
use std::time::{Duration, Instant};

/// The kernel's view of a file.
#[derive(Default)]
pub(crate) struct KernelView {
    /// Bytes by which direct writes, and appends behind them, have extended the file, as long as
    /// the kernel may still believe that the file ends within them.
    pub outgrown: Option<Range<u64>>,
    /// Whether the kernel may keep attributes of it.
    pub attributes: GivenAttributes,
}

impl KernelView {
    /// Notes that the file becomes, or will become, longer by this range, and that the kernel does
    /// not know of it.
    pub fn outgrows(&mut self, by: Range<u64>) {
        let known = self.outgrown.get_or_insert_with(|| by.clone());
        *known = known.start.min(by.start)..known.end.max(by.end);
    }
}

/// Longest time that attributes take to reach the kernel. (The kernel drops an answer that was
/// invalidated before it arrived, but not the answer for a file that it did not know: only there
/// this time counts.)
const ON_THE_WAY: Duration = Duration::from_millis(100);

/// When the kernel was last given attributes of a file, and when it was last told that those are
/// out of date. Each such invalidation costs a system call; it is left out while the kernel keeps
/// no attributes.
pub(crate) struct GivenAttributes {
    given: Instant,
    taken_back: Option<Instant>,
}

impl Default for GivenAttributes {
    /// The kernel may have been given attributes just before the file was taken into memory.
    fn default() -> GivenAttributes {
        GivenAttributes { given: Instant::now(), taken_back: None }
    }
}

impl GivenAttributes {
    /// Notes that the kernel is given attributes.
    pub fn give(&mut self) {
        self.given = Instant::now();
    }

    /// Notes that the kernel was told that its attributes are out of date; they were so at `since`.
    pub fn take_back(&mut self, since: Instant) {
        self.taken_back = self.taken_back.max(Some(since));
    }

    /// Whether the kernel may keep attributes. An answer given shortly before an invalidation may
    /// have reached the kernel only after it.
    pub fn are_kept(&self) -> bool {
        self.taken_back.is_none_or(|taken_back| taken_back < self.given + ON_THE_WAY)
    }
}
