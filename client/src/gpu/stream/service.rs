//! The thread that serves requests in streams: it moves bytes between the file and the frames that
//! streams gave, and gives the frames back.
//!
//! It guards that it never waits for CUDA: it makes no call of it until it ends, and takes no lock
//! under which another thread makes one. It only looks at words that streams write, writes words
//! that streams wait for, and uses a ring of its own. A step that failed gives its frame back like
//! any other: a stream must not wait for what will never come.

use super::job::{Asks, Job};
use super::plan::{Cut, DEPTH};
use super::window::Windows;
use crate::error::{Error, Result};
use crate::gpu::answer::Answer;
use crate::gpu::outcome::{Outcome, action, from_cache, of_piece};
use crate::gpu::page_cache::PageCache;
use crate::gpu::page_cache::readers::{PageAnswer, PageAnswers, PageRead, To};
use crate::gpu::pipeline::executor::STALLED;
use crate::gpu::pipeline::mailbox::Mailbox;
use crate::gpu::pipeline::piece_ring::PieceRing;
use crate::gpu::request::{Segment, SegmentPart, operation};
use crate::ring::{Completed, Ring};
use crate::spin::Spin;
use crate::transfer::Transfer;
use gpunvme_abi::{Direction, MAX_OFFSET, Reason};
use gpunvme_cuda::Cuda;
use rustix::io::Errno;
use slab::Slab;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Entries of its ring.
pub const ENTRIES: u32 = 1024;
/// How long the thread looks for work before it sleeps.
const SPIN_LIMIT: Duration = Duration::from_micros(50);
/// How long the thread sleeps at most while a stream works on a request, or pages are read, since
/// these do not wake it. It is a part of the time since something happened, within these bounds.
const NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(1);

/// What application threads tell it.
#[derive(Default)]
pub struct Mail {
    /// Of a stream, in the order in which they are put into it.
    pub jobs: Vec<(Arc<Job>, Arc<Answer>)>,
    /// It is to end when everything is done.
    pub end: bool,
}

/// A request that is being done.
struct ActiveJob {
    job: Arc<Job>,
    answer: Arc<Answer>,
    /// As it was cut for the stream, or when the stream came to it.
    cut: Arc<Cut>,
    /// Of each piece of a request whose steps have tables, how many bytes arrived.
    arrived: Vec<u64>,
    /// Steps that were begun.
    begun: usize,
    /// Pieces of each step that are not back.
    left: Vec<usize>,
    /// When its stream last made progress with it, or when it was last asked whether the stream
    /// still can.
    since: Instant,
    /// By how many bytes the file offsets are moved, as the observer wished.
    moved_by: i64,
    outcome: Outcome,
    /// The outcome, once the observer was told.
    told: Option<Result<Transfer>>,
}

/// A piece that waits for the ring, or is in it.
struct InFlight {
    request: usize,
    step: usize,
    /// Of the plan.
    piece: usize,
    /// What the slot held, if some of it is to stay.
    kept: Vec<u8>,
}

pub struct Service {
    ring: PieceRing,
    /// What reads pages of the page cache, what it has read, and how many pieces it has.
    page_cache: Arc<PageCache>,
    answers: Arc<PageAnswers>,
    reading: usize,
    read: Vec<PageAnswer>,
    mailbox: Arc<Mailbox<Mail>>,
    /// The windows end when both sides that use them are gone.
    _windows: Arc<Windows>,
    requests: Slab<ActiveJob>,
    pieces: Slab<InFlight>,
    /// Pieces that wait for the ring.
    waiting: VecDeque<usize>,
    ending: bool,
    mail: Mail,
}

impl Service {
    pub fn new(ring: Ring, mailbox: Arc<Mailbox<Mail>>, windows: Arc<Windows>, page_cache: Arc<PageCache>) -> Service {
        Service {
            ring: PieceRing::new(ring),
            page_cache,
            answers: Arc::default(),
            reading: 0,
            read: Vec::new(),
            mailbox,
            _windows: windows,
            requests: Slab::new(),
            pieces: Slab::new(),
            waiting: VecDeque::new(),
            ending: false,
            mail: Mail::default(),
        }
    }

    /// Runs the thread until it has been told to end and all requests are answered.
    pub fn run(mut self) {
        // After a panic no thread would let streams go on.
        if catch_unwind(AssertUnwindSafe(|| self.work())).is_err() {
            std::process::abort();
        }
        // Windows and contexts may end with it, and a capture of the application's would end with
        // them.
        let _alone = Cuda::load().map(Cuda::leave_captures_alone);
        drop(self);
    }

