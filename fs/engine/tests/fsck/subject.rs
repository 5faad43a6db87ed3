//! The volume that is damaged: a bit of everything, and what is in it by path.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use gpunvme_blockdev::BlockDevice;
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use gpunvme_engine::Filesystem;
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_layout::{FileType, Timestamp};

use crate::common::{Random, make, open};

pub const ROOT: u64 = 1;
pub const BYTES: u64 = 48 << 20;
/// Files in the directory `many`: enough of them, with long names, for a tree of three levels.
pub const MANY: u64 = 2600;
pub const NOW: Timestamp = Timestamp { seconds: 9, nanoseconds: 0 };
pub const WHO: Context = Context { uid: 3, gid: 4, now: NOW };

/// Something in a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Thing {
    Directory,
    File(Vec<u8>),
    Link(Vec<u8>),
    Other,
}

/// Everything below a directory, by path, with its attributes.
pub type Contents = BTreeMap<String, (Thing, Vec<Vec<u8>>)>;

/// A closed volume with items of every kind, its contents, and the inodes of some of them.
pub struct Subject {
    /// The volume.
    pub image: Image,
    /// Its contents.
    pub contents: Contents,
    /// Inodes by name.
    pub inodes: BTreeMap<String, u64>,
}

pub fn subject() -> &'static Subject {
    static SUBJECT: OnceLock<Subject> = OnceLock::new();
    SUBJECT.get_or_init(|| {
        let memory = MemoryDevice::new(BYTES);
        let device: Arc<dyn BlockDevice> = memory.clone();
        make(&device);
        let fs = open(&device).expect("a new volume can be opened");
        let create = |dir: u64, name: &str, mode: u32, target: &[u8]| {
            let new = NewNode { mode, umask: 0, rdev: 0, target };
            fs.wait(|| fs.create(&WHO, dir, name.as_bytes(), &new)).expect("there is room").ino
        };
        let file = |dir: u64, name: &str, content: &[u8]| {
            let ino = create(dir, name, 0o100644, &[]);
            fs.wait(|| fs.write(ino, 0, content, NOW)).expect("there is room");
            ino
        };
        let mut random = Random(5);
        // Some numbers are not in use any more.
        for _ in 0..10 {
            let gone = create(ROOT, "gone", 0o100644, &[]);
            fs.wait(|| fs.unlink(&WHO, ROOT, b"gone")).expect("it is there");
            while fs.wait(|| fs.reap_step(gone)).expect("nothing fails") {}
        }
        let one = create(ROOT, "one", 0o040755, &[]);
        let two = create(one, "two", 0o040755, &[]);
        let three = create(two, "three", 0o040755, &[]);
        file(one, "small", b"a few bytes");
        let twice = file(three, "twice", &random.bytes(70_000));
        fs.wait(|| fs.link(&WHO, twice, one, b"also")).expect("there is room");
        create(one, "short", 0o120777, b"somewhere/else");
        create(one, "long", 0o120777, &random.bytes(3000));
        create(one, "pipe", 0o010644, &[]);
        let marked = file(one, "marked", b"with attributes");
        for (name, len) in [("user.small", 10), ("user.large", 5000)] {
            let value = random.bytes(len);
            fs.wait(|| fs.set_xattr(&WHO, marked, name.as_bytes(), &value, false, false)).expect("there is room");
        }
        // Two files that grow in turns lie in pieces.
        let pieces = [file(one, "left", b"l"), file(one, "right", b"r")];
        for at in 0..6u64 {
            for ino in pieces {
                let data = random.bytes(20_000);
                fs.wait(|| fs.write(ino, at * 40_000, &data, NOW)).expect("there is room");
                fs.sync_file(ino).expect("nothing fails");
            }
        }
        let many = create(ROOT, "many", 0o040755, &[]);
        for n in 0..MANY {
            let name = format!("{n:04}{}", "-".repeat(200));
            if n % 100 == 0 {
                file(many, &name, &random.bytes(5000))
            } else {
                create(many, &name, 0o100644, &[])
            };
        }
        fs.close().expect("nothing fails");
        let contents = contents(&fs);
        let mut inodes = BTreeMap::new();
        for (path, dir, name) in [
            ("one", ROOT, "one"),
            ("two", one, "two"),
            ("three", two, "three"),
            ("small", one, "small"),
            ("twice", three, "twice"),
            ("short", one, "short"),
            ("long", one, "long"),
            ("marked", one, "marked"),
            ("left", one, "left"),
            ("right", one, "right"),
            ("many", ROOT, "many"),
        ] {
            inodes.insert(path.to_owned(), fs.wait(|| fs.lookup(dir, name.as_bytes())).expect("it was made").ino);
        }
        Subject { image: memory.snapshot(), contents, inodes }
    })
}

pub fn contents(fs: &Arc<Filesystem>) -> Contents {
    let mut found = Contents::new();
    let mut todo = vec![(ROOT, String::new())];
    while let Some((dir, path)) = todo.pop() {
        for entry in fs.wait(|| fs.read_dir(dir, 2, usize::MAX)).expect("the directory can be read") {
            let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
            let inode = fs.wait(|| fs.attributes(entry.ino)).expect("the inode is there").inode;
            let thing = match entry.file_type {
                FileType::Directory => {
                    todo.push((entry.ino, path.clone()));
                    Thing::Directory
                }
                FileType::Symlink => Thing::Link(fs.wait(|| fs.read_link(entry.ino)).expect("the target is there")),
                FileType::Regular => Thing::File(fs.read(entry.ino, 0, inode.size as usize + 1).expect("the file can be read")),
                _ => Thing::Other,
            };
            let names = fs.wait(|| fs.list_xattrs(entry.ino)).expect("attributes can be listed");
            let names = names.split(|b| *b == 0).filter(|name| !name.is_empty());
            let values = names.map(|name| fs.wait(|| fs.get_xattr(entry.ino, name)).expect("it was listed"));
            found.insert(path, (thing, values.collect()));
        }
    }
    found
}
