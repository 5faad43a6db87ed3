//! Long listings in a cache that has no room for what they name.

use std::sync::Arc;

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::MemoryDevice;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;

use crate::common::{ROOT, make, open};

const WHO: Context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
/// So many names take several times the memory that [`open`] gives.
const NAMES: usize = 12_000;
/// Entries that are brought into memory together.
const TOGETHER: usize = 1024;

/// Otherwise a listing that others disturb could begin again for ever: what it brings each time
/// drops what it brought before.
#[test]
fn what_a_listing_brought_stays_while_others_read_everything_else() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    make(&device);
    let fs = open(&device).expect("it can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let inos: Vec<u64> = (0..NAMES)
        .map(|n| fs.wait(|| fs.create(&WHO, ROOT, format!("{n:080}").as_bytes(), &new)).expect("there is room").ino)
        .collect();
    fs.close().expect("nothing fails");

    let fs = open(&device).expect("it was closed cleanly");
    let (mut cookie, mut listed) = (0, 0);
    loop {
        let held = fs.preload_dir(ROOT, cookie, TOGETHER, true).expect("nothing fails");
        // Somebody else looks at all files, by number and by name.
        for (n, ino) in inos.iter().enumerate().step_by(7) {
            fs.wait(|| fs.attributes(*ino)).expect("it is there");
            fs.wait(|| fs.lookup(ROOT, format!("{n:080}").as_bytes())).expect("it is there");
        }
        let entries = fs.read_dir(ROOT, cookie, TOGETHER).expect("all of it is in memory");
        let named: Vec<u64> = entries.iter().map(|entry| entry.ino).collect();
        assert!(fs.all_attributes(&named).iter().all(Result::is_ok), "all of it is in memory, from {cookie} on");
        drop(held);
        let Some(last) = entries.last() else { break };
        (cookie, listed) = (last.cookie, listed + entries.len());
    }
    assert_eq!(listed, NAMES + 2);
    fs.close().expect("nothing fails");
}