    fn work(&mut self) {
        let mut spin = Spin::new();
        loop {
            let mut busy = self.receive();
            busy |= self.collect(spin.now());
            busy |= self.look_at_streams(spin.now());
            self.push();
            self.ring.submit();
            if busy {
                spin.restart();
            } else if self.ending && self.requests.is_empty() {
                return;
            } else if !spin.goes_on(SPIN_LIMIT) {
                self.sleep(spin.since());
                spin.look_at_clock();
            }
        }
    }

    /// Takes what came into the mailbox.
    fn receive(&mut self) -> bool {
        if !self.mailbox.take(&mut self.mail) {
            return false;
        }
        for (job, answer) in self.mail.jobs.drain(..) {
            let (cut, left) = (job.cut.clone(), job.cut.plan.pieces_of_steps());
            let (since, arrived, outcome) = (Instant::now(), Vec::new(), Outcome::default());
            let (begun, moved_by, told) = (0, 0, None);
            self.requests.insert(ActiveJob { job, answer, cut, arrived, begun, left, since, moved_by, outcome, told });
        }
        self.ending |= std::mem::take(&mut self.mail.end);
        true
    }

    /// Takes the pieces that the ring is done with, and those that were read out of the page cache.
    fn collect(&mut self, now: Instant) -> bool {
        let mut any = self.ring.look(now);
        while let Some(Completed { user_data, result, is_common }) = self.ring.pop() {
            let index = user_data as usize;
            if is_common && let Ok((cached, _)) = &self.requests[self.pieces[index].request].job.resident {
                cached.set_common();
            }
            self.transferred(index, result);
        }
        if self.reading > 0 {
            let mut read = std::mem::take(&mut self.read);
            self.answers.take(&mut read);
            any |= !read.is_empty();
            for (index, result) in read.drain(..) {
                self.reading -= 1;
                match result {
                    Ok(arrived) => {
                        self.brought(index, Ok((arrived, from_cache(arrived))));
                    }
                    // The daemon says what is wrong, if it still is.
                    Err(_) => {
                        let request = self.pieces[index].request;
                        self.requests[request].outcome.passes_cache(Reason::NotCached);
                        self.transfer(index);
                    }
                }
            }
            self.read = read;
        }
        any
    }

    /// Begins the steps whose frames streams gave, and answers requests that streams have passed,
    /// or will never come to.
    fn look_at_streams(&mut self, now: Instant) -> bool {
        let mut any = false;
        let ids: Vec<usize> = self.requests.iter().map(|(id, _)| id).collect();
        for id in ids {
            // First: whatever a stream did before its context ended is seen below.
            let ended = self.requests[id].job.context.as_ref().and_then(|context| context.ended()).cloned();
            while let Some(step) = self.requests[id].given() {
                self.begin(id, step);
                self.requests[id].since = now;
                any = true;
            }
            let active = &mut self.requests[id];
            let over = active.is_over();
            if let Some(error) = ended.filter(|_| !over && !active.job.is_open()) {
                let job = &active.job;
                let error = Error::in_stream(job.file.path(), action(job.direction), job.stream, error);
                match &mut active.told {
                    // Its last copies may be missing.
                    Some(told) => *told = Err(error),
                    None => active.outcome.failed(error),
                }
            } else if !over {
                self.look_after(id, now);
                continue;
            }
            let ActiveJob { job, answer, cut, outcome, told, .. } = self.requests.remove(id);
            let result = told.unwrap_or_else(|| outcome.result(cut.parts.iter().map(SegmentPart::range)));
            if job.is_abandoned() {
                job.watch.abandoned(&result)
            } else {
                job.watch.ends(&result)
            }
            answer.set(result);
            any = true;
        }
        any
    }

    /// Asks the health thread whether a request's context lives, if its stream does nothing.
    fn look_after(&mut self, id: usize, now: Instant) {
        let active = &mut self.requests[id];
        let Some(context) = &active.job.context else { return };
        if now.saturating_duration_since(active.since) > STALLED {
            active.since = now;
            context.look();
        }
    }

    /// Begins a step.
    fn begin(&mut self, id: usize, step: usize) {
        let active = &mut self.requests[id];
        if active.begun == 0 && !active.job.is_given_up() {
            active.come_to();
        }
        active.begun += 1;
        let (job, cut) = (active.job.clone(), active.cut.clone());
        job.open_step();
        if active.left[step] == 0 {
            return self.end(id, step);
        }
        for piece in cut.plan.steps[step].pieces.clone() {
            let active = &mut self.requests[id];
            if self.ring.has_ended() {
                active.outcome.failed(Error::RingClosed { path: job.file.path().to_owned() });
            }
            if active.outcome.is_failed() || job.is_given_up() {
                self.arrived(id, step, piece, 0);
                continue;
            }
            let planned = &cut.plan.pieces[piece];
            if job.direction == Direction::Write {
                job.window.copy_on_host(job.number(step), Direction::Write, planned, planned.piece.wanted);
            }
            let kept = if planned.keeps { job.window.keep(job.number(step), planned) } else { Vec::new() };
            self.waiting.push_back(self.pieces.insert(InFlight { request: id, step, piece, kept }));
        }
    }

