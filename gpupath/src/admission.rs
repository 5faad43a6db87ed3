//! How a `READ` or `WRITE` reaches the filesystem, by ioctl and by ring alike, and how its answer
//! returns.
//!
//! The filesystem implements [`OpenFile`]. It gets a transfer that is admitted as an [`Admitted`]:
//! what is to be moved, for whom, and where the answer goes. An `Admitted` is answered once, with
//! [`Admitted::finish`] or [`Admitted::refuse`].

use crate::outcome::{Answer, Outcome};
use crate::planner;
use crate::registry::{Buffer, RegistryError};
use crate::stats::Stats;
use gpunvme_abi::{Command, Direction, Moved, Reason, TransferRequest};
use gpunvme_metrics::Begun;
use gpunvme_metrics::activity::Actor;
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

/// An open file of the filesystem.
pub trait OpenFile: Send + Sync {
    /// The number of its inode.
    fn ino(&self) -> u64;

    /// Begins a transfer between the file and a buffer, or refuses it where the file is not open
    /// for that. It runs on the thread that took the request, which serves other requests too: it
    /// must not wait for a device.
    fn transfer(&self, admitted: Admitted);

    /// Permission for the writes of a turn of a ring, all of which were taken from it before this
    /// is asked. The writes begin before it is dropped.
    fn permit_writes(&self) -> WritePermit {
        WritePermit { is_given: true, hold: Box::new(()) }
    }

    /// Keeps blocks of the device that files of this mount give up from now on from being reused,
    /// until it is dropped, on any thread.
    fn hold(&self) -> Hold {
        Box::new(())
    }

    /// Where on the device a range of the file begins, in bytes, if the file is open for reading,
    /// the range lies before its end, in one piece that was written, and nothing of it is newer
    /// anywhere else. The caller has a [`OpenFile::hold`] from before, and reads the range before
    /// it drops that. `is_written_back`: the kernel has nothing newer. It takes no lock that other
    /// files need, and does not wait. `None` may mean anything: [`OpenFile::transfer`] looks
    /// closer.
    fn place(&self, range: Range<u64>, is_written_back: bool) -> Option<u64> {
        let _ = (range, is_written_back);
        None
    }

    /// Begins a write to a range of the file, if the file is open for writing, the range is of
    /// whole blocks, before its end, in one piece that was written, and the write changes nothing
    /// but content and time. The caller has a [`OpenFile::hold`] and a
    /// [`OpenFile::permit_writes`] from before, until [`OpenFile::end_write`]. `is_written_back`:
    /// as for [`OpenFile::place`]. It takes no lock that other files need, and does not wait.
    /// `None` may mean anything: [`OpenFile::transfer`] looks closer.
    fn begin_write(&self, range: Range<u64>, is_written_back: bool) -> Option<BegunWrite> {
        let _ = (range, is_written_back);
        None
    }

    /// Ends a write that [`OpenFile::begin_write`] began. False where the kernel may have pages of
    /// the range as they were before: then [`OpenFile::forget_pages`] comes before the answer.
    fn end_write(&self, write: usize, range: Range<u64>, is_written: bool) -> bool {
        let _ = (write, range, is_written);
        true
    }

    /// Has the kernel forget its pages of a range, and calls `then`, on a thread that may wait.
    fn forget_pages(&self, range: Range<u64>, then: Box<dyn FnOnce() + Send>) {
        let _ = range;
        then();
    }
}

/// A write that may go to the device.
pub struct BegunWrite {
    /// Where on the device it begins, in bytes.
    pub device_offset: u64,
    /// What [`OpenFile::end_write`] knows it by.
    pub write: usize,
}

/// Keeps blocks from being reused.
pub type Hold = Box<dyn Any + Send>;

/// Whether the mount can be written to, as far as the kernel says.
pub struct WritePermit {
    /// Whether writes may begin.
    pub is_given: bool,
    /// What takes the permission back waits for writes that began while this was held.
    pub hold: Box<dyn Any + Send>,
}

/// Who asked for a transfer, and is told how it ended: an ioctl, or a ring.
pub(crate) trait Requester: Send {
    /// The user.
    fn user(&self) -> u32;
    /// The process.
    fn process(&self) -> u32;
    /// The longest that the process may make a file, in bytes (`RLIMIT_FSIZE`).
    fn file_size_limit(&self) -> u64;
    /// Whether it is a ring.
    fn is_ring(&self) -> bool;
    /// Takes the answer.
    fn answer(self: Box<Self>, answer: Answer);
}

/// A `READ` or `WRITE` whose buffer is the requester's, whose segments lie in the buffer, and whose
/// route is the one required. Dropped without an answer, a ring's is answered with `EIO`: its
/// ring's end would wait for it for ever.
pub struct Admitted {
    asked: Asked,
    /// The memory that bytes are moved into, or from. Held until the answer.
    pub buffer: Arc<Buffer>,
    ino: u64,
    begun: Begun,
}

impl Admitted {
    /// Whether bytes go into the buffer, or into the file.
    pub fn direction(&self) -> Direction {
        self.asked.direction
    }

