//! Ownership of buffers, between real processes: the registry is in this one, and the program
//! `registrant` is its clients.

use gpunvme_abi::{
    Claim, Command, Direction, Message, Moved, Reason, Register, RegisterFlags, Request, Route, Segment, Stats, Transfer,
    TransferRequest, Unregister, decode,
};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_gpupath::admission::{Admitted, OpenFile};
use gpunvme_gpupath::outcome::Outcome;
use gpunvme_gpupath::registry::{Amounts, Caller, Limits, Registry, RegistryError};
use gpunvme_gpupath::server::Server;
use gpunvme_gpupath::socket::Listener;
use gpunvme_tests::registrant::{LEN, connect, memfd, receive, register_over, send};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::net::SendFlags;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

fn registry(limits: Limits) -> Registry {
    Registry::new(MemoryDevice::new(1 << 20), limits).unwrap()
}

/// A thread of root's that calls.
fn by(thread: u32) -> Caller {
    Caller { thread, user: 0 }
}

fn request(fd: i32) -> Register {
    Register { fd, len: LEN, ..Register::default() }
}

/// Another process, which does on demand what an application does.
struct Client {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Client {
    fn start() -> Client {
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_registrant"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Client { child, stdin, stdout }
    }

    /// Sends a line, and returns the numbers in the answer.
    fn ask(&mut self, line: &str) -> Vec<i64> {
        writeln!(self.stdin, "{line}").unwrap();
        let mut answer = String::new();
        assert_ne!(self.stdout.read_line(&mut answer).unwrap(), 0, "the client ended");
        answer.split_whitespace().map(|number| number.parse().unwrap()).collect()
    }

    /// Has it make a sealed memfd on its main thread or on a new one: thread id and descriptor.
    fn memfd(&mut self, on: &str) -> (u32, i32) {
        let answer = self.ask(&format!("memfd {on}"));
        (answer[0] as u32, answer[1] as i32)
    }

