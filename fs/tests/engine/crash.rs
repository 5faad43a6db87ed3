//! Power cuts at every point of random workloads, with any subset of the writes that were not flushed lost or torn, and
//! again during recovery. After each, the volume has to open by itself, the checker has to find nothing, the names have to
//! be those between two operations that followed the last commit, files that were synced and not touched since have to be
//! whole, and nothing may show what was on the device before.
//!
//! `CRASH_SECONDS` sets the time budget (20 by default), `CRASH_SEED` replays one seed from its start.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Model, Node, Pair, ROOT, Random, assert_sound, make, open};
use gpunvme_blockdev::{BlockDevice, Image, MemoryDevice, Recorder};
use gpunvme_fs::Filesystem;
use gpunvme_fs::volume::{Context, NewNode};
use gpunvme_layout::{FileType, Timestamp};

const BYTES: u64 = 32 << 20;
const STEPS: usize = 120;
/// Crashes that a volume goes through after the first.
const LIVES: u32 = 2;
/// What the device holds before it is formatted: nobody may ever read it through a file.
const POISON: &[u8; 16] = b"*what was there*";

/// Every name with its inode, by directory: what a crash must leave as it was between two operations.
type Names = BTreeMap<u64, BTreeMap<Vec<u8>, u64>>;

fn names(model: &Model) -> Names {
    let dirs = model.nodes.iter().filter_map(|(ino, n)| if let Node::Dir(e) = n { Some((*ino, e.clone())) } else { None });
    dirs.collect()
}

/// The names below a directory, and the files.
fn walk(fs: &Arc<Filesystem>, root: u64) -> (Names, Vec<u64>) {
    let (mut found, mut files, mut todo) = (Names::new(), Vec::new(), vec![root]);
    while let Some(dir) = todo.pop() {
        let entries = fs.wait(|| fs.read_dir(dir, 2, usize::MAX)).expect("a sound volume can be read");
        for entry in &entries {
            match entry.file_type {
                FileType::Directory => todo.push(entry.ino),
                FileType::Regular => files.push(entry.ino),
                _ => {}
            }
        }
        found.insert(dir, entries.into_iter().map(|e| (e.name, e.ino)).collect());
    }
    files.sort_unstable();
    files.dedup();
    (found, files)
}

/// What was promised at a point of the log.
struct Promise {
    /// Events of the log when the promise was given.
    position: usize,
    /// Steps done then.
    step: usize,
    /// Content of files that were on the device then.
    files: BTreeMap<u64, Vec<u8>>,
}

struct Run {
    /// Directory that everything happens below.
    root: u64,
    /// Names after each step.
    history: Vec<Names>,
    /// Events of the log before each step began.
    began: Vec<usize>,
    /// Step that last changed a file.
    changed: BTreeMap<u64, Vec<usize>>,
    promises: Vec<Promise>,
}

fn poisoned() -> Image {
    let mut image = Image::new(BYTES);
    let block: Vec<u8> = POISON.iter().copied().cycle().take(1 << 20).collect();
    for at in (0..BYTES).step_by(block.len()) {
        image.write_at(at, &block);
    }
    image
}

/// Runs a workload below a new directory of the volume on a recorder, and notes what it was promised.
fn work(recorder: &Arc<Recorder>, random: &mut Random) -> (usize, Run) {
    let device: Arc<dyn BlockDevice> = recorder.clone();
    let fs = open(&device).expect("the volume can be opened");
    let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let new = NewNode { mode: 0o040755, umask: 0, rdev: 0, target: &[] };
    let name = format!("work {}", random.below(u64::MAX));
    let root = fs.wait(|| fs.create(&context, ROOT, name.as_bytes(), &new)).expect("there is room").ino;
    fs.commit().expect("nothing fails");
    let mut pair = Pair::below(fs, root);
    pair.reach = 400_000;
    let start = recorder.position();
    let history = vec![names(&pair.model)];
    let mut run = Run { root, history, began: Vec::new(), changed: BTreeMap::new(), promises: Vec::new() };
    run.promises.push(Promise { position: start, step: 0, files: BTreeMap::new() });
    for step in 0..STEPS {
        run.began.push(recorder.position());
        let before = pair.model.clone();
        pair.step(random);
        for (ino, node) in &pair.model.nodes {
            if matches!(node, Node::File(_)) && before.nodes.get(ino) != Some(node) {
                run.changed.entry(*ino).or_default().push(step);
            }
        }
        if random.below(8) == 0 {
            pair.fs.flush_all().expect("nothing fails");
            pair.fs.commit().expect("nothing fails");
            let files =
                pair.model.nodes.iter().filter_map(|(i, n)| if let Node::File(c) = n { Some((*i, c.clone())) } else { None });
            run.promises.push(Promise { position: recorder.position(), step: step + 1, files: files.collect() });
        }
        run.history.push(names(&pair.model));
    }
    (start, run)
}

