//! Shares of the device: bounds what each user may have in flight by ioctl.
//!
//! It guards the time of others: a device serves transfers in the order in which they came, so a
//! process with a thousand threads would make all others wait for a thousand long transfers. Users
//! have equal shares of what is in flight. A user whose share is in flight waits, and the processes
//! of that user take turns. A user who has nothing in flight never waits.
//!
//! Rings have limits of their own (`gpunvme_gpupath::ring`).

use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::front::resources::turns::{Owner, Turns};
use crate::front::resources::workers::Workers;

/// Bytes in flight of one user alone; several have an equal part of it each. The longest part of a
/// transfer is half of it, so that the device has something to do while the next part is planned.
const ALL: u64 = 32 << 20;
/// A transfer of at most so many bytes begins at once, as a read(2) of as many bytes does: a thread
/// has one of them at a time.
const SHORT: u64 = 64 << 10;

type Begin = Box<dyn FnOnce(InFlight) + Send>;

/// The shares of a device.
pub(crate) struct DeviceShares {
    /// Threads that begin transfers which have waited.
    workers: Arc<Workers>,
    users: Mutex<FxHashMap<u32, User>>,
}

/// A user who has something in flight, or waiting.
#[derive(Default)]
struct User {
    in_flight: u64,
    waiting: Turns<Waiting>,
}

struct Waiting {
    owner: Owner,
    bytes: u64,
    begin: Begin,
}

/// A part of a transfer in flight; dropping this ends it.
pub(crate) struct InFlight(Option<Charge>);

struct Charge {
    shares: Arc<DeviceShares>,
    user: u32,
    bytes: u64,
}

impl DeviceShares {
    /// Shares of a device with nothing in flight.
    pub fn new(workers: Arc<Workers>) -> Arc<DeviceShares> {
        Arc::new(DeviceShares { workers, users: Mutex::default() })
    }

    /// Begins a part of `bytes` of a transfer: here and at once if its user's share allows, else on
    /// another thread once it does. `process` is called only for a part that has to wait.
    pub fn begin<T: Send + 'static>(
        self: &Arc<Self>,
        user: u32,
        bytes: u64,
        transfer: T,
        process: impl FnOnce(&T) -> u32,
        begin: impl FnOnce(T, InFlight) + Send + 'static,
    ) {
        if bytes <= SHORT {
            return begin(transfer, InFlight(None));
        }
        if self.take(user, bytes) {
            return begin(transfer, self.in_flight(user, bytes));
        }
        let owner = Owner { user, process: process(&transfer) };
        let waiting = Waiting { owner, bytes, begin: Box::new(|in_flight| begin(transfer, in_flight)) };
        self.users.lock().entry(user).or_default().waiting.push(owner, waiting);
        // Room may have become free in between.
        self.end(user, 0);
    }

    /// Counts a part as in flight, if its user may have one more and no part of that user waits.
    fn take(&self, user: u32, bytes: u64) -> bool {
        let mut users = self.users.lock();
        let others = users.len() - usize::from(users.contains_key(&user));
        let of = users.entry(user).or_default();
        let may = of.waiting.is_empty() && of.in_flight < share(others + 1);
        if may {
            of.in_flight += bytes;
        }
        may
    }

    fn in_flight(self: &Arc<Self>, user: u32, bytes: u64) -> InFlight {
        InFlight(Some(Charge { shares: self.clone(), user, bytes }))
    }

    /// Ends a part of `bytes` of a user, and begins the waiting parts that may begin now.
    fn end(self: &Arc<Self>, user: u32, bytes: u64) {
        let mut ready = Vec::new();
        {
            let mut users = self.users.lock();
            users.entry(user).or_default().in_flight -= bytes;
            users.retain(|_, user| user.in_flight > 0 || !user.waiting.is_empty());
            let share = share(users.len());
            for user in users.values_mut() {
                while user.in_flight < share
                    && let Some(waiting) = user.waiting.pop()
                {
                    user.in_flight += waiting.bytes;
                    ready.push(waiting);
                }
            }
        }
        for Waiting { owner, bytes, begin } in ready {
            let in_flight = self.in_flight(owner.user, bytes);
            self.workers.run_for(owner, move || begin(in_flight));
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(Charge { shares, user, bytes }) = self.0.take() {
            shares.end(user, bytes);
        }
    }
}

/// Bytes that each of so many users may have in flight.
fn share(users: usize) -> u64 {
    (ALL / users.max(1) as u64).max(1)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    const PART: u64 = ALL / 2;

    /// Begins so many parts of a process; what began comes out.
    fn begin(shares: &Arc<DeviceShares>, owner: Owner, count: usize) -> Receiver<(u32, InFlight)> {
        let (sender, receiver) = channel();
        for _ in 0..count {
            let sender = sender.clone();
            shares.begin(
                owner.user,
                PART,
                owner.process,
                |process| *process,
                move |process, in_flight| {
                    let _ = sender.send((process, in_flight)); // the test may be over
                },
            );
        }
        receiver
    }

    fn next(receiver: &Receiver<(u32, InFlight)>) -> (u32, InFlight) {
        receiver.recv_timeout(Duration::from_secs(10)).expect("something begins")
    }

    #[test]
    fn a_user_who_asks_for_more_than_there_is_waits_and_others_do_not() {
        let shares = DeviceShares::new(Workers::new("test", 1).unwrap());
        let greedy = begin(&shares, Owner { user: 1, process: 1 }, 50);
        let mut held: Vec<_> = [next(&greedy), next(&greedy)].into();
        assert!(greedy.try_recv().is_err(), "two parts are all of it");
        // At once, and on this thread.
        let modest = begin(&shares, Owner { user: 2, process: 2 }, 3);
        let theirs = modest.try_recv().expect("a share");
        assert!(modest.try_recv().is_err(), "a half is one part");
        // With another user there the first has half of it: one has to end before the next begins,
        // and then another.
        held.pop();
        assert!(greedy.recv_timeout(Duration::from_millis(100)).is_err());
        held.pop();
        held.push(next(&greedy));
        drop(theirs);
        drop(next(&modest));
        drop(next(&modest));
        // Alone again.
        held.push(next(&greedy));
        assert!(greedy.try_recv().is_err());
        drop(held);
        (0..46).for_each(|_| drop(next(&greedy)));
        assert!(shares.users.lock().is_empty());
    }

    #[test]
    fn processes_of_a_user_take_turns_and_what_is_short_waits_for_nothing() {
        let shares = DeviceShares::new(Workers::new("test", 1).unwrap());
        let (sender, order) = channel();
        for process in [1, 1, 1, 1, 1, 2] {
            let sender = sender.clone();
            shares.begin(7, PART, process, |process| *process, move |process, in_flight| drop(sender.send((process, in_flight))));
        }
        let (sender, short) = channel();
        shares.begin(7, SHORT, (), |()| unreachable!("it does not wait"), move |(), _| sender.send(()).unwrap());
        assert_eq!(short.try_recv(), Ok(()));
        let first = [next(&order), next(&order)];
        drop(first);
        let then: Vec<u32> = (0..4).map(|_| next(&order).0).collect();
        assert_eq!(then, [1, 2, 1, 1]);
    }
}
