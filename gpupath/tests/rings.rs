//! The threads that serve rings, with files that end their transfers when and where a test wants
//! it. Both ends are this process.

use gpunvme_abi::RingMemory;
use gpunvme_abi::ring::{self as abi, ASLEEP, AWAKE, Attach, Detach, Submission, Word, ring_bytes};
use gpunvme_abi::{Claim, Command, Direction, Reason, Register, Segment, Transfer, TransferFlags, TransferRequest, Unregister};
use gpunvme_blockdev::sim::{Effect, Fault, On, SimController};
use gpunvme_blockdev::{Io, OpenMode};
use gpunvme_gpupath::admission::{Admitted, OpenFile};
use gpunvme_gpupath::outcome::Outcome;
use gpunvme_gpupath::registry::{Caller, Limits, Registry};
use gpunvme_gpupath::ring::Rings;
use gpunvme_gpupath::server::{Reply, Server};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, FromZeros};

const LEN: u64 = 64 << 10;

/// Rings on a controller that has so many queues, one of which is for all that is not in rings.
fn rings(queues: u32, services: usize) -> (Arc<Server>, Rings) {
    let (_, server, rings) = rings_and_controller(queues, services);
    (server, rings)
}

fn rings_and_controller(queues: u32, services: usize) -> (Arc<SimController>, Arc<Server>, Rings) {
    let controller = SimController::new("sim:,memory=16M", OpenMode::ReadWrite).unwrap();
    let device = controller.attach(&format!("queues={queues}")).unwrap();
    assert_eq!(device.geometry().max_queues, queues);
    let server = Arc::new(Server::new(Registry::new(device.clone(), Limits::default()).unwrap()).unwrap());
    server.mounted(any_file().metadata().unwrap().dev());
    let rings = Rings::new(server.clone(), Io::threaded(device, 1).unwrap(), services).unwrap();
    (controller, server, rings)
}

fn thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

fn caller() -> Caller {
    Caller { thread: thread(), user: 0 }
}

fn memfd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
    // All of it: our own driver takes no memory that is not there.
    rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    fd
}

fn answer<T: FromBytes>(reply: &Reply) -> T {
    assert_eq!(reply.result, 0);
    T::read_from_bytes(&reply.data).unwrap()
}

/// Waits for something that has to happen.
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let late = Instant::now() + Duration::from_secs(20);
    while !happened() {
        assert!(Instant::now() < late, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What the application has open.
fn any_file() -> File {
    File::open("/proc/self/exe").unwrap()
}

/// The application's end of a ring.
struct Application {
    id: u64,
    memory: RingMemory,
    submitted: OwnedFd,
    completed: OwnedFd,
}

impl Application {
    fn new(rings: &Rings, entries: u32) -> Application {
        Application::try_new(rings, 0, entries).unwrap()
    }

    /// Of a user; or an errno.
    fn try_new(rings: &Rings, user: u32, entries: u32) -> Result<Application, i32> {
        let fd = memfd(ring_bytes(entries) as u64);
        let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (submitted, completed) = (event(), event());
        let memory = RingMemory::map(fd.as_fd(), entries).unwrap();
        let request = abi::Ring {
            memory: fd.as_raw_fd(),
            submitted: submitted.as_raw_fd(),
            completed: completed.as_raw_fd(),
            entries,
            ..abi::Ring::default()
        };
        let reply = rings.open(Caller { user, ..caller() }, &request);
        if reply.result != 0 {
            return Err(-reply.result);
        }
        Ok(Application { id: answer::<abi::Ring>(&reply).ring, memory, submitted, completed })
    }

    /// Gives the ring up.
    fn detach(&self, rings: &Rings) {
        answer::<Detach>(&rings.detach(thread(), &Detach { ring: self.id, ..Detach::default() }));
    }

    /// Gives a file a name.
    fn attach(&self, rings: &Rings, file: Arc<dyn OpenFile>) -> u64 {
        let shown = any_file();
        let attach = Attach { ring: self.id, descriptor: shown.as_raw_fd(), ..Attach::default() };
        answer::<Attach>(&rings.attach(thread(), &attach, shown.metadata().unwrap().ino(), |_| file)).file
    }

    /// Submits a read of a file that is attached for it.
    fn submit(&self, rings: &Rings, buffer: u64, file: Arc<dyn OpenFile>) {
        let file = self.attach(rings, file);
        let submission = Submission { command: Command::Read as u32, file, buffer, len: 4096, ..Submission::new_zeroed() };
        let tail = self.memory.load(Word::SubmissionTail);
        self.memory.put_submission(tail, &submission);
        self.memory.swap(Word::SubmissionTail, tail + 1);
        rustix::io::write(&self.submitted, &1u64.to_ne_bytes()).unwrap();
    }

    fn completed(&self) -> u32 {
        self.memory.load(Word::CompletionTail)
    }

    fn taken(&self) -> u32 {
        self.memory.load(Word::SubmissionHead)
    }

    fn daemon_is_asleep(&self) -> bool {
        self.memory.load(Word::Daemon) == ASLEEP
    }

    fn is_signalled(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(&self.completed, PollFlags::IN)], Some(&now)).unwrap() == 1
    }
}

