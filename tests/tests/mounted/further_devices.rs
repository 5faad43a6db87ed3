//! `gpunvme grow MOUNT DEVICE...`: a volume of several devices takes further ones while it is in
//! use.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use gpunvme::{Mount, Operation, Ring};
use gpunvme_tests::direct::extents;
use gpunvme_tests::loop_device::LoopDevice;
use gpunvme_tests::mounted::{Image, text, unmount_unless_busy};
use gpunvme_tests::rings::{attach, bytes_of, shared, wait_for};
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

fn run(program: &str, arguments: &[&str]) -> Output {
    programs::command(program).args(arguments).output().unwrap()
}

#[track_caller]
fn succeeds(output: Output) -> String {
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(output: &Output, words: &[&str]) {
    let text = text(output);
    assert!(!output.status.success() && words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs `gpunvme grow` for the mount with these arguments.
fn grow(dir: &Path, arguments: &[&str]) -> Output {
    run("gpunvme", &[&["--json", "grow", name(dir)], arguments].concat())
}

/// Capacity after growth by these devices.
#[track_caller]
fn grow_by(dir: &Path, devices: &[&PathBuf]) -> u64 {
    let devices: Vec<&str> = devices.iter().map(|path| name(path)).collect();
    let answer: serde_json::Value = serde_json::from_str(&succeeds(grow(dir, &devices))).unwrap();
    assert!(answer["before"].as_u64() < answer["capacity"].as_u64(), "{answer}");
    answer["capacity"].as_u64().unwrap()
}

/// Files beside the volume's own, which hold nothing, of so many MiB each.
fn further<const N: usize>(image: &Image, sizes: [u64; N]) -> [PathBuf; N] {
    let mut number = 0;
    sizes.map(|size| {
        number += 1;
        let path = image.path().with_file_name(format!("further.{number}"));
        File::create_new(&path).unwrap().set_len(size * MIB).unwrap();
        path
    })
}

#[test]
fn a_volume_takes_further_devices_while_it_is_used() {
    needs_mount!();
    let volume = Image::striped(2, 96 * MIB).mount();
    let (root, image) = (volume.root(), volume.image());
    let [third, fourth, fifth] = further(image, [200, 300, 280]);
    let before = tree::pattern(1, 120 << 20);
    fs::write(volume.path("before"), &before).unwrap();
    // A ring that is there, with memory that was registered, from before the first device to after
    // the last, and a writer all the while.
    let mount = Mount::open(&root).unwrap();
    let (buffer, mut ring) = (shared(&mount, MIB), Ring::new(&mount, 32).unwrap());
    let over = AtomicBool::new(false);
    let (small, larger, largest) = (tree::pattern(2, 300_000), tree::pattern(3, 150 << 20), tree::pattern(4, 500 << 20));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = 0;
            while !over.load(Ordering::Relaxed) {
                let path = volume.path(format!("small {}", written % 20));
                fs::write(&path, &small).unwrap();
                assert!(fs::read(&path).unwrap() == small);
                written += 1;
            }
            written
        });
        let growth = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert!(grow_by(&root, &[&third]) > 370 * MIB);
            fs::write(volume.path("larger"), &larger).unwrap();
            assert!(grow_by(&root, &[&fourth, &fifth]) > 920 * MIB);
            fs::write(volume.path("largest"), &largest).unwrap();
        }));
        over.store(true, Ordering::Relaxed);
        assert!(writer.join().unwrap() > 0);
        growth.unwrap();
    });
    for path in ["larger", "largest"] {
        File::open(volume.path(path)).unwrap().sync_all().unwrap();
    }
    let info = mount.info().unwrap();
    assert_eq!((info.devices, info.sets), (5, 3));
    let said = succeeds(run("gpunvme", &["info", name(&root)]));
    assert!(said.contains("over 5 devices in 3 sets, in units of 128.0 KiB"), "{said}");

    // By rings, at places on all of them; and where RESOLVE says.
    let file = attach(&ring, volume.path("largest"));
    for at in (0..500 * MIB).step_by(7 << 20) {
        ring.push(&Operation::read(&file, at, &buffer, 0, MIB)).unwrap();
        let read = wait_for(&mut ring, 1).remove(0).result.unwrap().bytes();
        assert!(bytes_of(&buffer, 0, read) == largest[at as usize..(at + read) as usize], "{at}");
    }
    // INFO has room for 255 bytes of names.
    let paths: Vec<PathBuf> = image.members().into_iter().chain([third.clone(), fourth.clone(), fifth.clone()]).collect();
    let names = paths.iter().map(|path| name(path)).collect::<Vec<_>>().join("+");
    assert!(names.starts_with(&info.device) && info.device.len() >= names.len().min(250), "{}", info.device);
    let members: Vec<File> = paths.iter().map(|path| File::open(path).unwrap()).collect();
    let mut used = [false; 5];
    for (path, content) in [("larger", &larger), ("largest", &largest)] {
        let mut assembled = vec![0; content.len().next_multiple_of(4096)];
        for extent in extents(File::open(volume.path(path)).unwrap()) {
            let place = extent.file_offset as usize..(extent.file_offset + extent.len) as usize;
            used[extent.device as usize] = true;
            members[extent.device as usize].read_exact_at(&mut assembled[place], extent.device_offset).unwrap();
        }
        let differs = assembled.chunks(4096).zip(content.chunks(4096)).position(|(is, should)| is[..should.len()] != *should);
        assert_eq!(
            differs,
            None,
            "a block of {path} on the devices, {:?}",
            differs.map(|block| &assembled[block * 4096..][..16])
        );
    }
    assert_eq!(used[2..], [true; 3]);
    drop((ring, buffer, file, mount));

    // All that was there is there after a kill, by each of the devices, old or new.
    succeeds(run("gpunvme", &["sync", name(&root)]));
    let (_, dead) = volume.signal(Signal::KILL);
    dead.check();
    for device in [dead.path(), third.clone(), fifth.clone()] {
        succeeds(run("mount.gpunvme", &[name(&device), name(&root)]));
        assert!(fs::read(root.join("before")).unwrap() == before);
        assert!(fs::read(root.join("larger")).unwrap() == larger);
        assert!(fs::read(root.join("largest")).unwrap() == largest);
        assert!(unmount_unless_busy(&root).status.success());
        assert!(succeeds(run("fsck.gpunvme", &["-n", name(&device)])).contains("clean"));
    }
    // The last set grows when its devices do.
    let volume = dead.mount();
    for path in [&fourth, &fifth] {
        OpenOptions::new().write(true).open(path).unwrap().set_len(400 * MIB).unwrap();
    }
    assert!(grow_by(&volume.root(), &[]) > 1150 * MIB);
    let image = volume.unmount();
    succeeds(run("gpunvme", &["tune", "-L", "other", name(&image.path())]));
    assert!(succeeds(run("gpunvme", &["probe", name(&fourth)])).contains("other"));
    // All of them have to be there.
    fs::remove_file(&fourth).unwrap();
    refused(&run("mount.gpunvme", &[name(&third), name(&root)]), &["member 4 of the 5 of volume \"other\"", "missing"]);
}

