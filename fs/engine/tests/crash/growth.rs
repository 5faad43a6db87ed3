//! Power cuts at every point of a growth, of a device and of members that each lose their own
//! writes: the volume has the old size or the new one, nothing is lost, and it can grow then.

use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, OpenMode};
use gpunvme_blockdev_testing::{Faulty, Image, On, Recorder, Rule};
use gpunvme_engine::Filesystem;
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::superblock::Names;
use gpunvme_layout::{BLOCK_SIZE, Member, SetPlace, Striping, Timestamp};
use gpunvme_programs::members::GrowError;
use gpunvme_programs::{members, wipe};

use super::{MODES, UNIT, survives};
use crate::common::{ROOT, Random, assert_sound, make, open};

/// All devices together when they have become larger.
const BYTES: u64 = 64 << 20;

/// The devices, showing so many bytes of each until they are looked at again.
fn devices(recorder: &Arc<Recorder>, members: u64, shown: u64) -> Vec<(String, Arc<dyn BlockDevice>)> {
    recorder.members_of(members, shown).into_iter().map(|device| (device.name().to_owned(), device)).collect()
}

/// The volume on devices that show so many bytes of themselves. The last of them may be no member:
/// it is not yet.
fn volume(recorder: &Arc<Recorder>, members: u64, shown: u64) -> Arc<dyn BlockDevice> {
    let mut devices = devices(recorder, members, shown);
    if members == 1 {
        return devices.swap_remove(0).1;
    }
    let assembled = members::assemble(devices.clone(), OpenMode::ReadWrite);
    match assembled {
        Err(why) if why == format!("member {members} is not a member of a volume of several devices") => {
            devices.pop();
            members::assemble(devices, OpenMode::ReadWrite).expect("the members are there")
        }
        assembled => assembled.expect("the members are there"),
    }
}

/// A new volume on the first `shown` bytes of each of the first `members` of so many devices.
fn fresh(recorder: &Arc<Recorder>, count: u64, members: u64, shown: u64) {
    let mut devices: Vec<_> = devices(recorder, count, shown).into_iter().map(|(_, device)| device).collect();
    devices.truncate(members as usize);
    if members == 1 {
        return make(&devices[0]);
    }
    let blocks = shown / BLOCK_SIZE as u64;
    let striping = Striping::new(&vec![blocks; members as usize], UNIT).expect("they are large enough");
    make(&members::stripe(devices.clone(), &[striping]).expect("a stripe"));
    let generation = members::generation(1).expect("random numbers");
    let names = Names { label: "test".into(), changed_uuid: None };
    let member = Member {
        volume: [7; 16],
        names,
        uuid: [0; 16],
        index: 0,
        place: SetPlace::all(&[striping])[0],
        striping,
        blocks,
        generation,
    };
    let uuids: Vec<_> = (1..=members as u8).map(|number| [number; 16]).collect();
    members::format(&devices, &member, &uuids).expect("nothing fails");
}

fn content(number: u8) -> Vec<u8> {
    (0..300_000u32).map(|at| (at / 700) as u8 ^ number).collect()
}

/// Writes a file, durably.
fn write(fs: &Arc<Filesystem>, number: u8) {
    let context = Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } };
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    let ino = fs.wait(|| fs.create(&context, ROOT, &[b'a' + number], &new)).expect("there is room").ino;
    fs.wait(|| fs.write(ino, 0, &content(number), context.now)).expect("there is room");
    fs.sync_file(ino).expect("nothing fails");
}

fn holds(fs: &Arc<Filesystem>, number: u8) -> bool {
    let Ok(found) = fs.wait(|| fs.lookup(ROOT, &[b'a' + number])) else { return false };
    fs.read(found.ino, 0, 1 << 20).expect("it can be read") == content(number)
}

/// How a volume becomes larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// Its devices are larger when they are looked at again.
    Room,
    /// The last of the devices is none of its own yet.
    Device,
}

/// Makes the volume as large as its devices are, all of them. Returns whether it was smaller.
fn grow(recorder: &Arc<Recorder>, device: &Arc<dyn BlockDevice>, fs: &Filesystem, members: u64, by: By) -> Result<bool, String> {
    let has = device.members().len() as u64;
    if by == By::Device && has < members {
        let last = devices(recorder, members, BYTES / members).pop().expect("there are some").1;
        // It may have begun to be a member when the power failed.
        wipe::wipe(&last).map_err(|error| error.to_string())?;
        members::add(device, &[last]).map_err(|error| error.to_string())?;
    } else {
        members::grow(device, &|_| Ok(())).map_err(|error| error.to_string())?;
    }
    fs.volume().grow().map(|[before, after]| before != after).map_err(|error| error.to_string())
}