/// Holds its transfers until they are ended, or the test is over.
struct Held(Mutex<Option<VecDeque<Admitted>>>);

impl Held {
    /// Ends the oldest transfer. A ring says that it took a submission before the file has the
    /// transfer, so this waits for one.
    fn end_one(&self) {
        let mut oldest = None;
        until("no transfer is held", || {
            oldest = self.0.lock().unwrap().as_mut().and_then(VecDeque::pop_front);
            oldest.is_some()
        });
        let admitted = oldest.expect("until waits for one");
        admitted.finish(&Outcome::default());
    }

    /// How many transfers it holds.
    fn held(&self) -> usize {
        self.0.lock().unwrap().as_ref().map_or(0, VecDeque::len)
    }
}

impl OpenFile for Held {
    fn ino(&self) -> u64 {
        2
    }

    fn transfer(&self, admitted: Admitted) {
        if let Some(held) = &mut *self.0.lock().unwrap() {
            held.push_back(admitted);
        }
    }
}

/// The end of a test, which the end of the rings waits for.
struct Holding(Arc<Held>);

impl Holding {
    fn new() -> Holding {
        Holding(Arc::new(Held(Mutex::new(Some(VecDeque::new())))))
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap() = None;
    }
}

/// Its transfers end those that another file holds, on the thread that serves them.
struct Ending(Arc<Held>);

impl OpenFile for Ending {
    fn ino(&self) -> u64 {
        2
    }

    fn transfer(&self, admitted: Admitted) {
        self.0.end_one();
        admitted.finish(&Outcome::default());
    }
}

fn register(server: &Server) -> u64 {
    let memory = memfd(LEN);
    answer::<Register>(&server.register(caller(), &Register { fd: memory.as_raw_fd(), len: LEN, ..Register::default() })).buffer
}

/// A process can put another descriptor in its place, at which a thread may look for ever.
#[test]
fn a_descriptor_is_looked_at_by_threads_of_its_users_quota_and_a_grant_by_any() {
    let (server, _rings) = rings(2, 1);
    let (buffer, shown) = (register(&server), any_file());
    let ino = shown.metadata().unwrap().ino();
    let stuck = || {
        let (stay, stays) = mpsc::channel::<()>();
        let stays = Arc::new(Mutex::new(stays));
        for _ in 0..32 {
            let stays = stays.clone();
            server.take_in(1000, move |_| _ = stays.lock().unwrap().recv());
        }
        stay
    };
    let (answers, answered) = mpsc::channel::<Reply>();
    let transfer = |grant| {
        let segments = [Segment { file_offset: 0, buffer_offset: 0, len: 4096 }].into_iter().collect();
        let request = TransferRequest { buffer, flags: TransferFlags::empty(), segments };
        let claim = Claim { descriptor: shown.as_raw_fd(), grant };
        let answers = answers.clone();
        let done = move |reply| answers.send(reply).unwrap();
        server.transfer(Caller { user: 1000, ..caller() }, (Direction::Read, request, claim), ino, |_| Done, |task| task(), done);
    };
    let granted = |reply: &Reply| answer::<Transfer>(reply).grant;
    let stay = stuck();
    transfer(0);
    assert!(answered.try_recv().is_err(), "it was looked at here");
    drop(stay);
    let grant = granted(&answered.recv().unwrap());
    let _stay = stuck();
    transfer(grant);
    assert_eq!(granted(&answered.try_recv().expect("a grant needs no look")), grant);
}

