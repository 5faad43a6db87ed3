//! A damaged volume that is mounted all the same: what is sound is there.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use gpunvme_layout::{BLOCK_SIZE, Block, BlockKind, Key, node};
use gpunvme_tests::mounted::Image;
use gpunvme_tests::needs_mount;
use rustix::fs::statvfs;

/// Flips a bit in the leaf that has an inode.
fn damage_leaf_of(image: &Path, ino: u64) {
    let file = File::options().read(true).write(true).open(image).expect("the image");
    let mut newest: Option<(u64, Block)> = None;
    for address in 0..file.metadata().expect("the image").len() / BLOCK_SIZE as u64 {
        let mut bytes = [0; BLOCK_SIZE];
        file.read_exact_at(&mut bytes, address * BLOCK_SIZE as u64).expect("the image");
        let block = Block::from_bytes(&bytes);
        let is_leaf = block.expect(BlockKind::Node).is_ok() && block.verify_content(address).is_ok() && node::level(&block) == 0;
        let is_newer = || newest.as_ref().is_none_or(|(_, other)| other.sequence() < block.sequence());
        if is_leaf && node::search(&block, Key::inode(ino)).is_ok() && is_newer() {
            newest = Some((address, block));
        }
    }
    let (address, block) = newest.expect("some leaf has it");
    let mut bytes = *block.bytes();
    bytes[4000] ^= 0x40;
    file.write_all_at(&bytes, address * BLOCK_SIZE as u64).expect("the image");
}

#[test]
fn all_names_are_listed_where_some_inodes_are_damaged() {
    needs_mount!();
    const FILES: usize = 5000;
    let mounted = Image::formatted().mount();
    let folder = mounted.path("folder");
    fs::create_dir(&folder).expect("there is room");
    for number in 0..FILES {
        File::create(folder.join(format!("{number:060}"))).expect("there is room");
    }
    let victim = fs::metadata(folder.join(format!("{:060}", FILES / 2))).expect("it is there").ino();
    let image = mounted.unmount();
    damage_leaf_of(&image.path(), victim);

    let mounted = image.mount();
    let folder = mounted.path("folder");
    let used = || statvfs(mounted.root()).map(|usage| usage.f_files - usage.f_ffree).expect("it is mounted");
    let before = used();
    // With attributes, for which the kernel asks where a reader looks at each entry, and without.
    let listed = |looks: bool| {
        let entries = fs::read_dir(&folder).expect("it is there").map(|entry| entry.expect("a sound name"));
        let looked_at = entries.inspect(|entry| _ = looks.then(|| entry.metadata()));
        let mut names: Vec<OsString> = looked_at.map(|entry| entry.file_name()).collect();
        names.sort();
        names
    };
    let expected: Vec<OsString> = (0..FILES).map(|number| format!("{number:060}").into()).collect();
    let names = listed(true);
    assert!(names == expected, "{} of {FILES} names are listed", names.len());
    assert!(listed(false) == expected);

    let (sound, damaged): (Vec<_>, Vec<_>) = names.iter().partition(|name| fs::metadata(folder.join(name)).is_ok());
    assert!(!damaged.is_empty() && damaged.len() < 100, "{} files are damaged", damaged.len());
    let error = fs::metadata(folder.join(damaged[0])).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EUCLEAN));
    assert!(sound.len() + damaged.len() == FILES);
    // No listing keeps an inode that is removed afterwards. Those beside the damaged leaf stay.
    let far: Vec<&OsString> = names[..FILES / 2 - 200].iter().chain(&names[FILES / 2 + 200..]).collect();
    far.iter().try_for_each(|name| fs::remove_file(folder.join(name))).expect("they are sound");
    let left = before - far.len() as u64;
    let start = Instant::now();
    while used() > left && start.elapsed() < Duration::from_secs(20) {
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(used(), left);
    drop(mounted.unmount_unchecked());
}
