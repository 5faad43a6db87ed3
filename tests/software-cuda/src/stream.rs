//! Streams: a thread each, which does one thing after another. Events are marks that it passes.

use crate::memory::{HostSpan, Kind};
use crate::{Code, Context, Software};
use cudarc::driver::sys::cudaError_enum::CUDA_ERROR_ILLEGAL_ADDRESS;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A point in a stream.
#[derive(Default)]
pub struct Mark {
    passed: Mutex<bool>,
    change: Condvar,
}

impl Mark {
    /// Whether the stream has passed it.
    pub fn passed(&self) -> bool {
        *self.passed.lock().unwrap()
    }

    fn pass(&self) {
        *self.passed.lock().unwrap() = true;
        self.change.notify_all();
    }

    /// Waits until the stream has.
    pub fn wait(&self) {
        let mut passed = self.passed.lock().unwrap();
        while !*passed {
            passed = self.change.wait(passed).unwrap();
        }
    }
}

/// Something for a stream to do.
pub enum Work {
    /// Copies from the second to the first.
    Copy(Vec<HostSpan>, Vec<HostSpan>),
    /// Copies bytes that were read before.
    CopyBytes(Vec<HostSpan>, Vec<u8>),
    /// The kernel: makes moves from a table at this address, this many.
    Scatter(u64, u32),
    /// Tells that it was reached.
    Pass(Arc<Mark>),
    /// Waits until another stream reached it.
    Await(Arc<Mark>),
    /// Waits for a word to be a value (`false`), or to have passed it.
    AwaitValue(HostSpan, u32, bool),
    /// Writes a word.
    WriteValue(HostSpan, u32),
    /// Frees pool memory.
    Free(u64),
}

/// A stream.
pub struct Stream {
    /// Its number, which no other stream ever has.
    pub id: usize,
    /// The context in which it was made.
    pub context: Arc<Context>,
    /// The green context, a part of that one, in which it was made.
    pub green: Option<usize>,
    queue: Sender<Work>,
    call_takes: Duration,
    /// While it is captured: what would be in the graph, counted. Graphs are never launched.
    captured: Mutex<Option<usize>>,
}

impl Stream {
    /// A new one, with its thread, which ends when the stream is dropped and all is done.
    pub fn new(software: &'static Software, context: Arc<Context>, green: Option<usize>) -> Stream {
        let (queue, work) = mpsc::channel();
        let place = Arc::clone(&context);
        thread::Builder::new()
            .name("software-cuda".to_owned())
            .spawn(move || run(software, &place, &work))
            .expect("a thread for a stream");
        Stream {
            id: software.new_handle(),
            context,
            green,
            queue,
            call_takes: software.settings.call_takes,
            captured: Mutex::default(),
        }
    }

    /// Puts work at its end.
    pub fn put(&self, work: Work) {
        if let Some(nodes) = &mut *self.captured.lock().unwrap() {
            *nodes += 1;
            return;
        }
        self.send(work);
    }

    fn send(&self, work: Work) {
        let begun = Instant::now();
        self.queue.send(work).expect("a stream's thread ends after the stream");
        // It is the caller's processor that is busy.
        while begun.elapsed() < self.call_takes {
            std::hint::spin_loop();
        }
    }

    /// Puts all further work into a graph and does not execute it.
    pub fn begin_capture(&self) {
        self.captured.lock().unwrap().get_or_insert(0);
    }

    /// Whether it is captured.
    pub fn is_captured(&self) -> bool {
        self.captured.lock().unwrap().is_some()
    }

    /// How many nodes the graph has that was captured, if one was.
    pub fn end_capture(&self) -> Option<usize> {
        self.captured.lock().unwrap().take()
    }

    /// A mark at its end, in no graph.
    pub fn mark(&self) -> Arc<Mark> {
        let mark = Arc::new(Mark::default());
        self.send(Work::Pass(Arc::clone(&mark)));
        mark
    }
}