/// Opens the volume after a crash and holds it to what was promised.
fn verify(image: Image, cut: usize, run: &Run, what: &str) {
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
    let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_sound(&fs, what);
    let (found, files) = walk(&fs, run.root);
    let promise = run.promises.iter().rev().find(|p| p.position <= cut).expect("the first one holds from the start");
    let last = run.began.iter().filter(|began| **began < cut).count();
    let possible = &run.history[promise.step..=last.max(promise.step)];
    assert!(possible.contains(&found), "{what}: names are of no moment since step {}: {found:?}", promise.step);
    for (ino, content) in &promise.files {
        let touched = run.changed.get(ino).is_some_and(|steps| steps.iter().any(|s| *s >= promise.step && *s < last));
        if files.contains(ino) && !touched {
            let read = fs.read(*ino, 0, content.len() + 1).expect("a sound volume can be read");
            assert!(
                read == *content,
                "{what}: inode {ino} was synced and is not whole ({} bytes of {})",
                read.len(),
                content.len()
            );
        }
    }
    for ino in files {
        let size = fs.wait(|| fs.attributes(ino)).expect("it was listed").inode.size;
        let read = fs.read(ino, 0, size as usize).expect("a sound volume can be read");
        assert!(!read.windows(POISON.len()).any(|w| w == POISON), "{what}: inode {ino} shows what was on the device before");
    }
    // It has to be usable, too, and close.
    fs.close().expect("a recovered volume can be closed");
}

/// Ways of losing writes: all, none, whole ones, blocks of them, sectors of them.
const MODES: u64 = 5;

/// One way of losing writes.
fn survives(mode: u64, random: &mut Random) -> impl FnMut(usize, u64) -> bool + '_ {
    let mut drawn: BTreeMap<(usize, u64), bool> = BTreeMap::new();
    move |event, sector| match mode {
        0 => false,
        1 => true,
        2 => *drawn.entry((event, 0)).or_insert_with(|| random.below(2) == 0),
        3 => *drawn.entry((event, sector / 8)).or_insert_with(|| random.below(2) == 0),
        _ => random.below(2) == 0,
    }
}

/// A new volume on a device that held something else.
fn fresh() -> Image {
    let memory = MemoryDevice::from_image(poisoned());
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    memory.snapshot()
}

/// Cuts the power at every point of a workload. Sometimes life goes on after a recovery, and the power is cut again: the
/// journal then goes over what the first crash left in it. Returns how many states were verified.
fn crash(base: Image, random: &mut Random, lives: u32, seed: u64, deadline: Instant) -> u64 {
    let recorder = Recorder::new(base);
    let (start, run) = work(&recorder, random);
    let log = recorder.log();
    let cuts: Vec<usize> = log.cuts().filter(|cut| *cut >= start).collect();
    let mut power_cuts = log.power_cuts();
    let mut states = 0;
    // Of a later life a few cuts are enough: there are many of them.
    let stride = if lives == LIVES { 1 } else { 1 + cuts.len() / 5 };
    for cut in cuts.into_iter().step_by(stride) {
        for mode in 0..MODES {
            if Instant::now() > deadline {
                return states;
            }
            let image = power_cuts.image(cut, survives(mode, random));
            let what = format!("CRASH_SEED={seed} life {lives} cut {cut} mode {mode}");
            if random.below(10) == 0 {
                // Power fails again while the volume recovers.
                let again = Recorder::new(image.clone());
                let device: Arc<dyn BlockDevice> = again.clone();
                open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
                let log = again.log();
                let cuts: Vec<usize> = log.cuts().collect();
                let second = cuts[random.below(cuts.len() as u64) as usize];
                let image = log.power_cuts().image(second, survives(mode, random));
                verify(image, cut, &run, &format!("{what}, then at {second} of recovery"));
                states += 1;
            }
            if lives > 0 && random.below(60) == 0 {
                states += crash(image.clone(), random, lives - 1, seed, deadline);
            }
            verify(image, cut, &run, &what);
            states += 1;
        }
    }
    states
}

#[test]
fn a_power_cut_anywhere_leaves_a_sound_volume_with_everything_that_was_promised() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let deadline = Instant::now() + Duration::from_secs(number("CRASH_SECONDS").unwrap_or(20));
    let (mut states, mut seeds) = (0, 0);
    match number("CRASH_SEED") {
        Some(seed) => states += crash(fresh(), &mut Random(seed), LIVES, seed, deadline),
        None => {
            while Instant::now() < deadline {
                states += crash(fresh(), &mut Random(seeds), LIVES, seeds, deadline);
                seeds += 1;
            }
        }
    }
    println!("{states} states after power cuts, {seeds} workloads");
    assert!(states > 0);
}

/// Creates one file and commits, on a recorder; returns its log.
fn create_one(base: Image, name: &[u8]) -> (Arc<Recorder>, usize) {
    let recorder = Recorder::new(base);
    let device: Arc<dyn BlockDevice> = recorder.clone();
    let fs = open(&device).expect("the volume can be opened");
    let start = recorder.position();
    let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&context, ROOT, name, &new)).expect("there is room");
    fs.commit().expect("nothing fails");
    (recorder, start)
}

#[test]
fn what_is_left_of_a_torn_transaction_never_completes_a_later_one() {
    // The first transaction loses its descriptor: its images lie in the journal, and it never was.
    let (recorder, start) = create_one(fresh(), b"first");
    let log = recorder.log();
    let cut = log.cuts().find(|cut| *cut > start).expect("a commit writes");
    let torn = log.power_cuts().image(cut, |_, sector| sector >= 8);
    // The second changes the same blocks in the same places, and loses one image at a time.
    let (recorder, start) = create_one(torn, b"second");
    let log = recorder.log();
    let cut = log.cuts().find(|cut| *cut > start).expect("a commit writes");
    for lost in 1..8 {
        let image = log.power_cuts().image(cut, |_, sector| sector / 8 != lost);
        let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
        let fs = open(&device).expect("the volume can be opened");
        assert_sound(&fs, &format!("without image {lost}"));
        let names: Vec<_> = walk(&fs, ROOT).0[&ROOT].keys().cloned().collect();
        assert!(names.is_empty() || names == [b"second"], "without image {lost}: {names:?}");
    }
}
