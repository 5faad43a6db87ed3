//! One loop's side of `/dev/fuse`: takes the kernel's messages one after the other, and sleeps, or
//! looks for the next one.

use std::io;
use std::sync::Arc;

use crate::device::{Buffer, Device, Received};
use crate::idle_loops::IdleLoops;
use crate::sleepers::Sleeper;

/// Spins between two looks at the device, each of which takes a lock that clients need, too.
const SPINS: usize = 20;

/// Takes the messages of one loop.
pub(crate) struct Messages {
    device: Device,
    buffer: Buffer,
    loops: Arc<IdleLoops>,
    /// None where no loop ever looks.
    sleeper: Option<Sleeper>,
}

impl Messages {
    /// On the loop's thread, with a device that no other thread receives from.
    pub fn new(device: Device, max_write: u32, loops: &Arc<IdleLoops>) -> Messages {
        let sleeper = loops.sleeper(device.descriptor());
        Messages { device, buffer: Buffer::new(max_write), loops: loops.clone(), sleeper }
    }

    /// Waits for a message; none when the connection has ended.
    pub fn next(&mut self) -> io::Result<Option<&[u8]>> {
        let len = loop {
            match self.device.receive(&mut self.buffer)? {
                Received::Message(len) => break len,
                Received::Ended => return Ok(None),
                Received::Nothing => self.look_or_sleep(),
            }
        };
        self.loops.request_came(self.sleeper.as_ref());
        Ok(Some(self.buffer.message(len)))
    }

    /// After the device had nothing.
    fn look_or_sleep(&self) {
        let Some(sleeper) = self.sleeper.as_ref().filter(|sleeper| !sleeper.sleeps()) else { return };
        if !self.loops.is_next_near() {
            sleeper.sleep();
        } else if !self.loops.make_room() {
            (0..SPINS).for_each(|_| std::hint::spin_loop());
        }
    }
}
