//! A queue on a file or block device: an io_uring with direct I/O (io_uring(7)).
//!
//! It guards what the kernel cannot know: memory named by a command stays alive until the
//! command's completion was seen, also when the queue is dropped; a request is over when its last
//! command is; and commands that the kernel cut short or gave back because the thread that
//! submitted them had ended are continued, unseen by the caller.
//!
//! Locks: `reaper` before `state`. The first is held by the one thread that collects completions,
//! also while it waits; the second for moments only, never across a system call.
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use parking_lot::Mutex;
use slab::Slab;
use smallvec::SmallVec;

use super::command::{Command, Iovecs, cut};
use super::target::Target;
use crate::{Completion, Error, Op, Queue, Request, Result, Wait};

type Builder = io_uring::Builder<squeue::Entry, cqueue::Entry>;

/// How long a kernel thread looks for commands where there are none, in milliseconds: the least
/// that there is. The kernel makes it one or two of its ticks.
const KERNEL_THREAD_SPINS: u32 = 1;
/// Marks the completion of [`Queue::wake`]'s command; commands are numbered from 0.
const WAKE: u64 = u64::MAX;
/// Who gives commands to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submission {
    /// The thread that submits, by a system call.
    BySystemCall,
    /// A thread of the kernel, which looks for them as long as there are any
    /// (`IORING_SETUP_SQPOLL`).
    ByKernelThread {
        /// The ring that has this thread already, if it is to be shared (`IORING_SETUP_ATTACH_WQ`).
        of: Option<RawFd>,
    },
}

pub(crate) struct UringQueue {
    target: Arc<Target>,
    ring: IoUring,
    state: Mutex<QueueState>,
    /// Results taken off the ring, in a vector that keeps its memory.
    reaper: Mutex<Vec<(u64, i32)>>,
    /// Whether a wake command is in flight.
    waking: AtomicBool,
}

#[derive(Default)]
struct QueueState {
    requests: Slab<PendingRequest>,
    /// Commands of the requests: on the ring, or in `waiting`.
    commands: Slab<Command>,
    /// Commands that found no room in the queue's depth, or that are to be submitted again.
    waiting: VecDeque<usize>,
    /// Requests that are over, not yet collected.
    finished: Vec<Completion>,
}

struct PendingRequest {
    request: Request,
    /// Commands not completed yet.
    commands: usize,
    error: Option<Error>,
}

impl UringQueue {
    pub(crate) fn new(target: Arc<Target>, submission: Submission) -> Result<Self> {
        let depth = target.geometry.queue_depth;
        // Room for the whole depth and a wake command, on either side: neither can overflow.
        // Twice, because a kernel thread says that it has taken commands only when it has begun
        // all that it found, and some are over by then.
        let build = |set_up: &dyn Fn(&mut Builder)| {
            let mut builder = IoUring::builder();
            builder.dontfork();
            set_up(&mut builder);
            builder.build(2 * (depth + 1))
        };
        // A completion is not worth an interrupt of the thread that submitted: it looks at its
        // next system call. Before Linux 5.19 the kernel interrupts.
        let by_system_call =
            || build(&|builder| _ = builder.setup_coop_taskrun().setup_taskrun_flag()).or_else(|_| build(&|_| {}));
        let ring = match submission {
            Submission::BySystemCall => by_system_call(),
            // Not every user may have such a thread.
            Submission::ByKernelThread { of } => {
                let share = |builder: &mut Builder| _ = of.map(|ring| builder.setup_attach_wq(ring));
                build(&|builder| share(builder.setup_sqpoll(KERNEL_THREAD_SPINS))).or_else(|_| by_system_call())
            }
        }
        .map_err(|error| {
            let device = target.name.clone();
            match error.raw_os_error() {
                Some(libc::EPERM | libc::ENOSYS) => Error::Unsupported {
                    device,
                    reason: "io_uring is switched off here; set the sysctl kernel.io_uring_disabled to 0, or allow it in the \
                             container's seccomp profile"
                        .into(),
                },
                errno => Error::System { device, action: "setting up an io_uring", errno: errno.unwrap_or(libc::EIO) },
            }
        })?;
        if !ring.params().is_feature_ext_arg() {
            return Err(Error::Unsupported { device: target.name.clone(), reason: "needs Linux 5.11 or newer".into() });
        }
        // Looked up once, here, and not for each command.
        ring.submitter().register_files(&[target.file.as_raw_fd()]).map_err(|error| Error::System {
            device: target.name.clone(),
            action: "registering a file with its io_uring",
            errno: error.raw_os_error().unwrap_or(libc::EIO),
        })?;
        Ok(Self { target, ring, state: Mutex::default(), reaper: Mutex::default(), waking: AtomicBool::new(false) })
    }

