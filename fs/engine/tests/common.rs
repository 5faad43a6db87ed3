//! Shared parts of the engine's tests: random workloads, a model of a filesystem, and opening one
//! on any device.

use std::collections::BTreeMap;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_engine::check::check;
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Inline, Options, Settling, Spawn};
use gpunvme_engine::error::FsError;
use gpunvme_engine::volume::{Context, NewNode, RenameMode, SetAttributes};
use gpunvme_engine::{FormatOptions, VolumeOptions, format};
use gpunvme_layout::Timestamp;

/// The root directory.
pub const ROOT: u64 = 1;

/// A small generator of pseudo-random numbers (splitmix64): the same seed gives the same workload
/// everywhere.
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    /// Bytes that differ from call to call.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let first = self.below(255) as u8 + 1;
        (0..len).map(|i| first.wrapping_add((i / 7) as u8).max(1)).collect()
    }
}

/// The first byte in which two contents differ, also by one that is in one of them only. They are
/// compared as a whole first, which is much faster than byte by byte.
pub fn difference(found: &[u8], expected: &[u8]) -> Option<usize> {
    let shorter = || found.len().min(expected.len());
    (found != expected).then(|| found.iter().zip(expected).position(|(a, b)| a != b).unwrap_or_else(shorter))
}

/// Formats a device.
pub fn make(device: &Arc<dyn BlockDevice>) {
    let options = FormatOptions {
        label: "test".into(),
        uuid: [7; 16],
        hash_key: [9; 16],
        now: Timestamp { seconds: 1, nanoseconds: 0 },
        owner: (0, 0),
    };
    format(device, &options).expect("the device can be formatted");
}

/// Opens the filesystem on a device, with little memory, so that everything is evicted and written
/// out often.
pub fn open(device: &Arc<dyn BlockDevice>) -> Result<Arc<Filesystem>, FsError> {
    let io = Io::inline(device.clone())?;
    let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 20, discard: false }, write_buffer: 4 << 20 };
    Filesystem::open(io, options, Arc::new(Inline))
}

/// One thread for what completions cannot do themselves.
pub struct Worker(Sender<Box<dyn FnOnce() + Send>>);

impl Worker {
    /// Starts it; it ends with the filesystem.
    pub fn start() -> Arc<Worker> {
        let (sender, receiver) = channel::<Box<dyn FnOnce() + Send>>();
        std::thread::spawn(move || receiver.into_iter().for_each(|task| task()));
        Arc::new(Worker(sender))
    }
}

impl Spawn for Worker {
    fn spawn(&self, task: Box<dyn FnOnce() + Send>) {
        self.0.send(task).expect("the worker runs as long as the filesystem");
    }
}

/// Completes requests on the thread that waits for them.
struct Stepping(OnceLock<Arc<Io>>);

impl Spawn for Stepping {
    fn spawn(&self, task: Box<dyn FnOnce() + Send>) {
        task();
    }

    fn help(&self) -> bool {
        self.0.get().is_some_and(|io| io.step())
    }
}

/// Opens a filesystem whose requests complete only when a thread waits for them. `next` gets the
/// number of batches in flight and chooses the one that completes.
pub fn stepped_by(device: &Arc<dyn BlockDevice>, next: impl Fn(usize) -> usize + Send + Sync + 'static) -> Arc<Filesystem> {
    let io = Io::stepped(device.clone(), next);
    let spawn = Arc::new(Stepping(OnceLock::new()));
    assert!(spawn.0.set(io.clone()).is_ok());
    let options = Options { volume: VolumeOptions { read_only: false, cache: 1 << 20, discard: false }, write_buffer: 8 << 20 };
    Filesystem::open(io, options, spawn).expect("the volume can be opened")
}

/// Fails with what the checker finds.
pub fn assert_sound(fs: &Filesystem, what: &str) {
    let findings = check(fs.volume()).expect("the device can be read");
    assert!(findings.is_empty(), "{what}: {findings:#?}");
}

/// A node of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// Entries by name.
    Dir(BTreeMap<Vec<u8>, u64>),
    /// Content.
    File(Vec<u8>),
    /// Target.
    Link(Vec<u8>),
}

