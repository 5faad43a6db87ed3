//! What is known of directories without the metadata lock: their attributes, and of those that were
//! made since the volume was opened, which names they do not have.
//!
//! The kernel asks for both with each create and rename: whether the new name is there, and, since
//! each change of a directory makes its attributes out of date, for those. Answered here, such an
//! operation takes the metadata lock once instead of three times.
//!
//! All changes are made under the metadata lock, alone. A reader gets what held at some moment of
//! its call. Shards and places have locks of their own, which are held for moments, and under which
//! no other is taken.

use std::array;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpunvme_layout::Inode;
use gpunvme_layout::key::DIRENT_SLOTS;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};

use super::versions::Versions;
use crate::sharded::Sharded;

/// Directories whose attributes are known at the most.
const PLACES: usize = 1024;
/// Memory for a name, in bytes: its offset and the table's mark of it, in a table of twice the
/// size. One that names have gone from may have twice as much room again.
const NAME_MEMORY: usize = 20;
/// Names of one directory at the most: when its table grows all other operations wait.
const LARGEST: usize = 100_000;
/// Names that a table has room for at the least.
const SMALLEST: usize = 16;
/// What a directory takes besides its names, in names.
const DIRECTORY: usize = 8;
/// One in so many bytes of the metadata cache is a name that may be known.
const CACHE_PER_NAME: usize = 512;

/// Attributes of a directory.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    ino: u64,
    inode: Inode,
    /// They hold as long as this is the inode's version.
    version: u64,
}

/// The offsets of the entries of some directories.
type Shard = FxHashMap<u64, FxHashSet<u64>>;

/// The directories of a volume.
pub(crate) struct Directories {
    versions: Arc<Versions>,
    attributes: Box<[Mutex<Option<Known>>; PLACES]>,
    /// Offsets of all entries of a directory, and perhaps some more.
    names: Sharded<Shard>,
    /// Names in all directories, with [`DIRECTORY`] for each of these.
    count: AtomicUsize,
    /// Where this ends.
    most: usize,
    /// The shard that makes room next.
    hand: AtomicUsize,
}

impl Directories {
    /// Of a volume whose metadata cache has so many bytes.
    pub fn new(versions: Arc<Versions>, cache: usize) -> Directories {
        let attributes = Box::new(array::from_fn(|_| Mutex::default()));
        let (count, hand) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Directories { versions, attributes, names: Sharded::default(), count, most: cache / CACHE_PER_NAME, hand }
    }

    /// Memory for names, in bytes.
    pub fn memory(&self) -> usize {
        self.count.load(Ordering::Relaxed) * NAME_MEMORY
    }

    /// The attributes of a directory, if they are known.
    pub fn attributes(&self, ino: u64) -> Option<Inode> {
        let known = (*self.place(ino).lock())?;
        (known.ino == ino && known.version == self.versions.of(ino)).then_some(known.inode)
    }

    /// Attributes as they are now. Called under the metadata lock.
    pub fn now(&self, ino: u64, inode: &Inode) -> Known {
        Known { ino, inode: *inode, version: self.versions.of(ino) }
    }

    /// Keeps attributes, unless the directory has changed again. Called under the metadata lock.
    pub fn keep(&self, known: Known) {
        if known.version == self.versions.of(known.ino) {
            *self.place(known.ino).lock() = Some(known);
        }
    }

