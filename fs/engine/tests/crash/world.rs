//! A workload of several threads, run on one thread: an operation that waits for the device lets
//! others do something before it goes on, and writes that no operation waits for stay in flight for
//! as long as the seed wants. So commits, checkpoints and write-backs overlap with all other
//! operations, and a seed always gives the same run.

mod operations;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::Recorder;
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::data::{Filesystem, Options, Spawn};
use gpunvme_engine::error::{Attempt, Fail, FsError, Stall};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;
use parking_lot::Mutex;

use super::history::{Claim, History};
use super::view::View;
use crate::common::{ROOT, Random};

/// Operations that go on inside one another, at the most.
const NESTED_MAX: u32 = 2;
type Task = Box<dyn FnOnce() + Send>;

/// The workload on a volume.
pub struct World {
    recorder: Arc<Recorder>,
    /// None before the workload begins and after it ends.
    fs: Mutex<Option<Arc<Filesystem>>>,
    /// Tasks that completions could not do themselves.
    tasks: Mutex<VecDeque<Task>>,
    /// Files with direct writes in flight.
    direct: Arc<Mutex<Vec<u64>>>,
    /// Never locked while the filesystem is called.
    state: Mutex<Model>,
}

struct Model {
    random: Random,
    history: History,
    /// Operations that are in flight, one inside the other.
    depth: u32,
    /// Others may do something while one waits.
    nests: bool,
    clock: i64,
    /// Files that an operation of several steps works on.
    held: BTreeSet<u64>,
    /// Files that are open, some of them without a name.
    open: Vec<u64>,
    /// Inodes without a name that are not open.
    orphans: Vec<u64>,
}

impl Spawn for World {
    fn spawn(&self, task: Task) {
        self.tasks.lock().push_back(task);
    }

    fn help(&self) -> bool {
        let first = self.below(2) == 0;
        let task = if first { self.tasks.lock().pop_front() } else { None };
        if let Some(task) = task {
            task();
            return true;
        }
        let fs = self.fs.lock().clone();
        if fs.is_some_and(|fs| fs.volume().io().step()) {
            return true;
        }
        let task = self.tasks.lock().pop_front();
        task.map(|task| task()).is_some()
    }
}

