//! Orders of completion: several callers at once on the same few files, on a device that executes
//! its requests in any order, fails and loses power ([`device`]), against a model of what each
//! byte, each size and each answer may be ([`expected`]). The callers are threads of which one runs
//! at a time ([`schedule`]), so that a seed always gives the same run, and a thread that waits for
//! ever is found.
//!
//! `ORDERS_SECONDS` sets the time budget (6 by default), `ORDERS_SEED` replays one seed. A failing
//! case is made smaller first: with fewer kinds of operations, fewer of them, and fewer callers.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::{Image, MemoryDevice};

use crate::common::{Random, make};

mod callers;
mod device;
mod expected;
mod many;
mod schedule;
mod world;

use callers::{Caller, KINDS};
use device::Habits;
use schedule::Style;
use world::World;

const BYTES: u64 = 128 << 20;
/// A run in which no thread gets a turn for this long stands still.
const STANDSTILL: Duration = Duration::from_secs(60);
/// Time that is spent on making a failure smaller, at about the most.
const SHRINKING: Duration = Duration::from_secs(30);

/// One run.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub seed: u64,
    pub callers: usize,
    /// Operations of all callers together.
    pub operations: u64,
    /// Which kinds of them: a bit for each of [`KINDS`].
    kinds: u64,
    /// Names that files have.
    names: u64,
    /// About how long files are, in bytes.
    reach: u64,
    write_buffer: usize,
    /// Power goes in one of so many turns; never if 0.
    cuts: u64,
    habits: Habits,
    style: Style,
}

impl Case {
    fn of(seed: u64) -> Case {
        let mut random = Random(seed);
        let mut one_of = |choices: &[u64]| choices[random.below(choices.len() as u64) as usize];
        let mut case = Case {
            seed,
            callers: one_of(&[2, 3, 4, 6, 8]) as usize,
            operations: one_of(&[100, 200, 400, 800]),
            kinds: (1 << KINDS.len()) - 1,
            names: one_of(&[1, 2, 3, 4]),
            reach: one_of(&[20_000, 80_000, 300_000, 1_200_000]),
            write_buffer: one_of(&[256 << 10, 4 << 20]) as usize,
            cuts: one_of(&[0, 150, 600]),
            habits: Habits {
                prompt: one_of(&[0, 3, 10]),
                quick: one_of(&[1, 3, 7]),
                slow: one_of(&[0, 5, 30, 90]),
                patience: one_of(&[50, 400, 1000]),
                fails: one_of(&[0, 0, 0, 200, 50]),
            },
            style: Style { sticky: one_of(&[0, 5, 8]) },
        };
        // Some have writers that are never done, and operations that wait for what they write.
        if one_of(&[0, 1, 2, 3, 4]) == 0 {
            let few: &[&str] = match one_of(&[0, 1]) {
                0 => &["write", "rename"],
                _ => &["write", "direct write", "fsync", "truncate", "rename", "open"],
            };
            case.kinds = KINDS.iter().enumerate().map(|(kind, (name, _))| u64::from(few.contains(name)) << kind).sum();
            (case.callers, case.operations, case.names, case.cuts) = (8, 800, 2, 0);
            case.reach = case.reach.min(80_000);
            case.habits = Habits { quick: 1, slow: 90, patience: 100, ..case.habits };
            return case;
        }
        // Some have few kinds, and more of each.
        if one_of(&[0, 1, 2]) == 0 {
            case.kinds =
                (0..KINDS.len()).map(|kind| u64::from(one_of(&[0, 0, 1]) == 1) << kind).sum::<u64>() | 1 << (KINDS.len() - 1);
        }
        case
    }
}

/// A formatted volume on a device that held something else before.
fn fresh() -> Image {
    static FRESH: OnceLock<Image> = OnceLock::new();
    let make_it = || {
        let mut image = Image::new(BYTES);
        let block: Vec<u8> = b"*what was there*".iter().copied().cycle().take(1 << 20).collect();
        (0..BYTES).step_by(block.len()).for_each(|at| image.write_at(at, &block));
        let memory = MemoryDevice::from_image(image);
        make(&(memory.clone() as Arc<dyn BlockDevice>));
        memory.snapshot()
    };
    FRESH.get_or_init(make_it).clone()
}

