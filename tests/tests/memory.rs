//! The daemon's memory is what it was given, however much there is on the volume.

use std::fs::{self, File};

use gpunvme_tests::mounted::Image;
use gpunvme_tests::needs_mount;

const MIB: u64 = 1 << 20;
const CACHE: u64 = 16 * MIB;
const WRITE_BUFFER: u64 = 4 * MIB;
/// Images of metadata that are in the journal and not at home yet, and what they are written from: of a volume of 1 GiB.
const JOURNAL: u64 = 48 * MIB;
/// Names of this length make 80 MiB of metadata.
const NAME: usize = 200;
const FILES: usize = 150_000;
/// Memory for an inode that the kernel knows: the daemon has to count those.
const KNOWN: u64 = 64;

#[test]
fn metadata_takes_no_more_memory_than_the_cache_it_was_given() {
    needs_mount!();
    let mounted = Image::formatted().mount_with(&format!("cache={CACHE},write_buffer={WRITE_BUFFER}"));
    let idle = mounted.peak_memory();
    let path = |number: usize| mounted.path(format!("{number:0NAME$}"));
    (0..FILES).try_for_each(|number| File::create_new(path(number)).map(drop)).expect("they can be made");
    let seen = fs::read_dir(mounted.root())
        .expect("it can be listed")
        .filter(|entry| entry.as_ref().is_ok_and(|e| e.metadata().is_ok()));
    assert_eq!(seen.count(), FILES);
    let (grown, limit) = (mounted.peak_memory() - idle, CACHE + WRITE_BUFFER + JOURNAL + FILES as u64 * KNOWN);
    assert!(grown <= limit, "the daemon's memory has grown by {} MiB, and may by {}", grown / MIB, limit / MIB);
}
