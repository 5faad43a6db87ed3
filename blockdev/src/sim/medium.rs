//! The medium of a namespace of the software controller, and the volatile write cache before it.
//! It defines a power cut: a write that was neither flushed nor durable by itself may be lost,
//! kept or torn between logical blocks, and an older version of a block may be left; all else is
//! there.
//!
//! The cache is a sparse file in memory, as long as the namespace, so that system calls move data
//! between it, the medium and the memory that a command names: memory that its owner truncated is
//! then an error (EFAULT) and no signal.
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom};
use rustix::io::Errno;

use super::iommu::HostRange;
use super::random::Random;
use super::ranges::Ranges;

/// With this many bytes in the cache, some are written back.
const CACHE: u64 = 64 << 20;
/// Bytes moved at once from the cache to the medium.
const COPY: usize = 256 << 10;
/// Logical blocks that share their fate in a power cut more often than not.
const FATE: u64 = 64;

type Result<T> = std::result::Result<T, Errno>;

pub(super) enum Backing {
    /// An image, a block device, or a file in memory.
    File(File),
    /// Nothing: writes are forgotten and reads change no memory.
    Null,
}

pub(super) struct Medium {
    backing: Backing,
    len: u64,
    /// Bytes of a logical block.
    block: u64,
    cache: Option<Cache>,
    random: Random,
}

struct Cache {
    file: File,
    /// What is newer here than on the medium.
    dirty: Ranges,
}

/// Sparse memory that can be used as a file.
pub(super) fn file_in_memory(len: u64) -> Result<File> {
    let file = File::from(rustix::fs::memfd_create("gpunvme-sim", MemfdFlags::CLOEXEC)?);
    rustix::fs::ftruncate(&file, len)?;
    Ok(file)
}

impl Medium {
    pub(super) fn new(backing: Backing, len: u64, block: u64, volatile_cache: bool, seed: u64) -> Result<Self> {
        let cached = volatile_cache && matches!(backing, Backing::File(_));
        let cache = cached.then(|| Ok(Cache { file: file_in_memory(len)?, dirty: Ranges::default() })).transpose()?;
        Ok(Self { backing, len, block, cache, random: Random::new(seed) })
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn block(&self) -> u64 {
        self.block
    }

    pub(super) fn read(&self, offset: u64, ranges: &[HostRange]) -> Result<()> {
        let Backing::File(medium) = &self.backing else { return Ok(()) };
        let mut memory = Memory { ranges, done: 0 };
        let Some(cache) = &self.cache else { return memory.fill_from(medium, offset..offset + total(ranges)) };
        for (part, dirty) in cache.dirty.cut(offset..offset + total(ranges)) {
            memory.fill_from(if dirty { &cache.file } else { medium }, part)?;
        }
        Ok(())
    }

    /// Writes into the cache, or `through` it: then the data is durable when this returns.
    pub(super) fn write(&mut self, offset: u64, ranges: &[HostRange], through: bool) -> Result<()> {
        let range = offset..offset + total(ranges);
        let Backing::File(medium) = &self.backing else { return Ok(()) };
        let mut memory = Memory { ranges, done: 0 };
        match &mut self.cache {
            Some(cache) if !through => {
                cache.age(medium, &range, &mut self.random)?;
                memory.drain_into(&cache.file, range.clone())?;
                cache.dirty.insert(range);
                cache.shrink(medium)
            }
            cache => {
                memory.drain_into(medium, range.clone())?;
                if let Some(cache) = cache {
                    cache.forget(range)?;
                }
                rustix::fs::fdatasync(medium)
            }
        }
    }

    /// Makes bytes zero, like [`Medium::write`].
    pub(super) fn zero(&mut self, range: Range<u64>, through: bool) -> Result<()> {
        let Backing::File(medium) = &self.backing else { return Ok(()) };
        match &mut self.cache {
            Some(cache) if !through => {
                cache.age(medium, &range, &mut self.random)?;
                punch(&cache.file, &range)?;
                cache.dirty.insert(range);
                Ok(())
            }
            cache => {
                punch(medium, &range)?;
                if let Some(cache) = cache {
                    cache.forget(range)?;
                }
                rustix::fs::fdatasync(medium)
            }
        }
    }

    /// Makes all that was written durable.
    pub(super) fn flush(&mut self) -> Result<()> {
        let Backing::File(medium) = &self.backing else { return Ok(()) };
        if let Some(cache) = &mut self.cache {
            cache.destage(medium, 0..self.len)?;
        }
        rustix::fs::fdatasync(medium)
    }

    /// The cache loses power.
    pub(super) fn power_cut(&mut self) -> Result<()> {
        let (Backing::File(medium), Some(cache)) = (&self.backing, &mut self.cache) else { return Ok(()) };
        for run in cache.dirty.within(0..self.len) {
            for start in run.clone().step_by((FATE * self.block) as usize) {
                let end = run.end.min(start + FATE * self.block);
                match self.random.below(3) {
                    0 => {}
                    1 => cache.copy_to(medium, start..end)?,
                    _ => {
                        for block in (start..end).step_by(self.block as usize) {
                            if self.random.below(2) == 0 {
                                cache.copy_to(medium, block..block + self.block)?;
                            }
                        }
                    }
                }
            }
        }
        cache.forget(0..self.len)
    }

    /// Erases everything, in blocks of another size from now on.
    pub(super) fn format(&mut self, block: u64) -> Result<()> {
        self.zero(0..self.len, true)?;
        self.block = block;
        Ok(())
    }

    /// A copy of the contents: as reads see them, or without what only the cache has.
    pub(super) fn contents(&self, durable: bool) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.len as usize];
        let ranges = [HostRange { address: bytes.as_mut_ptr(), len: bytes.len() }];
        match &self.backing {
            Backing::File(medium) if durable => Memory { ranges: &ranges, done: 0 }.fill_from(medium, 0..self.len)?,
            _ => self.read(0, &ranges)?,
        }
        Ok(bytes)
    }
}

