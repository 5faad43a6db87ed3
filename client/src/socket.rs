//! The application's end of the registration socket (`docs/reference/ioctl.md`): one datagram out
//! with the descriptor, one back.
//!
//! It guards that a signal loses no answer: what the daemon then registered would stay so.

use crate::codes::status;
use crate::sys;
use gpunvme_abi::{Command, Grant, Message, Register};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Registers a descriptor: the daemon's errno, where it refused, and its answer.
///
/// # Errors
/// What kept the message from being exchanged.
pub(crate) fn register(path: &str, memory: BorrowedFd<'_>, request: &Register) -> Result<(Option<Errno>, Register), Errno> {
    exchange(path, Command::Register, memory, request)
}

/// Asks for a grant for an open file: the daemon's errno, where it refused, and its answer.
///
/// # Errors
/// As [`register`].
pub(crate) fn grant(path: &str, file: BorrowedFd<'_>) -> Result<(Option<Errno>, Grant), Errno> {
    exchange(path, Command::Grant, file, &Grant::default())
}

/// Sends a request with a descriptor, and waits for the answer.
fn exchange<T: IntoBytes + FromBytes + Immutable + Default>(
    path: &str,
    command: Command,
    descriptor: BorrowedFd<'_>,
    request: &T,
) -> Result<(Option<Errno>, T), Errno> {
    let socket = connect(path)?;
    let message = Message { request: command.request(0), status: 0 };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [descriptor];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "the space was made for one descriptor");
    let parts = [IoSlice::new(message.as_bytes()), IoSlice::new(request.as_bytes())];
    retry_on_intr(|| rustix::net::sendmsg(&socket, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
    let mut answer = vec![0u8; size_of::<Message>() + size_of::<T>()];
    let (_, len) = retry_on_intr(|| rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty()))?;
    let (message, answer) = Message::read_from_prefix(&answer[..len]).map_err(|_| Errno::CONNRESET)?;
    Ok((status(message.status), T::read_from_bytes(answer).unwrap_or_default()))
}

/// A pidfd of the daemon.
///
/// # Errors
/// Where there is no socket, or it may not be used; `ENOPROTOOPT` before Linux 6.5.
pub(crate) fn daemon(path: &str) -> Result<OwnedFd, Errno> {
    sys::listener(connect(path)?.as_fd())
}

fn connect(path: &str) -> Result<OwnedFd, Errno> {
    if path.is_empty() {
        return Err(Errno::NOENT);
    }
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(path)?;
    // It waits for a place in the listener's queue, and has not begun anything before.
    retry_on_intr(|| rustix::net::connect(&socket, &address))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;
    use crate::buffer::sealed::Memory as _;
    use crate::interrupted::interrupted;
    use gpunvme_abi::{Reason, Route};
    use gpunvme_blockdev_testing::MemoryDevice;
    use gpunvme_gpupath::registry::{Limits, Registry};
    use gpunvme_gpupath::server::Server;
    use gpunvme_gpupath::socket::Listener;
    use std::sync::Arc;

    /// A daemon's end, and its path.
    fn listener() -> (tempfile::TempDir, Arc<Server>, Listener, String) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let registry = Registry::new(MemoryDevice::new(1 << 20), Limits::default()).unwrap();
        let server = Arc::new(Server::new(registry).unwrap());
        let listener = Listener::bind(&path, rustix::fs::Mode::RWXU, server.clone()).unwrap();
        let path = path.to_str().unwrap().to_owned();
        (directory, server, listener, path)
    }

    /// What the daemon registers is known to the process that asked.
    #[test]
    fn signals_lose_no_answer() {
        let (_directory, server, _listener, path) = listener();
        let mut buffer = Buffer::memfd(4096).unwrap();
        buffer.fill(1);
        let request = Register { fd: -1, len: 4096, ..Register::default() };
        let registered =
            interrupted(|| (0..300).filter(|_| register(&path, buffer.descriptor(), &request).unwrap().0.is_none()).count());
        assert_eq!((registered, server.registry.usage().buffers), (300, 300));
    }

    #[test]
    fn a_buffer_reaches_the_daemon() {
        let (_directory, server, _listener, path) = listener();
        let path = path.as_str();
        let mut buffer = Buffer::memfd(10_000).unwrap();
        let request = Register { fd: -1, len: 10_000, ..Register::default() };
        let (refused, answer) = register(path, buffer.descriptor(), &request).unwrap();
        assert_eq!((refused, answer.reason), (Some(Errno::INVAL), Reason::NotAllocated.code()));
        buffer.fill(7);
        let (refused, answer) = register(path, buffer.descriptor(), &request).unwrap();
        assert_eq!((refused, answer.route), (None, Route::Host.code()));
        let registered = server.registry.lookup(std::process::id(), answer.buffer).unwrap();
        let mut byte = [0];
        registered.region.read_at(9_999, &mut byte).unwrap();
        assert_eq!(byte, [7]);
        let (refused, answer) = register(path, buffer.descriptor(), &Register { len: 10_001, ..request.clone() }).unwrap();
        assert_eq!((refused, answer.reason), (Some(Errno::INVAL), Reason::TooSmall.code()));
        assert_eq!(register("", buffer.descriptor(), &request).unwrap_err(), Errno::NOENT);
    }
}
