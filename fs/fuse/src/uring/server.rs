//! A thread that serves a queue: it takes requests out of completions, and commits replies.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::PollFlags;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::entry::{Answered, Entry};
use crate::destroy::Destroyed;
use crate::handler::Handler;
use crate::reply::Reply;
use crate::request::{Decoder, Message};
use crate::wire::{COMMIT_AND_FETCH, REGISTER, RingCommand, RingHeader};

pub(super) type Ring = IoUring<Entry128, cqueue::Entry>;

/// User data of the completions that say that the eventfd was written; others have numbers of
/// entries.
const WOKEN: u64 = u64::MAX;
/// Offset of `len` in an entry of the submission queue (linux/io_uring.h).
const SQE_LEN: usize = 24;

/// `struct iovec`.
#[repr(C)]
struct Vector(*mut u8, usize);

/// What the threads of a connection share.
pub(super) struct Shared {
    pub device: Arc<OwnedFd>,
    pub decoder: Decoder,
    /// The entries of all queues.
    pub entries: Vec<Arc<Entry>>,
    /// Entries that the kernel has, may have, or will have again.
    pub live: AtomicUsize,
    /// The lists of all threads.
    pub lists: Vec<Arc<Answered>>,
}

impl Shared {
    fn are_any_live(&self) -> bool {
        self.live.load(Ordering::SeqCst) > 0
    }

    /// Notes that the kernel does not have an entry, and will not. All threads end with the last
    /// one.
    fn lose(&self) {
        if self.live.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.lists.iter().for_each(|list| list.wake());
        }
    }
}

/// The thread.
pub(super) struct Server {
    ring: Ring,
    answered: Arc<Answered>,
    shared: Arc<Shared>,
    /// Takes the answer to DESTROY, which is given when the volume is written down.
    destroy: Destroyed,
    /// Where the memory of the entries that it registers lies.
    vectors: Vec<[Vector; 2]>,
    /// Completions that are not looked at yet.
    completions: Vec<cqueue::Entry>,
}

impl Server {
    pub fn new(ring: Ring, answered: Arc<Answered>, shared: Arc<Shared>, destroy: Destroyed) -> Server {
        Server { ring, answered, shared, destroy, vectors: Vec::new(), completions: Vec::new() }
    }

    /// Gives entries to the kernel.
    ///
    /// # Errors
    /// The kernel refused one. Those that it took have to be served all the same.
    pub fn register(&mut self, entries: &[Arc<Entry>], first: usize) -> io::Result<()> {
        self.vectors = entries.iter().map(|entry| entry.memory().map(|(at, len)| Vector(at, len))).collect();
        for (at, entry) in entries.iter().enumerate() {
            let vectors = Some(self.vectors[at].as_ptr() as u64);
            let command = self.command(REGISTER, entry.qid, first + at, 0, vectors);
            self.push(&command)?;
        }
        self.wait_for_wakes()?;
        self.ring.submit()?;
        self.collect();
        let refused = self.completions.iter().find(|completion| completion.user_data() != WOKEN && completion.result() < 0);
        refused.map_or(Ok(()), |refused| Err(io::Error::from_raw_os_error(-refused.result())))
    }

    /// Serves until the kernel has given all entries back.
    ///
    /// # Errors
    /// The system does not let this thread use its ring any more.
    pub fn serve(&mut self, handler: &impl Handler) -> io::Result<()> {
        let mut answered = Vec::new();
        while self.shared.are_any_live() {
            for at in 0..self.completions.len() {
                let completion = &self.completions[at];
                let (number, result, more) = (completion.user_data(), completion.result(), completion.flags());
                match number {
                    WOKEN if cqueue::more(more) => {}
                    WOKEN => self.wait_for_wakes()?,
                    _ if result < 0 => self.lost(number, result),
                    _ => self.request(number as usize, handler),
                }
            }
            self.completions.clear();
            self.answered.take(&mut answered);
            for number in answered.drain(..) {
                self.commit(number)?;
            }
            let waits = self.answered.about_to_wait() && self.shared.are_any_live();
            let submitted = self.ring.submit_and_wait(usize::from(waits));
            self.answered.awake();
            match submitted {
                Err(error) if !is_passing(&error) => return Err(error),
                _ => self.collect(),
            }
        }
        Ok(())
    }

    fn collect(&mut self) {
        self.completions.extend(self.ring.completion());
    }