    /// Moves waiting commands to the ring as far as the depth allows; says how many.
    /// [`Self::enter`] has to follow.
    fn push_waiting(&self, state: &mut QueueState) -> usize {
        let depth = self.target.geometry.queue_depth as usize;
        let mut pushed = 0;
        if state.waiting.is_empty() {
            return 0;
        }
        // SAFETY: the submission side is touched with `state` locked only, and there is no other
        // such queue object: both places that make one drop it before they unlock.
        let mut submissions = unsafe { self.ring.submission_shared() };
        while state.commands.len() - state.waiting.len() < depth {
            let Some(key) = state.waiting.front().copied() else { break };
            let command = &state.commands[key];
            let entry = command.entry(state.requests[command.request].request.op, self.target.kind).user_data(key as u64);
            // SAFETY: the file is kept open by `target`, the memory by the request in `requests`
            // and the list of iovecs by the command; neither is dropped before the command's
            // completion was seen, and a list of several is not moved by moving its vector (of a
            // single one the command has a copy).
            unsafe { submissions.push(&entry) }.expect("the ring has room for the depth");
            state.waiting.pop_front();
            pushed += 1;
        }
        pushed
    }

    /// Tells the kernel of `pushed` commands. Whatever cannot be told now, [`Queue::complete`]
    /// tells.
    fn enter(&self, mut pushed: usize) {
        while pushed > 0 {
            match self.ring.submitter().submit() {
                // Another thread took ours along.
                Ok(0) => return,
                // Fewer than pushed: one was refused at once (its completion says so), and the
                // rest waits.
                Ok(taken) => pushed = pushed.saturating_sub(taken),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // No memory for the commands at the moment; a waiting reaper would not notice
                    // that they are left.
                    Some(libc::EAGAIN | libc::EBUSY) => std::thread::yield_now(),
                    // The reaper gets the same error, and can return it.
                    _ => return,
                },
            }
        }
    }

    /// Takes what is on the completion ring. Says whether a wake was among it.
    fn collect(&self, results: &mut Vec<(u64, i32)>, out: &mut Vec<Completion>) -> bool {
        // SAFETY: the completion side is touched with `reaper` locked only (`results` is its
        // content), and there is no other such queue object: this is the only place that makes
        // one.
        let completions = unsafe { self.ring.completion_shared() };
        results.extend(completions.map(|entry| (entry.user_data(), entry.result())));
        let mut woken = false;
        let mut state = self.state.lock();
        for (key, result) in results.drain(..) {
            if key == WAKE {
                // What the waker did before is seen after this, and a wake from here on sends a
                // new command.
                self.waking.swap(false, Ordering::AcqRel);
                woken = true;
            } else {
                self.completed(&mut state, key as usize, result);
            }
        }
        let pushed = self.push_waiting(&mut state);
        out.append(&mut state.finished);
        drop(state);
        self.enter(pushed);
        woken
    }

    /// Accounts for the end of a command.
    fn completed(&self, state: &mut QueueState, key: usize, result: i32) {
        let command = &mut state.commands[key];
        let pending = &mut state.requests[command.request];
        let failed = match result {
            done @ 0.. if matches!(pending.request.op, Op::Read | Op::Write { .. }) => {
                // Cut short somewhere inside a block: that block is done again.
                let done = done as u64 - done as u64 % u64::from(self.target.geometry.logical_block);
                command.advance(done);
                if command.len > 0 && done > 0 {
                    state.waiting.push_back(key);
                    return;
                }
                // Nothing at all: the file ends here, although it did not when it was opened.
                (command.len > 0).then_some(libc::EIO)
            }
            0.. => None,
            error => match -error {
                // Given back: a signal, no memory, or the thread that had submitted it ended
                // before it was started. (The last may also say EFAULT, which is final only when
                // it comes again.) From here it is submitted by a thread that is alive.
                libc::EINTR | libc::EAGAIN | libc::ECANCELED => {
                    state.waiting.push_back(key);
                    return;
                }
                libc::EFAULT if !command.faulted => {
                    command.faulted = true;
                    state.waiting.push_back(key);
                    return;
                }
                // A hint that a device need not heed, and some stop heeding while in use: the
                // kernel withdraws the command once it has failed below.
                libc::EOPNOTSUPP if pending.request.op == Op::Discard => None,
                errno => Some(errno),
            },
        };
        if let Some(errno) = failed {
            let error = self.error(&pending.request, errno);
            pending.error.get_or_insert(error);
        }
        pending.commands -= 1;
        let request = command.request;
        state.commands.remove(key);
        if pending.commands == 0 {
            let pending = state.requests.remove(request);
            let result = pending.error.map_or(Ok(()), Err);
            state.finished.push(Completion { tag: pending.request.tag, result });
        }
    }

    fn error(&self, request: &Request, errno: i32) -> Error {
        let device = self.target.name.clone();
        match errno {
            libc::ENODEV | libc::ENXIO | libc::ENOMEDIUM => Error::Gone { device },
            _ => Error::Io { device, op: request.op, offset: request.offset, len: request.len, errno },
        }
    }

    /// Whether completions wait for a system call of a thread that looks at none.
    fn has_task_work(&self) -> bool {
        let _state = self.state.lock();
        // SAFETY: as in `push_waiting`.
        unsafe { self.ring.submission_shared() }.taskrun()
    }

    /// Waits for a completion, and submits what [`Self::enter`] left.
    fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let submitter = self.ring.submitter();
        let waited = match timeout {
            None => submitter.submit_and_wait(1),
            Some(timeout) => {
                let timeout = Timespec::from(timeout);
                submitter.submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
            }
        };
        self.told(waited)
    }

    /// Judges a call that tells the kernel of commands, or waits for them.
    fn told(&self, told: std::io::Result<usize>) -> Result<()> {
        match told.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)) {
            Ok(_) | Err(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
            Err(errno) => Err(Error::System { device: self.target.name.clone(), action: "waiting on its io_uring", errno }),
        }
    }
}