    /// Begins pieces, as far as the ring has room.
    fn push(&mut self) {
        while self.ring.has_room()
            && let Some(index) = self.waiting.pop_front()
        {
            if !self.read_pages(index) {
                self.transfer(index);
            }
        }
    }

    /// Has a piece read out of the page cache, if that has all of it. False if it has not. A cached
    /// range is nothing for a stream: it ends by calls of CUDA.
    fn read_pages(&mut self, index: usize) -> bool {
        let InFlight { request, step, piece, .. } = &self.pieces[index];
        let ActiveJob { job, cut, moved_by, outcome, .. } = &mut self.requests[*request];
        let planned = &cut.plan.pieces[*piece];
        let slot = job.window.slot(job.number(*step), planned);
        // What the device moves itself, and what is written, has no part in the page cache.
        let (Some(slot), Direction::Read) = (slot, job.direction) else { return false };
        let (cached, file) = match &job.resident {
            Ok((cached, file)) => (cached, file),
            Err(why) => {
                outcome.passes_cache(*why);
                return false;
            }
        };
        let range = planned.piece.moved_by(*moved_by);
        let read = PageRead {
            file: file.clone(),
            offset: range.file_offset + range.skip,
            len: range.wanted as usize,
            to: To::Slot(job.window.staging.clone(), slot + range.skip as usize),
            piece: index,
            answers: self.answers.clone(),
        };
        let begun = self.page_cache.read(cached, read, false);
        match begun {
            Ok(()) => self.reading += 1,
            Err(why) => outcome.passes_cache(why),
        }
        begun.is_ok()
    }

    /// Gives a piece to the ring.
    fn transfer(&mut self, index: usize) {
        let InFlight { request, step, piece, .. } = &self.pieces[index];
        let ActiveJob { job, cut, moved_by, .. } = &self.requests[*request];
        let (job, cut) = (job.clone(), cut.clone());
        let planned = &cut.plan.pieces[*piece];
        let part = &cut.parts[planned.part];
        let slot = job.window.slot(job.number(*step), planned).map(|slot| (&job.window.staging, slot));
        let piece = planned.piece.moved_by(*moved_by);
        let operation = operation(job.direction, &job.file, part, &piece, planned.address, slot);
        if let Err(error) = self.ring.push(&operation.requiring(job.require).tagged(index as u64)) {
            self.transferred(index, Err(error));
        }
    }

    /// The ring is done with a piece.
    fn transferred(&mut self, index: usize, result: Result<Transfer>) {
        let InFlight { request, piece, .. } = &self.pieces[index];
        let ActiveJob { job, cut, .. } = &self.requests[*request];
        let planned = &cut.plan.pieces[*piece];
        let part = &cut.parts[planned.part];
        let brought = of_piece(job.direction, job.file.path(), part, &planned.piece, result);
        self.brought(index, brought);
    }

    /// Of a piece so many bytes are where they belong, or in its slot; or it failed.
    fn brought(&mut self, index: usize, result: Result<(u64, Transfer)>) {
        let InFlight { request: id, step, piece, kept } = self.pieces.remove(index);
        let ActiveJob { job, cut, outcome, .. } = &mut self.requests[id];
        let planned = &cut.plan.pieces[piece];
        let arrived = match result {
            Ok((arrived, moved)) => {
                outcome.add(&moved);
                if arrived < planned.piece.wanted {
                    // In the ranges that the plan is for: where the stream puts them changes no
                    // length.
                    let part = &cut.parts[planned.part];
                    outcome.ended(part.segment, part.file_offset + (planned.address - part.address) + arrived);
                }
                arrived
            }
            Err(error) => {
                outcome.failed(error);
                0
            }
        };
        if job.direction == Direction::Read && !job.is_given_up() {
            job.window.copy_on_host(job.number(step), Direction::Read, planned, arrived);
        }
        if planned.keeps {
            job.window.put_back(job.number(step), planned, &kept, arrived);
        }
        self.arrived(id, step, piece, arrived);
    }

    /// A piece is back, with as many bytes.
    fn arrived(&mut self, id: usize, step: usize, piece: usize, arrived: u64) {
        let ActiveJob { job, cut, left, arrived: all, .. } = &mut self.requests[id];
        let planned = &cut.plan.pieces[piece];
        if let Some(known) = all.get_mut(piece) {
            *known = arrived;
        }
        if let (Direction::Read, Some(entry)) = (job.direction, planned.entry) {
            job.window.set_move(job.number(step), entry, job.direction, planned, arrived);
        }
        if job.direction == Direction::Read && planned.is_copied() && !planned.keeps {
            job.window.clear(job.number(step), planned, arrived);
        }
        left[step] -= 1;
        if left[step] == 0 {
            self.end(id, step);
        }
    }

