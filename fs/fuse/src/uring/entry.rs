//! An entry: memory for a request and its reply, which the kernel and this process have by turns.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpunvme_metrics::Meter;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use zerocopy::{FromZeros, IntoBytes};

use crate::reply::Channel;
use crate::wire::{OutHeader, RingHeader};

/// Entries whose requests are answered, and that a thread has to commit.
pub(super) struct Answered {
    entries: Mutex<Vec<usize>>,
    /// Whether the thread waits, and has to be woken.
    waits: AtomicBool,
    wake: OwnedFd,
}

impl Answered {
    pub fn new() -> io::Result<Answered> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Answered { entries: Mutex::default(), waits: AtomicBool::new(false), wake })
    }

    fn push(&self, entry: usize) {
        self.entries.lock().push(entry);
        if self.waits.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Wakes the thread, whether it waits or not.
    pub fn wake(&self) {
        // It fails only where the count, which is never read, is at its limit of 2^64 - 2.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// What is readable when the thread is woken, and stays so.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.wake
    }

    /// Moves the entries into an empty list.
    pub fn take(&self, into: &mut Vec<usize>) {
        std::mem::swap(&mut *self.entries.lock(), into);
    }

    /// Announces that the thread is about to wait. Returns whether it may: there is no entry.
    pub fn about_to_wait(&self) -> bool {
        self.waits.store(true, Ordering::SeqCst);
        self.entries.lock().is_empty()
    }

    /// Notes that the thread waits no longer.
    pub fn awake(&self) {
        self.waits.store(false, Ordering::SeqCst);
    }
}

/// The reply of an entry's request.
#[derive(Default)]
struct Answer {
    unique: u64,
    error: i32,
    len: usize,
    /// The body, where it could not be written into the entry's memory at once.
    staged: Vec<u8>,
}

/// Memory of a request and of its reply.
pub(super) struct Entry {
    number: usize,
    /// The queue that it belongs to.
    pub qid: u16,
    /// Where it is left when its request is answered.
    answered: Arc<Answered>,
    header: UnsafeCell<RingHeader>,
    payload: Box<[UnsafeCell<u8>]>,
    /// Whether the request came without a payload, so that no reference to the memory exists, and
    /// the reply may be written there at once.
    is_free: AtomicBool,
    answer: Mutex<Answer>,
    meter: Arc<Meter>,
}

// SAFETY: the memory in the cells is used by the kernel and by one thread at a time: the one that
// has the entry's completion, or, where `is_free` is set, the one that answers, of which there is
// one (a `Reply` is used up). The list of answered entries orders the two.
unsafe impl Sync for Entry {}

impl Entry {
    /// # Errors
    /// There is no memory.
    pub fn new(number: usize, qid: u16, answered: &Arc<Answered>, payload: usize, meter: &Arc<Meter>) -> io::Result<Arc<Entry>> {
        // Zeroed by the system, when it is touched.
        let payload = <[UnsafeCell<u8>]>::new_box_zeroed_with_elems(payload).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(Arc::new(Entry {
            number,
            qid,
            answered: answered.clone(),
            header: UnsafeCell::new(RingHeader::new_zeroed()),
            payload,
            is_free: AtomicBool::new(false),
            answer: Mutex::default(),
            meter: meter.clone(),
        }))
    }

    /// The address and the length of the header, and of the payload.
    pub fn memory(&self) -> [(*mut u8, usize); 2] {
        [(self.header.get().cast(), size_of::<RingHeader>()), (self.bytes(), self.payload.len())]
    }

    fn bytes(&self) -> *mut u8 {
        UnsafeCell::raw_get(self.payload.as_ptr())
    }

    /// The request that has arrived: its header, and its payload.
    ///
    /// # Safety
    /// The kernel has given the entry to this thread, and it is not committed while the slice
    /// exists.
    pub unsafe fn request(&self) -> (RingHeader, &[u8]) {
        // SAFETY: as the caller says; nothing else uses the header.
        let header = unsafe { *self.header.get() };
        let len = (header.payload_sz as usize).min(self.payload.len());
        self.is_free.store(len == 0, Ordering::Release);
        // SAFETY: as the caller says. Nothing writes there while the slice exists: `is_free` is
        // clear where the slice is not empty.
        (header, unsafe { std::slice::from_raw_parts(self.bytes().cast_const(), len) })
    }

    /// Puts the reply where the kernel looks for it. Returns the number to commit.
    ///
    /// # Safety
    /// The request is answered, and no slice of [`Entry::request`] exists.
    pub unsafe fn put_reply(&self) -> u64 {
        let answer = self.answer.lock();
        let Answer { unique, error, len, .. } = *answer;
        let out = OutHeader { len: (size_of::<OutHeader>() + len) as u32, error, unique };
        if !answer.staged.is_empty() {
            // SAFETY: as the caller says. The length was compared when it was answered.
            unsafe { self.fill(&[&answer.staged]) };
        }
        // SAFETY: as the caller says; nothing else uses the header.
        let header = unsafe { &mut *self.header.get() };
        header.in_out[..size_of::<OutHeader>()].copy_from_slice(out.as_bytes());
        (header.payload_sz, header.padding) = (len as u32, 0);
        header.commit_id
    }

    /// Copies into the payload.
    ///
    /// # Safety
    /// Nothing else uses the payload, and the parts fit.
    unsafe fn fill(&self, parts: &[&[u8]]) {
        let mut at = self.bytes();
        for part in parts {
            // SAFETY: as the caller says.
            unsafe {
                at.copy_from_nonoverlapping(part.as_ptr(), part.len());
                at = at.add(part.len());
            }
        }
    }
}

impl Channel for Entry {
    fn answer(&self, header: OutHeader, body: [&[u8]; 2]) -> io::Result<()> {
        let mut answer = self.answer.lock();
        let len = body[0].len() + body[1].len();
        let fits = len <= self.payload.len();
        answer.staged.clear();
        (answer.unique, answer.error, answer.len) = (header.unique, header.error, len);
        if !fits {
            (answer.error, answer.len) = (-Errno::IO.raw_os_error(), 0);
        } else if self.is_free.load(Ordering::Acquire) {
            // SAFETY: the request came without a payload, so no reference to it was made; the
            // kernel uses it again after the commit, which comes after `push`. The length was
            // compared.
            unsafe { self.fill(&body) };
        } else {
            body.iter().for_each(|part| answer.staged.extend_from_slice(part));
        }
        drop(answer);
        self.answered.push(self.number);
        if fits { Ok(()) } else { Err(Errno::MSGSIZE.into()) }
    }

    fn meter(&self) -> &Meter {
        &self.meter
    }
}