#[test]
fn devices_that_cannot_be_taken_are_refused_and_lose_nothing() {
    needs_mount!();
    let volume = Image::striped(2, 96 * MIB).mount();
    let (root, image) = (volume.root(), volume.image());
    let [good, small, other, swap] = further(image, [100, 15, 100, 100]);
    succeeds(run("mkfs.gpunvme", &["-q", "-L", "precious", name(&other)]));
    succeeds(Command::new("/sbin/mkswap").arg(&swap).output().unwrap());
    let kept = fs::read(&other).unwrap();
    refused(&grow(&root, &[name(&good), name(&other)]), &["carries a gpunvme volume (\"precious\"", "--force"]);
    refused(&grow(&root, &[name(&good), name(&swap)]), &["of type swap", "--force"]);
    refused(&grow(&root, &[name(&good), name(&small)]), &[name(&small), "bytes, and 16777216 are the least"]);
    refused(&grow(&root, &[name(&good), name(&good)]), &["is named twice"]);
    refused(&grow(&root, &[name(&image.members()[1])]), &["already mounted on"]);
    refused(&grow(&root, &[&name(&good).replace("further", "missing")]), &["No such file"]);
    refused(&grow(&root, &["--force"]), &["DEVICE"]);
    let user = programs::command("gpunvme").arg("grow").args([&root, &good]).uid(65534).gid(65534).output().unwrap();
    refused(&user, &["only those who may mount the volume"]);
    let many: Vec<PathBuf> = (0..15).map(|number| good.with_file_name(format!("many.{number}"))).collect();
    many.iter().for_each(|path| File::create_new(path).unwrap().set_len(20 * MIB).unwrap());
    let many: Vec<&str> = many.iter().map(|path| name(path)).collect();
    refused(&grow(&root, &many), &["the volume has 2 devices, and 16 are the most"]);
    // Even with the word that they may be lost, devices are looked at before they are cleared.
    fs::write(image.path().with_file_name("keeps"), vec![7; 100 << 20]).unwrap();
    let keeps = image.path().with_file_name("keeps");
    refused(&grow(&root, &["--force", name(&keeps), name(&small)]), &[name(&small), "are the least"]);
    assert!(fs::read(&keeps).unwrap().iter().all(|byte| *byte == 7));
    // Its claim is the daemon's, not what a caller says.
    let carries = Mount::open(&root).unwrap().grow(&[name(&other)]).unwrap_err().to_string();
    assert!(carries.contains("carries data: its first and last MiB have to be zero"), "{carries}");
    let alone = Image::formatted_with(64 * MIB).mount();
    refused(&grow(&root, &["--force", name(&alone.image().path())]), &["already mounted on", name(&alone.root())]);
    assert!(fs::read(&other).unwrap() == kept);
    let capacity = grow_by(&root, &[&good]);
    assert!(capacity > 260 * MIB, "{capacity}");
    // With the word that says so, what one carries is lost.
    succeeds(grow(&root, &["--force", name(&other), name(&swap)]));
    refused(&run("mount.gpunvme", &[name(&swap), name(&root)]), &["already mounted on"]);
    let volume = volume.unmount().mount_with("ro");
    let [late] = further_named(volume.image(), "late");
    refused(&grow(&root, &[name(&late)]), &["the volume is read-only"]);
    refused(&grow(&alone.root(), &[name(&late)]), &["is all of the volume", "--growable"]);
    assert_eq!(fs::metadata(&late).unwrap().len(), 100 * MIB);
}

