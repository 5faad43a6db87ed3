//! A dump of a volume's metadata, for those who look for a fault in it: an image of the volume
//! that has all blocks of metadata where they are, and nothing of the content of files.
//!
//! Nothing is copied as it is. Each block that verifies is written anew, with the fields that
//! have a meaning and no other bytes ([`scrub`]); values of attributes and targets of links are
//! blank, and names are others ([`alias`]), unless they are asked for. A block that does not
//! verify is replaced by one that fails in the same way, so that a check finds in the dump what
//! it finds in the volume.
//!
//! All blocks are taken that a mount or a check looks at: those with fixed places; of the
//! journal what recovery could read; nodes that a bitmap marks, at home or in the journal, and
//! nodes that another one points to; and where a bitmap is damaged, all nodes of its group.

mod alias;
mod block_set;
mod scrub;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Io, Region, Request};
use gpunvme_layout::features::READ_ONLY_COMPATIBLE;
use gpunvme_layout::geometry::{ANCHORS, CHUNK_BLOCKS, DESCRIPTORS_PER_BLOCK, GROUP_BLOCKS, STATE};
use gpunvme_layout::group::{self, ChunkKind, Descriptor};
use gpunvme_layout::{Anchor, BLOCK_SIZE, Block, BlockKind, Corrupt, Geometry, State, Superblock, node};

use crate::claim::reason;
use crate::random::random;
use alias::Aliases;
use block_set::BlockSet;
use scrub::Scrub;

/// Blocks that are read at once.
const PIECE: u64 = 256;
/// Blocks that cannot be read whose addresses are kept.
const LISTED_MAX: usize = 1000;

/// Result of a dump.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Blocks of metadata in the dump.
    pub blocks: u64,
    /// Blocks that are damaged, and that fail in the dump as they do in the volume.
    pub damaged: u64,
    /// Blocks that the device could not read, and the first of their addresses.
    pub unreadable: u64,
    /// See [`Summary::unreadable`].
    pub unreadable_at: Vec<u64>,
    /// Names that lie under another one's hash. With names replaced, a check of the dump does not
    /// find them.
    pub misplaced_names: u64,
}

/// What a dump does with the names of entries and attributes and with the label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// They stay.
    Kept,
    /// Others take their place, as long as they are and by chance.
    Replaced,
}

/// What a dump is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Blocks of the journal.
    Journal,
    /// Groups: their descriptors and bitmaps.
    Groups,
    /// Nodes of the tree.
    Nodes,
}

/// Called now and then with the stage, how much of it is done, and how much there is as far as is
/// known by now.
pub type Progress<'a> = &'a mut dyn FnMut(Stage, u64, u64);

/// Dumps the metadata of the volume on `device` by handing each block to `write`, with its address.
/// All other blocks of the dump are zeros, and it is as long as the device, in whole blocks.
///
/// # Errors
/// A text: the device carries no volume that this program knows, or `write` failed.
pub fn dump(
    device: &Arc<dyn BlockDevice>,
    names: Names,
    progress: Progress,
    write: impl FnMut(u64, &Block) -> io::Result<()>,
) -> Result<Summary, String> {
    let mut reader = Reader::new(device)?;
    let (superblock, good) = find_superblock(&mut reader)?;
    if superblock.unknown_ro_compat != 0 {
        let names = READ_ONLY_COMPATIBLE.names(superblock.unknown_ro_compat);
        return Err(format!("uses features that this program does not know, and cannot dump: {names}; use a newer one"));
    }
    let aliases = match names {
        Names::Kept => None,
        // Nothing knows this key afterwards.
        Names::Replaced => Some(Aliases::new(random()?)),
    };
    let mut dump = Dump {
        scrub: Scrub::new(&superblock, aliases),
        geometry: superblock.geometry(),
        superblock,
        reader,
        write,
        progress,
        damaged: 0,
        blocks: 0,
        wanted: BlockSet::default(),
        there: BlockSet::default(),
        imaged: BlockSet::default(),
    };
    dump.superblocks(&good)?;
    let anchors = dump.anchors()?;
    let journal = dump.journal(&anchors)?;
    dump.state()?;
    dump.groups(&journal)?;
    dump.nodes()?;
    let Dump { reader, scrub, damaged, blocks, .. } = dump;
    let (unreadable, unreadable_at) = (reader.failed, reader.failed_at);
    Ok(Summary { blocks, damaged, unreadable, unreadable_at, misplaced_names: scrub.misplaced })
}

