//! Attacks on registration: descriptors that cannot be closed, and more of everything than the
//! limits allow.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::thread;
use std::time::{Duration, Instant};

use gpunvme_abi::{Command, Message, Reason, Register, Segment, Transfer, Unregister, get_text};
use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack, STRANGER};
use gpunvme_tests::direct::{Buffer, call, call_plain, info, memfd};
use gpunvme_tests::mounted::{text, unmount_unless_busy};
use gpunvme_tests::observe::{Figures, Victim};
use gpunvme_tests::{attacks, needs_mount};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, sockopt,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::stubborn::Stubborn;

pub const ATTACKS: &[(&str, Attack)] =
    attacks![send_what_cannot_be_closed, send_a_stubborn_file, take_all_buffers, register_once, fill_holes_without_memory];

/// How long a call of a victim may take while others attack. An attack that works makes it minutes.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to a mount's registration socket, where it is listened to.
pub fn try_connect(path: &str, patience: Duration) -> rustix::io::Result<OwnedFd> {
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
    for what in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(&socket, what, Some(patience))?;
    }
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn connect(path: &str) -> OwnedFd {
    try_connect(path, PATIENCE).expect("the daemon listens")
}

pub fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

pub fn message(command: Command, argument: &[u8]) -> Vec<u8> {
    [Message { request: command.request(0), status: 0 }.as_bytes(), argument].concat()
}

/// Registers a page over the socket, and unregisters it.
fn register_over(path: &str, memory: &File) {
    let socket = connect(path);
    let answer = |socket: &OwnedFd| {
        let mut bytes = [0; 256];
        let (_, len) = rustix::net::recv(socket, &mut bytes, RecvFlags::empty()).expect("an answer in time");
        bytes[..len].to_vec()
    };
    let register = Register { fd: -1, len: 4096, ..Register::default() };
    send(&socket, &message(Command::Register, register.as_bytes()), &[memory.as_fd()]).unwrap();
    let bytes = answer(&socket);
    let (status, rest) = Message::read_from_prefix(&bytes).expect("the connection is still there");
    assert_eq!(status.status, 0);
    let Register { buffer, .. } = Register::read_from_bytes(rest).unwrap();
    let unregister = message(Command::Unregister, Unregister { buffer, ..Unregister::default() }.as_bytes());
    rustix::net::send(&socket, &unregister, SendFlags::NOSIGNAL).unwrap();
    assert_eq!(Message::read_from_prefix(&answer(&socket)).unwrap().0.status, 0);
}

/// A socket that cannot be closed before its peer, the second one, has read what was sent.
fn lingering(listener: &TcpListener) -> (OwnedFd, TcpStream) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    sockopt::set_socket_send_buffer_size(&socket, 4096).unwrap();
    rustix::net::connect(&socket, &listener.local_addr().unwrap()).unwrap();
    sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
    let peer = listener.accept().unwrap().0;
    while rustix::net::send(&socket, &[0; 65536], SendFlags::DONTWAIT).is_ok() {}
    (socket, peer)
}