/// Opens what a cut left, holds it to what was promised, and has it grow.
fn judge(image: Image, (members, by): (u64, By), sizes: [u64; 2], written: u8, is_new: bool, what: &str) {
    let recorder = Recorder::new(image);
    let slot = BYTES / members;
    let device = volume(&recorder, members, slot);
    let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_sound(&fs, what);
    let size = fs.volume().geometry().total_blocks;
    assert!(sizes.contains(&size) && (!is_new || size == sizes[1]), "{what}: {size} blocks of {sizes:?}");
    (0..written).for_each(|number| assert!(holds(&fs, number), "{what}: file {number}"));
    let grown = grow(&recorder, &device, &fs, members, by);
    assert_eq!(grown, Ok(size == sizes[0]), "{what}");
    assert_eq!(fs.volume().geometry().total_blocks, sizes[1], "{what}");
    write(&fs, 20);
    assert_sound(&fs, what);
    fs.close().expect("nothing fails");
    drop((fs, device));
    let device = volume(&recorder, members, slot);
    let options =
        CheckOptions { read_only: true, memory: 4 << 20, now: Timestamp { seconds: 2, nanoseconds: 0 }, stop: Stop::default() };
    let fsck = Fsck::open(Io::inline(device.clone()).expect("a queue"), options).expect("it can be read");
    let found = fsck.check(&mut |_, _, _| ()).expect("it can be read");
    assert!(found.list.is_empty(), "{what}: {:#?}", found.list);
    drop(fsck);
    let fs = open(&device).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(fs.volume().geometry().total_blocks, sizes[1], "{what}");
    (0..written).chain([20]).for_each(|number| assert!(holds(&fs, number), "{what}: file {number}, at last"));
}

/// Cuts the power at every point of a growth, and again while what is left is opened.
fn cut(members: u64, by: By, shown: u64, seed: u64) {
    let mut random = Random(seed);
    let recorder = Recorder::new(Image::new(BYTES));
    fresh(&recorder, members, members - u64::from(by == By::Device), shown);
    let device = volume(&recorder, members, shown);
    let fs = open(&device).expect("the volume can be opened");
    write(&fs, 0);
    let old = fs.volume().geometry().total_blocks;
    // Each file, and then the growth, counts from the position on at which it was durable.
    let mut promised = vec![recorder.position()];
    let start = recorder.position();
    let mut write_next = |number| {
        write(&fs, number);
        promised.push(recorder.position());
    };
    write_next(1);
    grow(&recorder, &device, &fs, members, by).expect("there is room");
    let grown = recorder.position();
    (2..6).for_each(&mut write_next);
    let sizes = [old, fs.volume().geometry().total_blocks];
    assert!(sizes[1] > sizes[0] + (8 << 20) / BLOCK_SIZE as u64, "{sizes:?}");
    fs.close().expect("nothing fails");
    let log = recorder.log();
    let cuts: Vec<usize> = log.cuts().filter(|cut| *cut >= start).collect();
    let mut power_cuts = log.power_cuts();
    // What only writes files is the other tests' matter.
    let cuts = cuts.iter().enumerate().filter(|(number, cut)| **cut <= grown + 20 || number % 8 == 0).map(|(_, cut)| *cut);
    for cut in cuts {
        let written = promised.iter().filter(|position| **position <= cut).count() as u8;
        let is_new = grown <= cut;
        for mode in 0..MODES {
            let image = power_cuts.image(cut, survives(mode, &mut random, &log, members, BYTES));
            let what = format!("{members} members, cut {cut} mode {mode}");
            if random.below(4) > 0 {
                judge(image, (members, by), sizes, written, is_new, &what);
                continue;
            }
            // Power fails again while the volume is opened, and recovers.
            let again = Recorder::new(image);
            drop(open(&volume(&again, members, BYTES / members)).unwrap_or_else(|error| panic!("{what}: {error}")));
            let log = again.log();
            let all: Vec<usize> = log.cuts().collect();
            let second = all[random.below(all.len() as u64) as usize];
            let twice = log.power_cuts().image(second, survives(mode, &mut random, &log, members, BYTES));
            judge(twice, (members, by), sizes, written, is_new, &format!("{what}, then at {second} of recovery"));
        }
    }
}