/// Bitmaps in the journal, by the group that they are of.
type Bitmaps = BTreeMap<u64, Vec<Block>>;

struct Dump<'a, W> {
    superblock: Superblock,
    geometry: Geometry,
    scrub: Scrub,
    reader: Reader,
    write: W,
    progress: Progress<'a>,
    damaged: u64,
    blocks: u64,
    /// Nodes that are marked or pointed to.
    wanted: BlockSet,
    /// Nodes that are in the dump.
    there: BlockSet,
    /// Blocks with an image in the journal: what is at home does not count.
    imaged: BlockSet,
}

impl<W: FnMut(u64, &Block) -> io::Result<()>> Dump<'_, W> {
    fn put(&mut self, address: u64, block: &Block) -> Result<(), String> {
        self.blocks += 1;
        (self.write)(address, block).map_err(|error| error.to_string())
    }

    fn superblocks(&mut self, good: &Block) -> Result<(), String> {
        for address in self.geometry.superblocks() {
            let Some(block) = self.reader.block(address)? else { continue };
            let sound = block.verify(BlockKind::Superblock, address, &self.superblock.uuid).is_ok();
            self.damaged += u64::from(!sound);
            if let Some(scrubbed) = self.scrub.superblock(&block, address, good) {
                self.put(address, &scrubbed)?;
            }
        }
        Ok(())
    }

    /// A block with its own place, as it was read where it verifies.
    fn fixed(&mut self, kind: BlockKind, address: u64) -> Result<Option<Block>, String> {
        let Some(block) = self.reader.block(address)? else { return Ok(None) };
        self.home(block, kind, address)
    }

    /// Puts a block that was read from its home into the dump. Gives it back where it verifies.
    fn home(&mut self, block: Block, kind: BlockKind, address: u64) -> Result<Option<Block>, String> {
        if let Some(scrubbed) = self.scrub.at_home(&block, kind, address) {
            self.put(address, &scrubbed)?;
        }
        let sound = block.verify(kind, address, &self.superblock.uuid).is_ok();
        self.damaged += u64::from(!sound && !self.imaged.contains(address));
        Ok(sound.then_some(block))
    }

    /// The anchors, those that can be believed.
    fn anchors(&mut self) -> Result<Vec<Anchor>, String> {
        let mut anchors = Vec::new();
        for address in ANCHORS {
            let block = self.fixed(BlockKind::Anchor, address)?;
            let decode = |block: Block| Anchor::decode(&block, address, &self.superblock.uuid, &self.geometry).ok();
            anchors.extend(block.and_then(decode));
        }
        Ok(anchors)
    }

    fn state(&mut self) -> Result<(), String> {
        if let Some(block) = self.fixed(BlockKind::State, STATE)? {
            self.note_root(&block);
        }
        Ok(())
    }

    fn note_root(&mut self, block: &Block) {
        if let Ok(state) = State::decode(block, &self.geometry) {
            self.want(state.root);
        }
    }

    fn want(&mut self, address: u64) {
        if self.geometry.contains_data(address, 1) && address < self.reader.blocks {
            self.wanted.insert(address);
        }
    }

    /// The live part of the journal: all that verifies and is not from before it. Where an anchor
    /// is lost, anything may be live. Returns its bitmaps.
    fn journal(&mut self, anchors: &[Anchor]) -> Result<Bitmaps, String> {
        let live = match anchors {
            [one, other] => if one.generation > other.generation { one } else { other }.sequence,
            _ => 0,
        };
        let mut bitmaps = Bitmaps::new();
        let (start, len) = (self.geometry.journal, self.geometry.journal_blocks);
        for piece in pieces(start..start + len) {
            (self.progress)(Stage::Journal, piece.start - start, len);
            for (address, block) in self.reader.read(piece)? {
                let images = [BlockKind::State, BlockKind::Descriptors, BlockKind::Bitmap, BlockKind::Node];
                let image = images.into_iter().find(|kind| block.expect(*kind).is_ok());
                let (kind, home) = match image {
                    Some(kind) => (kind, block.address()),
                    None => (BlockKind::Journal, address),
                };
                if block.sequence() < live || block.verify(kind, home, &self.superblock.uuid).is_err() {
                    continue;
                }
                if kind != BlockKind::Journal {
                    self.imaged.insert(home);
                }
                match kind {
                    BlockKind::State => self.note_root(&block),
                    BlockKind::Node => self.note_children(&block),
                    BlockKind::Bitmap => {
                        if let Some(number) = self.geometry.bitmap_group(home) {
                            bitmaps.entry(number).or_default().push(block.clone());
                        }
                    }
                    _ => {}
                }
                let scrubbed = self.scrub.sound(&block, kind);
                self.put(address, &scrubbed)?;
            }
        }
        Ok(bitmaps)
    }

    /// Descriptors and bitmaps, and which nodes these mark.
    fn groups(&mut self, journal: &Bitmaps) -> Result<(), String> {
        let mut descriptors = None;
        // A device that was truncated may have few of them.
        let there = (0..self.geometry.groups).take_while(|number| self.geometry.bitmap(*number) < self.reader.blocks);
        for number in there.collect::<Vec<_>>() {
            (self.progress)(Stage::Groups, number, self.geometry.groups);
            let (address, index) = self.geometry.descriptor(number);
            if index == 0 {
                descriptors = self.fixed(BlockKind::Descriptors, address)?;
            }
            let Some(block) = self.reader.block(self.geometry.bitmap(number))? else { continue };
            let written = descriptors.as_ref().is_none_or(|block| Descriptor::load(block, index).initialized);
            // Where nothing was written yet, an older volume may have left anything.
            let bitmap = if written { self.home(block, BlockKind::Bitmap, self.geometry.bitmap(number))? } else { None };
            for bitmap in bitmap.iter().chain(journal.get(&number).into_iter().flatten()) {
                self.note_marked(number, bitmap);
            }
            if written && bitmap.is_none() {
                self.search(number)?;
            }
        }
        Ok(())
    }

    fn note_marked(&mut self, number: u64, bitmap: &Block) {
        let start = self.geometry.group_start(number);
        for chunk in 0..self.geometry.group_chunks(number) {
            if group::kind(bitmap, chunk) == ChunkKind::Metadata {
                let blocks = chunk * CHUNK_BLOCKS..(chunk + 1) * CHUNK_BLOCKS;
                blocks.filter(|at| group::is_used(bitmap, *at)).for_each(|at| self.wanted.insert(start + at));
            }
        }
    }

    /// Puts into the dump what is a node in a group of which nothing else is known.
    fn search(&mut self, number: u64) -> Result<(), String> {
        let start = self.geometry.group_start(number);
        for piece in pieces(start..start + self.geometry.group_chunks(number) * CHUNK_BLOCKS) {
            for (address, block) in self.reader.read(piece)? {
                if block.verify(BlockKind::Node, address, &self.superblock.uuid).is_ok() {
                    self.there.insert(address);
                    self.note_children(&block);
                    self.home(block, BlockKind::Node, address)?;
                }
            }
        }
        Ok(())
    }

    /// Puts all nodes into the dump that are wanted, and those that they point to.
    fn nodes(&mut self) -> Result<(), String> {
        let mut done = 0;
        loop {
            let left = self.wanted.without(&self.there);
            if left.is_empty() {
                return Ok(());
            }
            let known = done + left.len() as u64;
            for run in left.chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(PIECE as usize)) {
                (self.progress)(Stage::Nodes, done, known);
                done += run.len() as u64;
                run.iter().for_each(|address| self.there.insert(*address));
                for (address, block) in self.reader.read(run[0]..run[run.len() - 1] + 1)? {
                    if let Some(block) = self.home(block, BlockKind::Node, address)? {
                        self.note_children(&block);
                    }
                }
            }
        }
    }

    fn note_children(&mut self, block: &Block) {
        if node::level(block) > 0 && node::check(block).is_ok() {
            (0..node::count(block)).for_each(|slot| self.want(node::child(block, slot)));
        }
    }
}

