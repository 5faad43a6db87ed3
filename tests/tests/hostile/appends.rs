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
/// How long a part waits that may.
const WAIT: Duration = Duration::from_secs(2);
/// What took that long has waited so: a busy machine makes others take long, too.
const WAITED: Duration = Duration::from_millis(1950);
/// What a victim does not wait for.
const LONG: Duration = Duration::from_millis(1500);

/// Writes a block behind the end of a new file that is open for appending. The kernel does not tell
/// that the place is meant, so that this looks like the second part of an append.
fn append_without_beginning(path: &Path) -> rustix::io::Result<()> {
    let file = OpenOptions::new().append(true).create(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let flags = ReadWriteFlags::from_bits_retain(libc::RWF_NOAPPEND as u32);
    pwritev2(file, &[IoSlice::new(&[7; BLOCK])], 1 << 20, flags).map(drop)
}

/// Says how many of its writes had to wait for long, and the milliseconds that all took; or that
/// nothing of that kind can be done here.
fn append_without_beginnings(attacker: &mut Attacker) {
    if append_without_beginning(&attacker.path("first")) == Err(Errno::OPNOTSUPP) {
        return attacker.say("this kernel has no RWF_NOAPPEND");
    }
    let begun = Instant::now();
    let late = thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|number| {
                let path = attacker.path(format!("file{number}"));
                scope.spawn(move || {
                    let begun = Instant::now();
                    append_without_beginning(&path).unwrap();
                    begun.elapsed() >= WAITED
                })
            })
            .collect();
        attacker.say("begun");
        writers.into_iter().map(|writer| writer.join().unwrap()).filter(|late| *late).count()
    });
    attacker.say(format!("{late} {}", begun.elapsed().as_millis()));
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
    let said = attack.hear();
    let (waited, took) = said.split_once(' ').unwrap();
    let (waited, took): (usize, u64) = (waited.parse().unwrap(), took.parse().unwrap());
    let took = Duration::from_millis(took);
    victim.say("so far");
    let fares: Latencies = victim.hear().parse().unwrap();
    let read = reader.end();
    eprintln!("{waited} of {THREADS} waited in {took:.1?}; a victim's {fares}, its direct reads {read:.1?}");
    // Where a busy machine begins some writes after the first have waited to their end, as many
    // again wait then. Without a share all would, 64 at a time.
    let most = SHARE * (1 + (took.as_millis() / WAIT.as_millis()) as usize);
    assert!((1..=most).contains(&waited), "{waited} of {THREADS} waited in {took:?}");
    assert!(fares.longest().max(read) < LONG, "a victim's {fares}, its direct reads {read:?}");
    attack.end();
    victim.say("end");
    victim.end();
    volume.unmount();
}
