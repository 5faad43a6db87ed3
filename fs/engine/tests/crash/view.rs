//! View of a volume without the content of its files: names, attributes, targets, extended
//! attributes. The journal holds every operation on these, so after a crash all of them have to be
//! as they were at one and the same moment.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use gpunvme_engine::Filesystem;
use gpunvme_layout::FileType;

/// All that is below a directory.
#[derive(Debug, Default, Clone, PartialEq, Eq, Hash)]
pub struct View {
    /// Entries by directory.
    pub names: BTreeMap<u64, BTreeMap<Vec<u8>, u64>>,
    /// Nodes by inode.
    pub nodes: BTreeMap<u64, Node>,
}

/// A node, but for content and times.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Node {
    mode: u32,
    owner: (u32, u32),
    nlink: u32,
    rdev: u32,
    target: Vec<u8>,
    /// Hash of each value.
    xattrs: BTreeMap<Vec<u8>, u64>,
}

impl View {
    /// The view of everything below a directory now. Only reads.
    pub fn of(fs: &Arc<Filesystem>, root: u64) -> View {
        let mut view = View::default();
        let mut todo = vec![root];
        while let Some(ino) = todo.pop() {
            if view.nodes.contains_key(&ino) {
                continue;
            }
            let volume = fs.volume();
            let inode = volume.wait(|| fs.attributes(ino)).expect("an entry names an inode").inode;
            let mut xattrs = BTreeMap::new();
            for name in volume.wait(|| fs.list_xattrs(ino)).expect("it was listed").split(|byte| *byte == 0) {
                if !name.is_empty() {
                    let value = volume.wait(|| fs.get_xattr(ino, name)).expect("the list has it");
                    xattrs.insert(name.to_vec(), hash(&value));
                }
            }
            let mut target = Vec::new();
            match inode.file_type() {
                FileType::Symlink => target = volume.wait(|| fs.read_link(ino)).expect("it is a link"),
                FileType::Directory => {
                    let entries = volume.wait(|| fs.read_dir(ino, 2, usize::MAX)).expect("it is a directory");
                    todo.extend(entries.iter().map(|e| e.ino));
                    view.names.insert(ino, entries.into_iter().map(|e| (e.name, e.ino)).collect());
                }
                _ => {}
            }
            let owner = (inode.uid, inode.gid);
            view.nodes.insert(ino, Node { mode: inode.mode, owner, nlink: inode.nlink, rdev: inode.rdev, target, xattrs });
        }
        view
    }

    /// The regular files.
    pub fn files(&self) -> Vec<u64> {
        let files = self.nodes.iter().filter(|(_, n)| FileType::from_mode(n.mode) == Some(FileType::Regular));
        files.map(|(ino, _)| *ino).collect()
    }

    /// A number that stands for all of it.
    pub fn hash(&self) -> u64 {
        hash(self)
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
