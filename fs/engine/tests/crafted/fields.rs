//! The fields of every structure, where they are in an image, and values that they may get.

use std::collections::BTreeMap;

use gpunvme_blockdev_testing::Image;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::GROUP_CHUNKS;
use gpunvme_layout::item::NAME_MAX;
use gpunvme_layout::{Block, BlockKind, Key, Kind as ItemKind, node};

use crate::common::Random;
use crate::surgeon::Surgeon;

/// A number in a block.
#[derive(Debug, Clone, Copy)]
struct Field {
    block: u64,
    at: usize,
    len: usize,
}

/// All fields of an image, by their name: of each kind there are many.
pub struct Fields(BTreeMap<String, Vec<Field>>);

/// Where a value of a field is a special case for some reader of it.
const EDGES: [u64; 12] =
    [0, 1, 255, 4096, (1 << 50) - 1, 1 << 56, (1 << 56) - 1, 1 << 61, (1 << 62) - 1, 1 << 62, 1 << 63, u64::MAX - 1];
/// Fields of an inode: name, offset, length.
const INODE: [(&str, usize, usize); 19] = [
    ("mode", 0, 4),
    ("nlink", 4, 4),
    ("uid", 8, 4),
    ("gid", 12, 4),
    ("rdev", 16, 4),
    ("flags", 20, 4),
    ("size", 24, 8),
    ("blocks", 32, 8),
    ("parent", 40, 8),
    ("atime", 48, 8),
    ("atime.ns", 56, 4),
    ("mtime", 60, 8),
    ("mtime.ns", 68, 4),
    ("ctime", 72, 8),
    ("ctime.ns", 80, 4),
    ("btime", 84, 8),
    ("btime.ns", 92, 4),
    ("reserved", 96, 4),
    ("reserved", 100, 4),
];

impl Fields {
    /// Finds them, at home and in the journal.
    pub fn of(image: &Image) -> Fields {
        let surgeon = Surgeon::new(image.clone());
        let mut fields = Fields(BTreeMap::new());
        for address in 0..image.len() / BLOCK_SIZE as u64 {
            let block = surgeon.block(address);
            // An image in the journal says where its home is; the rest of what makes it valid is
            // the same.
            if block.verify_any_kind(block.address(), &surgeon.superblock.uuid).is_ok() {
                fields.block(address, &block);
            }
        }
        fields
    }

    fn add(&mut self, name: &str, block: u64, at: usize, len: usize) {
        self.0.entry(name.to_owned()).or_default().push(Field { block, at, len });
    }

    fn block(&mut self, address: u64, block: &Block) {
        const KINDS: [&str; 7] = ["superblock", "anchor", "state", "descriptors", "bitmap", "node", "journal"];
        let kind = KINDS[usize::from(block.kind()) - 1];
        for (name, at, len) in [("kind", 8, 2), ("reserved", 10, 2), ("address", 16, 8), ("sequence", 24, 8), ("uuid", 32, 8)] {
            self.add(&format!("{kind}.{name}"), address, at, len);
        }
        let own: &[(&str, usize, usize)] = match block.kind() {
            k if k == BlockKind::Superblock as u16 => &[
                ("signature", 64, 8),
                ("version", 80, 4),
                ("compatible", 88, 8),
                ("read-only", 96, 8),
                ("incompatible", 104, 8),
                ("regions", 328, 2),
                ("end of a region", 336, 8),
                ("total", 112, 8),
                ("journal", 120, 8),
                ("key", 128, 8),
                ("created", 144, 8),
                ("created.ns", 152, 4),
                ("label", 160, 8),
            ],
            k if k == BlockKind::Anchor as u16 => &[("tail", 64, 8), ("tail.sequence", 72, 8), ("flags", 80, 4)],
            k if k == BlockKind::State as u16 => &[
                ("root", 64, 8),
                ("next", 72, 8),
                ("inodes", 80, 8),
                ("free.blocks", 88, 8),
                ("free.chunks", 96, 8),
                ("level", 104, 1),
                ("regions counted", 106, 2),
            ],
            k if k == BlockKind::Descriptors as u16 => {
                &[("blocks", 64, 2), ("metadata", 66, 2), ("chunks", 68, 2), ("flags", 70, 2), ("behind", 72, 8)]
            }
            k if k == BlockKind::Journal as u16 => {
                &[("images", 64, 4), ("index", 68, 4), ("home", 80, 8), ("home", 88, 8), ("home.behind", 80 + 8 * 300, 8)]
            }
            _ => &[],
        };
        for (name, at, len) in own {
            self.add(&format!("{kind}.{name}"), address, *at, *len);
        }
        if block.kind() == BlockKind::Bitmap as u16 {
            (0..GROUP_CHUNKS as usize).for_each(|chunk| self.add("bitmap.chunk", address, 64 + chunk, 1));
            (0..496).for_each(|word| self.add("bitmap.bits", address, 128 + 8 * word, 8));
        } else if block.kind() == BlockKind::Node as u16 {
            self.node(address, block);
        }
    }

