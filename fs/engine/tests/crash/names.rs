//! Power cuts in a change of label and UUID: the volume has the old ones or the new ones, by all
//! that tell them, and is sound.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, OpenMode};
use gpunvme_blockdev_testing::{Image, Recorder};
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_layout::geometry::SUPERBLOCK;
use gpunvme_layout::superblock::{Identity, Names};
use gpunvme_layout::{BLOCK_SIZE, Block, Superblock, Timestamp};
use gpunvme_programs::members;

use super::{BYTES, MODES, fresh, survives, volume};
use crate::common::{Random, open};

/// UUID and label.
type Known = (gpunvme_layout::Uuid, String);

fn new_names() -> Names {
    Names { label: "new".into(), changed_uuid: Some([5; 16]) }
}

fn rename(recorder: &Arc<Recorder>, members: u64, names: &Names) -> [Superblock; 2] {
    let change = |_: &Superblock| names.clone();
    if members == 1 {
        let device: Arc<dyn BlockDevice> = recorder.clone();
        return members::rename_whole(&device, change).expect("nothing fails");
    }
    let devices = recorder.members(members).into_iter().map(|device| (device.name().to_owned(), device));
    members::rename_members(devices.collect(), change).expect("nothing fails")
}

/// What a program that only looks at the first superblock of each device finds.
fn seen(image: &Image, members: u64) -> Vec<Option<Known>> {
    let identify = |number: u64| {
        let mut bytes = [0; BLOCK_SIZE];
        image.read_at(number * (BYTES / members), &mut bytes);
        let Identity { uuid, label, .. } = Superblock::identify(&Block::from_bytes(&bytes), SUPERBLOCK)?;
        Some((uuid, label))
    };
    (0..members).map(identify).collect()
}

/// Opens the volume for writing and returns the names that the mount has then.
fn mounted(image: Image, members: u64, what: &str) -> (Known, Image) {
    let recorder = Recorder::new(image);
    let device = volume(&recorder, members).unwrap_or_else(|error| panic!("{what}: {error}"));
    let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
    let superblock = fs.volume().superblock();
    let known = (superblock.volume_uuid(), superblock.names.label.clone());
    fs.close().expect("nothing fails");
    (known, recorder.snapshot())
}

/// Mends what copies of the superblock are left behind, as `fsck.gpunvme -p` does, and says which
/// names the volume has.
fn mended(image: Image, members: u64, what: &str) -> Known {
    let recorder = Recorder::new(image);
    let device = volume(&recorder, members).unwrap_or_else(|error| panic!("{what}: {error}"));
    let options =
        CheckOptions { read_only: false, memory: 64 << 20, now: Timestamp { seconds: 1, nanoseconds: 0 }, stop: Stop::default() };
    let mut fsck = Fsck::open(Io::inline(device).unwrap(), options).unwrap_or_else(|error| panic!("{what}: {error}"));
    fsck.check(&mut |_, _, _| ()).unwrap();
    let repaired = fsck.repair(&mut |kind| kind.is_safe(), &mut |_, _, _| ()).unwrap();
    assert_eq!(repaired.left.total(), 0, "{what}: {:?}", repaired.left.list);
    let superblock = fsck.volume().superblock();
    (superblock.volume_uuid(), superblock.names.label.clone())
}

fn cut_everywhere(base: Image, members: u64, names: &Names) {
    let recorder = Recorder::new(base);
    let [before, after] = rename(&recorder, members, names).map(|it| (it.volume_uuid(), it.names.label));
    assert_ne!(before, after);
    let log = recorder.log();
    let mut random = Random(3);
    let mut power_cuts = log.power_cuts();
    let mut outcomes = [0; 2];
    for cut in log.cuts() {
        for mode in 0..MODES {
            let image = power_cuts.image(cut, survives(mode, &mut random, &log, members, BYTES));
            let what = format!("{members} members, cut {cut} mode {mode}");
            let (known, written) = mounted(image.clone(), members, &what);
            assert!([&before, &after].contains(&&known), "{what}: {known:?}");
            outcomes[usize::from(known == after)] += 1;
            // The mount of several has written it everywhere; a mount of one does not write it.
            let whole = seen(&image, members).into_iter().chain(if members > 1 { seen(&written, members) } else { Vec::new() });
            for found in whole.flatten() {
                assert!([&before, &after].contains(&&found), "{what}: {found:?}");
            }
            if members > 1 {
                assert!(seen(&written, members).iter().all(|found| found.as_ref() == Some(&known)), "{what}: {known:?}");
            }
            assert_eq!(mended(image, members, &what), known, "{what}");
        }
    }
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
    let (known, image) = mounted(recorder.snapshot(), members, "in the end");
    assert_eq!(known, after);
    // And back.
    let recorder = Recorder::new(image);
    let old = Names { label: before.1.clone(), changed_uuid: None };
    rename(&recorder, members, &old);
    assert_eq!(mounted(recorder.snapshot(), members, "and back").0, before);
}

#[test]
fn a_change_of_names_that_is_cut_short_leaves_the_old_or_the_new_ones() {
    for members in [1, 2, 4] {
        cut_everywhere(fresh(members), members, &new_names());
    }
}

/// The first superblock is damaged, and the one at the end counts: it must not be the first one
/// that is written.
#[test]
fn so_it_does_where_the_first_superblock_was_damaged_before() {
    for members in [1, 2] {
        let mut image = fresh(members);
        image.write_at(200, b"damage");
        cut_everywhere(image, members, &new_names());
    }
}

/// A volume that was copied with its UUID gets another, and both can be used side by side.
#[test]
fn members_of_a_copy_with_another_uuid_do_not_mix_with_those_of_the_original() {
    let original = Recorder::new(fresh(2));
    let copy = Recorder::new(original.snapshot());
    rename(&copy, 2, &new_names());
    let (mut first, mut second) = (original.members(2), copy.members(2));
    let mixed = vec![first.remove(0), second.remove(1)];
    let named = mixed.into_iter().map(|device| (device.name().to_owned(), device)).collect();
    let why = members::assemble(named, OpenMode::ReadOnly).err().expect("they are of two volumes");
    assert!(why.contains("is stale"), "{why}");
}
