//! A repair that builds the tree anew from many leaves keeps to the memory that it was given. The
//! allocator counts what is held: these tests have a process of their own.

use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpunvme_blockdev::{BlockDevice, Io, OpenMode, open};
use gpunvme_engine::check::{CheckOptions, Fsck, Stop};
use gpunvme_engine::data::{Filesystem, Inline, Options};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_engine::{FormatOptions, VolumeOptions, format};
use gpunvme_layout::geometry::{CHUNK_BLOCKS, STATE};
use gpunvme_layout::{BLOCK_SIZE, Block, BlockKind, Extent, Geometry, Inode, Key, Kind, State, Superblock, Timestamp, node};
use peak_alloc::PeakAlloc;
use tempfile::NamedTempFile;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Held by a test that counts.
static COUNTING: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;
/// Memory for the repair, in bytes.
const MEMORY: usize = 8 * MIB;
/// Buffers of requests in flight, of the journal and of temporary files, in bytes.
const BUFFERS: usize = 4 * MIB;
/// Number of leaves. To keep 60 bytes of each takes more than all the memory.
const LEAVES: u64 = 400 * CHUNK_BLOCKS;

const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
const WHO: Context = Context { uid: 0, gid: 0, now: NOW };
const ROOT: u64 = 1;
/// Blocks from the start of the data area that are left to what a new volume has there.
const FRONT: u64 = 8 * CHUNK_BLOCKS;

/// A volume with one file, in an image file that is damaged block by block.
struct Subject {
    image: NamedTempFile,
    superblock: Superblock,
    ino: u64,
    /// Leaves that there are to be.
    leaves: u64,
}

impl Subject {
    /// A sound volume, with room for so many leaves; its file is empty.
    fn new(leaves: u64) -> Subject {
        let image = NamedTempFile::new().expect("temporary files can be made");
        image.as_file().set_len((FRONT + 3 * leaves + 128 * CHUNK_BLOCKS) * BLOCK_SIZE as u64).expect("a sparse file fits");
        let device = device(&image);
        let options = FormatOptions { label: "test".into(), uuid: [7; 16], hash_key: [9; 16], now: NOW, owner: (0, 0) };
        format(&device, &options).expect("the device can be formatted");
        let fs = mount(&device);
        let new = NewNode { mode: 0o100644, umask: 0, rdev: 0, target: &[] };
        let ino = fs.wait(|| fs.create(&WHO, ROOT, b"file", &new)).expect("there is room").ino;
        fs.close().expect("nothing fails");
        let superblock = fs.volume().superblock().clone();
        Subject { image, superblock, ino, leaves }
    }

    fn geometry(&self) -> Geometry {
        self.superblock.geometry()
    }

    fn block(&self, address: u64) -> Block {
        let mut bytes = [0; BLOCK_SIZE];
        self.image.as_file().read_exact_at(&mut bytes, Geometry::byte(address)).expect("it is in the file");
        Block::from_bytes(&bytes)
    }

    fn put(&self, block: &mut Block, sequence: u64) {
        block.seal(sequence);
        self.image.as_file().write_all_at(block.bytes(), Geometry::byte(block.address())).expect("there is room");
    }

    /// Writes a leaf with two extents of the file, each of one block. Leaves of the same `content`
    /// have the same extents.
    fn leaf(&self, number: u64, content: u64, offsets: [u64; 2], sequence: u64) {
        let first = self.geometry().data + FRONT;
        let mut leaf = Block::new(BlockKind::Node, first + number, &self.superblock.uuid);
        node::init(&mut leaf, 0);
        for (slot, offset) in offsets.into_iter().enumerate() {
            let block = first + self.leaves + 2 * content + slot as u64;
            let extent = Extent { block, len: 1, unwritten: false, device: 0 };
            node::leaf_insert(&mut leaf, slot, Key::new(self.ino, Kind::Extent, offset), &extent.encode());
        }
        self.put(&mut leaf, sequence);
    }