/// Ends its transfers at once.
struct Done;

impl OpenFile for Done {
    fn ino(&self) -> u64 {
        2
    }

    fn transfer(&self, admitted: Admitted) {
        admitted.finish(&Outcome::default());
    }
}

/// More rings get a user no more, and a user who comes later is served at once, whichever thread
/// serves the others.
#[test]
fn what_is_in_flight_is_shared_between_users() {
    let (server, rings) = rings(3, 2);
    let buffer = register(&server);
    let (greedy, modest) = (Holding::new(), Holding::new());
    let many: Vec<_> = (0..3).map(|_| Application::try_new(&rings, 1000, 1024).unwrap()).collect();
    let taken = || many.iter().map(Application::taken).sum::<u32>();
    for application in &many {
        (0..1000).for_each(|_| application.submit(&rings, buffer, greedy.0.clone()));
    }
    until("not as much was taken as one may have alone", || taken() == 1024);
    let few = Application::try_new(&rings, 1001, 64).unwrap();
    (0..20).for_each(|_| few.submit(&rings, buffer, modest.0.clone()));
    until("another user is held up", || few.taken() == 20);
    // Who is busy is looked at every few milliseconds.
    std::thread::sleep(Duration::from_millis(100));
    // While that one has something in flight the first has half: as much has to end before more of
    // its is taken.
    (0..500).for_each(|_| greedy.0.end_one());
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(taken(), 1024);
    (0..100).for_each(|_| greedy.0.end_one());
    // Of three rings that share it, one may have one less than a third.
    until("it does not get its half", || (1024 + 86..=1024 + 88).contains(&taken()));
    assert_eq!((many.iter().map(Application::completed).sum::<u32>(), few.completed()), (600, 0));
}

/// A user without rings gets a share as well: rings of others leave it free while that user has
/// work in flight. Work of the rings' own user takes nothing from them.
#[test]
fn rings_leave_room_for_a_user_without_rings() {
    let (server, rings) = rings(2, 1);
    let buffer = register(&server);
    let held = Holding::new();
    let ring = Application::try_new(&rings, 1000, 1024).unwrap();
    // Other work counts only beside rings that are busy.
    ring.submit(&rings, buffer, held.0.clone());
    until("a ring alone is held up", || ring.taken() == 1);
    let own = rings.begin_beside(1000);
    let other = [rings.begin_beside(1001), rings.begin_beside(1001)];
    // Who is busy is looked at every few milliseconds.
    std::thread::sleep(Duration::from_millis(100));
    (0..800).for_each(|_| ring.submit(&rings, buffer, held.0.clone()));
    until("it does not get its half", || ring.taken() == 512);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(ring.taken(), 512, "half is the other user's");
    drop(other);
    until("it does not get all once it is alone", || ring.taken() == 801);
    drop(own);
}

/// A file that takes long to go, such as the last of an inode.
struct Lasting(Mutex<std::sync::mpsc::Receiver<()>>);

impl OpenFile for Lasting {
    fn ino(&self) -> u64 {
        2
    }

    fn transfer(&self, admitted: Admitted) {
        admitted.finish(&Outcome::default());
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        let _ = self.0.lock().unwrap().recv_timeout(Duration::from_secs(5)); // a test that failed
    }
}

#[test]
fn files_that_take_long_to_go_hold_up_no_ring() {
    let (server, rings) = rings(3, 1);
    let buffer = register(&server);
    let (gone, other) = (Application::new(&rings, 8), Application::new(&rings, 8));
    let (let_go, receiver) = std::sync::mpsc::channel();
    let lasting = Arc::new(Lasting(Mutex::new(receiver)));
    let watched = Arc::downgrade(&lasting);
    gone.attach(&rings, lasting);
    // The thread that serves the ring closes it.
    gone.memory.swap(Word::SubmissionTail, 9);
    rustix::io::write(&gone.submitted, &1u64.to_ne_bytes()).unwrap();
    until("it was not closed", || gone.memory.load(Word::Daemon) == abi::CLOSED);
    let holding = Holding::new();
    for number in 1..=100 {
        let at = Instant::now();
        other.submit(&rings, buffer, holding.0.clone());
        until("it is not served", || other.taken() == number);
        holding.0.end_one();
        until("it is not answered", || other.completed() == number);
        other.memory.store(Word::CompletionHead, number);
        assert!(at.elapsed() < Duration::from_secs(4), "it waited for the file");
    }
    let_go.send(()).unwrap();
    until("it did not go", || watched.strong_count() == 0);
}

