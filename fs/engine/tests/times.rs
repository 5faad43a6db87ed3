//! The time of a change of content: that of the last change, whatever time a program had set
//! before, and whatever happens before it is stored.

use std::sync::Arc;

use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Region};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::Filesystem;
use gpunvme_engine::data::Settling;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::volume::{Context, NewNode, RenameMode, SetAttributes};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, make, open};

const CREATED: Timestamp = at(1000);
const WRITTEN: Timestamp = at(1010);
const LATER: Timestamp = at(1020);

const fn at(seconds: i64) -> Timestamp {
    Timestamp { seconds, nanoseconds: 0 }
}

const fn who(now: Timestamp) -> Context {
    Context { uid: 0, gid: 0, now }
}

type Step = (&'static str, fn(&Arc<Filesystem>, u64));

/// Writes, of which the inode does not learn at once.
const WRITES: [Step; 3] = [
    ("write", |fs, ino| fs.wait(|| fs.write(ino, 100, &[2; 100], WRITTEN)).unwrap()),
    ("direct write in place", |fs, ino| direct(fs, ino, 0)),
    ("direct write of new blocks", |fs, ino| direct(fs, ino, 1 << 20)),
];

/// Operations that change the inode before it learns of a write.
const CHANGES: [Step; 6] = [
    ("rename", |fs, _| {
        fs.wait(|| fs.rename(&who(LATER), (ROOT, b"a"), (ROOT, b"b"), RenameMode::NoReplace, &mut Settling::default()))
            .map(drop)
            .unwrap();
    }),
    ("link", |fs, ino| fs.wait(|| fs.link(&who(LATER), ino, ROOT, b"c")).map(drop).unwrap()),
    ("unlink", |fs, _| fs.wait(|| fs.unlink(&who(LATER), ROOT, b"second")).map(drop).unwrap()),
    ("setxattr", |fs, ino| fs.wait(|| fs.set_xattr(&who(LATER), ino, b"user.a", b"1", false, false)).unwrap()),
    ("chmod", |fs, ino| {
        let mode = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
        fs.wait(|| fs.set_attributes(&who(LATER), ino, &mode)).map(drop).unwrap();
    }),
    ("nothing", |_, _| {}),
];

fn direct(fs: &Arc<Filesystem>, ino: u64, offset: u64) {
    let memory = Region::allocate(4096).unwrap();
    let segment = Segment { file_offset: offset, buffer_offset: 0, len: 4096 };
    let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &memory, WRITTEN)).unwrap();
    // Long enough on its way for anything to happen.
    CHANGES.iter().filter(|(what, _)| *what == "setxattr").for_each(|(_, change)| change(fs, ino));
    fs.submit_direct_write(write, |result| _ = result.expect("the device works"));
}

fn set_mtime(fs: &Arc<Filesystem>, ino: u64, mtime: Timestamp, now: Timestamp) {
    let set = SetAttributes { mtime: Some(mtime), ..SetAttributes::default() };
    fs.wait(|| fs.set_attributes(&who(now), ino, &set)).unwrap();
}

#[test]
fn a_write_replaces_a_time_that_was_set_ahead_whatever_happens_before_it_is_stored() {
    let ahead = [at(1000 + 864_000), at(1015), at(1021), at(5)];
    for ((write, do_write), (change, do_change)) in
        WRITES.iter().flat_map(|write| CHANGES.iter().map(move |change| (write, change)))
    {
        for set in ahead {
            let what = format!("set to {}, {write}, {change}", set.seconds);
            let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
            make(&device);
            let fs = open(&device).unwrap();
            let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
            let ino = fs.wait(|| fs.create(&who(CREATED), ROOT, b"a", &new)).unwrap().ino;
            fs.wait(|| fs.link(&who(CREATED), ino, ROOT, b"second")).unwrap();
            fs.hold_file(ino);
            fs.wait(|| fs.write(ino, 0, &[1; 8192], CREATED)).unwrap();
            fs.sync_file(ino).unwrap();
            set_mtime(&fs, ino, set, CREATED);
            let mtime = || fs.wait(|| fs.attributes(ino)).unwrap().inode.mtime;
            assert_eq!(mtime(), set, "{what}");
            do_write(&fs, ino);
            do_change(&fs, ino);
            assert_eq!(mtime(), WRITTEN, "{what}");
            fs.sync_file(ino).unwrap();
            assert_eq!(mtime(), WRITTEN, "{what}, stored");
            // A time that is set after a write stays.
            do_write(&fs, ino);
            set_mtime(&fs, ino, set, LATER);
            fs.sync_file(ino).unwrap();
            assert_eq!(mtime(), set, "{what}, and set again");
            fs.let_go_of_file(ino);
            fs.close().unwrap();
        }
    }
}

#[test]
fn a_write_that_waits_does_not_take_back_the_time_of_what_came_after_it() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = open(&device).unwrap();
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&who(CREATED), ROOT, b"a", &new)).unwrap().ino;
    fs.hold_file(ino);
    let changes: [fn(&Arc<Filesystem>, u64); 3] = [
        |fs, ino| fs.wait(|| fs.set_size(&who(LATER), ino, 100)).map(drop).unwrap(),
        |fs, ino| fs.allocate(&who(LATER), ino, 0, 4096, Allocate::Punch).unwrap(),
        |fs, ino| fs.allocate(&who(LATER), ino, 0, 1 << 20, Allocate::Reserve { grow: true }).unwrap(),
    ];
    for change in changes {
        set_mtime(&fs, ino, at(5), at(5));
        fs.wait(|| fs.write(ino, 0, &[2; 8192], WRITTEN)).unwrap();
        change(&fs, ino);
        // Asked for before the change, and noted after it.
        fs.wait(|| fs.write(ino, 0, &[2; 100], WRITTEN)).unwrap();
        fs.sync_file(ino).unwrap();
        assert_eq!(fs.wait(|| fs.attributes(ino)).unwrap().inode.mtime, LATER);
    }
}

#[test]
fn an_attribute_that_is_set_to_what_it_was_moves_no_time() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(48 << 20);
    make(&device);
    let fs = open(&device).unwrap();
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&who(CREATED), ROOT, b"a", &new)).unwrap().ino;
    let set_at = |value: &[u8], now| {
        fs.wait(|| fs.set_xattr(&who(now), ino, b"user.a", value, false, false)).unwrap();
        fs.wait(|| fs.attributes(ino)).unwrap().inode.ctime
    };
    for value in [&b""[..], b"1", &[7; 9000], b"2"] {
        assert_eq!((set_at(value, WRITTEN), set_at(value, LATER)), (WRITTEN, WRITTEN), "{} bytes", value.len());
        assert_eq!(fs.wait(|| fs.get_xattr(ino, b"user.a")).unwrap(), value);
    }
}
