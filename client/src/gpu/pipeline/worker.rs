//! The thread that serves all requests but those whose callers do it themselves
//! ([`super::inline`]), and those in streams.
//!
//! It guards that an application's thread never waits for it: it sleeps when there is nothing to
//! do, and a request wakes it.

use super::copy_stream::{BATCH, CopyStream};
use super::executor::Executor;
use super::inline::InlineExecutors;
use super::mailbox::Mailbox;
use crate::gpu::request::Request;
use crate::spin::Spin;
use gpunvme_cuda::Gpu;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Entries of its ring, and pieces in flight: enough for any device, and few enough that a new
/// request is not long behind the others.
pub const PIECES: usize = BATCH;
/// How long the thread looks for work before it sleeps: what being woken costs, on both sides.
const SPIN_LIMIT: Duration = Duration::from_micros(50);

/// What application threads tell it.
#[derive(Default)]
pub struct Mail {
    /// GPUs that are used for the first time. They come before the requests that use them.
    pub copy_streams: Vec<(Gpu, Box<CopyStream>)>,
    pub requests: Vec<Request>,
    /// It is to end when everything is done, and these with it.
    pub end: Option<InlineExecutors>,
}

pub struct Worker {
    executor: Executor,
    mailbox: Arc<Mailbox<Mail>>,
    ending: Option<InlineExecutors>,
    mail: Mail,
}

impl Worker {
    pub fn new(executor: Executor, mailbox: Arc<Mailbox<Mail>>) -> Worker {
        Worker { executor, mailbox, ending: None, mail: Mail::default() }
    }

    /// Runs the thread until it has been told to end and all requests are answered.
    pub fn run(mut self) {
        // After a panic no thread would answer the requests that callers wait for, and it would be
        // unknown which memory the daemon and the GPUs still use.
        if catch_unwind(AssertUnwindSafe(|| self.work())).is_err() {
            std::process::abort();
        }
    }

    fn work(&mut self) {
        let mut spin = Spin::new();
        let mut entered = None;
        loop {
            let mut busy = self.receive();
            if entered.is_none() {
                entered = self.executor.enter();
            }
            busy |= self.executor.turn(spin.now());
            if busy {
                spin.restart();
            } else if self.ending.is_some() && self.executor.is_idle() {
                return;
            } else if !spin.goes_on(SPIN_LIMIT) {
                if self.executor.arm() && self.mailbox.fall_asleep() {
                    self.executor.wait(Some(&self.mailbox.event));
                }
                self.mailbox.wake_up();
                spin.look_at_clock();
            }
        }
    }

    /// Takes what came into the mailbox.
    fn receive(&mut self) -> bool {
        if !self.mailbox.take(&mut self.mail) {
            return false;
        }
        let Mail { copy_streams, requests, end } = &mut self.mail;
        for (gpu, copy_stream) in copy_streams.drain(..) {
            self.executor.add_copy_stream(gpu, copy_stream);
        }
        for request in requests.drain(..) {
            self.executor.begin(request);
        }
        self.ending = self.ending.take().or(end.take());
        true
    }
}
