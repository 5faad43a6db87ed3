//! fsck.gpunvme on volumes that were really used: what it refuses, and what is there after a
//! repair.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::Output;

use gpunvme_layout::geometry::{ANCHORS, STATE};
use gpunvme_layout::{BLOCK_SIZE, Block, State, Superblock};
use gpunvme_tests::mounted::{Image, Mounted, text};
use gpunvme_tests::{needs_mount, programs};

fn fsck(image: &Image, options: &[&str]) -> Output {
    programs::command("fsck.gpunvme").args(options).arg(image.path()).output().expect("fsck.gpunvme runs")
}

/// Writes over a part of each of these blocks.
fn ruin(image: &Image, blocks: &[u64]) {
    let file = OpenOptions::new().write(true).open(image.path()).unwrap();
    for address in blocks {
        file.write_all_at(b"something else", address * BLOCK_SIZE as u64 + 600).unwrap();
    }
}

fn read(image: &Image, address: u64) -> Block {
    let mut bytes = [0; BLOCK_SIZE];
    fs::File::open(image.path()).unwrap().read_exact_at(&mut bytes, address * BLOCK_SIZE as u64).unwrap();
    Block::from_bytes(&bytes)
}

#[test]
fn a_mounted_volume_is_refused_whatever_is_asked() {
    needs_mount!();
    let volume = Mounted::new();
    for option in ["-n", "-p", "-y"] {
        let output = fsck(volume.image(), &[option]);
        assert_eq!(output.status.code(), Some(8), "{}", text(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains("already mounted on"), "{}", text(&output));
    }
}

#[test]
fn a_killed_mount_is_replayed_and_counts_as_no_error() {
    needs_mount!();
    let volume = Image::formatted_with(64 << 20).mount();
    fs::write(volume.path("kept"), vec![7; 300_000]).unwrap();
    fs::File::open(volume.path("kept")).unwrap().sync_all().unwrap();
    let (_, image) = volume.signal(rustix::process::Signal::KILL);
    let before = fs::read(image.path()).unwrap();
    assert_eq!(fsck(&image, &["-n"]).status.code(), Some(0));
    assert!(fs::read(image.path()).unwrap() == before, "-n wrote to the image");
    let output = fsck(&image, &["-p"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("the journal was replayed"), "{}", text(&output));
    let volume = image.mount();
    assert_eq!(fs::read(volume.path("kept")).unwrap(), vec![7; 300_000]);
}

#[test]
fn files_are_whole_after_the_blocks_that_led_to_them_were_lost() {
    needs_mount!();
    let volume = Mounted::new();
    let content = |n: usize| vec![(n % 250) as u8 + 1; n * 977];
    fs::create_dir_all(volume.path("a/b")).unwrap();
    for n in 0..400 {
        fs::write(volume.path(format!("a/b/file {n} {}", "-".repeat(100))), content(n)).unwrap();
    }
    let image = volume.unmount();
    let device_blocks = fs::metadata(image.path()).unwrap().len() / BLOCK_SIZE as u64;
    let superblock = Superblock::decode(&read(&image, 0), 0, device_blocks).unwrap();
    let geometry = superblock.geometry();
    let state = State::decode(&read(&image, STATE), &geometry).unwrap();
    assert!(state.level > 0, "the tree has inner nodes");
    ruin(&image, &[Superblock::ADDRESS, ANCHORS[0], STATE, state.root, geometry.descriptor(0).0, geometry.bitmap(0)]);

    let found = fsck(&image, &["-n", "--json"]);
    assert_eq!(found.status.code(), Some(4), "{}", text(&found));
    let careful = fsck(&image, &["-p"]);
    assert_eq!(careful.status.code(), Some(4), "{}", text(&careful));
    let mended = fsck(&image, &["-y"]);
    assert_eq!(mended.status.code(), Some(1), "{}", text(&mended));
    let again = fsck(&image, &["-y"]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again));

    let volume = image.mount();
    for n in 0..400 {
        assert!(fs::read(volume.path(format!("a/b/file {n} {}", "-".repeat(100)))).unwrap() == content(n), "file {n}");
    }
    fs::write(volume.path("a/new"), b"it can be used").unwrap();
}

#[test]
fn a_repair_says_how_many_files_it_could_not_find_again() {
    needs_mount!();
    let volume = Image::formatted_with(64 << 20).mount();
    for name in ["a", "b", "c"] {
        fs::write(volume.path(name), name).unwrap();
    }
    let image = volume.unmount();
    let geometry = Superblock::decode(&read(&image, 0), 0, (64 << 20) / BLOCK_SIZE as u64).unwrap().geometry();
    let state = State::decode(&read(&image, STATE), &geometry).unwrap();
    assert_eq!((state.level, state.inodes), (0, 4), "one leaf has the root directory and three files");
    ruin(&image, &[state.root]);
    let mended = fsck(&image, &["-y"]);
    assert!(text(&mended).contains(": 4 of 4 inodes could not be found again\n"), "{}", text(&mended));
    assert_eq!(fsck(&image, &["-n"]).status.code(), Some(0));
}