fn further_named(image: &Image, file: &str) -> [PathBuf; 1] {
    let path = image.path().with_file_name(file);
    File::create_new(&path).unwrap().set_len(100 * MIB).unwrap();
    [path]
}

/// A copy of the first devices from before the others were added has not what came since.
#[test]
fn what_was_there_before_the_volume_had_more_devices_is_stale() {
    needs_mount!();
    let volume = Image::striped(2, 96 * MIB).mount();
    fs::write(volume.path("file"), "kept").unwrap();
    let image = volume.unmount();
    let [first, second] = [0, 1].map(|number| fs::read(&image.members()[number]).unwrap());
    let members = image.members();
    let [third] = further(&image, [100]);
    let volume = image.mount();
    grow_by(&volume.root(), &[&third]);
    let image = volume.unmount();
    let now = fs::read(&members[1]).unwrap();
    fs::write(&members[1], &second).unwrap();
    refused(&image.try_mount(""), &[name(&members[1]), "is stale"]);
    refused(&run("mount.gpunvme", &[name(&third), name(&image.mount_point())]), &[name(&members[1]), "is stale"]);
    fs::write(&members[1], &now).unwrap();
    // Both of the first set are: they are whole, and the third is of no volume of theirs any more.
    let now = fs::read(&members[0]).unwrap();
    fs::write(&members[0], &first).unwrap();
    refused(&image.try_mount(""), &[name(&members[0]), "is stale"]);
    fs::write(&members[0], &now).unwrap();
    let volume = image.mount();
    assert_eq!(fs::read_to_string(volume.path("file")).unwrap(), "kept");
}

