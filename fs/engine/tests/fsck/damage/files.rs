//! Damage of files and directories: their inodes, entries, attributes and extents.

use gpunvme_engine::check::Kind;
use gpunvme_layout::group;
use gpunvme_layout::key::xattr_offset;
use gpunvme_layout::{Dirent, Extent, FileType, Key, Kind as ItemKind};

use super::{Case, ROOT, Thing, edit_inode, entry, extents, file_of, ino, leaf_of_many, lost, same, small_is_found};

pub const CASES: &[Case] = &[
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
