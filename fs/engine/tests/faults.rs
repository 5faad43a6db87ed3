//! A device that fails: the error reaches the operation that suffered it, nothing else is lost, and
//! a volume whose metadata could not be written is read-only from then on.

use std::sync::Arc;

use crate::common::{ROOT, assert_sound, make, open};
use crate::surgeon::{lose_anchors_since, ruin};
use gpunvme_abi::Segment;
use gpunvme_blockdev::{BlockDevice, Io, Region};
use gpunvme_blockdev_testing::{Event, Faulty, MemoryDevice, On, Recorder, Rule};
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_engine::data::{Asker, Settling};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode, RenameMode};
use gpunvme_engine::{Filesystem, Volume};
use gpunvme_gpupath::planner::{Bounds, Position};
use gpunvme_layout::{Block, Timestamp};

const NOW: Timestamp = Timestamp { seconds: 1, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };

fn setup() -> (Arc<Faulty>, Arc<dyn BlockDevice>, Arc<Filesystem>) {
    let faulty = Faulty::new(MemoryDevice::new(64 << 20));
    let device: Arc<dyn BlockDevice> = faulty.clone();
    make(&device);
    let fs = open(&device).expect("nothing fails yet");
    (faulty, device, fs)
}

fn file(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, name, &new)).expect("nothing fails").ino
}

fn data_area(volume: &Volume) -> std::ops::Range<u64> {
    let geometry = volume.superblock().geometry();
    geometry.data * 4096..geometry.data_end() * 4096
}