/// It was opened more often since than the volume itself, so that its number is the higher one, and
/// knows nothing of the devices that came later.
#[test]
fn a_copy_from_before_takes_no_volumes_place() {
    needs_mount!();
    let image = Image::blank(96 * MIB);
    succeeds(run("mkfs.gpunvme", &["--growable", name(&image.path())]));
    let mut copy = Image::blank(96 * MIB);
    fs::copy(image.path(), copy.path()).unwrap();
    for _ in 0..6 {
        copy = copy.mount().unmount();
    }
    let volume = image.mount();
    let [second] = further(volume.image(), [200]);
    grow_by(&volume.root(), &[&second]);
    fs::write(volume.path("later"), "kept").unwrap();
    let image = volume.unmount();

    let beside = image.path().with_file_name("copy");
    fs::copy(copy.path(), &beside).unwrap();
    let mount = |arguments: &[&str]| run("mount.gpunvme", &[&[name(&second), name(&image.mount_point())], arguments].concat());
    refused(&mount(&[]), &["is there twice", name(&beside)]);
    // The volume's own first device is not attached, and the copy is.
    let elsewhere = image.path().with_file_name("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let away = elsewhere.join("away");
    fs::rename(image.path(), &away).unwrap();
    refused(&mount(&[]), &[name(&second), "does not know", "is a copy from before"]);
    refused(&mount(&["-o", &format!("device={}", name(&beside))]), &["does not know"]);
    refused(&run("fsck.gpunvme", &["-n", name(&second)]), &["does not know"]);
    fs::rename(&away, image.path()).unwrap();
    fs::remove_file(&beside).unwrap();
    assert_eq!(fs::read_to_string(image.mount().path("later")).unwrap(), "kept");
}

#[test]
fn a_volume_takes_no_device_that_lies_on_itself() {
    needs_mount!();
    let image = Image::blank(96 * MIB);
    succeeds(run("mkfs.gpunvme", &["--growable", name(&image.path())]));
    let volume = image.mount();
    let file = volume.path("more.img");
    File::create(&file).unwrap().set_len(200 * MIB).unwrap();
    refused(&grow(&volume.root(), &[name(&file)]), &[name(&file), "lies on the volume itself"]);
    if let Some(device) = LoopDevice::over("a_volume_takes_no_device_that_lies_on_itself", &file) {
        refused(&grow(&volume.root(), &[name(device.path())]), &["lies on the volume itself"]);
    }
    assert_eq!(fs::metadata(&file).unwrap().len(), 200 * MIB);
}

/// One SSD to begin with, as most people have, and another one later.
#[test]
fn a_volume_of_one_device_that_is_growable_takes_another() {
    needs_mount!();
    let image = Image::blank(96 * MIB);
    let made = succeeds(run("mkfs.gpunvme", &["--growable", name(&image.path())]));
    assert!(made.contains("devices     1, in units of 128 KiB"), "{made}");
    let volume = image.mount();
    let content = tree::pattern(1, 60 << 20);
    fs::write(volume.path("before"), &content).unwrap();
    let [second] = further(volume.image(), [200]);
    assert!(grow_by(&volume.root(), &[&second]) > 270 * MIB);
    fs::write(volume.path("behind"), &content).unwrap();
    fs::write(volume.path("more"), &content).unwrap();
    let image = volume.unmount();
    assert!(succeeds(run("fsck.gpunvme", &["-n", name(&second)])).contains("clean"));
    let volume = image.mount();
    for file in ["before", "behind", "more"] {
        assert!(fs::read(volume.path(file)).unwrap() == content, "{file}");
    }
}

/// The daemon opens them while its system calls are filtered.
#[test]
fn a_volume_on_block_devices_takes_further_ones() {
    needs_mount!();
    let files = Image::blank_members_in(&gpunvme_tests::scratch_root(), 3, 128 * MIB);
    let over = |file: &PathBuf| LoopDevice::over("a_volume_on_block_devices_takes_further_ones", file);
    let Some(devices) = files.members().iter().map(over).collect::<Option<Vec<_>>>() else { return };
    let [first, second, third] = [0, 1, 2].map(|number: usize| name(devices[number].path()));
    let root = files.mount_point();
    fs::create_dir(&root).unwrap();
    succeeds(run("mkfs.gpunvme", &["-q", first, second]));
    succeeds(run("mount.gpunvme", &[second, name(&root)]));
    let content = tree::pattern(1, 200 << 20);
    fs::write(root.join("before"), &content).unwrap();
    succeeds(grow(&root, &[third]));
    fs::write(root.join("behind"), &content[..100 << 20]).unwrap();
    assert!(unmount_unless_busy(&root).status.success());
    for device in [third, first] {
        assert!(succeeds(run("fsck.gpunvme", &["-n", device])).contains("clean"));
        succeeds(run("mount.gpunvme", &[device, name(&root)]));
        assert!(fs::read(root.join("before")).unwrap() == content);
        assert!(fs::read(root.join("behind")).unwrap() == content[..100 << 20]);
        assert!(unmount_unless_busy(&root).status.success());
    }
    refused(&run("mkfs.gpunvme", &[third]), &["carries one of the devices of a gpunvme volume"]);
}
