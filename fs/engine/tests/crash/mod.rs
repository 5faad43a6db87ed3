//! Power cuts at every point of random workloads, with any subset of the unflushed writes lost or
//! torn, and again during recovery. After each, the volume has to open by itself, the checker has
//! to find nothing, and everything has to be as promised ([`history`]): names and attributes as
//! they were at one moment that is not before the last commit, files not behind what was synced,
//! each sector of them one that was written there or zeros, and inodes without a name gone.
//!
//! The same for volumes of several devices, each of which loses its own writes.
//!
//! `CRASH_SECONDS` sets the time budget (20 by default), `CRASH_SEED` replays one seed from its
//! start.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{ROOT, Random, assert_sound, make, open};
use gpunvme_blockdev::{BlockDevice, OpenMode};
use gpunvme_blockdev_testing::{Event, Image, Log, MemoryDevice, Recorder};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::superblock::Names;
use gpunvme_layout::{BLOCK_SIZE, Member, SetPlace, Striping, Timestamp};
use gpunvme_programs::members;

mod growth;
mod history;
mod names;
mod view;
mod world;

use history::History;
use view::View;
use world::World;

const BYTES: u64 = 32 << 20;
/// The unit of volumes of several members, in blocks: as small as can be, so that what is written
/// at once lies on several.
const UNIT: u32 = 16;
const STEPS: usize = 120;
/// Crashes that a volume goes through after the first.
const LIVES: u32 = 2;
/// Content of the device before it is formatted: no read of a file may ever return it.
const POISON: &[u8; 16] = b"*what was there*";

fn poisoned() -> Image {
    let mut image = Image::new(BYTES);
    let block: Vec<u8> = POISON.iter().copied().cycle().take(1 << 20).collect();
    for at in (0..BYTES).step_by(block.len()) {
        image.write_at(at, &block);
    }
    image
}

/// The volume on a recorder: on all of it, or on members that lie on it one behind the other.
fn volume(recorder: &Arc<Recorder>, members: u64) -> Result<Arc<dyn BlockDevice>, String> {
    if members == 1 {
        return Ok(recorder.clone());
    }
    let devices = recorder.members(members).into_iter().map(|device| (device.name().to_owned(), device));
    members::assemble(devices.collect(), OpenMode::ReadWrite)
}

/// Opens the volume after a crash and holds it to what was promised.
fn verify((image, members): (Image, u64), cut: usize, history: &History, what: &str) {
    let device = volume(&Recorder::new(image), members).unwrap_or_else(|error| panic!("{what}: {error}"));
    let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
    history.judge(&fs, cut, what);
}

/// Ways of losing writes: all, none, whole ones, blocks of them, sectors of them, those of members.
const MODES: u64 = 6;

/// One way of losing writes, on a volume of so many members.
fn survives<'a>(
    mode: u64,
    random: &'a mut Random,
    log: &'a Log,
    members: u64,
    bytes: u64,
) -> impl FnMut(usize, u64) -> bool + 'a {
    let mut drawn: BTreeMap<(usize, u64), bool> = BTreeMap::new();
    let loses: Vec<bool> = (0..members).map(|_| random.below(2) == 0).collect();
    move |event, sector| match mode {
        0 => false,
        1 => true,
        5 => match &log.events()[event] {
            Event::Write { offset, .. } | Event::Discard { offset, .. } | Event::WriteZeroes { offset, .. } => {
                !loses[(offset * members / bytes) as usize]
            }
            Event::Flush(_) | Event::Done(_) => true,
        },
        2 => *drawn.entry((event, 0)).or_insert_with(|| random.below(2) == 0),
        3 => *drawn.entry((event, sector / 8)).or_insert_with(|| random.below(2) == 0),
        _ => random.below(2) == 0,
    }
}