    fn place(&self, ino: u64) -> &Mutex<Option<Known>> {
        &self.attributes[(ino.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - PLACES.ilog2())) as usize]
    }

    /// Whether a directory has no entry at this offset, nor at those behind it for names of the
    /// same hash. False where it is not known.
    pub fn lacks(&self, dir: u64, offset: u64) -> bool {
        self.names.lock(dir).get(&dir).is_some_and(|names| !names.contains(&offset))
    }

    /// A directory was made: it has no names.
    pub fn made(&self, dir: u64) {
        self.make_room();
        if self.most > 0 && self.names.lock(dir).insert(dir, FxHashSet::default()).is_none() {
            self.count.fetch_add(DIRECTORY, Ordering::Relaxed);
        }
    }

    /// The entry at this offset of a directory is about to change, or to come.
    pub fn may_have(&self, dir: u64, offset: u64) {
        let mut shard = self.names.lock(dir);
        let Some(names) = shard.get_mut(&dir) else { return };
        if !offset.is_multiple_of(DIRENT_SLOTS) {
            // Two names with one hash: the one that goes would take the other's place along.
            self.forget(&mut shard, dir);
        } else if names.len() == LARGEST && !names.contains(&offset) {
            self.forget(&mut shard, dir);
        } else if names.insert(offset) && self.count.fetch_add(1, Ordering::Relaxed) >= self.most {
            drop(shard);
            self.make_room();
        }
    }

    /// The entry at this offset of a directory has gone.
    pub fn gone(&self, dir: u64, offset: u64) {
        let mut shard = self.names.lock(dir);
        let Some(names) = shard.get_mut(&dir) else { return };
        if names.remove(&offset) {
            self.count.fetch_sub(1, Ordering::Relaxed);
            shrink(names.len(), names.capacity(), |len| names.shrink_to(len));
        }
    }

    /// A directory has gone.
    pub fn removed(&self, dir: u64) {
        self.forget(&mut self.names.lock(dir), dir);
    }

    fn forget(&self, shard: &mut Shard, dir: u64) {
        if let Some(names) = shard.remove(&dir) {
            self.count.fetch_sub(names.len() + DIRECTORY, Ordering::Relaxed);
            shrink(shard.len(), shard.capacity(), |len| shard.shrink_to(len));
        }
    }

    /// Forgets the names of one shard's directories after another's until there is room.
    fn make_room(&self) {
        while self.count.load(Ordering::Relaxed) > self.most {
            let mut shard = self.names.nth(self.hand.fetch_add(1, Ordering::Relaxed));
            let gone = std::mem::take(&mut *shard);
            let names: usize = gone.values().map(|names| names.len() + DIRECTORY).sum();
            self.count.fetch_sub(names, Ordering::Relaxed);
            // The tables are freed without the lock.
            drop(shard);
        }
    }
}

