//! `gpunvme metadata-dump`: an image that the other programs take for a volume, and that keeps what
//! people have in the volume to itself.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

use gpunvme_tests::mounted::{Image, text, unmount_unless_busy};
use gpunvme_tests::{needs_mount, programs, scratch_dir};
use serde_json::Value;

const MIB: u64 = 1 << 20;
/// In the content of a file, in a name, in the value of an attribute, in the target of a link.
const SECRETS: [&str; 4] = ["PlainContent", "PlainName", "PlainValue", "PlainTarget"];

fn gpunvme(arguments: &[&str]) -> Output {
    programs::command("gpunvme").args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = gpunvme(&[&["--json"], arguments].concat());
    assert!(output.status.success(), "{}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(arguments: &[&str], words: &str) {
    let output = gpunvme(arguments);
    let text = text(&output);
    assert!(output.status.code() == Some(1) && text.contains(words), "{arguments:?}: {words}: {text}");
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A volume with secrets, not mounted.
fn filled(image: Image) -> Image {
    let volume = image.mount();
    let (dir, file) = (volume.path("PlainName-of-a-directory"), volume.path("PlainName-of-a-directory/PlainName.txt"));
    fs::create_dir(&dir).unwrap();
    fs::write(&file, "PlainContent".repeat(1 << 20)).unwrap();
    symlink("PlainTarget/of/a/link", volume.path("link")).unwrap();
    for n in 0..500 {
        fs::write(dir.join(format!("{n}")), []).unwrap();
    }
    let set = |name: &str, value: &str| {
        let status = Command::new("setfattr").args(["-n", name, "-v", value]).arg(&file).status().unwrap();
        assert!(status.success());
    };
    set("user.PlainName", &"PlainValue".repeat(300));
    volume.unmount()
}

fn secrets_in(file: &Path) -> Vec<&'static str> {
    let bytes = fs::read(file).unwrap();
    let is_there = |secret: &&str| bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
    SECRETS.into_iter().filter(is_there).collect()
}

/// Dumps a volume, and looks at the dump by all programs.
fn can_be_dumped(image: &Image, device: &str) {
    let scratch = scratch_dir();
    let (dump, with_names) = (scratch.path().join("dump"), scratch.path().join("with-names"));
    let report = json(&["metadata-dump", device, name(&dump)]);
    assert_eq!((&report["names"], &report["damaged"], &report["unreadable"]), (&"replaced".into(), &0.into(), &0.into()));
    assert_eq!(secrets_in(&dump), [""; 0]);
    let file = dump.metadata().unwrap();
    let bytes = report["bytes"].as_u64().unwrap();
    assert!(file.len() > 60 * MIB && file.blocks() * 512 < 2 * MIB && bytes < MIB, "{file:?}, {report}");
    assert_eq!(file.permissions().mode() & 0o777, 0o600);

    json(&["metadata-dump", "--names", device, name(&with_names)]);
    assert_eq!(secrets_in(&with_names), ["PlainName"]);
    for path in [&dump, &with_names] {
        let checked = programs::command("fsck.gpunvme").args(["-n", "--json", name(path)]).output().unwrap();
        assert!(checked.status.success(), "{}", text(&checked));
        // It takes the place of the volume, and is mounted to be read.
        let dir = image.mount_point();
        let mounted = programs::command("mount.gpunvme").args([name(path), name(&dir), "-o", "ro"]).output().unwrap();
        assert!(mounted.status.success(), "{}", text(&mounted));
        let link = |path: &&std::path::PathBuf| path.is_symlink();
        let inner: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!inner.iter().find(link).expect("the link is there").exists(), "it leads nowhere");
        let inner = inner.iter().find(|path| path.is_dir()).expect("the directory is there");
        let mut files: Vec<_> = fs::read_dir(inner).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 501);
        files.sort_by_key(|path| fs::metadata(path).unwrap().len());
        let largest = files.last().unwrap();
        assert!(fs::read(largest).unwrap().iter().all(|byte| *byte == 0));
        assert_eq!(largest.ends_with("PlainName.txt"), path == &with_names);
        let extents = json(&["map", name(largest)]);
        assert!(extents.to_string().contains("12582912"), "{extents}");
        assert_eq!(json(&["info", name(&dir)])["read_only"], true);
        assert!(unmount_unless_busy(&dir).status.success());
    }
}