impl Queue for UringQueue {
    fn kernel_thread(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the ring keeps its descriptor open for as long as it lives.
        let ring = unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
        self.ring.params().is_setup_sqpoll().then_some(ring)
    }

    fn submit(&self, requests: &mut Vec<Request>) {
        let mut state = self.state.lock();
        for request in requests.drain(..) {
            state.accept(request, &self.target);
        }
        let pushed = self.push_waiting(&mut state);
        let finished = !state.finished.is_empty();
        drop(state);
        self.enter(pushed);
        if finished {
            self.wake();
        }
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let before = out.len();
        let mut results = self.reaper.lock();
        let deadline = match wait {
            Wait::Timeout(timeout) => Instant::now().checked_add(timeout),
            Wait::No | Wait::Forever => None,
        };
        loop {
            let woken = self.collect(&mut results, out);
            if out.len() == before && wait == Wait::No && self.has_task_work() {
                // What this fails with, a wait meets as well.
                let _ = self.ring.submitter().submit();
                self.collect(&mut results, out);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if out.len() > before || woken || wait == Wait::No || left == Some(Duration::ZERO) {
                return Ok(out.len() - before);
            }
            self.wait(left)?;
        }
    }

    /// An io_uring hands a flush to a thread of the kernel, which would wait for it instead.
    fn flush_here(&self) -> Option<Result<()>> {
        let flushed = rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&self.target.file));
        Some(flushed.map_err(|errno| self.error(&Request::flush(), errno.raw_os_error())))
    }

    fn wake(&self) {
        if self.waking.swap(true, Ordering::AcqRel) {
            return;
        }
        let entry = opcode::Nop::new().build().user_data(WAKE);
        let state = self.state.lock();
        // SAFETY: as in `push_waiting`; the command names no memory.
        unsafe { self.ring.submission_shared().push(&entry) }.expect("the ring has room for one wake command");
        drop(state);
        self.enter(1);
    }

    fn sleep_on(&self, _since: Instant) -> Result<Option<BorrowedFd<'_>>> {
        // A wait by the ring's own call tells the kernel of what `enter` left; a sleep on its
        // descriptor does not.
        let is_left = {
            let _state = self.state.lock();
            // SAFETY: as in `push_waiting`.
            !unsafe { self.ring.submission_shared() }.is_empty()
        };
        if is_left {
            self.told(self.ring.submitter().submit())?;
        }
        // SAFETY: the ring keeps its descriptor open for as long as it lives.
        Ok(Some(unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }))
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        let mut results = std::mem::take(&mut *self.reaper.lock());
        let mut ignored = Vec::new();
        loop {
            {
                let mut state = self.state.lock();
                while let Some(key) = state.waiting.pop_front() {
                    state.commands.remove(key);
                }
                if state.commands.is_empty() {
                    break;
                }
            }
            if let Err(error) = self.wait(None) {
                tracing::error!(%error, "commands may still be running; their memory is kept until the process ends");
                std::mem::forget(std::mem::take(&mut *self.state.lock()));
                return;
            }
            self.collect(&mut results, &mut ignored);
        }
        // Now, because the kernel would let go of the device only some time after this: an error
        // means that it does.
        let _ = self.ring.submitter().unregister_files();
    }
}

