//! `gpunvme grow`: a volume becomes as large as its devices have become, while it is in use.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Output;

use gpunvme::{Mount, Operation, Ring};
use gpunvme_tests::mounted::{Image, text};
use gpunvme_tests::rings::{attach, bytes_of, shared, wait_for};
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::fs::FallocateFlags;
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

fn resize(path: &Path, len: u64) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

/// Capacity before and after.
#[track_caller]
fn grow(dir: &Path) -> (u64, u64) {
    let answer: serde_json::Value = serde_json::from_str(&succeeds(run("gpunvme", &["--json", "grow", name(dir)]))).unwrap();
    (answer["before"].as_u64().unwrap(), answer["capacity"].as_u64().unwrap())
}

#[test]
fn a_volume_grows_with_its_image_while_it_is_used() {
    needs_mount!();
    let volume = Image::formatted_with(64 * MIB).mount();
    fs::create_dir(volume.path("tree")).unwrap();
    tree::make(&volume.path("tree"), 3, 60).unwrap();
    let expected = tree::read(&volume.path("tree")).unwrap();
    let path = volume.image().path();
    let (before, capacity) = grow(&volume.root());
    assert_eq!(before, capacity);
    assert!(succeeds(run("gpunvme", &["grow", name(&volume.root())])).contains("nothing to do"));
    resize(&path, 65 * MIB);
    refused(&run("gpunvme", &["grow", name(&volume.root())]), &[name(&path), "it grows by 8388608 at the least"]);
    let user = programs::command("gpunvme").arg("grow").arg(volume.root()).uid(65534).gid(65534).output().unwrap();
    refused(&user, &["only those who may mount the volume"]);

    let mut files = Vec::new();
    for (round, size) in [256u64, 264, 700].into_iter().enumerate() {
        resize(&path, size * MIB);
        let (before, capacity) = grow(&volume.root());
        assert!(
            capacity > before && capacity + 64 * MIB > size * MIB && capacity < size * MIB,
            "{before} to {capacity} of {size} MiB"
        );
        let stat = rustix::fs::statvfs(volume.root()).unwrap();
        assert_eq!(stat.f_blocks * stat.f_frsize, capacity);
        // More than there was room for.
        let content = tree::pattern(round as u64, (size as usize / 3) << 20);
        fs::write(volume.path(format!("large {round}")), &content).unwrap();
        files.push(content);
    }
    succeeds(run("gpunvme", &["sync", name(&volume.root())]));
    let (_, dead) = volume.signal(Signal::KILL);
    dead.check();
    let volume = dead.mount();
    tree::assert_same(&expected, &tree::read(&volume.path("tree")).unwrap());
    for (round, content) in files.iter().enumerate() {
        assert!(fs::read(volume.path(format!("large {round}"))).unwrap() == *content, "{round}");
    }
    let image = volume.unmount();
    let volume = image.mount_with("ro");
    refused(&run("gpunvme", &["grow", name(&volume.root())]), &["the volume is read-only"]);
    let volume = volume.unmount().mount();
    succeeds(run("gpunvme", &["sync", name(&volume.root())]));
    tree::assert_same(&expected, &tree::read(&volume.path("tree")).unwrap());
}

