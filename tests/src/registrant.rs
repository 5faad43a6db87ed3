//! What clients of a registry do, and tests of it as well: memory of their own, and the messages of
//! the registration socket.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use gpunvme_abi::{Command, Message, Register};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes that are registered.
pub const LEN: u64 = 64 << 10;

/// A sealed memfd of `len` bytes.
pub fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// A connection to a registration socket.
pub fn connect(path: &Path) -> OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// Sends one message with descriptors.
pub fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

/// Receives one message.
pub fn receive(socket: &OwnedFd) -> Vec<u8> {
    let mut bytes = [0; 256];
    let (_, len) = rustix::net::recv(socket, &mut bytes, rustix::net::RecvFlags::empty()).unwrap();
    bytes[..len].to_vec()
}

/// Registers [`LEN`] bytes of a descriptor over a registration socket: the status, and the answer.
pub fn register_over(socket: &OwnedFd, fd: BorrowedFd) -> (i32, Register) {
    let message = Message { request: Command::Register.request(0), status: 0 };
    let register = Register { fd: -1, len: LEN, ..Register::default() };
    send(socket, &[message.as_bytes(), register.as_bytes()].concat(), &[fd]);
    let answer = receive(socket);
    let (message, rest) = Message::read_from_prefix(&answer).unwrap();
    (message.status, Register::read_from_bytes(rest).unwrap_or_default())
}
