//! A connection to the kernel: negotiated, then served by threads until it ends.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::device::{Buffer, Device};
use crate::negotiation::{Answer, Negotiated, Wishes, negotiate};
use crate::notifier::Notifier;
use crate::reply::{Channel, Reply};
use crate::request::{Decoder, Forgets, Message, Request};
use crate::wire::{InHeader, InitFlags, InitIn, OutHeader, opcode};

/// A filesystem, as the kernel's requests see it.
pub trait Handler: Send + Sync + 'static {
    /// Serves a request, on a loop: the next one waits until this returns. The reply may be given
    /// later, from any thread.
    fn request(&self, request: Request<'_>, reply: Reply);

    /// Notes what the kernel has forgotten, on a loop.
    fn forget(&self, forgets: Forgets<'_>);
}

/// A connection to the kernel that both sides have agreed on.
#[derive(Debug)]
pub struct Connection {
    device: Device,
    negotiated: Negotiated,
}

/// Threads that serve a connection.
#[derive(Debug)]
pub struct Served {
    loops: Vec<JoinHandle<io::Result<()>>>,
}

impl Connection {
    /// Negotiates on an open `/dev/fuse` that is mounted and not served yet. Waits for the kernel,
    /// which asks at once.
    ///
    /// # Errors
    /// The kernel's protocol is too old, or it has unmounted before it asked.
    pub fn negotiate(descriptor: OwnedFd, wishes: &Wishes) -> io::Result<Connection> {
        let device = Device::new(descriptor);
        let mut buffer = Buffer::new(0);
        loop {
            let gone = || io::Error::new(io::ErrorKind::NotConnected, "the mount has gone before it was served");
            let (header, arguments) = split(device.receive(&mut buffer)?.ok_or_else(gone)?)?;
            let asked = match InitIn::read_from_prefix(arguments) {
                Ok((asked, _)) if header.opcode == opcode::INIT => asked,
                _ => return Err(refuse(&device, &header, unexpected("a request came before the kernel's first"))),
            };
            match negotiate(&asked, wishes) {
                Ok(Answer::Again(out)) => send(&device, &header, out.as_bytes())?,
                Ok(Answer::Agreed(out, negotiated)) => {
                    send(&device, &header, out.as_bytes())?;
                    tracing::debug!(?negotiated, "the kernel and this program have agreed");
                    return Ok(Connection { device, negotiated });
                }
                Err(error) => return Err(refuse(&device, &header, error)),
            }
        }
    }

    /// What was agreed on.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
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
        let Connection { device, negotiated } = self;
        let decoder = Decoder { setxattr_ext: negotiated.capabilities.contains(InitFlags::SETXATTR_EXT) };
        let mut devices = Vec::with_capacity(loops);
        for _ in 1..loops {
            devices.push(device.another()?);
        }
        devices.push(device);
        let start = |(number, device)| {
            let handler = handler.clone();
            let serve = move || serve(&device, negotiated.max_write, decoder, &*handler);
            thread::Builder::new().name(format!("fuse-{number}")).spawn(serve)
        };
        let loops = devices.into_iter().enumerate().map(start).collect::<io::Result<_>>()?;
        Ok(Served { loops })
    }
}

impl Served {
    /// Waits until the connection has ended.
    ///
    /// # Errors
    /// Why requests could not be taken any more, if that ended it.
    pub fn join(self) -> io::Result<()> {
        let ends = self.loops.into_iter().map(|thread| match thread.join() {
            Ok(end) => end,
            Err(_) => Err(io::Error::other("a thread that takes requests panicked")),
        });
        // All of them are waited for.
        ends.fold(Ok(()), Result::and)
    }
}

/// One loop.
fn serve(device: &Device, max_write: u32, decoder: Decoder, handler: &impl Handler) -> io::Result<()> {
    let mut buffer = Buffer::new(max_write);
    let channel: Arc<dyn Channel> = Arc::new(device.clone());
    while let Some(message) = device.receive(&mut buffer)? {
        let (header, arguments) = split(message)?;
        let reply = || Reply::new(channel.clone(), header.unique);
        match decoder.decode(&header, arguments) {
            Ok(Message::Request(request)) => handler.request(request, reply()),
            Ok(Message::Forgets(forgets)) => handler.forget(forgets),
            // The kernel asks no more.
            Ok(Message::Interrupt) => reply().error(Errno::NOSYS.raw_os_error()),
            Ok(Message::Destroy) => {
                reply().ok();
                return Ok(());
            }
            Err(_) => {
                tracing::error!(opcode = header.opcode, len = header.len, "a request could not be decoded");
                reply().error(Errno::IO.raw_os_error());
            }
        }
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

/// Tells the kernel that there will be no mount. Returns why.
fn refuse(device: &Device, header: &InHeader, why: io::Error) -> io::Error {
    Reply::new(Arc::new(device.clone()), header.unique).error(Errno::PROTO.raw_os_error());
    why
}