    fn id(&self) -> u32 {
        self.child.id()
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill(); // it may have ended by itself
        let _ = self.child.wait();
    }
}

fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited 10 s for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn reason<T>(result: Result<T, RegistryError>) -> (Reason, i32) {
    let error = result.err().expect("it should have been refused");
    (error.reason(), error.errno())
}

#[test]
fn any_thread_of_the_owner_may_use_a_buffer() {
    let registry = registry(Limits::default());
    let mut client = Client::start();
    let (thread, fd) = client.memfd("thread");
    assert_ne!(thread, client.id());
    let buffer = registry.register(by(thread), &request(fd)).unwrap();
    assert_eq!((buffer.route, buffer.reason, buffer.region.len() as u64), (Route::Host, Reason::NotGpuMemory, LEN));
    let (other, _) = client.memfd("thread");
    for caller in [thread, other, client.id()] {
        assert!(Arc::ptr_eq(&registry.lookup(caller, buffer.id).unwrap(), &buffer));
    }
    registry.unregister(other, buffer.id).unwrap();
    assert_eq!(reason(registry.lookup(thread, buffer.id)), (Reason::NoSuchBuffer, libc::ENOENT));
    assert_eq!(registry.usage(), Default::default());
}

#[test]
fn nobody_else_may_use_a_buffer() {
    let registry = registry(Limits::default());
    let (mut owner, mut other) = (Client::start(), Client::start());
    let (thread, fd) = owner.memfd("main");
    let id = registry.register(by(thread), &request(fd)).unwrap().id;
    let (stranger, fd) = other.memfd("thread");
    let strangers_id = registry.register(by(stranger), &request(fd)).unwrap().id;
    for caller in [stranger, other.id(), std::process::id(), 1, 0, u32::MAX] {
        assert_eq!(reason(registry.lookup(caller, id)), (Reason::NoSuchBuffer, libc::ENOENT));
        assert_eq!(reason(registry.unregister(caller, id)), (Reason::NoSuchBuffer, libc::ENOENT));
    }
    assert_eq!(reason(registry.lookup(thread, strangers_id)).0, Reason::NoSuchBuffer);
    assert_eq!(reason(registry.lookup(thread, 0)).0, Reason::NoSuchBuffer);
    assert_eq!(registry.usage().processes, 2);
    registry.lookup(thread, id).unwrap();
}

#[test]
fn the_buffer_is_the_clients_memory() {
    let registry = registry(Limits::default());
    let fd = memfd(LEN, SealFlags::SHRINK);
    let buffer = registry.register(by(std::process::id()), &request(fd.as_raw_fd())).unwrap();
    buffer.region.write_at(4000, b"from the daemon").unwrap();
    let mut bytes = [0; 15];
    rustix::io::pread(&fd, &mut bytes, 4000).unwrap();
    assert_eq!(&bytes, b"from the daemon");
}

#[test]
fn buffers_go_with_their_process() {
    let registry = registry(Limits::default());
    let (mut dies, mut lives) = (Client::start(), Client::start());
    let (thread, fd) = dies.memfd("thread");
    let held = registry.register(by(thread), &request(fd)).unwrap();
    registry.register(by(thread), &request(fd)).unwrap();
    let (survivor, fd) = lives.memfd("main");
    let kept = registry.register(by(survivor), &request(fd)).unwrap();
    assert_eq!(registry.usage().buffers, 3);
    dies.kill();
    wait_for("the buffers to go", || registry.usage().buffers == 1);
    assert_eq!(registry.usage().processes, 1);
    assert_eq!(reason(registry.lookup(thread, held.id)).0, Reason::NoSuchBuffer);
    registry.lookup(survivor, kept.id).unwrap();
    // A transfer in flight would hold the buffer like this, and its memory stays.
    held.region.write_at(0, b"still mapped").unwrap();
}

#[test]
fn a_buffer_does_not_outlive_its_owner_even_unobserved() {
    let registry = registry(Limits::default());
    let mut client = Client::start();
    let (thread, fd) = client.memfd("main");
    let id = registry.register(by(thread), &request(fd)).unwrap().id;
    client.kill();
    // Whether or not the watcher has seen it by now.
    assert_eq!(reason(registry.lookup(thread, id)).0, Reason::NoSuchBuffer);
    assert!(matches!(registry.register(by(thread), &request(fd)), Err(RegistryError::UnknownCaller(_))));
}

#[test]
fn what_is_no_buffer_is_refused() {
    let registry = registry(Limits::default());
    let me = std::process::id();
    let refused = |fd: BorrowedFd, len| reason(registry.register(by(me), &Register { len, ..request(fd.as_raw_fd()) }));
    assert_eq!(refused(memfd(LEN, SealFlags::GROW).as_fd(), LEN), (Reason::NotSealed, libc::EINVAL));
    assert_eq!(refused(memfd(LEN - 1, SealFlags::SHRINK).as_fd(), LEN), (Reason::TooSmall, libc::EINVAL));
    assert_eq!(refused(memfd(LEN, SealFlags::SHRINK).as_fd(), u64::MAX >> 1), (Reason::TooSmall, libc::EINVAL));
    assert_eq!(refused(memfd(LEN, SealFlags::SHRINK | SealFlags::WRITE).as_fd(), LEN), (Reason::NotWritable, libc::EACCES));
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN).unwrap();
    assert_eq!(refused(file.as_fd(), LEN).0, if on_tmpfs(&file) { Reason::NotSealed } else { Reason::NotABuffer });
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    assert_eq!(refused(pipe.as_fd(), LEN), (Reason::NotABuffer, libc::EINVAL));
    let directory = std::fs::File::open("/").unwrap();
    assert_eq!(refused(directory.as_fd(), LEN), (Reason::NotABuffer, libc::EINVAL));
    let read_only = memfd(LEN, SealFlags::SHRINK);
    let read_only = std::fs::File::open(format!("/proc/self/fd/{}", read_only.as_raw_fd())).unwrap();
    assert_eq!(refused(read_only.as_fd(), LEN), (Reason::NotWritable, libc::EACCES));
    // Where the kernel has huge pages at all; none need be free for it.
    if let Ok(huge) = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB) {
        rustix::fs::ftruncate(&huge, 2 << 20).unwrap();
        rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
        assert_eq!(refused(huge.as_fd(), LEN), (Reason::NotABuffer, libc::EINVAL));
    }
    assert_eq!(reason(registry.register(by(me), &request(987_654))), (Reason::NotABuffer, libc::EBADF));
    assert_eq!(reason(registry.register(by(me), &request(-1))), (Reason::NotABuffer, libc::EBADF));
    assert_eq!(reason(registry.register(by(0), &request(0))), (Reason::FdNotReachable, libc::ESRCH));
    assert_eq!(registry.usage(), Default::default());
}