    fn node(&mut self, address: u64, block: &Block) {
        for (name, at, len) in [("level", 48, 1), ("count", 50, 2), ("heap", 52, 2), ("garbage", 54, 2)] {
            self.add(&format!("node.{name}"), address, at, len);
        }
        for slot in 0..node::count(block) {
            if node::level(block) > 0 {
                let at = 64 + slot * 24;
                for (name, at, len) in [("offset", at + 8, 8), ("kind", at, 1), ("ino", at + 1, 7), ("child", at + 16, 8)] {
                    self.add(&format!("inner.{name}"), address, at, len);
                }
                continue;
            }
            let at = 64 + slot * 20;
            let key = node::key(block, slot);
            let value = usize::from(u16::from_le_bytes([block.bytes()[at + 16], block.bytes()[at + 17]]));
            let len = node::value(block, slot).len();
            let kind = item_kind(key);
            for (name, at, len) in
                [("offset", at + 8, 8), ("kind", at, 1), ("ino", at + 1, 7), ("value", at + 16, 2), ("length", at + 18, 2)]
            {
                self.add(&format!("{kind}.key.{name}"), address, at, len);
            }
            let own: &[(&str, usize, usize)] = match kind {
                "inode" => &INODE,
                "entry" => &[("inode", 0, 8), ("type", 8, 1), ("name", 9, 1)],
                "attribute" => &[("length", 0, 4), ("name.length", 4, 1), ("name", 5, 1)],
                "extent" => &[("block", 0, 8), ("len", 8, 4), ("device", 12, 2), ("flags", 14, 2)],
                _ => &[],
            };
            for (name, at, size) in own.iter().filter(|(_, at, size)| at + size <= len.min(NAME_MAX)) {
                self.add(&format!("{kind}.{name}"), address, value + at, *size);
            }
        }
    }

    /// Gives one of them another value, and makes the checksum right. Says what it did.
    pub fn change(&self, image: &mut Image, random: &mut Random) -> String {
        // Every name has the same chance, however many fields it stands for.
        let (name, all) = self.0.iter().nth(random.below(self.0.len() as u64) as usize).expect("there are some");
        let field = all[random.below(all.len() as u64) as usize];
        let mut bytes = [0; BLOCK_SIZE];
        image.read_at(field.block * BLOCK_SIZE as u64, &mut bytes);
        let mut block = Block::from_bytes(&bytes);
        let mut number = [0; 8];
        number[..field.len].copy_from_slice(&block.bytes()[field.at..field.at + field.len]);
        let old = u64::from_le_bytes(number);
        let most = u64::MAX >> (64 - 8 * field.len);
        let value = match random.below(5) {
            0 => old.wrapping_add(1),
            1 => old.wrapping_sub(1),
            2 => most - random.below(2),
            3 => EDGES[random.below(EDGES.len() as u64) as usize],
            _ => random.below(most),
        } & most;
        block.bytes_mut()[field.at..field.at + field.len].copy_from_slice(&value.to_le_bytes()[..field.len]);
        block.seal(block.sequence());
        image.write_at(field.block * BLOCK_SIZE as u64, block.bytes());
        format!("{name} in block {}: {old:#x} becomes {value:#x}", field.block)
    }
}

fn item_kind(key: Key) -> &'static str {
    match key.kind() {
        k if k == ItemKind::Inode as u8 => "inode",
        k if k == ItemKind::Symlink as u8 => "target",
        k if k == ItemKind::Dirent as u8 => "entry",
        k if k == ItemKind::Xattr as u8 => "attribute",
        k if k == ItemKind::Extent as u8 => "extent",
        _ => "orphan",
    }
}
