//! A connection to the kernel: negotiated, then served by threads until it ends.

use std::io;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};

use gpunvme_metrics::activity::Activity;
use gpunvme_metrics::{Ended, Meter, Reading};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::destroy::{self, Destroyed};
use crate::device::{Buffer, Device, Received};
use crate::handler::Handler;
use crate::idle_loops::IdleLoops;
use crate::messages::Messages;
use crate::negotiation::{Answer, Negotiated, Wishes, negotiate};
use crate::notifier::Notifier;
use crate::pace::Pace;
use crate::reply::{Channel, Reply};
use crate::request::{Decoder, Message};
use crate::uring::Queues;
use crate::wait_permit::Permits;
use crate::wire::{InHeader, InitFlags, InitIn, OutHeader, opcode};

/// What is said where io_uring is wished for and cannot be had.
const CLASSIC: &str = "requests come by /dev/fuse, not through io_uring";

/// A connection to the kernel that both sides have agreed on.
#[derive(Debug)]
pub struct Connection {
    device: Device,
    negotiated: Negotiated,
    queues: Agreed,
}

/// What became of io_uring.
#[derive(Debug)]
enum Agreed {
    /// It is agreed on.
    Queues(Queues),
    /// It was not wished for, or could not be had.
    None(Option<Fallback>),
}

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// By `/dev/fuse`; and why not through io_uring, where that was wished for.
    Classic(Option<Fallback>),
    /// Through io_uring; what no process waits for comes by `/dev/fuse`.
    IoUring,
}

/// Why requests cannot come through io_uring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// The system refuses io_uring to this process.
    Refused,
    /// The kernel does not offer it.
    NotOffered,
    /// The kernel refused a queue.
    NotRegistered,
}

/// What was counted of a connection's requests.
#[derive(Clone, Debug)]
pub struct Requests(Arc<Meter>);

impl Requests {
    /// The operations, by name, with what was counted of each.
    pub fn read(&self) -> impl Iterator<Item = (&'static str, Reading)> {
        (0..opcode::KINDS).map(|kind| (opcode::name(kind as u32), self.0.read(kind)))
    }

    /// Who makes them.
    pub fn activity(&self) -> &Activity {
        &self.0.activity
    }
}

/// Threads that serve a connection.
#[derive(Debug)]
pub struct Served {
    transport: Transport,
    threads: Vec<JoinHandle<io::Result<()>>>,
    destroyed: Receiver<Reply>,
}

/// A connection whose last request has come. Of a mount of a block device (`fuseblk`) that is
/// DESTROY: nothing comes after it, and umount(2) waits for its answer.
#[derive(Debug)]
pub struct LastRequest {
    destroy: Option<Reply>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Connection {
    /// Negotiates on an open `/dev/fuse` that is mounted and not served yet. Waits for the kernel,
    /// which asks at once.
    ///
    /// # Errors
    /// The kernel's protocol is too old, or it has unmounted before it asked.
    pub fn negotiate(descriptor: OwnedFd, wishes: &Wishes) -> io::Result<Connection> {
        let device = Device::new(descriptor, &Arc::new(Meter::new(opcode::KINDS)));
        // Made before they are agreed on: the kernel would hold requests back for queues that
        // cannot be made.
        let queues = match wishes.io_uring.then(|| Queues::new(wishes.max_write as usize)).transpose() {
            Ok(Some(queues)) => Agreed::Queues(queues),
            Ok(None) => Agreed::None(None),
            Err(error) => {
                refused_by_the_system(&error);
                Agreed::None(Some(Fallback::Refused))
            }
        };
        Connection::negotiate_with(device, wishes, queues)
    }

    fn negotiate_with(device: Device, wishes: &Wishes, queues: Agreed) -> io::Result<Connection> {
        let size = match &queues {
            Agreed::Queues(queues) => Some(queues.size()),
            Agreed::None(_) => None,
        };
        let mut buffer = Buffer::new(0);
        loop {
            let gone = || io::Error::new(io::ErrorKind::NotConnected, "the mount has gone before it was served");
            let len = match device.receive(&mut buffer)? {
                Received::Message(len) => len,
                Received::Nothing => continue,
                Received::Ended => return Err(gone()),
            };
            let (header, arguments) = split(buffer.message(len))?;
            let asked = match InitIn::read_from_prefix(arguments) {
                Ok((asked, _)) if header.opcode == opcode::INIT => asked,
                _ => return Err(refuse(&device, &header, unexpected("a request came before the kernel's first"))),
            };
            match negotiate(&asked, wishes, size) {
                Ok(Answer::Again(out)) => send(&device, &header, out.as_bytes())?,
                Ok(Answer::Agreed(out, negotiated)) => {
                    send(&device, &header, out.as_bytes())?;
                    tracing::debug!(?negotiated, "the kernel and this program have agreed");
                    let offered = negotiated.capabilities.contains(InitFlags::OVER_IO_URING);
                    let queues = match queues {
                        Agreed::Queues(_) if !offered => {
                            not_offered();
                            Agreed::None(Some(Fallback::NotOffered))
                        }
                        queues => queues,
                    };
                    return Ok(Connection { device, negotiated, queues });
                }
                Err(error) => return Err(refuse(&device, &header, error)),
            }
        }
    }

    /// What was agreed on.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Counts its requests, and how long they took.
    pub fn requests(&self) -> Requests {
        Requests(self.device.shared_meter().clone())
    }

    /// Tells the kernel what it has not asked for.
    pub fn notifier(&self) -> Notifier {
        Notifier::new(self.device.descriptor().clone())
    }

    /// Serves requests with so many loops, each a thread with a descriptor of its own, until the
    /// connection ends.
    ///
    /// # Errors
    /// The system has not got the descriptors or the threads. Loops that have begun go on until the
    /// connection ends, which its mount's end brings about.
    pub fn serve(self, handler: &Arc<impl Handler>, loops: usize) -> io::Result<Served> {
        // No number of the system's: as if there was one.
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        self.serve_on(handler, loops, processors)
    }

    fn serve_on(self, handler: &Arc<impl Handler>, loops: usize, processors: usize) -> io::Result<Served> {
        let Connection { device, negotiated, queues } = self;
        let decoder = Decoder { setxattr_ext: negotiated.capabilities.contains(InitFlags::SETXATTR_EXT) };
        let (destroy, destroyed) = destroy::channel();
        let (mut threads, transport) = match queues {
            Agreed::Queues(queues) => {
                let (threads, all) = queues.serve(&device, decoder, handler, &destroy)?;
                if !all {
                    tracing::warn!("{CLASSIC}: the kernel refused a queue");
                }
                (threads, if all { Transport::IoUring } else { Transport::Classic(Some(Fallback::NotRegistered)) })
            }
            Agreed::None(fallback) => (Vec::new(), Transport::Classic(fallback)),
        };
        let loops = if transport == Transport::IoUring { 1 } else { loops };
        let mut devices = Vec::with_capacity(loops);
        for _ in 1..loops {
            devices.push(device.another()?);
        }
        devices.push(device);
        let (idle_loops, permits) = (IdleLoops::new(loops), Permits::new(loops));
        let pace = Arc::new(Pace::new(processors));
        let start = |(number, device): (usize, Device)| {
            let (handler, idle_loops, destroy) = (handler.clone(), idle_loops.clone(), destroy.clone());
            let (permits, pace) = (permits.clone(), pace.clone());
            let serve = move || {
                permits.enter();
                let messages = Messages::new(device.clone(), negotiated.max_write, pace);
                serve(&device, messages, decoder, &idle_loops, &*handler, &destroy)
            };
            thread::Builder::new().name(format!("fuse-{number}")).spawn(serve)
        };
        threads.extend(devices.into_iter().enumerate().map(start).collect::<io::Result<Vec<_>>>()?);
        Ok(Served { transport, threads, destroyed })
    }
}

impl Served {
    /// How requests come.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Waits until the last request has come: DESTROY, or else the connection has ended.
    pub fn join(self) -> LastRequest {
        // Each thread has a sender for as long as it takes requests.
        LastRequest { destroy: self.destroyed.recv().ok(), threads: self.threads }
    }
}

impl LastRequest {
    /// Whether umount(2) waits for [`LastRequest::finish`].
    pub fn is_awaited(&self) -> bool {
        self.destroy.is_some()
    }

