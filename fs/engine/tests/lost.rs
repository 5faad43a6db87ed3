//! Data that a device failed to take: who asks whether all is durable is told, what the device did
//! all the same behind the end of a file never comes back, and what waits for blocks that a slow
//! transfer holds waits for that.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::common::{ROOT, assert_sound, make, open};
use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Region};
use gpunvme_blockdev_testing::{Faulty, MemoryDevice, On, Rule};
use gpunvme_engine::Filesystem;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;

const NOW: Timestamp = Timestamp { seconds: 1, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };

/// A volume on a device that can fail, and a file that is held open.
struct Site {
    faulty: Arc<Faulty>,
    device: Arc<dyn BlockDevice>,
    fs: Arc<Filesystem>,
    ino: u64,
}

impl Site {
    fn new() -> Site {
        let faulty = Faulty::new(MemoryDevice::new(64 << 20));
        let device: Arc<dyn BlockDevice> = faulty.clone();
        make(&device);
        let fs = open(&device).expect("nothing fails yet");
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        let ino = fs.wait(|| fs.create(&WHO, ROOT, b"file", &new)).expect("nothing fails").ino;
        fs.hold_file(ino);
        Site { faulty, device, fs, ino }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.fs.wait(|| self.fs.write(self.ino, offset, bytes, NOW)).expect("there is room");
    }

    /// Has the next write of a block of the file, which is on the device, fail.
    fn fail_block(&self, block: u64) {
        let (mappings, _) = self.fs.wait(|| self.fs.resolve(self.ino, block, block + 1, 1)).expect("nothing fails");
        let at = mappings[0].device_offset();
        self.faulty.add(Rule::fail(On::Write, libc::EIO).within(at..at + 4096).once());
    }

    fn resize(&self, size: u64) {
        self.fs.wait(|| self.fs.set_size(&WHO, self.ino, size)).expect("nothing fails");
        self.fs.sync_file(self.ino).expect("nothing fails");
    }

    fn size(&self) -> u64 {
        self.fs.wait(|| self.fs.attributes(self.ino)).expect("it is there").inode.size
    }

    /// The end of a file, after the volume was opened anew.
    fn end_anew(self, from: u64, len: usize) -> Vec<u8> {
        self.fs.let_go_of_file(self.ino);
        let _ = self.fs.close(); // it says that data was lost
        drop(self.fs);
        let fs = open(&self.device).expect("it was closed");
        assert_sound(&fs, "after a loss");
        fs.read(self.ino, from, len).expect("it can be read")
    }
}

fn is_eio(result: Result<(), FsError>) -> bool {
    result.is_err_and(|error| error.errno() == libc::EIO)
}

#[test]
fn a_sync_of_all_files_tells_of_data_that_was_lost_in_it_or_before() {
    let site = Site::new();
    let geometry = site.fs.volume().superblock().geometry();
    let fail = || {
        let data = geometry.data * 4096..geometry.data_end() * 4096;
        site.faulty.add(Rule::fail(On::Write, libc::EIO).within(data).once());
    };
    site.write(0, &[7; 5000]);
    fail();
    assert!(is_eio(site.fs.sync_all()), "lost in it");
    site.fs.sync_all().expect("it told of that");
    site.write(0, &[8; 5000]);
    fail();
    site.fs.flush_file(site.ino).expect("it reports what it could not wait for");
    assert!(is_eio(site.fs.sync_file(site.ino)), "one caller learns of it");
    assert!(is_eio(site.fs.sync_all()), "and so does one who asks for all files");
    site.fs.sync_all().expect("it told of that");
    assert_eq!(site.fs.take_lossy().into_iter().collect::<Vec<_>>(), [site.ino]);
    assert!(site.fs.take_lossy().is_empty());
}

#[test]
fn what_a_failed_append_left_behind_the_end_never_becomes_part_of_the_file() {
    const SIZE: u64 = 2 * 4096 + 100;
    for direct in [false, true] {
        let site = Site::new();
        site.write(0, &[7; SIZE as usize]);
        site.fs.sync_file(site.ino).expect("nothing fails");
        // The first block fails; the tail, with what is appended, is done by the device.
        site.fail_block(0);
        if direct {
            let region = Region::allocate(3 * 4096).expect("memory");
            region.write_at(0, &[9; 3 * 4096]).expect("inside");
            let segment = Segment { file_offset: 0, buffer_offset: 0, len: 3 * 4096 };
            let write = site.fs.wait(|| site.fs.plan_direct_write(site.ino, &[segment], &region, NOW)).expect("there is room");
            site.fs.submit_direct_write(write, |result| assert!(result.is_err(), "the device failed"));
        } else {
            site.write(0, &[8; 4096]);
            site.write(SIZE, &[9; 1000]);
            assert!(is_eio(site.fs.sync_file(site.ino)), "the device failed");
        }
        assert_eq!(site.size(), SIZE, "direct: {direct}");
        site.resize(SIZE);
        site.resize(20_000);
        let end = site.end_anew(SIZE, 20_000 - SIZE as usize);
        assert!(end.iter().all(|byte| *byte == 0), "direct: {direct}");
    }
}

#[test]
fn a_file_does_not_grow_by_preallocation_over_a_tail_that_cannot_be_zeroed() {
    let site = Site::new();
    site.write(0, &[7; 4096]);
    site.resize(100);
    site.fail_block(0);
    assert!(is_eio(site.fs.allocate(&WHO, site.ino, 0, 1 << 20, Allocate::Reserve { grow: true })));
    assert_eq!(site.size(), 100);
    site.fs.allocate(&WHO, site.ino, 0, 1 << 20, Allocate::Reserve { grow: true }).expect("nothing fails any more");
    let end = site.end_anew(100, 4096);
    assert!(end.iter().all(|byte| *byte == 0));
}

#[test]
fn what_needs_blocks_that_a_slow_transfer_holds_waits_for_its_end() {
    let site = Site::new();
    let piece = [7; 1 << 20];
    let mut size = 0;
    while site.fs.wait(|| site.fs.write(site.ino, size, &piece, NOW)).is_ok() {
        size += piece.len() as u64;
        site.fs.sync_file(site.ino).expect("nothing fails");
    }
    // As a transfer has it whose answer takes longer than an operation waits for blocks.
    let transfer = site.fs.guard();
    site.resize(0);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            (0..size / 2).step_by(piece.len()).for_each(|at| site.write(at, &piece));
            site.fs.sync_file(site.ino)
        });
        thread::sleep(Duration::from_millis(1500));
        assert!(!writer.is_finished(), "the blocks are held");
        drop(transfer);
        writer.join().expect("it does not panic").expect("there was room when the transfer ended");
    });
    // Where no transfer holds any, a full volume is told at once.
    while site.fs.wait(|| site.fs.write(site.ino, site.size(), &piece, NOW)).is_ok() {}
}