    /// Takes away the way to the leaves: the root of the tree, and what says which blocks hold
    /// metadata. `len`: blocks that the file may have.
    fn hide_leaves(&self, len: u64) {
        let mut block = self.block(STATE);
        let state = State::decode(&block, &self.geometry()).expect("it was closed");
        let mut leaf = self.block(state.root);
        let slot = node::search(&leaf, Key::inode(self.ino)).expect("the tree is one leaf");
        let mut inode = Inode::decode(self.ino, node::value(&leaf, slot)).expect("it is sound");
        inode.size = len * BLOCK_SIZE as u64;
        node::value_mut(&mut leaf, slot).copy_from_slice(&inode.encode());
        let sequence = leaf.sequence();
        self.put(&mut leaf, sequence);
        State { root: self.geometry().data_end() - 1, level: 2, ..state }.store(&mut block);
        let sequence = block.sequence();
        self.put(&mut block, sequence);
        for address in self.geometry().descriptor_blocks().map(|(address, _)| address).chain([self.geometry().bitmap(0)]) {
            self.image.as_file().write_all_at(&[0; BLOCK_SIZE], Geometry::byte(address)).expect("there is room");
        }
    }

    /// Repairs the volume. Returns the most bytes that were held meanwhile, and how long it took.
    fn repair(&self) -> (usize, Duration) {
        let io = Io::inline(device(&self.image)).expect("a queue");
        let begun = Instant::now();
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        let mut fsck = Fsck::open(io, CheckOptions { read_only: false, memory: MEMORY, now: NOW, stop: Stop::default() })
            .expect("a superblock is there");
        let repaired = fsck.repair(&mut |_| true, &mut |_, _, _| ()).expect("the device works");
        assert_eq!(repaired.left.total(), 0, "{:#?}", repaired.left.list);
        fsck.close(true).expect("the device works");
        (HEAP.peak_usage() - before, begun.elapsed())
    }

    /// Blocks that the file has, by what its inode says.
    fn blocks(&self) -> u64 {
        let fs = mount(&device(&self.image));
        let found = fs.wait(|| fs.lookup(ROOT, b"file")).expect("it has kept its name");
        let blocks = found.inode.blocks;
        fs.close().expect("nothing fails");
        blocks
    }
}

fn device(image: &NamedTempFile) -> Arc<dyn BlockDevice> {
    open(image.path().to_str().expect("plain names"), OpenMode::ReadWrite).expect("no other process has it")
}

fn mount(device: &Arc<dyn BlockDevice>) -> Arc<Filesystem> {
    let options = Options { volume: VolumeOptions { read_only: false, cache: MIB, discard: false }, write_buffer: MIB };
    Filesystem::open(Io::inline(device.clone()).expect("a queue"), options, Arc::new(Inline)).expect("it can be mounted")
}

fn assert_bounded(held: usize, what: &str) {
    assert!(held <= MEMORY + BUFFERS, "{what}: {} KiB were held", held >> 10);
}

#[test]
fn a_tree_is_built_anew_within_the_memory_that_the_repair_is_given() {
    let _alone = COUNTING.lock();
    let apart = Subject::new(LEAVES);
    (0..LEAVES).for_each(|n| apart.leaf(n, n, [3 * n, 3 * n + 1], 1 << 30));
    apart.hide_leaves(3 * LEAVES);
    let (held, plain) = apart.repair();
    println!("leaves that lie apart: {} KiB, {plain:?}", held >> 10);
    assert_bounded(held, "leaves that lie apart");
    assert_eq!(apart.blocks(), 2 * LEAVES);

    // Each lies within the one before it, and any of them may be the latest.
    let nested = Subject::new(LEAVES);
    let sequence = |n: u64| (1 << 30) + n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % LEAVES;
    (0..LEAVES).for_each(|n| nested.leaf(n, n, [n, 3 * LEAVES - n], sequence(n)));
    nested.hide_leaves(3 * LEAVES + 1);
    let (held, took) = nested.repair();
    println!("leaves within one another: {} KiB, {took:?}", held >> 10);
    assert_bounded(held, "leaves within one another");
    assert_eq!(nested.blocks(), 2, "of leaves that all cover one another, the latest counts");
    assert!(took < 10 * plain, "leaves within one another took {took:?}, such that lie apart {plain:?}");
}

#[test]
fn what_a_file_of_many_leaves_has_twice_is_found_within_that_memory_too() {
    let _alone = COUNTING.lock();
    const LEAVES: u64 = 20 * CHUNK_BLOCKS;
    let subject = Subject::new(LEAVES);
    // The last has the blocks of the first.
    (0..LEAVES).for_each(|n| subject.leaf(n, n % (LEAVES - 1), [3 * n, 3 * n + 1], 1 << 30));
    subject.hide_leaves(3 * LEAVES);
    let (held, took) = subject.repair();
    println!("blocks that a file has twice: {} KiB, {took:?}", held >> 10);
    assert_bounded(held, "blocks that a file has twice");
    assert_eq!(subject.blocks(), 2 * LEAVES);
}
