//! The registration socket: the way in for descriptors that the daemon may not fetch (another
//! user, Yama, a container).
//!
//! It guards the daemon against its clients. One thread listens, and never touches what a client
//! sent: a message is received, and a connection closed, by the [`Intake`], because descriptors
//! may come with it that cannot be closed. A client that does not take its answer, says something
//! malformed or keeps others out by holding connections is disconnected. Buffers do not depend on
//! the connection they came by.
//!
//! A datagram is a [`Message`] followed by a [`gpunvme_abi::Register`] or a
//! [`gpunvme_abi::Grant`], each with exactly one descriptor, or by a [`gpunvme_abi::Unregister`];
//! the answer has the same form.

use crate::foreign::Foreign;
use crate::intake::{Intake, Turn};
use crate::quota::{ROOT, quota};
use crate::server::{Reply, Server};
use crate::socket_peer;
use gpunvme_abi::{self as abi, Message, Request};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, Shutdown, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};
use rustix::process::{Resource, getrlimit};
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use zerocopy::{FromBytes, IntoBytes};

/// Connections held at a time, of which a user has a quota. A client needs one for a moment, so a
/// user's oldest goes when one more comes.
const MAX_CONNECTIONS: usize = 128;
/// The most descriptors that can come with a message (`SCM_MAX_FD`). There is room for all of
/// them: what finds none is closed by the kernel as it is received.
const MAX_DESCRIPTORS: usize = 253;
/// How long no connection is accepted after one could not be, for lack of descriptors, say.
const PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
/// More than any command is that has no entries, so that what is merely out of place is told apart
/// from what is malformed.
const MAX_DATAGRAM: usize = 1024;
const STOP: u64 = 0;
const LISTEN: u64 = 1;

/// A listening socket and the thread that serves it. Dropping it ends both and removes the
/// socket's file.
pub struct Listener {
    file: SocketFile,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

/// The extension that a socket's file has in place of its own until it listens; ss(8) shows it
/// later, too.
pub const NOT_LISTENING: &str = "new";

impl Listener {
    /// Listens at `path`, in place of what is there. The socket gets that name when it listens
    /// ([`NOT_LISTENING`]): until then it could not be told from one that its daemon has left.
    ///
    /// Who may reach the socket is decided by the permissions of the directories above it and by
    /// `mode`, those of the socket itself. It grants no more than the use of the registry's
    /// limits: what a registered buffer can be used for, the mount's permissions decide.
    ///
    /// # Errors
    /// Those of the system calls, and `ENAMETOOLONG` for paths of more than 107 bytes.
    pub fn bind(path: &Path, mode: Mode, server: Arc<Server>) -> std::io::Result<Listener> {
        let new = path.with_extension(NOT_LISTENING);
        let address = SocketAddrUnix::new(&new)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        rustix::net::bind(&socket, &address)?;
        let file = SocketFile::at(new)?;
        rustix::fs::chmod(&file.path, mode)?;
        rustix::net::listen(&socket, 64)?;
        let file = file.renamed(path)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &socket, epoll::EventData::new_u64(LISTEN), epoll::EventFlags::IN)?;
        let held = Arc::new(Held { intake: server.registry.intake().clone(), epoll, connections: Mutex::default() });
        let mut service =
            Service { server: Arc::downgrade(&server), socket: Some(socket), held, next: LISTEN + 1, accepting: true };
        let thread = std::thread::Builder::new().name("registration".into()).spawn(move || service.run())?;
        Ok(Listener { file, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.file.path
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let woken = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let (Ok(_), Some(thread)) = (woken, self.thread.take()) {
            let _ = thread.join(); // a panic there was reported there
        }
    }
}

/// The file of a socket. Dropping it removes the file, unless another has its name by now.
struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    fn at(path: PathBuf) -> std::io::Result<SocketFile> {
        let identity = SocketFile::identity(&path)?;
        Ok(SocketFile { path, identity })
    }

    fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
        std::fs::symlink_metadata(path).map(|status| (status.dev(), status.ino()))
    }

    fn renamed(mut self, path: &Path) -> std::io::Result<SocketFile> {
        std::fs::rename(&self.path, path)?;
        path.clone_into(&mut self.path);
        Ok(self)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if SocketFile::identity(&self.path).is_ok_and(|identity| identity == self.identity) {
            let _ = std::fs::remove_file(&self.path); // another program may have removed it before
        }
    }
}

