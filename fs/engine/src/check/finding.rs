//! Findings of a check: kind, place, description, and how each can be mended.

use std::collections::BTreeMap;

use gpunvme_layout::{FileType, Key};

/// Kinds of damage. Programs know each by [`Kind::name`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A copy of the superblock is damaged, or differs from the one that counts.
    Superblock,
    /// Something else lies where the first superblock was: another filesystem may have been made.
    Foreign,
    /// An anchor is damaged.
    Anchor,
    /// The journal cannot be replayed to its end.
    Journal,
    /// The state block is damaged.
    State,
    /// A counter of the state block is wrong.
    Counter,
    /// A node of the tree cannot be read, or is not where its parent says.
    Node,
    /// A key lies in a node that does not cover it.
    Order,
    /// An item of a kind that its inode cannot have, or that there is not.
    Item,
    /// Items without an inode, or with one that makes no sense.
    Inode,
    /// Fields of an inode that have to be zero.
    Reserved,
    /// The type of an inode is not that of its content.
    FileType,
    /// The pieces of a symbolic link's target do not add up.
    Symlink,
    /// The pieces of an extended attribute do not add up.
    Xattr,
    /// An extended attribute lies under another name's hash.
    XattrHash,
    /// An extent is impossible.
    Extent,
    /// Extents of a file cover each other.
    ExtentOverlap,
    /// An inode counts other blocks than its extents have.
    Blocks,
    /// A file has written blocks beyond its end.
    FileSize,
    /// A directory counts other entries than it has.
    DirectorySize,
    /// A directory entry makes no sense.
    Entry,
    /// A directory entry lies under another name's hash.
    EntryHash,
    /// A name is twice in a directory.
    EntryDuplicate,
    /// A directory entry names an inode that is not there.
    EntryDangling,
    /// A directory entry says another type than its inode.
    EntryType,
    /// A directory has a second name, or the root directory has one.
    DirectoryLink,
    /// A link count is wrong.
    LinkCount,
    /// A directory names another parent than the one it is in.
    Parent,
    /// Directories lie in one another, and cannot be reached from the root.
    Cycle,
    /// An inode has no name.
    Lost,
    /// An orphan item without an inode.
    Orphan,
    /// A bitmap block is damaged.
    Bitmap,
    /// A block of descriptors is damaged.
    Descriptors,
    /// A descriptor does not agree with its bitmap.
    Descriptor,
    /// Blocks are in use and marked free.
    Unmarked,
    /// Blocks are marked in use, and are not.
    Leaked,
    /// A chunk is of another kind than what it holds.
    ChunkKind,
    /// Blocks have two owners.
    Shared,
    /// Data lies in a chunk of metadata.
    Misplaced,
}

impl Kind {
    /// The name that programs know it by; it does not change from version to version.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Superblock => "superblock",
            Kind::Foreign => "foreign",
            Kind::Anchor => "anchor",
            Kind::Journal => "journal",
            Kind::State => "state",
            Kind::Counter => "counter",
            Kind::Node => "node",
            Kind::Order => "order",
            Kind::Item => "item",
            Kind::Inode => "inode",
            Kind::Reserved => "reserved",
            Kind::FileType => "file-type",
            Kind::Symlink => "symlink",
            Kind::Xattr => "xattr",
            Kind::XattrHash => "xattr-hash",
            Kind::Extent => "extent",
            Kind::ExtentOverlap => "extent-overlap",
            Kind::Blocks => "blocks",
            Kind::FileSize => "file-size",
            Kind::DirectorySize => "directory-size",
            Kind::Entry => "entry",
            Kind::EntryHash => "entry-hash",
            Kind::EntryDuplicate => "entry-duplicate",
            Kind::EntryDangling => "entry-dangling",
            Kind::EntryType => "entry-type",
            Kind::DirectoryLink => "directory-link",
            Kind::LinkCount => "link-count",
            Kind::Parent => "parent",
            Kind::Cycle => "cycle",
            Kind::Lost => "lost",
            Kind::Orphan => "orphan",
            Kind::Bitmap => "bitmap",
            Kind::Descriptors => "descriptors",
            Kind::Descriptor => "descriptor",
            Kind::Unmarked => "unmarked",
            Kind::Leaked => "leaked",
            Kind::ChunkKind => "chunk-kind",
            Kind::Shared => "shared",
            Kind::Misplaced => "misplaced",
        }
    }

    /// Whether it concerns the shape of the tree: as long as it is there, not all items are known.
    pub(crate) fn is_shape(self) -> bool {
        matches!(self, Kind::State | Kind::Node | Kind::Order)
    }

    /// Whether it concerns what a group says of its blocks: a group is mended as a whole, or not
    /// at all.
    pub(crate) fn is_space(self) -> bool {
        self == Kind::Leaked || self.misleads_allocator()
    }

    /// Whether the allocator could give out what is in use.
    pub(crate) fn misleads_allocator(self) -> bool {
        matches!(self, Kind::Bitmap | Kind::Descriptors | Kind::Descriptor | Kind::Unmarked | Kind::ChunkKind)
    }

    /// Whether there is one right answer that loses nothing, so that it can be mended without
    /// asking (`-p`).
    pub fn is_safe(self) -> bool {
        use Kind::*;
        matches!(
            self,
            Superblock
                | Anchor
                | Counter
                | Reserved
                | XattrHash
                | Blocks
                | DirectorySize
                | EntryHash
                | EntryType
                | LinkCount
                | Parent
                | Orphan
                | Bitmap
                | Descriptors
                | Descriptor
                | Unmarked
                | Leaked
                | ChunkKind
        )
    }
}

