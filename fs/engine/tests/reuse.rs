//! A chunk of metadata that becomes free for data: no image of its former content may be written
//! over that data later.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_engine::volume::{Context, NewNode, SetAttributes};
use gpunvme_engine::{Filesystem, FormatOptions, format};
use gpunvme_layout::Timestamp;
use gpunvme_layout::geometry::ANCHORS;

use crate::common::{ROOT, assert_sound, make, open};
use crate::surgeon::{lose_anchors_since, ruin};

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

    let (ino, len) = fill_with_data(&fs);
    fs.volume().checkpoint().unwrap();
    assert!(fs.read(ino, 0, len as usize).unwrap().iter().all(|byte| *byte == 7), "a node was written over data");
    fs.close().unwrap();
    let fs = open(&device).unwrap();
    assert_sound(&fs, "after reuse");
    assert!(fs.read(ino, 0, len as usize).unwrap().iter().all(|byte| *byte == 7), "a node was written over data");
}

/// Writes data wherever data can be. Returns the inode and length of the file with it.
fn fill_with_data(fs: &Arc<Filesystem>) -> (u64, u64) {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&WHO, ROOT, b"data", &new)).unwrap().ino;
    let mut len = 0u64;
    while fs.wait(|| fs.write(ino, len, &[7; 65536], NOW)).is_ok() {
        len += 65536;
    }
    fs.sync_file(ino).unwrap();
    (ino, len)
}

/// A volume whose chunk of nodes was emptied, given back, and filled with data, all since a
/// checkpoint: the volume when that checkpoint was made, the volume at the end, and the inode and
/// length of the file with the data.
fn nodes_that_became_data() -> (Image, Image, (u64, u64)) {
    let memory = MemoryDevice::new(64 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    // Data leaves the last chunks free: nodes have more than those.
    let free = fs.usage().free;
    let takes_another_chunk = |i: &u32| {
        link(&fs, &i.to_string());
        fs.usage().free < free - 2 * 512
    };
    let first = (0..4000).find(takes_another_chunk).expect("a chunk has only 512 nodes");
    let others = first + 1..first + 100;
    others.clone().for_each(|i| link(&fs, &i.to_string()));
    (0..=first).for_each(|i| unlink(&fs, &i.to_string()));
    fs.commit().unwrap();
    fs.volume().checkpoint().unwrap();
    let earlier = memory.snapshot();
    let set = SetAttributes { mtime: Some(Timestamp { seconds: 2, nanoseconds: 0 }), ..SetAttributes::default() };
    for i in others.clone() {
        let ino = fs.wait(|| fs.lookup(ROOT, i.to_string().as_bytes())).unwrap().ino;
        fs.wait(|| fs.set_attributes(&WHO, ino, &set)).unwrap();
    }
    fs.commit().unwrap();
    others.for_each(|i| unlink(&fs, &i.to_string()));
    fs.commit().unwrap();
    fs.volume().checkpoint().unwrap();
    assert_eq!(fs.usage().free, free, "no chunk was given back");
    let data = fill_with_data(&fs);
    (earlier, memory.snapshot(), data)
}

/// Repairs the volume, or mounts it as it is: the data is what was written.
fn assert_data_is_kept(image: &Image, repaired: bool, (ino, len): (u64, u64), what: &str) {
    let what = format!("{what}, repaired: {repaired}");
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image.clone());
    if repaired {
        let options = CheckOptions { read_only: false, memory: 64 << 20, now: NOW, stop: Stop::default() };
        let mut fsck = Fsck::open(Io::inline(device.clone()).unwrap(), options).unwrap();
        let left = fsck.repair(&mut |_| true, &mut |_, _, _| ()).unwrap().left;
        assert_eq!(left.total(), 0, "{what}: {:#?}", left.list);
        fsck.close(true).unwrap();
    }
    // The first mount writes home what it found in the journal.
    open(&device).unwrap_or_else(|error| panic!("{what}: {error}")).close().unwrap();
    let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_sound(&fs, &what);
    let data = fs.read(ino, 0, len as usize).unwrap();
    let lost = data.chunks(4096).filter(|block| block.iter().any(|byte| *byte != 7)).count();
    assert_eq!((lost, data.len() as u64), (0, len), "{what}: a node was written over data");
}

#[test]
fn whichever_anchor_is_lost_no_node_is_written_over_data() {
    let (_, image, data) = nodes_that_became_data();
    for lost in ANCHORS {
        let mut image = image.clone();
        ruin(&mut image, lost);
        for repaired in [false, true] {
            assert_data_is_kept(&image, repaired, data, &format!("without anchor {lost}"));
        }
    }
    let mut image = image;
    ANCHORS.into_iter().for_each(|lost| ruin(&mut image, lost));
    assert_data_is_kept(&image, true, data, "without anchors");
}

/// Earlier programs left the anchor of the checkpoint before.
#[test]
fn where_only_an_anchor_from_before_nodes_became_data_is_left_none_is_written_over_it() {
    let (earlier, mut image, data) = nodes_that_became_data();
    lose_anchors_since(&earlier, &mut image);
    for repaired in [false, true] {
        assert_data_is_kept(&image, repaired, data, "with an earlier anchor");
    }
}