impl QueueState {
    /// Takes a request in: refuses it, or cuts it into commands.
    fn accept(&mut self, request: Request, target: &Target) {
        let geometry = &target.geometry;
        let checked = request.check(&target.name, geometry);
        if checked.is_err() || request.len == 0 && request.op != Op::Flush {
            let tag = request.tag;
            drop(request);
            self.finished.push(Completion { tag, result: checked });
            return;
        }
        let entry = self.requests.vacant_entry();
        let mut commands = 0;
        let mut add = |offset, len, memory| {
            let command = Command { request: entry.key(), offset, len, memory: Iovecs(memory), faulted: false };
            self.waiting.push_back(self.commands.insert(command));
            commands += 1;
        };
        if request.spans.is_empty() {
            add(request.offset, request.len, SmallVec::new());
        } else {
            let mut offset = request.offset;
            for (len, memory) in cut(&request.spans, geometry.max_transfer as usize) {
                add(offset, len as u64, memory);
                offset += len as u64;
            }
        }
        entry.insert(PendingRequest { request, commands, error: None });
    }
}

#[cfg(test)]
mod tests {
    //! What the kernel does too rarely to wait for it: short and refused commands. Their
    //! completions are made up here; what follows from them runs on a real ring.
    use super::*;
    use crate::file::{Claim, FileDevice};
    use crate::{OpenMode, Region, Span};

    const LEN: usize = 64 << 10;

    /// Runs a read whose command the kernel is said to have answered with each of `results` before
    /// it really runs. Gives the bytes read and the result; the file is all ones, the memory was
    /// zero.
    fn read_after(results: &[i32]) -> (Vec<u8>, Result<()>) {
        let answers = [Submission::BySystemCall, Submission::ByKernelThread { of: None }]
            .map(|submission| read_after_by(submission, results));
        let [by_system_call, by_kernel_thread] = answers;
        let comparable = |(bytes, result): &(Vec<u8>, Result<()>)| (bytes.clone(), result.clone().map_err(|error| error.errno()));
        assert!(comparable(&by_system_call) == comparable(&by_kernel_thread), "who submits makes no difference");
        by_system_call
    }

