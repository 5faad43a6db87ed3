//! Volumes of several devices, through the programs that users run.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gpunvme::gpu::Segment;
use gpunvme::{Mount, Operation, Ring};
use gpunvme_abi::get_text;
use gpunvme_cuda::{Cuda, Which};
use gpunvme_tests::cuda::from_the_device;
use gpunvme_tests::direct::{Buffer, extents, info};
use gpunvme_tests::mounted::{Image, is_mounted, text, unmount_unless_busy};
use gpunvme_tests::rings::{attach, bytes_of, shared, wait_for};
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, programs, scratch_dir, tree};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;
const UNIT: u64 = 128 << 10;

fn run(program: &str, arguments: &[&str]) -> Output {
    programs::command(program).args(arguments).output().unwrap()
}

fn succeeds(output: Output) -> String {
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(output: &Output, words: &[&str]) {
    let text = text(output);
    assert!(!output.status.success() && words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_tree_on_four_images_is_the_same_after_a_remount_by_any_of_them() {
    needs_mount!();
    let source = scratch_dir();
    tree::make(source.path(), 7, 300).unwrap();
    fs::write(source.path().join("large"), tree::pattern(8, 40 << 20)).unwrap();
    let volume = Image::striped(4, 64 * MIB).mount();
    let copied = Command::new("cp").args(["-a", "--"]).arg(source.path()).arg(volume.path("tree")).status().unwrap();
    assert!(copied.success());
    let expected = tree::read(source.path()).unwrap();
    tree::assert_same(&expected, &tree::read(&volume.path("tree")).unwrap());
    let info = info(File::open(volume.root()).unwrap());
    assert_eq!((info.devices, info.stripe_unit), (4, UNIT));
    assert!(info.capacity > 230 * MIB, "{}", info.capacity);
    let image = volume.unmount();
    let members = image.members();
    assert_eq!(get_text(&info.device), members.iter().map(|path| name(path)).collect::<Vec<_>>().join("+"));
    for member in &members[1..] {
        let (dir, member) = (image.mount_point(), name(member));
        assert!(succeeds(run("fsck.gpunvme", &["-n", member])).contains("clean"));
        succeeds(run("mount.gpunvme", &[member, name(&dir)]));
        tree::assert_same(&expected, &tree::read(&dir.join("tree")).unwrap());
        assert!(unmount_unless_busy(&dir).status.success());
    }
}

/// The mount table knows the member that was named, and no other.
#[test]
fn a_mounted_volume_is_refused_by_the_name_of_any_member() {
    needs_mount!();
    for (options, programs) in [("rw", 4), ("ro", 1)] {
        let volume = Image::striped(2, 64 * MIB).mount_with(options);
        let (member, dump) = (&volume.image().members()[1], volume.image().mount_point().with_file_name("dump"));
        let tries = [
            ("gpunvme", &["metadata-dump", name(member), name(&dump)][..]),
            ("fsck.gpunvme", &["-p", name(member)]),
            ("gpunvme", &["tune", "-L", "x", name(member)]),
            ("mkfs.gpunvme", &["--force", name(member)]),
        ];
        for (program, arguments) in &tries[..programs] {
            refused(&run(program, arguments), &["already mounted on", name(&volume.root())]);
        }
        volume.unmount();
    }
}

#[test]
fn doctor_looks_at_all_members_and_says_which_one_is_missing() {
    let image = Image::striped(3, 64 * MIB);
    let members = image.members();
    let told =
        || serde_json::from_slice::<serde_json::Value>(&run("gpunvme", &["--json", "doctor", name(&members[1])]).stdout).unwrap();
    let all = told();
    let found: Vec<&str> = all["members"].as_array().unwrap().iter().map(|member| member.as_str().unwrap()).collect();
    assert_eq!(found, [name(&members[1]), name(&members[0]), name(&members[2])]);
    assert_eq!((all["ssds"].as_array().unwrap().len(), &all["members_missing"]), (3, &serde_json::Value::Null));
    fs::remove_file(&members[2]).unwrap();
    let left = told();
    assert_eq!(left["members"].as_array().unwrap().len(), 1);
    assert!(left["members_missing"].as_str().unwrap().starts_with("member 3 of the 3"), "{}", left["members_missing"]);
}

/// What RESOLVE says is where the bytes are: read from the members' files they are the file.
#[test]
fn resolve_names_the_member_and_the_place_on_it() {
    needs_mount!();
    let volume = Image::striped(3, 64 * MIB).mount();
    let data = tree::pattern(9, (150 * UNIT + 5000) as usize);
    fs::write(volume.path("file"), &data).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    file.sync_all().unwrap();
    let found = extents(&file);
    assert!(found.len() >= 151 && found.iter().all(|extent| extent.len <= UNIT), "{}", found.len());
    let members: Vec<File> = volume.image().members().iter().map(|path| File::open(path).unwrap()).collect();
    let mut assembled = vec![0; data.len().next_multiple_of(4096)];
    for extent in &found {
        let place = extent.file_offset as usize..(extent.file_offset + extent.len) as usize;
        members[extent.device as usize].read_exact_at(&mut assembled[place], extent.device_offset).unwrap();
    }
    assert!(assembled[..data.len()] == data);
    let map: serde_json::Value =
        serde_json::from_str(&succeeds(run("gpunvme", &["map", "--json", name(&volume.path("file"))]))).unwrap();
    assert_eq!(map["extents"].as_array().unwrap().len(), found.len());
    // Each device has logical blocks of its own.
    assert!(map["extents"][0]["lba"].is_null() && map["extents"][0]["device_offset"].is_u64(), "{map}");
    let said = succeeds(run("gpunvme", &["info", name(&volume.root())]));
    assert!(said.contains("over 3 devices, in units of 128.0 KiB"), "{said}");
}

#[test]
fn direct_transfers_and_rings_reach_all_members() {
    needs_mount!();
    let volume = Image::striped(4, 64 * MIB).mount();
    let data = tree::pattern(10, 20 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, 20 << 20);
    let done = buffer.read(&file, 0, 20 << 20).unwrap();
    assert_eq!((done.bytes, done.host), (20 << 20, 20 << 20));
    assert!(buffer.get(0, 20 << 20) == data);
    // Ends and beginnings inside blocks, over the borders of units.
    let done = buffer.transfer(gpunvme_abi::Command::Read, &file, &[(UNIT - 700, 0, 2 * UNIT + 900)]).unwrap();
    assert_eq!(done.bytes, 2 * UNIT + 900);
    assert!(buffer.get(0, 2 * UNIT as usize + 900) == data[UNIT as usize - 700..3 * UNIT as usize + 200]);
    let other = tree::pattern(11, 5 << 20);
    buffer.put(0, &other);
    assert_eq!(buffer.write(&file, MIB, 5 << 20).unwrap().host, 5 << 20);
    assert!(fs::read(volume.path("file")).unwrap()[1 << 20..6 << 20] == other);

    let mount = Mount::open(volume.root()).unwrap();
    let memory = shared(&mount, 8 << 20);
    memory.copy_in(0, &data[..8 << 20]);
    let mut ring = Ring::new(&mount, 64).expect("a ring");
    let attached = attach(&ring, volume.path("ring"));
    for piece in 0..32u64 {
        ring.push(&Operation::write(&attached, piece << 18, &memory, piece << 18, 1 << 18)).unwrap();
    }
    wait_for(&mut ring, 32).into_iter().for_each(|completed| assert_eq!(completed.result.unwrap().bytes(), 1 << 18));
    memory.copy_in(0, &vec![0; 8 << 20]);
    for piece in 0..8u64 {
        ring.push(&Operation::read(&attached, piece << 20, &memory, piece << 20, 1 << 20)).unwrap();
    }
    wait_for(&mut ring, 8).into_iter().for_each(|completed| assert_eq!(completed.result.unwrap().bytes(), 1 << 20));
    assert!(bytes_of(&memory, 0, 8 << 20) == data[..8 << 20]);
    drop((ring, attached, memory, mount));
}

/// Into GPU memory by the staging pool, from members that the kernel drives and from controllers
/// that the daemon drives.
#[test]
fn gpu_memory_is_filled_from_a_stripe() {
    needs_mount!();
    programs::folder(); // they are built here, and not in the minute that the body has
    with_software_cuda("", || {
        let scratch = scratch_dir();
        let dir = scratch.path().join("mnt");
        fs::create_dir(&dir).unwrap();
        let paths: Vec<PathBuf> = (0..3).map(|number| scratch.path().join(format!("member.{number}"))).collect();
        let controllers: Vec<String> = paths.iter().map(|path| format!("sim:{},vwc=on", path.display())).collect();
        for device in [name(&paths[0]), &controllers.join("+")] {
            paths.iter().for_each(|path| File::create(path).unwrap().set_len(64 << 20).unwrap());
            let devices = if device.contains('+') { vec![device] } else { paths.iter().map(|path| name(path)).collect() };
            succeeds(run("mkfs.gpunvme", &[&["--unit", "64K"], &devices[..]].concat()));
            succeeds(run("mount.gpunvme", &[device, name(&dir)]));
            let data = tree::pattern(12, 20 << 20);
            fs::write(dir.join("file"), &data).unwrap();
            let (file, mount) = (gpunvme::File::open(dir.join("file")).unwrap(), Mount::open(&dir).unwrap());
            assert_eq!((mount.info().unwrap().devices, mount.info().unwrap().stripe_unit), (3, 64 << 10));
            let transfers = from_the_device(&mount);
            let gpu = Cuda::load().unwrap().gpu(Which::Index(0)).unwrap();
            let memory = gpu.alloc(data.len()).unwrap();
            let segment = Segment { file_offset: 0, address: memory.address(), len: data.len() as u64 };
            // SAFETY: the memory is this test's.
            let done = unsafe { transfers.read(&file, &[segment]) }.unwrap();
            assert_eq!(done.moved.bounce, data.len() as u64);
            let out = gpunvme::File::create(dir.join("copy")).unwrap();
            // SAFETY: as above.
            let done = unsafe { transfers.write(&out, &[segment]) }.unwrap();
            assert_eq!(done.moved.bounce, data.len() as u64);
            assert!(fs::read(dir.join("copy")).unwrap() == data);
            drop((transfers, file, out, mount));
            assert!(unmount_unless_busy(&dir).status.success());
            assert!(succeeds(run("fsck.gpunvme", &["-n", device])).contains("clean"));
        }
    });
}

#[test]
fn a_member_that_is_missing_foreign_or_there_twice_is_refused_by_name() {
    needs_mount!();
    let image = Image::striped(3, 64 * MIB);
    let [_, second, third] = [0, 1, 2].map(|number| image.members()[number].clone());
    let elsewhere = scratch_dir();
    let away = elsewhere.path().join("away");
    fs::rename(&third, &away).unwrap();
    refused(&image.try_mount(""), &["member 3 of the 3 of volume \"several\"", "missing", "-o device="]);
    refused(&run("fsck.gpunvme", &["-n", name(&second)]), &["member 3 of the 3", "missing"]);
    // Named, it may lie anywhere.
    let named = |third: &Path| format!("device={},device={}", name(&second), name(third));
    let mounted = image.try_mount(&named(&away));
    assert!(mounted.status.success() && is_mounted(&image.mount_point()), "{}", text(&mounted));
    assert!(unmount_unless_busy(&image.mount_point()).status.success());
    let checked = run("fsck.gpunvme", &["-n", "--with", name(&second), "--with", name(&away), name(&image.path())]);
    assert!(succeeds(checked).contains("clean"));

    let foreign = Image::striped(2, 64 * MIB);
    refused(&image.try_mount(&named(&foreign.path())), &[name(&foreign.path()), "belongs to another volume"]);
    let plain = Image::formatted_with(64 * MIB);
    refused(&image.try_mount(&named(&plain.path())), &[name(&plain.path()), "is not a member"]);
    refused(&plain.try_mount(&named(&away)), &[name(&plain.path()), "not a member"]);
    fs::rename(&away, &third).unwrap();
    let copy = image.path().with_extension("copy");
    fs::copy(&second, &copy).unwrap();
    refused(&image.try_mount(""), &["member 2 of volume \"several\"", "is there twice", name(&second), name(&copy)]);
    fs::remove_file(copy).unwrap();
    drop(image.mount());
}

/// A member from before the last mount would silently give old bytes: the count of openings tells.
#[test]
fn a_member_from_before_the_last_mount_is_stale() {
    needs_mount!();
    let image = Image::striped(2, 64 * MIB);
    let second = image.members()[1].clone();
    let (old, now) = (second.with_extension("old"), second.with_extension("now"));
    let elsewhere = scratch_dir();
    let [old, now] = [old, now].map(|path| elsewhere.path().join(path.file_name().unwrap()));
    // As a crash left it.
    let volume = image.mount();
    fs::write(volume.path("file"), b"one").unwrap();
    let (_, image) = volume.signal(Signal::KILL);
    fs::copy(&second, &old).unwrap();
    let volume = image.mount();
    fs::write(volume.path("file"), b"two").unwrap();
    let image = volume.unmount();
    fs::rename(&second, &now).unwrap();
    fs::copy(&old, &second).unwrap();
    let words = [name(&second), "is stale", "put the device back"];
    refused(&image.try_mount(""), &words);
    refused(&image.try_mount("ro"), &words);
    refused(&run("fsck.gpunvme", &["-y", name(&image.path())]), &words);
    // Where the first superblock of the other is gone, the only one is the stale member's.
    let first = OpenOptions::new().read(true).write(true).open(image.path()).unwrap();
    let mut superblock = vec![0; 4096];
    first.read_exact_at(&mut superblock, 0).unwrap();
    first.write_all_at(&[0; 4096], 0).unwrap();
    refused(&image.try_mount(""), &words);
    refused(&run("fsck.gpunvme", &["-n", name(&image.path())]), &words);
    first.write_all_at(&superblock, 0).unwrap();
    fs::rename(&now, &second).unwrap();
    let volume = image.mount();
    assert_eq!(fs::read(volume.path("file")).unwrap(), b"two");
    let image = volume.unmount();
    // One that is cut off is not simply missing.
    let file = OpenOptions::new().write(true).open(&second).unwrap();
    file.set_len(60 * MIB).unwrap();
    refused(&image.try_mount(""), &["member 2 of the 2", "missing", name(&second), "it was truncated"]);
    file.set_len(64 * MIB).unwrap();
}

#[test]
fn what_was_synced_survives_kills_of_the_daemon() {
    needs_mount!();
    let mut image = Image::striped(4, 64 * MIB);
    for round in 0..4u64 {
        let volume = image.mount();
        for old in 0..round {
            assert!(fs::read(volume.path(format!("{old}"))).unwrap() == tree::pattern(old, 3 << 20));
        }
        let file = File::create(volume.path(format!("{round}"))).unwrap();
        file.write_all_at(&tree::pattern(round, 3 << 20), 0).unwrap();
        file.sync_all().unwrap();
        // Something is in flight when it dies.
        let unsynced = File::create(volume.path("unsynced")).unwrap();
        unsynced.write_all_at(&tree::pattern(99, 9 << 20), 0).unwrap();
        let (_, dead) = volume.signal(Signal::KILL);
        drop((file, unsynced));
        dead.check();
        image = dead;
    }
    drop(image.mount());
}

#[test]
fn a_member_carries_its_volume_and_is_known_by_it() {
    needs_mount!();
    let image = Image::striped(2, 64 * MIB);
    let uuid_of = |path: &Path| -> serde_json::Value {
        serde_json::from_str(&succeeds(run("gpunvme", &["probe", "--json", name(path)]))).unwrap()
    };
    let [first, second] = [0, 1].map(|number| uuid_of(&image.members()[number]));
    assert_eq!((&first["uuid"], &first["label"]), (&second["uuid"], &"several".into()));
    assert!(first["member_uuid"].is_string() && first["member_uuid"] != second["member_uuid"]);
    let said = succeeds(run("gpunvme", &["probe", name(&image.path())]));
    assert!(said.contains(&format!("ID_FS_UUID_SUB={}\n", first["member_uuid"].as_str().unwrap())), "{said}");
    let members = image.members();
    for member in &members {
        let again = run("mkfs.gpunvme", &[name(member)]);
        refused(&again, &["carries one of the devices of a gpunvme volume (\"several\""]);
    }
    refused(&run("mkfs.gpunvme", &["-f", name(&members[0]), name(&members[0])]), &["is named twice"]);
    // The first superblock is wiped: the second one counts, and a mount writes both.
    File::options().write(true).open(&members[1]).unwrap().write_all_at(&[0; 4096], 0).unwrap();
    let image = image.mount().unmount();
    assert_eq!(uuid_of(&members[1]), second);
    // One device again, and nothing is left of the volume of two.
    succeeds(run("mkfs.gpunvme", &["-fq", name(&members[1])]));
    refused(&image.try_mount(""), &["member 2 of the 2", "missing"]);
    let plain = uuid_of(&members[1]);
    assert!(plain["member_uuid"].is_null() && plain["uuid"] != first["uuid"]);
}