/// Expected content of a filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Nodes by inode number.
    pub nodes: BTreeMap<u64, Node>,
    /// Extended attributes by inode and name.
    pub xattrs: BTreeMap<(u64, Vec<u8>), Vec<u8>>,
    /// Time of modification that was set explicitly.
    pub times: BTreeMap<u64, Timestamp>,
}

impl Model {
    /// All directories.
    pub fn dirs(&self) -> Vec<u64> {
        self.nodes.iter().filter(|(_, n)| matches!(n, Node::Dir(_))).map(|(ino, _)| *ino).collect()
    }

    /// Entries of a directory.
    pub fn entries(&mut self, dir: u64) -> &mut BTreeMap<Vec<u8>, u64> {
        match self.nodes.get_mut(&dir) {
            Some(Node::Dir(entries)) => entries,
            _ => panic!("{dir} is a directory"),
        }
    }

    fn links(&self, ino: u64) -> usize {
        let dirs = self.nodes.values().filter_map(|n| if let Node::Dir(entries) = n { Some(entries) } else { None });
        dirs.flat_map(BTreeMap::values).filter(|i| **i == ino).count()
    }

    fn forget_unless_linked(&mut self, ino: u64) {
        if self.links(ino) == 0 {
            self.nodes.remove(&ino);
            self.xattrs.retain(|(i, _), _| *i != ino);
            self.times.remove(&ino);
        }
    }

    fn file(&mut self, ino: u64) -> &mut Vec<u8> {
        self.times.remove(&ino);
        match self.nodes.get_mut(&ino) {
            Some(Node::File(content)) => content,
            _ => panic!("{ino} is a file"),
        }
    }

    /// Whether `dir` is `above` or below it.
    fn is_within(&self, dir: u64, above: u64) -> bool {
        if dir == above {
            return true;
        }
        match &self.nodes[&above] {
            Node::Dir(entries) => {
                entries.values().any(|child| matches!(self.nodes[child], Node::Dir(_)) && self.is_within(dir, *child))
            }
            _ => false,
        }
    }
}

/// A filesystem and its model, changed together.
pub struct Pair {
    /// The filesystem under test.
    pub fs: Arc<Filesystem>,
    /// Its expected content.
    pub model: Model,
    /// Seconds, for times that differ.
    pub clock: i64,
    /// Largest offset of a write.
    pub reach: u64,
}

impl Pair {
    /// A fresh filesystem and the model of one.
    pub fn new(fs: Arc<Filesystem>) -> Pair {
        Pair::below(fs, ROOT)
    }

    /// A pair whose workload stays below one empty directory.
    pub fn below(fs: Arc<Filesystem>, dir: u64) -> Pair {
        let nodes = BTreeMap::from([(dir, Node::Dir(BTreeMap::new()))]);
        let model = Model { nodes, xattrs: BTreeMap::new(), times: BTreeMap::new() };
        Pair { fs, model, clock: 100, reach: 3 << 20 }
    }

    fn context(&mut self) -> Context {
        self.clock += 1;
        Context { uid: 5, gid: 6, now: Timestamp { seconds: self.clock, nanoseconds: 7 } }
    }

    fn pick(&self, random: &mut Random, want: fn(&Node) -> bool) -> Option<u64> {
        let all: Vec<u64> = self.model.nodes.iter().filter(|(_, n)| want(n)).map(|(ino, _)| *ino).collect();
        if all.is_empty() { None } else { Some(all[random.below(all.len() as u64) as usize]) }
    }

    fn name(random: &mut Random) -> Vec<u8> {
        // Few names, so that they meet; some long, so that nodes split.
        let n = random.below(40);
        if n.is_multiple_of(8) { format!("{n}-{}", "x".repeat(200)).into_bytes() } else { n.to_string().into_bytes() }
    }

