//! The buffers that parts pass through. Their number bounds the memory, and with it how many parts
//! are in flight.

use crate::error::{Error, Result};
use gpunvme::{Buffer, Mount, Registered, Segment};
use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Least and most bytes of a part, but where one has to be longer.
const PARTS: (u64, u64) = (64 << 10, 16 << 20);

/// Buffers of one size, made when they are first needed.
#[derive(Debug)]
pub struct Pool {
    mount: Option<Mount>,
    free: Mutex<Vec<Memory>>,
    permits: Arc<Semaphore>,
    part: u64,
    count: usize,
}

#[derive(Debug)]
enum Memory {
    Registered(Registered),
    Plain(Box<[u8]>),
}

/// A buffer of a [`Pool`], to which it goes back.
#[derive(Debug)]
pub struct Lease {
    memory: Option<Memory>,
    pool: Arc<Pool>,
    /// How much of it counts as its content.
    len: usize,
    _permit: OwnedSemaphorePermit,
}

/// Bytes of a part where `count` buffers share `memory` bytes, nothing is longer than `largest`,
/// and no part should be shorter than `least`.
fn part(memory: u64, count: usize, largest: u64, least: u64) -> u64 {
    let least = least.next_multiple_of(PARTS.0).min(memory);
    let most = (memory / count as u64).clamp(PARTS.0, PARTS.1).max(least);
    (most - most % PARTS.0).min(largest.max(1).next_multiple_of(PARTS.0))
}

impl Pool {
    /// At most `count` buffers in `memory` bytes, for objects of at most `largest` bytes or their
    /// parts; registered with `mount` where there is one. Parts have at least `least` bytes if one
    /// fits, and there are fewer buffers then.
    pub fn new(mount: Option<Mount>, memory: u64, count: usize, largest: u64, least: u64) -> Arc<Pool> {
        let part = part(memory, count, largest, least);
        let count = count.min((memory / part).max(1) as usize);
        Arc::new(Pool { mount, free: Mutex::default(), permits: Arc::new(Semaphore::new(count)), part, count })
    }

    /// Bytes of a buffer.
    pub fn part(&self) -> u64 {
        self.part
    }

    /// Buffers that there are at most.
    pub fn count(&self) -> usize {
        self.count
    }

    /// A buffer; waits until one is free.
    ///
    /// # Errors
    /// [`Error::Direct`] where the system or the mount has no more memory for one.
    pub async fn lease(self: &Arc<Pool>) -> Result<Lease> {
        let permit = self.permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match (free, &self.mount) {
            (Some(memory), _) => memory,
            (None, Some(mount)) => Memory::Registered(mount.register(Buffer::memfd(self.part as usize)?)?),
            (None, None) => Memory::Plain(vec![0; self.part as usize].into()),
        };
        Ok(Lease { memory: Some(memory), pool: self.clone(), len: self.part as usize, _permit: permit })
    }
}

impl Lease {
    /// The same buffer with `len` bytes of content.
    pub fn shortened(mut self, len: usize) -> Lease {
        self.len = len.min(self.len);
        self
    }

    /// The buffer, where another process can map it.
    pub fn shared(&self) -> Option<&Registered> {
        match self.memory() {
            Memory::Registered(memory) => Some(memory),
            Memory::Plain(_) => None,
        }
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("a lease has its memory until it is dropped")
    }

    fn memory_mut(&mut self) -> &mut Memory {
        self.memory.as_mut().expect("a lease has its memory until it is dropped")
    }
}

impl Deref for Lease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self.memory() {
            Memory::Registered(memory) => &memory[..self.len],
            Memory::Plain(memory) => &memory[..self.len],
        }
    }
}

impl DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        match self.memory_mut() {
            Memory::Registered(memory) => &mut memory[..len],
            Memory::Plain(memory) => &mut memory[..len],
        }
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}

/// An open file that leases are read from and written to: by the direct path on a gpunvme mount.
#[derive(Debug)]
pub struct Data {
    file: File,
    direct: Option<gpunvme::File>,
}

impl Data {
    /// An open file; `direct` where it lies on a gpunvme mount.
    ///
    /// # Errors
    /// [`Error::Direct`] where the mount does not answer.
    pub fn new(file: OwnedFd, path: &Path, direct: bool) -> Result<Data> {
        let file = File::from(file);
        let direct = match direct {
            true => {
                let copy = file.try_clone().map_err(Error::path(path, "use it twice"))?;
                Some(gpunvme::File::of(copy, path)?)
            }
            false => None,
        };
        Ok(Data { file, direct })
    }

    /// The file itself.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Writes the content of a buffer.
    ///
    /// # Errors
    /// [`Error::Direct`] or [`Error::Path`], with what the filesystem said.
    pub fn write(&self, lease: &Lease, offset: u64, path: &Path) -> Result<()> {
        match (&self.direct, lease.memory()) {
            (Some(file), Memory::Registered(memory)) => {
                file.write(memory, &[Segment { file_offset: offset, buffer_offset: 0, len: lease.len as u64 }])?;
                Ok(())
            }
            _ => self.file.write_all_at(lease, offset).map_err(Error::path(path, "write it")),
        }
    }

    /// Reads as many bytes as the buffer's content is long.
    ///
    /// # Errors
    /// Those of [`Data::write`], and [`Error::ChangedHere`] where the file ends before.
    pub fn read(&self, lease: &mut Lease, offset: u64, path: &Path) -> Result<()> {
        let len = lease.len as u64;
        match (&self.direct, lease.memory_mut()) {
            (Some(file), Memory::Registered(memory)) => {
                let done = file.read(memory, &[Segment { file_offset: offset, buffer_offset: 0, len }])?;
                if done.bytes() < len { Err(Error::ChangedHere(path.into())) } else { Ok(()) }
            }
            _ => match self.file.read_exact_at(lease, offset) {
                Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Err(Error::ChangedHere(path.into())),
                done => done.map_err(Error::path(path, "read it")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_the_memory() {
        let all = u64::MAX / 2;
        let part = |memory, count, largest| part(memory, count, largest, 0);
        assert_eq!((part(256 << 20, 16, all), part(256 << 20, 64, all), part(1 << 40, 16, all)), (16 << 20, 4 << 20, 16 << 20));
        assert_eq!((part(1 << 20, 7, all), part(1, 1, all)), (128 << 10, 64 << 10));
        assert_eq!((part(256 << 20, 16, 100_000), part(256 << 20, 16, 0)), (128 << 10, 64 << 10));
    }

    #[test]
    fn a_part_is_as_long_as_it_has_to_be_if_the_memory_holds_it() {
        let terabyte = 1 << 40;
        let least = terabyte / 10_000;
        let pool = Pool::new(None, 256 << 20, 32, terabyte, least);
        assert!((least..least + PARTS.0).contains(&pool.part()) && pool.count() == 2, "{pool:?}");
        assert_eq!(part(64 << 20, 8, terabyte, least), 64 << 20);
    }

    #[tokio::test]
    async fn there_are_never_more_than_the_memory_holds() {
        let pool = Pool::new(None, 4 << 20, 64, 1 << 30, 0);
        let mut leases = Vec::new();
        while pool.permits.available_permits() > 0 {
            leases.push(pool.lease().await.unwrap());
        }
        assert!(leases.iter().map(|lease| lease.len() as u64).sum::<u64>() <= 4 << 20);
        drop(leases.pop());
        assert_eq!(pool.lease().await.unwrap().len() as u64, pool.part());
    }
}