/// The superblock that counts for a check: the first, else the one in the last block, else the one
/// before the journal. How many blocks the device has does not matter: it may have been truncated.
fn find_superblock(reader: &mut Reader) -> Result<(Superblock, Block), String> {
    let mut first = None;
    for address in [Superblock::ADDRESS, reader.blocks - 1] {
        let Some(block) = reader.block(address)? else { continue };
        match Superblock::decode(&block, address, u64::MAX) {
            Ok(superblock) => return Ok((superblock, block)),
            Err(error) => {
                let why = match error {
                    Corrupt::Superblock(why) => why,
                    error => error.to_string(),
                };
                // An intact superblock that says something else is not overruled by a copy.
                if Superblock::is_intact(&block, address) {
                    return Err(why);
                }
                first = first.or(Some(why));
            }
        }
    }
    // The middle one lies behind the bitmaps, and how many those are, only a superblock says.
    let groups = reader.blocks.div_ceil(GROUP_BLOCKS);
    let end = (4 + groups.div_ceil(DESCRIPTORS_PER_BLOCK) + groups + 1).min(reader.blocks);
    for piece in pieces(4.min(end)..end) {
        for (address, block) in reader.read(piece)? {
            if let Ok(superblock) = Superblock::decode(&block, address, u64::MAX) {
                return Ok((superblock, block));
            }
        }
    }
    Err(first.unwrap_or_else(|| "no superblock can be read".to_owned()))
}