    /// Lets umount(2) return, if it waits, and ends the threads.
    ///
    /// # Errors
    /// Why requests could not be taken any more, if that ended the connection.
    pub fn finish(self) -> io::Result<()> {
        self.destroy.into_iter().for_each(Reply::ok);
        let ends = self.threads.into_iter().map(|thread| match thread.join() {
            Ok(end) => end,
            Err(_) => Err(io::Error::other("a thread that takes requests panicked")),
        });
        // All of them are waited for.
        ends.fold(Ok(()), Result::and)
    }
}

/// One loop.
fn serve(
    device: &Device,
    mut messages: Messages,
    decoder: Decoder,
    idle_loops: &Arc<IdleLoops>,
    handler: &impl Handler,
    destroy: &Destroyed,
) -> io::Result<()> {
    let channel: Arc<dyn Channel> = Arc::new(device.clone());
    while let Some(message) = messages.next()? {
        let (header, arguments) = split(message)?;
        let _busy = idle_loops.busy();
        let reply = || Reply::new(channel.clone(), &header);
        match decoder.decode(&header, arguments) {
            Ok(Message::Request(request)) => handler.request(request, reply()),
            Ok(Message::Forgets(forgets)) => {
                let begun = device.shared_meter().begin(header.opcode as usize, 1);
                handler.forget(forgets);
                device.shared_meter().end(begun, Ended { count: 1, bytes: 0, failed: false });
            }
            // The kernel asks no more.
            Ok(Message::Interrupt) => reply().error(Errno::NOSYS.raw_os_error()),
            Ok(Message::Destroy) => {
                destroy.has_come(reply());
                return Ok(());
            }
            Err(_) => {
                tracing::error!(opcode = header.opcode, len = header.len, "a request could not be decoded");
                reply().error(Errno::IO.raw_os_error());
            }
        }
        messages.served();
    }
    Ok(())
}

fn split(message: &[u8]) -> io::Result<(InHeader, &[u8])> {
    Decoder::split(message).map_err(|_| unexpected("what the kernel sent is no request"))
}

fn unexpected(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn send(device: &Device, header: &InHeader, body: &[u8]) -> io::Result<()> {
    let len = (size_of::<OutHeader>() + body.len()) as u32;
    device.answer(OutHeader { len, error: 0, unique: header.unique }, [body, &[]])
}

fn not_offered() {
    tracing::warn!(
        "{CLASSIC}: the kernel does not offer it; from Linux 6.14 on \
         `echo Y > /sys/module/fuse/parameters/enable_uring` makes it"
    );
}

fn refused_by_the_system(error: &io::Error) {
    tracing::warn!(
        "{CLASSIC}: the system refuses io_uring ({error}); see io_uring_disabled in /proc/sys/kernel, \
         and the seccomp filter of a container"
    );
}

/// Tells the kernel that there will be no mount. Returns why.
fn refuse(device: &Device, header: &InHeader, why: io::Error) -> io::Error {
    Reply::new(Arc::new(device.clone()), header).error(Errno::PROTO.raw_os_error());
    why
}

#[cfg(test)]
mod tests;
