//! A queue of a stripe: a queue of each member, and one wait for all of them. It guards that a
//! request is over when all of its parts are, with the first error; and that a flush goes to each
//! member that was written since its last, and to no other.
//!
//! Locks: `reaper` before `state`. The first is held by the one thread that collects completions,
//! also while it waits; the second for moments only, never while a member is called.
use std::num::NonZero;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use parking_lot::Mutex;
use slab::Slab;
use smallvec::SmallVec;

use super::Shared;
use super::growing::Growing;
use crate::transport::event::{Event, wait_any};
use crate::{BlockDevice, Completion, Error, Op, Queue, Request, Result, Wait};

/// Members for which one thread of the kernel submits, where there are processors for several: eight
/// devices kept it busy all the time, and others waited for it.
const MEMBERS_OF_A_THREAD: usize = 4;
/// Processors for each such thread of a queue, at least.
const PROCESSORS_OF_A_THREAD: usize = 8;

pub(super) struct StripeQueue {
    shared: Arc<Shared>,
    members: Arc<Members>,
    woken: AtomicBool,
    state: Mutex<State>,
    /// Completions of a member, in a vector that keeps its memory.
    reaper: Mutex<Vec<Completion>>,
    /// Parts by member, in vectors that keep their memory: taken by the thread that submits.
    parts: Mutex<Vec<Vec<Request>>>,
}

/// A queue of each member, by their numbers.
pub(super) struct Members {
    queues: Growing<Box<dyn Queue>>,
    is_busy: bool,
    /// Signalled by [`Queue::wake`], for requests that are over without any member, and when there
    /// are more members.
    event: Event,
}

impl Members {
    /// Opens queues of further members, as this one has of the others.
    pub fn open(&self, members: &[Arc<dyn BlockDevice>]) -> Result<Vec<Box<dyn Queue>>> {
        open_all(members.iter(), self.is_busy, &self.queues.iter().map(|queue| &**queue).collect::<Vec<_>>())
    }

    /// Has the queues of further members, from now on. Who waits looks at them, too.
    pub fn add(&self, queues: Vec<Box<dyn Queue>>) {
        queues.into_iter().for_each(|queue| self.queues.push(queue));
        self.event.signal();
    }
}

/// Opens a queue of each of these, whose numbers follow those of `before`; busy ones share threads
/// of the kernel, with those before too.
fn open_all<'a>(
    members: impl Iterator<Item = &'a Arc<dyn BlockDevice>>,
    is_busy: bool,
    before: &[&dyn Queue],
) -> Result<Vec<Box<dyn Queue>>> {
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let mut queues: Vec<Box<dyn Queue>> = Vec::new();
    for member in members {
        let first = shares_with(before.len() + queues.len(), processors);
        let new = || queues.get(first.checked_sub(before.len())?).map(|queue| &**queue);
        let beside = before.get(first).copied().or_else(new);
        let queue = if is_busy { member.open_busy_queue(beside)? } else { member.open_queue()? };
        queues.push(queue);
    }
    Ok(queues)
}

/// The member whose queue's thread of the kernel serves the queue of a member: itself, where that
/// has one of its own.
fn shares_with(member: usize, processors: usize) -> usize {
    let threads = (processors / PROCESSORS_OF_A_THREAD).max(1);
    member / MEMBERS_OF_A_THREAD % threads * MEMBERS_OF_A_THREAD
}

#[derive(Default)]
struct State {
    /// By the tag of their parts.
    pending: Slab<Pending>,
    /// Requests that are over, not yet collected.
    finished: Vec<Completion>,
}

/// A request in flight.
struct Pending {
    tag: u64,
    op: Op,
    /// Parts that are not over yet.
    parts: usize,
    error: Option<Error>,
    /// Of a flush: its members, and the writes that each of them is to make durable.
    covers: Covers,
}

/// Members, and how many writes of each.
type Covers = SmallVec<[(usize, u64); 1]>;

impl StripeQueue {
    /// With queues of all members; busy ones, if it is to be, which share threads of the kernel.
    pub(super) fn open(shared: Arc<Shared>, is_busy: bool) -> Result<StripeQueue> {
        let queues = open_all(shared.members.iter(), is_busy, &[])?;
        let event = Event::new().map_err(|errno| Error::System {
            device: shared.name().clone(),
            action: "making an eventfd",
            errno: errno.raw_os_error(),
        })?;
        Ok(StripeQueue {
            shared,
            members: Arc::new(Members { queues: queues.into_iter().collect(), is_busy, event }),
            woken: AtomicBool::new(false),
            state: Mutex::default(),
            reaper: Mutex::default(),
            parts: Mutex::default(),
        })
    }

