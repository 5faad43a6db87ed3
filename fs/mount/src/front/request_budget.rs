//! Memory for the bytes of requests that wait, or are on their way between the device and the kernel. It is bounded: many callers
//! at once cost time and not memory.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

/// What is left of the memory.
pub(super) struct Room {
    limit: usize,
    left: Mutex<usize>,
    freed: Condvar,
}

/// Memory that a request has; given back when it is dropped.
pub(super) struct Taken {
    room: Arc<Room>,
    bytes: usize,
}

impl Room {
    /// Room for this many bytes.
    pub fn new(limit: usize) -> Arc<Room> {
        Arc::new(Room { limit, left: Mutex::new(limit), freed: Condvar::new() })
    }

    /// Takes memory for a request, or all there is for one that is larger; waits for it. For the loops of the transport, which take
    /// no other request meanwhile: who has memory waits for the device, and for nothing that a loop would have to do.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Taken {
        let bytes = bytes.min(self.limit);
        let mut left = self.left.lock();
        self.freed.wait_while(&mut left, |left| *left < bytes);
        *left -= bytes;
        Taken { room: self.clone(), bytes }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.room.left.lock() += self.bytes;
        self.room.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_finds_no_room_waits_until_enough_is_given_back() {
        let room = Room::new(10);
        let (first, second) = (room.take(4), room.take(6));
        let (sender, receiver) = mpsc::channel();
        let waiter = std::thread::spawn({
            let room = room.clone();
            move || {
                let taken = room.take(1000);
                sender.send(taken.bytes).unwrap();
            }
        });
        drop(first);
        receiver.recv_timeout(Duration::from_millis(50)).expect_err("it is larger than what was given back");
        drop(second);
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)).unwrap(), 10);
        waiter.join().unwrap();
        assert_eq!(*room.left.lock(), 10);
    }
}
