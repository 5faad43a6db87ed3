//! Volumes of released versions: each is checked, read in full and written by this version.
//! `scripts/release-images` made them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use gpunvme_tests::mounted::Image;
use gpunvme_tests::{needs_mount, scratch_root};

/// The folder with a folder for each release.
fn images() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("images")
}

/// The folders of all releases.
fn releases() -> Vec<PathBuf> {
    let entries = fs::read_dir(images()).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    assert!(!folders.is_empty(), "{} has images", images().display());
    folders
}

/// A copy of the volume on these members of a release.
fn unpacked(release: &Path, members: &[&str]) -> Image {
    let image = Image::blank_members_in(&scratch_root(), members.len(), 0);
    for (member, path) in members.iter().zip(image.members()) {
        let packed = release.join(format!("{member}.xz"));
        let file = File::create(path).unwrap();
        let status = Command::new("xz").args(["--decompress", "--stdout"]).arg(&packed).stdout(file).status();
        assert!(status.is_ok_and(|status| status.success()), "xz (package xz-utils) unpacks {}", packed.display());
    }
    image
}

/// All that a folder holds, as it was said of the release.
fn description(folder: &Path) -> String {
    let output = Command::new(images().join("describe")).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn can_be_used(name: &str, members: &[&str]) {
    for release in releases() {
        let expected = fs::read_to_string(release.join(format!("{name}.txt"))).unwrap();
        let image = unpacked(&release, members);
        image.check();
        let volume = image.mount_with("ro");
        assert!(description(&volume.root()) == expected, "{}: {name}, read only", release.display());
        let volume = volume.unmount().mount();
        assert!(description(&volume.root()) == expected, "{}: {name}", release.display());
        fs::rename(volume.path("large"), volume.path("deep/moved")).unwrap();
        fs::write(volume.path("new"), "of this version").unwrap();
        let volume = volume.remount();
        assert_eq!(fs::read_to_string(volume.path("new")).unwrap(), "of this version");
        assert!(fs::read_to_string(volume.path("deep/moved")).unwrap().starts_with("1\n2\n3\n"));
    }
}

#[test]
fn a_volume_of_every_release_can_be_used() {
    needs_mount!();
    can_be_used("clean", &["clean"]);
}

#[test]
fn a_volume_that_crashed_under_any_release_is_recovered() {
    needs_mount!();
    can_be_used("crashed", &["crashed"]);
}

#[test]
fn a_striped_volume_of_every_release_can_be_used() {
    needs_mount!();
    can_be_used("striped", &["member1", "member2"]);
}
