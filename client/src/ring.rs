//! Rings: many transfers in flight from one thread, without a system call for each.
//!
//! ```no_run
//! use gpunvme::{Buffer, File, Mount, Operation, Ring, Wait};
//!
//! let mount = Mount::open("/data")?;
//! let buffer = mount.register(Buffer::memfd(64 << 20)?)?.share();
//! let mut ring = Ring::new(&mount, 64)?;
//! let file = ring.attach(&File::open("/data/model.bin")?)?;
//! for piece in 0..64 {
//!     ring.push(&Operation::read(&file, piece << 20, &buffer, piece << 20, 1 << 20).tagged(piece))?;
//! }
//! ring.submit();
//! let mut done = Vec::new();
//! while done.len() < 64 {
//!     ring.complete(Wait::Forever, &mut done)?;
//! }
//! # Ok::<(), gpunvme::Error>(())
//! ```
//!
//! It guards what the daemon may still be using: a transfer in flight holds its buffer and its
//! file until its completion was taken.

use crate::buffer::sealed::Target;
use crate::buffer::{Memory, Shared};
use crate::codes::{reason, status};
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::file::File;
use crate::mount::Mount;
use crate::spin::Spin;
use crate::transfer::{Moved, Require, Transfer};
use gpunvme_abi::RingMemory;
use gpunvme_abi::ring::{self as abi, ASLEEP, AWAKE, CLOSED, Completion, CompletionFlags, Submission, Word};
use gpunvme_abi::{Command, TransferFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::any::Any;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long [`Ring::complete`] looks for a completion before it sleeps: about what falling asleep
/// and being woken costs.
const SPIN_LIMIT: Duration = Duration::from_micros(20);
/// After how long without a completion, and how often then, a waiting thread asks whether the
/// daemon lives: its death causes no signal.
const LOOK: Duration = Duration::from_secs(1);

/// Queues shared with the daemon of a mount. One thread uses them at a time: what submits and what
/// takes completions borrows the ring mutably.
#[derive(Debug)]
pub struct Ring {
    name: RingName,
    memory: RingMemory,
    submitted: OwnedFd,
    completed: OwnedFd,
    /// The daemon's process, where a pidfd of it can be had.
    daemon: Option<OwnedFd>,
    /// When the last completion came, or the daemon was last found alive.
    alive: Instant,
    /// Position behind the last submission that was pushed, and behind the last that the daemon
    /// was told of.
    pushed: u32,
    published: u32,
    /// Position of the next completion.
    head: u32,
    /// What is in flight, by the number that the daemon gives back.
    slots: Vec<Option<InFlight>>,
    free: Vec<u32>,
}

/// The name of a ring, to attach files to it while another thread uses it.
#[derive(Clone, Debug)]
pub(crate) struct RingName {
    connection: Arc<Connection>,
    id: u64,
    /// Whether the ring was given up.
    over: Arc<AtomicBool>,
}

#[derive(Debug)]
struct InFlight {
    user_data: u64,
    command: Command,
    file: Arc<AttachedFile>,
    /// Until the daemon is done with it.
    _buffer: Arc<dyn Any + Send + Sync>,
}

/// A file that a ring knows, with the access that it was open for. It may be closed, and even
/// unlinked.
#[derive(Clone, Debug)]
pub struct Attached(Arc<AttachedFile>);

#[derive(Debug)]
struct AttachedFile {
    ring: RingName,
    name: u64,
    path: PathBuf,
}

/// One transfer to be made.
#[derive(Clone, Debug)]
pub struct Operation<'a> {
    command: Command,
    file: &'a Attached,
    file_offset: u64,
    buffer: &'a dyn Target,
    buffer_offset: u64,
    len: u64,
    require: Require,
    is_written_back: bool,
    user_data: u64,
}

/// How one transfer ended.
#[derive(Debug)]
pub struct Completed {
    /// The number that [`Operation::tagged`] gave.
    pub user_data: u64,
    /// What it moved. Less than was asked for means that the file ended.
    pub result: Result<Transfer>,
    /// Of a read: whether another process has read the same bytes by a ring since both have the
    /// file attached, for reading alone.
    pub is_common: bool,
}

