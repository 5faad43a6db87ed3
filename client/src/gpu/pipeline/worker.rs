//! The thread that serves all requests but those whose callers do it themselves (`desks`), and those in streams.
//!
//! It guards that whoever calls never waits for it: it sleeps when there is nothing to do, and whoever sends it a request wakes it.

use super::desks::Desks;
use super::engine::Engine;
use super::inbox::Inbox;
use super::lane::{BATCH, Lane};
use super::request::Request;
use crate::linger::Linger;
use gpunvme_cuda::Gpu;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

/// Entries of its ring, and pieces in flight: enough for any device, and few enough that a new request is not long behind the others.
pub(super) const PIECES: usize = BATCH;
/// How long it looks around before it sleeps: what being woken costs, on both sides.
const LINGER: Duration = Duration::from_micros(50);

/// What application threads tell it.
#[derive(Default)]
pub(super) struct Mail {
    /// GPUs that are used for the first time. They come before the requests that use them.
    pub lanes: Vec<(Gpu, Box<Lane>)>,
    pub requests: Vec<Request>,
    /// It is to end when everything is done, and these with it.
    pub end: Option<Desks>,
}

pub(super) struct Worker {
    engine: Engine,
    inbox: Arc<Inbox<Mail>>,
    ending: Option<Desks>,
    mail: Mail,
}

impl Worker {
    pub fn new(engine: Engine, inbox: Arc<Inbox<Mail>>) -> Worker {
        Worker { engine, inbox, ending: None, mail: Mail::default() }
    }

    /// The thread.
    pub fn run(mut self) {
        // After a panic nobody would answer the requests that are waited for, nor know what memory the daemon and the GPUs still use.
        if catch_unwind(AssertUnwindSafe(|| self.work())).is_err() {
            std::process::abort();
        }
    }

    fn work(&mut self) {
        let mut linger = Linger::new();
        let mut entered = None;
        loop {
            let mut busy = self.receive();
            if entered.is_none() {
                entered = self.engine.enter();
            }
            busy |= self.engine.turn(linger.now());
            if busy {
                linger.restart();
            } else if self.ending.is_some() && self.engine.is_idle() {
                return;
            } else if !linger.goes_on(LINGER) {
                if self.engine.arm() && self.inbox.fall_asleep() {
                    self.engine.wait(Some(&self.inbox.event));
                }
                self.inbox.wake_up();
                linger.look_at_clock();
            }
        }
    }

    /// Takes what came into the inbox.
    fn receive(&mut self) -> bool {
        if !self.inbox.take(&mut self.mail) {
            return false;
        }
        let Mail { lanes, requests, end } = &mut self.mail;
        for (gpu, lane) in lanes.drain(..) {
            self.engine.add_lane(gpu, lane);
        }
        for request in requests.drain(..) {
            self.engine.begin(request);
        }
        self.ending = self.ending.take().or(end.take());
        true
    }
}
