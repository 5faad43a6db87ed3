//! Dumps of metadata: a check finds in one what it finds in the volume, and nothing is in it that
//! the volume keeps for people.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::{Faulty, Image, MemoryDevice, On, Rule};
use gpunvme_engine::VolumeOptions;
use gpunvme_engine::check::{Findings, Kind};
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::NewNode;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::superblock;
use gpunvme_layout::{BlockKind, Superblock, node};
use gpunvme_programs::dump::{Names, Summary, dump};

use super::damage::{cases, damaged};
use super::subject::{NOW, ROOT, Thing, WHO, contents, subject};
use super::{device, found};
use crate::common::{make, open};
use crate::surgeon::Surgeon;

fn dumped(device: &Arc<dyn BlockDevice>, names: Names) -> (Image, Summary) {
    let mut image = Image::new(device.geometry().len.get());
    let summary = dump(device, names, &mut |_, _, _| {}, |address, block| {
        image.write_at(address * BLOCK_SIZE as u64, block.bytes());
        Ok(())
    });
    (image, summary.expect("there is a superblock"))
}

fn open_read_only(image: Image) -> Arc<Filesystem> {
    let io = Io::inline(device(image)).expect("a queue");
    let options = Options { volume: VolumeOptions { read_only: true, cache: 64 << 20, discard: false }, write_buffer: 4 << 20 };
    Filesystem::open(io, options, Arc::new(Inline)).expect("the dump can be mounted")
}

/// What a check said, by kind and place; with the words where no name is in them.
fn told(findings: &Findings) -> Vec<(Kind, String, String)> {
    findings.list.iter().map(|finding| (finding.kind, format!("{:?}", finding.place), finding.what.clone())).collect()
}

#[test]
fn a_check_finds_in_a_dump_what_it_finds_in_the_volume() {
    // What may be another filesystem's is in no dump.
    for case in cases().filter(|case| case.kind != Kind::Foreign) {
        let volume = device(damaged(case));
        let right = told(&found(&volume));
        assert_eq!(told(&found(&device(dumped(&volume, Names::Kept).0))), right, "{}", case.name);

        let (image, summary) = dumped(&volume, Names::Replaced);
        // Their words have names.
        let is_hash = |kind: &Kind| matches!(kind, Kind::EntryHash | Kind::XattrHash);
        let places = |told: Vec<(Kind, String, String)>| -> Vec<_> {
            told.into_iter().filter(|(kind, ..)| !is_hash(kind)).map(|(kind, place, _)| (kind, place)).collect()
        };
        let misplaced = right.iter().filter(|(kind, ..)| is_hash(kind)).count() as u64;
        assert_eq!(summary.misplaced_names, misplaced, "{}", case.name);
        assert_eq!(places(told(&found(&device(image)))), places(right), "{}", case.name);
    }
}

#[test]
fn damaged_blocks_are_counted() {
    let counted = |name: &str| {
        let case = cases().find(|case| case.name == name).expect("there is such a case");
        dumped(&device(damaged(case)), Names::Kept).1
    };
    assert_eq!(dumped(&device(subject().image.clone()), Names::Kept).1.damaged, 0);
    for case in cases().filter(|case| matches!(case.kind, Kind::State | Kind::Bitmap | Kind::Descriptors)) {
        assert!(counted(case.name).damaged > 0, "{}", case.name);
    }
}

#[test]
fn what_cannot_be_read_is_left_out_and_told() {
    let volume = Faulty::new(device(subject().image.clone()));
    let surgeon = Surgeon::new(subject().image.clone());
    let lost = surgeon.leaves()[3];
    let bytes = lost * BLOCK_SIZE as u64..(lost + 1) * BLOCK_SIZE as u64;
    volume.add(Rule::fail(On::Read, libc::EIO).within(bytes));
    let volume: Arc<dyn BlockDevice> = volume;
    let (image, summary) = dumped(&volume, Names::Kept);
    assert_eq!((summary.unreadable, &summary.unreadable_at[..]), (1, &[lost][..]));
    let findings = found(&device(image));
    assert!(findings.list.iter().any(|f| f.kind == Kind::Node && format!("{:?}", f.place).contains(&lost.to_string())));
    let whole = dumped(&device(subject().image.clone()), Names::Kept).1;
    assert_eq!(summary.blocks, whole.blocks - 1, "nothing else is missing");
}

/// What the device lacks is no reason to look for it for ever.
#[test]
fn a_volume_that_was_truncated_is_dumped_as_far_as_it_is_there() {
    let mut image = Image::new(16 << 20);
    let mut bytes = vec![0; image.len() as usize];
    subject().image.read_at(0, &mut bytes);
    image.write_at(0, &bytes);
    let (dump, summary) = dumped(&device(image.clone()), Names::Replaced);
    assert!(summary.blocks > 100 && summary.unreadable == 0, "{summary:?}");
    let why = |image: Image| open(&device(image)).err().expect("it is refused").to_string();
    assert!(why(dump.clone()).contains("truncated"));
    assert_eq!(why(dump), why(image));
}

