//! Damage of every kind, in every structure: it is found, named and mended; a second check finds
//! nothing; and what the damage did not touch is there as it was, byte for byte.
//!
//! `FSCK_CASE` runs one case by its name, `FSCK_CUTS` says how many power cuts each repair goes
//! through (about 2 otherwise).

mod cuts;
mod damage;
mod dump;
mod many;
mod orphans;
mod shared;
mod subject;

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::{Image, MemoryDevice, Recorder};
use gpunvme_engine::check::{CheckOptions, Finding, Findings, Fsck, Kind, Stop};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{NewNode, SetAttributes};
use gpunvme_layout::geometry::{ANCHORS, CHUNK_BLOCKS};
use gpunvme_layout::{Inode, Key};

use crate::common::{Random, make, open};
use crate::surgeon::{Surgeon, lose_anchors_since};
use damage::{Case, assert_intact, cases, damaged};
use subject::{NOW, ROOT, WHO, contents, subject};

fn device(image: Image) -> Arc<dyn BlockDevice> {
    MemoryDevice::from_image(image)
}

fn fsck(device: &Arc<dyn BlockDevice>, read_only: bool) -> Fsck {
    fsck_until(device, read_only, Stop::default())
}

fn fsck_until(device: &Arc<dyn BlockDevice>, read_only: bool, stop: Stop) -> Fsck {
    let options = CheckOptions { read_only, memory: 64 << 20, now: NOW, stop };
    Fsck::open(Io::inline(device.clone()).expect("a queue"), options).expect("there is a superblock")
}

fn found(device: &Arc<dyn BlockDevice>) -> Findings {
    let fsck = fsck(device, true);
    let findings = fsck.check(&mut |_, _, _| ()).expect("the device can be read");
    fsck.close(false).expect("nothing is written");
    findings
}

/// Mends everything; nothing may be left.
fn mend(device: &Arc<dyn BlockDevice>, what: &str) {
    let mut fsck = fsck(device, false);
    let repaired = fsck.repair(&mut |_| true, &mut |_, _, _| ()).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(repaired.left.total(), 0, "{what}: {:#?}", repaired.left.list);
    fsck.close(true).unwrap_or_else(|error| panic!("{what}: {error}"));
}

#[test]
fn a_sound_volume_has_no_findings() {
    let findings = found(&device(subject().image.clone()));
    assert_eq!(findings.total(), 0, "{:#?}", findings.list);
}

