//! A file of which a part of the mapping is ruined: what cannot be done with it holds up nothing
//! else.

use std::sync::Arc;

use crate::common::{ROOT, assert_sound, make, open};
use crate::surgeon::Surgeon;
use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::{MemoryDevice, Recorder};
use gpunvme_engine::Filesystem;
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::{Key, Kind, Timestamp};

const NOW: Timestamp = Timestamp { seconds: 1, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };

fn file(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("nothing fails").ino
}

/// A volume with a file of so many extents that they take several leaves, of which a later one is
/// ruined.
fn with_a_ruined_leaf() -> (Arc<dyn BlockDevice>, u64) {
    let memory = MemoryDevice::new(64 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("it was made");
    let ino = file(&fs, b"ruined");
    for block in (0..2000).step_by(2) {
        fs.wait(|| fs.write(ino, block * 4096, &[7; 4096], NOW)).unwrap();
    }
    fs.sync_file(ino).unwrap();
    fs.close().unwrap();
    drop(fs);
    let mut surgeon = Surgeon::new(memory.snapshot());
    let leaf = |offset| surgeon.leaf(Key::new(ino, Kind::Extent, offset));
    let (first, later) = (leaf(0), leaf(1500));
    assert_ne!(first, later);
    surgeon.ruin(later);
    (Recorder::new(surgeon.image), ino)
}

#[test]
fn an_inode_that_cannot_be_removed_keeps_nothing_else_from_being_durable() {
    let (device, ino) = with_a_ruined_leaf();
    let fs = open(&device).expect("one file is damaged");
    fs.wait(|| fs.unlink(&WHO, ROOT, b"ruined")).unwrap();
    let removed = (0..1000).try_for_each(|_| match fs.wait(|| fs.reap_step(ino)) {
        Ok(true) => Ok(()),
        Ok(false) => panic!("a leaf of it is gone"),
        Err(error) => Err(error),
    });
    assert!(matches!(removed, Err(FsError::Corrupt(_))));
    let other = file(&fs, b"other");
    fs.wait(|| fs.write(other, 0, &[8; 9000], NOW)).unwrap();
    assert!(matches!(fs.close(), Err(FsError::Corrupt(_))), "who unmounts is told");
    assert!(fs.is_written_down(), "nothing is lost by it");
    drop(fs);
    for _ in 0..2 {
        let fs = open(&device).expect("one inode is damaged");
        let found = fs.wait(|| fs.lookup(ROOT, b"other")).expect("it was closed");
        assert_eq!(fs.read(found.ino, 0, 9000).unwrap(), [8; 9000]);
        let _ = fs.close();
    }
}

#[test]
fn a_truncation_that_cannot_be_ended_concerns_its_file_alone() {
    let (device, ino) = with_a_ruined_leaf();
    let fs = open(&device).expect("one file is damaged");
    let shortened = fs.wait(|| fs.set_size(&WHO, ino, 200 * 4096));
    assert!(matches!(shortened, Err(FsError::Corrupt(_))));
    // What lies below its end is written down.
    fs.wait(|| fs.write(ino, 0, &[9; 4096], NOW)).unwrap();
    fs.wait(|| fs.write(ino, 4096, &[9; 4096], NOW)).unwrap();
    fs.sync_file(ino).expect("a sync has nothing to do with what lies beyond");
    fs.commit().unwrap();
    drop(fs);
    for _ in 0..2 {
        let fs = open(&device).expect("one file is damaged");
        assert_eq!(fs.read(ino, 0, 8192).unwrap(), [9; 8192]);
        // Old bytes lie behind its end.
        let grown = fs.wait(|| fs.write(ino, 300 * 4096, &[1; 10], NOW));
        assert!(matches!(grown, Err(FsError::Corrupt(_))), "{grown:?}");
        assert!(fs.wait(|| fs.set_size(&WHO, ino, 1 << 20)).is_err());
        let name = format!("other {}", fs.usage().inodes);
        let other = file(&fs, name.as_bytes());
        fs.wait(|| fs.write(other, 0, &[8; 9000], NOW)).unwrap();
        fs.sync_file(other).unwrap();
        let _ = fs.close();
    }
    let options = CheckOptions { read_only: false, memory: 64 << 20, now: NOW, stop: Stop::default() };
    let mut fsck = Fsck::open(Io::inline(device.clone()).expect("a queue"), options).expect("it can be opened");
    fsck.repair(&mut |_| true, &mut |_, _, _| ()).expect("nothing fails");
    fsck.close(true).expect("nothing fails");
    let fs = open(&device).expect("it was repaired");
    assert_sound(&fs, "repaired");
    fs.wait(|| fs.write(ino, 300 * 4096, &[1; 10], NOW)).expect("it can grow again");
    assert_eq!(fs.read(ino, 200 * 4096, 100 * 4096).unwrap(), [0; 100 * 4096], "no old bytes");
}
