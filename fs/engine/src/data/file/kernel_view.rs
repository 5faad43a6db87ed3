//! What the kernel may have cached of a file, or believe of it.

use std::ops::Range;
use std::time::{Duration, Instant};

/// What the kernel may have cached of a file, or believe of it.
#[derive(Default)]
pub(crate) struct KernelView {
    /// Times that it is open so that it can be mapped shared and writable: the kernel may have
    /// dirty pages.
    pub mappable: u32,
    /// What direct writes made the file longer by, and appends that went behind them, as long as
    /// the kernel may still believe that it ends somewhere in there.
    pub outgrown: Option<Range<u64>>,
    /// Who may keep attributes of it.
    pub attributes: GivenAttributes,
}

impl KernelView {
    /// Notes that the file becomes, or will become, longer by this, of which the kernel does not
    /// know.
    pub fn outgrows(&mut self, by: Range<u64>) {
        let known = self.outgrown.get_or_insert_with(|| by.clone());
        *known = known.start.min(by.start)..known.end.max(by.end);
    }
}

/// How long attributes may be on their way to whoever asked for them. (The kernel drops an answer
/// that it was told to be out of date before it came, but not that for a file that it did not
/// know: only for that one the time counts.)
const ON_THE_WAY: Duration = Duration::from_millis(100);

/// When somebody was given attributes of a file, and when those who keep them were last told that
/// they are out of date. Who is told of each write pays a system call for each, and nobody keeps
/// what was taken back.
pub(crate) struct GivenAttributes {
    given: Instant,
    taken_back: Option<Instant>,
}

impl Default for GivenAttributes {
    /// Somebody may have been given them just before the file was taken into memory.
    fn default() -> GivenAttributes {
        GivenAttributes { given: Instant::now(), taken_back: None }
    }
}

impl GivenAttributes {
    /// Somebody is given attributes.
    pub fn give(&mut self) {
        self.given = Instant::now();
    }

    /// Whoever keeps attributes knows that they are out of date; that was so at `since` already.
    pub fn take_back(&mut self, since: Instant) {
        self.taken_back = self.taken_back.max(Some(since));
    }

    /// Whether somebody may keep some. What was given shortly before the others were taken back
    /// may have come to whoever asked for it only after that.
    pub fn are_kept(&self) -> bool {
        self.taken_back.is_none_or(|taken_back| taken_back < self.given + ON_THE_WAY)
    }
}