/// Does something with each case, or the one that `FSCK_CASE` names, and fails with all that fail.
fn each(act: fn(&Case)) {
    let only = std::env::var("FSCK_CASE").ok();
    let cases = cases().filter(|case| only.as_ref().is_none_or(|only| case.name == only));
    let failed: Vec<&str> = cases.filter(|case| std::panic::catch_unwind(|| act(case)).is_err()).map(|case| case.name).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn damage_is_found_and_named_and_mended_and_the_rest_is_as_it_was() {
    each(|case| {
        let device = device(damaged(case));
        let findings = found(&device);
        assert!(findings.counts.contains_key(&case.kind), "{}: {:#?}", case.name, findings.list);
        mend(&device, case.name);
        let findings = found(&device);
        assert_eq!(findings.total(), 0, "{}: {:#?}", case.name, findings.list);
        let fs = open(&device).unwrap_or_else(|error| panic!("{}: {error}", case.name));
        assert_intact(case, &contents(&fs));
        // It can be used, too.
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        let made = fs.wait(|| fs.create(&WHO, ROOT, b"new", &new)).expect("there is room").ino;
        fs.wait(|| fs.write(made, 0, &[1; 100_000], NOW)).expect("there is room");
        fs.close().expect("nothing fails");
        let findings = found(&device);
        assert_eq!(findings.total(), 0, "{}, afterwards: {:#?}", case.name, findings.list);
    });
}

#[test]
fn what_has_one_right_answer_is_mended_without_asking_and_nothing_else() {
    each(|case| {
        let device = device(damaged(case));
        let mut fsck = fsck(&device, false);
        let repaired = fsck.repair(&mut |kind| kind.is_safe(), &mut |_, _, _| ()).expect("the device works");
        let kinds: Vec<Kind> = repaired.left.counts.keys().copied().collect();
        assert!(
            kinds.iter().all(|kind| !kind.is_safe()) || repaired.left.counts.contains_key(&case.kind),
            "{}: {kinds:?}",
            case.name
        );
        assert_eq!(!case.kind.is_safe(), repaired.left.counts.contains_key(&case.kind), "{}: {kinds:?}", case.name);
        fsck.close(repaired.left.total() == 0).expect("the device works");
    });
}

#[test]
fn a_superblock_that_may_not_be_mended_is_left_and_counted() {
    for case in cases().filter(|case| case.kind == Kind::Superblock) {
        let device = device(damaged(case));
        let mut fsck = fsck(&device, false);
        let repaired = fsck.repair(&mut |kind| kind != Kind::Superblock, &mut |_, _, _| ()).expect("the device works");
        assert_eq!(repaired.left.counts, found(&device).counts, "{}", case.name);
        assert_eq!(repaired.left.counts, repaired.found.counts, "{}", case.name);
        fsck.close(false).expect("the device works");
    }
}

#[test]
fn a_check_writes_nothing() {
    for case in cases() {
        let recorder = Recorder::new(damaged(case));
        let device: Arc<dyn BlockDevice> = recorder.clone();
        found(&device);
        assert_eq!(recorder.position(), 0, "{}", case.name);
    }
}

#[test]
fn a_power_cut_during_a_repair_leaves_what_the_next_repair_mends() {
    each(|case| {
        let recorder = Recorder::new(damaged(case));
        let device: Arc<dyn BlockDevice> = recorder.clone();
        mend(&device, case.name);
        let log = recorder.log();
        let mut random = Random(case.name.len() as u64);
        let cuts: Vec<usize> = log.cuts().collect();
        let mut power_cuts = log.power_cuts();
        let wanted = std::env::var("FSCK_CUTS").map_or(2, |cuts| cuts.parse().expect("a number"));
        let chosen: Vec<usize> = cuts.iter().copied().filter(|_| random.below(cuts.len() as u64) < wanted).collect();
        for cut in chosen {
            let mode = random.below(3);
            let image = power_cuts.image(cut, |_, sector| match mode {
                0 => false,
                1 => true,
                _ => (sector / 8).is_multiple_of(2) || random.below(3) == 0,
            });
            let what = format!("{}, power cut at {cut} in mode {mode}", case.name);
            let device = self::device(image);
            mend(&device, &what);
            let findings = found(&device);
            assert_eq!(findings.total(), 0, "{what}: {:#?}", findings.list);
            let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_intact(case, &contents(&fs));
        }
    });
}

#[test]
fn a_repair_ends_when_it_is_asked_to_and_the_next_one_mends_the_rest() {
    each(|case| {
        // Permission is asked for all along: in the comparison of groups, before the tree is built
        // anew, and before each item is mended.
        for asked in [0, 3u32] {
            let device = device(damaged(case));
            let (stop, mut before) = (Stop::default(), asked);
            let mut fsck = fsck_until(&device, false, stop.clone());
            let mut may = |_| {
                if before == 0 {
                    stop.ask();
                }
                before = before.saturating_sub(1);
                true
            };
            match fsck.repair(&mut may, &mut |_, _, _| ()) {
                Err(FsError::Cancelled) => fsck.close(false).expect("the device works"),
                Ok(repaired) => {
                    let late = asked > 0 || !stop.is_asked();
                    assert!(late, "{}: another round follows on each that mends", case.name);
                    assert_eq!(repaired.left.total(), 0, "{}, after {asked}: {:#?}", case.name, repaired.left.list);
                    fsck.close(true).expect("the device works");
                }
                Err(error) => panic!("{}, after {asked}: {error}", case.name),
            }
            let what = format!("{}, ended after {asked}", case.name);
            mend(&device, &what);
            assert_intact(case, &contents(&open(&device).unwrap_or_else(|error| panic!("{what}: {error}"))));
        }
    });
}

#[test]
fn nothing_goes_on_when_the_end_was_asked_for_before() {
    let case = cases().find(|case| case.name == "space of a leaf does not add up").expect("it is there");
    let recorder = Recorder::new(damaged(case));
    let device: Arc<dyn BlockDevice> = recorder.clone();
    let stop = Stop::default();
    let mut fsck = fsck_until(&device, false, stop.clone());
    stop.ask();
    assert!(matches!(fsck.check(&mut |_, _, _| ()), Err(FsError::Cancelled)));
    assert!(matches!(fsck.repair(&mut |_| true, &mut |_, _, _| ()), Err(FsError::Cancelled)));
    fsck.close(false).expect("nothing was begun");
    assert_eq!(recorder.position(), 0, "and nothing was written");
    let options = CheckOptions { read_only: true, memory: 64 << 20, now: NOW, stop };
    assert!(matches!(Fsck::open(Io::inline(device).expect("a queue"), options), Err(FsError::Cancelled)));
}

#[test]
fn a_journal_that_is_damaged_is_told_from_one_that_ends() {
    // Several transactions, none of them at home.
    let memory = MemoryDevice::from_image(subject().image.clone());
    let device: Arc<dyn BlockDevice> = memory.clone();
    let fs = open(&device).expect("the volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    for n in 0..5 {
        fs.wait(|| fs.create(&WHO, ROOT, format!("new {n}").as_bytes(), &new)).expect("there is room");
        fs.commit().expect("nothing fails");
    }
    let image = memory.snapshot();
    assert_eq!(found(&self::device(image.clone())).total(), 0);

    let mut surgeon = Surgeon::new(image.clone());
    let journal = surgeon.geometry.journal..surgeon.geometry.journal + surgeon.geometry.journal_blocks;
    let descriptors: Vec<(u64, u64)> = journal
        .filter(|a| surgeon.block(*a).kind() == gpunvme_layout::BlockKind::Journal as u16)
        .map(|a| (surgeon.block(a).sequence(), a))
        .collect();
    let newest: Vec<u64> = {
        let mut sorted = descriptors.clone();
        sorted.sort_unstable();
        sorted.iter().rev().take(5).map(|(_, address)| *address).collect()
    };
    // The third of the five: two later ones are there, and cannot be replayed.
    surgeon.ruin(newest[2]);
    let device = self::device(surgeon.image);
    let error = open(&device).err().expect("a mount does not go on as if the three had never been");
    assert!(error.to_string().contains("journal"), "{error}");
    let findings = found(&device);
    assert_eq!(findings.counts.get(&Kind::Journal), Some(&1), "{:#?}", findings.list);
    mend(&device, "damaged journal");
    let fs = open(&device).expect("the volume can be opened");
    let names: Vec<_> = contents(&fs).into_keys().filter(|path| path.starts_with("/new")).collect();
    assert_eq!(names, ["/new 0", "/new 1"]);

    // Without any anchor the journal itself says what belongs together.
    let mut surgeon = Surgeon::new(image);
    ANCHORS.into_iter().for_each(|address| surgeon.ruin(address));
    let device = self::device(surgeon.image);
    mend(&device, "no anchors");
    let fs = open(&device).expect("the volume can be opened");
    assert_eq!(contents(&fs).into_keys().filter(|path| path.starts_with("/new")).count(), 5);
}

/// What is durable in the journal only, and the bitmap is gone that says whether it is metadata.
#[test]
fn without_anchors_and_bitmap_no_transaction_is_lost() {
    let memory = MemoryDevice::from_image(subject().image.clone());
    let device: Arc<dyn BlockDevice> = memory.clone();
    let fs = open(&device).expect("the volume can be opened");
    let two = subject().inodes["two"];
    let set = SetAttributes { mode: Some(0o700), ..SetAttributes::default() };
    fs.wait(|| fs.set_attributes(&WHO, two, &set)).expect("nothing is allocated");
    fs.commit().expect("nothing fails");
    let mut surgeon = Surgeon::new(memory.snapshot());
    ANCHORS.into_iter().for_each(|address| surgeon.ruin(address));
    surgeon.ruin(surgeon.geometry.bitmap(0));
    let device = self::device(surgeon.image);
    mend(&device, "no anchors and no bitmap");
    let fs = open(&device).expect("the volume can be opened");
    assert_eq!(fs.wait(|| fs.attributes(two)).expect("it is there").inode.mode & 0o777, 0o700);
}

#[test]
fn anchors_that_a_repair_writes_count_more_than_the_one_that_was_left() {
    let memory = MemoryDevice::from_image(subject().image.clone());
    let device: Arc<dyn BlockDevice> = memory.clone();
    let fs = open(&device).expect("the volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let create = |name: &str| {
        fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new)).expect("there is room");
        fs.commit().expect("nothing fails");
    };
    // The anchor that is left describes the volume before the last checkpoint, and the journal
    // holds a transaction since.
    create("new 0");
    let earlier = memory.snapshot();
    fs.volume().checkpoint().expect("nothing fails");
    create("new 1");
    let generation = |surgeon: &Surgeon, address: u64| surgeon.block(address).sequence();
    let before = Surgeon::new(earlier);
    let left = ANCHORS.into_iter().map(|address| generation(&before, address)).max().expect("there are two");
    let mut image = memory.snapshot();
    lose_anchors_since(&before.image, &mut image);
    let mut surgeon = Surgeon::new(image);
    // The first transaction is damaged, so that the anchor leads nowhere.
    let journal = surgeon.geometry.journal..surgeon.geometry.journal + surgeon.geometry.journal_blocks;
    let descriptors = journal.filter(|a| surgeon.block(*a).kind() == gpunvme_layout::BlockKind::Journal as u16);
    let mut descriptors: Vec<(u64, u64)> = descriptors.map(|a| (surgeon.block(a).sequence(), a)).collect();
    descriptors.sort_unstable();
    surgeon.ruin(descriptors[descriptors.len() - 2].1);
    let repaired = MemoryDevice::from_image(surgeon.image);
    let device: Arc<dyn BlockDevice> = repaired.clone();
    mend(&device, "one anchor");
    let surgeon = Surgeon::new(repaired.snapshot());
    assert!(ANCHORS.into_iter().all(|address| generation(&surgeon, address) > left));
    let fs = open(&device).expect("the volume can be opened");
    assert!(contents(&fs).contains_key("/new 1"));
}