#[test]
fn a_read_that_fails_is_an_error_once_and_the_next_one_succeeds() {
    let (faulty, _, fs) = setup();
    let ino = file(&fs, b"a");
    fs.wait(|| fs.write(ino, 0, &[7; 9000], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    faulty.add(Rule::fail(On::Read, libc::EIO).within(data_area(fs.volume())).once());
    let error = fs.read(ino, 0, 9000).unwrap_err();
    assert!(matches!(&error, FsError::Device(_)) && error.errno() == libc::EIO, "{error}");
    assert_eq!(fs.read(ino, 0, 9000).unwrap(), [7; 9000]);
}

#[test]
fn an_append_after_a_sync_reads_nothing_from_the_device() {
    let (faulty, device, fs) = setup();
    let ino = file(&fs, b"log");
    fs.hold_file(ino);
    faulty.add(Rule::fail(On::Read, libc::EIO).within(data_area(fs.volume())));
    let expected: Vec<u8> = (0..20u8).flat_map(|n| [n + 1; 700]).collect();
    for (n, line) in expected.chunks(700).enumerate() {
        fs.wait(|| fs.write(ino, n as u64 * 700, line, NOW)).expect("nothing has to be read");
        fs.sync_file(ino).unwrap();
    }
    faulty.clear();
    fs.let_go_of_file(ino);
    fs.close().unwrap();
    let fs = open(&device).unwrap();
    assert!(fs.read(ino, 0, 20_000).unwrap() == expected);
    assert_sound(&fs, "after appends");
}

#[test]
fn each_process_that_was_there_learns_once_of_lost_data_and_what_is_written_next_is_well() {
    let (faulty, device, fs) = setup();
    let ino = file(&fs, b"a");
    let region = Region::allocate(4096).unwrap();
    let direct = || {
        let segment = Segment { file_offset: 1 << 20, buffer_offset: 0, len: 4096 };
        let write = fs.wait(|| fs.plan_direct_write(ino, &[segment], &region, NOW))?;
        fs.submit_direct_write(write, |result| _ = result.expect("nothing else fails"));
        Ok::<(), FsError>(())
    };
    let told = |result: Result<(), FsError>| result.is_err_and(|error| error.errno() == libc::EIO);
    for round in [0, 100] {
        let process = |id: u64, began: u64| move || Asker::Process { id: round + id, began: round + began, now: round + 50 };
        let [writer, other, closing] = [1, 2, 3].map(|id| process(id, 0));
        let (early, late) = (process(4, 49), process(5, 51));
        fs.wait(|| fs.write(ino, 0, &[7; 50_000], NOW)).unwrap();
        faulty.add(Rule::fail(On::Write, libc::EIO).within(data_area(fs.volume())).once());
        fs.flush_file(ino).unwrap();
        direct().expect("a direct write has nothing to do with what was lost");
        assert!(told(fs.sync_for(ino, writer)));
        fs.sync_for(ino, writer).expect("it was told");
        fs.wait(|| fs.write(ino, 0, &[9; 50_000], NOW)).unwrap();
        fs.sync_for(ino, writer).expect("it was written again");
        fs.sync_for(ino, late).expect("it was not there, and another was told");
        fs.write_error(ino, late).expect("nor does it learn of it in another way");
        assert!(told(fs.sync_for(ino, other)), "it was there");
        assert!(told(fs.write_error(ino, closing)), "and so was this one");
        assert!(told(fs.sync_for(ino, early)), "no one had been told when it began");
        fs.sync_for(ino, writer).expect("it was told");
        fs.sync_for(ino, early).expect("it was told");
        assert!(told(fs.sync_for(ino, || Asker::Unknown)), "it may not have been told");
        assert!(told(fs.sync_for(ino, || Asker::Unknown)), "nor now");
        assert_eq!(fs.read(ino, 0, 50_000).unwrap(), [9; 50_000]);
    }
    fs.closed_by_all(ino);
    fs.sync_for(ino, || Asker::Unknown).expect("no process is left that had it open");
    fs.close().expect("all were told");
    assert_sound(&open(&device).unwrap(), "after lost writes");
}

#[test]
fn an_operation_that_needs_lost_data_on_the_device_fails_and_does_not_try_for_ever() {
    let (faulty, _, fs) = setup();
    let ino = file(&fs, b"a");
    fs.hold_file(ino);
    fs.wait(|| fs.write(ino, 0, &[7; 100], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    fs.wait(|| fs.set_size(&WHO, ino, 50)).unwrap();
    faulty.add(Rule::fail(On::Write, libc::EIO).within(data_area(fs.volume())));
    let region = Region::allocate(4096).unwrap();
    let segment = |file_offset| [Segment { file_offset, buffer_offset: 0, len: 4096 }];
    // Zeros behind the end have to be on the device before the file grows.
    let failed = fs.wait(|| fs.plan_direct_write(ino, &segment(8192), &region, NOW)).err().expect("the device fails");
    assert_eq!(failed.errno(), libc::EIO);
    fs.wait(|| fs.write(ino, 0, &[8; 100], NOW)).unwrap();
    let failed = fs
        .wait(|| fs.plan_direct_read(ino, &segment(0), (Position::default(), Bounds::NONE), &region))
        .err()
        .expect("the device fails");
    assert_eq!(failed.errno(), libc::EIO);
    faulty.clear();
    fs.wait(|| fs.plan_direct_read(ino, &segment(0), (Position::default(), Bounds::NONE), &region))
        .expect("what is left is there to be read");
}

#[test]
fn data_that_cannot_be_written_is_reported_and_leaks_nothing() {
    let (faulty, device, fs) = setup();
    let ino = file(&fs, b"a");
    fs.commit().unwrap();
    let before = fs.usage();
    fs.wait(|| fs.write(ino, 0, &[7; 50_000], NOW)).unwrap();
    faulty.add(Rule::fail(On::Write, libc::EIO).within(data_area(fs.volume())).once());
    fs.flush_file(ino).unwrap();
    assert_eq!(fs.usage(), before, "the promise and the blocks are given back");
    let here = || Asker::Process { id: 1, began: 0, now: 1 };
    fs.closed_by_all(ino);
    assert_eq!(fs.sync_for(ino, here).unwrap_err().errno(), libc::EIO, "a close that told no caller takes nothing away");
    fs.sync_file(ino).expect("a caller was told");
    assert_eq!(fs.read(ino, 0, 100).unwrap(), [], "what was lost is not in the file");
    fs.wait(|| fs.write(ino, 0, &[8; 50_000], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    fs.close().unwrap();
    let fs = open(&device).unwrap();
    assert_eq!(fs.read(ino, 0, 50_000).unwrap(), [8; 50_000]);
    assert_sound(&fs, "after a lost write");
}

#[test]
fn data_of_a_closed_file_that_cannot_be_written_is_reported_to_who_comes_next() {
    let (faulty, _, fs) = setup();
    let lose = |ino| {
        fs.hold_file(ino);
        fs.wait(|| fs.write(ino, 0, &[7; 50_000], NOW)).unwrap();
        fs.let_go_of_file(ino);
        faulty.add(Rule::fail(On::Write, libc::EIO).within(data_area(fs.volume())).once());
        fs.write_back().unwrap();
    };
    let ino = file(&fs, b"a");
    lose(ino);
    fs.hold_file(ino);
    fs.let_go_of_file(ino);
    fs.hold_file(ino);
    assert_eq!(fs.sync_file(ino).unwrap_err().errno(), libc::EIO, "a close that told no caller takes the error away");
    fs.let_go_of_file(ino);
    fs.sync_file(ino).expect("a caller was told");

    let target = file(&fs, b"target");
    fs.wait(|| fs.write(target, 0, &[1; 5000], NOW)).unwrap();
    fs.sync_file(target).unwrap();
    let rename = || fs.wait(|| fs.rename(&WHO, (ROOT, b"a"), (ROOT, b"target"), RenameMode::Replace, &mut Settling::default()));
    lose(ino);
    assert_eq!(rename().unwrap_err().errno(), libc::EIO, "an empty file replaced a good one");
    // Data that is lost when the rename has it written back.
    fs.wait(|| fs.write(ino, 0, &[7; 50_000], NOW)).unwrap();
    faulty.add(Rule::fail(On::Write, libc::EIO).within(data_area(fs.volume())).once());
    assert_eq!(rename().unwrap_err().errno(), libc::EIO, "an empty file replaced a good one");
    assert_eq!(fs.wait(|| fs.lookup(ROOT, b"target")).unwrap().ino, target);
    fs.wait(|| fs.write(ino, 0, &[8; 5000], NOW)).unwrap();
    assert_eq!(rename().unwrap(), Some(target));
    assert_eq!(fs.read(ino, 0, 5000).unwrap(), [8; 5000]);
}

#[test]
fn data_that_was_lost_without_anybody_being_told_is_reported_when_the_volume_is_closed() {
    for told in [false, true] {
        let (faulty, device, fs) = setup();
        let ino = file(&fs, b"a");
        fs.hold_file(ino);
        fs.wait(|| fs.write(ino, 0, &[7; 50_000], NOW)).unwrap();
        faulty.add(Rule::fail(On::Write, libc::EIO).within(data_area(fs.volume())).once());
        if told {
            assert_eq!(fs.sync_file(ino).unwrap_err().errno(), libc::EIO);
        }
        fs.let_go_of_file(ino);
        match fs.close() {
            Err(error) => assert!(!told && matches!(error, FsError::Lost { files: 1 }) && error.errno() == libc::EIO, "{error}"),
            Ok(()) => assert!(told),
        }
        drop(fs);
        let fs = open(&device).expect("the volume is well");
        assert_sound(&fs, "after lost data");
    }
}

#[test]
fn metadata_that_cannot_be_written_makes_the_volume_read_only_until_it_is_opened_again() {
    let (faulty, device, fs) = setup();
    let kept = file(&fs, b"kept");
    fs.wait(|| fs.write(kept, 0, &[1; 5000], NOW)).unwrap();
    fs.sync_file(kept).unwrap();
    let geometry = fs.volume().superblock().geometry();
    let journal = geometry.journal * 4096..(geometry.journal + geometry.journal_blocks) * 4096;
    faulty.add(Rule::fail(On::Write, libc::EIO).within(journal));
    file(&fs, b"lost");
    assert_eq!(fs.commit().unwrap_err().errno(), libc::EIO);
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let error = fs.wait(|| fs.create(&WHO, ROOT, b"more", &new)).unwrap_err();
    assert!(matches!(&error, FsError::Failed(_)) && error.errno() == libc::EROFS, "{error}");
    assert_eq!(fs.wait(|| fs.write(kept, 0, &[2; 10], NOW)).unwrap_err().errno(), libc::EROFS);
    assert_eq!(fs.read(kept, 0, 5000).unwrap(), [1; 5000], "reading goes on");
    drop(fs);
    faulty.clear();
    let fs = open(&device).expect("the device is well again");
    assert_sound(&fs, "after a failed commit");
    assert_eq!(fs.read(kept, 0, 5000).unwrap(), [1; 5000]);
    file(&fs, b"more");
}

#[test]
fn a_device_that_fails_flushes_promises_nothing() {
    let (faulty, _, fs) = setup();
    let ino = file(&fs, b"a");
    fs.commit().unwrap();
    fs.wait(|| fs.write(ino, 0, &[7; 5000], NOW)).unwrap();
    faulty.add(Rule::fail(On::Flush, libc::EIO));
    assert!(fs.sync_file(ino).is_err());
    assert!(fs.sync_file(ino).is_err(), "a flush that failed is not forgotten");
}

/// A volume of 32 MiB on a device that can become larger, and may fail.
fn small() -> (Arc<MemoryDevice>, Arc<Faulty>, Arc<Filesystem>) {
    let memory = MemoryDevice::new(32 << 20);
    let faulty = Faulty::new(memory.clone());
    let device: Arc<dyn BlockDevice> = faulty.clone();
    make(&device);
    let fs = open(&device).expect("nothing fails yet");
    (memory, faulty, fs)
}

#[test]
fn a_growth_whose_writes_may_not_be_durable_makes_the_volume_read_only() {
    let first_superblock = Rule::fail(On::Write, libc::EIO).within(0..4096);
    for rule in [Rule::fail(On::Flush, libc::EIO), first_superblock] {
        let (memory, faulty, fs) = small();
        let device = fs.volume().device().clone();
        let ino = file(&fs, b"a");
        fs.wait(|| fs.write(ino, 0, &[7; 5000], NOW)).unwrap();
        fs.sync_file(ino).unwrap();
        memory.extend(64 << 20);
        device.look_again().unwrap();
        faulty.add(rule.once());
        assert_eq!(fs.volume().grow().unwrap_err().errno(), libc::EIO);
        assert!(fs.volume().is_read_only());
        assert_eq!(fs.wait(|| fs.write(ino, 0, &[8; 10], NOW)).unwrap_err().errno(), libc::EROFS);
        assert_eq!(fs.commit().unwrap_err().errno(), libc::EROFS);
        drop(fs);
        let fs = open(&device).expect("the device is well again");
        assert_eq!(fs.read(ino, 0, 5000).unwrap(), [7; 5000]);
        fs.volume().grow().expect("it is larger");
        assert_sound(&fs, "grown at last");
    }
}

#[test]
fn a_growth_that_cannot_write_behind_the_end_leaves_the_volume_as_it_was() {
    let (memory, faulty, fs) = small();
    let ino = file(&fs, b"a");
    memory.extend(64 << 20);
    fs.volume().device().look_again().unwrap();
    // Such as a thin volume whose pool is full.
    faulty.add(Rule::fail(On::Write, libc::ENOSPC).within(32 << 20..64 << 20).once());
    assert!(matches!(fs.volume().grow().unwrap_err(), FsError::Device(_)));
    assert!(!fs.volume().is_read_only());
    fs.wait(|| fs.write(ino, 0, &[7; 5000], NOW)).unwrap();
    fs.sync_file(ino).unwrap();
    assert_sound(&fs, "not grown");
    fs.volume().grow().expect("the device is well again");
    assert_sound(&fs, "grown");
}

#[test]
fn damaged_metadata_is_named_and_nothing_panics() {
    let (_, device, fs) = setup();
    for i in 0..500u32 {
        file(&fs, i.to_string().as_bytes());
    }
    fs.close().unwrap();
    let geometry = fs.volume().superblock().geometry();
    drop(fs);
    // The root of the tree, somewhere in the first chunk.
    let io = gpunvme_blockdev::Io::inline(device.clone()).unwrap();
    let region = gpunvme_blockdev::Region::allocate(4096).unwrap();
    for block in geometry.data..geometry.data + 40 {
        io.run(vec![gpunvme_blockdev::Request::write(block * 4096, vec![region.span(0..4096)], false)]).unwrap();
    }
    let Err(error) = open(&device) else { panic!("the tree is gone") };
    assert_eq!(error.errno(), libc::EUCLEAN);
    assert!(error.to_string().contains("block ") && error.to_string().contains("fsck.gpunvme"), "{error}");
}

#[test]
fn an_intact_superblock_of_another_version_is_not_overruled_by_a_copy() {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(32 << 20);
    make(&device);
    let io = gpunvme_blockdev::Io::inline(device.clone()).unwrap();
    let region = gpunvme_blockdev::Region::allocate(4096).unwrap();
    let write = |change: fn(&mut Block)| {
        io.run(vec![gpunvme_blockdev::Request::read(0, vec![region.span(0..4096)])]).unwrap();
        let mut bytes = [0; 4096];
        region.read_at(0, &mut bytes).unwrap();
        let mut block = Block::from_bytes(&bytes);
        change(&mut block);
        region.write_at(0, block.bytes()).unwrap();
        io.run(vec![gpunvme_blockdev::Request::write(0, vec![region.span(0..4096)], false)]).unwrap();
    };
    write(|block| {
        block.bytes_mut()[80] = 99;
        block.seal(block.sequence());
    });
    let Err(error) = open(&device) else { panic!("a volume of a newer version was opened by its last copy") };
    assert!(error.to_string().contains("version 99"), "{error}");
    // One that is not intact is.
    write(|block| block.bytes_mut()[80] = 98);
    drop(open(&device).expect("the copy is good"));
}

/// A checkpoint that waits for a commit: when that fails, what it froze is no image to write home.
#[test]
fn a_checkpoint_beside_a_commit_that_fails_writes_nothing_home() {
    let (faulty, device, fs) = setup();
    for i in 0..50u32 {
        file(&fs, i.to_string().as_bytes());
    }
    fs.commit().unwrap();
    let geometry = fs.volume().superblock().geometry();
    let journal = geometry.journal * 4096..(geometry.journal + geometry.journal_blocks) * 4096;
    for i in 50..100u32 {
        file(&fs, i.to_string().as_bytes());
    }
    let data = file(&fs, b"data");
    fs.wait(|| fs.write(data, 0, &[1; 100_000], NOW)).unwrap();
    faulty.add(Rule::delay(On::Flush, std::time::Duration::from_millis(500)).once());
    faulty.add(Rule::fail(On::Write, libc::EIO).within(journal));
    let before = faulty.hits();
    let writing = fs.clone();
    // The data comes first, which it flushes for long.
    let commit = std::thread::spawn(move || writing.sync_file(data));
    while faulty.hits() == before {
        std::thread::yield_now();
    }
    let home = Rule::fail(On::Write, libc::ENOSPC).within(data_area(fs.volume()));
    faulty.add(home);
    let checkpoint = fs.volume().checkpoint().unwrap_err();
    assert!(commit.join().unwrap().is_err());
    assert!(matches!(checkpoint, FsError::Failed(_)), "it went on: {checkpoint}");
    drop(fs);
    faulty.clear();
    assert_sound(&open(&device).unwrap(), "after both failed");
}

/// One anchor says what the other one does. Where it is an earlier one all the same, it may say
/// that nothing is left to recover, and be older than what is in the journal.
#[test]
fn a_damaged_anchor_costs_no_transaction_without_a_word() {
    let memory = MemoryDevice::new(64 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let earlier = memory.snapshot();
    let fs = open(&device).unwrap();
    file(&fs, b"durable");
    fs.commit().unwrap();
    let image = memory.snapshot();
    let mut with_an_earlier_one = image.clone();
    lose_anchors_since(&earlier, &mut with_an_earlier_one);
    let Err(error) = open(&(MemoryDevice::from_image(with_an_earlier_one) as Arc<dyn BlockDevice>)) else {
        panic!("a transaction was lost without a word")
    };
    assert!(matches!(&error, FsError::Corrupt(_)) && error.to_string().contains("anchor"), "{error}");
    for is_readable in [true, false] {
        for address in gpunvme_layout::geometry::ANCHORS {
            let mut image = image.clone();
            if is_readable {
                ruin(&mut image, address);
            }
            let faulty = Faulty::new(MemoryDevice::from_image(image));
            if !is_readable {
                faulty.add(unreadable(address));
            }
            let device: Arc<dyn BlockDevice> = faulty;
            let fs = open(&device).unwrap_or_else(|error| panic!("anchor {address}: {error}"));
            assert!(fs.wait(|| fs.lookup(ROOT, b"durable")).is_ok(), "lost without a word");
        }
    }
}

/// The device cannot read a block.
fn unreadable(address: u64) -> Rule {
    Rule::fail(On::Read, libc::EIO).within(address * 4096..(address + 1) * 4096)
}

#[test]
fn after_an_unmount_one_anchor_that_can_be_read_is_enough() {
    let (faulty, device, fs) = setup();
    file(&fs, b"durable");
    fs.close().unwrap();
    drop(fs);
    let geometry = open(&device).map(|fs| fs.volume().geometry()).unwrap();
    open(&device).unwrap().close().unwrap();
    for address in gpunvme_layout::geometry::ANCHORS.into_iter().chain([geometry.journal]) {
        faulty.add(unreadable(address));
        let fs = open(&device).unwrap_or_else(|error| panic!("block {address}: {error}"));
        assert!(fs.wait(|| fs.lookup(ROOT, b"durable")).is_ok());
        fs.close().unwrap();
        faulty.clear();
    }
    gpunvme_layout::geometry::ANCHORS.into_iter().for_each(|address| faulty.add(unreadable(address)));
    let Err(error) = open(&device) else { panic!("nothing says where the journal begins") };
    assert!(error.to_string().contains("block 1:") && error.to_string().contains("fsck.gpunvme"), "{error}");
}

/// What is there may be a transaction that was durable.
#[test]
fn a_block_of_the_journal_that_cannot_be_read_refuses_a_mount_by_name_and_a_check_goes_on() {
    let memory = MemoryDevice::new(64 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).unwrap();
    for name in [&b"first"[..], b"second"] {
        file(&fs, name);
        fs.commit().unwrap();
    }
    let geometry = fs.volume().geometry();
    let image = memory.snapshot();
    let is_used = |address: &u64| {
        let mut bytes = vec![0; 4096];
        image.read_at(*address * 4096, &mut bytes);
        bytes.iter().any(|byte| *byte != 0)
    };
    let journal = geometry.journal..geometry.journal + geometry.journal_blocks;
    let used = journal.clone().filter(is_used).count() as u64;
    assert!(used > 4, "{used}");
    // Of the last two, it is not known whether they are those of another transaction.
    for address in journal.start..journal.start + used + 2 {
        let recorder = Recorder::new(image.clone());
        let faulty = Faulty::new(recorder.clone());
        faulty.add(unreadable(address));
        let device: Arc<dyn BlockDevice> = faulty.clone();
        let Err(error) = open(&device) else { panic!("block {address}: mounted") };
        let text = error.to_string();
        assert!(text.contains(&format!("block {address}:")) && text.contains("fsck.gpunvme"), "{text}");
        let options = CheckOptions { read_only: false, memory: 64 << 20, now: NOW, stop: Stop::default() };
        let mut fsck =
            Fsck::open(Io::inline(device.clone()).unwrap(), options).unwrap_or_else(|error| panic!("{address}: {error}"));
        let found = fsck.check(&mut |_, _, _| ()).unwrap();
        assert!(
            found.list.iter().any(|finding| finding.to_string().contains(&address.to_string())),
            "{address}: {:#?}",
            found.list
        );
        let repaired = fsck.repair(&mut |_| true, &mut |_, _, _| ()).unwrap_or_else(|error| panic!("{address}: {error}"));
        assert_eq!(repaired.left.total(), 0, "{address}: {:#?}", repaired.left.list);
        fsck.close(true).unwrap();
        let covers = |event: &Event| match event {
            Event::Write { offset, data, .. } => (*offset..offset + data.len() as u64).contains(&(address * 4096)),
            _ => false,
        };
        assert!(recorder.log().events().iter().any(covers), "block {address} was not written anew");
        faulty.clear();
        let fs = open(&device).unwrap_or_else(|error| panic!("block {address}: {error}"));
        assert_sound(&fs, "after a check");
        let is_there = |name: &[u8]| fs.wait(|| fs.lookup(ROOT, name)).is_ok();
        assert!(is_there(b"first") || !is_there(b"second"), "block {address}: a later transaction without the one before");
        assert_eq!(is_there(b"second"), address >= journal.start + used, "block {address}");
    }
}

/// A power cut can tear both an anchor and the transaction that was written meanwhile.
#[test]
fn an_anchor_and_a_transaction_that_were_torn_together_keep_what_was_durable() {
    let memory = MemoryDevice::new(64 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).unwrap();
    file(&fs, b"before");
    fs.commit().unwrap();
    let earlier = memory.snapshot();
    fs.volume().checkpoint().unwrap();
    file(&fs, b"durable");
    fs.commit().unwrap();
    file(&fs, b"torn");
    fs.commit().unwrap();
    let mut image = memory.snapshot();
    let geometry = fs.volume().superblock().geometry();
    let block = |address: u64| {
        let mut bytes = vec![0; 4096];
        image.read_at(address * 4096, &mut bytes);
        bytes
    };
    let journal = geometry.journal..geometry.journal + geometry.journal_blocks;
    let last = journal.rev().find(|address| block(*address).iter().any(|byte| *byte != 0)).unwrap();
    ruin(&mut image, last);
    lose_anchors_since(&earlier, &mut image);
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(image);
    let fs = open(&device).expect("a power cut may leave it so");
    assert!([&b"before"[..], b"durable"].iter().all(|name| fs.wait(|| fs.lookup(ROOT, name)).is_ok()));
    assert!(matches!(fs.wait(|| fs.lookup(ROOT, b"torn")), Err(FsError::NotFound)));
    assert_sound(&fs, "after both were torn");
}