#[test]
fn the_metadata_of_a_volume_is_dumped_without_what_is_in_it() {
    needs_mount!();
    let image = filled(Image::formatted_with(64 * MIB));
    assert_eq!(secrets_in(&image.path()), SECRETS, "all of them are in the volume");
    can_be_dumped(&image, name(&image.path()));
}

#[test]
fn the_dump_of_a_volume_of_several_devices_is_of_one() {
    needs_mount!();
    let image = filled(Image::striped(3, 64 * MIB));
    can_be_dumped(&image, name(&image.members()[1]));
}

#[test]
fn a_damaged_volume_is_dumped_with_its_damage() {
    let (image, scratch) = (Image::formatted_with(64 * MIB), scratch_dir());
    let path = image.path();
    let file = fs::File::options().write(true).open(&path).unwrap();
    // The state block, which has the root of the tree.
    file.write_all_at(b"not what was here", 3 * 4096 + 1000).unwrap();
    let findings = |path: &Path| {
        let output = programs::command("fsck.gpunvme").args(["-n", "--json", name(path)]).output().unwrap();
        assert_eq!(output.status.code(), Some(4), "{}", text(&output));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["findings"].clone()
    };
    let dump = scratch.path().join("dump");
    let output = gpunvme(&["metadata-dump", name(&path), name(&dump)]);
    assert!(output.status.success() && text(&output).contains("damaged     blocks: 1;"), "{}", text(&output));
    assert_eq!(findings(&dump), findings(&path));
}

#[test]
fn progress_is_for_terminals() {
    let (image, scratch) = (Image::formatted_with(64 * MIB), scratch_dir());
    let dump = scratch.path().join("dump");
    let piped = gpunvme(&["metadata-dump", name(&image.path()), name(&dump)]);
    assert!(piped.status.success() && piped.stderr.is_empty(), "{}", text(&piped));
    // script(1) gives the command a terminal, and prints what came out of that.
    let program = programs::command("gpunvme").get_program().to_str().unwrap().to_owned();
    let line = format!("stty columns 100; {program} metadata-dump --force {} {}", name(&image.path()), name(&dump));
    let shown = Command::new("script").args(["--quiet", "--return", "--command", &line, "/dev/null"]).output().unwrap();
    let screen = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.status.success(), "{screen}");
    assert!(screen.contains("journal ") && screen.contains("% of 1024, "), "{screen:?}");
    let end = screen.rsplit("\x1b[2K").next().unwrap();
    assert!(end.starts_with("dump  ") && !end.contains('%'), "the bar is gone: {screen:?}");
}

#[test]
fn what_must_not_be_dumped_or_overwritten_is_not() {
    let (image, scratch) = (Image::formatted_with(64 * MIB), scratch_dir());
    let (path, there) = (image.path(), scratch.path().join("there"));
    fs::write(&there, "precious").unwrap();
    let device = name(&path);
    refused(&["metadata-dump", device, name(&there)], "is there already; --force replaces it");
    refused(&["metadata-dump", "--force", device, name(scratch.path())], "no file that could be replaced");
    refused(&["metadata-dump", "--force", name(&there), name(&scratch.path().join("new"))], "bytes are too few");
    let before = fs::read(&path).unwrap();
    refused(&["metadata-dump", "--force", device, device], "is in use");
    assert!(fs::read(&path).unwrap() == before);
    assert_eq!(fs::read(&there).unwrap(), b"precious");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1, "nothing is left behind");
    json(&["metadata-dump", "--force", device, name(&there)]);
    assert_eq!(there.metadata().unwrap().len(), 64 * MIB);
}

#[test]
fn a_mounted_volume_is_refused_by_name() {
    needs_mount!();
    let (volume, scratch) = (Image::formatted_with(64 * MIB).mount(), scratch_dir());
    let dump = scratch.path().join("dump");
    let device = volume.image().path();
    refused(&["metadata-dump", name(&device), name(&dump)], &format!("mounted on {}", name(&volume.root())));
    refused(&["metadata-dump", name(&volume.root()), name(&dump)], "is a directory");
    assert!(!dump.exists());
}