#[test]
fn all_programs_know_a_volume_that_has_grown() {
    needs_mount!();
    let volume = Image::formatted_with(64 * MIB).mount();
    let path = volume.image().path();
    resize(&path, 512 * MIB);
    grow(&volume.root());
    let content = tree::pattern(4, 150 << 20);
    fs::write(volume.path("large"), &content).unwrap();
    let map = succeeds(run("gpunvme", &["map", name(&volume.path("large"))]));
    assert!(!map.is_empty());
    let image = volume.unmount();
    succeeds(run("gpunvme", &["tune", "-L", "larger", name(&path)]));
    assert!(succeeds(run("gpunvme", &["probe", name(&path)])).contains("larger"));
    refused(&image.mkfs(&[]), &["larger"]);
    let dump = path.with_file_name("dump");
    succeeds(run("gpunvme", &["metadata-dump", "--names", name(&path), name(&dump)]));
    assert!(succeeds(run("fsck.gpunvme", &["-n", name(&dump)])).contains("clean"));
    // Each copy of the superblock, and the descriptors of the region that it has grown by.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let region = 64 * MIB;
    for at in [0, region - 4096, 512 * MIB - 4096, region] {
        file.write_all_at(&[0x55; 4096], at).unwrap();
        let found = run("fsck.gpunvme", &["-y", name(&path)]);
        assert_eq!(found.status.code(), Some(1), "damage at {at}: {}", text(&found));
        image.check();
    }
    // The first superblock is gone: the last one counts, and says how large the volume is.
    file.write_all_at(&[0; 4096], 0).unwrap();
    let volume = image.mount();
    assert!(fs::read(volume.path("large")).unwrap() == content);
    resize(&path, 1024 * MIB);
    refused(&run("gpunvme", &["grow", name(&volume.root())]), &["the first superblock is damaged", "fsck.gpunvme"]);
    let image = volume.unmount_unchecked();
    resize(&path, 512 * MIB);
    assert_eq!(run("fsck.gpunvme", &["-y", name(&path)]).status.code(), Some(1));
    // One that was cut off is refused with its reason.
    resize(&path, 300 * MIB);
    refused(&image.try_mount(""), &["it was truncated"]);
    resize(&path, 512 * MIB);
}

#[test]
fn a_volume_of_several_devices_grows_with_the_smallest_of_them() {
    needs_mount!();
    let volume = Image::striped(3, 64 * MIB).mount();
    let members = volume.image().members();
    let content = tree::pattern(5, 100 << 20);
    fs::write(volume.path("before"), &content).unwrap();
    resize(&members[0], 256 * MIB);
    resize(&members[2], 256 * MIB);
    refused(&run("gpunvme", &["grow", name(&volume.root())]), &[name(&members[1]), "make it larger, too"]);
    resize(&members[1], 200 * MIB);
    let (before, capacity) = grow(&volume.root());
    assert!(before < 192 * MIB && capacity > 550 * MIB && capacity < 600 * MIB, "{before} to {capacity}");
    let larger = tree::pattern(6, 350 << 20);
    fs::write(volume.path("after"), &larger).unwrap();
    succeeds(run("gpunvme", &["sync", name(&volume.root())]));
    let (_, dead) = volume.signal(Signal::KILL);
    let volume = dead.mount();
    assert!(fs::read(volume.path("before")).unwrap() == content);
    let image = volume.unmount();
    // By any member, and again.
    resize(&members[1], 256 * MIB);
    let volume = image.mount();
    let (_, capacity) = grow(&volume.root());
    assert!(capacity > 700 * MIB, "{capacity}");
    succeeds(run("gpunvme", &["sync", name(&volume.root())]));
    assert!(fs::read(volume.path("before")).unwrap() == content);
    let image = volume.unmount();
    assert!(succeeds(run("fsck.gpunvme", &["-n", name(&members[2])])).contains("clean"));
    drop(image);
}

/// What the members say of themselves changes only with a growth: a device that became larger for
/// nothing can become smaller again.
#[test]
fn a_growth_that_is_refused_leaves_the_members_as_they_were() {
    needs_mount!();
    let volume = Image::striped(2, 64 * MIB).mount();
    let members = volume.image().members();
    let all = |size| members.iter().for_each(|member| resize(member, size));
    all(66 * MIB);
    refused(&run("gpunvme", &["grow", name(&volume.root())]), &["it grows by"]);
    all(64 * MIB);
    let volume = volume.unmount().mount();
    for times in 1..=15 {
        all((64 + 16 * times) * MIB);
        grow(&volume.root());
    }
    all(400 * MIB);
    for _ in 0..2 {
        refused(&run("gpunvme", &["grow", name(&volume.root())]), &["has grown 15 times"]);
    }
    all((64 + 16 * 15) * MIB);
    fs::write(volume.path("file"), [7; 5000]).unwrap();
    let volume = volume.unmount().mount();
    assert!(succeeds(run("gpunvme", &["grow", name(&volume.root())])).contains("nothing to do"));
    assert_eq!(fs::read(volume.path("file")).unwrap(), [7; 5000]);
}