/// Does something when it is dropped, even by a panic.
struct Defer<F: Fn()>(F);

impl<F: Fn()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// An application has two hundred thousand waiters for its eventfd, each of which a signal passes.
#[test]
fn an_eventfd_with_very_many_waiters_holds_up_its_owner_alone() {
    let (server, rings) = rings(3, 1);
    let buffer = register(&server);
    let ring = Application::try_new(&rings, 1000, 8).unwrap();
    let over = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let holding = Holding::new();
    let waiting = std::sync::Barrier::new(201);
    std::thread::scope(|scope| {
        for _ in 0..200 {
            let poll = || {
                let mut polled = vec![PollFd::new(&ring.completed, PollFlags::PRI); 999];
                polled.push(PollFd::new(&over, PollFlags::IN));
                waiting.wait();
                rustix::event::poll(&mut polled, None).unwrap();
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, poll).unwrap();
        }
        waiting.wait();
        let _over = Defer(|| assert_eq!(rustix::io::write(&over, &1u64.to_ne_bytes()), Ok(8)));
        std::thread::sleep(Duration::from_millis(500));
        // Of a processor: others use the machine, too.
        let time = |what: &dyn Fn()| {
            let now = || {
                let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
                Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec.cast_unsigned() as u32)
            };
            let before = now();
            what();
            now() - before
        };
        let signal = || assert_eq!(rustix::io::write(&ring.completed, &1u64.to_ne_bytes()), Ok(8));
        let one_signal = (0..5).map(|_| time(&signal)).min().unwrap();
        rustix::io::read(&ring.completed, &mut [0; 8]).unwrap();
        let (mut took, begun) = (Duration::ZERO, Instant::now());
        for number in 1..=100 {
            ring.memory.swap(Word::Application, ASLEEP);
            ring.submit(&rings, buffer, holding.0.clone());
            until("it is not served", || holding.0.held() == 1);
            // On this thread, as on one that serves another ring.
            took += time(&|| holding.0.end_one());
            until("it was not woken", || ring.is_signalled());
            rustix::io::read(&ring.completed, &mut [0; 8]).unwrap();
            ring.memory.store(Word::CompletionHead, number);
        }
        let all = begun.elapsed();
        println!("one signal {one_signal:?}; 100 ends of transfers {took:?} of {all:?}");
        // A user has a twentieth, after the first signal.
        assert!(took < all / 10 + 3 * one_signal, "{took:?} of {all:?}, a signal {one_signal:?}");
    });
}

/// As a write of one ring for which a read of another had to wait.
#[test]
fn what_ends_on_the_thread_of_another_ring_wakes_its_own() {
    let (server, rings) = rings(3, 2);
    let buffer = register(&server);
    // So large that each has a thread for itself.
    let (waiting, other) = (Application::new(&rings, 32), Application::new(&rings, 32));
    let holding = Holding::new();
    let held = &holding.0;
    for _ in 0..32 {
        waiting.submit(&rings, buffer, held.clone());
    }
    until("not all were taken", || waiting.taken() == 32);
    // There is no place for its completion yet.
    waiting.submit(&rings, buffer, held.clone());
    until("it does not sleep", || waiting.daemon_is_asleep());
    waiting.memory.swap(Word::Application, ASLEEP);

    other.submit(&rings, buffer, Arc::new(Ending(held.clone())));
    until("the application was not woken", || waiting.is_signalled());
    assert_eq!((waiting.completed(), waiting.taken()), (1, 32));
    assert_eq!(waiting.memory.load(Word::Application), AWAKE);
    // Its thread was woken, too, and mostly has found by then that there is no place yet.
    std::thread::sleep(Duration::from_millis(20));
    until("it does not sleep", || waiting.daemon_is_asleep());
    waiting.memory.store(Word::CompletionHead, 1);

    other.submit(&rings, buffer, Arc::new(Ending(held.clone())));
    until("the submission that was left lying was forgotten", || waiting.taken() == 33);
}