#[test]
fn a_power_cut_while_a_volume_grows_leaves_the_old_size_or_the_new() {
    cut(1, By::Room, 20 << 20, 1);
}

#[test]
fn so_it_does_where_each_member_of_a_volume_that_grows_loses_its_own_writes() {
    cut(2, By::Room, 12 << 20, 2);
}

#[test]
fn so_it_does_where_a_volume_is_given_another_member() {
    cut(4, By::Device, BYTES / 4, 3);
}

/// A volume on two of three devices, whose devices `broken` can make fail.
fn two_of_three(broken: impl Fn(usize) -> Option<Rule>) -> (Arc<Recorder>, Arc<dyn BlockDevice>, Arc<dyn BlockDevice>) {
    let recorder = Recorder::new(Image::new(48 << 20));
    let slot = (48 << 20) / 3;
    fresh(&recorder, 3, 2, slot);
    let all: Vec<(String, Arc<dyn BlockDevice>)> = devices(&recorder, 3, slot);
    let faulty: Vec<Arc<Faulty>> = all.iter().map(|(_, device)| Faulty::new(device.clone())).collect();
    let named = |number: usize| (all[number].0.clone(), faulty[number].clone() as Arc<dyn BlockDevice>);
    let volume = members::assemble(vec![named(0), named(1)], OpenMode::ReadWrite).expect("the members are there");
    for (number, device) in faulty.iter().enumerate() {
        broken(number).into_iter().for_each(|rule| device.add(rule));
    }
    (recorder, volume, named(2).1)
}

/// The first superblock of a member fails.
fn first_superblock() -> Rule {
    Rule::fail(On::Write, 5).within(0..BLOCK_SIZE as u64)
}

#[test]
fn a_device_that_fails_while_it_is_added_is_none_of_the_volume() {
    let (recorder, volume, added) = two_of_three(|number| (number == 2).then(first_superblock));
    let why = members::add(&volume, &[added]).unwrap_err().to_string();
    assert!(why.contains("member 3") && !why.contains("at the next mount"), "{why}");
    assert_eq!(volume.members().len(), 2);
    drop(volume);
    let slot = (48 << 20) / 3;
    let mut left = devices(&recorder, 3, slot);
    let third = left.pop().expect("three").1;
    let volume = members::assemble(left.clone(), OpenMode::ReadWrite).expect("the others are the volume");
    drop(volume);
    // Beside them it is stale, or no member; another try takes it.
    let all = devices(&recorder, 3, slot);
    let volume = members::assemble(all, OpenMode::ReadWrite).or_else(|_| members::assemble(left, OpenMode::ReadWrite));
    let volume = volume.expect("the others are the volume");
    wipe::wipe(&third).expect("it works");
    members::add(&volume, &[third]).expect("it is one now");
    drop(volume);
    assert_eq!(members::assemble(devices(&recorder, 3, slot), OpenMode::ReadOnly).expect("all").members().len(), 3);
}

#[test]
fn a_device_that_may_have_become_a_member_is_said_to_be_kept() {
    let (recorder, volume, added) = two_of_three(|number| (number == 1).then(first_superblock));
    let why = members::add(&volume, &[added]).unwrap_err().to_string();
    assert!(why.contains("member 2") && why.contains("member 3 may be the volume's at the next mount"), "{why}");
    drop(volume);
    let slot = (48 << 20) / 3;
    let volume = members::assemble(devices(&recorder, 3, slot), OpenMode::ReadWrite).expect("it is");
    assert_eq!(volume.members().len(), 3);
}

/// What was written to a member before its flush failed may be lost; on a device that is added
/// there is nothing of the volume.
#[test]
fn a_failed_flush_of_a_member_is_told_apart_from_one_of_a_device_that_is_added() {
    for broken in 0..3 {
        let (_, volume, added) = two_of_three(|number| (number == broken).then(|| Rule::fail(On::Flush, 5).once()));
        let failed = members::add(&volume, &[added]).unwrap_err();
        assert_eq!(matches!(failed, GrowError::NotDurable(_)), broken < 2, "{failed}");
        assert!(failed.to_string().contains(&format!("member {}", broken + 1)), "{failed}");
    }
}