/// Runs a case. Returns what went wrong.
fn run(case: Case) -> Result<(), String> {
    let world = World::new(case, fresh());
    world.device.tame(false);
    let (sender, receiver) = channel();
    let threads = (0..=case.callers).map(|number| {
        let (world, sender) = (world.clone(), sender.clone());
        let body = move || {
            world.schedule.join(number);
            let work = || if number == 0 { world.serve() } else { Caller::run(&world) };
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
                Ok(()) if world.schedule.leave() => drop(sender.send(Ok(()))),
                Ok(()) => {}
                Err(panic) => {
                    world.schedule.abandon();
                    let _ = sender.send(Err(message(&*panic)));
                }
            }
        };
        std::thread::Builder::new().name(format!("orders {} caller {number}", case.seed)).spawn(body).expect("a thread")
    });
    let threads: Vec<_> = threads.collect();
    world.schedule.start(threads.iter().map(|thread| thread.thread().clone()).collect());
    let result = loop {
        let turns = world.schedule.turns();
        match receiver.recv_timeout(STANDSTILL) {
            Ok(result) => break result,
            Err(RecvTimeoutError::Timeout) if world.schedule.turns() > turns => {}
            Err(_) => break Err("it stands still: a thread waits for what the schedule does not know of".to_string()),
        }
    };
    let result = result.and_then(|()| {
        threads.into_iter().for_each(|thread| thread.join().expect("it did not panic"));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.end())).map_err(|panic| message(&*panic))
    });
    result.map_err(|wrong| format!("{wrong}\n{}", world.story()))
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a word").to_string()
}

/// The smallest case found that fails as well, and what went wrong in it.
fn shrink(mut case: Case, mut wrong: String) -> (Case, String) {
    let deadline = Instant::now() + SHRINKING;
    let mut attempt = |smaller: Case, case: &mut Case| {
        let failed = if Instant::now() > deadline { None } else { run(smaller).err() };
        failed.into_iter().for_each(|failed| (*case, wrong) = (smaller, failed));
    };
    for kind in 0..KINDS.len() - 1 {
        if case.kinds & (1 << kind) != 0 {
            attempt(Case { kinds: case.kinds & !(1 << kind), ..case }, &mut case);
        }
    }
    attempt(Case { cuts: 0, ..case }, &mut case);
    attempt(Case { habits: Habits { fails: 0, ..case.habits }, ..case }, &mut case);
    for _ in 0..3 {
        attempt(Case { operations: case.operations / 2, ..case }, &mut case);
        attempt(Case { operations: case.operations * 3 / 4, ..case }, &mut case);
        attempt(Case { callers: (case.callers / 2).max(1), ..case }, &mut case);
        attempt(Case { callers: (case.callers - 1).max(1), ..case }, &mut case);
    }
    (case, wrong)
}

#[test]
fn whatever_order_a_device_completes_in_files_hold_what_some_order_of_the_operations_leaves() {
    let number = |name: &str| std::env::var(name).ok().map(|v| v.parse::<u64>().expect("a number"));
    let deadline = Instant::now() + Duration::from_secs(number("ORDERS_SECONDS").unwrap_or(6));
    let one = number("ORDERS_SEED");
    // A campaign goes on where no run of the tests comes by.
    let first = one.unwrap_or(if number("ORDERS_SECONDS").is_some() { u64::from(std::process::id()) << 20 } else { 0 });
    let mut runs = 0;
    for seed in first.. {
        let case = Case::of(seed);
        if let Err(wrong) = run(case) {
            println!("ORDERS_SEED={seed} fails; a smaller run is looked for");
            let (smallest, wrong) = shrink(case, wrong);
            let kinds = KINDS.iter().enumerate().filter(|(kind, _)| smallest.kinds & (1 << kind) != 0);
            let kinds: Vec<&str> = kinds.map(|(_, (name, _))| *name).collect();
            panic!("ORDERS_SEED={seed}: {wrong}\n{smallest:?}\n{kinds:?}");
        }
        runs += 1;
        if one.is_some() || Instant::now() > deadline {
            break;
        }
    }
    println!("{runs} runs from seed {first} on");
}