fn on_tmpfs(file: &std::fs::File) -> bool {
    rustix::fs::fstatfs(file).unwrap().f_type == 0x0102_1994 // TMPFS_MAGIC
}

#[test]
fn a_refused_descriptor_is_closed() {
    let registry = registry(Limits::default());
    let (read, write) = rustix::pipe::pipe().unwrap();
    let number = write.as_raw_fd();
    assert_eq!(reason(registry.register(by(std::process::id()), &request(number))).0, Reason::NotABuffer);
    drop(write);
    // End of file arrives once the daemon's copy is closed too.
    let mut byte = [0];
    assert_eq!(rustix::io::read(&read, &mut byte).unwrap(), 0);
}

#[test]
fn limits_hold_for_a_process_and_for_all() {
    let amounts = |buffers| Amounts { buffers, bytes: (buffers + 1) * LEN, host_bytes: u64::MAX };
    let limits = Limits { process: amounts(2), all: amounts(3) };
    let registry = registry(limits);
    let (mut one, mut two) = (Client::start(), Client::start());
    let (one, two) = (one.memfd("main"), two.memfd("main"));
    let ids: Vec<_> = (0..2).map(|_| registry.register(by(one.0), &request(one.1)).unwrap().id).collect();
    assert_eq!(reason(registry.register(by(one.0), &request(one.1))), (Reason::ProcessLimit, libc::ENOSPC));
    registry.register(by(two.0), &request(two.1)).unwrap();
    assert_eq!(reason(registry.register(by(two.0), &request(two.1))), (Reason::TotalLimit, libc::ENOSPC));
    registry.unregister(one.0, ids[0]).unwrap();
    assert_eq!(registry.usage().bytes, 2 * LEN);
    registry.register(by(two.0), &request(two.1)).unwrap();
}

#[test]
fn bytes_are_limited_too() {
    let me = std::process::id();
    let fd = memfd(4 * LEN, SealFlags::SHRINK);
    let of = |len| Register { len, ..request(fd.as_raw_fd()) };
    let amounts = |bytes| Amounts { buffers: 8, bytes, host_bytes: u64::MAX };
    let registry_of = |process, all| registry(Limits { process: amounts(process), all: amounts(all) });
    assert_eq!(reason(registry_of(3 * LEN, 8 * LEN).register(by(me), &of(4 * LEN))).0, Reason::ProcessLimit);
    assert_eq!(reason(registry_of(8 * LEN, 3 * LEN).register(by(me), &of(4 * LEN))).0, Reason::TotalLimit);
    registry_of(4 * LEN, 4 * LEN).register(by(me), &of(4 * LEN)).unwrap();
}

/// An eighth is root's, and a user leaves half of the rest to those who come later: of buffers, of
/// bytes, and of bytes of host memory.
#[test]
fn no_user_locks_the_others_out() {
    const UNLIMITED: Amounts = Amounts { buffers: u64::MAX, bytes: u64::MAX, host_bytes: u64::MAX };
    register_as_many_users(Amounts { buffers: 8, ..UNLIMITED }, 1);
    register_as_many_users(Amounts { bytes: 10 * LEN, ..UNLIMITED }, 3);
    register_as_many_users(Amounts { host_bytes: 10 * LEN, ..UNLIMITED }, 3);
}

/// `of_root`: how many are left to root.
fn register_as_many_users(all: Amounts, of_root: usize) {
    let process = Amounts { buffers: 100, bytes: u64::MAX, host_bytes: u64::MAX };
    let registry = registry(Limits { process, all });
    let fd = memfd(LEN, SealFlags::SHRINK);
    let mut clients: Vec<_> = (0..5).map(|_| Client::start()).collect();
    let mut register = |client: usize, user| {
        let (thread, fd) = clients[client].memfd("main");
        registry.register(Caller { thread, user }, &request(fd))
    };
    // A process more does not give a user more.
    let held: Vec<_> = (0..4).map(|client| register(client % 2, 1000).unwrap()).collect();
    assert_eq!(reason(register(2, 1000)), (Reason::UserLimit, libc::ENOSPC));
    register(3, 1001).unwrap();
    register(3, 1001).unwrap();
    assert_eq!(reason(register(3, 1001)).0, Reason::UserLimit);
    register(4, 1002).unwrap();
    assert_eq!(reason(register(4, 1003)).0, Reason::UserLimit);
    for _ in 0..of_root {
        registry.register(by(std::process::id()), &request(fd.as_raw_fd())).unwrap();
    }
    assert_eq!(reason(registry.register(by(std::process::id()), &request(fd.as_raw_fd()))).0, Reason::TotalLimit);
    registry.unregister(clients[0].id(), held[0].id).unwrap();
}

