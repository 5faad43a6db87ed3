//! Watches the applications that have rings: their signals, and their end. One thread watches for
//! all rings: a thread that serves rings sleeps where only the device and
//! [`gpunvme_blockdev::Waker`] wake it.

use super::queue_pair::Ring;
use rustix::event::{EventfdFlags, epoll};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};

/// The end of the watch, as an event's data.
const END: u64 = u64::MAX;
/// An application's signal to the serving thread of number 0; the others follow. Names of rings
/// are smaller.
const SUBMITTED: u64 = 1 << 63;

/// The descriptors that are watched.
pub(super) struct Watch {
    epoll: OwnedFd,
    end: OwnedFd,
}

/// An event of an application that is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    /// An application signalled a ring of the serving thread of this number. Which ring does not
    /// matter: it looks at all of its rings.
    Submitted(usize),
    /// The owner of the ring of this name ended.
    Ended(u64),
}

impl Watch {
    pub fn new() -> Result<Watch, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let end = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &end, epoll::EventData::new_u64(END), epoll::EventFlags::IN)?;
        Ok(Watch { epoll, end })
    }

    /// Watches the owner of a ring that the serving thread of this number serves.
    pub fn add(&self, ring: &Ring, service: usize) -> Result<(), Errno> {
        debug_assert!(ring.id < SUBMITTED, "the name of a ring is no event's");
        // Edges only: no thread reads the counter, and each signal is a new edge.
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let signal = epoll::EventData::new_u64(SUBMITTED + service as u64);
        epoll::add(&self.epoll, &*ring.submitted, signal, edge)?;
        epoll::add(&self.epoll, &ring.owner, epoll::EventData::new_u64(ring.id), epoll::EventFlags::IN)
            .inspect_err(|_| self.forget(&*ring.submitted))
    }

    /// No longer watches the owner of a ring.
    pub fn remove(&self, ring: &Ring) {
        self.forget(&*ring.submitted);
        self.forget(&ring.owner);
    }

    fn forget(&self, what: impl AsFd) {
        if let Err(errno) = epoll::delete(&self.epoll, what) {
            tracing::warn!(%errno, "cannot end the watch over a ring");
        }
    }

    /// Ends [`Watch::listen`].
    pub fn end(&self) {
        let _ = rustix::io::write(&self.end, &1u64.to_ne_bytes()); // a counter that is full has been signalled
    }

    /// Calls `heard` with all that is heard, until [`Watch::end`].
    pub fn listen(&self, mut heard: impl FnMut(Heard)) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::error!(%errno, "rings are not heard any more until the next mount");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    END => return,
                    signal @ SUBMITTED.. => heard(Heard::Submitted((signal - SUBMITTED) as usize)),
                    id => heard(Heard::Ended(id)),
                }
            }
        }
    }
}