/// The connections, which the listening thread and those that receive share.
struct Held {
    intake: Intake,
    epoll: OwnedFd,
    /// Oldest first.
    connections: Mutex<VecDeque<Arc<Connection>>>,
}

struct Connection {
    token: u64,
    user: u32,
    intake: Intake,
    /// None only while it is dropped.
    socket: Option<OwnedFd>,
}

struct Service {
    /// The mount need not wait for a client that keeps a thread of the intake.
    server: Weak<Server>,
    /// None only while it is dropped.
    socket: Option<OwnedFd>,
    held: Arc<Held>,
    next: u64,
    accepting: bool,
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
            let pause = if self.accepting { None } else { Some(&PAUSE) };
            match epoll::wait(&self.held.epoll, rustix::buffer::spare_capacity(&mut events), pause) {
                Ok(0) => self.accept_again(true),
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
        // A quarter of all descriptors may wait to be closed: buffers have another. Each of these
        // counts for its sender as one in flight.
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        if self.held.intake.discarded() as u64 > descriptors / 4 {
            return self.accept_again(false);
        }
        let socket = self.socket.as_ref().expect("it goes with the service");
        match rustix::net::accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                // Without credentials it is counted for root, who has the largest quota: a socket
                // of this kind has them.
                let user = socket_peer::user(socket.as_fd()).unwrap_or(ROOT);
                let connection = Connection { token: self.next, user, intake: self.held.intake.clone(), socket: Some(socket) };
                self.next += 1;
                if let Err(errno) = self.held.hold(Arc::new(connection)) {
                    tracing::debug!(%errno, "a connection to the registration socket cannot be watched");
                }
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => {
                tracing::debug!(%errno, "a client could not connect to the registration socket");
                self.accept_again(false);
            }
        }
    }

    /// Accepts connections again, or pauses: the event would come back at once.
    fn accept_again(&mut self, accepting: bool) {
        let flags = if accepting { epoll::EventFlags::IN } else { epoll::EventFlags::empty() };
        let socket = self.socket.as_ref().expect("it goes with the service");
        match epoll::modify(&self.held.epoll, socket, epoll::EventData::new_u64(LISTEN), flags) {
            Ok(()) => self.accepting = accepting,
            Err(errno) => tracing::warn!(%errno, "cannot pause or go on accepting registrations"),
        }
    }

    /// Handles a message of a client: has it received, and the connection watched again after that.
    fn serve(&self, token: u64) {
        let Some(connection) = self.held.find(token) else { return };
        let (server, held) = (self.server.clone(), self.held.clone());
        self.held.intake.run(connection.user, move |turn| {
            let exchanged = match turn {
                Turn::Taken => exchange(&server, &connection),
                // What came is not received, since it cannot be got rid of.
                Turn::Refused => Err(Errno::BUSY.into()),
            };
            match exchanged.and_then(|()| Ok(held.watch(&connection)?)) {
                Ok(()) => {}
                Err(end) => {
                    if let End::Kernel(errno) = end {
                        tracing::debug!(%errno, user = connection.user, "a registration connection failed");
                    }
                    held.let_go(connection.token);
                }
            }
        });
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Connections that were not accepted go with it, and what was sent over them.
        if let Some(socket) = self.socket.take() {
            self.held.intake.discard(ROOT, socket);
        }
        self.held.connections.lock().clear();
    }
}

impl Held {
    /// Takes a connection in, in the place of its user's oldest where the quota of the user is
    /// used up. The user whose quota is 0 is not let in.
    fn hold(&self, connection: Arc<Connection>) -> Result<(), Errno> {
        let mut connections = self.connections.lock();
        let of_user = |other: &Arc<Connection>| other.user == connection.user;
        let held = connections.iter().filter(|other| of_user(other)).count();
        let quota = quota(connection.user, MAX_CONNECTIONS as u64, (connections.len() - held) as u64);
        let oldest = if held as u64 >= quota { connections.iter().position(of_user) } else { None };
        let dropped = oldest.and_then(|oldest| connections.remove(oldest));
        if (quota == 0) && dropped.is_none() {
            return Err(Errno::BUSY);
        }
        let data = epoll::EventData::new_u64(connection.token);
        epoll::add(&self.epoll, connection.socket(), data, epoll::EventFlags::IN | epoll::EventFlags::ONESHOT)?;
        connections.push_back(connection);
        Ok(())
    }