impl World {
    /// Opens the volume on a device that a recorder logs, and makes the directory that the whole
    /// workload stays in.
    pub fn begin(recorder: &Arc<Recorder>, device: Arc<dyn BlockDevice>, seed: u64) -> Arc<World> {
        let discard = seed.is_multiple_of(2);
        let state = Model {
            random: Random(seed),
            history: History::default(),
            depth: 0,
            nests: false,
            clock: 100,
            held: BTreeSet::new(),
            open: Vec::new(),
            orphans: Vec::new(),
        };
        let world = Arc::new(World {
            recorder: recorder.clone(),
            fs: Mutex::default(),
            tasks: Mutex::default(),
            direct: Arc::default(),
            state: Mutex::new(state),
        });
        let waiting = Arc::downgrade(&world);
        let io = Io::stepped(device, move |count| waiting.upgrade().map_or(0, |world| world.meanwhile(count)));
        let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 20, discard }, write_buffer: 4 << 20 };
        let fs = Filesystem::open(io, options, world.clone()).expect("the volume can be opened");
        let context = world.context();
        let new = NewNode { mode: 0o040755, umask: 0, rdev: 0, target: &[] };
        let name = format!("work {}", world.below(u64::MAX));
        let root = fs.wait(|| fs.create(&context, ROOT, name.as_bytes(), &new)).expect("there is room").ino;
        fs.commit().expect("nothing fails");
        let view = View::of(&fs, root);
        *world.fs.lock() = Some(fs);
        {
            let mut state = world.state.lock();
            state.history.root = root;
            state.history.moment(0, view);
            let claim = state.history.claim([]);
            state.history.promise(claim, recorder.position());
            state.nests = true;
        }
        world
    }

    /// Ends the workload: everything is promised, and nothing is in flight any more. Returns the
    /// history.
    pub fn end(self: Arc<World>) -> History {
        let (open, claim) = {
            let mut state = self.state.lock();
            state.nests = false;
            let files = state.history.now().files();
            (std::mem::take(&mut state.open), state.history.claim(files))
        };
        let fs = self.fs();
        open.into_iter().for_each(|ino| fs.let_go_of_file(ino));
        while self.help() {}
        fs.close().expect("nothing fails");
        *self.fs.lock() = None;
        self.promised(claim);
        std::mem::take(&mut self.state.lock().history)
    }

    fn fs(&self) -> Arc<Filesystem> {
        self.fs.lock().clone().expect("it has begun, and not ended")
    }

    fn below(&self, limit: u64) -> u64 {
        self.state.lock().random.below(limit)
    }

    fn bytes(&self, len: u64) -> Vec<u8> {
        self.state.lock().random.bytes(len as usize)
    }

    fn context(&self) -> Context {
        let mut state = self.state.lock();
        state.clock += 1;
        Context { uid: 5, gid: 6, now: Timestamp { seconds: state.clock, nanoseconds: 7 } }
    }

    /// Runs other operations while one waits for the device. Returns which of `count` batches in
    /// flight completes.
    fn meanwhile(&self, count: usize) -> usize {
        let nests = {
            let mut state = self.state.lock();
            let nests = state.nests && state.depth > 0 && state.depth <= NESTED_MAX && state.random.below(3) == 0;
            state.depth += u32::from(nests);
            nests
        };
        if nests {
            self.something();
            self.state.lock().depth -= 1;
        }
        // Mostly the youngest, which is that of the waiting operation: others stay in flight for
        // long.
        if self.below(10) < 7 { count - 1 } else { self.below(count as u64) as usize }
    }

    /// One step of the workload.
    pub fn step(&self) {
        self.state.lock().depth = 1;
        if self.below(4) == 0 {
            self.help();
        }
        if self.below(100) < 60 {
            self.something()
        } else {
            self.something_long()
        }
        self.state.lock().depth = 0;
    }

    /// Makes an attempt; the outermost operation waits for whatever it needs, those inside it only
    /// for metadata to be read.
    fn attempt<T>(&self, mut attempt: impl FnMut() -> Attempt<T>) -> Option<Result<T, FsError>> {
        let fs = self.fs();
        if self.state.lock().depth <= 1 {
            return Some(fs.wait(attempt));
        }
        let waited = fs.volume().wait(|| match attempt() {
            Err(Fail::Stall(stall)) if !matches!(stall, Stall::Load { .. }) => Ok(None),
            other => other.map(Some),
        });
        waited.transpose()
    }

    /// An attempt that changes metadata; notes what came of it.
    fn change<T>(&self, attempt: impl FnMut() -> Attempt<T>) -> Option<T> {
        let began = self.recorder.position();
        match self.attempt(attempt)? {
            Ok(done) => {
                self.note(began);
                Some(done)
            }
            Err(error) => {
                tolerate(&error);
                None
            }
        }
    }

    fn note(&self, began: usize) {
        let nests = std::mem::replace(&mut self.state.lock().nests, false);
        let root = self.state.lock().history.root;
        let view = View::of(&self.fs(), root);
        let mut state = self.state.lock();
        state.history.moment(began, view);
        state.nests = nests;
    }

    fn pick(&self, of: impl Fn(&View) -> Vec<u64>) -> Option<u64> {
        let mut state = self.state.lock();
        let all = of(state.history.now());
        let count = all.len() as u64;
        if count == 0 { None } else { Some(all[state.random.below(count) as usize]) }
    }

    /// A file that no operation of several steps works on: one with a name, or one that is open.
    fn pick_file(&self) -> Option<u64> {
        let open = self.state.lock().open.clone();
        let orphans = self.below(6) == 0 && !open.is_empty();
        let ino = self.pick(|view| if orphans { open.clone() } else { view.files() })?;
        let state = self.state.lock();
        (!state.held.contains(&ino) && state.history.files.contains_key(&ino)).then_some(ino)
    }

    fn pick_place(&self) -> (u64, Vec<u8>) {
        let dir = self.pick(|view| view.names.keys().copied().collect()).expect("there is always the root");
        // Few names, so that they meet; some long, so that nodes split.
        let n = self.below(30);
        let name = if n.is_multiple_of(8) { format!("{n}-{}", "x".repeat(200)) } else { n.to_string() };
        (dir, name.into_bytes())
    }

    fn promised(&self, claim: Claim) {
        let position = self.recorder.position();
        self.state.lock().history.promise(claim, position);
    }
}

/// Checks the error of an operation that was chosen blindly.
fn tolerate(error: &FsError) {
    let fails = matches!(error, FsError::Device(_) | FsError::Corrupt(_) | FsError::Failed(_) | FsError::ReadOnly);
    assert!(!fails, "{error}");
}
