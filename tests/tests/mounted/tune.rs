//! `gpunvme tune`: other names for a volume, as the programs tell them afterwards.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;

use gpunvme_tests::mounted::{Image, text};
use gpunvme_tests::{needs_mount, programs};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const UUID: &str = "6bf5c1f4-27b3-46a8-9d5a-1c5f5c8b7a10";

fn gpunvme(arguments: &[&str]) -> Output {
    programs::command("gpunvme").args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = gpunvme(&[&["--json"], arguments].concat());
    assert!(output.status.success(), "{}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Label and UUID, as a document of JSON has them.
fn names(document: &Value) -> (String, String) {
    let field = |name: &str| document[name].as_str().unwrap().to_owned();
    (field("label"), field("uuid"))
}

/// Changes the names of a volume, by one of its devices, and holds all programs to the new ones.
fn can_be_renamed(image: Image, device: &str) {
    let original = names(&json(&["probe", device]));
    let changed = json(&["tune", "-L", "a label", "-U", UUID, device]);
    assert_eq!(names(&changed["before"]), original);
    let (mut image, new) = (image, ("a label".to_owned(), UUID.to_owned()));
    assert_eq!((names(&changed["after"]), &changed["original_uuid"]), (new.clone(), &original.1.clone().into()));
    for step in 0..2 {
        let expected = if step == 0 { new.clone() } else { ("a label".to_owned(), original.1.clone()) };
        for member in image.members() {
            assert_eq!(names(&json(&["probe", name(&member)])), expected);
        }
        image.check();
        let checked = programs::command("fsck.gpunvme").args(["-n", "--json", device]).output().unwrap();
        assert_eq!(names(&serde_json::from_slice(&checked.stdout).unwrap()), expected);
        let volume = image.mount();
        assert_eq!(names(&json(&["info", name(&volume.root())])), expected);
        assert_eq!(std::fs::read(volume.path("file")).unwrap(), b"content");
        // The mount's directory is refused, and while it is mounted the device.
        if step == 0 {
            let refused = gpunvme(&["tune", "-L", "x", device]);
            assert!(refused.status.code() == Some(1) && text(&refused).contains("already mounted on"), "{}", text(&refused));
        }
        let refused = gpunvme(&["tune", "-L", "x", name(&volume.root())]);
        assert!(refused.status.code() == Some(1) && text(&refused).contains("is a directory"), "{}", text(&refused));
        image = volume.unmount();
        if step == 0 {
            json(&["tune", "-U", "restore", device]);
        }
    }
    let random = json(&["tune", "--uuid", "random", device]);
    let (label, uuid) = names(&random["after"]);
    assert!(label == "a label" && uuid != original.1 && uuid != UUID, "{random}");
    assert_eq!(names(&json(&["tune", "--label", "", device])["after"]), (String::new(), uuid));
    drop(image.mount());
}

fn with_a_file(image: Image) -> Image {
    let volume = image.mount();
    std::fs::write(volume.path("file"), "content").unwrap();
    volume.unmount()
}

#[test]
fn a_volume_gets_another_label_and_uuid() {
    needs_mount!();
    let image = with_a_file(Image::formatted_with(64 * MIB));
    let device = name(&image.path()).to_owned();
    can_be_renamed(image, &device);
}

#[test]
fn so_does_a_volume_of_several_devices_by_any_of_them() {
    needs_mount!();
    let image = with_a_file(Image::striped(3, 64 * MIB));
    let device = name(&image.members()[2]).to_owned();
    can_be_renamed(image, &device);
}

#[test]
fn what_cannot_be_changed_is_refused_and_stays_as_it_is() {
    let image = Image::formatted_with(64 * MIB);
    let path = image.path();
    let before = std::fs::read(&path).unwrap();
    let (device, long) = (name(&path), "x".repeat(65));
    for (arguments, code, words) in [
        (&["tune", device][..], 2, "--label"),
        (&["tune", "-L", &long, device], 2, "at most 64 fit"),
        (&["tune", "-L", "a\nb", device], 2, "control characters"),
        (&["tune", "-U", "yes", device], 2, "random, restore or a UUID"),
        (&["tune", "-U", "00000000-0000-0000-0000-000000000000", device], 2, "zeros"),
        (&["tune", "-L", "x"], 2, "<DEVICE>"),
        (&["tune", "-L", "x", "/does/not/exist"], 1, "/does/not/exist"),
        (&["tune", "-L", "x", device, device], 1, "not a member"),
    ] {
        let output = gpunvme(arguments);
        assert!(output.status.code() == Some(code) && text(&output).contains(words), "{arguments:?}: {}", text(&output));
    }
    assert!(std::fs::read(&path).unwrap() == before);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    for end in [0, 64 * MIB - 4096] {
        file.write_all_at(&[0; 4096], end).unwrap();
    }
    let output = gpunvme(&["tune", "-L", "x", device]);
    assert!(output.status.code() == Some(1) && text(&output).contains("no gpunvme filesystem is here"), "{}", text(&output));
}
