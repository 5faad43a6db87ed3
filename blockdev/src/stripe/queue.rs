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

/// Members that share a thread of the kernel, which submits for their queues, where there are
/// processors for several: with eight members one was busy all the time.
const MEMBERS_OF_A_THREAD: usize = 4;
/// Processors for each such thread of a queue, and for each of all queues of a stripe, at least;
/// but each queue has one.
const PROCESSORS_OF_A_THREAD: usize = 8;
const PROCESSORS_OF_EACH: usize = 4;

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
    /// Threads of the kernel that submit for them at the most, if they are busy.
    threads: Option<usize>,
    /// Signalled by [`Queue::wake`], for requests that are over without any member, and when there
    /// are more members.
    event: Event,
}

impl Members {
    /// Opens queues of further members, as this one has of the others.
    pub fn open(&self, members: &[Arc<dyn BlockDevice>]) -> Result<Vec<Box<dyn Queue>>> {
        open_all(members.iter(), self.threads, &self.queues.iter().map(|queue| &**queue).collect::<Vec<_>>())
    }

    /// How many threads of the kernel submit for them.
    pub fn threads(&self) -> usize {
        self.threads.map_or(0, |most| most.min(self.queues.iter().count().div_ceil(MEMBERS_OF_A_THREAD)))
    }

    /// Has the queues of further members, from now on. Who waits looks at them, too.
    pub fn add(&self, queues: Vec<Box<dyn Queue>>) {
        queues.into_iter().for_each(|queue| self.queues.push(queue));
        self.event.signal();
    }
}

/// How many threads of the kernel a busy queue may have, where other queues of the stripe have so
/// many.
pub(super) fn threads_beside(others: usize) -> usize {
    threads_of(thread::available_parallelism().map_or(1, NonZero::get), others)
}

fn threads_of(processors: usize, others: usize) -> usize {
    let left = (processors / PROCESSORS_OF_EACH).saturating_sub(others);
    (processors / PROCESSORS_OF_A_THREAD).min(left).max(1)
}

/// Opens a queue of each of these, whose numbers follow those of `before`; busy ones share so many
/// threads of the kernel, with those before too.
fn open_all<'a>(
    members: impl Iterator<Item = &'a Arc<dyn BlockDevice>>,
    threads: Option<usize>,
    before: &[&dyn Queue],
) -> Result<Vec<Box<dyn Queue>>> {
    let mut queues: Vec<Box<dyn Queue>> = Vec::new();
    for member in members {
        let Some(threads) = threads else {
            queues.push(member.open_queue()?);
            continue;
        };
        let first = shares_with(before.len() + queues.len(), threads);
        let new = || queues.get(first.checked_sub(before.len())?).map(|queue| &**queue);
        let queue = member.open_busy_queue(before.get(first).copied().or_else(new))?;
        queues.push(queue);
    }
    Ok(queues)
}