    /// What is to be moved.
    pub fn request(&self) -> &TransferRequest {
        &self.asked.request
    }

    /// Ends a write at an offset in the file, in bytes: what lies at or beyond `limit` is taken out
    /// of its segments. Returns the first segment that is cut, if any is.
    pub fn cut_at(&mut self, limit: u64) -> Option<u32> {
        let segments = &mut self.asked.request.segments;
        let cut = segments.iter().position(|s| s.len > 0 && s.file_offset.saturating_add(s.len) > limit)?;
        let (first, behind) = segments[cut..].split_first_mut().expect("it is one of them");
        first.len = limit.saturating_sub(first.file_offset);
        behind.iter_mut().for_each(|segment| segment.len = 0);
        Some(cut as u32)
    }

    /// What the kernel says of writes to the mount, where that was asked for the whole turn of a
    /// ring.
    pub fn is_writing_permitted(&self) -> Option<bool> {
        self.asked.is_writing_permitted
    }

    /// Whether it came by a ring, whose share of the device is dealt where it is served.
    pub fn is_by_ring(&self) -> bool {
        self.asked.requester.is_ring()
    }

    /// The user that asks.
    pub fn user(&self) -> u32 {
        self.asked.requester.user()
    }

    /// The process that asks. That of an ioctl is looked up in `/proc`.
    pub fn process(&self) -> u32 {
        self.asked.requester.process()
    }

    /// The longest that the process may make a file, in bytes (`RLIMIT_FSIZE`).
    pub fn file_size_limit(&self) -> u64 {
        self.asked.requester.file_size_limit()
    }

    /// Answers a transfer that was begun. The buffer is let go of first: an application that
    /// unregisters it after the answer finds the memory free.
    pub fn finish(self, outcome: &Outcome) {
        let Admitted { asked, buffer, ino, begun } = self;
        let reason = if outcome.moved.edge > 0 { Reason::Unaligned } else { buffer.reason };
        asked.stats.moved(asked.direction, 1, &outcome.moved, reason);
        asked.stats.end(begun, 1, &outcome.moved, outcome.status != 0);
        asked.stats.moved_by(asked.direction, &outcome.moved, begun, || Actor {
            user: asked.requester.user(),
            thread: asked.requester.process(),
            ino,
        });
        drop(buffer);
        // Where a part was done the application must learn how much, which an errno alone would
        // not tell.
        let errno = if outcome.moved.total() == 0 { outcome.status } else { 0 };
        asked.answer(errno, reason, outcome);
    }

    /// Answers a transfer of which nothing was done. `segment` is the one to blame, if one is.
    pub fn refuse(self, errno: i32, reason: Reason, segment: Option<u32>) {
        let Admitted { asked, buffer, begun, .. } = self;
        asked.stats.end(begun, 1, &Moved::default(), true);
        drop(buffer);
        asked.refuse(errno, reason, segment);
    }
}

/// A transfer that was asked for, and has to be answered.
pub(crate) struct Asked {
    pub stats: Arc<Stats>,
    pub direction: Direction,
    pub request: TransferRequest,
    pub requester: Box<dyn Requester>,
    /// As [`Admitted::is_writing_permitted`].
    pub is_writing_permitted: Option<bool>,
}

impl Asked {
    /// Admits the transfer and hands it to the file, or refuses it. `look_up` finds the buffer
    /// among those that the requester owns.
    pub fn admit(self, file: &dyn OpenFile, look_up: impl FnOnce() -> Result<Arc<Buffer>, RegistryError>) {
        let buffer = match look_up() {
            Ok(buffer) => buffer,
            Err(error) => return self.refuse(error.errno(), error.reason(), None),
        };
        if let Some(segment) = planner::outside(&self.request, buffer.region.len() as u64) {
            return self.refuse(libc::EINVAL, Reason::OutsideBuffer, Some(segment));
        }
        if self.request.required_route().is_some_and(|route| route != buffer.route) {
            return self.refuse(libc::EOPNOTSUPP, Reason::RouteNotAvailable, None);
        }
        let begun = self.stats.begin(self.direction, buffer.route, 1);
        file.transfer(Admitted { asked: self, buffer, ino: file.ino(), begun });
    }

    /// Answers a transfer of which nothing was done.
    pub fn refuse(self, errno: i32, reason: Reason, segment: Option<u32>) {
        self.answer(errno, reason, &Outcome::failed(errno, segment));
    }

    fn answer(self, errno: i32, reason: Reason, outcome: &Outcome) {
        let command = match self.direction {
            Direction::Read => Command::Read,
            Direction::Write => Command::Write,
        };
        self.stats.call(command, errno != 0);
        tracing::trace!(
            ?command,
            user = self.requester.user(),
            process = self.requester.process(),
            ring = self.requester.is_ring(),
            bytes = outcome.moved.total(),
            moved = ?outcome.moved,
            reason = reason.name(),
            errno,
            status = outcome.status,
            "a transfer ended"
        );
        self.requester.answer(Answer::new(&self.request, errno, reason, outcome));
    }
}
