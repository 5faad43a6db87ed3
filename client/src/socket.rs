//! The application's end of the registration socket (`docs/ioctl.md`): one datagram out with the descriptor, one back.

use gpunvme_gpupath::abi::{Command, Message, Register};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use zerocopy::{FromBytes, IntoBytes};

/// Registers a descriptor: the daemon's errno (0 where it took it) and answer.
///
/// # Errors
/// What kept the message from being exchanged.
pub(crate) fn register(path: &str, memory: BorrowedFd<'_>, request: &Register) -> Result<(Errno, Register), Errno> {
    if path.is_empty() {
        return Err(Errno::NOENT);
    }
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let message = Message { request: Command::Register.request(0), status: 0 };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [memory];
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)), "the space was made for one descriptor");
    let parts = [IoSlice::new(message.as_bytes()), IoSlice::new(request.as_bytes())];
    rustix::net::sendmsg(&socket, &parts, &mut ancillary, SendFlags::NOSIGNAL)?;
    let mut answer = [0u8; size_of::<Message>() + size_of::<Register>()];
    let (_, len) = rustix::net::recv(&socket, &mut answer, RecvFlags::empty())?;
    let (message, register) = Message::read_from_prefix(&answer[..len]).map_err(|_| Errno::CONNRESET)?;
    Ok((Errno::from_raw_os_error(message.status), Register::read_from_bytes(register).unwrap_or_default()))
}