/// How long [`Ring::complete`] waits for a first completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// At most this long.
    Timeout(Duration),
    /// Until there is one.
    Forever,
}

impl Wait {
    /// When a wait that began at `start` is over; `None`: never.
    pub(crate) fn deadline(self, start: Instant) -> Option<Instant> {
        match self {
            Wait::No => Some(start),
            Wait::Timeout(timeout) => start.checked_add(timeout),
            Wait::Forever => None,
        }
    }
}

impl<'a> Operation<'a> {
    /// A read from a file into a buffer.
    ///
    /// Offsets and the length are bytes, and need no alignment: what is a multiple of
    /// [`crate::Info::logical_block`] in the file, and of [`crate::Info::memory_alignment`] in the
    /// buffer, moves without a copy. `len` is at most [`Ring::MAX_TRANSFER`]. Checked by
    /// [`Ring::push`].
    pub fn read<M: Memory>(
        file: &'a Attached,
        file_offset: u64,
        buffer: &'a Arc<Shared<M>>,
        buffer_offset: u64,
        len: u64,
    ) -> Self {
        let command = Command::Read;
        Operation {
            command,
            file,
            file_offset,
            buffer,
            buffer_offset,
            len,
            require: Require::default(),
            is_written_back: false,
            user_data: 0,
        }
    }

    /// A write from a buffer to a file, which becomes longer where it ends before.
    ///
    /// As [`Operation::read`], but that whole blocks of the filesystem
    /// ([`crate::Info::block_size`]) move without a copy.
    pub fn write<M: Memory>(
        file: &'a Attached,
        file_offset: u64,
        buffer: &'a Arc<Shared<M>>,
        buffer_offset: u64,
        len: u64,
    ) -> Self {
        Operation { command: Command::Write, ..Operation::read(file, file_offset, buffer, buffer_offset, len) }
    }

    /// The operation with a number that its completion carries; 0 without.
    pub fn tagged(self, user_data: u64) -> Self {
        Operation { user_data, ..self }
    }

    /// The operation with demands on its route. Where they cannot be met it completes with
    /// [`Error::Transfer`], and nothing moved.
    pub fn requiring(self, require: Require) -> Self {
        Operation { require, ..self }
    }

    /// The operation, of whose range [`File::write_back`] was called and said this.
    pub fn written_back(self, is_written_back: bool) -> Self {
        Operation { is_written_back, ..self }
    }

    /// The path that its file was opened by.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }
}

impl Ring {
    /// The most bytes of one operation.
    pub const MAX_TRANSFER: u64 = abi::MAX_RING_TRANSFER;

    /// Makes a ring for `entries` transfers in flight, or more: a power of two from 8 to 4096.
    ///
    /// # Errors
    /// [`Error::Memory`] where there is no memory or no descriptor for it. [`Error::Path`] where
    /// the daemon refuses: the process, or all of them, have too many, or it may not take
    /// descriptors from this process.
    pub fn new(mount: &Mount, entries: u32) -> Result<Ring> {
        let (least, most) = (*abi::RING_ENTRIES.start(), *abi::RING_ENTRIES.end());
        let entries = entries.clamp(least, most).next_power_of_two();
        let len = abi::ring_bytes(entries);
        let connection = mount.connection().clone();
        let make = || -> std::result::Result<_, Errno> {
            let memory = rustix::fs::memfd_create("gpunvme-ring", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&memory, len as u64)?;
            rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?; // the daemon adds one
            let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let mapped = RingMemory::map(memory.as_fd(), entries)?;
            Ok((memory, mapped, event()?, event()?, connection.daemon()?))
        };
        let (fd, memory, submitted, completed, daemon) = make().map_err(|errno| Error::Memory { len, errno })?;
        let request = abi::Ring {
            memory: fd.as_raw_fd(),
            submitted: submitted.as_raw_fd(),
            completed: completed.as_raw_fd(),
            entries,
            ..abi::Ring::default()
        };
        let id = connection.call(Command::Ring, request, "make a ring on it")?.ring;
        let slots = (0..entries).map(|_| None).collect();
        Ok(Ring {
            daemon,
            alive: Instant::now(),
            name: RingName { connection, id, over: Arc::default() },
            memory,
            submitted,
            completed,
            pushed: 0,
            published: 0,
            head: 0,
            slots,
            free: (0..entries).rev().collect(),
        })
    }