#[test]
fn nothing_is_allocated_while_blocks_in_use_are_marked_free() {
    let mut surgeon = Surgeon::new(subject().image.clone());
    let (root, small) = (surgeon.state().root, Key::inode(subject().inodes["small"]));
    let (group, at) = surgeon.geometry.locate(root);
    surgeon.edit(surgeon.geometry.bitmap(group), |bitmap| gpunvme_layout::group::set(bitmap, at, 1, false));
    surgeon.edit_item(small, |bytes| {
        let mut inode = Inode::decode(small.ino(), bytes).expect("it is sound");
        inode.nlink = 7;
        bytes.copy_from_slice(&inode.encode());
    });
    let device = device(surgeon.image);
    let mut fsck = fsck(&device, false);
    let repaired = fsck.repair(&mut |kind| kind != Kind::Unmarked, &mut |_, _, _| ()).expect("the device works");
    assert!(repaired.left.counts.contains_key(&Kind::Unmarked), "{:#?}", repaired.left.list);
    assert!(repaired.left.counts.contains_key(&Kind::LinkCount), "{:#?}", repaired.left.list);
    fsck.close(false).expect("the device works");
    mend(&device, "blocks in use are marked free");
    assert_eq!(contents(&open(&device).expect("the volume can be opened")), subject().contents);
}