/// A new volume on a device, or on members, that held something else.
fn fresh(members: u64) -> Image {
    let recorder = Recorder::new(poisoned());
    if members == 1 {
        let device: Arc<dyn BlockDevice> = recorder.clone();
        make(&device);
        return recorder.snapshot();
    }
    let devices = recorder.members(members);
    let blocks = BYTES / members / BLOCK_SIZE as u64;
    let striping = Striping::new(&vec![blocks; members as usize], UNIT).expect("they are large enough");
    make(&members::stripe(devices.clone(), &[striping]).expect("a stripe"));
    let generation = members::generation(1).expect("random numbers");
    let names = Names { label: "test".into(), changed_uuid: None }; // as on the volume itself
    let member = Member {
        volume: [7; 16],
        names,
        uuid: [0; 16],
        index: 0,
        place: SetPlace::all(&[striping])[0],
        striping,
        blocks,
        generation,
    };
    members::format(&devices, &member, &vec![[1; 16]; members as usize]).expect("nothing fails");
    recorder.snapshot()
}

/// A volume whose journal has gone some way round.
fn aged(commits: u64, members: u64) -> Image {
    let recorder = Recorder::new(fresh(members));
    let device = volume(&recorder, members).expect("the members are there");
    let fs = open(&device).expect("the volume can be opened");
    let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    for _ in 0..commits {
        let ino = fs.wait(|| fs.create(&context, ROOT, b"old", &new)).expect("there is room").ino;
        fs.wait(|| fs.unlink(&context, ROOT, b"old")).expect("it is there");
        while fs.wait(|| fs.reap_step(ino)).expect("nothing fails") {}
        fs.commit().expect("nothing fails");
    }
    fs.close().expect("nothing fails");
    recorder.snapshot()
}

/// Cuts the power at every point of a workload. Sometimes life goes on after a recovery, and the
/// power is cut again: the journal then overwrites what the first crash left in it. Returns how
/// many states were verified.
fn crash((base, members): (Image, u64), random: &mut Random, lives: u32, seed: u64, deadline: Instant) -> u64 {
    let recorder = Recorder::new(base);
    let device = volume(&recorder, members).expect("the members are there");
    let world = World::begin(&recorder, device, random.below(u64::MAX));
    let start = recorder.position();
    (0..STEPS).for_each(|_| world.step());
    let history = world.end();
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
            let image = power_cuts.image(cut, survives(mode, random, &log, members, BYTES));
            let what = format!("CRASH_SEED={seed}, {members} members, life {lives} cut {cut} mode {mode}");
            if random.below(10) == 0 {
                // Power fails again while the volume recovers.
                let again = Recorder::new(image.clone());
                let device = volume(&again, members).unwrap_or_else(|error| panic!("{what}: {error}"));
                open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
                let log = again.log();
                let cuts: Vec<usize> = log.cuts().collect();
                let second = cuts[random.below(cuts.len() as u64) as usize];
                let image = log.power_cuts().image(second, survives(mode, random, &log, members, BYTES));
                verify((image, members), cut, &history, &format!("{what}, then at {second} of recovery"));
                states += 1;
            }
            if lives > 0 && random.below(60) == 0 {
                states += crash((image.clone(), members), random, lives - 1, seed, deadline);
            }
            verify((image, members), cut, &history, &what);
            states += 1;
        }
    }
    states
}

fn run(seed: u64, members: u64, deadline: Instant) -> u64 {
    let mut random = Random(seed);
    let base = aged(random.below(160), members);
    crash((base, members), &mut random, LIVES, seed, deadline)
}

/// Runs workloads until the time is over, on as many members as a seed says.
fn run_all(members: impl Fn(u64) -> u64) {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let deadline = Instant::now() + Duration::from_secs(number("CRASH_SECONDS").unwrap_or(20));
    let (mut states, mut seeds) = (0, 0);
    match number("CRASH_SEED") {
        Some(seed) => states += run(seed, members(seed), deadline),
        None => {
            while Instant::now() < deadline {
                states += run(seeds, members(seeds), deadline);
                seeds += 1;
            }
        }
    }
    println!("{states} states after power cuts, {seeds} workloads");
    assert!(states > 0);
}

#[test]
fn a_power_cut_anywhere_leaves_a_sound_volume_with_everything_that_was_promised() {
    run_all(|_| 1);
}

#[test]
fn so_it_does_where_each_member_of_a_volume_loses_its_own_writes() {
    run_all(|seed| [2, 4][seed as usize % 2]);
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
    let (recorder, start) = create_one(fresh(1), b"first");
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
        let names: Vec<_> = View::of(&fs, ROOT).names[&ROOT].keys().cloned().collect();
        assert!(names.is_empty() || names == [b"second"], "without image {lost}: {names:?}");
    }
}
