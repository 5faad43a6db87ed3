//! The ioctl as bytes: what a program without the library would send, and what it gets back.
//!
//! The tests of the direct path use this and not the client library, so that they can also send
//! what the library never would, and so that a mistake which both ends of the library share is
//! still seen.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use gpunvme_abi::{Command, Extent, Info, Register, Resolve, Segment, Stats, Transfer, Unregister};
use rustix::fs::{MemfdFlags, SealFlags};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::sys;

/// One command with `entries` behind its header. What comes back is written over both, when the
/// call fails too.
///
/// # Errors
/// The ioctl's errno.
pub fn call<H, E>(file: impl AsFd, command: Command, header: &mut H, entries: &mut [E]) -> io::Result<()>
where
    H: FromBytes + IntoBytes + Immutable + KnownLayout,
    E: FromBytes + IntoBytes + Immutable + KnownLayout,
{
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(entries.as_bytes());
    let result = sys::ioctl(file.as_fd(), command.request(entries.len()), &mut bytes);
    let (head, tail) = bytes.split_at(size_of::<H>());
    header.as_mut_bytes().copy_from_slice(head);
    entries.as_mut_bytes().copy_from_slice(tail);
    result.map(|_| ())
}

/// A command without entries.
///
/// # Errors
/// The ioctl's errno.
pub fn call_plain<H>(file: impl AsFd, command: Command, header: &mut H) -> io::Result<()>
where
    H: FromBytes + IntoBytes + Immutable + KnownLayout,
{
    call::<H, Segment>(file, command, header, &mut [])
}

/// `INFO`.
pub fn info(file: impl AsFd) -> Info {
    let mut info = Info::default();
    call_plain(file, Command::Info, &mut info).expect("INFO");
    info
}

/// `STATS`.
pub fn stats(file: impl AsFd) -> Stats {
    let mut stats = Stats::default();
    call_plain(file, Command::Stats, &mut stats).expect("STATS");
    stats
}

/// All extents of a file, asked for a few at a time.
pub fn extents(file: impl AsFd) -> Vec<Extent> {
    let file = file.as_fd();
    let mut all: Vec<Extent> = Vec::new();
    let mut offset = 0;
    loop {
        let mut few = [Extent::new_zeroed(); 5];
        let mut resolve = Resolve { offset, len: u64::MAX, capacity: 5, ..Resolve::default() };
        call(file, Command::Resolve, &mut resolve, &mut few).expect("RESOLVE");
        all.extend(&few[..resolve.count as usize]);
        if resolve.next >= resolve.file_size || resolve.count == 0 {
            return all;
        }
        assert!(resolve.next > offset, "RESOLVE goes on from {offset} to {}", resolve.next);
        offset = resolve.next;
    }
}

/// A memfd of `len` bytes that can be registered: sealed against shrinking.
pub fn memfd(len: u64) -> File {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    let memfd = File::from(fd);
    memfd.set_len(len).expect("memory");
    rustix::fs::fallocate(&memfd, rustix::fs::FallocateFlags::empty(), 0, len).expect("memory"); // our own driver needs all of it
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK).expect("a seal");
    memfd
}

/// A registered memfd.
#[derive(Debug)]
pub struct Buffer {
    /// The memory.
    pub memory: File,
    /// What `REGISTER` called it.
    pub id: u64,
}

impl Buffer {
    /// Registers `len` bytes on the mount that `file` is on.
    pub fn new(file: impl AsFd, len: u64) -> Self {
        let buffer = Self::of(memfd(len), file, len).expect("REGISTER");
        assert_ne!(buffer.id, 0);
        buffer
    }

    /// Registers a memfd that is there.
    ///
    /// # Errors
    /// The ioctl's errno.
    pub fn of(memory: File, file: impl AsFd, len: u64) -> io::Result<Self> {
        let mut register = Register { fd: memory.as_raw_fd(), len, ..Register::default() };
        call_plain(file, Command::Register, &mut register)?;
        Ok(Self { memory, id: register.buffer })
    }

    /// `READ` or `WRITE` of segments given as (file offset, buffer offset, length).
    ///
    /// # Errors
    /// The ioctl's errno.
    pub fn transfer(&self, command: Command, file: impl AsFd, segments: &[(u64, u64, u64)]) -> io::Result<Transfer> {
        let mut segments: Vec<_> =
            segments.iter().map(|&(file_offset, buffer_offset, len)| Segment { file_offset, buffer_offset, len }).collect();
        let descriptor = file.as_fd().as_raw_fd();
        let mut transfer = Transfer { buffer: self.id, segments: segments.len() as u32, descriptor, ..Transfer::default() };
        call(file, command, &mut transfer, &mut segments)?;
        let sum = transfer.p2p + transfer.bounce + transfer.host + transfer.hole + transfer.edge;
        assert_eq!(transfer.bytes, sum, "bytes by route add up");
        Ok(transfer)
    }

    /// `READ` from `offset` of the file to the beginning of the buffer.
    ///
    /// # Errors
    /// The ioctl's errno.
    pub fn read(&self, file: impl AsFd, offset: u64, len: u64) -> io::Result<Transfer> {
        self.transfer(Command::Read, file, &[(offset, 0, len)])
    }

    /// `WRITE` from the beginning of the buffer to `offset` of the file.
    ///
    /// # Errors
    /// The ioctl's errno.
    pub fn write(&self, file: impl AsFd, offset: u64, len: u64) -> io::Result<Transfer> {
        self.transfer(Command::Write, file, &[(offset, 0, len)])
    }

    /// Bytes of the buffer.
    pub fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read_exact_at(&mut bytes, offset).expect("memory");
        bytes
    }

    /// Changes bytes of the buffer.
    pub fn put(&self, offset: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, offset).expect("memory");
    }

    /// `UNREGISTER`; returns the memory.
    ///
    /// # Errors
    /// The ioctl's errno.
    pub fn unregister(self, file: impl AsFd) -> io::Result<File> {
        call_plain(file, Command::Unregister, &mut Unregister { buffer: self.id, ..Unregister::default() })?;
        Ok(self.memory)
    }
}
