//! A submission and completion queue pair in memory (Base 3.3.1), for admin and I/O commands
//! alike. It guards the order in which the two sides see each other's writes: an entry before the
//! doorbell, the phase tag before the entry.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::dma::{Dma, DmaMemory};
use crate::Result;
use crate::spec::{Cqe, Sqe, reg};
use crate::transport::Transport;
use crate::transport::barrier;

const SQE: usize = size_of::<Sqe>();
const CQE: usize = size_of::<Cqe>();
/// Where a completion's last four bytes are: command identifier, phase tag and status.
const CQE_STATUS: usize = 12;
const PHASE: u32 = 1 << 16;

/// Shadow doorbells (Base 8.1 "Doorbell Buffer Config"): the controller reads new values from
/// memory, and says in the second buffer from which value on it wants to be told by the register
/// as well.
pub(super) struct Shadow {
    pub(super) values: DmaMemory,
    pub(super) event_indexes: DmaMemory,
}

/// A queue pair. Its owner bounds the commands in flight to less than the entries, so that neither
/// ring can overflow.
pub(super) struct QueuePair {
    transport: Arc<dyn Transport>,
    id: u16,
    entries: u32,
    sq: DmaMemory,
    /// Shared with who looks for completions without the queue's lock.
    cq: Arc<DmaMemory>,
    /// Bytes between doorbells.
    stride: usize,
    shadow: Option<Arc<Shadow>>,
    sq_tail: u32,
    /// The tail that the controller knows of.
    sq_told: u32,
    cq_head: u32,
    /// The head that the controller knows of.
    cq_told: u32,
    /// What the phase tag of the next new entry is.
    phase: bool,
}

/// Where the next completion will be: enough to see whether it is there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Position(u32);

impl Position {
    pub(super) fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    pub(super) fn bits(self) -> u32 {
        self.0
    }

    /// Whether the completion is there. It may be wrong for a moment after another thread took it.
    #[inline]
    pub(super) fn is_filled(self, cq: &DmaMemory) -> bool {
        let status = cq.atomic((self.0 >> 1) as usize * CQE + CQE_STATUS).load(Ordering::Acquire);
        let filled = (u32::from_le(status) & PHASE != 0) == (self.0 & 1 == 1);
        if filled {
            // The rest of the entry, and the data that it says is there.
            barrier::after_device_write();
        }
        filled
    }
}

impl QueuePair {
    /// Memory for a queue pair; the controller does not know it yet. `entries` is at least 2.
    pub(super) fn new(transport: Arc<dyn Transport>, dma: &Arc<Dma>, id: u16, entries: u32, stride: usize) -> Result<Self> {
        let sq = dma.allocate(entries as usize * SQE)?;
        let cq = Arc::new(dma.allocate(entries as usize * CQE)?);
        Ok(Self {
            transport,
            id,
            entries,
            sq,
            cq,
            stride,
            shadow: None,
            sq_tail: 0,
            sq_told: 0,
            cq_head: 0,
            cq_told: 0,
            phase: true,
        })
    }

    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    /// Where the submission queue is.
    pub(super) fn sq_iova(&self) -> u64 {
        self.sq.iova(0)
    }

    /// Where the completion queue is.
    pub(super) fn cq_iova(&self) -> u64 {
        self.cq.iova(0)
    }

    /// The completion queue's memory, for [`Position::is_filled`].
    pub(super) fn cq(&self) -> Arc<DmaMemory> {
        self.cq.clone()
    }

    pub(super) fn position(&self) -> Position {
        Position(self.cq_head << 1 | u32::from(self.phase))
    }

    /// Back to the state of a new queue. The controller knows none of the two.
    pub(super) fn restart(&mut self) {
        self.cq.clear();
        (self.sq_tail, self.sq_told, self.cq_head, self.cq_told, self.phase) = (0, 0, 0, 0, true);
        self.shadow = None;
    }

    /// Uses shadow doorbells from now on. A queue of this number may have used them before: they
    /// begin anew, as the controller looks at them from the moment that it knows the queue.
    pub(super) fn set_shadow(&mut self, shadow: Option<Arc<Shadow>>) {
        if let Some(shadow) = &shadow {
            for doorbell in [reg::sq_tail(self.id, self.stride), reg::cq_head(self.id, self.stride)] {
                let offset = doorbell - reg::DOORBELLS;
                shadow.values.atomic(offset).store(0, Ordering::Relaxed);
                shadow.event_indexes.atomic(offset).store(0, Ordering::Relaxed);
            }
        }
        self.shadow = shadow;
    }

    /// Puts a command into the next entry. [`QueuePair::ring`] has to follow.
    #[inline]
    pub(super) fn push(&mut self, command: &Sqe) {
        self.sq.write(self.sq_tail as usize * SQE, command);
        self.sq_tail = self.next(self.sq_tail);
    }

    /// Tells the controller of all commands pushed.
    #[inline]
    pub(super) fn ring(&mut self) {
        if self.sq_tail != self.sq_told {
            self.tell(reg::sq_tail(self.id, self.stride), self.sq_told, self.sq_tail);
            self.sq_told = self.sq_tail;
        }
    }

    /// The next completion, if there is one. [`QueuePair::acknowledge`] has to follow.
    #[inline]
    pub(super) fn pop(&mut self) -> Option<Cqe> {
        if !self.position().is_filled(&self.cq) {
            return None;
        }
        let completion = self.cq.read(self.cq_head as usize * CQE);
        self.cq_head = self.next(self.cq_head);
        self.phase ^= self.cq_head == 0;
        Some(completion)
    }

    /// Gives the entries popped back to the controller.
    #[inline]
    pub(super) fn acknowledge(&mut self) {
        if self.cq_head != self.cq_told {
            self.tell(reg::cq_head(self.id, self.stride), self.cq_told, self.cq_head);
            self.cq_told = self.cq_head;
        }
    }

    fn next(&self, index: u32) -> u32 {
        if index + 1 == self.entries { 0 } else { index + 1 }
    }

    /// Writes a doorbell: a queue's index, which was `old`, is `new` now.
    fn tell(&self, doorbell: usize, old: u32, new: u32) {
        if let Some(shadow) = &self.shadow {
            let offset = doorbell - reg::DOORBELLS;
            // Entries are visible before the new value, and the new value before the event index
            // is read: the controller writes that one and then looks at the value again.
            barrier::before_doorbell();
            shadow.values.atomic(offset).store(new.to_le(), Ordering::Release);
            barrier::between_write_and_read();
            let event = u32::from_le(shadow.event_indexes.atomic(offset).load(Ordering::Relaxed));
            // Of the admin queue's shadow not every controller takes notice.
            if self.id != 0 && !passes(event, new, old) {
                return;
            }
        }
        // `write32` lets the controller see the entries first (`Transport::write32`).
        self.transport.write32(doorbell, new);
    }
}

/// Whether a doorbell that went from `old` to `new` went past `event` (16-bit counters).
fn passes(event: u32, new: u32, old: u32) -> bool {
    let (event, new, old) = (event as u16, new as u16, old as u16);
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::passes;

    #[test]
    fn the_register_is_written_when_the_event_index_is_passed() {
        for (event, old, new, expected) in [
            (0, 0, 1, true),  // it waits for anything after 0
            (5, 3, 5, false), // it knows that there is work up to 5
            (5, 5, 6, true),
            (5, 3, 6, true),
            (9, 3, 6, false),
            (14, 15, 2, false), // wrapped, and it was told of 15 already
        ] {
            assert_eq!(passes(event, new, old), expected, "event {event}, {old} to {new}");
        }
    }
}
