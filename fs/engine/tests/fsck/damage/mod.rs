//! Cases of damage: one for each kind of finding, in every structure, with what it may touch and
//! what has to be there when it is mended.

mod files;
mod volume;

use gpunvme_blockdev_testing::Image;
use gpunvme_engine::check::Kind;
use gpunvme_layout::key::dirent_offset;
use gpunvme_layout::{Extent, Inode, Key, Kind as ItemKind};

use super::subject::{Contents, ROOT, Subject, Thing, subject};
use crate::surgeon::Surgeon;

/// Parts that a case may change: paths that begin with one of these.
pub type Touched = &'static [&'static str];

pub struct Case {
    /// Its name.
    pub name: &'static str,
    /// The kind of finding that the check has to report.
    pub kind: Kind,
    /// Does the damage.
    pub damage: fn(&mut Surgeon, &Subject),
    /// Paths that may differ or be gone afterwards; everything else has to be as it was.
    pub touched: Touched,
    /// Whether the expected content is there afterwards.
    pub expect: fn(&Contents) -> bool,
}

fn ino(subject: &Subject, name: &str) -> u64 {
    subject.inodes[name]
}

fn extents(surgeon: &Surgeon, ino: u64) -> Vec<(Key, Extent)> {
    let items = surgeon.items(Key::new(ino, ItemKind::Extent, 0), Key::inode(ino + 1));
    items.into_iter().map(|(key, value)| (key, Extent::decode(ino, key.offset(), &value).expect("it is sound"))).collect()
}

fn edit_inode(surgeon: &mut Surgeon, ino: u64, change: impl FnOnce(&mut Inode)) {
    surgeon.edit_item(Key::inode(ino), |bytes| {
        let mut inode = Inode::decode(ino, bytes).expect("it is sound");
        change(&mut inode);
        bytes.copy_from_slice(&inode.encode());
    });
}

/// Key of an entry.
fn entry(surgeon: &Surgeon, dir: u64, name: &str) -> Key {
    Key::new(dir, ItemKind::Dirent, dirent_offset(&surgeon.superblock.hash_key, name.as_bytes()))
}

fn file_of(contents: &Contents, path: &str) -> Option<usize> {
    match contents.get(path) {
        Some((Thing::File(bytes), _)) => Some(bytes.len()),
        _ => None,
    }
}

fn same(_: &Contents) -> bool {
    true
}

fn lost(contents: &Contents) -> usize {
    contents.keys().filter(|path| path.starts_with("/lost+found/")).count()
}

fn small_is_found(contents: &Contents) -> bool {
    let is_it = |(path, thing): (&String, &(Thing, _))| {
        path.starts_with("/lost+found/#") && thing.0 == Thing::File(b"a few bytes".into())
    };
    lost(contents) == 1 && contents.iter().any(is_it)
}

/// One of the leaves of `many`, in the middle of its entries.
fn leaf_of_many(surgeon: &Surgeon, subject: &Subject) -> u64 {
    surgeon.leaf(Key::new(ino(subject, "many"), ItemKind::Dirent, 1 << 62))
}

/// All cases.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    volume::CASES.iter().chain(files::CASES)
}

pub fn damaged(case: &Case) -> Image {
    let mut surgeon = Surgeon::new(subject().image.clone());
    (case.damage)(&mut surgeon, subject());
    surgeon.image
}

/// Everything that a case did not touch is as it was.
pub fn assert_intact(case: &Case, now: &Contents) {
    for (path, thing) in &subject().contents {
        if !case.touched.iter().any(|touched| path.starts_with(touched)) {
            assert!(now.get(path) == Some(thing), "{}: {path} is another, or gone", case.name);
        }
    }
    for path in now.keys().filter(|path| !path.starts_with("/lost+found")) {
        let known = subject().contents.contains_key(path) || case.touched.iter().any(|touched| path.starts_with(touched));
        assert!(known, "{}: {path} came from nowhere", case.name);
    }
    assert!((case.expect)(now), "{}: {:?}", case.name, now.keys().filter(|p| !p.starts_with("/many")).collect::<Vec<_>>());
}