/// A transfer in flight holds a buffer that is unregistered: nothing begins on it, and it counts
/// until the transfer is over.
#[test]
fn what_is_unregistered_counts_until_it_is_gone() {
    let amounts = Amounts { buffers: 1, bytes: u64::MAX, host_bytes: u64::MAX };
    let registry = registry(Limits { process: amounts, all: amounts });
    let (fd, me) = (memfd(LEN, SealFlags::SHRINK), std::process::id());
    let in_flight = registry.register(by(me), &request(fd.as_raw_fd())).unwrap();
    assert!(!in_flight.is_revoked());
    registry.unregister(me, in_flight.id).unwrap();
    assert!(in_flight.is_revoked());
    assert_eq!(reason(registry.register(by(me), &request(fd.as_raw_fd()))).0, Reason::ProcessLimit);
    drop(in_flight);
    registry.register(by(me), &request(fd.as_raw_fd())).unwrap();
}

/// Pages that do not exist would come out of the daemon's memory when a transfer reaches them.
#[test]
fn memory_is_there_before_it_is_registered() {
    let registry = registry(Limits::default());
    let me = std::process::id();
    let sparse = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sparse, 1 << 40).unwrap();
    rustix::fs::fcntl_add_seals(&sparse, SealFlags::SHRINK).unwrap();
    let of = |len| Register { len, ..request(sparse.as_raw_fd()) };
    assert_eq!(reason(registry.register(by(me), &of(1 << 40))), (Reason::NotAllocated, libc::EINVAL));
    rustix::fs::fallocate(&sparse, FallocateFlags::empty(), 0, LEN).unwrap();
    assert_eq!(reason(registry.register(by(me), &of(LEN + 1))).0, Reason::NotAllocated);
    registry.register(by(me), &of(LEN)).unwrap();
}

#[test]
fn many_threads_register_at_once() {
    let registry = registry(Limits::default());
    let me = std::process::id();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let fd = memfd(LEN, SealFlags::SHRINK);
                let thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
                for _ in 0..50 {
                    let buffer = registry.register(by(thread), &request(fd.as_raw_fd())).unwrap();
                    registry.lookup(me, buffer.id).unwrap();
                    registry.unregister(thread, buffer.id).unwrap();
                    assert_eq!(reason(registry.unregister(thread, buffer.id)).0, Reason::NoSuchBuffer);
                }
            });
        }
    });
    assert_eq!(registry.usage(), Default::default());
}

struct Service {
    server: Arc<Server>,
    listener: Listener,
    _directory: tempfile::TempDir,
}

fn service() -> Service {
    let directory = tempfile::tempdir().unwrap();
    let server = Arc::new(Server::new(registry(Limits::default())).unwrap());
    let listener = Listener::bind(&directory.path().join("socket"), Mode::from_raw_mode(0o600), server.clone()).unwrap();
    Service { server, listener, _directory: directory }
}

#[test]
fn a_descriptor_sent_belongs_to_its_sender() {
    let service = service();
    let mut client = Client::start();
    let answer = client.ask(&format!("connect {}", service.listener.path().display()));
    assert_eq!(answer[0], 0);
    let id = answer[1] as u64;
    let (thread, _) = client.memfd("thread");
    let registry = &service.server.registry;
    registry.lookup(thread, id).unwrap();
    assert_eq!(reason(registry.lookup(std::process::id(), id)).0, Reason::NoSuchBuffer);
    client.kill();
    wait_for("the buffer to go", || registry.usage().buffers == 0);
}

