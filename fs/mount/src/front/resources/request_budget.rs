//! A budget for requests: bounds the memory for the bytes of requests that wait, or are on their
//! way between the device and the kernel. Many callers at once cost time and not memory.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// The memory for requests, and the part of it that is left.
pub(crate) struct RequestBudget {
    limit: usize,
    left: Mutex<usize>,
    freed: Condvar,
}

/// Memory of one request; dropping this gives it back.
pub(crate) struct RequestPermit {
    budget: Arc<RequestBudget>,
    bytes: usize,
}

impl RequestBudget {
    /// A budget of this many bytes.
    pub fn new(limit: usize) -> Arc<RequestBudget> {
        Arc::new(RequestBudget { limit, left: Mutex::new(limit), freed: Condvar::new() })
    }

    /// Takes memory for a request, or the whole budget for a larger one; waits for it. For the
    /// loops of the transport, which take no other request meanwhile: a request that has memory
    /// waits for the device, and for nothing that a loop would have to do.
    pub fn take(self: &Arc<Self>, bytes: usize) -> RequestPermit {
        let bytes = bytes.min(self.limit);
        let mut left = self.left.lock();
        self.freed.wait_while(&mut left, |left| *left < bytes);
        *left -= bytes;
        RequestPermit { budget: self.clone(), bytes }
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        *self.budget.left.lock() += self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_finds_too_little_waits_until_enough_is_given_back() {
        let budget = RequestBudget::new(10);
        let (first, second) = (budget.take(4), budget.take(6));
        let (sender, receiver) = mpsc::channel();
        let waiter = std::thread::spawn({
            let budget = budget.clone();
            move || {
                let taken = budget.take(1000);
                sender.send(taken.bytes).unwrap();
            }
        });
        drop(first);
        receiver.recv_timeout(Duration::from_millis(50)).expect_err("it is larger than what was given back");
        drop(second);
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)).unwrap(), 10);
        waiter.join().unwrap();
        assert_eq!(*budget.left.lock(), 10);
    }
}