/// Where something was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// A block of the volume.
    Block(u64),
    /// An allocation group.
    Group(u64),
    /// An inode.
    Inode(u64),
    /// The entry of a directory at an offset.
    Entry(u64, u64),
    /// The state of the volume.
    State,
    /// The journal.
    Journal,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Block(address) => write!(f, "block {address}"),
            Place::Group(group) => write!(f, "group {group}"),
            Place::Inode(ino) => write!(f, "inode {ino}"),
            Place::Entry(dir, offset) => write!(f, "directory {dir}, entry {offset:#x}"),
            Place::State => f.write_str("state"),
            Place::Journal => f.write_str("journal"),
        }
    }
}

/// How a finding is mended, where that is a change of items. Everything else is mended where it is
/// found: the fixed blocks by [`super::Fsck`], space by [`super::space`], the shape of the tree by
/// [`super::rebuild`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fix {
    /// No change of items.
    Elsewhere,
    /// The item goes.
    Remove(Key),
    /// All items of the inode go.
    RemoveAll(u64),
    /// The attribute whose first piece has that offset goes.
    RemoveXattr(u64, u64),
    /// The attribute is stored again under the hash of its name.
    RehashXattr(u64, u64),
    /// The link count becomes this.
    Links(u64, u32),
    /// The entries of a directory become this.
    Entries(u64, u64),
    /// The count of blocks becomes this.
    Blocks(u64, u64),
    /// The file ends behind its last written block.
    Grow(u64),
    /// The parent becomes this.
    Parent(u64, u64),
    /// The type becomes this.
    FileType(u64, FileType),
    /// The inode is stored again as it was understood.
    Store(u64),
    /// The inode is made new, with what its stored form still says.
    Rebuild(u64, FileType),
    /// The target of the symbolic link becomes its first pieces.
    Symlink(u64),
    /// The front of the extent at this offset goes, up to the second offset.
    CutExtent(u64, u64, u64),
    /// The part of the inode's extents that lies in these blocks gets blocks of its own.
    Unshare {
        /// The inode.
        ino: u64,
        /// First block.
        block: u64,
        /// Number of blocks.
        len: u64,
        /// Whether their content is copied to the new blocks; else a hole takes their place.
        copy: bool,
        /// The inode has them twice: the second part of the file that does is meant.
        second: bool,
    },
    /// The entry is made sense of, renamed, or removed.
    MendEntry(Key),
    /// The entry says this type.
    EntryType(Key, FileType),
    /// The entry is stored again under the hash of its name.
    RehashEntry(Key),
    /// The entry gets another name.
    RenameEntry(Key),
    /// The inode gets a name in lost+found, and this link count.
    Connect(u64, u32),
    /// The volume counts so many inodes.
    Inodes(u64),
    /// The next inode number to be given out.
    NextInode(u64),
}

/// A violation of the format's invariants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Kind of the damage.
    pub kind: Kind,
    /// Where it is.
    pub place: Place,
    /// Description of the damage.
    pub what: String,
    pub(crate) fix: Fix,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// Everything that was found: all of it counted, the first of it listed.
#[derive(Debug, Default, Clone)]
pub struct Findings {
    /// Findings in the order in which they came up, at most as many as were asked for.
    pub list: Vec<Finding>,
    /// How many there are of each kind, those that are not listed counted, too.
    pub counts: BTreeMap<Kind, u64>,
    limit: usize,
}

impl Findings {
    pub(crate) fn new(limit: usize) -> Findings {
        Findings { list: Vec::new(), counts: BTreeMap::new(), limit }
    }

    /// How many there are.
    pub fn total(&self) -> u64 {
        self.counts.values().sum()
    }

    /// How many there are of each kind that are not listed.
    pub fn unlisted(&self) -> BTreeMap<Kind, u64> {
        let mut unlisted = self.counts.clone();
        for finding in &self.list {
            unlisted.entry(finding.kind).and_modify(|count| *count -= 1);
        }
        unlisted.retain(|_, count| *count > 0);
        unlisted
    }

    pub(crate) fn add(&mut self, kind: Kind, place: Place, fix: Fix, what: impl FnOnce() -> String) {
        self.count(kind, 1);
        if self.list.len() < self.limit {
            self.list.push(Finding { kind, place, what: what(), fix });
        }
    }

    pub(super) fn count(&mut self, kind: Kind, more: u64) {
        if more > 0 {
            *self.counts.entry(kind).or_default() += more;
        }
    }

    /// Lists what is counted already. Returns whether there was room.
    pub(super) fn keep(&mut self, finding: Finding) -> bool {
        let room = self.list.len() < self.limit;
        if room {
            self.list.push(finding);
        }
        room
    }

    /// Forgets findings of other kinds.
    pub(super) fn retain(&mut self, is_left: impl Fn(Kind) -> bool) {
        self.list.retain(|finding| is_left(finding.kind));
        self.counts.retain(|kind, _| is_left(*kind));
    }

    /// Whether the shape of the tree is damaged, so that not all of its items are known.
    pub(crate) fn tree_is_broken(&self) -> bool {
        self.counts.keys().any(|kind| kind.is_shape())
    }
}
