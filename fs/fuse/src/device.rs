//! `/dev/fuse`: one message a read, one reply a write (`fs/fuse/dev.c`).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use gpunvme_metrics::Meter;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::reply::Channel;
use crate::wire::OutHeader;

/// The device that connects FUSE servers with the kernel.
const DEV_FUSE: &str = "/dev/fuse";
/// Room for headers before the largest write; the kernel wants 80 bytes, and 8 KiB in all.
const HEADERS: usize = 8192;

/// An open `/dev/fuse` of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    descriptor: Arc<OwnedFd>,
    meter: Arc<Meter>,
}

/// What a message is read into.
pub(crate) struct Buffer(Vec<u8>);

/// What came of an attempt to take a message.
pub(crate) enum Received {
    /// A message of so many bytes.
    Message(usize),
    /// None yet.
    Nothing,
    /// None any more: the connection has ended.
    Ended,
}

impl Buffer {
    /// For writes of at most `max_write` bytes. Memory is taken as it is used.
    pub fn new(max_write: u32) -> Buffer {
        Buffer(vec![0; HEADERS + max_write as usize])
    }

    /// A message of so many bytes.
    pub fn message(&self, len: usize) -> &[u8] {
        &self.0[..len]
    }
}

impl Device {
    pub fn new(descriptor: OwnedFd, meter: &Arc<Meter>) -> Device {
        Device { descriptor: Arc::new(descriptor), meter: meter.clone() }
    }

    /// Another descriptor of the same connection, with a queue of its own for what it has read.
    pub fn another(&self) -> io::Result<Device> {
        let other = rustix::fs::open(DEV_FUSE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        clone_into(&other, self.descriptor.as_fd())?;
        Ok(Device::new(other, &self.meter))
    }

    /// Whether [`Device::receive`] waits for a message; it does where nothing else was said.
    pub fn set_waiting(&self, waits: bool) -> io::Result<()> {
        let flags = if waits { OFlags::RDWR } else { OFlags::RDWR | OFlags::NONBLOCK };
        rustix::fs::fcntl_setfl(&self.descriptor, flags).map_err(io::Error::from)
    }

    /// Takes a message, which it waits for if the descriptor does.
    pub fn receive(&self, buffer: &mut Buffer) -> io::Result<Received> {
        match rustix::io::read(&self.descriptor, &mut buffer.0[..]) {
            Ok(len) => Ok(Received::Message(len)),
            // The request was called off while it was read; a signal came.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => Ok(Received::Nothing),
            // Unmounted; aborted.
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(Received::Ended),
            Err(error) => Err(error.into()),
        }
    }

    pub fn descriptor(&self) -> &Arc<OwnedFd> {
        &self.descriptor
    }

    /// What counts the requests of the connection.
    pub fn shared_meter(&self) -> &Arc<Meter> {
        &self.meter
    }
}

impl Channel for Device {
    fn answer(&self, header: OutHeader, body: [&[u8]; 2]) -> io::Result<()> {
        let message = [header.as_bytes(), body[0], body[1]].map(IoSlice::new);
        // The kernel takes all of it or nothing.
        rustix::io::writev(&self.descriptor, &message).map(drop).map_err(io::Error::from)
    }

    fn meter(&self) -> &Meter {
        &self.meter
    }
}

/// Makes an open `/dev/fuse` one of the connection of another (`FUSE_DEV_IOC_CLONE`).
#[allow(unsafe_code)]
fn clone_into(new: &OwnedFd, connection: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
    use std::os::fd::AsRawFd;

    use rustix::ioctl::{Setter, ioctl, opcode};

    const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);
    let number = connection.as_raw_fd() as u32;
    // SAFETY: the kernel reads the 32 bits of the argument, and keeps no pointer to it
    // (`fuse_dev_ioctl_clone`; the direction in the number says the opposite).
    unsafe { ioctl(new, Setter::<CLONE, u32>::new(number)) }.map_err(io::Error::from)
}
