//! One ring, as the daemon holds it: what was taken from it and what was given back. It guards the
//! ring's rules. It knows no threads: the service thread takes submissions, and the thread that
//! ends a transfer completes it.

use super::count::Counted;
use super::deferred_drop::{DeferredDrop, Held};
use super::groups::{Amount, Limits, Member};
use super::readers::Reader;
use super::thread::ServingThread;
use super::wakes::Wake;
use crate::admission::{OpenFile, Requester};
use crate::calling_thread;
use crate::outcome::Answer;
use crate::process::Process;
use crate::quota::Portion;
use crate::registry::Buffer;
use gpunvme_abi::Reason;
use gpunvme_abi::RingMemory;
use gpunvme_abi::ring::{ASLEEP, AWAKE, CLOSED, Completion, CompletionFlags, MAX_RING_TRANSFER, Submission, Word};
use parking_lot::{Mutex, RwLock};
use rustc_hash::FxHashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The most files of one ring.
const FILES_MAX: usize = 65536;
/// How long a limit of the owner is taken for what it was: to ask takes longer than to begin a
/// transfer.
const LIMIT_LASTS: Duration = Duration::from_millis(10);

/// A ring.
pub(super) struct Ring {
    pub id: u64,
    pub owner: Process,
    /// The user that made it.
    pub user: u32,
    /// The member whose share it has a part of.
    pub member: Member,
    /// Signalled by the application; only watched.
    pub submitted: Held<OwnedFd>,
    memory: RingMemory,
    completed: Held<Wake>,
    /// Position of the next submission to take. The service's.
    head: AtomicU32,
    /// Position of the next completion.
    tail: Mutex<u32>,
    /// Taken and not completed.
    in_flight: AtomicU32,
    /// Bytes asked for in those.
    bytes: AtomicU64,
    /// When there was last something to take or in flight ([`super::shares::Shares::now`]).
    last_busy: AtomicU64,
    /// Something was completed since the application was last looked after.
    due: AtomicBool,
    closed: AtomicBool,
    files: RwLock<Files>,
    /// Buffers used before: to look one up in the registry takes a system call.
    buffers: Mutex<FxHashMap<u64, Weak<Buffer>>>,
    /// The longest that the owner may make a file, and when that was asked.
    file_size: Mutex<Option<(Instant, u64)>>,
    /// Where what it lets go of goes.
    deferred_drop: DeferredDrop,
    _counted: Counted,
}

#[derive(Default)]
struct Files {
    by_name: FxHashMap<u64, Arc<AttachedFile>>,
    last: u64,
}

/// A file that was attached.
pub(super) struct AttachedFile {
    pub file: Held<dyn OpenFile>,
    /// Of one that is attached for reading alone.
    pub reader: Option<Reader>,
    /// Of the files that all rings may have.
    _portion: Portion,
}

/// The application broke the rules of its ring.
#[derive(Debug, thiserror::Error)]
#[error("process {process} broke its ring: {what}")]
pub(super) struct Broken {
    process: u32,
    what: &'static str,
}

impl Ring {
    pub fn new(
        id: u64,
        (user, owner): (u32, Process),
        member: Member,
        memory: RingMemory,
        submitted: OwnedFd,
        completed: Arc<Wake>,
        (deferred_drop, counted): (DeferredDrop, Counted),
    ) -> Ring {
        Ring {
            id,
            owner,
            user,
            member,
            // Who waits for an eventfd is told of its end, by the thread that closes it.
            submitted: Held::new(Arc::new(submitted), &deferred_drop),
            memory,
            completed: Held::new(completed, &deferred_drop),
            head: AtomicU32::new(0),
            tail: Mutex::new(0),
            in_flight: AtomicU32::new(0),
            bytes: AtomicU64::new(0),
            last_busy: AtomicU64::new(0),
            due: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            files: RwLock::default(),
            buffers: Mutex::default(),
            file_size: Mutex::default(),
            deferred_drop,
            _counted: counted,
        }
    }

    /// Entries of each queue: the most that can be in flight.
    pub fn entries(&self) -> u32 {
        self.memory.entries()
    }

    /// Submissions that wait to be taken.
    pub fn pending(&self) -> Result<u32, Broken> {
        let pending = self.memory.load(Word::SubmissionTail).wrapping_sub(self.head.load(Ordering::Relaxed));
        if pending > self.memory.entries() {
            return Err(Broken { process: self.owner.id, what: "its tail of submissions is more than a ring ahead" });
        }
        Ok(pending)
    }

    /// How many submissions may be taken now.
    pub fn ready(&self) -> Result<u32, Broken> {
        match self.pending()? {
            0 => Ok(0),
            pending => Ok(pending.min(self.room()?)),
        }
    }

