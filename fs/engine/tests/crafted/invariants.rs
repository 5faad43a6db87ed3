//! Invariants of docs/reference/layout.md, broken one by one. A mount refuses most of the images,
//! or answers with an error where it meets the damage; a repair mends all of them, except where it
//! leaves a superblock alone on purpose.

use gpunvme_blockdev_testing::Image;
use gpunvme_layout::geometry::{ANCHORS, CHUNK_BLOCKS, STATE};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::key::{INO_MAX, dirent_offset, xattr_offset};
use gpunvme_layout::{Block, BlockKind, Dirent, FileType, Key, Kind as ItemKind, node};

use super::victim;
use crate::common::ROOT;
use crate::surgeon::Surgeon;

/// An invariant that is broken.
pub struct Invariant {
    /// Description of what is wrong.
    pub name: &'static str,
    /// It is broken in a volume whose last transactions are in the journal only.
    in_journal: bool,
    /// The program must refuse the volume.
    pub is_refused: bool,
    edit: fn(&mut Surgeon),
}

impl Invariant {
    /// An image in which it is broken.
    pub fn broken(&self) -> Image {
        let image = if self.in_journal { &victim().cut } else { &victim().closed };
        let mut surgeon = Surgeon::new(image.clone());
        (self.edit)(&mut surgeon);
        surgeon.image
    }
}

const fn mended(name: &'static str, edit: fn(&mut Surgeon)) -> Invariant {
    Invariant { name, in_journal: false, is_refused: false, edit }
}

const fn refused(name: &'static str, edit: fn(&mut Surgeon)) -> Invariant {
    Invariant { name, in_journal: false, is_refused: true, edit }
}

const fn in_journal(name: &'static str, edit: fn(&mut Surgeon)) -> Invariant {
    Invariant { name, in_journal: true, is_refused: false, edit }
}

/// Puts a number of `LEN` bytes into a block.
fn put<const LEN: usize>(block: &mut Block, at: usize, number: [u8; LEN]) {
    block.bytes_mut()[at..at + LEN].copy_from_slice(&number);
}

fn superblocks(s: &mut Surgeon, at: usize, number: u64) {
    s.geometry.superblocks().into_iter().for_each(|address| s.edit(address, |b| put(b, at, number.to_le_bytes())));
}

fn anchors(s: &mut Surgeon, at: usize, number: u64) {
    ANCHORS.into_iter().for_each(|address| s.edit(address, |b| put(b, at, number.to_le_bytes())));
}

/// The number of what a path leads to.
fn ino(s: &Surgeon, path: &str) -> u64 {
    let step = |dir, name: &str| {
        let value = s.value(entry(s, dir, name));
        u64::from_le_bytes(value[..8].try_into().expect("eight bytes"))
    };
    path.split('/').filter(|name| !name.is_empty()).fold(ROOT, step)
}

fn entry(s: &Surgeon, dir: u64, name: &str) -> Key {
    Key::new(dir, ItemKind::Dirent, dirent_offset(&s.superblock.hash_key, name.as_bytes()))
}

/// Puts a number into the inode behind a path.
fn inode<const LEN: usize>(s: &mut Surgeon, path: &str, at: usize, number: [u8; LEN]) {
    s.edit_item(Key::inode(ino(s, path)), |bytes| bytes[at..at + LEN].copy_from_slice(&number));
}

/// Puts bytes into the value of the entry `dir/one`.
fn one<const LEN: usize>(s: &mut Surgeon, at: usize, number: [u8; LEN]) {
    s.edit_item(entry(s, ino(s, "dir"), "one"), |bytes| bytes[at..at + LEN].copy_from_slice(&number));
}

/// Moves an item to another key.
fn rekey(s: &mut Surgeon, from: Key, to: Key) {
    let value = s.value(from);
    s.remove(from);
    s.insert(to, &value);
}

fn move_one(s: &mut Surgeon, offset: u64) {
    let from = entry(s, ino(s, "dir"), "one");
    rekey(s, from, Key::new(from.ino(), ItemKind::Dirent, offset));
}

/// An entry more in `dir`.
fn add_entry(s: &mut Surgeon, offset: u64, name: &[u8], to: u64, file_type: FileType) {
    let key = Key::new(ino(s, "dir"), ItemKind::Dirent, offset);
    s.insert(key, &Dirent { ino: to, file_type, name }.encode());
}

