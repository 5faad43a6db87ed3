//! A volume that another program formats, mounts or repairs while it is mounted: the mount notices
//! before it overwrites what is not its own any more.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::Filesystem;
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, assert_sound, make, open};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };

fn create(fs: &Arc<Filesystem>, name: &str, content: &[u8]) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new)).expect("there is room").ino;
    fs.wait(|| fs.write(ino, 0, content, NOW)).expect("there is room");
    ino
}

fn bytes(image: &Image) -> Vec<u8> {
    let mut bytes = vec![0; image.len() as usize];
    image.read_at(0, &mut bytes);
    bytes
}

/// A mount that has written, what another does to its device, and what the mount does then.
fn taken(other: fn(&Arc<dyn BlockDevice>), then: fn(&Arc<Filesystem>) -> Result<(), FsError>) {
    let memory = MemoryDevice::new(24 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let first = open(&device).expect("a new volume can be opened");
    // It could grow.
    memory.extend(48 << 20);
    let ino = create(&first, "first", &[1; 100_000]);
    first.sync_file(ino).expect("nothing fails");
    // Something waits in memory.
    create(&first, "waits", &[2; 100_000]);
    other(&device);
    let before = bytes(&memory.snapshot());
    first.volume().look_again();
    let error = then(&first).expect_err("it is another's now");
    assert!(matches!(error, FsError::Taken { .. }) && error.errno() == libc::EROFS, "{error}");
    assert!(error.to_string().contains(device.name()), "{error}");
    assert!(first.volume().is_read_only());
    // Nor does anything that comes later write.
    let _ = first.flush_all();
    let _ = first.commit();
    let _ = first.volume().checkpoint();
    let _ = first.close();
    assert!(bytes(&memory.snapshot()) == before, "it wrote over what is another's");
    assert_sound(&open(&device).expect("what the other left can be opened"), "the other's");
}

fn formats(device: &Arc<dyn BlockDevice>) {
    make(device);
    let second = open(device).expect("it was made");
    let ino = create(&second, "second", &[3; 300_000]);
    second.sync_file(ino).expect("nothing fails");
    second.close().expect("nothing fails");
}

fn mounts(device: &Arc<dyn BlockDevice>) {
    let second = open(device).expect("it can be opened");
    let ino = create(&second, "second", &[3; 300_000]);
    second.sync_file(ino).expect("nothing fails");
}

fn repairs(device: &Arc<dyn BlockDevice>) {
    let options = CheckOptions { read_only: false, memory: 64 << 20, now: NOW, stop: Stop::default() };
    let mut fsck = Fsck::open(Io::inline(device.clone()).expect("a queue"), options).expect("it can be opened");
    fsck.repair(&mut |_| true, &mut |_, _, _| ()).expect("nothing fails");
    fsck.close(true).expect("nothing fails");
}

#[test]
fn a_mount_whose_device_was_taken_discards_nothing() {
    taken(formats, |fs| fs.volume().trim(0, u64::MAX, 0).map(|_| ()));
    taken(mounts, |fs| fs.volume().trim(0, u64::MAX, 0).map(|_| ()));
}

#[test]
fn a_commit_writes_nothing_where_another_has_formatted_mounted_or_repaired() {
    for other in [formats, mounts, repairs] {
        taken(other, |fs| fs.commit());
    }
}

#[test]
fn nor_does_a_checkpoint_or_an_unmount() {
    for other in [formats, mounts, repairs] {
        taken(other, |fs| fs.volume().checkpoint());
        taken(other, |fs| fs.volume().look_before_writing());
        taken(other, |fs| fs.volume().close());
    }
}

#[test]
fn nor_does_a_growth() {
    let grow = |fs: &Arc<Filesystem>| {
        fs.volume().device().look_again().expect("nothing fails");
        fs.volume().grow().map(drop)
    };
    for other in [formats, mounts, repairs] {
        taken(other, grow);
        taken(other, |fs| fs.volume().may_grow());
    }
}

#[test]
fn who_only_reads_disturbs_nobody() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(24 << 20);
    make(&device);
    let first = open(&device).expect("a new volume can be opened");
    let ino = create(&first, "first", &[1; 100_000]);
    first.sync_file(ino).expect("nothing fails");
    let options = CheckOptions { read_only: true, memory: 64 << 20, now: NOW, stop: Stop::default() };
    let fsck = Fsck::open(Io::inline(device.clone()).expect("a queue"), options).expect("it can be opened");
    fsck.check(&mut |_, _, _| ()).expect("nothing fails");
    for n in 0..5 {
        create(&first, &format!("more {n}"), b"bytes");
        first.volume().look_again();
        first.commit().expect("nothing was written");
        first.volume().checkpoint().expect("nothing was written");
    }
    first.close().expect("nothing was written");
}