/// Parts of a range that are read at once.
fn pieces(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    range.clone().step_by(PIECE as usize).map(move |start| start..(start + PIECE).min(range.end))
}

/// Reads blocks, and notes those that cannot be read.
struct Reader {
    device: Arc<dyn BlockDevice>,
    io: Arc<Io>,
    region: Arc<Region>,
    /// Blocks of the device.
    blocks: u64,
    failed: u64,
    failed_at: Vec<u64>,
}

impl Reader {
    fn new(device: &Arc<dyn BlockDevice>) -> Result<Reader, String> {
        let failed = |error| reason(device.name(), &error);
        let len = device.geometry().len.get();
        let blocks = len / BLOCK_SIZE as u64;
        if blocks == 0 {
            return Err(format!("{len} bytes are too few for a volume"));
        }
        let io = Io::inline(Arc::clone(device)).map_err(failed)?;
        let region = Region::allocate(PIECE as usize * BLOCK_SIZE).map_err(failed)?;
        Ok(Reader { device: Arc::clone(device), io, region, blocks, failed: 0, failed_at: Vec::new() })
    }

    fn block(&mut self, address: u64) -> Result<Option<Block>, String> {
        Ok(self.read(address..address + 1)?.pop().map(|(_, block)| block))
    }

    /// Those of at most [`PIECE`] blocks that the device has and can read.
    fn read(&mut self, range: Range<u64>) -> Result<Vec<(u64, Block)>, String> {
        let there = range.start.min(self.blocks)..range.end.min(self.blocks);
        let blocks = there.end - there.start;
        if blocks > 0 && self.fetch(&there) {
            return there.zip(0..).map(|(address, at)| Ok((address, self.fetched(at)?))).collect();
        }
        let mut read = Vec::new();
        for address in there {
            // Of several, one may be what fails.
            if blocks > 1 && self.fetch(&(address..address + 1)) {
                read.push((address, self.fetched(0)?));
            } else {
                self.fail(address);
            }
        }
        Ok(read)
    }

    fn fetch(&self, range: &Range<u64>) -> bool {
        let len = (range.end - range.start) as usize * BLOCK_SIZE;
        self.io.run([Request::read(Geometry::byte(range.start), [self.region.span(0..len)])]).is_ok()
    }

    fn fetched(&self, at: usize) -> Result<Block, String> {
        let mut bytes = [0; BLOCK_SIZE];
        self.region.read_at(at * BLOCK_SIZE, &mut bytes).map_err(|error| reason(self.device.name(), &error))?;
        Ok(Block::from_bytes(&bytes))
    }

    fn fail(&mut self, address: u64) {
        self.failed += 1;
        if self.failed_at.len() < LISTED_MAX {
            self.failed_at.push(address);
        }
    }
}
