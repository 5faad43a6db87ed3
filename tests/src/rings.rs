//! Rings for tests: of the client library, and made by hand where a test has to do what the library
//! never would.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpunvme::{Attached, Buffer, Completed, Mount, Operation, Ring, Shared, Wait};
use gpunvme_abi::Command;
use gpunvme_abi::RingMemory;
use gpunvme_abi::ring::{self as abi, Word, ring_bytes};
use rustix::event::EventfdFlags;
use rustix::process::Pid;

use crate::direct::{call_plain, memfd};
use crate::mounted::Mounted;
use crate::tree;

const MIB: u64 = 1 << 20;
/// How long a test waits for what has to happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Registered memory.
pub fn shared(mount: &Mount, len: u64) -> Arc<Shared> {
    mount.register(Buffer::memfd(len as usize).unwrap()).unwrap().share()
}

/// A file of the mount, made if it is not there, attached for reading and writing.
pub fn attach(ring: &Ring, path: impl AsRef<Path>) -> Attached {
    ring.attach(&gpunvme::File::create(path).unwrap()).unwrap()
}

/// Waits for this many completions; fails rather than hang.
pub fn wait_for(ring: &mut Ring, count: usize) -> Vec<Completed> {
    let mut done = Vec::new();
    while done.len() < count {
        let more = ring.complete(Wait::Timeout(PATIENCE), &mut done).unwrap();
        assert!(more > 0, "{} of {count} completions came", done.len());
    }
    done
}

/// Bytes of registered memory.
pub fn bytes_of(buffer: &Shared, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    buffer.copy_out(offset as usize, &mut bytes);
    bytes
}

/// Processor time of each of the daemon's threads that serve rings, in their order.
pub fn serving_threads(daemon: Pid) -> Vec<Duration> {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.as_raw_nonzero())).unwrap().map(|task| task.unwrap().path());
    let mut threads: Vec<_> = tasks
        .filter_map(|task| {
            let name = fs::read_to_string(task.join("comm")).ok()?;
            let number: usize = name.trim().strip_prefix("rings-")?.parse().unwrap();
            // The first of the numbers is what the scheduler gave it, in nanoseconds.
            let scheduled = fs::read_to_string(task.join("schedstat")).ok()?;
            Some((number, Duration::from_nanos(scheduled.split(' ').next()?.parse().unwrap())))
        })
        .collect();
    threads.sort();
    threads.into_iter().map(|(_, time)| time).collect()
}

/// A ring made by hand, whose memory is at hand.
#[derive(Debug)]
pub struct Raw {
    /// What is shared with the daemon.
    pub memory: RingMemory,
    /// Its name.
    pub id: u64,
    /// What wakes the daemon.
    pub submitted: OwnedFd,
    /// What the daemon wakes us with.
    pub completed: OwnedFd,
    /// The mount, as long as it is held.
    directory: Option<File>,
}

impl Raw {
    /// An empty ring.
    pub fn new(volume: &Mounted, entries: u32) -> Raw {
        let directory = File::open(volume.root()).unwrap();
        let fd = memfd(ring_bytes(entries) as u64);
        let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (submitted, completed) = (event(), event());
        let mut request = abi::Ring {
            memory: fd.as_raw_fd(),
            submitted: submitted.as_raw_fd(),
            completed: completed.as_raw_fd(),
            entries,
            ..abi::Ring::default()
        };
        let memory = RingMemory::map(fd.as_fd(), entries).unwrap();
        call_plain(&directory, Command::Ring, &mut request).unwrap();
        Raw { memory, id: request.ring, submitted, completed, directory: Some(directory) }
    }

    /// The name of a file in it.
    pub fn attach(&self, file: &File) -> u64 {
        let mut request = abi::Attach { ring: self.id, descriptor: file.as_raw_fd(), ..abi::Attach::default() };
        call_plain(file, Command::Attach, &mut request).unwrap();
        request.file
    }

    /// Says that there are submissions up to this position.
    pub fn publish(&self, tail: u32) {
        self.memory.swap(Word::SubmissionTail, tail);
        rustix::io::write(&self.submitted, &1u64.to_ne_bytes()).unwrap();
    }

    /// Waits for something that has to be seen in its memory.
    pub fn wait_until(&self, what: &str, is: impl Fn(&RingMemory) -> bool) {
        let late = Instant::now() + PATIENCE;
        while !is(&self.memory) {
            assert!(Instant::now() < late, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Raw {
    /// `DETACH` of all of it.
    ///
    /// # Errors
    /// The ioctl's errno.
    pub fn detach(&self) -> std::io::Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        call_plain(directory, Command::Detach, &mut abi::Detach { ring: self.id, ..abi::Detach::default() })
    }

    /// Lets go of the mount, which can then be unmounted under it.
    pub fn let_go(&mut self) {
        self.directory = None;
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // The daemon may have closed it before.
        let _ = self.detach();
    }
}

/// The ring of another user, which has to go on working whatever happens beside it.
#[derive(Debug)]
pub struct Bystander {
    ring: Ring,
    file: Attached,
    buffer: Arc<Shared>,
    data: Vec<u8>,
}

impl Bystander {
    /// Makes a ring with a file of its own.
    pub fn new(volume: &Mounted) -> Bystander {
        let data = tree::pattern(77, 1 << 20);
        fs::write(volume.path("bystander"), &data).unwrap();
        let mount = Mount::open(volume.root()).unwrap();
        let ring = Ring::new(&mount, 16).unwrap();
        let file = attach(&ring, volume.path("bystander"));
        Bystander { file, buffer: shared(&mount, MIB), ring, data }
    }

    /// Checks that it is served, with the right bytes.
    pub fn check(&mut self) {
        self.buffer.copy_in(0, &vec![0; 1 << 20]);
        for piece in 0..16 {
            self.ring.push(&Operation::read(&self.file, piece << 16, &self.buffer, piece << 16, 1 << 16)).unwrap();
        }
        for completed in wait_for(&mut self.ring, 16) {
            assert_eq!(completed.result.unwrap().bytes(), 1 << 16);
        }
        assert!(bytes_of(&self.buffer, 0, MIB) == self.data);
    }
}
