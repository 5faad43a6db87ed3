//! Inodes and their contents, in memory: hash maps, sharded so that loops on different cores seldom
//! meet at a lock.
//!
//! Locks, in the order in which they are taken: a folder's entries (of two folders, the lower inode
//! number first), an inode's state, a shard of the inode table. A file's chunks are locked on their
//! own, never together with the others.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use fuser::{FileAttr, FileType, INodeNo};
use parking_lot::{Mutex, RwLock};
use rustc_hash::FxHashMap;

/// Shards of the inode table, a power of two well above the number of loops.
const SHARDS: u64 = 64;
/// Bytes in a chunk of a file: one request of the largest size, when it is aligned.
const CHUNK: usize = 1 << 20;
/// A chunk that grows beyond this takes a whole, recycled buffer: pages that were touched before
/// cost no page faults, which would otherwise be what large writes are limited by.
const SMALL: usize = 64 << 10;
/// Buffers kept for reuse when files go.
const RECYCLED: usize = 2048;

/// All inodes.
pub struct Store {
    shards: Vec<RwLock<FxHashMap<u64, Arc<Inode>>>>,
    next: AtomicU64,
    buffers: Mutex<Vec<Vec<u8>>>,
}

/// A file, folder, symlink or special file.
pub struct Inode {
    pub number: u64,
    pub kind: FileType,
    pub device: u32,
    pub state: Mutex<Metadata>,
    pub body: Body,
}

/// What stat shows and may change, and what keeps the inode alive.
pub struct Metadata {
    pub len: u64,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    /// References that the kernel holds (lookup count of the FUSE protocol).
    pub lookups: u64,
    pub accessed: SystemTime,
    pub modified: SystemTime,
    pub changed: SystemTime,
}

/// What an inode holds.
pub enum Body {
    File(RwLock<Vec<RwLock<Vec<u8>>>>),
    Folder(RwLock<Folder>),
    Symlink(OsString),
    Special,
}

/// The entries of a folder, by name and in the order in which readdir lists them.
pub struct Folder {
    pub parent: u64,
    entries: FxHashMap<Arc<OsStr>, (u64, u64)>,
    order: BTreeMap<u64, (Arc<OsStr>, u64)>,
    next: u64,
}

impl Folder {
    pub fn new(parent: u64) -> Self {
        // Readdir positions 1 and 2 stand for "." and "..".
        Self { parent, entries: FxHashMap::default(), order: BTreeMap::new(), next: 3 }
    }

    pub fn get(&self, name: &OsStr) -> Option<u64> {
        self.entries.get(name).map(|&(inode, _)| inode)
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds an entry, or points an existing one to another inode.
    pub fn set(&mut self, name: &OsStr, inode: u64) {
        if let Some((old, position)) = self.entries.get_mut(name) {
            *old = inode;
            self.order.get_mut(position).expect("an entry in both maps").1 = inode;
            return;
        }
        let name: Arc<OsStr> = Arc::from(name);
        self.entries.insert(name.clone(), (inode, self.next));
        self.order.insert(self.next, (name, inode));
        self.next += 1;
    }

    pub fn remove(&mut self, name: &OsStr) -> Option<u64> {
        let (inode, position) = self.entries.remove(name)?;
        self.order.remove(&position);
        Some(inode)
    }

    /// Entries behind a readdir position, with the position of each.
    pub fn after(&self, position: u64) -> impl Iterator<Item = (u64, &OsStr, u64)> {
        self.order.range(position + 1..).map(|(&position, (name, inode))| (position, &**name, *inode))
    }
}

impl Store {
    /// A store with an empty root, inode 1.
    pub fn new() -> Self {
        let store =
            Self { shards: (0..SHARDS).map(|_| RwLock::default()).collect(), next: AtomicU64::new(1), buffers: Mutex::default() };
        let root = store.make(FileType::Directory, 0o755, (0, 0), 0, Body::Folder(RwLock::new(Folder::new(1))));
        root.state.lock().links = 2;
        store
    }

    fn shard(&self, number: u64) -> &RwLock<FxHashMap<u64, Arc<Inode>>> {
        &self.shards[(number % SHARDS) as usize]
    }

    pub fn get(&self, number: u64) -> Option<Arc<Inode>> {
        self.shard(number).read().get(&number).cloned()
    }

    /// Makes an inode with one link that no folder names yet.
    pub fn make(&self, kind: FileType, mode: u32, owner: (u32, u32), device: u32, body: Body) -> Arc<Inode> {
        let now = SystemTime::now();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let len = if let Body::Symlink(target) = &body { target.len() as u64 } else { 0 };
        let inode = Arc::new(Inode {
            number,
            kind,
            device,
            state: Mutex::new(Metadata {
                len,
                mode: (mode & 0o7777) as u16,
                uid: owner.0,
                gid: owner.1,
                links: if kind == FileType::Directory { 2 } else { 1 },
                lookups: 0,
                accessed: now,
                modified: now,
                changed: now,
            }),
            body,
        });
        self.shard(number).write().insert(number, inode.clone());
        inode
    }

    /// Takes `links` links and `lookups` kernel references from an inode, which goes with the last
    /// of both.
    pub fn release(&self, inode: &Inode, links: u32, lookups: u64) {
        let mut state = inode.state.lock();
        state.links -= links;
        state.lookups -= lookups;
        if links > 0 {
            state.changed = SystemTime::now();
        }
        if state.links == 0 && state.lookups == 0 {
            self.shard(inode.number).write().remove(&inode.number);
            drop(state);
            if let Body::File(chunks) = &inode.body {
                self.recycle(chunks.write().drain(..).map(RwLock::into_inner));
            }
        }
    }