/// Changes the first extent of `dir/one`.
fn extent<const LEN: usize>(s: &mut Surgeon, at: usize, number: [u8; LEN]) {
    s.edit_item(Key::new(ino(s, "dir/one"), ItemKind::Extent, 0), |bytes| bytes[at..at + LEN].copy_from_slice(&number));
}

fn move_extent(s: &mut Surgeon, offset: u64) {
    let ino = ino(s, "dir/one");
    rekey(s, Key::new(ino, ItemKind::Extent, 0), Key::new(ino, ItemKind::Extent, offset));
}

/// First block of `dir/two`.
fn block_of_two(s: &Surgeon) -> u64 {
    let value = s.value(Key::new(ino(s, "dir/two"), ItemKind::Extent, 0));
    u64::from_le_bytes(value[..8].try_into().expect("eight bytes"))
}

fn attribute(s: &Surgeon, name: &str) -> Key {
    Key::new(ino(s, "dir/pieces"), ItemKind::Xattr, xattr_offset(&s.superblock.hash_key, name.as_bytes()))
}

fn root_node(s: &mut Surgeon, change: impl FnOnce(&mut Block)) {
    let root = s.state().root;
    assert!(node::level(&s.block(root)) > 0);
    s.edit(root, change);
}

fn first_leaf(s: &mut Surgeon, change: impl FnOnce(&mut Block)) {
    s.edit(s.leaf(Key::inode(ROOT)), change);
}

/// Gives all chunks of a kind another one; with the descriptor, and the state, that go with it.
fn chunks(s: &mut Surgeon, from: ChunkKind, to: ChunkKind, with_counts: bool) {
    let mut changed = 0;
    let bitmap = s.geometry.bitmap(0);
    let all = 0..s.geometry.group_chunks(0);
    s.edit(bitmap, |block| {
        for chunk in all {
            if group::kind(block, chunk) == from {
                group::set_kind(block, chunk, to);
                changed += 1;
            }
        }
    });
    assert!(changed > 0);
    if with_counts {
        descriptor(s, |d| {
            d.free_metadata += changed * CHUNK_BLOCKS as u16;
            d.free_blocks -= changed * CHUNK_BLOCKS as u16;
            d.free_chunks -= changed;
        });
    }
}

fn descriptor(s: &mut Surgeon, change: impl FnOnce(&mut Descriptor)) {
    let (address, index) = s.geometry.descriptor(0);
    s.edit(address, |block| {
        let mut descriptor = Descriptor::load(block, index);
        change(&mut descriptor);
        descriptor.store(block, index);
    });
}

/// Changes each block of the journal that begins a transaction.
fn transactions(s: &mut Surgeon, change: impl Fn(&mut Block)) {
    let journal = s.geometry.journal..s.geometry.journal + s.geometry.journal_blocks;
    let begins: Vec<u64> = journal.filter(|a| s.block(*a).kind() == BlockKind::Journal as u16).collect();
    assert!(!begins.is_empty());
    begins.into_iter().for_each(|address| s.edit(address, &change));
}

/// Changes each image of a block in the journal.
fn images(s: &mut Surgeon, home: u64, change: impl Fn(&mut Block)) {
    let journal = s.geometry.journal..s.geometry.journal + s.geometry.journal_blocks;
    let uuid = s.superblock.uuid;
    let found: Vec<u64> = journal.filter(|a| s.block(*a).verify_any_kind(home, &uuid).is_ok()).collect();
    assert!(!found.is_empty());
    found.into_iter().for_each(|address| s.edit(address, &change));
}

/// Stamps the whole journal with other sequences: those that it has, and so many more.
fn later(s: &mut Surgeon, by: u64) {
    let uuid = s.superblock.uuid;
    for address in s.geometry.journal..s.geometry.journal + s.geometry.journal_blocks {
        let mut block = s.block(address);
        if block.verify_any_kind(block.address(), &uuid).is_ok() {
            block.seal(block.sequence() + by);
            s.put(address, &block);
        }
    }
}

/// Stamps both anchors with generations and sequences that end at these.
fn count_to(s: &mut Surgeon, generation: Option<u64>, sequence: Option<u64>) {
    for (address, before) in ANCHORS.into_iter().zip([1, 0]) {
        let mut block = s.block(address);
        if let Some(sequence) = sequence {
            put(&mut block, 72, sequence.to_le_bytes());
        }
        block.seal(generation.map_or(block.sequence(), |generation| generation - before));
        s.put(address, &block);
    }
}