#[test]
fn fewer_threads_serve_where_the_device_has_fewer_queues() {
    let (server, rings) = rings(3, 4);
    let buffer = register(&server);
    let holding = Holding::new();
    let held = &holding.0;
    let applications: Vec<_> = (0..6).map(|_| Application::new(&rings, 64)).collect();
    for application in &applications {
        application.submit(&rings, buffer, held.clone());
    }
    for (taken, application) in applications.iter().enumerate() {
        until("a ring is not served", || application.taken() == 1);
        held.end_one();
        let completed: u32 = applications.iter().map(Application::completed).sum();
        assert_eq!(completed as usize, taken + 1);
    }
}

/// Or a process could have the daemon hold any number of them.
#[test]
fn rings_given_up_count_until_their_transfers_end() {
    let (server, rings) = rings(3, 2);
    let buffer = register(&server);
    let holding = Holding::new();
    let mut given_up = 0;
    let refused = loop {
        match Application::try_new(&rings, 0, 8) {
            Ok(application) => {
                application.submit(&rings, buffer, holding.0.clone());
                // A ring says that it took a submission before the file has the transfer.
                until("a ring is not served", || holding.0.held() == given_up + 1);
                application.detach(&rings);
            }
            Err(errno) => break errno,
        }
        given_up += 1;
        assert!(given_up < 1000, "there is no end to it");
    };
    assert_eq!((refused, given_up), (libc::ENOSPC, 128));
    for _ in 0..given_up {
        holding.0.end_one();
    }
    until("rings that are over still count", || Application::try_new(&rings, 0, 8).is_ok());
}

/// Small rings are those of single threads, which can do without; a process has one for the rest.
#[test]
fn small_rings_leave_room_for_others() {
    let (_server, rings) = rings(3, 2);
    let small: Vec<_> = std::iter::from_fn(|| Application::try_new(&rings, 1000, 8).ok()).collect();
    let larger: Vec<_> = std::iter::from_fn(|| Application::try_new(&rings, 1000, 16).ok()).collect();
    assert_eq!((small.len(), larger.len()), (48, 16));
}

/// The name of a buffer is worth nothing once it is unregistered, although a transfer still holds
/// the memory.
#[test]
fn nothing_begins_on_a_buffer_that_was_unregistered() {
    let (server, rings) = rings(3, 2);
    let buffer = register(&server);
    let application = Application::new(&rings, 8);
    let holding = Holding::new();
    application.submit(&rings, buffer, holding.0.clone());
    until("it is not taken", || holding.0.held() == 1);
    let unregister = Unregister { buffer, ..Unregister::default() };
    answer::<Unregister>(&server.unregister(thread(), &unregister));
    application.submit(&rings, buffer, holding.0.clone());
    until("it is not refused", || application.completed() == 1);
    let refused = application.memory.completion(0);
    assert_eq!((refused.status, refused.reason), (libc::ENOENT, Reason::NoSuchBuffer.code()));
    holding.0.end_one();
    until("the first one does not end", || application.completed() == 2);
}

/// Its transfers are one request of the device each, of the device's first bytes.
struct InPlace;

impl OpenFile for InPlace {
    fn ino(&self) -> u64 {
        2
    }

    fn transfer(&self, admitted: Admitted) {
        admitted.finish(&Outcome::default());
    }

    fn place(&self, _: Range<u64>, _: bool) -> Option<u64> {
        Some(0)
    }
}

/// The device may write to the memory for as long as it has the command.
#[test]
fn the_end_waits_for_what_rings_that_were_given_up_have_in_flight() {
    let (controller, server, rings) = rings_and_controller(3, 1);
    let buffer = register(&server);
    let application = Application::new(&rings, 8);
    controller.inject(Fault::new(On::Read, Effect::Hold));
    application.submit(&rings, buffer, Arc::new(InPlace));
    until("the device does not have it", || controller.stalled() == 1);
    let unregister = Unregister { buffer, ..Unregister::default() };
    answer::<Unregister>(&server.unregister(thread(), &unregister));
    application.detach(&rings);
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| rings.end());
        // Long enough for a thread that does not wait.
        std::thread::sleep(Duration::from_millis(100));
        assert!(!ending.is_finished(), "it waits for the device");
        controller.release();
    });
    assert_eq!((controller.unmapped_in_flight(), controller.dma_faults()), (0, vec![]));
}
