//! Attacks by more calls that wait than the daemon has threads for.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack};
use gpunvme_tests::{attacks, needs_mount};
use rustix::fs::{SeekFrom, copy_file_range, seek};

pub const ATTACKS: &[(&str, Attack)] = attacks![copy_in_many_threads];

/// Calls in flight: several times as many as the daemon has threads for them.
const CALLS: usize = 400;
const LEN: usize = 1 << 20;
const SEEKS: u64 = 20;

/// Copies a file to as many others by calls at once, until it is killed, and says when it is asked
/// how many copies there were.
fn copy_in_many_threads(attacker: &mut Attacker) {
    let create = |name: &str| File::options().read(true).write(true).create_new(true).open(attacker.path(name)).unwrap();
    let from = create("from");
    from.write_all_at(&[5; LEN], 0).unwrap();
    from.sync_all().unwrap();
    let copies: Vec<File> = (0..CALLS).map(|number| create(&format!("copy {number}"))).collect();
    let done = AtomicU64::new(0);
    thread::scope(|scope| {
        for copy in &copies {
            let (from, done) = (&from, &done);
            thread::Builder::new()
                .stack_size(64 << 10)
                .spawn_scoped(scope, move || {
                    loop {
                        copy_file_range(from, Some(&mut 0), copy, Some(&mut 0), LEN).unwrap();
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                })
                .unwrap();
        }
        while done.load(Ordering::Relaxed) < CALLS as u64 {
            thread::yield_now();
        }
        loop {
            attacker.say(done.load(Ordering::Relaxed));
            attacker.wait_for("and now");
        }
    });
}

/// A call of another user waits for its turn, and not for all calls that came before it.
#[test]
fn a_user_with_very_many_calls_that_wait_holds_no_other_up() {
    needs_mount!();
    let volume = attack::volume("");
    let file = File::create_new(volume.path("file")).unwrap();
    file.set_len(1).unwrap();
    let mut attack = RunningAttack::begin(&volume, NOBODY, "copy_in_many_threads");
    let before: u64 = attack.hear().parse().unwrap();
    for _ in 0..SEEKS {
        assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(0));
    }
    attack.say("and now");
    let copies = attack.hear().parse::<u64>().unwrap() - before;
    attack.kill();
    eprintln!("{} copies during a seek", copies / SEEKS);
    assert!(copies / SEEKS < CALLS as u64 / 4, "{copies} copies during {SEEKS} seeks");
    drop(file);
    volume.unmount();
}