/// Makes a file so long, if it is shorter.
fn lengthen(path: &Path, len: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    // Unlike set_len, beside another that makes it longer, this never makes it shorter.
    rustix::fs::fallocate(file, FallocateFlags::empty(), len - 4096, 4096).unwrap();
}

/// Each call finds larger members than the one before, which may still be writing down what it
/// found.
#[test]
fn calls_to_grow_that_come_at_once_take_turns() {
    needs_mount!();
    let volume = Image::striped(3, 64 * MIB).mount();
    let members = volume.image().members();
    let content = tree::pattern(5, 50 << 20);
    fs::write(volume.path("before"), &content).unwrap();
    // A volume grows 15 times.
    for size in [96, 128, 160] {
        std::thread::scope(|scope| {
            for caller in 0..4 {
                let (volume, members) = (&volume, &members);
                scope.spawn(move || {
                    members.iter().for_each(|member| lengthen(member, (size + 8 * caller) * MIB));
                    // One that finds nothing more is refused.
                    let _ = run("gpunvme", &["grow", name(&volume.root())]);
                });
            }
        });
    }
    let stat = rustix::fs::statvfs(volume.root()).unwrap();
    assert!(stat.f_blocks * stat.f_frsize > 500 * MIB, "{} blocks", stat.f_blocks);
    succeeds(run("gpunvme", &["sync", name(&volume.root())]));
    let (_, dead) = volume.signal(Signal::KILL);
    dead.check();
    assert!(fs::read(dead.mount().path("before")).unwrap() == content);
}

/// A device that becomes shorter while it is used fails what lies behind its end, and gives no
/// other bytes for it; it has them again when it is as long as before.
#[test]
fn a_device_that_shrinks_fails_and_brings_no_other_bytes() {
    needs_mount!();
    let volume = Image::formatted_with(256 * MIB).mount();
    let content = tree::pattern(5, 128 << 20);
    fs::write(volume.path("file"), &content).unwrap();
    succeeds(run("gpunvme", &["sync", name(&volume.root())]));
    let mount = Mount::open(volume.root()).unwrap();
    let (buffer, mut ring) = (shared(&mount, MIB), Ring::new(&mount, 32).unwrap());
    let file = attach(&ring, volume.path("file"));
    let path = volume.image().path();
    let mut read_all = || {
        let mut failed = 0;
        for at in 0..128 {
            buffer.copy_in(0, &[0xee; 1 << 20]);
            ring.push(&Operation::read(&file, at * MIB, &buffer, 0, MIB)).unwrap();
            let expected = &content[(at * MIB) as usize..((at + 1) * MIB) as usize];
            match wait_for(&mut ring, 1).remove(0).result {
                Ok(done) => assert!(bytes_of(&buffer, 0, done.bytes()) == expected[..done.bytes() as usize], "{at}"),
                Err(error) => {
                    assert_eq!(error.errno().raw_os_error(), libc::EIO, "{error}");
                    failed += 1;
                }
            }
        }
        failed
    };
    assert_eq!(read_all(), 0);
    let whole = fs::read(&path).unwrap();
    let device = OpenOptions::new().write(true).open(&path).unwrap();
    device.set_len(64 * MIB).unwrap();
    assert!(read_all() > 32);
    refused(&run("gpunvme", &["grow", name(&volume.root())]), &["never shrinks"]);
    device.write_all_at(&whole, 0).unwrap();
    assert_eq!(read_all(), 0);
}
