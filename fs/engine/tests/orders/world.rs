//! A volume on the unruly device, several callers at once, and what is expected of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use gpunvme_blockdev::{BlockDevice, Io, Request};
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::data::{Filesystem, Options, Spawn};
use gpunvme_engine::volume::Context;
use gpunvme_layout::Timestamp;
use parking_lot::Mutex;

use super::Case;
use super::device::{LATE, Unruly};
use super::expected::Expected;
use super::schedule::Schedule;
use crate::common::{ROOT, Random, assert_sound, open};

type Task = Box<dyn FnOnce() + Send>;
pub type Names = BTreeMap<Vec<u8>, u64>;

/// Operations of others that may end while one is in flight, before that one counts as kept waiting
/// for ever. It may wait for some requests to the device one after the other, and others do a lot
/// meanwhile.
const OVERTAKEN_MAX: u64 = 250;
/// Requests that it may wait for one after the other.
const REQUESTS_MAX: u64 = 8;

/// Turns that anything may take, however quick the device is.
const TURNS: u64 = 10_000;

/// Everything.
pub struct World {
    pub case: Case,
    pub device: Arc<Unruly>,
    pub schedule: Schedule,
    /// None when it is over.
    fs: Mutex<Option<Arc<Filesystem>>>,
    /// Tasks that completions could not do themselves.
    tasks: Mutex<VecDeque<Task>>,
    clock: AtomicU64,
    over: AtomicBool,
    /// Never locked while the filesystem is called.
    pub state: Mutex<Model>,
}

/// State of the volume and its callers, as the test knows it.
pub struct Model {
    pub expected: Expected,
    pub names: Names,
    /// How the names were, one after the other.
    moments: Vec<Names>,
    /// The one that must not be fallen behind.
    durable: usize,
    /// From that moment on, what was written to that file before that time is kept.
    replaced: Vec<(usize, u64, u64)>,
    /// Times that files are open.
    pub opens: BTreeMap<u64, u32>,
    /// Files that the kernel has locked for an operation.
    pub locked: BTreeSet<u64>,
    /// Of each file, the failures of the device when a descriptor was last told of one.
    pub told: BTreeMap<u64, u64>,
    pub left: u64,
    doing: Vec<Doing>,
    ended: u64,
    trace: VecDeque<String>,
}

#[derive(Clone, Default)]
struct Doing {
    what: String,
    since: u64,
    ended: u64,
}

impl Spawn for World {
    fn spawn(&self, task: Task) {
        self.tasks.lock().push_back(task);
    }

    fn help(&self) -> bool {
        if Schedule::me().is_none() {
            let task = self.tasks.lock().pop_front();
            if let Some(task) = task {
                task();
                return true;
            }
        }
        let io = self.fs().volume().io().clone();
        io.step()
    }
}

