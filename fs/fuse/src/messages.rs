//! One loop's side of `/dev/fuse`: takes the kernel's messages one after the other, and sleeps for
//! the next one, or spins.

use std::io;
use std::sync::Arc;

use crate::device::{Buffer, Device, Received};
use crate::pace::Pace;

/// Pauses of the processor between two looks at the device, each of which takes a lock that clients
/// need, too.
const PAUSES: usize = 20;

/// Takes the messages of one loop.
pub(crate) struct Messages {
    device: Device,
    buffer: Buffer,
    pace: Arc<Pace>,
    /// Whether the device does not wait for a message.
    spins: bool,
}

impl Messages {
    /// Of a device that waits, from which no other thread receives.
    pub fn new(device: Device, max_write: u32, pace: Arc<Pace>) -> Messages {
        Messages { device, buffer: Buffer::new(max_write), pace, spins: false }
    }

    /// Waits for a message; none when the connection has ended.
    pub fn next(&mut self) -> io::Result<Option<&[u8]>> {
        if !self.spins && self.pace.is_fast() {
            // Where the kernel refuses, the loop sleeps as it did.
            self.spins = self.device.set_waiting(false).is_ok();
        }
        let len = loop {
            match self.device.receive(&mut self.buffer)? {
                Received::Message(len) => break len,
                Received::Ended => return Ok(None),
                Received::Nothing if !self.spins => {}
                Received::Nothing if self.pace.is_next_near() => (0..PAUSES).for_each(|_| std::hint::spin_loop()),
                Received::Nothing => {
                    self.device.set_waiting(true)?;
                    self.spins = false;
                }
            }
        };
        self.pace.request_came();
        Ok(Some(self.buffer.message(len)))
    }

    /// Notes that the last message was served.
    pub fn served(&self) {
        self.pace.request_served();
    }
}
