//! Damages images on purpose: any block, or any item of the tree, with checksums that are right
//! again.

use gpunvme_blockdev_testing::Image;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::geometry::{ANCHORS, STATE};
use gpunvme_layout::{Block, Geometry, Key, State, Superblock, node};

/// Leaves an image with one anchor, the newer one that it had earlier: as a power cut does that
/// tears the first anchor of a checkpoint; and damage, where a program wrote only one.
pub fn lose_anchors_since(earlier: &Image, image: &mut Image) {
    let [newer, other] = match ANCHORS.map(|address| read(earlier, address).sequence()) {
        [first, second] if first > second => ANCHORS,
        _ => [ANCHORS[1], ANCHORS[0]],
    };
    image.write_at(newer * BLOCK_SIZE as u64, read(earlier, newer).bytes());
    ruin(image, other);
}

/// Makes a block one that does not verify.
pub fn ruin(image: &mut Image, address: u64) {
    image.write_at(address * BLOCK_SIZE as u64 + 1000, b"not what was here");
}

/// An image under the knife. What it shows is what is at home: the volume has to be closed.
pub struct Surgeon {
    /// The image.
    pub image: Image,
    /// Its superblock.
    pub superblock: Superblock,
    /// Its layout.
    pub geometry: Geometry,
}

impl Surgeon {
    /// Takes an image.
    pub fn new(image: Image) -> Surgeon {
        let blocks = image.len() / BLOCK_SIZE as u64;
        let superblock = Superblock::decode(&read(&image, 0), 0, blocks).expect("an image of ours");
        Surgeon { geometry: superblock.geometry(), image, superblock }
    }

    /// A block.
    pub fn block(&self, address: u64) -> Block {
        read(&self.image, address)
    }

    /// Writes a block as it is.
    pub fn put(&mut self, address: u64, block: &Block) {
        self.image.write_at(address * BLOCK_SIZE as u64, block.bytes());
    }

    /// Makes a block unreadable.
    pub fn ruin(&mut self, address: u64) {
        ruin(&mut self.image, address);
    }

    /// Changes a block, and puts its checksum right.
    pub fn edit(&mut self, address: u64, change: impl FnOnce(&mut Block)) {
        let mut block = self.block(address);
        change(&mut block);
        block.seal(block.sequence());
        self.put(address, &block);
    }

    /// The state.
    pub fn state(&self) -> State {
        State::decode(&self.block(STATE), &self.geometry).expect("the state is sound")
    }

    /// Changes the state.
    pub fn edit_state(&mut self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        self.edit(STATE, |block| state.store(block));
    }

    /// The nodes that lead to a key, from the root to the leaf.
    pub fn path(&self, key: Key) -> Vec<u64> {
        let mut path = vec![self.state().root];
        loop {
            let block = self.block(*path.last().expect("it has the root"));
            if node::level(&block) == 0 {
                return path;
            }
            path.push(node::child(&block, node::child_slot(&block, key)));
        }
    }

    /// The leaf that has a key.
    pub fn leaf(&self, key: Key) -> u64 {
        *self.path(key).last().expect("it has the root")
    }

    /// All leaves, in the order of their keys.
    pub fn leaves(&self) -> Vec<u64> {
        let mut nodes = vec![self.state().root];
        for _ in 0..self.state().level {
            let children = nodes.iter().map(|address| self.block(*address));
            nodes = children
                .flat_map(|block| (0..node::count(&block)).map(move |slot| node::child(&block, slot)).collect::<Vec<_>>())
                .collect();
        }
        nodes
    }

    /// The value of an item.
    pub fn value(&self, key: Key) -> Vec<u8> {
        let leaf = self.block(self.leaf(key));
        let slot = node::search(&leaf, key).expect("the item is there");
        node::value(&leaf, slot).to_vec()
    }

    /// Changes the value of an item.
    pub fn edit_item(&mut self, key: Key, change: impl FnOnce(&mut [u8])) {
        self.edit(self.leaf(key), |leaf| {
            let slot = node::search(leaf, key).expect("the item is there");
            change(node::value_mut(leaf, slot));
        });
    }

    /// Takes an item out.
    pub fn remove(&mut self, key: Key) {
        self.edit(self.leaf(key), |leaf| {
            let slot = node::search(leaf, key).expect("the item is there");
            node::remove(leaf, slot);
        });
    }

    /// Puts an item in. There has to be room.
    pub fn insert(&mut self, key: Key, value: &[u8]) {
        self.edit(self.leaf(key), |leaf| {
            let slot = node::search(leaf, key).expect_err("the item is not there");
            node::leaf_insert(leaf, slot, key, value);
        });
    }

    /// Items from a key on to before another.
    pub fn items(&self, from: Key, to: Key) -> Vec<(Key, Vec<u8>)> {
        let mut found = Vec::new();
        self.collect(self.state().root, from, to, &mut found);
        found
    }

    fn collect(&self, address: u64, from: Key, to: Key, found: &mut Vec<(Key, Vec<u8>)>) {
        let block = self.block(address);
        for slot in 0..node::count(&block) {
            let key = node::key(&block, slot);
            if node::level(&block) > 0 {
                let next = (slot + 1 < node::count(&block)).then(|| node::key(&block, slot + 1));
                if (slot == 0 || key < to) && next.is_none_or(|next| next > from) {
                    self.collect(node::child(&block, slot), from, to, found);
                }
            } else if key >= from && key < to {
                found.push((key, node::value(&block, slot).to_vec()));
            }
        }
    }
}

fn read(image: &Image, address: u64) -> Block {
    let mut bytes = [0; BLOCK_SIZE];
    image.read_at(address * BLOCK_SIZE as u64, &mut bytes);
    Block::from_bytes(&bytes)
}