    /// Makes an open file known to the ring, with the access that it is open for. It is known
    /// until the last copy of what is returned is dropped, also when the file is closed or
    /// unlinked. Any thread may call it while another uses the ring.
    ///
    /// # Errors
    /// [`Error::Path`], also for a file of another mount.
    pub fn attach(&self, file: &File) -> Result<Attached> {
        self.name.attach(file)
    }

    pub(crate) fn name(&self) -> &RingName {
        &self.name
    }

    /// Operations that can still be pushed before a completion has to be taken.
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Operations pushed whose completions were not taken.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Puts an operation into the queue, with no system call. The daemon learns of it by
    /// [`Ring::submit`].
    ///
    /// # Errors
    /// [`Error::RingFull`]; [`Error::OutsideBuffer`], also for more than [`Ring::MAX_TRANSFER`]
    /// bytes; [`Error::WrongRing`] for a file that was attached to another.
    pub fn push(&mut self, operation: &Operation<'_>) -> Result<()> {
        let Operation { command, file, file_offset, buffer, buffer_offset, len, require, is_written_back, user_data } = operation;
        let end = buffer_offset.saturating_add(*len);
        if end > buffer.length() || *len > Self::MAX_TRANSFER {
            let len = buffer.length().min(Self::MAX_TRANSFER) as usize;
            return Err(Error::OutsideBuffer { segment: 0, end, len });
        }
        if !file.is_of(&self.name) {
            return Err(Error::WrongRing { path: file.0.path.clone() });
        }
        let Some(slot) = self.free.pop() else { return Err(Error::RingFull { entries: self.slots.len() }) };
        let submission = Submission {
            command: *command as u32,
            flags: (require.flags() | written_back(*is_written_back)).bits(),
            file: file.0.name,
            buffer: buffer.id(),
            file_offset: *file_offset,
            buffer_offset: *buffer_offset,
            len: *len,
            user_data: slot.into(),
            reserved: 0,
        };
        self.memory.put_submission(self.pushed, &submission);
        self.pushed = self.pushed.wrapping_add(1);
        let in_flight = InFlight { user_data: *user_data, command: *command, file: file.0.clone(), _buffer: buffer.hold() };
        self.slots[slot as usize] = Some(in_flight);
        Ok(())
    }

    /// Tells the daemon of what was pushed. A system call only if it sleeps.
    pub fn submit(&mut self) {
        if self.published == self.pushed {
            return;
        }
        self.published = self.pushed;
        // A swap is the full barrier between this word and the daemon's.
        self.memory.swap(Word::SubmissionTail, self.pushed);
        if self.memory.load(Word::Daemon) == ASLEEP {
            self.wake_daemon();
        }
    }

    /// Appends the completions that are there, in the order in which they came, and returns how
    /// many; waits for the first if there is none. What was pushed is submitted first.
    ///
    /// # Errors
    /// [`Error::RingClosed`] where there is none and none will come: the volume was unmounted, or
    /// its daemon is gone; in the second case the device may still write to the memory of reads in
    /// flight. [`Error::Path`] where the kernel does not let it wait.
    pub fn complete(&mut self, wait: Wait, out: &mut Vec<Completed>) -> Result<usize> {
        self.complete_at_least(1, wait, out)
    }

    /// [`Ring::complete`], waiting for `least` completions: for all that are in flight, if they are
    /// fewer.
    ///
    /// # Errors
    /// As [`Ring::complete`]. What was appended by then is not lost.
    pub fn complete_at_least(&mut self, least: usize, wait: Wait, out: &mut Vec<Completed>) -> Result<usize> {
        self.submit();
        let mut spin = Spin::new();
        let deadline = wait.deadline(spin.now());
        let mut taken = 0;
        loop {
            let more = self.poll(spin.now(), out)?;
            taken += more;
            if taken >= least || self.in_flight() == 0 || deadline.is_some_and(|deadline| spin.now() >= deadline) {
                return Ok(taken);
            }
            if more > 0 {
                spin.restart();
            } else if !spin.goes_on(SPIN_LIMIT) && self.arm()? {
                self.sleep(deadline)?;
                spin.look_at_clock();
            }
        }
    }