#[test]
fn a_dump_can_be_read_and_has_the_same_shape() {
    let volume = device(subject().image.clone());
    let kept = contents(&open_read_only(dumped(&volume, Names::Kept).0));
    assert!(kept.keys().eq(subject().contents.keys()), "names are kept where they are asked for");

    let (image, _) = dumped(&volume, Names::Replaced);
    let fs = open_read_only(image);
    let other = contents(&fs);
    let shape = |contents: &super::subject::Contents| {
        let thing = |thing: &Thing| match thing {
            Thing::Directory => (1, 0),
            Thing::File(bytes) => (2, bytes.len()),
            Thing::Link(target) => (3, target.len()),
            Thing::Other => (4, 0),
        };
        let one = |(path, (what, values)): (&String, &(Thing, Vec<Vec<u8>>))| {
            (path.matches('/').count(), thing(what), values.iter().map(Vec::len).collect::<BTreeSet<_>>())
        };
        let mut shape: Vec<_> = contents.iter().map(one).collect();
        shape.sort();
        shape
    };
    assert_eq!(shape(&other), shape(&subject().contents));
    // A short name may have become itself.
    assert!(!other.keys().any(|path| path.len() > 20 && subject().contents.contains_key(path)));
    // Each can be found by its name, and has nothing in it.
    for entry in fs.wait(|| fs.read_dir(ROOT, 2, usize::MAX)).expect("it can be read") {
        assert_eq!(fs.wait(|| fs.lookup(ROOT, &entry.name)).expect("it is listed").ino, entry.ino);
    }
    for (path, (thing, values)) in &other {
        let content = match thing {
            Thing::File(content) => &content[..],
            Thing::Link(target) => {
                assert!(target.iter().all(|byte| *byte == b'x'), "{path}");
                continue;
            }
            _ => &[],
        };
        assert!(content.iter().chain(values.iter().flatten()).all(|byte| *byte == 0), "{path}");
    }
}

/// In a dump a search looks at all entries, with all leaves in memory: it must not be without end.
#[test]
fn a_directory_of_a_dump_that_is_too_large_to_be_searched_can_be_listed() {
    const ENTRIES: u64 = (1 << 16) + 500;
    let volume: Arc<dyn BlockDevice> = MemoryDevice::new(128 << 20);
    make(&volume);
    let fs = open(&volume).expect("a new volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    for n in 0..ENTRIES {
        fs.wait(|| fs.create(&WHO, ROOT, format!("{n:05}").as_bytes(), &new)).expect("there is room");
    }
    fs.close().expect("nothing fails");
    let fs = open_read_only(dumped(&volume, Names::Replaced).0);
    let entries = fs.wait(|| fs.read_dir(ROOT, 2, usize::MAX)).expect("it can be read");
    assert_eq!(entries.len() as u64, ENTRIES);
    let (first, last) = (&entries[0], entries.last().expect("there are many"));
    assert_eq!(fs.wait(|| fs.lookup(ROOT, &first.name)).expect("it is one of the first").ino, first.ino);
    assert!(matches!(fs.wait(|| fs.lookup(ROOT, &last.name)), Err(FsError::NotSupported)));
}

#[test]
fn a_dump_of_a_volume_that_was_not_unmounted_has_its_journal() {
    let memory = MemoryDevice::from_image(subject().image.clone());
    let volume: Arc<dyn BlockDevice> = memory.clone();
    let fs = open(&volume).expect("the volume can be opened");
    let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
    for n in 0..300 {
        fs.wait(|| fs.create(&WHO, ROOT, format!("new-{n}").as_bytes(), &new)).expect("there is room");
        fs.commit().expect("nothing fails");
    }
    let crashed = device(memory.snapshot());
    let right = contents(&open_read_only(memory.snapshot()));
    assert!(right.len() >= subject().contents.len() + 300);
    for names in [Names::Kept, Names::Replaced] {
        let (image, summary) = dumped(&crashed, names);
        assert_eq!(found(&device(image.clone())).total(), 0);
        assert_eq!((summary.damaged, summary.misplaced_names), (0, 0));
        assert_eq!(contents(&open_read_only(image)).len(), right.len());
    }
}

/// What must not be in a dump, and what it looks like there.
const SECRETS: [&str; 7] = [
    "content-of-a-file",
    "name-of-a-file",
    "value-of-an-attribute",
    "user.name-of-it",
    "target/of/a/link",
    "label-of-it",
    "slack-of-node",
];

fn secrets_in(image: &Image) -> BTreeSet<&'static str> {
    let mut bytes = vec![0; image.len() as usize];
    image.read_at(0, &mut bytes);
    let is_there = |secret: &&str| bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
    SECRETS.into_iter().filter(is_there).collect()
}

