//! The daemon's memory stays within its limit, however much is on the volume and however many
//! inodes the kernel knows.

use std::fs::{self, File};

use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::needs_mount;
use rustix::fs::XattrFlags;

const MIB: u64 = 1 << 20;
const WRITE_BUFFER: u64 = 4 * MIB;
/// Images of metadata that are in the journal and not at home yet, and what they are written from:
/// of a volume of 1 GiB.
const JOURNAL: u64 = 48 * MIB;

fn assert_grown(mounted: &Mounted, idle: u64, limit: u64) {
    let grown = mounted.peak_memory() - idle;
    assert!(grown <= limit, "the daemon's memory has grown by {} MiB, and may by {}", grown / MIB, limit / MIB);
}

#[test]
fn metadata_takes_no_more_memory_than_the_cache_it_was_given() {
    needs_mount!();
    const CACHE: u64 = 16 * MIB;
    /// Names of this length make 80 MiB of metadata.
    const NAME: usize = 200;
    const FILES: usize = 150_000;
    let mounted = Image::formatted().mount_with(&format!("cache={CACHE},write_buffer={WRITE_BUFFER}"));
    let idle = mounted.peak_memory();
    let path = |number: usize| mounted.path(format!("{number:0NAME$}"));
    (0..FILES).try_for_each(|number| File::create_new(path(number)).map(drop)).expect("they can be made");
    let seen = fs::read_dir(mounted.root())
        .expect("it can be listed")
        .filter(|entry| entry.as_ref().is_ok_and(|e| e.metadata().is_ok()));
    assert_eq!(seen.count(), FILES);
    assert_grown(&mounted, idle, CACHE + WRITE_BUFFER + JOURNAL);
}

#[test]
fn the_cache_gives_way_to_what_is_known_of_files() {
    needs_mount!();
    const CACHE: u64 = 32 * MIB;
    /// What is known of so many files that were read takes 15 MiB or more.
    const FILES: usize = 80_000;
    /// Attributes of this size are more metadata than the cache holds.
    const ATTRIBUTE: usize = 60_000;
    const ATTRIBUTES: usize = 900;
    /// What requests take on their way.
    const REQUESTS: u64 = 12 * MIB;
    let options = format!("cache={CACHE},write_buffer={WRITE_BUFFER}");
    let mounted = Image::formatted().mount_with(&options);
    let files = |mounted: &Mounted| (0..FILES).map(|number| mounted.path(format!("{number}"))).collect::<Vec<_>>();
    let written = files(&mounted);
    written.iter().try_for_each(|path| fs::write(path, "x")).expect("there is room");
    let set = |path| rustix::fs::setxattr(path, "user.large", &vec![1; ATTRIBUTE], XattrFlags::empty());
    written[..ATTRIBUTES].iter().try_for_each(set).expect("there is room");

    let mounted = mounted.unmount().mount_with(&options);
    let idle = mounted.peak_memory();
    let read = files(&mounted);
    assert!(read.iter().all(|path| fs::read(path).expect("it can be read") == b"x"));
    let mut value = vec![0; ATTRIBUTE];
    assert!(read[..ATTRIBUTES].iter().all(|path| rustix::fs::getxattr(path, "user.large", &mut value[..]) == Ok(ATTRIBUTE)));
    assert_grown(&mounted, idle, CACHE + REQUESTS);
}