#[test]
fn blocks_that_a_read_looked_up_are_nobody_elses_before_it_is_over() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let file = |name: &[u8]| {
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("there is room").ino
    };
    let read = file(b"read");
    for at in (0..8 << 20).step_by(65536) {
        fs.wait(|| fs.write(read, at, &[0xaa; 65536], NOW)).unwrap();
    }
    fs.sync_file(read).unwrap();
    let plan = fs.wait(|| fs.plan_read(read, 0, 8 << 20)).unwrap();

    // The file goes, durably, and another file takes all the room there is.
    unlink(&fs, "read");
    fs.commit().unwrap();
    let fill = |ino| {
        let mut len = 0u64;
        while fs.wait(|| fs.write(ino, len, &[0xbb; 65536], NOW)).is_ok() && fs.sync_file(ino).is_ok() {
            len += 65536;
        }
        len
    };
    let taken = fill(file(b"first"));
    let (sender, receiver) = std::sync::mpsc::channel();
    fs.submit_read(plan, move |read| sender.send(read.unwrap().bytes().to_vec()).unwrap());
    assert!(receiver.recv().unwrap().iter().all(|byte| *byte == 0xaa), "a read got what another file holds");
    assert!(taken > 8 << 20, "only {taken} bytes were written: too few to want the freed blocks");

    // Now that the read is over, any file may have the blocks.
    assert!(fill(file(b"second")) >= 2 << 20, "the blocks did not come back");
    fs.close().unwrap();
    assert_sound(&open(&device).unwrap(), "after reuse");
}

#[test]
fn names_leave_the_room_that_is_promised_to_data() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let link = |i: u32, target: &[u8]| {
        let new = NewNode { mode: 0o120777, umask: 0, rdev: 0, target };
        fs.wait(|| fs.create(&WHO, ROOT, i.to_string().as_bytes(), &new))
    };
    let file = |name: &[u8]| {
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("there is room").ino
    };
    let fill = |ino, max: u64| {
        let full = |at: &u64| fs.wait(|| fs.write(ino, at * 4096, &[7; 4096], NOW)).is_err();
        (0..max).find(full).unwrap_or(max)
    };
    // Too few pages for each file to be written back before a caller asks, and together more than a
    // chunk.
    let small: Vec<u64> = [b"a", b"b", b"c", b"d"].iter().map(|name| file(*name)).collect();
    let big = file(b"data");
    small.iter().for_each(|ino| assert_eq!(fill(*ino, 200), 200));
    let blocks = fill(big, u64::MAX);
    fs.flush_file(big).unwrap();
    let last = (0..5000).find(|i| link(*i, &[b't'; 3800]).is_err()).expect("the volume is full");
    small.iter().for_each(|ino| fs.sync_file(*ino).expect("there is room for what was taken"));
    assert!(fs.read(big, 0, blocks as usize * 4096).unwrap().iter().all(|byte| *byte == 7));
    // Files can be deleted.
    (0..last).for_each(|i| unlink(&fs, &i.to_string()));
    unlink(&fs, "data");
    fs.close().unwrap();
    assert_sound(&open(&device).unwrap(), "after a full volume");
}

#[test]
fn what_an_earlier_volume_of_the_same_uuid_left_in_the_journal_is_not_replayed() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    let begin = |hash_key| {
        format(&device, &FormatOptions { label: String::new(), uuid: [7; 16], hash_key, now: NOW, owner: (0, 0) })
            .expect("it fits");
        open(&device).expect("a new volume can be opened")
    };
    let fs = begin([1; 16]);
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, b"of old", &new)).expect("there is room");
    fs.commit().expect("nothing fails");
    drop(fs);
    // The second volume is in use when the power fails, and nothing was committed.
    drop(begin([2; 16]));
    let fs = open(&device).expect("the volume can be opened");
    assert!(fs.wait(|| fs.lookup(ROOT, b"of old")).is_err(), "a file of the volume that was there before");
}

#[test]
fn a_chunk_of_metadata_that_was_empty_at_a_crash_is_found_again() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let fs = open(&device).expect("a new volume can be opened");
    let free = fs.usage().free;
    let names: Vec<String> = (0..1200).map(|i| i.to_string()).collect();
    names.iter().for_each(|name| link(&fs, name));
    fs.volume().checkpoint().unwrap();
    assert!(fs.usage().free < free, "metadata has more chunks than one");
    names.iter().for_each(|name| unlink(&fs, name));
    fs.commit().unwrap();
    // Dropped and not closed: no memory holds which chunks were emptied since the checkpoint.
    drop(fs);
    let fs = open(&device).expect("it recovers");
    fs.volume().find_emptied_chunks().unwrap();
    fs.volume().checkpoint().unwrap();
    assert_eq!(fs.usage().free, free);
    fs.close().unwrap();
    assert_sound(&open(&device).unwrap(), "after chunks were given back");
}