/// A volume with secrets in all that people keep in one, in items that are there and in those that
/// are gone, in nodes and in the journal.
fn secret_volume() -> Image {
    let memory = MemoryDevice::new(48 << 20);
    let volume: Arc<dyn BlockDevice> = memory.clone();
    make(&volume);
    let fs = open(&volume).expect("a new volume can be opened");
    let create = |name: &str, mode: u32, target: &[u8]| {
        let new = NewNode { mode, umask: 0, rdev: 0, target };
        fs.wait(|| fs.create(&WHO, ROOT, name.as_bytes(), &new)).expect("there is room").ino
    };
    let fill = |n: u32| {
        let ino = create(&format!("name-of-a-file-{n}"), 0o100644, &[]);
        fs.wait(|| fs.write(ino, 0, &b"content-of-a-file".repeat(1000), NOW)).expect("there is room");
        fs.sync_file(ino).expect("nothing fails");
        for len in [1, 400] {
            let name = format!("user.name-of-it-{len}");
            let value = b"value-of-an-attribute".repeat(len);
            fs.wait(|| fs.set_xattr(&WHO, ino, name.as_bytes(), &value, false, false)).expect("there is room");
        }
        create(&format!("link name-of-a-file-{n}"), 0o120777, b"target/of/a/link");
    };
    (0..120).for_each(fill);
    fs.commit().expect("nothing fails");
    for n in 0..100 {
        for name in [format!("name-of-a-file-{n}"), format!("link name-of-a-file-{n}")] {
            let gone = fs.wait(|| fs.lookup(ROOT, name.as_bytes())).expect("it was made").ino;
            fs.wait(|| fs.unlink(&WHO, ROOT, name.as_bytes())).expect("it is there");
            while fs.wait(|| fs.reap_step(gone)).expect("nothing fails") {}
        }
    }
    fs.volume().checkpoint().expect("nothing fails");
    (200..230).for_each(fill);
    fs.commit().expect("nothing fails");
    memory.snapshot()
}

/// Writes a secret into all bytes of nodes that have no meaning.
fn fill_slack(image: Image) -> Image {
    let mut surgeon = Surgeon::new(image);
    let blocks = surgeon.geometry.total_blocks;
    for address in 0..blocks {
        let mut block = surgeon.block(address);
        if block.has_magic() && block.expect(BlockKind::Node).is_ok() && node::level(&block) == 0 {
            let unused: usize = BLOCK_SIZE - 64 - node::used(&block);
            let slots_end = 64 + 20 * node::count(&block);
            let secret = b"slack-of-node";
            if unused > 2000 && slots_end + secret.len() < BLOCK_SIZE {
                let heap = usize::from(u16::from_le_bytes([block.bytes()[52], block.bytes()[53]]));
                if slots_end + secret.len() <= heap {
                    block.bytes_mut()[slots_end..slots_end + secret.len()].copy_from_slice(secret);
                    block.seal(block.sequence());
                    surgeon.put(address, &block);
                }
            }
        }
    }
    let superblock = surgeon.block(0);
    let names = superblock::Names { label: "label-of-it".into(), changed_uuid: None };
    for address in surgeon.geometry.superblocks() {
        surgeon.put(address, &Superblock::renamed(&superblock, &names).moved_to(address));
    }
    surgeon.image
}

#[test]
fn nothing_that_people_keep_in_a_volume_is_in_its_dump() {
    let image = fill_slack(secret_volume());
    assert_eq!(secrets_in(&image), SECRETS.into(), "all of them are in the volume");
    let volume = device(image);
    assert_eq!(found(&volume).total(), 0);
    let (anonymous, summary) = dumped(&volume, Names::Replaced);
    assert_eq!(secrets_in(&anonymous), BTreeSet::new());
    assert_eq!(found(&device(anonymous)).total(), 0);
    assert!(summary.blocks < 1000, "it is small: {summary:?}");
    let (named, _) = dumped(&volume, Names::Kept);
    assert_eq!(secrets_in(&named), ["name-of-a-file", "user.name-of-it", "label-of-it"].into());
}

/// Where a copy of the superblock differs from the one that counts in what a dump leaves out, the
/// copy of the dump differs, too.
#[test]
fn a_superblock_that_differs_differs_in_the_dump() {
    for copy in 0..3 {
        let mut surgeon = Surgeon::new(subject().image.clone());
        let address = surgeon.geometry.superblocks()[copy];
        let mut block = surgeon.block(address);
        block.bytes_mut()[2000..2004].copy_from_slice(b"slip");
        block.seal(block.sequence());
        surgeon.put(address, &block);
        let volume = device(surgeon.image);
        let right = told(&found(&volume));
        assert!(!right.is_empty());
        for names in [Names::Kept, Names::Replaced] {
            assert_eq!(told(&found(&device(dumped(&volume, names).0))), right, "copy {copy}, {names:?}");
        }
    }
}

/// The key of the hash would tell whether a name that was guessed is there.
#[test]
fn the_key_of_the_hash_is_in_no_dump_without_names() {
    let volume = device(subject().image.clone());
    let superblock = |image: Image| Surgeon::new(image).superblock;
    let of_volume = superblock(subject().image.clone());
    assert_eq!(superblock(dumped(&volume, Names::Kept).0), of_volume);
    let anonymous = superblock(dumped(&volume, Names::Replaced).0);
    assert_eq!((anonymous.replaced_names, anonymous.uuid), (true, of_volume.uuid));
    assert_ne!(anonymous.hash_key, of_volume.hash_key);
    assert_ne!(anonymous.names.label, of_volume.names.label);
}
