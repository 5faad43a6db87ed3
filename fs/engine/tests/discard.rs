//! Discards: what no file has, and nothing else; and devices without the command.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, StripeDevice, StripeMap, StripeSet};
use gpunvme_blockdev_testing::{Image, MemoryDevice, Recorder};
use gpunvme_engine::Filesystem;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, assert_sound, make, open};

const MIB: u64 = 1 << 20;
const CONTEXT: Context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };

fn write(fs: &Arc<Filesystem>, name: &[u8], byte: u8, len: usize) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&CONTEXT, ROOT, name, &new)).expect("there is room").ino;
    fs.hold_file(ino);
    // The write buffer takes no more at once.
    for at in (0..len).step_by(MIB as usize) {
        let piece = vec![byte; (len - at).min(MIB as usize)];
        fs.wait(|| fs.write(ino, at as u64, &piece, CONTEXT.now)).expect("there is room");
        fs.sync_file(ino).expect("nothing fails");
    }
    // What is reserved ahead for a file that grows is not told of.
    fs.let_go_of_file(ino);
    ino
}

fn remove(fs: &Arc<Filesystem>, name: &[u8], ino: u64) {
    fs.wait(|| fs.unlink(&CONTEXT, ROOT, name)).expect("it is there");
    while fs.wait(|| fs.reap_step(ino)).expect("nothing fails") {}
}

/// Trims the whole volume, call by call.
fn trim(fs: &Filesystem, minimum: u64) -> u64 {
    let (mut at, mut blocks) = (Some(0), 0);
    while let Some(from) = at {
        let trimmed = fs.volume().trim(from, u64::MAX, minimum).expect("nothing fails");
        assert!(trimmed.next.is_none_or(|next| next > from));
        (at, blocks) = (trimmed.next, blocks + trimmed.blocks);
    }
    blocks
}

/// Bytes of the device that are one of these.
fn count(device: &MemoryDevice, byte: u8) -> usize {
    let image = device.snapshot();
    let mut piece = vec![0; 1 << 20];
    (0..image.len() / MIB)
        .map(|at| {
            image.read_at(at * MIB, &mut piece);
            piece.iter().filter(|b| **b == byte).count()
        })
        .sum()
}

#[test]
fn a_trim_tells_of_all_that_no_file_has_and_of_nothing_else() {
    let device = MemoryDevice::new(512 * MIB);
    let opened: Arc<dyn BlockDevice> = device.clone();
    make(&opened);
    let fs = open(&opened).expect("it opens");
    let kept = write(&fs, b"kept", 0xa1, 3_000_000);
    let gone = write(&fs, b"gone", 0xb2, 3_000_000);
    remove(&fs, b"gone", gone);
    assert!(count(&device, 0xb2) >= 3_000_000);
    let free = fs.volume().usage().free;
    let trimmed = trim(&fs, 0);
    assert!(trimmed <= free && trimmed > free - 512, "{trimmed} of {free}");
    assert!(count(&device, 0xb2) < 4096, "but for names and the like");
    assert_eq!(fs.read(kept, 0, 4 << 20).expect("it can be read"), vec![0xa1; 3_000_000]);
    assert_eq!(trim(&fs, 1 << 40), 0, "nothing is as long as that");
    assert_eq!(fs.volume().trim(1 << 40, 1 << 41, 0).expect("nothing fails").blocks, 0, "nor does the volume end there");
    // It can all be used at once.
    write(&fs, b"new", 0xc3, 3_000_000);
    assert_sound(&fs, "after a trim");
}

/// A batch has a quarter of what is free: of a run that is longer, the rest counts as long too.
#[test]
fn a_run_that_is_long_enough_is_told_of_to_its_end() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 * MIB);
    make(&device);
    let fs = open(&device).expect("it opens");
    let free = fs.volume().usage().free;
    let trimmed = trim(&fs, 40 * MIB / 4096);
    assert!(trimmed > free - 2048, "{trimmed} of {free}");
    assert_eq!(trim(&fs, free + 1), 0);
}

#[test]
fn a_full_volume_is_full_during_a_trim_and_not_before() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 * MIB);
    make(&device);
    let fs = open(&device).expect("it opens");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                trim(&fs, 0);
            }
        });
        for round in 0..20 {
            let available = fs.volume().usage().available * 4096;
            let ino = write(&fs, b"large", round, (available / 2) as usize);
            remove(&fs, b"large", ino);
            fs.commit().expect("nothing fails");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert_sound(&fs, "after trims beside writes");
}

#[test]
fn a_device_without_discard_is_named() {
    let lacking = || {
        let image = Image::new(64 * MIB);
        let geometry = gpunvme_blockdev::Geometry { discard: false, ..MemoryDevice::new(64 * MIB).geometry().clone() };
        MemoryDevice::with_geometry(image, geometry)
    };
    let alone: Arc<dyn BlockDevice> = lacking();
    let members: Vec<Arc<dyn BlockDevice>> = vec![Recorder::new(Image::new(64 * MIB)), lacking()];
    let striped: Arc<dyn BlockDevice> = StripeDevice::new(
        members,
        StripeMap::new(&[StripeSet { members: 2, unit: 65536, data: 0, data_len: 64 * MIB }]),
        128 * MIB,
    )
    .expect("a stripe");
    for device in [alone, striped] {
        make(&device);
        let fs = open(&device).expect("it opens");
        let refused = fs.volume().trim(0, u64::MAX, 0).expect_err("it has no such command");
        assert!(matches!(&refused, FsError::NoDiscard { device } if device == "memory"), "{refused}");
    }
}