#[test]
fn a_new_volume_knows_nothing_of_an_earlier_one_with_its_uuid() {
    let memory = MemoryDevice::new(48 << 20);
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let fs = open(&device).expect("the volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    fs.wait(|| fs.create(&WHO, ROOT, b"earlier", &new)).expect("there is room");
    fs.commit().expect("nothing fails");
    let device: Arc<dyn BlockDevice> = MemoryDevice::from_image(memory.snapshot());
    assert_eq!(contents(&open(&device).expect("the volume can be opened")).len(), 1);

    let memory = MemoryDevice::from_image(memory.snapshot());
    let device: Arc<dyn BlockDevice> = memory.clone();
    make(&device);
    let mut surgeon = Surgeon::new(memory.snapshot());
    ANCHORS.into_iter().for_each(|address| surgeon.ruin(address));
    let device = self::device(surgeon.image);
    mend(&device, "new volume without anchors");
    assert!(contents(&open(&device).expect("the volume can be opened")).is_empty());
}

#[test]
fn a_new_tree_that_does_not_fit_leaves_the_old_one() {
    use gpunvme_layout::group::{self, ChunkKind};
    let case = cases().find(|case| case.name == "space of a leaf does not add up").expect("it is there");
    let mut without = 0;
    for room in 0..12 {
        let mut surgeon = Surgeon::new(damaged(case));
        let home = surgeon.geometry.bitmap(0);
        let (mut left, chunks) = (room, surgeon.geometry.group_chunks(0));
        surgeon.edit(home, |bitmap| {
            for chunk in 0..chunks {
                if group::kind(bitmap, chunk) == ChunkKind::Free {
                    group::set_kind(bitmap, chunk, ChunkKind::Data);
                }
                for at in chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS {
                    let keep = !group::is_used(bitmap, at) && group::kind(bitmap, chunk) == ChunkKind::Metadata && left > 0;
                    left -= u64::from(keep);
                    if !keep {
                        group::set(bitmap, at, 1, true);
                    }
                }
            }
        });
        let memory = MemoryDevice::from_image(surgeon.image);
        let device: Arc<dyn BlockDevice> = memory.clone();
        let mut fsck = fsck(&device, false);
        let repaired = fsck.repair(&mut |_| true, &mut |_, _, _| ()).expect("the device works");
        fsck.close(repaired.left.total() == 0).expect("the device works");
        let mut surgeon = Surgeon::new(memory.snapshot());
        if repaired.left.total() > 0 {
            without += 1;
            // The administrator makes room.
            surgeon.ruin(home);
            surgeon.ruin(surgeon.geometry.descriptor(0).0);
        }
        let device = self::device(surgeon.image);
        mend(&device, "room was made");
        assert_intact(case, &contents(&open(&device).expect("the volume can be opened")));
    }
    assert!(without > 0 && without < 12, "{without}");
}

#[test]
fn a_new_tree_is_written_over_nothing_of_the_old_one_where_a_bitmap_is_damaged_too() {
    let mut surgeon = Surgeon::new(subject().image.clone());
    let path = surgeon.path(Key::new(subject().inodes["many"], gpunvme_layout::Kind::Dirent, 1 << 62));
    let old = surgeon.state().root;
    assert_eq!(path.len(), 3);
    surgeon.ruin(path[1]);
    let before: Vec<_> = path.iter().map(|address| (*address, surgeon.block(*address))).collect();
    (0..surgeon.geometry.groups).for_each(|group| surgeon.ruin(surgeon.geometry.bitmap(group)));
    let recorder = Recorder::new(surgeon.image);
    let device: Arc<dyn BlockDevice> = recorder.clone();
    mend(&device, "inner node and bitmaps");
    assert_eq!(contents(&open(&device).expect("the volume can be opened")), subject().contents);

    let log = recorder.log();
    let mut cuts = log.power_cuts();
    let mut looked = 0;
    for cut in log.cuts() {
        let now = Surgeon::new(cuts.image(cut, |_, _| true));
        if now.state().root != old {
            break;
        }
        looked += 1;
        for (address, block) in &before {
            assert!(now.block(*address).bytes() == block.bytes(), "block {address} is another at {cut}, and the old tree counts");
        }
    }
    assert!(looked > 0);
}

#[test]
fn an_entry_whose_file_is_lost_is_told_by_its_name() {
    let mut surgeon = Surgeon::new(subject().image.clone());
    surgeon.remove(Key::inode(subject().inodes["marked"] - 1));
    let findings = found(&device(surgeon.image));
    let of_entry = |finding: &&Finding| finding.kind == Kind::EntryDangling;
    let finding = findings.list.iter().find(of_entry).expect("it is found");
    assert!(finding.what.starts_with("\"pipe\" names inode"), "{finding}");
}

#[test]
fn a_volume_without_a_superblock_is_refused() {
    let mut surgeon = Surgeon::new(subject().image.clone());
    surgeon.geometry.superblocks().into_iter().for_each(|address| surgeon.ruin(address));
    let device = device(surgeon.image);
    let options = CheckOptions { read_only: true, memory: 64 << 20, now: NOW, stop: Stop::default() };
    assert!(Fsck::open(Io::inline(device).expect("a queue"), options).is_err());
}