#[test]
fn the_socket_refuses_what_the_ioctl_refuses() {
    let service = service();
    let socket = connect(service.listener.path());
    let (status, reply) = register_over(&socket, memfd(LEN, SealFlags::GROW).as_fd());
    assert_eq!((status, reply.reason), (libc::EINVAL, Reason::NotSealed.code()));
    let (status, reply) = register_over(&socket, memfd(LEN, SealFlags::SHRINK).as_fd());
    assert_eq!((status, reply.route), (0, Route::Host.code()));

    let fd = memfd(LEN, SealFlags::SHRINK);
    let status_of = |request: u32, argument: &[u8], fds: &[BorrowedFd]| {
        send(&socket, &[Message { request, status: 0 }.as_bytes(), argument].concat(), fds);
        Message::read_from_prefix(&receive(&socket)).unwrap().0.status
    };
    let register = Register { fd: -1, len: LEN, ..Register::default() };
    assert_eq!(status_of(Command::Register.request(0), register.as_bytes(), &[]), libc::EBADF);
    assert_eq!(status_of(Command::Register.request(0), register.as_bytes(), &[fd.as_fd(), fd.as_fd()]), libc::EBADF);
    assert_eq!(status_of(Command::Register.request(0), &[0; 3], &[fd.as_fd()]), libc::EINVAL);
    assert_eq!(status_of(Command::Register.request(0), &[0; 200], &[fd.as_fd()]), libc::EINVAL);
    assert_eq!(status_of(0, &[], &[fd.as_fd()]), libc::ENOTTY);
    assert_eq!(status_of(Command::Stats.request(0), Stats::default().as_bytes(), &[]), libc::ENOTTY);
    let unregister = |buffer| Unregister { buffer, ..Unregister::default() };
    assert_eq!(status_of(Command::Unregister.request(0), unregister(reply.buffer).as_bytes(), &[]), 0);
    assert_eq!(status_of(Command::Unregister.request(0), unregister(reply.buffer).as_bytes(), &[]), libc::ENOENT);
    assert_eq!(service.server.registry.usage().buffers, 0);
}