    /// The kernel has given an entry back: the connection has ended, or it refuses the entry.
    fn lost(&mut self, number: u64, result: i32) {
        match Errno::from_raw_os_error(-result) {
            Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED => {}
            error => tracing::debug!(entry = number, %error, "the kernel gave an entry back"),
        }
        self.shared.lose();
    }

    /// A request has arrived.
    fn request(&mut self, number: usize, handler: &impl Handler) {
        let entry = &self.shared.entries[number];
        // SAFETY: the completion says that the kernel has given the entry to this thread, which
        // commits it after this function at the earliest.
        let (RingHeader { in_out, op_in, .. }, payload) = unsafe { entry.request() };
        let header = Decoder::entry_header(&in_out);
        let reply = Reply::new(entry.clone(), &header);
        match self.shared.decoder.entry(&in_out, &op_in, payload) {
            // The queue must be served further. The reply is dropped, and so the caller gets EIO.
            Ok(Message::Request(request)) => {
                if catch_unwind(AssertUnwindSafe(|| handler.request(request, reply))).is_err() {
                    tracing::error!(opcode = header.opcode, "a request made this program panic");
                }
            }
            Ok(Message::Destroy) => self.destroy.has_come(reply),
            // These come by `/dev/fuse` only.
            Ok(Message::Forgets(_) | Message::Interrupt) | Err(_) => {
                tracing::error!(opcode = header.opcode, "a request could not be decoded");
                reply.error(Errno::IO.raw_os_error());
            }
        }
    }

    /// Hands a reply to the kernel, and its entry for the next request.
    fn commit(&mut self, number: usize) -> io::Result<()> {
        let entry = &self.shared.entries[number];
        // SAFETY: the entry was left with this thread, so it is answered; the slices of `request`
        // do not outlive that function.
        let commit_id = unsafe { entry.put_reply() };
        let command = self.command(COMMIT_AND_FETCH, entry.qid, number, commit_id, None);
        self.push(&command)
    }

    fn command(&self, operation: u32, qid: u16, number: usize, commit_id: u64, vectors: Option<u64>) -> Entry128 {
        let mut area = [0; 80];
        let command = RingCommand { flags: 0, commit_id, qid, padding: [0; 6] };
        area[..size_of::<RingCommand>()].copy_from_slice(command.as_bytes());
        let device = types::Fd(self.shared.device.as_raw_fd());
        let mut entry = opcode::UringCmd80::new(device, operation).cmd(area).addr(vectors).build().user_data(number as u64);
        if vectors.is_some() {
            // SAFETY: an `Entry128` is the kernel's `struct io_uring_sqe` of 128 bytes, of which
            // any bytes are valid, and `len` lies there, aligned. The crate has no other way to
            // set it.
            unsafe { std::ptr::from_mut(&mut entry).cast::<u8>().add(SQE_LEN).cast::<u32>().write(2) };
        }
        entry
    }

    /// Asks for a completion whenever the eventfd is written.
    fn wait_for_wakes(&mut self) -> io::Result<()> {
        let wake = types::Fd(self.answered.descriptor().as_raw_fd());
        let poll = opcode::PollAdd::new(wake, u32::from(PollFlags::IN.bits())).multi(true).build().user_data(WOKEN);
        self.push(&poll.into())
    }

    fn push(&mut self, entry: &Entry128) -> io::Result<()> {
        loop {
            // SAFETY: the memory that submissions name is that of entries, and of the vectors,
            // which the kernel reads when it takes a registration. Both live until no entry is
            // live, as the drop of this sees to. A wait for the eventfd names no memory.
            match unsafe { self.ring.submission().push(entry) } {
                Ok(()) => return Ok(()),
                Err(_) => match self.ring.submit() {
                    Err(error) if !is_passing(&error) => return Err(error),
                    // Completions have to be taken before there is room.
                    _ => self.collect(),
                },
            };
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.shared.are_any_live() {
            // The kernel has memory of this process, and clients wait for this thread, which has
            // failed or panicked. The connection ends with the process.
            tracing::error!("requests through io_uring cannot be served any more: the mount is given up");
            std::process::abort();
        }
    }
}

/// Whether a submission fails only for now: a signal came, or the kernel is short of memory or of
/// room for completions.
fn is_passing(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INTR | Errno::AGAIN | Errno::BUSY | Errno::TIME))
}