    /// Does one random thing to both, and compares what comes back.
    pub fn step(&mut self, random: &mut Random) {
        let context = self.context();
        let fs = self.fs.clone();
        let dirs = self.model.dirs();
        let dir = dirs[random.below(dirs.len() as u64) as usize];
        let name = Self::name(random);
        let taken = self.model.entries(dir).get(&name).copied();
        match random.below(100) {
            0..16 => {
                let (mode, target, node) = match random.below(4) {
                    0 => (0o040755, vec![], Node::Dir(BTreeMap::new())),
                    1 => {
                        let len = random.below(4000) as usize + 1;
                        let target = random.bytes(len);
                        (0o120777, target.clone(), Node::Link(target))
                    }
                    _ => (0o100644, vec![], Node::File(vec![])),
                };
                let new = NewNode { mode, umask: 0o022, rdev: 0, target: &target };
                match fs.wait(|| fs.create(&context, dir, &name, &new)) {
                    Ok(attributes) => {
                        assert_eq!(taken, None);
                        self.model.entries(dir).insert(name, attributes.ino);
                        self.model.nodes.insert(attributes.ino, node);
                    }
                    Err(FsError::Exists) => assert!(taken.is_some()),
                    Err(FsError::NoSpace) => {}
                    Err(error) => panic!("create: {error}"),
                }
            }
            16..46 => {
                let Some(ino) = self.pick(random, |n| matches!(n, Node::File(_))) else { return };
                let size = self.model.file(ino).len() as u64;
                let offset = match random.below(4) {
                    0 => size,
                    1 => random.below(self.reach),
                    _ => random.below(size + 5000),
                };
                let len = match random.below(5) {
                    0 => random.below(600_000),
                    _ => random.below(9000),
                } as usize;
                let data = random.bytes(len);
                match fs.wait(|| fs.write(ino, offset, &data, context.now)) {
                    Ok(()) if len > 0 => {
                        let content = self.model.file(ino);
                        let end = offset as usize + len;
                        content.resize(content.len().max(end), 0);
                        content[offset as usize..end].copy_from_slice(&data);
                    }
                    Ok(()) | Err(FsError::NoSpace) => {}
                    Err(error) => panic!("write: {error}"),
                }
            }
            46..54 => {
                let Some(ino) = self.pick(random, |n| matches!(n, Node::File(_))) else { return };
                let size = self.model.file(ino).len() as u64;
                let new = match random.below(3) {
                    0 => random.below(self.reach),
                    1 => 0,
                    _ => random.below(size + 1),
                };
                match fs.wait(|| fs.set_size(&context, ino, new)) {
                    Ok(attributes) => {
                        assert_eq!(attributes.inode.size, new);
                        self.model.file(ino).resize(new as usize, 0);
                    }
                    Err(FsError::NoSpace) => {}
                    Err(error) => panic!("truncate: {error}"),
                }
            }
            54..62 => {
                let Some(ino) = self.pick(random, |n| matches!(n, Node::File(_))) else { return };
                let (offset, len) = (random.below(self.reach), random.below(300_000) + 1);
                let what = match random.below(4) {
                    0 => Allocate::Reserve { grow: true },
                    1 => Allocate::Reserve { grow: false },
                    2 => Allocate::Punch,
                    _ => Allocate::Zero { grow: random.below(2) == 0 },
                };
                match fs.allocate(&context, ino, offset, len, what) {
                    Ok(()) => {
                        let content = self.model.file(ino);
                        let end = (offset + len) as usize;
                        if matches!(what, Allocate::Reserve { grow: true } | Allocate::Zero { grow: true }) {
                            content.resize(content.len().max(end), 0);
                        }
                        if !matches!(what, Allocate::Reserve { .. }) {
                            let (from, to) = ((offset as usize).min(content.len()), end.min(content.len()));
                            content[from..to].fill(0);
                        }
                    }
                    // It may have been done in part: no model knows what is in the file then, so
                    // the file starts anew.
                    Err(FsError::NoSpace) => {
                        fs.wait(|| fs.set_size(&context, ino, 0)).expect("shortening needs no space");
                        self.model.file(ino).clear();
                    }
                    Err(error) => panic!("fallocate {what:?}: {error}"),
                }
            }
            62..70 => self.remove(random, dir, &name, taken),
            70..78 => {
                let to_dir = dirs[random.below(dirs.len() as u64) as usize];
                let mode = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][random.below(3) as usize];
                self.rename((dir, name), (to_dir, Self::name(random)), mode);
            }
            78..82 => {
                let Some(ino) = self.pick(random, |n| !matches!(n, Node::Dir(_))) else { return };
                match fs.wait(|| fs.link(&context, ino, dir, &name)) {
                    Ok(_) => {
                        assert_eq!(taken, None);
                        self.model.entries(dir).insert(name, ino);
                    }
                    Err(FsError::Exists) => assert!(taken.is_some()),
                    Err(FsError::NoSpace) => {}
                    Err(error) => panic!("link: {error}"),
                }
            }
            82..88 => {
                let Some(ino) = self.pick(random, |_| true) else { return };
                let key = format!("user.{}", random.below(6)).into_bytes();
                let len = if random.below(4) == 0 { random.below(65537) } else { random.below(300) } as usize;
                let value = random.bytes(len);
                if random.below(4) == 0 {
                    let removed = fs.wait(|| fs.remove_xattr(&context, ino, &key)).is_ok();
                    assert_eq!(removed, self.model.xattrs.remove(&(ino, key)).is_some());
                } else {
                    match fs.wait(|| fs.set_xattr(&context, ino, &key, &value, false, false)) {
                        Ok(()) => drop(self.model.xattrs.insert((ino, key), value)),
                        Err(FsError::NoSpace) => {}
                        Err(error) => panic!("setxattr: {error}"),
                    }
                }
            }
            88..92 => {
                let Some(ino) = self.pick(random, |_| true) else { return };
                let mtime = Timestamp { seconds: random.below(1 << 40) as i64 - (1 << 39), nanoseconds: 5 };
                let set = SetAttributes { mtime: Some(mtime), ..SetAttributes::default() };
                fs.wait(|| fs.set_attributes(&context, ino, &set)).expect("times can always be set");
                if !matches!(self.model.nodes[&ino], Node::Dir(_)) {
                    self.model.times.insert(ino, mtime);
                }
            }
            92..95 => {
                if let Some(ino) = self.pick(random, |n| matches!(n, Node::File(_))) {
                    fs.sync_file(ino).expect("nothing fails");
                }
            }
            95 => fs.flush_all().expect("nothing fails"),
            96 => fs.commit().expect("nothing fails"),
            97 => fs.volume().checkpoint().expect("nothing fails"),
            _ => {
                if let Some(ino) = self.pick(random, |n| matches!(n, Node::File(_))) {
                    self.compare_file(ino);
                }
            }
        }
    }

    fn reap(&self, ino: u64) {
        while self.fs.wait(|| self.fs.reap_step(ino)).expect("nothing fails") {}
    }

    fn remove(&mut self, _random: &mut Random, dir: u64, name: &[u8], taken: Option<u64>) {
        let context = self.context();
        let fs = self.fs.clone();
        let is_dir = taken.is_some_and(|ino| matches!(self.model.nodes[&ino], Node::Dir(_)));
        if is_dir {
            let ino = taken.expect("it is a directory");
            let empty = self.model.entries(ino).is_empty();
            match fs.wait(|| fs.rmdir(&context, dir, name)) {
                Ok(removed) => {
                    assert!(empty && removed == ino);
                    self.model.entries(dir).remove(name);
                    self.model.forget_unless_linked(ino);
                    self.reap(ino);
                }
                Err(FsError::NotEmpty) => assert!(!empty),
                Err(error) => panic!("rmdir: {error}"),
            }
            return;
        }
        match fs.wait(|| fs.unlink(&context, dir, name)) {
            Ok(gone) => {
                let ino = self.model.entries(dir).remove(name).expect("it was there");
                assert_eq!(Some(ino), taken);
                assert_eq!(gone, (self.model.links(ino) == 0).then_some(ino));
                self.model.forget_unless_linked(ino);
                if gone.is_some() {
                    self.reap(ino);
                }
            }
            Err(FsError::NotFound) => assert_eq!(taken, None),
            Err(error) => panic!("unlink: {error}"),
        }
    }

    fn rename(&mut self, from: (u64, Vec<u8>), to: (u64, Vec<u8>), mode: RenameMode) {
        let context = self.context();
        let fs = self.fs.clone();
        let source = self.model.entries(from.0).get(&from.1).copied();
        let target = self.model.entries(to.0).get(&to.1).copied();
        let is_dir = |model: &Model, ino: Option<u64>| ino.is_some_and(|i| matches!(model.nodes[&i], Node::Dir(_)));
        let result = fs.wait(|| fs.rename(&context, (from.0, &from.1), (to.0, &to.1), mode, &mut Settling::default()));
        match result {
            Ok(gone) => {
                let source = source.expect("the source was there");
                if Some(source) == target {
                    return;
                }
                assert!(!(is_dir(&self.model, Some(source)) && self.model.is_within(to.0, source)));
                match (mode, target) {
                    (RenameMode::Exchange, target) => {
                        let target = target.expect("both were there");
                        self.model.entries(from.0).insert(from.1, target);
                        self.model.entries(to.0).insert(to.1, source);
                    }
                    (mode, target) => {
                        assert!(mode == RenameMode::Replace || target.is_none());
                        self.model.entries(from.0).remove(&from.1);
                        self.model.entries(to.0).insert(to.1, source);
                        if let Some(target) = target {
                            assert_eq!(gone, (self.model.links(target) == 0).then_some(target));
                            self.model.forget_unless_linked(target);
                        }
                    }
                }
                if let Some(gone) = gone {
                    self.reap(gone);
                }
            }
            Err(FsError::NotFound) => assert!(source.is_none() || (mode == RenameMode::Exchange && target.is_none())),
            Err(FsError::Exists) => assert!(mode == RenameMode::NoReplace && target.is_some()),
            Err(FsError::Invalid(_)) => {
                let below = |a: Option<u64>, dir| a.is_some_and(|a| is_dir(&self.model, Some(a)) && self.model.is_within(dir, a));
                assert!(below(source, to.0) || (mode == RenameMode::Exchange && below(target, from.0)));
            }
            Err(FsError::NotDirectory) => assert!(is_dir(&self.model, source) && !is_dir(&self.model, target)),
            Err(FsError::IsDirectory) => assert!(!is_dir(&self.model, source) && is_dir(&self.model, target)),
            Err(FsError::NotEmpty) => assert!(is_dir(&self.model, target)),
            Err(FsError::NoSpace) => {}
            Err(error) => panic!("rename: {error}"),
        }
    }

    fn compare_file(&self, ino: u64) {
        let Node::File(content) = &self.model.nodes[&ino] else { panic!("{ino} is a file") };
        let attributes = self.fs.wait(|| self.fs.attributes(ino)).expect("the file is there");
        assert_eq!(attributes.inode.size, content.len() as u64, "size of inode {ino}");
        let found = self.fs.read(ino, 0, content.len() + 1).expect("the file can be read");
        if let Some(at) = difference(&found, content) {
            panic!("inode {ino} differs at byte {at}: {:?} instead of {:?}", found.get(at), content.get(at));
        }
    }

    /// Compares everything.
    pub fn compare(&self) {
        for (ino, node) in &self.model.nodes {
            match node {
                Node::File(_) => self.compare_file(*ino),
                Node::Link(target) => {
                    assert_eq!(self.fs.wait(|| self.fs.read_link(*ino)).expect("the link is there"), *target);
                }
                Node::Dir(entries) => {
                    let (mut found, mut cookie) = (BTreeMap::new(), 0);
                    loop {
                        let part = self.fs.wait(|| self.fs.read_dir(*ino, cookie, 5)).expect("the directory is there");
                        let Some(last) = part.last() else { break };
                        cookie = last.cookie;
                        found.extend(part.into_iter().filter(|e| e.cookie > 2).map(|e| (e.name, e.ino)));
                    }
                    assert_eq!(found, *entries, "directory {ino}");
                    for (name, child) in entries {
                        assert_eq!(self.fs.wait(|| self.fs.lookup(*ino, name)).expect("the entry is there").ino, *child);
                    }
                }
            }
        }
        for ((ino, name), value) in &self.model.xattrs {
            assert_eq!(self.fs.wait(|| self.fs.get_xattr(*ino, name)).expect("the attribute is there"), *value);
        }
        for (ino, mtime) in &self.model.times {
            assert_eq!(self.fs.wait(|| self.fs.attributes(*ino)).expect("it is there").inode.mtime, *mtime, "inode {ino}");
        }
        if self.model.nodes.contains_key(&ROOT) {
            assert_eq!(self.fs.usage().inodes, self.model.nodes.len() as u64);
        }
    }
}