/// Clients that send rubbish, never read, or hold hundreds of connections: the next one is served.
#[test]
fn hostile_clients_do_not_wedge_the_socket() {
    let service = service();
    let rude = connect(service.listener.path());
    send(&rude, b"abc", &[memfd(LEN, SealFlags::SHRINK).as_fd()]);
    let deaf = connect(service.listener.path());
    let rubbish = [0xff; 64];
    while rustix::net::send(&deaf, &rubbish, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok() {}
    let idle: Vec<_> = (0..300).map(|_| connect(service.listener.path())).collect();
    let socket = connect(service.listener.path());
    let (status, _) = register_over(&socket, memfd(LEN, SealFlags::SHRINK).as_fd());
    assert_eq!(status, 0);
    drop(idle);
    let path = service.listener.path().to_owned();
    drop(service);
    assert!(!path.exists());
}

/// Keeps a transfer for the test to answer.
#[derive(Clone, Default)]
struct Keeping(Arc<Mutex<Option<Admitted>>>);

impl OpenFile for Keeping {
    fn ino(&self) -> u64 {
        2
    }

    fn transfer(&self, admitted: Admitted) {
        *self.0.lock().unwrap() = Some(admitted);
    }
}

/// The checks and answers around a transfer.
#[test]
fn transfers_are_admitted_and_answered() {
    let server = Arc::new(Server::new(registry(Limits::default())).unwrap());
    let open = std::fs::File::open("/proc/self/exe").unwrap();
    let ino = open.metadata().unwrap().ino();
    server.mounted(open.metadata().unwrap().dev());
    let fd = memfd(LEN, SealFlags::SHRINK);
    let me = std::process::id();
    let reply = server.register(by(me), &Register { flags: RegisterFlags::STAGING.bits(), ..request(fd.as_raw_fd()) });
    let registered = Register::read_from_bytes(&reply.data).unwrap();
    assert_eq!((reply.result, registered.route), (0, Route::Bounce.code()));

    let transfer = |buffer, flags: u32, segments: &[Segment]| -> (TransferRequest, Claim) {
        let (descriptor, segment_count) = (open.as_raw_fd(), segments.len() as u32);
        let header = Transfer { buffer, flags, descriptor, segments: segment_count, ..Transfer::default() };
        match decode(Command::Read.request(segments.len()), &[header.as_bytes(), segments.as_bytes()].concat()).unwrap() {
            Request::Read(request, claim) => (request, claim),
            other => panic!("{other:?}"),
        }
    };
    let segment = |buffer_offset, len| Segment { file_offset: 0, buffer_offset, len };
    let file = Keeping::default();
    let transferred = |(request, claim): &(TransferRequest, Claim), outcome: Option<Outcome>| {
        let (answered, answer) = channel();
        let (transfer, opened) = ((Direction::Read, request.clone(), *claim), file.clone());
        server.transfer(by(me), transfer, ino, |_| opened, |task| task(), move |reply| answered.send(reply).unwrap());
        // A thread of the user's quota looks at the descriptor.
        const PATIENCE: Duration = Duration::from_secs(20);
        if let Some(outcome) = outcome {
            let since = Instant::now();
            let admitted = std::iter::from_fn(|| Some(file.0.lock().unwrap().take())).find_map(|admitted| {
                assert!(since.elapsed() < PATIENCE, "it is not admitted");
                admitted
            });
            admitted.expect("it is looked for until then").finish(&outcome);
        }
        let answer = answer.recv_timeout(PATIENCE).expect("it is answered");
        assert!(file.0.lock().unwrap().is_none(), "it was refused");
        answer
    };
    let refused = |request: &(TransferRequest, Claim)| {
        let reply = transferred(request, None);
        let header = Transfer::read_from_bytes(&reply.data).unwrap();
        (reply.result, Reason::from_code(header.reason).unwrap(), header.failed_segment)
    };
    let id = registered.buffer;
    assert_eq!(refused(&transfer(id + 1, 0, &[])), (-libc::ENOENT, Reason::NoSuchBuffer, u32::MAX));
    let out = transfer(id, 0, &[segment(0, LEN), segment(1, LEN)]);
    assert_eq!(refused(&out), (-libc::EINVAL, Reason::OutsideBuffer, 1));
    assert_eq!(refused(&transfer(id, 1, &[])), (-libc::EOPNOTSUPP, Reason::RouteNotAvailable, u32::MAX));

    let request = transfer(id, 2, &[segment(0, 100)]);
    let buffer = server.registry.lookup(me, id).unwrap();
    let finished = |outcome: Outcome| {
        let reply = transferred(&request, Some(outcome));
        (reply.result, Transfer::read_from_bytes(&reply.data).unwrap())
    };
    let (result, header) = finished(Outcome::moved(&buffer, 64, 32, 4));
    assert_eq!((result, header.bytes, header.bounce, header.hole, header.edge), (0, 100, 64, 32, 4));
    assert_eq!((header.status, header.reason, header.failed_segment), (0, Reason::Unaligned.code(), u32::MAX));
    // Half done: the errno is in the structure. Nothing done: it is the ioctl's.
    let half = Outcome { status: libc::ENOSPC, failed_segment: Some(0), ..Outcome::moved(&buffer, 64, 0, 0) };
    let (result, header) = finished(half);
    assert_eq!((result, header.status, header.bytes, header.failed_segment), (0, libc::ENOSPC, 64, 0));
    // Of a transfer in groups, a later group that fails leaves what the earlier ones did.
    let groups = Outcome::moved(&buffer, 64, 0, 3).then(Outcome::failed(libc::ENOSPC, Some(1)), 5);
    assert_eq!((groups.moved.total(), groups.status, groups.failed_segment), (67, libc::ENOSPC, Some(6)));
    let (result, header) = finished(Outcome::failed(libc::EIO, Some(0)));
    assert_eq!((result, header.status, header.bytes), (-libc::EIO, libc::EIO, 0));

    let stats = Stats::read_from_bytes(&server.stats().data).unwrap();
    assert_eq!(stats.read, Moved { bounce: 128, hole: 32, edge: 4, ..Moved::default() });
    assert_eq!(stats.calls[..10], [0, 1, 0, 0, 6, 0, 1, 0, 0, 0]);
    assert_eq!((stats.failed, stats.buffers, stats.buffer_bytes, stats.processes), (4, 1, LEN, 1));
    assert_eq!(stats.reasons[Reason::Unaligned as usize], 1);
}