impl Drop for Medium {
    /// No power is lost, so that the cache is written back in the end.
    fn drop(&mut self) {
        let (Backing::File(medium), Some(cache)) = (&self.backing, &mut self.cache) else { return };
        if let Err(error) = cache.destage(medium, 0..self.len) {
            tracing::error!(%error, "the software controller could not write its cache back");
        }
    }
}

impl Cache {
    /// Now and then, what a write is about to replace is on the medium already.
    fn age(&mut self, medium: &File, range: &Range<u64>, random: &mut Random) -> Result<()> {
        if !self.dirty.within(range.clone()).is_empty() && random.below(4) == 0 {
            self.destage(medium, range.clone())?;
        }
        Ok(())
    }

    /// Writes back half of it when it has grown too large.
    fn shrink(&mut self, medium: &File) -> Result<()> {
        if self.dirty.total() <= CACHE {
            return Ok(());
        }
        for run in self.dirty.within(0..u64::MAX) {
            if self.dirty.total() <= CACHE / 2 {
                break;
            }
            self.destage(medium, run)?;
        }
        Ok(())
    }

    /// Moves what is dirty in a range to the medium.
    fn destage(&mut self, medium: &File, range: Range<u64>) -> Result<()> {
        for run in self.dirty.within(range.clone()) {
            self.copy_to(medium, run)?;
        }
        self.forget(range)
    }

    fn forget(&mut self, range: Range<u64>) -> Result<()> {
        for run in self.dirty.within(range.clone()) {
            punch(&self.file, &run)?;
        }
        self.dirty.remove(range);
        Ok(())
    }

    /// Copies to the medium; holes become holes.
    fn copy_to(&self, medium: &File, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let data = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => data.min(range.end),
                Err(Errno::NXIO) => range.end,
                Err(errno) => return Err(errno),
            };
            if data > at {
                punch(medium, &(at..data))?;
            }
            if data == range.end {
                break;
            }
            let hole = rustix::fs::seek(&self.file, SeekFrom::Hole(data))?.min(range.end);
            copy(&self.file, medium, data..hole)?;
            at = hole;
        }
        Ok(())
    }
}

fn copy(from: &File, to: &File, range: Range<u64>) -> Result<()> {
    let mut buffer = vec![0; COPY.min((range.end - range.start) as usize)];
    for start in range.clone().step_by(COPY) {
        let len = COPY.min((range.end - start) as usize);
        let ranges = [HostRange { address: buffer.as_mut_ptr(), len }];
        Memory { ranges: &ranges, done: 0 }.fill_from(from, start..start + len as u64)?;
        Memory { ranges: &ranges, done: 0 }.drain_into(to, start..start + len as u64)?;
    }
    Ok(())
}

/// Makes bytes of a file zero, by a hole where its filesystem can.
fn punch(file: &File, range: &Range<u64>) -> Result<()> {
    let len = range.end - range.start;
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, hole, range.start, len) {
        Err(Errno::OPNOTSUPP) => {}
        other => return other,
    }
    let zeroes = vec![0u8; COPY.min(len as usize)];
    let mut at = range.start;
    while at < range.end {
        let part = zeroes.len().min((range.end - at) as usize);
        at += rustix::io::pwrite(file, &zeroes[..part], at)? as u64;
    }
    Ok(())
}

fn total(ranges: &[HostRange]) -> u64 {
    ranges.iter().map(|range| range.len as u64).sum()
}

/// The memory of a command, and how much of its first range is done.
struct Memory<'a> {
    ranges: &'a [HostRange],
    done: usize,
}

impl Memory<'_> {
    fn fill_from(&mut self, file: &File, range: Range<u64>) -> Result<()> {
        self.each(range, |address, len, offset| {
            // SAFETY: the kernel checks the address, so that no memory of Rust's can be hit but
            // the command's, which by the contract of `Transport::map` nothing borrows (of our own
            // buffers: which is ours).
            unsafe { libc::pread(file.as_raw_fd(), address.cast(), len, offset) }
        })
    }

    fn drain_into(&mut self, file: &File, range: Range<u64>) -> Result<()> {
        self.each(range, |address, len, offset| {
            // SAFETY: the kernel checks the address, and only reads there.
            unsafe { libc::pwrite(file.as_raw_fd(), address.cast(), len, offset) }
        })
    }

    fn each(&mut self, range: Range<u64>, mut step: impl FnMut(*mut u8, usize, i64) -> isize) -> Result<()> {
        let mut at = range.start;
        while at < range.end {
            let memory = self.ranges[0];
            let len = (memory.len - self.done).min((range.end - at) as usize);
            let moved = match step(memory.address.wrapping_add(self.done), len, at as i64) {
                // The file became shorter.
                0 => return Err(Errno::IO),
                moved if moved > 0 => moved as usize,
                _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                    Some(Errno::INTR) => 0,
                    errno => return Err(errno.unwrap_or(Errno::IO)),
                },
            };
            at += moved as u64;
            self.done += moved;
            if self.done == memory.len {
                self.ranges = &self.ranges[1..];
                self.done = 0;
            }
        }
        Ok(())
    }
}
