//! Which processes read the same file by rings, and whether they read the same ranges of it: such
//! ranges are better read through the kernel's page cache, once for all.
//!
//! It guards that this costs a read next to nothing: nothing but a load for a file that one process
//! reads, and one more, at times a store, for the others.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Bytes of a window of a file, as a power of two. Of a window it is known what the process read
/// of it that came there first.
const WINDOW: u32 = 24;
/// Bytes in which ranges of a window are counted, as a power of two.
const UNIT: u32 = 10;
/// Windows of all files that are kept; another one takes the place of one of them.
const WINDOWS: usize = 1 << 14;
/// Units that two processes have to have read both: neighbours read the same blocks where one's
/// part of a file ends and the other's begins.
const COMMON: u64 = 16;

/// The files that rings read.
pub(super) struct Readers {
    /// By inode.
    files: Mutex<HashMap<u64, Weak<ReadFile>>>,
    windows: Arc<[AtomicU64]>,
    hasher: RandomState,
}

/// A file that rings read.
struct ReadFile {
    /// Processes, and how often each has it attached.
    processes: Mutex<HashMap<u32, usize>>,
    /// Whether there are several.
    many: AtomicBool,
    /// Whether they read the same.
    common: AtomicBool,
    /// Tells its windows from those of other files, and from its own of a time when other processes
    /// read it.
    salt: AtomicU64,
}

/// A process that has a file attached, for reading alone.
pub(super) struct Reader {
    file: Arc<ReadFile>,
    process: u32,
    windows: Arc<[AtomicU64]>,
}

/// What a process read of a window: bits 0 to 13 are the first unit, 14 to 27 the last one, 28 to
/// 49 the process, and the others tell windows apart that have the same place.
#[derive(Clone, Copy, PartialEq)]
struct Seen {
    first: u64,
    last: u64,
    process: u64,
    tag: u64,
}

impl Seen {
    fn from_bits(bits: u64) -> Option<Seen> {
        let field = |at: u32, len: u32| bits >> at & ((1 << len) - 1);
        let seen = Seen { first: field(0, 14), last: field(14, 14), process: field(28, 22), tag: field(50, 14) };
        (bits != 0).then_some(seen)
    }

    fn bits(self) -> u64 {
        self.first | self.last << 14 | self.process << 28 | self.tag << 50
    }
}

impl Default for Readers {
    fn default() -> Readers {
        let windows = (0..WINDOWS).map(|_| AtomicU64::new(0)).collect();
        Readers { files: Mutex::default(), windows, hasher: RandomState::new() }
    }
}

impl Readers {
    /// A process attaches a file.
    pub fn add(&self, ino: u64, process: u32) -> Reader {
        let file = {
            let mut files = self.files.lock();
            match files.get(&ino).and_then(Weak::upgrade) {
                Some(file) => file,
                None => {
                    // Those that are gone, before they become many.
                    if files.len() >= 64 && files.len().is_power_of_two() {
                        files.retain(|_, file| file.strong_count() > 0);
                    }
                    let file = Arc::new(ReadFile {
                        processes: Mutex::default(),
                        many: AtomicBool::new(false),
                        common: AtomicBool::new(false),
                        salt: AtomicU64::new(self.hasher.hash_one(ino)),
                    });
                    files.insert(ino, Arc::downgrade(&file));
                    file
                }
            }
        };
        let mut processes = file.processes.lock();
        *processes.entry(process).or_default() += 1;
        file.many.store(processes.len() > 1, Ordering::Relaxed);
        drop(processes);
        Reader { file, process, windows: self.windows.clone() }
    }
}

impl Reader {
    /// It reads a range. True where it and another process have read the same bytes since both have
    /// the file attached.
    pub fn reads(&self, offset: u64, len: u64) -> bool {
        let file = &*self.file;
        if !file.many.load(Ordering::Relaxed) || len == 0 {
            return false;
        }
        if file.common.load(Ordering::Relaxed) {
            return true;
        }
        let window = offset >> WINDOW;
        let last = offset.saturating_add(len - 1).min(offset | ((1 << WINDOW) - 1));
        let unit = |at: u64| (at & ((1 << WINDOW) - 1)) >> UNIT;
        let hash = (window ^ file.salt.load(Ordering::Relaxed)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let place = &self.windows[(hash >> 50) as usize % WINDOWS];
        let mut ours = Seen {
            first: unit(offset),
            last: unit(last),
            process: u64::from(self.process) & ((1 << 22) - 1),
            tag: hash >> 36 & ((1 << 14) - 1),
        };
        match Seen::from_bits(place.load(Ordering::Relaxed)) {
            Some(seen) if seen.tag == ours.tag && seen.process != ours.process => {
                let common = (ours.last.min(seen.last) + 1).saturating_sub(ours.first.max(seen.first));
                if common < COMMON {
                    return false;
                }
                file.common.store(true, Ordering::Relaxed);
                return true;
            }
            Some(seen) if seen.tag == ours.tag => {
                (ours.first, ours.last) = (ours.first.min(seen.first), ours.last.max(seen.last));
                if ours == seen {
                    return false;
                }
            }
            _ => {}
        }
        place.store(ours.bits(), Ordering::Relaxed);
        false
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut processes = self.file.processes.lock();
        if let Some(count) = processes.get_mut(&self.process) {
            *count -= 1;
            if *count == 0 {
                processes.remove(&self.process);
            }
        }
        if processes.len() < 2 {
            self.file.many.store(false, Ordering::Relaxed);
            self.file.common.store(false, Ordering::Relaxed);
            self.file.salt.fetch_add(0x2545_f491_4f6c_dd1d, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn processes_that_read_the_same_are_told() {
        let readers = Readers::default();
        let one = readers.add(7, 100);
        let again = readers.add(7, 100);
        assert!(!one.reads(0, MIB) && !again.reads(0, MIB), "one process");
        let two = readers.add(7, 200);
        let elsewhere = readers.add(8, 200);
        assert!(!one.reads(0, MIB) && !one.reads(MIB, MIB), "the first one");
        assert!(!two.reads(2 * MIB, MIB) && !elsewhere.reads(0, MIB), "others");
        assert!(two.reads(MIB + 5, 100_000), "the same");
        assert!(one.reads(1 << 30, MIB) && two.reads(5 << 30, MIB) && !elsewhere.reads(0, MIB), "from now on");
        drop(two);
        assert!(!one.reads(0, MIB), "alone again");
        let three = readers.add(7, 300);
        assert!(!three.reads(0, MIB) && one.reads(0, MIB), "nothing of before counts");
    }

    #[test]
    fn neighbours_read_nothing_in_common() {
        let readers = Readers::default();
        let processes: Vec<_> = (1..=8).map(|process| readers.add(7, process)).collect();
        let part = 5 * MIB + 4096 * 3;
        for at in 0..200u64 {
            for (number, process) in processes.iter().enumerate() {
                // Each reads a part of its own, and the blocks at both ends.
                let start = (at * 8 + number as u64) * part;
                assert!(!process.reads(start.saturating_sub(4096), part + 4096), "{number} at {at}");
            }
        }
        assert!(processes[3].reads(0, part));
    }

    #[test]
    fn windows_of_long_files_are_told_apart() {
        let readers = Readers::default();
        let (one, two) = (readers.add(7, 1), readers.add(7, 2));
        assert!(!one.reads(0, MIB) && !two.reads((WINDOWS as u64) << WINDOW, MIB) && !one.reads(u64::MAX - MIB, MIB));
    }
}