    /// [`Ring::complete`] without waiting and submitting, for callers who know the time.
    pub(crate) fn poll(&mut self, now: Instant, out: &mut Vec<Completed>) -> Result<usize> {
        let taken = self.take(out);
        if taken > 0 || self.in_flight() == 0 {
            self.alive = now;
            return Ok(taken);
        }
        if now.saturating_duration_since(self.alive) >= LOOK {
            if self.is_over() {
                // What came before the end counts.
                let taken = self.take(out);
                return if taken > 0 { Ok(taken) } else { Err(self.name.closed()) };
            }
            self.alive = now;
        }
        Ok(0)
    }

    /// After [`Ring::poll`] said that nothing more comes: appends how each transfer ended that is
    /// in flight. What it holds it keeps, as long as the ring: the device may still write there.
    pub(crate) fn lost(&self, out: &mut Vec<Completed>) {
        out.extend(self.slots.iter().flatten().map(|in_flight| {
            let path = in_flight.file.path.clone();
            Completed { user_data: in_flight.user_data, result: Err(Error::RingClosed { path }), is_common: false }
        }));
    }

    /// Asks to be signalled at the next completion: the ring, as a descriptor, then becomes
    /// readable. False: there is one already, and no signal will come.
    ///
    /// # Errors
    /// As [`Ring::complete`].
    pub fn arm(&mut self) -> Result<bool> {
        let _ = rustix::io::read(&self.completed, &mut [0u8; 8]); // nonblocking: an older signal, if any
        self.memory.swap(Word::Application, ASLEEP);
        // In this order: the daemon completes what it took, then closes the ring.
        let closed = self.memory.load(Word::Daemon) == CLOSED;
        if self.memory.load(Word::CompletionTail) != self.head {
            self.memory.swap(Word::Application, AWAKE);
            return Ok(false);
        }
        if closed {
            return Err(self.name.closed());
        }
        Ok(true)
    }

    /// The entries of each queue.
    pub(crate) fn entries(&self) -> u32 {
        self.memory.entries()
    }

    /// The path of the mount.
    pub(crate) fn path(&self) -> &Path {
        &self.name.connection.path
    }

    /// The queues, for who fills and empties them otherwise than by this.
    pub(crate) fn memory(&self) -> &RingMemory {
        &self.memory
    }

