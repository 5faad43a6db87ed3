//! Space of metadata that becomes free again: before a caller is told that there is none, and on an
//! idle mount.

use std::sync::Arc;

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::Filesystem;
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, assert_sound, make, open};

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const FILE: NewNode = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };

/// A volume that was filled with files without content, and emptied; and the blocks that files
/// could have before.
fn emptied() -> (Arc<Filesystem>, u64) {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(20 << 20);
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let before = fs.usage().available;
    assert!(before > 1000);
    let name = |n: u32| format!("{n:0>250}").into_bytes();
    let mut files = 0;
    loop {
        match fs.wait(|| fs.create(&WHO, ROOT, &name(files), &FILE)) {
            Ok(_) => files += 1,
            Err(FsError::NoSpace) => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(fs.usage().available, 0);
    for n in 0..files {
        let gone = fs.wait(|| fs.unlink(&WHO, ROOT, &name(n))).expect("it is there").expect("it had one name");
        while fs.wait(|| fs.reap_step(gone)).expect("nothing fails") {}
    }
    fs.commit().expect("nothing fails");
    (fs, before)
}

#[test]
fn who_needs_space_gets_what_emptied_chunks_of_metadata_have() {
    let (fs, before) = emptied();
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"next", &FILE)).expect("there is room").ino;
    // The root and the file have a chunk.
    for block in 0..before {
        fs.wait(|| fs.write(ino, block * 4096, &[1; 4096], NOW)).expect("all that was there before is there again");
    }
    fs.sync_file(ino).expect("nothing fails");
    assert_eq!(fs.usage().available, 0);
    assert!(matches!(fs.wait(|| fs.write(ino, before * 4096, &[1], NOW)), Err(FsError::NoSpace)));
    assert_sound(&fs, "filled again");
}

#[test]
fn an_idle_mount_gives_back_what_emptied_chunks_of_metadata_have() {
    let (fs, before) = emptied();
    fs.volume().give_back().expect("nothing fails");
    assert_eq!(fs.usage().available, before);
    // There is nothing more to give back, and nothing more to write.
    fs.commit().expect("nothing fails");
    assert_sound(&fs, "given back");
    fs.close().expect("nothing fails");
}