    /// Has the next message of a connection noticed.
    fn watch(&self, connection: &Connection) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(connection.token);
        epoll::modify(&self.epoll, connection.socket(), data, epoll::EventFlags::IN | epoll::EventFlags::ONESHOT)
    }

    fn find(&self, token: u64) -> Option<Arc<Connection>> {
        self.connections.lock().iter().find(|connection| connection.token == token).cloned()
    }

    fn let_go(&self, token: u64) {
        self.connections.lock().retain(|connection| connection.token != token);
    }
}

impl Connection {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("it goes with the connection").as_fd()
    }
}

impl Drop for Connection {
    /// Never waits. Messages that were not received go with a connection, and what came with them.
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        // From here on nothing more can come.
        let ended = rustix::net::shutdown(&socket, Shutdown::Both);
        if ended.is_err() || has_messages(&socket) {
            self.intake.discard(self.user, socket);
        }
    }
}

/// Whether a message lies in a socket that was shut down. One that has no bytes looks like the
/// end, but for its sender's credentials, which find no room.
fn has_messages(socket: &OwnedFd) -> bool {
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let peeked = sockopt::set_socket_passcred(socket, true).and_then(|()| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut RecvAncillaryBuffer::default(), flags)
    });
    peeked.map_or_else(|errno| errno != Errno::AGAIN, |message| message.flags.contains(ReturnFlags::CTRUNC))
}

/// One datagram and its answer.
fn exchange(server: &Weak<Server>, connection: &Connection) -> Result<(), End> {
    let socket = connection.socket();
    let mut bytes = [0u8; MAX_DATAGRAM];
    let (len, mut fds) = match receive(connection, &mut bytes) {
        Ok((0, _)) => return Err(End::Client),
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    };
    let Ok((message, argument)) = Message::read_from_prefix(&bytes[..len]) else { return Err(End::Client) };
    let fd = if fds.len() == 1 { fds.pop() } else { None };
    drop(fds);
    let server = server.upgrade().ok_or(End::Client)?;
    let reply = answer(&server, socket, message.request, argument, fd);
    let mut data = Message { request: message.request, status: -reply.result }.as_bytes().to_vec();
    data.extend_from_slice(&reply.data);
    // A client that has no room for its answer is not listening.
    rustix::net::send(socket, &data, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

fn answer(server: &Server, socket: BorrowedFd<'_>, request: u32, argument: &[u8], fd: Option<Foreign>) -> Reply {
    let client = socket_peer::client(socket);
    match (abi::decode(request, argument), fd, client) {
        (Ok(Request::Register(_)), None, _) => Reply::error(libc::EBADF),
        (Ok(Request::Register(register)), Some(fd), Ok(client)) => server.register_received(client, fd, &register),
        (Ok(Request::Unregister(unregister)), _, Ok(client)) => server.unregister_of(&client.process, &unregister),
        (Ok(Request::Grant(_)), None, _) => Reply::error(libc::EBADF),
        (Ok(Request::Grant(grant)), Some(fd), Ok(client)) => server.grant_received(&client.process, &fd, &grant),
        (Ok(Request::Register(_) | Request::Unregister(_) | Request::Grant(_)), _, Err(errno)) => {
            Reply::error(errno.raw_os_error())
        }
        (Ok(_), ..) => Reply::error(libc::ENOTTY),
        (Err(error), ..) => error.into(),
    }
}

/// A datagram, and the descriptors that came with it.
fn receive(connection: &Connection, bytes: &mut [u8]) -> Result<(usize, Vec<Foreign>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = rustix::net::recvmsg(connection.socket(), &mut [IoSliceMut::new(bytes)], &mut ancillary, flags)?;
    let foreign = |fd| Foreign::new(fd, connection.user, &connection.intake);
    let fds = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.map(foreign).collect::<Vec<_>>(),
            _ => Vec::new(),
        })
        .collect();
    // A truncated datagram has a length that no command has.
    let len = if message.flags.contains(ReturnFlags::TRUNC) { bytes.len() } else { message.bytes };
    Ok((len, fds))
}