fn run(software: &'static Software, context: &Context, queue: &Receiver<Work>) {
    while let Ok(work) = queue.recv() {
        let begun = Instant::now();
        match work {
            Work::Pass(mark) => mark.pass(),
            // After a kernel crashed nothing more is done in its context; no thread waits for it
            // for ever either.
            _ if context.broken().is_some() => {}
            Work::Await(mark) => mark.wait(),
            Work::AwaitValue(word, value, passed) => {
                let there = |found: u32| if passed { found.wrapping_sub(value).cast_signed() >= 0 } else { found == value };
                // A context that ends takes its streams with it.
                while context.broken().is_none() && !there(word_at(&word).load(Ordering::Acquire)) {
                    thread::sleep(Duration::from_micros(20));
                }
            }
            Work::WriteValue(word, value) => word_at(&word).store(value, Ordering::SeqCst),
            Work::Free(address) => drop(software.addresses.lock().unwrap().remove(address)),
            Work::Copy(to, from) => {
                copy(&to, &from);
                busy_wait(begun, software.settings.copy_takes);
            }
            Work::CopyBytes(to, mut bytes) => {
                copy(&to, &[HostSpan::plain(bytes.as_mut_ptr(), bytes.len())]);
                busy_wait(begun, software.settings.copy_takes);
            }
            Work::Scatter(table, count) => {
                // It reads its table as late as it can, like a kernel that waits for its turn.
                busy_wait(begun, software.settings.copy_takes);
                if let Err(code) = scatter(software, context, table, count) {
                    context.break_with(code);
                }
            }
        }
    }
}

fn busy_wait(begun: Instant, takes: Duration) {
    thread::sleep(takes.saturating_sub(begun.elapsed()));
}

fn word_at(piece: &HostSpan) -> &AtomicU32 {
    // SAFETY: it is four aligned bytes that the piece, or else the application, keeps where they
    // are; both sides access them atomically.
    unsafe { AtomicU32::from_ptr(piece.at.cast()) }
}

fn copy(to: &[HostSpan], from: &[HostSpan]) {
    // Held until all is copied.
    let mut pages: Vec<Option<Vec<u8>>> =
        from.iter().map(|span| span.pinned.as_ref().map(|(pages, offset)| pages.read(*offset, span.len))).collect();
    let from = from.iter().zip(&mut pages).map(|(span, bytes)| match bytes {
        Some(bytes) => (bytes.as_mut_ptr(), span.len),
        None => (span.at, span.len),
    });
    let (mut to, mut from) = (to.iter().map(|span| (span.at, span.len)), from);
    let (mut target, mut source) = (None, None);
    loop {
        let (Some((target_at, target_len)), Some((source_at, source_len))) =
            (target.or_else(|| to.next()), source.or_else(|| from.next()))
        else {
            return;
        };
        let len = target_len.min(source_len);
        // SAFETY: the caller that asked for the copy keeps both ranges as they are until it is
        // done. They may overlap.
        unsafe { ptr::copy(source_at, target_at, len) };
        let rest = |at: *mut u8, whole: usize| (whole > len).then(|| (at.wrapping_add(len), whole - len));
        (target, source) = (rest(target_at, target_len), rest(source_at, source_len));
    }
}

/// What `gpunvme_scatter` does (gpupath/cuda/src/scatter.ptx), with the care for addresses that a
/// GPU's memory management takes.
fn scatter(software: &Software, context: &Context, table: u64, count: u32) -> Result<(), Code> {
    let mut entries = vec![[0u64; 3]; count as usize];
    let bytes = count as usize * 24;
    let own = [HostSpan::plain(entries.as_mut_ptr().cast(), bytes)];
    copy(&own, &reachable(software, context, table, bytes as u64)?);
    for [to, from, len] in entries {
        copy(&reachable(software, context, to, len)?, &reachable(software, context, from, len)?);
    }
    Ok(())
}

/// The memory at an address, if kernels of a context reach it: its own, memory of its GPU that has
/// no context, and host memory that CUDA knows.
fn reachable(software: &Software, context: &Context, address: u64, len: u64) -> Result<Vec<HostSpan>, Code> {
    let addresses = software.addresses.lock().unwrap();
    let pieces = addresses.pieces(address, len).map_err(|_| CUDA_ERROR_ILLEGAL_ADDRESS)?;
    let allowed = len == 0
        || addresses.find(address).is_some_and(|(_, allocation)| match (allocation.kind, &allocation.backing) {
            (Kind::Device(owner), _) => owner == context.handle,
            (Kind::Pool | Kind::Mapped(..), Some((backing, _))) => backing.gpu == context.gpu,
            _ => true,
        });
    if allowed { Ok(pieces) } else { Err(CUDA_ERROR_ILLEGAL_ADDRESS) }
}