    /// How many may be taken so that each completion has a place: none as long as the application
    /// leaves completions lying.
    fn room(&self) -> Result<u32, Broken> {
        // In this order: what is completed in between is counted twice, not left out.
        let in_flight = self.in_flight.load(Ordering::Acquire);
        let unread = self.tail.lock().wrapping_sub(self.memory.load(Word::CompletionHead));
        if unread > self.memory.entries() {
            return Err(Broken { process: self.owner.id, what: "its head of completions is not among them" });
        }
        Ok(self.memory.entries().saturating_sub(in_flight.saturating_add(unread)))
    }

    /// Takes the next submissions, at most `most` of them and no more than the limits leave, to
    /// `into`. Only where [`Ring::ready`] said that there are so many.
    pub fn take(&self, most: u32, limits: &Limits, into: &mut Vec<Submission>) {
        let mut head = self.head.load(Ordering::Relaxed);
        let mut taken = Amount::default();
        let (transfers, bytes) = self.load();
        let left = limits.ring.less(transfers, bytes);
        let reserved = self.member.reserve(limits, most.min(left.transfers));
        while taken.transfers < reserved.transfers && taken.bytes < reserved.bytes.min(left.bytes) {
            let submission = self.memory.submission(head);
            head = head.wrapping_add(1);
            taken.transfers += 1;
            taken.bytes += weight(submission.len);
            into.push(submission);
        }
        self.member.begin(reserved.transfers, taken);
        if taken.transfers == 0 {
            return;
        }
        self.head.store(head, Ordering::Relaxed);
        self.memory.store(Word::SubmissionHead, head);
        self.bytes.fetch_add(taken.bytes, Ordering::AcqRel);
        self.in_flight.fetch_add(taken.transfers, Ordering::AcqRel);
    }

    /// Submissions in flight, and the bytes they are about.
    pub fn load(&self) -> (u32, u64) {
        (self.in_flight.load(Ordering::Acquire), self.bytes.load(Ordering::Acquire))
    }

    /// When it was last busy.
    pub fn last_busy(&self) -> u64 {
        self.last_busy.load(Ordering::Relaxed)
    }

    /// Notes that the ring is busy.
    pub fn set_busy(&self, now: u64) {
        if self.last_busy() != now {
            self.last_busy.store(now, Ordering::Relaxed);
        }
    }

    /// Ends submissions that were taken, and asked for so many bytes in all as their
    /// [`weight`]s. [`Ring::wake_if_due`] has to follow.
    pub fn complete(&self, bytes: u64, completions: &[Completion]) {
        let ended = Amount { transfers: completions.len() as u32, bytes };
        {
            let mut tail = self.tail.lock();
            for completion in completions {
                self.memory.put_completion(*tail, completion);
                *tail = tail.wrapping_add(1);
            }
            self.memory.store(Word::CompletionTail, *tail);
            self.bytes.fetch_sub(ended.bytes, Ordering::AcqRel);
            self.in_flight.fetch_sub(ended.transfers, Ordering::AcqRel);
        }
        self.member.end(ended);
        self.due.store(true, Ordering::Release);
    }

    /// Says whether the service sleeps, with a full barrier.
    pub fn set_asleep(&self, asleep: bool) {
        if !self.is_closed() {
            self.memory.swap(Word::Daemon, if asleep { ASLEEP } else { AWAKE });
        }
        if self.is_closed() {
            // It may have been closed in between.
            self.memory.store(Word::Daemon, CLOSED);
        }
    }

    /// Closes the ring: nothing more is taken, and an application that waits learns of it.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.memory.swap(Word::Daemon, CLOSED);
        self.memory.swap(Word::Application, AWAKE);
        self.completed.as_arc().send();
        let files = std::mem::take(&mut self.files.write().by_name);
        self.deferred_drop.drop_later(files);
        self.buffers.lock().clear();
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Wakes the application if it sleeps and something was completed.
    pub fn wake_if_due(&self) {
        if !self.due.load(Ordering::Relaxed) || !self.due.swap(false, Ordering::AcqRel) {
            return;
        }
        fence(Ordering::SeqCst);
        if self.memory.load(Word::Application) == ASLEEP && self.memory.swap(Word::Application, AWAKE) == ASLEEP {
            self.completed.as_arc().send();
        }
    }

    /// Gives a file a name. None where there are too many, or the ring is closed.
    pub fn attach(&self, file: Arc<dyn OpenFile>, reader: Option<Reader>, portion: Portion) -> Option<u64> {
        let mut files = self.files.write();
        if files.by_name.len() >= FILES_MAX || self.is_closed() {
            drop(files);
            return None;
        }
        files.last += 1;
        let name = files.last;
        let file = Held::new(file, &self.deferred_drop);
        files.by_name.insert(name, Arc::new(AttachedFile { file, reader, _portion: portion }));
        Some(name)
    }

    /// Takes a file out. Returns whether it was there.
    pub fn detach(&self, name: u64) -> bool {
        self.files.write().by_name.remove(&name).is_some()
    }