/// Sends sockets that linger, each the last of its kind: more of them with a message than it may
/// have, and with messages that are never received, because the one before them ends their
/// connection.
fn send_what_cannot_be_closed(attacker: &mut Attacker) {
    const EACH: usize = 45;
    let path = get_text(&info(attacker.root()).socket);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    sockopt::set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let mut peers = Vec::new();
    let mut several = |count: usize| {
        let (sockets, theirs): (Vec<_>, Vec<_>) = (0..count).map(|_| lingering(&listener)).unzip();
        peers.extend(theirs);
        sockets
    };
    let register = message(Command::Register, Register { fd: -1, len: 4096, ..Register::default() }.as_bytes());
    // It would be fine if the daemon no longer listened to this user, now or later.
    let connect = || try_connect(&path, Duration::from_millis(100));
    // Where the daemon was faster, or the message was not sent, it is this process that cannot
    // close them.
    let let_go = |sockets: Vec<OwnedFd>| thread::spawn(move || drop(sockets));
    let mut let_gone = Vec::new();
    for socket in (0..EACH).filter_map(|_| connect().ok()) {
        let sockets = several(4);
        let fds: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        let _ = send(&socket, &register, &fds);
        let_gone.push(let_go(sockets));
    }
    for socket in (0..EACH).filter_map(|_| connect().ok()) {
        let _ = rustix::net::send(&socket, b"", SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        for _ in 0..3 {
            let sockets = several(1);
            let _ = send(&socket, b"no message", &[sockets[0].as_fd()]);
            let_gone.push(let_go(sockets));
        }
    }
    attacker.say("sent");
    attacker.wait_for("go on");
    drop(peers);
    let_gone.into_iter().for_each(|thread| thread.join().unwrap());
}

/// The daemon of a mount under attack serves others over the socket and by ioctl, and at the end it
/// can be unmounted as usual.
#[test]
fn descriptors_that_cannot_be_closed_hold_up_neither_others_nor_the_end() {
    needs_mount!();
    let volume = attack::volume("");
    let root = File::open(volume.root()).unwrap();
    let path = get_text(&info(&root).socket);
    let memory = memfd(4096);
    register_over(&path, &memory);
    let before = Figures::of(volume.daemon());

    let mut attack = RunningAttack::begin(&volume, NOBODY, "send_what_cannot_be_closed");
    let victim = Victim::begin({
        let (path, memory, root) = (path.clone(), memory.try_clone().unwrap(), root.try_clone().unwrap());
        move || {
            register_over(&path, &memory);
            Buffer::new(&root, 4096).unregister(&root).unwrap();
        }
    });
    attack.wait_for("sent");
    let mut other = RunningAttack::begin(&volume, STRANGER, "register_once");
    other.wait_for("registered");
    other.end();
    let calls = victim.count();
    let since = Instant::now();
    while victim.count() < calls + 10 {
        assert!(since.elapsed() < PATIENCE, "root's registrations stall");
        thread::sleep(Duration::from_millis(5));
    }
    let longest = victim.end();
    assert!(longest < PATIENCE, "a registration took {longest:?}");
    let after = Figures::of(volume.daemon());
    // A thread that waits in close(2) has the descriptor out of the table.
    let is_stuck = after.descriptors > before.descriptors || after.threads > before.threads;
    assert!(is_stuck, "nothing was stuck: {before:?} became {after:?}");
    assert!(after.threads <= before.threads + 20, "{before:?} became {after:?}");
    assert!(after.descriptors <= before.descriptors + 500, "{before:?} became {after:?}");

    drop(root);
    let since = Instant::now();
    volume.unmount();
    assert!(since.elapsed() < Duration::from_secs(30), "unmounting took {:?}", since.elapsed());
    attack.say("go on");
    attack.end();
}

/// Sends a file that cannot be closed, over and over. This process cannot close it either.
fn send_a_stubborn_file(attacker: &mut Attacker) {
    let path = get_text(&info(attacker.root()).socket);
    let file = File::options().read(true).write(true).open(attacker.hear()).unwrap();
    let register = message(Command::Register, Register { fd: -1, len: 4096, ..Register::default() }.as_bytes());
    for socket in (0..20).filter_map(|_| try_connect(&path, Duration::from_millis(100)).ok()) {
        let _ = send(&socket, &register, &[file.as_fd()]); // the daemon may refuse to listen by now
    }
    attacker.say("sent");
    attacker.wait_for("go on");
}

/// Not even the end of its process closes such a file; what the daemon has to do at the end it does
/// before.
#[test]
fn a_file_that_nobody_can_close_keeps_neither_the_volume_nor_the_device() {
    needs_mount!();
    let folder = gpunvme_tests::scratch_dir();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let stubborn = Stubborn::mount(&folder.path().join("mnt"));
    let volume = attack::volume("");
    let mut attack = RunningAttack::begin(&volume, NOBODY, "send_a_stubborn_file");
    attack.say(stubborn.file().display());
    attack.wait_for("sent");
    let since = Instant::now();
    while stubborn.held() == 0 {
        assert!(since.elapsed() < PATIENCE, "the daemon does not close what it was sent");
        thread::sleep(Duration::from_millis(5));
    }
    let root = File::open(volume.root()).unwrap();
    Buffer::new(&root, 4096).unregister(&root).unwrap();
    register_over(&get_text(&info(&root).socket), &memfd(4096));
    drop(root);

    let output = unmount_unless_busy(&volume.root());
    assert!(output.status.success(), "{}", text(&output));
    // It takes the device, for which it waits as long as a daemon that ends may take.
    volume.image().check();
    assert!(stubborn.held() > 0, "nothing kept the daemon");
    stubborn.give_in();
    attack.say("go on");
    attack.end();
    volume.unmount();
}

/// Registers a page again and again until it is refused, and says how often it was not, and why
/// then.
fn take_all_buffers(attacker: &mut Attacker) {
    let root = attacker.root();
    let memory = memfd(4096);
    let mut count = 0;
    let reason = loop {
        let mut register = Register { fd: memory.as_raw_fd(), len: 4096, ..Register::default() };
        if call_plain(&root, Command::Register, &mut register).is_err() {
            break Reason::from_code(register.reason);
        }
        count += 1;
    };
    attacker.say(format!("{count} {}", reason.map_or("?", Reason::name)));
    attacker.wait_for("go on");
}

/// What any user does.
fn register_once(attacker: &mut Attacker) {
    let root = attacker.root();
    Buffer::new(&root, 4096).unregister(&root).unwrap();
    register_over(&get_text(&info(&root).socket), &memfd(4096));
    attacker.say("registered");
}

#[test]
fn processes_of_one_user_cannot_take_all_buffers() {
    needs_mount!();
    let volume = attack::volume("");
    let root = File::open(volume.root()).unwrap();
    let mut attacks: Vec<_> = (0..3).map(|_| RunningAttack::begin(&volume, NOBODY, "take_all_buffers")).collect();
    let said: Vec<_> = attacks.iter_mut().map(RunningAttack::hear).collect();
    assert!(said.iter().any(|said| said.ends_with("user-limit")), "{said:?}");
    let mut other = RunningAttack::begin(&volume, STRANGER, "register_once");
    other.wait_for("registered");
    other.end();
    Buffer::new(&root, 4096).unregister(&root).unwrap();
    for attack in &mut attacks {
        attack.say("go on");
    }
    attacks.into_iter().for_each(RunningAttack::end);
    Buffer::new(&root, 4096).unregister(&root).unwrap();
}

/// Has the daemon write zeroes where no memory is: into a memfd of which no page was ever touched,
/// and one whose pages were taken out again.
fn fill_holes_without_memory(attacker: &mut Attacker) {
    const LEN: u64 = 256 << 20;
    let file = File::open(attacker.path("holes")).unwrap();
    let read = |buffer: u64| {
        let mut transfer = Transfer { buffer, descriptor: file.as_raw_fd(), segments: 1, ..Transfer::default() };
        let mut segments = [Segment { file_offset: 0, buffer_offset: 0, len: LEN }];
        call(&file, Command::Read, &mut transfer, &mut segments).map(|()| transfer.bytes)
    };
    let sparse = File::from(rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap());
    sparse.set_len(LEN).unwrap();
    rustix::fs::fcntl_add_seals(&sparse, SealFlags::SHRINK).unwrap();
    let mut register = Register { fd: sparse.as_raw_fd(), len: LEN, ..Register::default() };
    let registered = call_plain(&file, Command::Register, &mut register);
    if registered.is_ok() {
        attacker.say(format!("registered, and read {:?} bytes", read(register.buffer).ok()));
        attacker.wait_for("go on");
    }
    assert_eq!((registered.unwrap_err().raw_os_error(), register.reason), (Some(libc::EINVAL), Reason::NotAllocated.code()));

    let buffer = Buffer::new(&file, LEN);
    rustix::fs::fallocate(&buffer.memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, LEN).unwrap();
    assert_eq!(read(buffer.id).unwrap_err().raw_os_error(), Some(libc::EFAULT));
    // What its owner pays for is filled.
    rustix::fs::fallocate(&buffer.memory, FallocateFlags::empty(), 0, LEN).unwrap();
    assert_eq!(read(buffer.id).unwrap(), LEN);
    buffer.unregister(&file).unwrap();
    attacker.say("refused");
    attacker.wait_for("go on");
}

#[test]
fn holes_take_no_memory_of_the_daemons() {
    needs_mount!();
    let volume = attack::volume("");
    File::create(volume.path("holes")).unwrap().set_len(256 << 20).unwrap();
    let before = Figures::of(volume.daemon());
    let mut attack = RunningAttack::begin(&volume, NOBODY, "fill_holes_without_memory");
    let said = attack.hear();
    let after = Figures::of(volume.daemon());
    assert_eq!(said, "refused", "{before:?} became {after:?}");
    attack.say("go on");
    attack.end();
    assert!(after.shared + after.anonymous < before.shared + before.anonymous + (64 << 20), "{before:?} became {after:?}");
}