    /// Writes to a file. The length moves, if it does, after the bytes are there.
    pub fn write(&self, inode: &Inode, chunks: &RwLock<Vec<RwLock<Vec<u8>>>>, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        let count = end.div_ceil(CHUNK as u64) as usize;
        if chunks.read().len() < count {
            let mut chunks = chunks.write();
            // Another write may have come first and gone further.
            let count = count.max(chunks.len());
            chunks.resize_with(count, RwLock::default);
        }
        let chunks = chunks.read();
        let mut done = 0;
        while done < data.len() {
            let (chunk, start, len) = part(offset + done as u64, data.len() - done);
            let Some(chunk) = chunks.get(chunk) else { break };
            let mut bytes = chunk.write();
            self.reserve(&mut bytes, start + len);
            if bytes.len() < start {
                bytes.resize(start, 0);
            }
            let over = len.min(bytes.len() - start);
            bytes[start..start + over].copy_from_slice(&data[done..done + over]);
            bytes.extend_from_slice(&data[done + over..done + len]);
            done += len;
        }
        inode.written(end);
    }

    /// Gives `reply` the bytes of a file from `offset` on, at most `len` and not beyond the end.
    pub fn read(&self, inode: &Inode, chunks: &RwLock<Vec<RwLock<Vec<u8>>>>, offset: u64, len: usize, reply: impl FnOnce(&[u8])) {
        let len = inode.below_end(offset, len);
        let chunks = chunks.read();
        let (first, start, in_first) = part(offset, len);
        // The usual request lies in one chunk and is answered from where the bytes are.
        if in_first == len
            && let Some(chunk) = chunks.get(first)
        {
            let bytes = chunk.read();
            if start + len <= bytes.len() {
                return reply(&bytes[start..start + len]);
            }
        }
        let mut out = vec![0; len];
        let mut done = 0;
        while done < len {
            let (chunk, start, len) = part(offset + done as u64, len - done);
            if let Some(chunk) = chunks.get(chunk) {
                let bytes = chunk.read();
                let there = bytes.len().saturating_sub(start).min(len);
                out[done..done + there].copy_from_slice(&bytes[start.min(bytes.len())..][..there]);
            }
            done += len;
        }
        reply(&out);
    }

    /// Cuts or extends a file.
    pub fn set_len(&self, inode: &Inode, chunks: &RwLock<Vec<RwLock<Vec<u8>>>>, len: u64) {
        let mut chunks = chunks.write();
        let keep = len.div_ceil(CHUNK as u64) as usize;
        if keep < chunks.len() {
            self.recycle(chunks.drain(keep..).map(RwLock::into_inner));
        }
        if let Some(last) = chunks.get_mut(keep.wrapping_sub(1)) {
            last.get_mut().truncate((len - (keep as u64 - 1) * CHUNK as u64) as usize);
        }
        let mut state = inode.state.lock();
        state.len = len;
        state.modified = SystemTime::now();
        state.changed = state.modified;
    }

    fn reserve(&self, bytes: &mut Vec<u8>, len: usize) {
        if len > SMALL && bytes.capacity() < CHUNK {
            let mut whole = self.buffers.lock().pop().unwrap_or_else(|| Vec::with_capacity(CHUNK));
            whole.extend_from_slice(bytes);
            *bytes = whole;
        }
    }

    fn recycle(&self, freed: impl Iterator<Item = Vec<u8>>) {
        let mut buffers = self.buffers.lock();
        for mut bytes in freed {
            if bytes.capacity() >= CHUNK && buffers.len() < RECYCLED {
                bytes.clear();
                buffers.push(bytes);
            }
        }
    }
}

/// The chunk that holds `offset`, where in it, and how many of `len` bytes it can hold from there.
fn part(offset: u64, len: usize) -> (usize, usize, usize) {
    let start = (offset % CHUNK as u64) as usize;
    ((offset / CHUNK as u64) as usize, start, len.min(CHUNK - start))
}

impl Inode {
    /// What stat shows.
    pub fn attributes(&self) -> FileAttr {
        self.attributes_of(&self.state.lock())
    }

    /// How many of `len` bytes from `offset` on lie below the end.
    pub fn below_end(&self, offset: u64, len: usize) -> usize {
        len.min(self.state.lock().len.saturating_sub(offset) as usize)
    }

    /// Bytes were written, up to `end`.
    pub fn written(&self, end: u64) {
        let mut state = self.state.lock();
        state.len = state.len.max(end);
        state.modified = SystemTime::now();
        state.changed = state.modified;
    }

    /// As [`Inode::attributes`], and the kernel gets a reference to the inode with the answer.
    pub fn looked_up(&self) -> FileAttr {
        let mut state = self.state.lock();
        state.lookups += 1;
        self.attributes_of(&state)
    }

    fn attributes_of(&self, state: &Metadata) -> FileAttr {
        FileAttr {
            ino: INodeNo(self.number),
            size: state.len,
            blocks: state.len.div_ceil(512),
            atime: state.accessed,
            mtime: state.modified,
            ctime: state.changed,
            crtime: state.changed,
            kind: self.kind,
            perm: state.mode,
            nlink: state.links,
            uid: state.uid,
            gid: state.gid,
            rdev: self.device,
            blksize: 64 << 10,
            flags: 0,
        }
    }

    pub fn folder(&self) -> Option<&RwLock<Folder>> {
        if let Body::Folder(folder) = &self.body { Some(folder) } else { None }
    }

    /// A folder's entries changed, and it has `links` folders more or fewer.
    pub fn entries_changed(&self, links: i32) {
        let mut state = self.state.lock();
        state.modified = SystemTime::now();
        state.changed = state.modified;
        state.links = state.links.saturating_add_signed(links);
    }
}