impl World {
    /// Opens a volume.
    pub fn new(case: Case, base: Image) -> Arc<World> {
        let device = Unruly::new(base, case.seed ^ 1, case.habits);
        let state = Model {
            expected: Expected::new(case.habits.fails > 0),
            names: Names::new(),
            moments: vec![Names::new()],
            durable: 0,
            replaced: Vec::new(),
            opens: BTreeMap::new(),
            locked: BTreeSet::new(),
            told: BTreeMap::new(),
            left: case.operations,
            doing: vec![Doing::default(); case.callers + 1],
            ended: 0,
            trace: VecDeque::new(),
        };
        let world = Arc::new(World {
            case,
            device: device.clone(),
            schedule: Schedule::new(case.seed, case.callers + 1, case.style),
            fs: Mutex::default(),
            tasks: Mutex::default(),
            clock: AtomicU64::new(1),
            over: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        let waiting = Arc::downgrade(&world);
        let io = Io::stepped(device, move |count| waiting.upgrade().map_or(count - 1, |world| world.meanwhile(count)));
        let options = Options {
            volume: VolumeOptions { read_only: false, cache: 1 << 20, discard: false },
            write_buffer: case.write_buffer,
        };
        let fs = Filesystem::open(io, options, world.clone()).expect("the volume can be opened");
        *world.fs.lock() = Some(fs);
        idle(&Arc::downgrade(&world));
        world
    }

    pub fn fs(&self) -> Arc<Filesystem> {
        self.fs.lock().clone().expect("it is open")
    }

    /// The time, which goes on.
    pub fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    pub fn context(&self) -> Context {
        Context { uid: 5, gid: 6, now: Timestamp { seconds: self.clock.load(Ordering::Relaxed) as i64, nanoseconds: 7 } }
    }

    pub fn below(&self, limit: u64) -> u64 {
        self.schedule.below(limit)
    }

    /// Gives turns to others while a thread waits. Returns which of `count` batches completes.
    fn meanwhile(&self, count: usize) -> usize {
        let Some(me) = Schedule::me() else { return self.device.last(count) };
        self.schedule.pause();
        self.device.work(self.schedule.turns());
        self.watch(me);
        if self.case.cuts > 0 && self.below(self.case.cuts) == 0 {
            self.cut();
        }
        self.device.next()
    }

    /// Lets others go on.
    pub fn pause(&self) {
        self.fs().volume().io().step();
    }

    /// Waits for something that others do.
    pub fn wait_until(&self, over: impl Fn() -> bool) {
        while !over() {
            self.pause();
        }
    }

    /// The thread that does what completions cannot.
    pub fn serve(&self) {
        loop {
            let task = self.tasks.lock().pop_front();
            match task {
                Some(task) => self.doing("what a completion left", task),
                None if self.schedule.is_alone() => return,
                None => self.pause(),
            }
        }
    }

    /// Does something under a name, and sees to it that it ends.
    pub fn doing<T>(&self, what: impl Into<String>, work: impl FnOnce() -> T) -> T {
        let me = Schedule::me().expect("a caller");
        let what = what.into();
        let turns = self.schedule.turns();
        {
            let mut state = self.state.lock();
            state.note(format!("{me} at {turns}: {what}"));
            state.doing[me] = Doing { what, since: turns, ended: state.ended };
        }
        let done = work();
        let mut state = self.state.lock();
        state.ended += 1;
        state.note(format!("{me}: over"));
        state.doing[me] = Doing::default();
        done
    }

    fn watch(&self, me: usize) {
        let turns = self.schedule.turns();
        let state = self.state.lock();
        let doing = &state.doing[me];
        if doing.what.is_empty() {
            return;
        }
        let (waited, overtaken) = (turns - doing.since, state.ended - doing.ended);
        // An operation that makes metadata durable waits for all that were begun before.
        let queues = ["fsync", "commit", "checkpoint"].iter().any(|kind| doing.what.starts_with(kind));
        let before = if queues { self.case.callers as u64 } else { 0 };
        let patient = REQUESTS_MAX * (1 + before) * (self.case.habits.patience + LATE);
        if waited > 4 * patient.max(TURNS) || (overtaken > OVERTAKEN_MAX && waited > patient) {
            let all: Vec<&str> = state.doing.iter().map(|doing| &*doing.what).collect();
            let what = doing.what.clone();
            panic!("\"{what}\" does not end: {waited} turns, {overtaken} others ended since it began; all are at {all:#?}");
        }
    }

    /// Notes that names changed.
    pub fn renamed(&self, change: impl FnOnce(&mut Names)) {
        let mut state = self.state.lock();
        change(&mut state.names);
        let names = state.names.clone();
        state.moments.push(names);
    }

    /// Notes that a file took another's name, at the moment that was noted last; the rename began
    /// at `began`.
    pub fn replaced(&self, ino: u64, began: u64) {
        let mut state = self.state.lock();
        let moment = state.moments.len() - 1;
        state.replaced.push((moment, ino, began));
    }

    /// The moment that it is.
    pub fn moment(&self) -> usize {
        self.state.lock().moments.len() - 1
    }

    /// Notes that all names up to a moment are durable.
    pub fn names_are_durable(&self, moment: usize) {
        let mut state = self.state.lock();
        state.durable = state.durable.max(moment);
    }

    /// Power goes, and what is left is looked at.
    fn cut(&self) {
        let mut random = Random(self.below(u64::MAX));
        let mode = random.below(5);
        let mut drawn: BTreeMap<(usize, u64), bool> = BTreeMap::new();
        let log = self.device.recorder().log();
        let image = log.power_cuts().image(log.events().len(), |event, sector| match mode {
            0 => false,
            1 => true,
            2 => *drawn.entry((event, 0)).or_insert_with(|| random.below(2) == 0),
            3 => *drawn.entry((event, sector / 8)).or_insert_with(|| random.below(2) == 0),
            _ => random.below(2) == 0,
        });
        let what = format!("power cut behind {} events, mode {mode}", log.events().len());
        let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
        let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_sound(&fs, &what);
        let found = names(&fs);
        let state = self.state.lock();
        let behind = &state.moments[state.durable..];
        let Some(at) = behind.iter().position(|names| *names == found) else {
            panic!("{what}: {found:?} was at no moment behind {:?}", behind[0]);
        };
        let at = state.durable + at;
        for ino in found.values() {
            let kept = state.replaced.iter().filter(|(moment, file, _)| *moment <= at && file == ino).map(|(_, _, at)| *at).max();
            let content = content(&fs, *ino);
            if let Err(wrong) = state.expected.judge_left(*ino, &content, kept) {
                panic!("{what}: {wrong}");
            }
        }
    }

    /// Ends the run, after all callers: files have to be as expected, and to stay so after the
    /// volume was closed and opened.
    pub fn end(self: &Arc<World>) {
        self.device.tame(true);
        self.over.store(true, Ordering::Relaxed);
        let fs = self.fs();
        while self.help() {}
        let flushed = fs.flush_all();
        flushed.expect("the device is tame");
        let files = names(&fs);
        let mut contents = BTreeMap::new();
        {
            let mut state = self.state.lock();
            assert_eq!(files, state.names, "names");
            assert!(state.opens.values().all(|opens| *opens == 0));
            drop(state);
            for ino in files.values() {
                let read = self.state.lock().expected.begin_read(self.now(), *ino, 0..1 << 40);
                let found = content(&fs, *ino);
                state = self.state.lock();
                state.expected.end_read(read, &found).unwrap_or_else(|wrong| panic!("at the end: {wrong}"));
                drop(state);
                contents.insert(*ino, found);
            }
        }
        match fs.close() {
            Ok(()) => {}
            Err(error) => assert!(self.device.failures() > 0, "closing: {error}"),
        }
        *self.fs.lock() = None;
        let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(self.device.recorder().snapshot());
        let fs = open(&device).expect("it was closed");
        assert_sound(&fs, "at the end");
        assert_eq!(names(&fs), files, "names after it was closed");
        for (ino, before) in contents {
            let after = content(&fs, ino);
            assert!(
                before == after,
                "inode {ino} is another after the volume was closed: {} of {} bytes",
                after.len(),
                before.len()
            );
        }
        assert_eq!(fs.usage().inodes, 1 + files.values().collect::<BTreeSet<_>>().len() as u64, "inodes without a name");
    }

    /// The latest events, for the message of a failure.
    pub fn story(&self) -> String {
        self.state.try_lock().map_or_else(String::new, |state| state.trace.iter().cloned().collect::<Vec<_>>().join("\n"))
    }
}

impl Model {
    pub fn note(&mut self, what: String) {
        if self.trace.len() == 60 {
            self.trace.pop_front();
        }
        self.trace.push_back(what);
    }
}

/// Keeps a batch in flight that asks for nothing, so that every waiting thread reaches
/// [`World::meanwhile`], whatever else is in flight.
fn idle(world: &Weak<World>) {
    let Some(this) = world.upgrade().filter(|this| !this.over.load(Ordering::Relaxed)) else { return };
    this.device.expect_idle();
    let again = world.clone();
    this.fs().volume().io().submit(vec![Request::flush()], move |_| idle(&again));
}

/// The names in the root directory.
fn names(fs: &Arc<Filesystem>) -> Names {
    let entries = fs.wait(|| fs.read_dir(ROOT, 2, usize::MAX)).expect("it is a directory");
    entries.into_iter().map(|entry| (entry.name, entry.ino)).collect()
}

/// All that is in a file.
fn content(fs: &Arc<Filesystem>, ino: u64) -> Vec<u8> {
    let size = fs.wait(|| fs.attributes(ino)).expect("it has a name").inode.size;
    fs.read(ino, 0, size as usize).expect("it can be read")
}