    /// The daemon's process, where a pidfd of it can be had.
    pub(crate) fn daemon(&self) -> Option<BorrowedFd<'_>> {
        self.daemon.as_ref().map(AsFd::as_fd)
    }

    /// Signals that there are submissions.
    pub(crate) fn wake_daemon(&self) {
        // A counter that is full has been signalled.
        let _ = rustix::io::write(&self.submitted, &1u64.to_ne_bytes());
    }

    /// Whether no completion will come any more: the daemon closed the ring, or its process is
    /// gone. After the first nothing is moved either. After the second that is so of a device that
    /// the daemon drove itself; what it had asked of one that the kernel drives still arrives in
    /// memory, and nothing tells when.
    ///
    /// Without a pidfd (no socket that may be used, Linux before 6.5) there is only the kernel to
    /// ask. It lets go of a mount a little before a daemon that ends in order has ended its
    /// transfers, so that one of those may still move bytes that has taken longer than [`LOOK`].
    pub(crate) fn is_over(&self) -> bool {
        self.memory.load(Word::Daemon) == CLOSED
            || match &self.daemon {
                Some(daemon) => {
                    rustix::event::poll(&mut [PollFd::new(daemon, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
                }
                None => matches!(self.name.connection.raw_info(), Err(Error::Path { errno: Errno::NOTCONN, .. })),
            }
    }

    fn sleep(&self, deadline: Option<Instant>) -> Result<()> {
        let left = deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(Instant::now()).min(LOOK));
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match rustix::event::poll(&mut [PollFd::new(&self.completed, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(Error::Path { path: self.name.connection.path.clone(), action: "wait for a transfer", errno }),
        }
    }

    /// Takes the completions that are there.
    fn take(&mut self, out: &mut Vec<Completed>) -> usize {
        let tail = self.memory.load(Word::CompletionTail);
        if self.head == tail {
            return 0; // the daemon looks at the words, which are not written without need
        }
        let mut taken = 0;
        while self.head != tail {
            let completion = self.memory.completion(self.head);
            self.head = self.head.wrapping_add(1);
            // A number that is not ours can only come from a broken daemon: no caller waits for it.
            let slot = completion.user_data as usize;
            let Some(in_flight) = self.slots.get_mut(slot).and_then(Option::take) else { continue };
            self.free.push(slot as u32);
            out.push(in_flight.completed(&completion));
            taken += 1;
        }
        self.memory.store(Word::CompletionHead, self.head);
        taken
    }
}

/// Becomes readable when a completion comes after [`Ring::arm`] said yes: for poll(2), epoll(7)
/// and the like.
impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.completed.as_fd()
    }
}

fn written_back(is_written_back: bool) -> TransferFlags {
    if is_written_back { TransferFlags::WRITTEN_BACK } else { TransferFlags::empty() }
}

impl InFlight {
    fn completed(&self, completion: &Completion) -> Completed {
        let Completion { p2p, bounce, host, hole, edge, .. } = *completion;
        let reason = reason(completion.reason);
        let done =
            Transfer { moved: Moved { p2p, bounce, cache: 0, host, hole, edge }, reason: Some(reason), cache_reason: None };
        let result = match status(completion.status) {
            None => Ok(done),
            Some(errno) => Err(Error::Transfer {
                path: self.file.path.clone(),
                action: if self.command == Command::Read { "read" } else { "write" },
                errno,
                reason,
                segment: None,
                offset: None,
                done,
            }),
        };
        let is_common = completion.flags & CompletionFlags::COMMON.bits() != 0;
        Completed { user_data: self.user_data, result, is_common }
    }
}

impl RingName {
    /// As [`Ring::attach`].
    pub fn attach(&self, file: &File) -> Result<Attached> {
        let attach = |descriptor, grant| {
            let request = abi::Attach { ring: self.id, descriptor, grant, ..abi::Attach::default() };
            let answer = file.call(Command::Attach, request, "attach it to a ring of this mount");
            let hidden = match &answer {
                Err(Error::Path { errno: errno @ Errno::PERM, .. }) => Some(*errno),
                _ => None,
            };
            let grant = answer.as_ref().map_or(0, |answer| answer.grant);
            (answer, grant, hidden)
        };
        let name = file.show(attach)??.file;
        Ok(Attached(Arc::new(AttachedFile { ring: self.clone(), name, path: file.path().to_owned() })))
    }

    fn closed(&self) -> Error {
        Error::RingClosed { path: self.connection.path.clone() }
    }

    /// Detaches a file. A failure is ignored: either the file is gone already, or the daemon is.
    fn detach(&self, file: u64) {
        let request = abi::Detach { ring: self.id, file, ..abi::Detach::default() };
        let _ = self.connection.call(Command::Detach, request, "let go of a ring");
    }
}

impl Attached {
    /// Its name in submissions, by which kernels know it.
    pub fn name(&self) -> u64 {
        self.0.name
    }

    /// Whether it is known to that ring.
    pub(crate) fn is_of(&self, ring: &RingName) -> bool {
        self.0.ring.id == ring.id && Arc::ptr_eq(&self.0.ring.connection, &ring.connection)
    }

    /// Whether the ring was given up, and with it what it knew.
    pub(crate) fn is_over(&self) -> bool {
        self.0.ring.over.load(Ordering::Acquire)
    }

    /// The path that the file was opened by.
    pub(crate) fn path(&self) -> &Path {
        &self.0.path
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.name.over.store(true, Ordering::Release);
        self.name.detach(0);
    }
}

impl Drop for AttachedFile {
    fn drop(&mut self) {
        if !self.ring.over.load(Ordering::Acquire) {
            self.ring.detach(self.name);
        }
    }
}