    fn read_after_by(submission: Submission, results: &[i32]) -> (Vec<u8>, Result<()>) {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a temporary directory");
        let path = directory.path().join("image");
        std::fs::write(&path, vec![1; LEN]).expect("an image");
        let device = FileDevice::open(path.to_str().expect("an UTF-8 path"), OpenMode::ReadOnly, Claim::Ours).expect("it opens");
        let queue = device.queue(submission).expect("a queue");
        assert_eq!(queue.target.geometry.len.get(), LEN as u64);
        let region = Region::allocate(LEN).expect("memory");
        // Spans of 4 KiB in reverse order, so that none can be merged.
        let spans: Vec<Span> = (0..LEN / 4096).rev().map(|n| region.span(n * 4096..(n + 1) * 4096)).collect();
        {
            let mut state = queue.state.lock();
            state.accept(Request::read(0, spans), &queue.target);
            for result in results {
                let key = state.waiting.pop_front().expect("it is tried again");
                queue.completed(&mut state, key, *result);
            }
        }
        let mut out = Vec::new();
        while out.is_empty() {
            queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut out).expect("the queue works");
        }
        let mut bytes = vec![0; LEN];
        region.read_at(0, &mut bytes).expect("inside");
        (bytes, out.remove(0).result)
    }

    fn count(bytes: &[u8]) -> usize {
        bytes.iter().filter(|byte| **byte == 1).count()
    }

    #[test]
    fn queues_beside_one_another_share_a_thread_of_the_kernel() {
        let directory = tempfile::tempdir_in("/dev/shm").expect("a temporary directory");
        let devices: Vec<FileDevice> = (0u8..4)
            .map(|number| {
                let path = directory.path().join(number.to_string());
                std::fs::write(&path, vec![number; LEN]).expect("an image");
                FileDevice::open(path.to_str().expect("an UTF-8 path"), OpenMode::ReadOnly, Claim::Ours).expect("it opens")
            })
            .collect();
        let mut queues: Vec<UringQueue> = Vec::new();
        for device in &devices {
            let of = queues.first().and_then(|queue| queue.kernel_thread()).map(|ring| ring.as_raw_fd());
            queues.push(device.queue(Submission::ByKernelThread { of }).expect("a queue"));
        }
        let ids: std::collections::HashSet<_> = queues.iter().map(thread_of).collect();
        assert_eq!(ids.len(), 1, "{ids:?}");
        // The first one's end leaves the thread to the others.
        drop(queues.remove(0));
        for (queue, number) in queues.iter().zip(1u8..) {
            let region = Region::allocate(LEN).expect("memory");
            queue.submit(&mut vec![Request::read(0, [region.span(0..LEN)])]);
            let mut out = Vec::new();
            while out.is_empty() {
                queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut out).expect("the queue works");
            }
            let mut bytes = vec![0; LEN];
            region.read_at(0, &mut bytes).expect("inside");
            assert!(out[0].result.is_ok() && bytes == vec![number; LEN]);
        }
    }

    /// The thread that submits for a queue, by its number (io_uring's fdinfo).
    fn thread_of(queue: &UringQueue) -> String {
        let fdinfo = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", queue.ring.as_raw_fd())).expect("fdinfo");
        fdinfo.lines().find_map(|line| line.strip_prefix("SqThread:")).expect("a thread of the kernel").trim().to_owned()
    }

    #[test]
    fn a_short_command_is_continued_where_it_ended() {
        let (bytes, result) = read_after(&[4096 + 512, 512]);
        assert_eq!((count(&bytes), result), (LEN - 4096 - 1024, Ok(())));
        // The file's start went to the memory's end.
        assert!(bytes[LEN - 4096..] == [0; 4096] && bytes[LEN - 8192..][..1024] == [0; 1024] && bytes[LEN - 8192 + 1024] == 1);
        let (bytes, result) = read_after(&[1000]);
        assert_eq!((count(&bytes), result), (LEN - 512, Ok(())), "a block done in part is done again");
    }

    #[test]
    fn a_command_that_was_given_back_is_submitted_again() {
        let (bytes, result) = read_after(&[-libc::ECANCELED, -libc::EINTR, -libc::EAGAIN, -libc::EFAULT, -libc::ECANCELED]);
        assert_eq!((count(&bytes), result), (LEN, Ok(())));
    }

    #[test]
    fn a_command_that_failed_tells_why() {
        for (answer, errno) in [(-libc::EIO, libc::EIO), (0, libc::EIO), (100, libc::EIO), (-libc::ENODEV, libc::ENODEV)] {
            let (_, result) = read_after(&[answer]);
            assert_eq!(result.map_err(|error| error.errno()), Err(errno));
        }
        let (_, result) = read_after(&[-libc::EFAULT, -libc::EFAULT]);
        assert_eq!(result.map_err(|error| error.errno()), Err(libc::EFAULT));
    }
}