    /// The longest that the owner may make a file, in bytes.
    pub fn file_size_limit(&self) -> u64 {
        let mut known = self.file_size.lock();
        match *known {
            Some((asked, limit)) if asked.elapsed() < LIMIT_LASTS => limit,
            _ => known.insert((Instant::now(), calling_thread::file_size_limit(self.owner.id))).1,
        }
    }

    /// The file of this name.
    pub fn file(&self, name: u64) -> Option<Arc<AttachedFile>> {
        self.files.read().by_name.get(&name).cloned()
    }

    /// A buffer of the owner; `look_up` asks the registry.
    pub fn buffer<E>(&self, id: u64, look_up: impl FnOnce() -> Result<Arc<Buffer>, E>) -> Result<Arc<Buffer>, E> {
        let known = self.buffers.lock().get(&id).and_then(Weak::upgrade);
        // One that was unregistered lives as long as a transfer on it.
        if let Some(buffer) = known.filter(|buffer| !buffer.is_revoked()) {
            return Ok(buffer);
        }
        let buffer = look_up()?;
        let mut buffers = self.buffers.lock();
        // Those that are gone, before they become many: the names of buffers are never used again.
        if buffers.len() >= 64 && buffers.len().is_power_of_two() {
            buffers.retain(|_, buffer| buffer.strong_count() > 0);
        }
        buffers.insert(id, Arc::downgrade(&buffer));
        Ok(buffer)
    }
}

/// What else a completion tells: whether all that was asked for was moved, and whether another
/// process reads the same.
pub(super) fn flags(all: bool, common: bool) -> u64 {
    let mut flags = CompletionFlags::empty();
    flags.set(CompletionFlags::ALL, all);
    flags.set(CompletionFlags::COMMON, common);
    flags.bits()
}

/// What a submission of `len` bytes counts as. One that asks for more is refused, and weighs no
/// more until then.
pub(super) fn weight(len: u64) -> u64 {
    len.min(MAX_RING_TRANSFER)
}

/// A submission that was taken from a ring, and has to be answered. Dropped without an answer it
/// is answered with `EIO`: its ring's end would wait for it for ever.
pub(super) struct Taken {
    /// Which serves the ring.
    thread: Arc<ServingThread>,
    ring: Arc<Ring>,
    user_data: u64,
    /// Bytes that it asks for.
    len: u64,
    /// Whether another process reads the same.
    common: bool,
    answered: bool,
}

impl Taken {
    /// A submission that was just taken.
    pub(super) fn new(thread: Arc<ServingThread>, ring: Arc<Ring>, submission: &Submission) -> Taken {
        Taken { thread, ring, user_data: submission.user_data, len: submission.len, common: false, answered: false }
    }

    /// Another process reads the same, or does not.
    pub(super) fn set_common(&mut self, common: bool) {
        self.common = common;
    }

    /// Refuses it.
    pub(super) fn refuse(mut self, errno: i32, reason: Reason) {
        self.complete(Completion { user_data: self.user_data, status: errno, reason: reason.code(), ..Completion::default() });
    }

    /// Answers it.
    pub(super) fn end(mut self, completion: Completion) {
        self.complete(completion);
    }

    fn complete(&mut self, completion: Completion) {
        self.answered = true;
        let Taken { thread, ring, len, .. } = self;
        ring.complete(weight(*len), &[completion]);
        if thread.is_this() {
            // The application is woken once for all that ends in this turn.
            return;
        }
        // Another thread may end it, one that serves other rings too: what this transfer waited
        // for may have ended there.
        ring.wake_if_due();
        // The ring's thread may have left submissions lying because too much was in flight, and
        // counts the ring while something is.
        fence(Ordering::SeqCst);
        if thread.is_asleep() && (ring.load().0 == 0 || ring.pending().is_ok_and(|pending| pending > 0)) {
            thread.wake();
        }
    }
}

impl Requester for Taken {
    /// The user that made the ring.
    fn user(&self) -> u32 {
        self.ring.user
    }

    /// The process that made the ring.
    fn process(&self) -> u32 {
        self.ring.owner.id
    }

    fn file_size_limit(&self) -> u64 {
        self.ring.file_size_limit()
    }

    fn is_ring(&self) -> bool {
        true
    }

    fn answer(mut self: Box<Self>, answer: Answer) {
        let Answer { errno, transfer } = answer;
        let moved = transfer.p2p + transfer.bounce + transfer.host + transfer.hole + transfer.edge;
        self.complete(Completion {
            user_data: self.user_data,
            status: if errno == 0 { transfer.status } else { errno },
            reason: transfer.reason,
            p2p: transfer.p2p,
            bounce: transfer.bounce,
            host: transfer.host,
            hole: transfer.hole,
            edge: transfer.edge,
            flags: flags(errno == 0 && transfer.status == 0 && moved == self.len, self.common),
        });
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.answered {
            self.complete(Completion { user_data: self.user_data, status: libc::EIO, ..Completion::default() });
        }
    }
}