pub const INVARIANTS: &[Invariant] = &[
    // Superblock.
    refused("regions without an end", |s| superblocks(s, 104, 1 << 6)),
    refused("a version that is not known", |s| superblocks(s, 80, 2)),
    refused("an incompatible feature", |s| superblocks(s, 104, 1)),
    refused("a feature that allows reading only", |s| superblocks(s, 96, 1)),
    mended("a compatible feature", |s| superblocks(s, 88, 1)),
    refused("a volume larger than its device", |s| superblocks(s, 112, 1 << 30)),
    refused("a volume beyond all limits", |s| superblocks(s, 112, u64::MAX)),
    refused("a journal beyond all limits", |s| superblocks(s, 120, 1 << 40)),
    refused("no chunk of data", |s| superblocks(s, 120, 4000)),
    mended("another hash of names", |s| superblocks(s, 128, 77)),
    mended("a label that is no text", |s| superblocks(s, 160, u64::MAX)),
    mended("a superblock of another kind", |s| s.edit(0, |b| put(b, 8, 2u16.to_le_bytes()))),
    mended("a copy of the superblock that differs", |s| {
        let copy = s.geometry.superblocks()[2];
        s.edit(copy, |b| put(b, 160, *b"other"));
    }),
    // Anchors.
    mended("a tail outside the journal", |s| anchors(s, 64, 1 << 20)),
    mended("a tail where nothing is", |s| anchors(s, 64, 1000)),
    mended("no clean end, and nothing in the journal", |s| anchors(s, 80, 0)),
    mended("a generation where they end", |s| count_to(s, Some(1 << 62), None)),
    mended("a generation just before they end", |s| count_to(s, Some((1 << 62) - 1), None)),
    mended("a generation that could be", |s| count_to(s, Some(1 << 61), None)),
    mended("a generation beyond all", |s| count_to(s, Some(u64::MAX), None)),
    mended("a sequence where they end", |s| count_to(s, None, Some(1 << 62))),
    mended("a sequence just before they end", |s| count_to(s, None, Some((1 << 62) - 1025))),
    mended("a sequence that could be", |s| count_to(s, None, Some(1 << 61))),
    mended("a sequence beyond all", |s| count_to(s, None, Some(u64::MAX))),
    mended("generation and sequence where they end", |s| count_to(s, Some(1 << 62), Some(1 << 62))),
    mended("one generation twice", |s| {
        let mut block = s.block(ANCHORS[1]);
        block.seal(s.block(ANCHORS[0]).sequence());
        s.put(ANCHORS[1], &block);
    }),
    // Journal.
    in_journal("no images", |s| transactions(s, |b| put(b, 64, 0u32.to_le_bytes()))),
    in_journal("more images than the journal holds", |s| transactions(s, |b| put(b, 64, u32::MAX.to_le_bytes()))),
    in_journal("an image more than there are", |s| transactions(s, |b| put(b, 64, (b.bytes()[64] as u32 + 1).to_le_bytes()))),
    in_journal("a descriptor of another index", |s| transactions(s, |b| put(b, 68, 7u32.to_le_bytes()))),
    in_journal("a home that is the superblock's", |s| transactions(s, |b| put(b, 80, 0u64.to_le_bytes()))),
    in_journal("a home that is an anchor's", |s| transactions(s, |b| put(b, 80, 1u64.to_le_bytes()))),
    in_journal("a home beyond the device", |s| transactions(s, |b| put(b, 80, u64::MAX.to_le_bytes()))),
    in_journal("a home in the journal", |s| {
        let home = s.geometry.journal;
        transactions(s, |b| put(b, 80, home.to_le_bytes()));
    }),
    in_journal("an image of the superblock", |s| {
        // The first image becomes one of block 0.
        let journal = s.geometry.journal..s.geometry.journal + s.geometry.journal_blocks;
        let begins: Vec<u64> = journal.filter(|a| s.block(*a).kind() == BlockKind::Journal as u16).collect();
        for address in begins {
            s.edit(address, |b| put(b, 80, 0u64.to_le_bytes()));
            let image = s.block(address + 1).moved_to(0);
            s.put(address + 1, &image);
        }
    }),
    in_journal("an image that is no state", |s| images(s, STATE, |b| put(b, 8, 6u16.to_le_bytes()))),
    in_journal("a state without a root", |s| images(s, STATE, |b| put(b, 64, 5u64.to_le_bytes()))),
    in_journal("a state of impossible counts", |s| images(s, STATE, |b| put(b, 88, u64::MAX.to_le_bytes()))),
    in_journal("a bitmap that is a node", |s| {
        let bitmap = s.geometry.bitmap(0);
        images(s, bitmap, |b| put(b, 8, 6u16.to_le_bytes()));
    }),
    in_journal("a bitmap of unknown kinds", |s| {
        let bitmap = s.geometry.bitmap(0);
        images(s, bitmap, |b| b.bytes_mut()[64] = 3);
    }),
    in_journal("transactions that the anchors do not reach", |s| later(s, 5000)),
    in_journal("transactions of sequences where they end", |s| {
        let first = s.block(s.geometry.journal).sequence();
        later(s, (1 << 62) - 3 - first);
        count_to(s, None, Some((1 << 62) - 3));
    }),
    in_journal("transactions beyond all, and no anchors", |s| {
        let first = s.block(s.geometry.journal).sequence();
        later(s, u64::MAX - 40 - first);
        ANCHORS.into_iter().for_each(|address| s.ruin(address));
    }),
    in_journal("transactions near the end, and no anchors", |s| {
        let first = s.block(s.geometry.journal).sequence();
        later(s, (1 << 61) - 40 - first);
        ANCHORS.into_iter().for_each(|address| s.ruin(address));
    }),
    // State.
    mended("a root outside the data area", |s| s.edit_state(|state| state.root = 3)),
    mended("a root beyond the device", |s| s.edit_state(|state| state.root = u64::MAX)),
    mended("a root that is data", |s| {
        let data = block_of_two(s);
        s.edit_state(|state| state.root = data);
    }),
    mended("a root that is a leaf", |s| {
        let leaf = s.leaf(Key::inode(ROOT));
        s.edit_state(|state| (state.root, state.level) = (leaf, 0));
    }),
    mended("a root of another level", |s| s.edit_state(|state| state.level += 1)),
    mended("a root of level 0 that has children", |s| s.edit_state(|state| state.level = 0)),
    mended("a root of an impossible level", |s| s.edit_state(|state| state.level = 255)),
    mended("a next inode that is there", |s| s.edit_state(|state| (state.next_ino, state.inodes) = (5, 4))),
    mended("a next inode that is none", |s| s.edit_state(|state| (state.next_ino, state.inodes) = (0, 0))),
    mended("no inodes left to give out", |s| s.edit_state(|state| state.next_ino = INO_MAX)),
    mended("a next inode beyond all", |s| s.edit_state(|state| state.next_ino = 1 << 56)),
    mended("more inodes than were given out", |s| s.edit_state(|state| state.inodes = state.next_ino)),
    mended("no inodes", |s| s.edit_state(|state| state.inodes = 0)),
    mended("no free blocks", |s| s.edit_state(|state| (state.free_blocks, state.free_chunks) = (0, 0))),
    mended("regions counted that are not there", |s| s.edit_state(|state| state.regions = 3)),
    mended("all blocks free", |s| {
        let all = (s.geometry.data_blocks(), s.geometry.chunks);
        s.edit_state(|state| (state.free_blocks, state.free_chunks) = all);
    }),
    mended("more free blocks than there are", |s| s.edit_state(|state| state.free_blocks = u64::MAX)),
    mended("more free chunks than free blocks", |s| s.edit_state(|state| state.free_blocks = 1)),
    // Groups.
    mended("a group without anything free", |s| descriptor(s, |d| (d.free_blocks, d.free_metadata, d.free_chunks) = (0, 0, 0))),
    mended("a group with everything free", |s| descriptor(s, |d| (d.free_blocks, d.free_chunks) = (u16::MAX, u16::MAX))),
    mended("a group with more nodes free than it has", |s| descriptor(s, |d| d.free_metadata = u16::MAX)),
    mended("a group that says that it was never used", |s| descriptor(s, |d| d.initialized = false)),
    mended("unknown flags of a group", |s| {
        let (address, index) = s.geometry.descriptor(0);
        s.edit(address, |b| put(b, 64 + 8 * index + 6, u16::MAX.to_le_bytes()));
    }),
    mended("free chunks that hold nodes", |s| chunks(s, ChunkKind::Free, ChunkKind::Metadata, false)),
    mended("free chunks that hold nodes, and a descriptor that agrees", |s| {
        chunks(s, ChunkKind::Free, ChunkKind::Metadata, true)
    }),
    mended("free chunks that hold data", |s| chunks(s, ChunkKind::Free, ChunkKind::Data, false)),
    mended("data in chunks of nodes", |s| chunks(s, ChunkKind::Data, ChunkKind::Metadata, false)),
    mended("data in free chunks", |s| chunks(s, ChunkKind::Data, ChunkKind::Free, false)),
    mended("nodes in free chunks", |s| chunks(s, ChunkKind::Metadata, ChunkKind::Free, false)),
    mended("nodes in chunks of data", |s| chunks(s, ChunkKind::Metadata, ChunkKind::Data, false)),
    mended("a chunk of an unknown kind", |s| s.edit(s.geometry.bitmap(0), |b| b.bytes_mut()[66] = 3)),
    mended("all blocks in use", |s| s.edit(s.geometry.bitmap(0), |b| b.bytes_mut()[128..].fill(0xff))),
    mended("no blocks in use", |s| s.edit(s.geometry.bitmap(0), |b| b.bytes_mut()[128..].fill(0))),
    mended("chunks that the group does not have", |s| s.edit(s.geometry.bitmap(0), |b| b.bytes_mut()[128 + 30 * 64..].fill(0))),
    mended("a bitmap that is a node", |s| s.edit(s.geometry.bitmap(0), |b| put(b, 8, 6u16.to_le_bytes()))),
    mended("descriptors that are a bitmap", |s| s.edit(4, |b| put(b, 8, 5u16.to_le_bytes()))),
    // Nodes.
    mended("a child that is its parent", |s| {
        let root = s.state().root;
        root_node(s, |b| put(b, 64 + 16, root.to_le_bytes()));
    }),
    mended("one child twice", |s| root_node(s, |b| put(b, 64 + 24 + 16, node::child(b, 0).to_le_bytes()))),
    mended("a child outside the data area", |s| root_node(s, |b| put(b, 64 + 16, 0u64.to_le_bytes()))),
    mended("a child beyond the device", |s| root_node(s, |b| put(b, 64 + 16, u64::MAX.to_le_bytes()))),
    mended("a child that is data", |s| {
        let data = block_of_two(s);
        root_node(s, |b| put(b, 64 + 16, data.to_le_bytes()));
    }),
    mended("an inner node without children", |s| root_node(s, |b| put(b, 50, 0u16.to_le_bytes()))),
    mended("more children than fit", |s| root_node(s, |b| put(b, 50, u16::MAX.to_le_bytes()))),
    mended("children that do not ascend", |s| root_node(s, |b| put(b, 64 + 24, [0xff; 16]))),
    mended("a child with keys of its neighbour", |s| root_node(s, |b| node::set_key(b, 1, node::key(b, 1).successor()))),
    mended("a leaf of an impossible level", |s| first_leaf(s, |b| b.bytes_mut()[48] = 17)),
    mended("a leaf that says it is an inner node", |s| first_leaf(s, |b| b.bytes_mut()[48] = 1)),
    mended("a leaf without items", |s| first_leaf(s, |b| node::init(b, 0))),
    mended("values of a leaf beyond its end", |s| first_leaf(s, |b| put(b, 64 + 16, 4095u16.to_le_bytes()))),
    mended("a value of a leaf that is too long", |s| first_leaf(s, |b| put(b, 64 + 18, 2000u16.to_le_bytes()))),
    mended("values of a leaf in its slots", |s| first_leaf(s, |b| put(b, 64 + 16, 64u16.to_le_bytes()))),
    mended("a heap in the slots", |s| first_leaf(s, |b| put(b, 52, 70u16.to_le_bytes()))),
    mended("garbage that is not there", |s| first_leaf(s, |b| put(b, 54, 9u16.to_le_bytes()))),
    mended("a leaf of another volume", |s| first_leaf(s, |b| put(b, 32, [1; 16]))),
    mended("a leaf of another place", |s| first_leaf(s, |b| put(b, 16, 4000u64.to_le_bytes()))),
    // Items.
    mended("an item of an unknown kind", |s| s.insert(key_of(s, "dir", 7, 0), b"what")),
    mended("a second item of an inode", |s| s.insert(Key::new(ino(s, "dir"), ItemKind::Inode, 1), &[0; 104])),
    mended("an item under no inode", |s| s.insert(Key::new(0, ItemKind::Extent, 0), &[0; 16])),
    mended("an item under the highest number", |s| {
        let leaf = *s.leaves().last().expect("there are leaves");
        s.edit(leaf, |leaf| {
            let end = node::count(leaf);
            node::leaf_insert(leaf, end, Key::inode(INO_MAX), &[0; 104]);
        });
    }),
    mended("the highest key that there is", |s| {
        let leaf = *s.leaves().last().expect("there are leaves");
        s.edit(leaf, |leaf| {
            let end = node::count(leaf);
            node::leaf_insert(leaf, end, Key::inode(INO_MAX), b"x");
            put(leaf, 64 + 20 * end, [0xff; 16]);
        });
    }),
    mended("entries of a file", |s| {
        let key = Key::new(ino(s, "dir/one"), ItemKind::Dirent, 1 << 30);
        s.insert(key, &Dirent { ino: ROOT, file_type: FileType::Directory, name: b"root" }.encode());
    }),
    mended("extents of a directory", |s| s.insert(Key::new(ino(s, "dir"), ItemKind::Extent, 0), &[0; 16])),
    mended("a target of a directory", |s| s.insert(Key::new(ino(s, "dir"), ItemKind::Symlink, 0), b"x")),
    mended("orphan of an inode that is there", |s| s.insert(Key::new(0, ItemKind::Orphan, ino(s, "dir/one")), &[])),
    mended("orphan with a value", |s| s.insert(Key::new(0, ItemKind::Orphan, 1 << 20), b"x")),
    mended("orphan of no inode", |s| s.insert(Key::new(0, ItemKind::Orphan, 0), &[])),
    mended("orphan beyond all", |s| s.insert(Key::new(0, ItemKind::Orphan, u64::MAX), &[])),
    mended("orphan under an inode", |s| s.insert(Key::new(ino(s, "dir"), ItemKind::Orphan, 3), &[])),
    mended("the root is an orphan", |s| s.insert(Key::new(0, ItemKind::Orphan, ROOT), &[])),
    // Inodes.
    mended("a mode without a type", |s| inode(s, "dir/one", 0, 0u32.to_le_bytes())),
    mended("a mode beyond all", |s| inode(s, "dir/one", 0, u32::MAX.to_le_bytes())),
    mended("a directory that is a device", |s| inode(s, "dir", 0, 0o060755u32.to_le_bytes())),
    mended("the root is a file", |s| inode(s, "", 0, 0o100644u32.to_le_bytes())),
    mended("a root without links", |s| inode(s, "", 4, 0u32.to_le_bytes())),
    mended("a directory without links", |s| inode(s, "dir", 4, 0u32.to_le_bytes())),
    mended("a directory of all links", |s| inode(s, "dir", 4, u32::MAX.to_le_bytes())),
    mended("a file without links", |s| inode(s, "dir/one", 4, 0u32.to_le_bytes())),
    mended("a file of all links", |s| inode(s, "dir/one", 4, u32::MAX.to_le_bytes())),
    mended("flags of an inode", |s| inode(s, "dir/one", 20, 1u32.to_le_bytes())),
    mended("a file of impossible size", |s| inode(s, "dir/one", 24, u64::MAX.to_le_bytes())),
    mended("a file of the greatest size", |s| inode(s, "dir/one", 24, ((1u64 << 62) - 4096).to_le_bytes())),
    mended("a file that ends before its blocks", |s| inode(s, "dir/one", 24, 1u64.to_le_bytes())),
    mended("a directory of no entries", |s| inode(s, "dir", 24, 0u64.to_le_bytes())),
    mended("a directory of all entries", |s| inode(s, "dir", 24, ((1u64 << 62) - 4096).to_le_bytes())),
    mended("a file of no blocks", |s| inode(s, "dir/one", 32, 0u64.to_le_bytes())),
    mended("a file of all blocks", |s| inode(s, "dir/one", 32, (1u64 << 44).to_le_bytes())),
    mended("a file of impossible blocks", |s| inode(s, "dir/one", 32, u64::MAX.to_le_bytes())),
    mended("a directory without a parent", |s| inode(s, "dir", 40, 0u64.to_le_bytes())),
    mended("a directory whose parent is a file", |s| inode(s, "dir/below", 40, ino(s, "dir/one").to_le_bytes())),
    mended("a directory that is its parent", |s| inode(s, "dir/below", 40, ino(s, "dir/below").to_le_bytes())),
    mended("a directory whose parent is the highest number", |s| inode(s, "dir", 40, INO_MAX.to_le_bytes())),
    mended("a directory whose parent is no number", |s| inode(s, "dir", 40, (1u64 << 56).to_le_bytes())),
    mended("a directory whose parent is beyond all", |s| inode(s, "dir", 40, u64::MAX.to_le_bytes())),
    mended("a root whose parent is another", |s| inode(s, "", 40, ino(s, "dir").to_le_bytes())),
    mended("a root whose parent is beyond all", |s| inode(s, "", 40, u64::MAX.to_le_bytes())),
    mended("a file that has a parent", |s| inode(s, "dir/one", 40, ROOT.to_le_bytes())),
    mended("a time of too many nanoseconds", |s| inode(s, "dir/one", 56, 1_000_000_000u32.to_le_bytes())),
    mended("the first time that there is", |s| inode(s, "dir/one", 60, i64::MIN.to_le_bytes())),
    mended("the last time that there is", |s| inode(s, "dir/one", 72, i64::MAX.to_le_bytes())),
    mended("an inode that is cut off", |s| {
        let key = Key::inode(ino(s, "dir/one"));
        let value = s.value(key);
        s.remove(key);
        s.insert(key, &value[..100]);
    }),
    // Entries.
    mended("an entry of no inode", |s| one(s, 0, 0u64.to_le_bytes())),
    mended("an entry of an inode beyond all", |s| one(s, 0, u64::MAX.to_le_bytes())),
    mended("an entry of the highest number", |s| one(s, 0, INO_MAX.to_le_bytes())),
    mended("an entry of an inode that is not there", |s| one(s, 0, 9999u64.to_le_bytes())),
    mended("an entry of the root", |s| one(s, 0, ROOT.to_le_bytes())),
    mended("an entry of its own directory", |s| one(s, 0, ino(s, "dir").to_le_bytes())),
    mended("an entry of type 0", |s| one(s, 8, [0])),
    mended("an entry of an unknown type", |s| one(s, 8, [15])),
    mended("an entry that says it is a directory", |s| one(s, 8, [4])),
    mended("a name with a slash", |s| one(s, 10, *b"/")),
    mended("a name with a zero", |s| one(s, 10, [0])),
    mended("an entry that is cut off", |s| {
        let key = entry(s, ino(s, "dir"), "one");
        let value = s.value(key);
        s.remove(key);
        s.insert(key, &value[..9]);
    }),
    mended("a name that is too long", |s| add_entry(s, 1 << 30, &[b'x'; 256], ino(s, "dir/one"), FileType::Regular)),
    mended("a name of one dot", |s| add_entry(s, 1 << 30, b".", ino(s, "dir/one"), FileType::Regular)),
    mended("a name of two dots", |s| add_entry(s, 1 << 30, b"..", ROOT, FileType::Directory)),
    mended("one name twice", |s| {
        let offset = dirent_offset(&s.superblock.hash_key, b"one") + 1;
        add_entry(s, offset, b"one", ino(s, "dir/two"), FileType::Regular);
    }),
    mended("an entry at offset 0", |s| move_one(s, 0)),
    mended("an entry where two dots are", |s| move_one(s, 2)),
    mended("an entry below the lowest hash", |s| move_one(s, 255)),
    mended("an entry at a negative offset", |s| move_one(s, 1 << 63)),
    mended("an entry at the last offset but one", |s| move_one(s, u64::MAX - 1)),
    mended("an entry at the last offset", |s| move_one(s, u64::MAX)),
    mended("an entry under another hash", |s| move_one(s, 1 << 40)),
    mended("directories in one another", |s| {
        let (dir, below) = (ino(s, "dir"), ino(s, "dir/below"));
        let key = entry(s, ROOT, "dir");
        rekey(s, key, entry(s, below, "dir"));
        s.edit_item(Key::inode(dir), |bytes| bytes[40..48].copy_from_slice(&below.to_le_bytes()));
    }),
    mended("two names of a directory", |s| add_entry(s, 1 << 30, b"again", ino(s, "dir/below"), FileType::Directory)),
    mended("a file without a name", |s| s.remove(entry(s, ino(s, "dir"), "one"))),
    mended("a directory without a name", |s| s.remove(entry(s, ROOT, "dir"))),
    mended("no root", |s| s.remove(Key::inode(ROOT))),
    // Symbolic links.
    mended("a target of no bytes", |s| inode(s, "dir/short", 24, 0u64.to_le_bytes())),
    mended("a target that is longer than it may be", |s| inode(s, "dir/long", 24, 5000u64.to_le_bytes())),
    mended("a piece of a target that is missing", |s| s.remove(Key::new(ino(s, "dir/long"), ItemKind::Symlink, 1))),
    mended("pieces of a target beyond all", |s| {
        let ino = ino(s, "dir/long");
        rekey(s, Key::new(ino, ItemKind::Symlink, 3), Key::new(ino, ItemKind::Symlink, u64::MAX));
    }),
    // Attributes.
    mended("an attribute longer than it may be", |s| s.edit_item(attribute(s, "user.long"), |b| b[..4].fill(0xff))),
    mended("an attribute longer than it is", |s| s.edit_item(attribute(s, "user.long"), |b| b[0] = b[0].wrapping_add(1))),
    mended("an attribute without a name", |s| s.edit_item(attribute(s, "user.short"), |b| b[4] = 0)),
    mended("an attribute whose name is cut off", |s| s.edit_item(attribute(s, "user.short"), |b| b[4] = 255)),
    mended("an attribute of another name", |s| s.edit_item(attribute(s, "user.short"), |b| b[10] = b'S')),
    mended("an attribute whose name has a zero", |s| s.edit_item(attribute(s, "user.short"), |b| b[10] = 0)),
    mended("an attribute that lacks a piece", |s| {
        let key = attribute(s, "user.long");
        s.remove(Key::new(key.ino(), ItemKind::Xattr, key.offset() + 1));
    }),
    mended("an attribute that lacks its first piece", |s| s.remove(attribute(s, "user.long"))),
    mended("a piece of an attribute beyond all", |s| {
        s.insert(Key::new(ino(s, "dir/pieces"), ItemKind::Xattr, u64::MAX), &[1; 100]);
    }),
    mended("an attribute at the last offset", |s| {
        let key = attribute(s, "user.short");
        rekey(s, key, Key::new(key.ino(), ItemKind::Xattr, u64::MAX << 16));
    }),
    mended("an ACL that is none", |s| {
        let value = gpunvme_layout::XattrHead { value_len: 3, name: b"system.posix_acl_access", start: b"acl" }.encode();
        let offset = xattr_offset(&s.superblock.hash_key, b"system.posix_acl_access");
        s.insert(Key::new(ino(s, "dir/one"), ItemKind::Xattr, offset), &value);
    }),
    // Extents.
    mended("an extent of no blocks", |s| extent(s, 8, 0u32.to_le_bytes())),
    mended("an extent of all blocks", |s| extent(s, 8, u32::MAX.to_le_bytes())),
    mended("an extent at block 0", |s| extent(s, 0, 0u64.to_le_bytes())),
    mended("an extent over the anchors", |s| extent(s, 0, 1u64.to_le_bytes())),
    mended("an extent over the journal", |s| extent(s, 0, s.geometry.journal.to_le_bytes())),
    mended("an extent over the end", |s| extent(s, 0, (s.geometry.data_end() - 1).to_le_bytes())),
    mended("an extent beyond all", |s| extent(s, 0, u64::MAX.to_le_bytes())),
    mended("an extent on another device", |s| extent(s, 12, 1u16.to_le_bytes())),
    mended("an extent with an unknown flag", |s| extent(s, 14, 2u16.to_le_bytes())),
    mended("an extent of another file", |s| extent(s, 0, block_of_two(s).to_le_bytes())),
    mended("an extent over a node", |s| extent(s, 0, s.state().root.to_le_bytes())),
    mended("an extent of free blocks", |s| {
        let last = s.geometry.data_end() - 20;
        extent(s, 0, last.to_le_bytes());
    }),
    mended("an extent behind the end of the file", |s| move_extent(s, 1 << 20)),
    mended("an extent at the last block of a file", |s| move_extent(s, (1 << 50) - 2)),
    mended("an extent beyond what a file can have", |s| move_extent(s, u64::MAX)),
    mended("extents that cover each other", |s| {
        let ino = ino(s, "dir/one");
        let value = s.value(Key::new(ino, ItemKind::Extent, 0));
        s.insert(Key::new(ino, ItemKind::Extent, 2), &value);
    }),
    mended("an extent that is cut off", |s| {
        let key = Key::new(ino(s, "dir/one"), ItemKind::Extent, 0);
        s.remove(key);
        s.insert(key, &[0; 15]);
    }),
];

/// A key of any kind.
fn key_of(s: &Surgeon, path: &str, kind: u8, offset: u64) -> Key {
    // Only the known kinds have names: the bits of the key are those of a neighbour.
    let base = Key::new(ino(s, path), ItemKind::Orphan, offset);
    (6..kind).fold(base, |key, _| Key::new(key.ino(), ItemKind::Orphan, u64::MAX).successor())
}
