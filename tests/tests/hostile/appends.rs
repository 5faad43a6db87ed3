//! Attacks by appends past the page cache: a part of one whose beginning never comes.

use std::fs::{self, File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack};
use gpunvme_tests::observe::Victim;
use gpunvme_tests::{attacks, needs_mount, report_skipped, tree};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};

use crate::victim::{self, Latencies};

pub const ATTACKS: &[(&str, Attack)] = attacks![append_without_beginnings];

const BLOCK: usize = 4096;
/// More than the kernel has in flight in the background for one mount.
const THREADS: usize = 300;
/// What a user may have wait of 64 parts, having no other users beside.
const SHARE: usize = 28;
/// Where a busy machine begins some writes after the first have waited to their end, as many again
/// wait then. Without a share all 64 would at once.
const MOST: usize = 2 * SHARE;
/// A part that may wait does so for two seconds.
const LONG: Duration = Duration::from_millis(1500);

/// Writes a block behind the end of a new file that is open for appending. The kernel does not tell
/// that the place is meant, so that this looks like the second part of an append.
fn append_without_beginning(path: &Path) -> rustix::io::Result<()> {
    let file = OpenOptions::new().append(true).create(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let flags = ReadWriteFlags::from_bits_retain(libc::RWF_NOAPPEND as u32);
    pwritev2(file, &[IoSlice::new(&[7; BLOCK])], 1 << 20, flags).map(drop)
}

/// Says how many of its writes had to wait for long; or nothing of that kind can be done here.
fn append_without_beginnings(attacker: &mut Attacker) {
    if append_without_beginning(&attacker.path("first")) == Err(Errno::OPNOTSUPP) {
        return attacker.say("this kernel has no RWF_NOAPPEND");
    }
    let late = thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|number| {
                let path = attacker.path(format!("file{number}"));
                scope.spawn(move || {
                    let begun = Instant::now();
                    append_without_beginning(&path).unwrap();
                    begun.elapsed() >= LONG
                })
            })
            .collect();
        attacker.say("begun");
        writers.into_iter().map(|writer| writer.join().unwrap()).filter(|late| *late).count()
    });
    attacker.say(late);
}

/// The requests that the kernel has in flight in the background, and memory for them, are there for
/// all users. What a user may not have of them goes on at once.
#[test]
fn appends_without_a_beginning_leave_requests_to_others() {
    needs_mount!();
    let volume = attack::volume("");
    let (mut victim, _) = victim::begin(&volume);
    fs::write(volume.path("read"), tree::pattern(3, 1 << 20)).unwrap();
    fs::set_permissions(volume.path("read"), PermissionsExt::from_mode(0o644)).unwrap();
    let reader = Victim::begin({
        let file = File::options().read(true).custom_flags(libc::O_DIRECT).open(volume.path("read")).unwrap();
        let mut bytes = vec![0; 1 << 20];
        move || assert_eq!(rustix::io::pread(&file, &mut bytes, 0), Ok(1 << 20))
    });
    let mut attack = RunningAttack::begin(&volume, NOBODY, "append_without_beginnings");
    let said = attack.hear();
    if said != "begun" {
        return report_skipped("appends_without_a_beginning_leave_requests_to_others", &said);
    }
    let waited: usize = attack.hear().parse().unwrap();
    victim.say("so far");
    let fares: Latencies = victim.hear().parse().unwrap();
    let read = reader.end();
    eprintln!("{waited} of {THREADS} waited; a victim's {fares}, its direct reads {read:.1?}");
    assert!((1..=MOST).contains(&waited), "{waited} of {THREADS} waited");
    assert!(fares.longest().max(read) < LONG, "a victim's {fares}, its direct reads {read:?}");
    attack.end();
    victim.say("end");
    victim.end();
    volume.unmount();
}