    /// All pieces of a step are back.
    fn end(&mut self, id: usize, step: usize) {
        self.requests[id].tell();
        let ActiveJob { job, cut, arrived, .. } = &self.requests[id];
        job.close_step();
        // What the frame's table is needed for next.
        let next = step + DEPTH;
        let has_tables = matches!(&job.asks, Asks::Late(late) if late.has_tables());
        if has_tables && job.direction == Direction::Read {
            let first = cut.plan.steps[step].pieces.start;
            let pieces = cut.pieces(step).zip(arrived.iter().skip(first).copied());
            job.window.set_table(job.number(step), job.direction, pieces);
        } else if has_tables && next < cut.plan.steps.len() {
            let pieces = cut.pieces(next).map(|planned| (planned, planned.piece.wanted));
            job.window.set_table(job.number(next), job.direction, pieces);
        } else if job.direction == Direction::Write && next < cut.plan.steps.len() {
            for planned in cut.pieces(next) {
                if let Some(entry) = planned.entry {
                    job.window.set_move(job.number(next), entry, job.direction, planned, planned.piece.wanted);
                }
            }
        }
        job.window.give_back(job.number(step));
    }

    /// Waits until something happens, or may have. `quiet` is since when nothing did.
    fn sleep(&mut self, quiet: Instant) {
        if self.ring.arm() && self.mailbox.fall_asleep() {
            let longest = if self.reading > 0 { NAP } else { LONG_NAP };
            let nap = (!self.requests.is_empty()).then(|| (quiet.elapsed() / 4).clamp(NAP, longest));
            self.ring.wait(Some(&self.mailbox.event), nap);
        }
        self.mailbox.wake_up();
    }
}

impl ActiveJob {
    /// The stream has come to the request: it learns where in the file it is to be done, or what.
    fn come_to(&mut self) {
        let Job { file, direction, asks, block, watch, .. } = &*self.job;
        let shift = |by: i64, otherwise: Errno| {
            let end = |part: &SegmentPart| part.file_offset.checked_add_signed(by)?.checked_add(part.len);
            let fits = || self.job.cut.parts.iter().all(|part| end(part).is_some_and(|end| end <= MAX_OFFSET));
            if !by.unsigned_abs().is_multiple_of(*block) {
                Err(otherwise)
            } else if fits() {
                Ok(by)
            } else {
                Err(Errno::INVAL)
            }
        };
        let learned = match asks {
            Asks::Shift => watch.begins().and_then(|by| shift(by, Errno::INVAL)).map(|by| self.moved_by = by),
            Asks::Segment(most) => watch.segment(*most).and_then(|Segment { file_offset, address, len }| {
                let is_shift = (address, len) == (most.address, most.len);
                let by = file_offset.wrapping_sub(most.file_offset) as i64;
                self.moved_by = if is_shift { shift(by, Errno::OPNOTSUPP)? } else { return Err(Errno::OPNOTSUPP) };
                Ok(())
            }),
            Asks::Late(late) => watch.segment(late.most()).and_then(|segment| late.cut(segment)).map(|cut| {
                self.left = cut.plan.pieces_of_steps();
                self.arrived = vec![0; cut.plan.pieces.len()];
                self.cut = Arc::new(cut);
            }),
        };
        if let Err(errno) = learned {
            self.outcome.failed(Error::Transfer {
                path: file.path().to_owned(),
                action: action(*direction),
                errno,
                reason: Reason::None,
                segment: None,
                offset: None,
                done: Transfer::default(),
            });
        }
    }

    /// Tells the observer the outcome if all pieces are back. The frame of the last step has to be
    /// given back after that. Where the context died the observer is told when that is seen.
    fn tell(&mut self) {
        if !self.job.is_abandoned() && self.begun == self.left.len() && self.left.iter().all(|&left| left == 0) {
            let result = std::mem::take(&mut self.outcome).result(self.cut.parts.iter().map(SegmentPart::range));
            self.job.watch.ends(&result);
            self.told = Some(result);
        }
    }

    /// The next step, if it can begin.
    fn given(&self) -> Option<usize> {
        let step = self.begun;
        (step < self.job.steps() && self.job.window.is_given(self.job.number(step))).then_some(step)
    }

    /// Whether nothing is left to do, for the stream neither.
    fn is_over(&self) -> bool {
        // A word that CUDA refused may have come to the stream all the same, and begun a step
        // more.
        let (job, steps) = (&self.job, self.job.steps());
        let passed = || (0..steps).rev().take(DEPTH).all(|step| job.window.is_passed(job.number(step)));
        !job.is_open() && self.begun >= steps && (job.is_cut() || passed())
    }
}
