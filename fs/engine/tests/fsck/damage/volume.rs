//! Damage of what a volume consists of: superblocks, anchors, bitmaps, nodes of the tree.

use gpunvme_engine::check::Kind;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::{ANCHORS, STATE};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::{Key, Kind as ItemKind, node};

use super::{Case, ROOT, extents, ino, leaf_of_many, lost, same};

pub const CASES: &[Case] = &[
    Case { name: "superblock", kind: Kind::Superblock, damage: |s, _| s.ruin(0), touched: &[], expect: same },
    Case {
        name: "another filesystem's first block",
        kind: Kind::Foreign,
        damage: |s, _| s.image.write_at(0, &[0x58; BLOCK_SIZE]),
        touched: &[],
        expect: same,
    },
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
        name: "leaf without items",
        kind: Kind::Node,
        damage: |s, subject| s.edit(leaf_of_many(s, subject), |leaf| node::init(leaf, 0)),
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
];
