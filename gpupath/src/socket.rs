//! The registration socket: the way in for descriptors that the daemon may not fetch (another user, Yama, a container).
//!
//! It guards the daemon against its clients: one thread serves all of them and waits for none. A client that does not take its answer, says
//! something malformed or keeps others out by holding connections is disconnected. Buffers do not depend on the connection they came by.
//!
//! A datagram is a [`Message`] followed by a [`crate::abi::Register`] (with exactly one descriptor) or an [`crate::abi::Unregister`]; the answer has the same form.

use crate::abi::{self, Message, Request};
use crate::foreign;
use crate::peer;
use crate::server::{Reply, Server};
use rustix::event::{EventfdFlags, epoll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use zerocopy::{FromBytes, IntoBytes};

/// Connections held at a time. A client needs one for a moment, so the oldest goes when one more comes.
const MAX_CONNECTIONS: usize = 128;
/// More than any command is that has no entries, so that what is merely out of place is told apart from what is malformed.
const MAX_DATAGRAM: usize = 1024;
const STOP: u64 = 0;
const LISTEN: u64 = 1;

/// A listening socket and the thread that serves it. Dropping it ends both and removes the socket's file.
pub struct Listener {
    path: PathBuf,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens at `path`, replacing what is left there of an earlier daemon.
    ///
    /// Who may reach the socket is decided by the permissions of the directories above it and by `mode`, those of the socket itself. It grants no more
    /// than the use of the registry's limits: what a registered buffer can be used for, the mount's permissions decide.
    ///
    /// # Errors
    /// Those of the system calls, and `ENAMETOOLONG` for paths of more than 107 bytes.
    pub fn bind(path: &Path, mode: Mode, server: Arc<Server>) -> std::io::Result<Listener> {
        let address = SocketAddrUnix::new(path)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&socket, &address)?;
        rustix::fs::chmod(path, mode)?;
        rustix::net::listen(&socket, 64)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &socket, epoll::EventData::new_u64(LISTEN), epoll::EventFlags::IN)?;
        let mut service = Service { server, socket, epoll, connections: VecDeque::new(), next: LISTEN + 1 };
        let thread = std::thread::Builder::new().name("registration".into()).spawn(move || service.run())?;
        Ok(Listener { path: path.to_owned(), stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let woken = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join(); // a panic there was reported there
        }
        let _ = std::fs::remove_file(&self.path); // somebody may have tidied up before
    }
}

struct Service {
    server: Arc<Server>,
    socket: OwnedFd,
    epoll: OwnedFd,
    /// Oldest first.
    connections: VecDeque<Connection>,
    next: u64,
}

struct Connection {
    token: u64,
    socket: OwnedFd,
}

/// Why a connection ends.
enum End {
    /// The client is gone, or does not keep to the protocol.
    Client,
    /// The kernel refused something.
    Kernel(Errno),
}

impl From<Errno> for End {
    fn from(errno: Errno) -> Self {
        End::Kernel(errno)
    }
}

impl Service {
    fn run(&mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::error!(%errno, "the registration socket is out of service until the next mount");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    LISTEN => self.accept(),
                    token => self.serve(token),
                }
            }
        }
    }

    fn accept(&mut self) {
        let accepted = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let connected = accepted.and_then(|socket| {
            let token = self.next;
            epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
            Ok(Connection { token, socket })
        });
        match connected {
            Ok(connection) => {
                self.next += 1;
                self.connections.push_back(connection);
                if self.connections.len() > MAX_CONNECTIONS {
                    self.connections.pop_front();
                }
            }
            Err(Errno::AGAIN) => {}
            Err(errno) => tracing::debug!(%errno, "a client could not connect to the registration socket"),
        }
    }

    fn serve(&mut self, token: u64) {
        let Some(at) = self.connections.iter().position(|connection| connection.token == token) else { return };
        match exchange(&self.server, self.connections[at].socket.as_fd()) {
            Ok(()) => {}
            Err(end) => {
                if let End::Kernel(errno) = end {
                    tracing::debug!(%errno, "a registration connection failed");
                }
                self.connections.remove(at);
            }
        }
    }
}

/// One datagram and its answer.
fn exchange(server: &Server, socket: BorrowedFd<'_>) -> Result<(), End> {
    let mut bytes = [0u8; MAX_DATAGRAM];
    let (len, mut fds) = match receive(socket, &mut bytes) {
        Ok((0, _)) => return Err(End::Client),
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    };
    let Ok((message, argument)) = Message::read_from_prefix(&bytes[..len]) else {
        fds.into_iter().for_each(foreign::discard);
        return Err(End::Client);
    };
    let fd = if fds.len() == 1 { fds.pop() } else { None };
    fds.into_iter().for_each(foreign::discard);
    let reply = answer(server, socket, message.request, argument, fd);
    let mut data = Message { request: message.request, status: -reply.result }.as_bytes().to_vec();
    data.extend_from_slice(&reply.data);
    // A client that has no room for its answer is not listening.
    rustix::net::send(socket, &data, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

fn answer(server: &Server, socket: BorrowedFd<'_>, request: u32, argument: &[u8], fd: Option<OwnedFd>) -> Reply {
    match (abi::decode(request, argument), fd) {
        (Ok(Request::Register(_)), None) => Reply::error(libc::EBADF),
        (Ok(Request::Register(register)), Some(fd)) => match peer::process(socket) {
            Ok(process) if foreign::may_accept() => server.register_received(process, fd, &register),
            refused => {
                foreign::discard(fd);
                Reply::error(refused.err().unwrap_or(Errno::NOSPC).raw_os_error())
            }
        },
        (decoded, fd) => {
            fd.into_iter().for_each(foreign::discard);
            match (decoded, peer::process(socket)) {
                (Ok(Request::Unregister(unregister)), Ok(process)) => server.unregister(process.id, &unregister),
                (Ok(Request::Unregister(_)), Err(errno)) => Reply::error(errno.raw_os_error()),
                (Ok(_), _) => Reply::error(libc::ENOTTY),
                (Err(error), _) => error.into(),
            }
        }
    }
}

/// A datagram, and the descriptors that came with it. There is room for two, so that more than one is noticed; the kernel closes the others.
fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    let fds = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    // A truncated datagram has a length that no command has.
    let len = if message.flags.contains(ReturnFlags::TRUNC) { bytes.len() } else { message.bytes };
    Ok((len, fds))
}
