//! A chunk of metadata that becomes free for data: no image of what it held may be written over that data later.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, MemoryDevice};
use gpunvme_fs::Filesystem;
use gpunvme_fs::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, assert_sound, make, open};

const NOW: Timestamp = Timestamp { seconds: 1, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };

/// A link with so long a target that it takes a node of its own.
fn link(fs: &Arc<Filesystem>, name: &str) {
    let new = NewNode { mode: 0o120777, umask: 0, rdev: 0, target: &[b't'; 3800] };
    fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new)).expect("there is room");
}

fn unlink(fs: &Arc<Filesystem>, name: &str) {
    let ino = fs.wait(|| fs.unlink(&WHO, ROOT, name.as_bytes())).expect("it is there").expect("it was the only name");
    while fs.wait(|| fs.reap_step(ino)).expect("nothing fails") {}
}

#[test]
fn a_chunk_that_is_used_and_emptied_again_before_a_checkpoint_is_not_given_to_data_too_early() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    // Until a link needs a second chunk of metadata, which it then has for itself.
    let free = fs.usage().free;
    let last = (0..1000).find(|i| {
        link(&fs, &i.to_string());
        fs.usage().free < free
    });
    let last = last.expect("a chunk has only 512 nodes");
    let links = [last - 1, last].map(|i| i.to_string());
    links.iter().for_each(|name| unlink(&fs, name));
    fs.commit().unwrap();
    links.iter().for_each(|name| link(&fs, name));
    links.iter().for_each(|name| unlink(&fs, name));
    fs.volume().checkpoint().unwrap();

    // Data wherever data can be.
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"data", &new)).unwrap().ino;
    let mut len = 0u64;
    while fs.wait(|| fs.write(ino, len, &[7; 65536], NOW)).is_ok() {
        len += 65536;
    }
    fs.sync_file(ino).unwrap();
    fs.volume().checkpoint().unwrap();
    assert!(fs.read(ino, 0, len as usize).unwrap().iter().all(|byte| *byte == 7), "a node was written over data");
    fs.close().unwrap();
    let fs = open(&device).unwrap();
    assert_sound(&fs, "after reuse");
    assert!(fs.read(ino, 0, len as usize).unwrap().iter().all(|byte| *byte == 7), "a node was written over data");
}