/// Has a table give back room that it has four times too much of. By itself it keeps the room of
/// the most that it has ever had.
fn shrink(len: usize, capacity: usize, shrink_to: impl FnOnce(usize)) {
    if capacity > SMALLEST && len < capacity / 4 {
        shrink_to(2 * len);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use gpunvme_layout::key::INO_ROOT;
    use gpunvme_layout::{FileType, Timestamp};
    use proptest::prelude::*;

    use super::*;
    use crate::error::FsError;
    use crate::volume::format::tests::volume;
    use crate::volume::{Context, NewNode, RenameMode, Volume, dir, inode};

    const NAMES: u8 = 6;

    fn context() -> Context {
        Context { uid: 0, gid: 0, now: Timestamp { seconds: 1, nanoseconds: 0 } }
    }

    fn create(volume: &Volume, parent: u64, name: &[u8], file_type: FileType) -> Result<u64, FsError> {
        let new = NewNode { mode: file_type.mode() | 0o755, umask: 0, rdev: 0, target: &[] };
        volume.wait(|| volume.create(&context(), parent, name, &new)).map(|(made, _)| made.ino)
    }

    #[derive(Debug, Clone)]
    enum Act {
        Create(usize, u8, bool),
        Link(usize, u8, usize, u8),
        Unlink(usize, u8),
        Rmdir(usize, u8),
        Rename((usize, u8), (usize, u8), u8),
        Chmod(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        let entry = || (any::<usize>(), 0..NAMES);
        prop_oneof![
            4 => (entry(), any::<bool>()).prop_map(|((dir, name), is_dir)| Act::Create(dir, name, is_dir)),
            1 => (entry(), entry()).prop_map(|(from, to)| Act::Link(from.0, from.1, to.0, to.1)),
            2 => entry().prop_map(|(dir, name)| Act::Unlink(dir, name)),
            1 => entry().prop_map(|(dir, name)| Act::Rmdir(dir, name)),
            3 => (entry(), entry(), 0..3_u8).prop_map(|(from, to, mode)| Act::Rename(from, to, mode)),
            1 => any::<usize>().prop_map(Act::Chmod),
        ]
    }

    /// What the tree says, under the lock.
    fn found(volume: &Volume, at: u64, name: &[u8]) -> Option<u64> {
        volume.wait(|| dir::find(&*volume.meta.read(), at, name)).unwrap().map(|found| found.ino)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
        #[test]
        fn what_is_known_is_what_the_tree_has(acts in prop::collection::vec(act(), 1..60)) {
            let volume = volume(64 << 20);
            let mut dirs = vec![INO_ROOT];
            for act in acts {
                let dir_at = |n: usize| dirs[n % dirs.len()];
                let mut made = None;
                let _ = match act {
                    Act::Create(parent, name, true) => create(&volume, dir_at(parent), &[b'a' + name], FileType::Directory).map(|ino| made = Some(ino)),
                    Act::Create(parent, name, false) => create(&volume, dir_at(parent), &[b'a' + name], FileType::Regular).map(drop),
                    Act::Link(from, name, to, new) => match found(&volume, dir_at(from), &[b'a' + name]) {
                        Some(ino) => volume.wait(|| volume.link(&context(), ino, false, dir_at(to), &[b'a' + new])).map(drop),
                        None => Ok(()),
                    },
                    Act::Unlink(parent, name) => volume.wait(|| volume.unlink(&context(), dir_at(parent), &[b'a' + name])).map(drop),
                    Act::Rmdir(parent, name) => volume.wait(|| volume.rmdir(&context(), dir_at(parent), &[b'a' + name])).map(drop),
                    Act::Rename(from, to, mode) => {
                        let mode = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][usize::from(mode)];
                        let settled = found(&volume, dir_at(from.0), &[b'a' + from.1]);
                        let (old, new) = ([b'a' + from.1], [b'a' + to.1]);
                        volume.wait(|| volume.rename(&context(), (dir_at(from.0), &old), (dir_at(to.0), &new), mode, settled)).map(drop)
                    }
                    Act::Chmod(at) => {
                        let set = crate::volume::SetAttributes { mode: Some(0o700), ..Default::default() };
                        volume.wait(|| volume.set_attributes(&context(), dir_at(at), &set)).map(drop)
                    }
                };
                dirs.extend(made);
                for &at in &dirs {
                    for name in 0..NAMES {
                        let known = volume.wait(|| volume.lookup(at, &[b'a' + name])).ok();
                        prop_assert_eq!(known, found(&volume, at, &[b'a' + name]), "name {} of {}", name, at);
                    }
                    let stored = volume.wait(|| inode::load(&*volume.meta.read(), at)).unwrap();
                    prop_assert_eq!(volume.wait(|| volume.stored_attributes(at)).unwrap().inode, stored);
                }
            }
        }
    }

    #[test]
    fn a_new_directory_lacks_what_was_not_put_there_and_an_old_one_is_asked() {
        let volume = volume(64 << 20);
        let offset = |name: &[u8]| gpunvme_layout::key::dirent_offset(&volume.name_key, name);
        let new = create(&volume, INO_ROOT, b"new", FileType::Directory).unwrap();
        assert!(volume.directories.lacks(new, offset(b"a")) && !volume.directories.lacks(INO_ROOT, offset(b"a")));
        create(&volume, new, b"a", FileType::Regular).unwrap();
        assert!(!volume.directories.lacks(new, offset(b"a")) && volume.directories.lacks(new, offset(b"b")));
        volume.wait(|| volume.unlink(&context(), new, b"a")).unwrap();
        assert!(volume.directories.lacks(new, offset(b"a")));
        assert!(volume.directories.attributes(new).is_some(), "its own change told");
        volume.wait(|| volume.rmdir(&context(), INO_ROOT, b"new")).unwrap();
        assert!(!volume.directories.lacks(new, offset(b"a")));
        assert_eq!(volume.directories.memory(), 0);
    }

    #[test]
    fn an_operation_that_fails_after_it_has_removed_an_entry_leaves_it_known() {
        let volume = volume(64 << 20);
        let new = create(&volume, INO_ROOT, b"new", FileType::Directory).unwrap();
        create(&volume, new, b"a", FileType::Regular).unwrap();
        let entry = volume.wait(|| dir::find(&*volume.meta.read(), new, b"a")).unwrap().unwrap();
        let before = volume.wait(|| volume.stored_attributes(new)).unwrap();
        volume
            .wait(|| {
                let mut op = volume.begin()?;
                dir::remove(&mut op, entry.key)?;
                let inode = inode::change(&mut op, new, |inode| {
                    inode.size = 0;
                    *inode
                })?;
                op.directory_is(new, &inode);
                Ok(())
            })
            .unwrap();
        assert_eq!(volume.wait(|| volume.lookup(new, b"a")).unwrap(), entry.ino);
        assert_eq!(volume.wait(|| volume.stored_attributes(new)).unwrap(), before);
    }

    #[test]
    fn names_with_one_hash_are_looked_for_in_the_tree() {
        let directories = Directories::new(Arc::default(), 1 << 20);
        directories.made(5);
        directories.may_have(5, 3 * DIRENT_SLOTS);
        assert!(directories.lacks(5, DIRENT_SLOTS));
        directories.may_have(5, 3 * DIRENT_SLOTS + 1);
        directories.gone(5, 3 * DIRENT_SLOTS);
        assert!(!directories.lacks(5, DIRENT_SLOTS) && !directories.lacks(5, 3 * DIRENT_SLOTS));
        assert_eq!(directories.memory(), 0);
    }

    #[test]
    fn names_take_no_more_memory_than_they_may_and_new_directories_are_known_again() {
        let most = 100;
        let directories = Directories::new(Arc::default(), most * CACHE_PER_NAME);
        for dir in 1..200 {
            directories.made(dir);
            for name in 1..dir {
                directories.may_have(dir, name * DIRENT_SLOTS);
            }
            assert!(directories.memory() <= (most + DIRECTORY) * NAME_MEMORY);
            assert!(dir as usize - 1 + DIRECTORY <= most || !directories.lacks(dir, 1 << 20), "{dir}");
            directories.made(1000 + dir);
            assert!(directories.lacks(1000 + dir, DIRENT_SLOTS), "{dir}");
        }
        let none = Directories::new(Arc::default(), 0);
        none.made(5);
        none.may_have(5, DIRENT_SLOTS);
        assert!(!none.lacks(5, DIRENT_SLOTS) && none.memory() == 0);
    }

    #[test]
    fn names_that_are_gone_leave_no_room_behind() {
        let directories = Directories::new(Arc::default(), 1 << 30);
        let room = || {
            directories
                .names
                .lock_each()
                .flat_map(|shard| shard.values().map(FxHashSet::capacity).collect::<Vec<_>>())
                .sum::<usize>()
        };
        for dir in 1..=20 {
            directories.made(dir);
            (1..=5000).for_each(|name| directories.may_have(dir, name * DIRENT_SLOTS));
        }
        assert!(room() >= 100_000);
        for dir in 1..=20 {
            (1..=5000).for_each(|name| directories.gone(dir, name * DIRENT_SLOTS));
        }
        assert!(room() <= 20 * 2 * SMALLEST, "{}", room());
        assert_eq!(directories.memory(), 20 * DIRECTORY * NAME_MEMORY);
        (1..=20).for_each(|dir| directories.removed(dir));
        assert!(directories.names.lock_each().all(|shard| shard.capacity() <= 2 * SMALLEST));
        assert_eq!(directories.memory(), 0);
    }

    #[test]
    fn a_directory_that_is_too_large_is_forgotten_and_no_other() {
        let directories = Directories::new(Arc::default(), 1 << 30);
        directories.made(1);
        directories.made(2);
        (1..=LARGEST as u64).for_each(|name| directories.may_have(1, name * DIRENT_SLOTS));
        let next = (LARGEST as u64 + 1) * DIRENT_SLOTS;
        directories.may_have(1, DIRENT_SLOTS);
        assert!(directories.lacks(1, next) && directories.lacks(2, next));
        directories.may_have(1, next);
        assert!(!directories.lacks(1, 2 * next) && directories.lacks(2, next));
        assert_eq!(directories.memory(), DIRECTORY * NAME_MEMORY);
    }

    #[test]
    fn threads_see_what_was_done_before_they_ask() {
        let volume = volume(256 << 20);
        let shared = create(&volume, INO_ROOT, b"shared", FileType::Directory).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|thread| {
                    let volume = &volume;
                    let own = create(volume, INO_ROOT, format!("own{thread}").as_bytes(), FileType::Directory).unwrap();
                    scope.spawn(move || {
                        for round in 0..2000 {
                            let name = format!("{thread}.{}", round % 50).into_bytes();
                            for at in [own, shared] {
                                assert!(volume.wait(|| volume.lookup(at, &name)).is_err());
                                let ino = create(volume, at, &name, FileType::Regular).unwrap();
                                assert_eq!(volume.wait(|| volume.lookup(at, &name)).unwrap(), ino);
                                let size = volume.wait(|| volume.stored_attributes(at)).unwrap().inode.size;
                                assert!(if at == own { size == 1 } else { (1..=4).contains(&size) }, "{size}");
                                assert_eq!(volume.wait(|| volume.unlink(&context(), at, &name)).unwrap().0, ino);
                                while volume.wait(|| volume.reap_step(ino)).unwrap() {}
                            }
                            assert_eq!(volume.wait(|| volume.stored_attributes(own)).unwrap().inode.size, 0);
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    volume.commit().unwrap();
                    volume.checkpoint().unwrap();
                }
            });
            workers.into_iter().for_each(|worker| worker.join().unwrap());
            stop.store(true, Ordering::Relaxed);
        });
    }
}
