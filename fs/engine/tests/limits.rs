//! The ends of what a volume can hold: a clean error, and nothing broken.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, Request};
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::STATE;
use gpunvme_layout::key::INO_MAX;
use gpunvme_layout::{Block, State, Timestamp};

use crate::common::{ROOT, assert_sound, make, open};

const WHO: Context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };

/// Has a closed volume give out inode numbers from `next` on.
fn set_next_ino(device: &Arc<dyn BlockDevice>, next: u64) {
    let fs = open(device).expect("it can be opened");
    let (geometry, uuid) = (fs.volume().superblock().geometry(), fs.volume().superblock().uuid);
    fs.close().expect("nothing fails");
    let io = Io::inline(device.clone()).expect("a queue");
    let region = gpunvme_blockdev::Region::allocate(BLOCK_SIZE).expect("memory");
    let span = || vec![region.span(0..BLOCK_SIZE)];
    let at = STATE * BLOCK_SIZE as u64;
    io.run(vec![Request::read(at, span())]).expect("nothing fails");
    let mut bytes = [0; BLOCK_SIZE];
    region.read_at(0, &mut bytes).expect("it is ours");
    let block = Block::from_bytes(&bytes);
    let state = State { next_ino: next, ..State::decode(&block, &geometry).expect("it is sound") };
    let mut changed = state.encode(&uuid);
    changed.seal(block.sequence());
    region.write_at(0, changed.bytes()).expect("it is ours");
    io.run(vec![Request::write(at, span(), true)]).expect("nothing fails");
}

#[test]
fn when_inode_numbers_run_out_creating_fails_and_all_else_goes_on() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    set_next_ino(&device, INO_MAX - 3);
    let fs = open(&device).expect("it can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let mut made = 0;
    let error = loop {
        match fs.wait(|| fs.create(&WHO, ROOT, made.to_string().as_bytes(), &new)) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, FsError::NoSpace) && made == 3, "{made}: {error}");
    let ino = fs.wait(|| fs.lookup(ROOT, b"0")).expect("it was made").ino;
    fs.wait(|| fs.write(ino, 0, &[1; 5000], WHO.now)).expect("there is room");
    fs.wait(|| fs.link(&WHO, ino, ROOT, b"link")).expect("a name needs no number");
    fs.close().expect("nothing fails");
    let fs = open(&device).expect("it was closed cleanly");
    assert_sound(&fs, "without numbers");
    assert_eq!(fs.read(ino, 0, 5000).expect("it can be read"), [1; 5000]);
}

#[test]
fn an_inode_has_as_many_attributes_as_can_be_listed() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(128 << 20);
    make(&device);
    let fs = open(&device).expect("it can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"a", &new)).expect("there is room").ino;
    // Long values, between which the names are looked for, and short ones. 64 KiB of names of 100
    // bytes, each with a zero byte.
    let name = |number: usize| format!("user.{number:094}");
    let most = 65536 / 100;
    for number in 0..most {
        let value = vec![number as u8; if number % 3 == 0 { 1 } else { 9000 }];
        fs.wait(|| fs.set_xattr(&WHO, ino, name(number).as_bytes(), &value, false, false)).expect("there is room");
    }
    let refused = fs.wait(|| fs.set_xattr(&WHO, ino, name(most).as_bytes(), b"1", false, false)).unwrap_err();
    assert!(matches!(refused, FsError::NoSpace), "{refused}");
    // One that is there already needs no room in the list.
    fs.wait(|| fs.set_xattr(&WHO, ino, name(0).as_bytes(), b"2", false, true)).expect("there is room");
    let listed = fs.wait(|| fs.list_xattrs(ino)).expect("nothing fails");
    let mut listed: Vec<&[u8]> = listed.split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
    listed.sort_unstable();
    assert!(listed.iter().map(|name| String::from_utf8_lossy(name)).eq((0..most).map(name)), "{} names", listed.len());
    assert_sound(&fs, "many attributes");
}