/// The first of the members whose queues have the same thread of the kernel as this member's.
fn shares_with(member: usize, threads: usize) -> usize {
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
    /// With queues of all members; busy ones, if so many threads of the kernel are to submit for
    /// them.
    pub(super) fn open(shared: Arc<Shared>, threads: Option<usize>) -> Result<StripeQueue> {
        let queues = open_all(shared.members.iter(), threads, &[])?;
        let event = Event::new().map_err(|errno| Error::System {
            device: shared.name().clone(),
            action: "making an eventfd",
            errno: errno.raw_os_error(),
        })?;
        Ok(StripeQueue {
            shared,
            members: Arc::new(Members { queues: queues.into_iter().collect(), threads, event }),
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
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

    use super::*;
    use crate::{Geometry, Region};

    /// Of each queue in the order in which they were opened: itself, and the queue whose thread it
    /// shares.
    type Opened = Arc<Mutex<Vec<(RawFd, RawFd)>>>;

    /// A device whose busy queues have a thread of the kernel of their own, or share one.
    struct Threaded(Geometry, Opened);

    /// A queue that has a thread.
    struct Sharing(File);

    impl BlockDevice for Threaded {
        fn name(&self) -> &str {
            "threaded"
        }

        fn geometry(&self) -> &Geometry {
            &self.0
        }

        fn open_queue(&self) -> Result<Box<dyn Queue>> {
            unreachable!("busy queues are opened")
        }

        fn open_busy_queue(&self, beside: Option<&dyn Queue>) -> Result<Box<dyn Queue>> {
            let own = File::open("/dev/null").expect("it is there");
            let shares = beside.and_then(|queue| queue.kernel_thread()).map_or(own.as_raw_fd(), |queue| queue.as_raw_fd());
            self.1.lock().push((own.as_raw_fd(), shares));
            Ok(Box::new(Sharing(own)))
        }

        fn map(&self, _: &Arc<Region>) -> Result<()> {
            Ok(())
        }

        fn unmap(&self, _: &Region) {}
    }

    impl Queue for Sharing {
        fn kernel_thread(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }

        fn submit(&self, _: &mut Vec<Request>) {}

        fn complete(&self, _: Wait, _: &mut Vec<Completion>) -> Result<usize> {
            Ok(0)
        }

        fn wake(&self) {}

        fn sleep_on(&self, _: Instant) -> Result<Option<BorrowedFd<'_>>> {
            Ok(None)
        }
    }

    fn members(count: usize, opened: &Opened) -> Vec<Arc<dyn BlockDevice>> {
        let geometry = || Geometry {
            len: crate::Length::new(1 << 20),
            logical_block: 512,
            memory_alignment: 4,
            max_transfer: 1 << 20,
            queue_depth: 16,
            max_queues: 16,
            volatile_cache: false,
            discard: false,
            write_zeroes: false,
            read_only: false,
        };
        (0..count).map(|_| Arc::new(Threaded(geometry(), opened.clone())) as Arc<dyn BlockDevice>).collect()
    }

    /// With whose queue each member's shares one of so many threads: of `first` members, and of
    /// `further` that come later.
    fn shared(first: usize, further: usize, threads: usize) -> Vec<usize> {
        let opened = Opened::default();
        let before = open_all(members(first, &opened).iter(), Some(threads), &[]).expect("they open");
        let known: Vec<&dyn Queue> = before.iter().map(|queue| &**queue).collect();
        let _later = open_all(members(further, &opened).iter(), Some(threads), &known).expect("they open");
        let opened = opened.lock();
        let number = |queue| opened.iter().position(|(own, _)| *own == queue).expect("it was opened");
        opened.iter().map(|(_, shares)| number(*shares)).collect()
    }

    #[test]
    fn queues_of_a_stripe_take_as_many_threads_of_the_kernel_as_there_are_processors_for() {
        let queues = |processors, count: usize| {
            let mut used = Vec::new();
            for _ in 0..count {
                let threads = Some(threads_of(processors, used.iter().sum()));
                let queues = open_all(members(8, &Opened::default()).iter(), threads, &[]).expect("they open");
                let event = Event::new().expect("an eventfd");
                used.push(Members { queues: queues.into_iter().collect(), threads, event }.threads());
            }
            used
        };
        assert_eq!(queues(8, 3), [1, 1, 1]);
        assert_eq!(queues(16, 4), [2, 2, 1, 1]);
        assert_eq!(queues(32, 5), [2, 2, 2, 2, 1]);
        assert_eq!(queues(128, 4), [2, 2, 2, 2]);
    }

    #[test]
    fn four_members_share_a_thread_of_the_kernel_and_more_where_there_are_no_more_threads() {
        assert_eq!(shared(8, 0, 1), [0; 8]);
        assert_eq!(shared(8, 0, 2), [0, 0, 0, 0, 4, 4, 4, 4]);
        assert_eq!(shared(12, 0, 2), [0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0]);
        assert_eq!(shared(9, 0, 8), [0, 0, 0, 0, 4, 4, 4, 4, 8]);
        for (first, further) in [(1, 8), (4, 5), (6, 3), (8, 1)] {
            assert_eq!(shared(first, further, 8), shared(9, 0, 8), "{further} members later");
        }
    }
}
