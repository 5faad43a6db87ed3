//! Cases of damage: one for each kind of finding, in every structure, with what it may touch and
//! what has to be there when it is mended.

use gpunvme_blockdev_testing::Image;
use gpunvme_engine::check::Kind;
use gpunvme_layout::geometry::{ANCHORS, STATE};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::key::{dirent_offset, xattr_offset};
use gpunvme_layout::{Dirent, Extent, FileType, Inode, Key, Kind as ItemKind, node};

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

pub const CASES: &[Case] = &[
    Case { name: "superblock", kind: Kind::Superblock, damage: |s, _| s.ruin(0), touched: &[], expect: same },
    Case {
        name: "all superblocks but the middle one",
        kind: Kind::Superblock,
        damage: |s, _| {
            s.ruin(0);
            s.ruin(s.geometry.total_blocks - 1);
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "copy of the superblock differs",
        kind: Kind::Superblock,
        damage: |s, _| {
            let copy = s.geometry.superblocks()[1];
            s.edit(copy, |block| block.bytes_mut()[170] ^= 1);
        },
        touched: &[],
        expect: same,
    },
    Case { name: "first anchor", kind: Kind::Anchor, damage: |s, _| s.ruin(ANCHORS[0]), touched: &[], expect: same },
    Case { name: "second anchor", kind: Kind::Anchor, damage: |s, _| s.ruin(ANCHORS[1]), touched: &[], expect: same },
    Case {
        name: "both anchors",
        kind: Kind::Journal,
        damage: |s, _| ANCHORS.into_iter().for_each(|address| s.ruin(address)),
        touched: &[],
        expect: same,
    },
    Case { name: "state", kind: Kind::State, damage: |s, _| s.ruin(STATE), touched: &[], expect: same },
    Case {
        name: "node points beyond any device",
        kind: Kind::Node,
        damage: |s, subject| {
            let path = s.path(Key::new(ino(subject, "many"), ItemKind::Dirent, 1 << 62));
            let leaf = path[path.len() - 1];
            s.edit(path[path.len() - 2], |parent| {
                let slot = (0..node::count(parent)).find(|slot| node::child(parent, *slot) == leaf).expect("it is there");
                let key = node::key(parent, slot);
                node::remove(parent, slot);
                node::inner_insert(parent, slot, key, (1 << 52) + 7);
            });
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "count of inodes",
        kind: Kind::Counter,
        damage: |s, _| s.edit_state(|state| state.inodes -= 3),
        touched: &[],
        expect: same,
    },
    Case {
        name: "next inode is too low",
        kind: Kind::Counter,
        damage: |s, _| s.edit_state(|state| state.next_ino -= 5),
        touched: &[],
        expect: same,
    },
    Case {
        name: "count of free blocks",
        kind: Kind::Counter,
        damage: |s, _| s.edit_state(|state| state.free_blocks += 5),
        touched: &[],
        expect: same,
    },
    Case {
        name: "block of descriptors",
        kind: Kind::Descriptors,
        damage: |s, _| s.ruin(s.geometry.descriptor(0).0),
        touched: &[],
        expect: same,
    },
    Case {
        name: "descriptor",
        kind: Kind::Descriptor,
        damage: |s, _| {
            let (address, index) = s.geometry.descriptor(0);
            s.edit(address, |block| {
                let descriptor = Descriptor::load(block, index);
                Descriptor { free_blocks: descriptor.free_blocks - 1, ..descriptor }.store(block, index);
            });
        },
        touched: &[],
        expect: same,
    },
    Case { name: "bitmap", kind: Kind::Bitmap, damage: |s, _| s.ruin(s.geometry.bitmap(0)), touched: &[], expect: same },
    Case {
        name: "blocks marked and not in use",
        kind: Kind::Leaked,
        damage: |s, _| {
            let chunk = (0..62).rev().find(|c| group::kind(&s.block(s.geometry.bitmap(0)), *c) == ChunkKind::Data);
            let chunk = chunk.expect("there is data");
            s.edit(s.geometry.bitmap(0), |block| group::set(block, chunk * 512 + 500, 4, true));
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "blocks in use and marked free",
        kind: Kind::Unmarked,
        damage: |s, subject| {
            let block = extents(s, ino(subject, "twice"))[0].1.block;
            let at = s.geometry.locate(block).1;
            s.edit(s.geometry.bitmap(0), |bitmap| group::set(bitmap, at, 3, false));
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "kind of a chunk",
        kind: Kind::ChunkKind,
        damage: |s, subject| {
            let block = extents(s, ino(subject, "twice"))[0].1.block;
            let chunk = s.geometry.locate(block).1 / 512;
            s.edit(s.geometry.bitmap(0), |bitmap| group::set_kind(bitmap, chunk, ChunkKind::Metadata));
        },
        touched: &[],
        expect: same,
    },
    Case { name: "root of the tree", kind: Kind::Node, damage: |s, _| s.ruin(s.state().root), touched: &[], expect: same },
    Case {
        name: "root of the tree and the bitmap",
        kind: Kind::Node,
        damage: |s, _| {
            s.ruin(s.state().root);
            s.ruin(s.geometry.bitmap(0));
        },
        touched: &[],
        expect: same,
    },
    Case {
        // The journal has a state, and without anchors it counts.
        name: "state, bitmap, descriptors and anchors",
        kind: Kind::Journal,
        damage: |s, _| [STATE, s.geometry.bitmap(0), 4, 1, 2].into_iter().for_each(|address| s.ruin(address)),
        touched: &[],
        expect: same,
    },
    Case {
        name: "inner node",
        kind: Kind::Node,
        damage: |s, subject| {
            let path = s.path(Key::inode(ino(subject, "many")));
            assert_eq!(path.len(), 3, "the tree has three levels");
            s.ruin(path[1]);
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "separator of an inner node",
        kind: Kind::Order,
        damage: |s, _| {
            let root = s.state().root;
            s.edit(root, |block| node::set_key(block, 1, node::key(block, 1).predecessor().expect("not the first")));
            let first = s.block(root);
            let child = node::child(&first, 1);
            let key = node::key(&first, 1).successor().successor().successor();
            s.edit(root, |block| node::set_key(block, 1, key));
            assert!(node::level(&s.block(child)) > 0);
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "node that is pointed to twice",
        kind: Kind::Node,
        damage: |s, subject| {
            let parent = s.path(Key::inode(ino(subject, "many")))[1];
            let first = node::child(&s.block(parent), 1);
            s.edit(parent, |block| {
                // The child of slot 2 is lost to sight.
                let at = 64 + 2 * 24 + 16;
                block.bytes_mut()[at..at + 8].copy_from_slice(&first.to_le_bytes());
            });
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "leaf of entries",
        kind: Kind::Node,
        damage: |s, subject| s.ruin(leaf_of_many(s, subject)),
        touched: &["/many/"],
        expect: |c| lost(c) > 3,
    },
    Case {
        name: "space of a leaf does not add up",
        kind: Kind::Node,
        damage: |s, subject| s.edit(leaf_of_many(s, subject), |leaf| leaf.bytes_mut()[54] ^= 4),
        touched: &[],
        expect: same,
    },
    Case {
        name: "two entries of a leaf in the same place",
        kind: Kind::Node,
        damage: |s, subject| {
            s.edit(leaf_of_many(s, subject), |leaf| {
                let place = leaf.bytes()[64 + 16..64 + 20].to_vec();
                leaf.bytes_mut()[64 + 20 + 16..64 + 40].copy_from_slice(&place);
            });
        },
        touched: &["/many/"],
        expect: |c| lost(c) == 1,
    },
    Case {
        name: "leaf with the root directory",
        kind: Kind::Node,
        damage: |s, _| s.ruin(s.leaf(Key::inode(ROOT))),
        touched: &[""],
        expect: |c| lost(c) > 0,
    },
    Case {
        name: "item of an unknown kind",
        kind: Kind::Item,
        damage: |s, subject| {
            let key = Key::inode(ino(subject, "small"));
            let leaf = s.leaf(key);
            s.edit(leaf, |leaf| {
                let slot = node::search(leaf, key).expect("it is there");
                // The key of the next slot: the kind is its lowest byte.
                leaf.bytes_mut()[64 + (slot + 1) * 20] = 9;
            });
        },
        touched: &["/one/small"],
        expect: same,
    },
    Case {
        name: "inode without an item",
        kind: Kind::Inode,
        damage: |s, subject| s.remove(Key::inode(ino(subject, "twice"))),
        touched: &["/one/two/three/twice", "/one/also"],
        expect: |c| file_of(c, "/one/also").is_some_and(|len| len >= 70_000),
    },
    Case {
        name: "inode that makes no sense",
        kind: Kind::Inode,
        damage: |s, subject| s.edit_item(Key::inode(ino(subject, "small")), |bytes| bytes[2] = 0xff),
        touched: &[],
        expect: same,
    },
    Case {
        name: "directory without its inode",
        kind: Kind::Inode,
        damage: |s, subject| s.remove(Key::inode(ino(subject, "two"))),
        touched: &[],
        expect: same,
    },
    Case {
        name: "reserved field of an inode",
        kind: Kind::Reserved,
        damage: |s, subject| s.edit_item(Key::inode(ino(subject, "small")), |bytes| bytes[100] = 1),
        touched: &[],
        expect: same,
    },
    Case {
        name: "directory that says it is a file",
        kind: Kind::FileType,
        damage: |s, subject| edit_inode(s, ino(subject, "one"), |inode| inode.mode = 0o100755),
        touched: &[],
        expect: same,
    },
    Case {
        name: "piece of a symbolic link",
        kind: Kind::Symlink,
        damage: |s, subject| s.remove(Key::new(ino(subject, "long"), ItemKind::Symlink, 1)),
        touched: &["/one/long"],
        expect: |c| matches!(&c["/one/long"].0, Thing::Link(target) if target.len() == 960),
    },
    Case {
        name: "piece of an extended attribute",
        kind: Kind::Xattr,
        damage: |s, subject| {
            let first = xattr_offset(&s.superblock.hash_key, b"user.large");
            s.remove(Key::new(ino(subject, "marked"), ItemKind::Xattr, first + 2));
        },
        touched: &["/one/marked"],
        expect: |c| c["/one/marked"].1.len() == 1 && file_of(c, "/one/marked") == Some(15),
    },
    Case {
        name: "extended attribute under another hash",
        kind: Kind::XattrHash,
        damage: |s, subject| {
            let ino = ino(subject, "marked");
            let key = |offset| Key::new(ino, ItemKind::Xattr, offset);
            let first = xattr_offset(&s.superblock.hash_key, b"user.small");
            let value = s.value(key(first));
            s.remove(key(first));
            s.insert(key(first ^ 1 << 24), &value);
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "extent outside the data area",
        kind: Kind::Extent,
        damage: |s, subject| {
            let (key, extent) = extents(s, ino(subject, "left"))[1];
            s.edit_item(key, |bytes| bytes.copy_from_slice(&Extent { block: 3, ..extent }.encode()));
        },
        touched: &["/one/left"],
        expect: |c| file_of(c, "/one/left") == Some(220_000),
    },
    Case {
        name: "extents of a file that overlap",
        kind: Kind::ExtentOverlap,
        damage: |s, subject| {
            let (key, extent) = extents(s, ino(subject, "left"))[0];
            s.edit_item(key, |bytes| bytes.copy_from_slice(&Extent { len: extent.len + 12, ..extent }.encode()));
        },
        touched: &["/one/left"],
        expect: |c| file_of(c, "/one/left") == Some(220_000),
    },
    Case {
        name: "count of blocks",
        kind: Kind::Blocks,
        damage: |s, subject| edit_inode(s, ino(subject, "left"), |inode| inode.blocks += 7),
        touched: &[],
        expect: same,
    },
    Case {
        name: "file that ends too early",
        kind: Kind::FileSize,
        damage: |s, subject| edit_inode(s, ino(subject, "left"), |inode| inode.size = 100),
        touched: &["/one/left"],
        expect: |c| file_of(c, "/one/left").is_some_and(|len| len >= 220_000),
    },
    Case {
        name: "count of entries",
        kind: Kind::DirectorySize,
        damage: |s, subject| edit_inode(s, ino(subject, "one"), |inode| inode.size += 1),
        touched: &[],
        expect: same,
    },
    Case {
        name: "entry with a slash",
        kind: Kind::Entry,
        damage: |s, subject| {
            let key = entry(s, ino(subject, "one"), "small");
            s.edit_item(key, |bytes| bytes[10] = b'/');
        },
        touched: &["/one/small", "/one/s_all"],
        expect: |c| file_of(c, "/one/s_all") == Some(11),
    },
    Case {
        name: "entry under another hash",
        kind: Kind::EntryHash,
        damage: |s, subject| {
            let key = entry(s, ino(subject, "one"), "small");
            let value = s.value(key);
            s.remove(key);
            s.insert(Key::new(key.ino(), ItemKind::Dirent, key.offset() ^ 1 << 20), &value);
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "name that is there twice",
        kind: Kind::EntryDuplicate,
        damage: |s, subject| {
            let key = entry(s, ino(subject, "one"), "small");
            let value = Dirent { ino: ino(subject, "twice"), file_type: FileType::Regular, name: b"small" }.encode();
            s.insert(key.successor(), &value);
            edit_inode(s, ino(subject, "twice"), |inode| inode.nlink += 1);
            edit_inode(s, ino(subject, "one"), |inode| inode.size += 1);
        },
        touched: &["/one/small~1"],
        expect: |c| file_of(c, "/one/small~1") == Some(70_000),
    },
    Case {
        name: "entry that leads nowhere",
        kind: Kind::EntryDangling,
        damage: |s, subject| s.remove(Key::inode(ino(subject, "marked") - 1)),
        touched: &["/one/pipe"],
        expect: |c| !c.contains_key("/one/pipe"),
    },
    Case {
        name: "type in an entry",
        kind: Kind::EntryType,
        damage: |s, subject| {
            let key = entry(s, ino(subject, "one"), "small");
            s.edit_item(key, |bytes| bytes[8] = FileType::Socket as u8);
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "second name of a directory",
        kind: Kind::DirectoryLink,
        damage: |s, subject| {
            let value = Dirent { ino: ino(subject, "three"), file_type: FileType::Directory, name: b"again" }.encode();
            let key = entry(s, ino(subject, "one"), "again");
            s.insert(key, &value);
            edit_inode(s, ino(subject, "one"), |inode| {
                inode.size += 1;
                inode.nlink += 1;
            });
        },
        touched: &[],
        expect: same,
    },
    Case {
        name: "link count of a file",
        kind: Kind::LinkCount,
        damage: |s, subject| edit_inode(s, ino(subject, "twice"), |inode| inode.nlink = 7),
        touched: &[],
        expect: same,
    },
    Case {
        name: "link count of a directory",
        kind: Kind::LinkCount,
        damage: |s, subject| edit_inode(s, ino(subject, "one"), |inode| inode.nlink = 0),
        touched: &[],
        expect: same,
    },
    Case {
        name: "parent of a directory",
        kind: Kind::Parent,
        damage: |s, subject| edit_inode(s, ino(subject, "three"), |inode| inode.parent = 1),
        touched: &[],
        expect: same,
    },
    Case {
        name: "directories in one another",
        kind: Kind::Cycle,
        damage: |s, subject| {
            let (one, three) = (ino(subject, "one"), ino(subject, "three"));
            let key = entry(s, ROOT, "one");
            let value = s.value(key);
            s.remove(key);
            s.insert(entry(s, three, "one"), &value);
            edit_inode(s, ROOT, |inode| (inode.size, inode.nlink) = (inode.size - 1, inode.nlink - 1));
            edit_inode(s, three, |inode| (inode.size, inode.nlink) = (inode.size + 1, inode.nlink + 1));
            edit_inode(s, one, |inode| inode.parent = three);
        },
        touched: &["/one"],
        expect: |c| lost(c) > 10,
    },
    Case {
        name: "file without a name",
        kind: Kind::Lost,
        damage: |s, subject| {
            s.remove(entry(s, ino(subject, "one"), "small"));
            edit_inode(s, ino(subject, "one"), |inode| inode.size -= 1);
        },
        touched: &["/one/small"],
        expect: small_is_found,
    },
    Case {
        // An inode made by the repair must not take the number of one that exists.
        name: "next inode is too low, and a file without a name",
        kind: Kind::Lost,
        damage: |s, subject| {
            s.remove(entry(s, ino(subject, "one"), "small"));
            edit_inode(s, ino(subject, "one"), |inode| inode.size -= 1);
            s.edit_state(|state| (state.next_ino, state.inodes) = (ino(subject, "right"), 1));
        },
        touched: &["/one/small"],
        expect: small_is_found,
    },
    Case {
        name: "directory without a name",
        kind: Kind::Lost,
        damage: |s, subject| {
            s.remove(entry(s, ino(subject, "one"), "two"));
            edit_inode(s, ino(subject, "one"), |inode| (inode.size, inode.nlink) = (inode.size - 1, inode.nlink - 1));
        },
        touched: &["/one/two"],
        expect: |c| c.keys().any(|path| path.ends_with("/three/twice") && path.starts_with("/lost+found/")),
    },
    Case {
        name: "orphan that is not there",
        kind: Kind::Orphan,
        damage: |s, _| s.insert(Key::new(0, ItemKind::Orphan, 1 << 40), &[]),
        touched: &[],
        expect: same,
    },
    Case {
        name: "blocks of two files",
        kind: Kind::Shared,
        damage: |s, subject| {
            let from = extents(s, ino(subject, "twice"))[0].1;
            let (key, extent) = extents(s, ino(subject, "right"))[1];
            s.edit_item(key, |bytes| bytes.copy_from_slice(&Extent { block: from.block + 2, ..extent }.encode()));
        },
        touched: &["/one/right"],
        expect: |c| file_of(c, "/one/right") == Some(220_000),
    },
    Case {
        name: "blocks that a file has twice",
        kind: Kind::Shared,
        damage: |s, subject| {
            let all = extents(s, ino(subject, "right"));
            let (key, extent) = all[2];
            s.edit_item(key, |bytes| bytes.copy_from_slice(&Extent { block: all[0].1.block, ..extent }.encode()));
        },
        touched: &["/one/right"],
        expect: |c| file_of(c, "/one/right") == Some(220_000),
    },
    Case {
        name: "node in the blocks of a file",
        kind: Kind::Shared,
        damage: |s, subject| {
            let leaf = leaf_of_many(s, subject);
            let (key, extent) = extents(s, ino(subject, "right"))[1];
            s.edit_item(key, |bytes| bytes.copy_from_slice(&Extent { block: leaf, len: 1, ..extent }.encode()));
        },
        touched: &["/one/right"],
        expect: |c| file_of(c, "/one/right") == Some(220_000),
    },
    Case {
        name: "data in a chunk of metadata",
        kind: Kind::Misplaced,
        damage: |s, subject| {
            let chunk = s.geometry.locate(s.state().root).1 / 512 * 512 + s.geometry.data;
            let bitmap = s.block(s.geometry.bitmap(0));
            let free = (0..512).rev().find(|at| !group::is_used(&bitmap, chunk - s.geometry.data + at)).expect("there is room");
            let (key, extent) = extents(s, ino(subject, "right"))[1];
            s.edit_item(key, |bytes| bytes.copy_from_slice(&Extent { block: chunk + free, len: 1, ..extent }.encode()));
        },
        touched: &["/one/right"],
        expect: |c| file_of(c, "/one/right") == Some(220_000),
    },
];

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
