//! A long write that lands after very many short ones inside its range.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Completion, Geometry, Io, Op, Queue, Region, Request, Result, Wait};
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::Timestamp;
use parking_lot::Mutex;

use super::device::is_content;
use crate::common::{ROOT, assert_sound, make};

const NOW: Timestamp = Timestamp { seconds: 1, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const BLOCK: u64 = 4096;
/// Short writes.
const SHORT: u64 = 30_000;

/// A device that keeps metadata only: the content of files is as large as one likes.
struct Forgetful(Arc<MemoryDevice>);

struct ForgetfulQueue {
    inner: Box<dyn Queue>,
    over: Mutex<Vec<Completion>>,
}

impl BlockDevice for Forgetful {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(ForgetfulQueue { inner: self.0.open_queue()?, over: Mutex::default() }))
    }

    fn map(&self, _: &Arc<Region>) -> Result<()> {
        Ok(())
    }

    fn unmap(&self, _: &Region) {}
}

impl Queue for ForgetfulQueue {
    fn submit(&self, requests: &mut Vec<Request>) {
        let is_forgotten = |request: &mut Request| matches!(request.op, Op::Write { .. }) && is_content(request);
        let over = requests.extract_if(.., is_forgotten).map(|request| Completion { tag: request.tag, result: Ok(()) });
        self.over.lock().extend(over);
        self.inner.submit(requests);
    }

    fn complete(&self, wait: Wait, out: &mut Vec<Completion>) -> Result<usize> {
        let mut over = self.over.lock();
        let count = over.len();
        out.append(&mut over);
        if count > 0 { Ok(count) } else { self.inner.complete(wait, out) }
    }

    fn wake(&self) {
        self.inner.wake();
    }
}

/// `short` writes, each to every other block, land while one of all the blocks is in flight.
fn lands_after(short: u64, preallocated: bool) {
    let device: Arc<dyn BlockDevice> = Arc::new(Forgetful(MemoryDevice::from_image(Image::new(2 << 30))));
    make(&device);
    // The youngest first, so that the long one waits until it is the only one.
    let io = Io::stepped(device.clone(), |count| count - 1);
    let options = Options { volume: VolumeOptions { read_only: false, cache: 32 << 20, discard: false }, write_buffer: 4 << 20 };
    let fs = Filesystem::open(io, options, Arc::new(Inline)).expect("a new volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"a", &new)).expect("there is room").ino;
    fs.hold_file(ino);
    let size = 2 * short * BLOCK;
    if preallocated {
        fs.allocate(&WHO, ino, 0, size, Allocate::Reserve { grow: true }).expect("there is room");
    }
    let ended = Arc::new(AtomicU64::new(0));
    let region = Region::allocate(size as usize).expect("addresses, and no memory");
    let begin = |offset: u64, len: u64| {
        let segment = Segment { file_offset: offset, buffer_offset: 0, len };
        let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW)).expect("there is room");
        let ended = ended.clone();
        fs.submit_direct_write(write, move |result| {
            result.expect("it lands, whatever landed before");
            ended.fetch_add(1, Ordering::Relaxed);
        });
    };
    begin(0, size);
    for block in 0..short {
        begin(2 * block * BLOCK, BLOCK);
        assert!(fs.volume().io().step());
    }
    assert_eq!(ended.load(Ordering::Relaxed), short, "the long one is in flight");
    while fs.volume().io().step() {}
    assert_eq!(ended.load(Ordering::Relaxed), short + 1);
    let inode = fs.wait(|| fs.attributes(ino)).expect("it is there").inode;
    assert_eq!((inode.size, inode.blocks), (size, 2 * short));
    assert_eq!(fs.seek(ino, 0, true).expect("it ends somewhere"), size, "nothing of it is preallocated any more");
    fs.let_go_of_file(ino);
    fs.commit().expect("nothing fails");
    assert_sound(&fs, "after very many writes");
}

#[test]
fn a_long_write_that_lands_after_tens_of_thousands_in_preallocated_space_ends_nothing() {
    lands_after(SHORT, true);
}

#[test]
fn a_long_write_into_a_hole_that_lands_after_thousands_inside_it_replaces_them() {
    lands_after(SHORT / 10, false);
}