    /// Its queues of the members.
    pub(super) fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Takes a request in: adds its parts to those of their members, or ends it.
    fn accept(&self, state: &mut State, request: Request, parts: &mut Vec<Vec<Request>>) {
        let Request { tag, op, len, .. } = request;
        if let Err(error) = request.check(self.shared.name(), &self.shared.geometry) {
            drop(request);
            return state.finished.push(Completion { tag, result: Err(error) });
        }
        // Looked at after the length: who grows tells of the length last.
        let map = self.shared.map();
        if parts.len() < map.members() {
            parts.resize_with(map.members(), Vec::new);
        }
        let key = state.pending.vacant_key();
        let (mut count, mut covers) = (0, Covers::new());
        if op == Op::Flush {
            covers.extend((0..parts.len()).filter_map(|member| Some((member, self.shared.to_flush(member)?))));
            for (member, _) in &covers {
                parts[*member].push(Request { tag: key as u64, ..Request::flush() });
            }
            count = covers.len();
        } else if len > 0 {
            for (member, part) in map.cut(request, key as u64) {
                parts[member].push(part);
                count += 1;
            }
        }
        if count == 0 {
            state.finished.push(Completion { tag, result: Ok(()) });
        } else {
            state.pending.insert(Pending { tag, op, parts: count, error: None, covers });
        }
    }

    /// Takes what is over from all members.
    fn collect(&self, completions: &mut Vec<Completion>, out: &mut Vec<Completion>) -> Result<()> {
        for (number, member) in self.members.queues.iter().enumerate() {
            member.complete(Wait::No, completions)?;
            if completions.is_empty() {
                continue;
            }
            let mut state = self.state.lock();
            for completion in completions.drain(..) {
                out.extend(self.completed(&mut state, number, completion));
            }
        }
        out.append(&mut self.state.lock().finished);
        Ok(())
    }

    /// Accounts for the end of a part. Gives the end of its request if it was the last.
    fn completed(&self, state: &mut State, member: usize, part: Completion) -> Option<Completion> {
        let key = part.tag as usize;
        let pending = &mut state.pending[key];
        match (pending.op, &part.result) {
            (Op::Flush, Ok(())) => {
                let covered = pending.covers.iter().find(|(of, _)| *of == member);
                covered.into_iter().for_each(|(_, writes)| self.shared.flushed(member, *writes));
            }
            (Op::Flush | Op::Read, _) | (Op::Write { fua: true }, Ok(())) => {}
            // After an error, too: any part of it may have reached the member.
            (Op::Write { .. } | Op::Discard | Op::WriteZeroes, _) => self.shared.wrote(member),
        }
        if let Err(error) = part.result {
            pending.error.get_or_insert_with(|| self.located(member, error));
        }
        pending.parts -= 1;
        if pending.parts > 0 {
            return None;
        }
        let Pending { tag, error, .. } = state.pending.remove(key);
        Some(Completion { tag, result: error.map_or(Ok(()), Err) })
    }

    /// A member's error, with the place on the stripe.
    fn located(&self, member: usize, error: Error) -> Error {
        match error.offset().and_then(|offset| self.shared.map().volume_offset(member, offset)) {
            Some(offset) => Error::Member { offset, error: Arc::new(error) },
            None => error,
        }
    }

    /// Sleeps until there may be something to collect; returns for no reason where a member has to
    /// be looked at again.
    fn sleep(&self, since: Instant, deadline: Option<Instant>) -> Result<()> {
        let mut fds = SmallVec::<[_; 9]>::from_iter([self.members.event.as_fd()]);
        for member in self.members.queues.iter() {
            match member.sleep_on(since)? {
                Some(fd) => fds.push(fd),
                None => {
                    std::hint::spin_loop();
                    return Ok(());
                }
            }
        }
        wait_any(&fds, deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())));
        self.members.event.drain();
        Ok(())
    }
}

impl Queue for StripeQueue {
    fn submit(&self, requests: &mut Vec<Request>) {
        let mut parts = std::mem::take(&mut *self.parts.lock());
        let finished = {
            let mut state = self.state.lock();
            for request in requests.drain(..) {
                self.accept(&mut state, request, &mut parts);
            }
            !state.finished.is_empty()
        };
        for (member, parts) in self.members.queues.iter().zip(&mut parts) {
            if !parts.is_empty() {
                member.submit(parts);
            }
        }
        *self.parts.lock() = parts;
        if finished {
            self.members.event.signal();
        }
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let before = out.len();
        let mut completions = self.reaper.lock();
        let since = Instant::now();
        let deadline = match wait {
            Wait::Timeout(timeout) => since.checked_add(timeout),
            Wait::No | Wait::Forever => None,
        };
        loop {
            self.collect(&mut completions, out)?;
            let over = out.len() - before;
            // A call that would not wait leaves a wake to the next one that would.
            let ends = over > 0 || wait == Wait::No || self.woken.swap(false, Ordering::AcqRel);
            if ends || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(over);
            }
            self.sleep(since, deadline)?;
        }
    }

    fn wake(&self) {
        self.woken.store(true, Ordering::Release);
        self.members.event.signal();
    }
}

#[cfg(test)]
mod tests {
    use super::shares_with;

    #[test]
    fn four_members_share_a_thread_of_the_kernel_and_all_of_them_on_few_processors() {
        let first = |members: usize, processors| (0..members).map(|member| shares_with(member, processors)).collect::<Vec<_>>();
        assert_eq!(first(8, 1), [0; 8]);
        assert_eq!(first(8, 15), [0; 8]);
        assert_eq!(first(8, 16), [0, 0, 0, 0, 4, 4, 4, 4]);
        assert_eq!(first(12, 16), [0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0]);
        assert_eq!(first(9, 64), [0, 0, 0, 0, 4, 4, 4, 4, 8]);
    }
}
