//! Files, moved to and from registered buffers.
//!
//! It guards the promise that a call does what it says whatever its size: more segments, or more
//! bytes, than one ioctl carries become several, and what is reported is their sum. And it guards
//! that memory which a device may still write to is not handed back as the caller's.

use crate::buffer::{Memory, Registered};
use crate::codes::{reason, status};
use crate::connection::{Connection, Limits, failed};
use crate::error::{Error, Result};
use crate::mount::Mount;
use crate::transfer::{Moved, Require, Transfer};
use crate::{directory, opening, socket, sys};
use gpunvme_abi::{self as abi, Command, Extent, Reason, ResolveFlags, Route, Segment, TransferFlags};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// An open regular file of a mount.
#[derive(Debug)]
pub struct File {
    file: OwnedFd,
    path: PathBuf,
    /// The number of its filesystem (`st_dev`).
    filesystem: u64,
    limits: Limits,
    /// The daemon's last grant for it; 0 before the first.
    grant: AtomicU64,
    /// See [`File::kept`].
    kept: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl File {
    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`Error::NotGpunvme`] where it lies on another filesystem, [`Error::WrongKind`] where it is
    /// no regular file, [`Error::Path`] where it cannot be opened, [`Error::OtherVersion`] where
    /// the daemon is another version's.
    pub fn open(path: impl AsRef<Path>) -> Result<File> {
        File::with_flags(path.as_ref(), OFlags::RDONLY, Mode::empty())
    }

    /// Opens a file for reading and writing, and creates it where there is none.
    ///
    /// # Errors
    /// As [`File::open`].
    pub fn create(path: impl AsRef<Path>) -> Result<File> {
        File::with_flags(path.as_ref(), OFlags::RDWR | OFlags::CREATE, Mode::from_raw_mode(0o666))
    }

    /// As open(2), but that a file elsewhere is neither created nor truncated, and that `O_TRUNC`
    /// needs a file open for writing.
    pub(crate) fn with_flags(path: &Path, flags: OFlags, mode: Mode) -> Result<File> {
        let file = File::of(opening::open(path, flags, mode)?, path)?;
        if flags.contains(OFlags::TRUNC) {
            file.set_size(0)?;
        }
        Ok(file)
    }

    /// A file that is open already; `path` is for messages.
    ///
    /// # Errors
    /// As [`File::open`].
    pub fn of(file: impl Into<OwnedFd>, path: impl AsRef<Path>) -> Result<File> {
        let (file, path) = (file.into(), path.as_ref());
        let lost = |errno| Error::Path { path: path.to_owned(), action: "ask what it is", errno };
        let stat = rustix::fs::fstat(&file).map_err(lost)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Error::WrongKind { path: path.to_owned(), needed: "must be a regular file" });
        }
        // What is kept of the mount keeps no other file open.
        let limits = match Connection::known(stat.st_dev) {
            Some(connection) => connection.limits,
            None => {
                let copy = file.try_clone().map_err(|error| lost(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
                Mount::of(copy, path)?.connection().limits
            }
        };
        Ok(File { file, path: path.to_owned(), filesystem: stat.st_dev, limits, grant: AtomicU64::new(0), kept: OnceLock::new() })
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command on this file whose argument is one structure.
    pub(crate) fn call<T: IntoBytes + FromBytes + Immutable>(
        &self,
        command: Command,
        mut argument: T,
        action: &'static str,
    ) -> Result<T> {
        sys::ioctl(self.file.as_fd(), command.request(0), argument.as_mut_bytes()).map_err(|errno| self.failed(action, errno))?;
        Ok(argument)
    }

    /// The number of its filesystem (`st_dev`).
    pub(crate) fn filesystem(&self) -> u64 {
        self.filesystem
    }

    /// What the layer above keeps with it for as long as it is open, made the first time.
    ///
    /// # Panics
    /// For a second type: there is one such layer.
    pub(crate) fn kept<T: Any + Send + Sync + Default>(&self) -> &T {
        let kept = self.kept.get_or_init(|| Box::<T>::default());
        kept.downcast_ref().expect("one layer keeps something with a file")
    }

    /// Its size in bytes, now.
    ///
    /// # Errors
    /// [`Error::Path`] with what fstat(2) said.
    pub fn size(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.file).map_err(|errno| self.failed("ask its size", errno))?;
        Ok(stat.st_size as u64)
    }

    /// Its size as the kernel knows it: the daemon is not asked.
    pub(crate) fn known_size(&self) -> Result<u64> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = rustix::fs::statx(&self.file, c"", flags, StatxFlags::SIZE);
        found.map(|found| found.stx_size).map_err(|errno| self.failed("ask its size", errno))
    }

    /// Device and inode, which no other file has.
    pub(crate) fn identity(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.file).map_err(|errno| self.failed("ask what it is", errno))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Whether it is open for reading and writing.
    pub(crate) fn is_writable(&self) -> Result<bool> {
        let flags = rustix::fs::fcntl_getfl(&self.file).map_err(|errno| self.failed("ask how it is open", errno))?;
        Ok(flags & OFlags::RWMODE == OFlags::RDWR)
    }

    /// Fills `bytes` as pread(2) does.
    pub(crate) fn read_at(&self, mut bytes: &mut [u8], mut offset: u64) -> Result<()> {
        while !bytes.is_empty() {
            let read = rustix::io::pread(&self.file, &mut *bytes, offset).map_err(|errno| self.failed("read it", errno))?;
            if read == 0 {
                return Err(self.failed("read it: it became shorter", Errno::IO));
            }
            (bytes, offset) = (&mut bytes[read..], offset + read as u64);
        }
        Ok(())
    }

    /// Writes all bytes as pwrite(2) does.
    pub(crate) fn write_at(&self, mut bytes: &[u8], mut offset: u64) -> Result<()> {
        while !bytes.is_empty() {
            let written = rustix::io::pwrite(&self.file, bytes, offset).map_err(|errno| self.failed("write to it", errno))?;
            (bytes, offset) = (&bytes[written..], offset + written as u64);
        }
        Ok(())
    }

    /// Sets its size in bytes. Bytes that are added read as zeros.
    ///
    /// # Errors
    /// [`Error::Path`] with what ftruncate(2) said, also where it is not open for writing.
    pub fn set_size(&self, size: u64) -> Result<()> {
        rustix::fs::ftruncate(&self.file, size).map_err(|errno| self.failed("change its size", errno))
    }

    /// The mount it lies on. It asks the daemon, and takes a descriptor for as long as the mount,
    /// or a buffer of it, is in use: of a directory above the file, so that the file is not kept
    /// open, or of the file where the caller can open none (it is mounted itself, or the caller may
    /// read no directory above it).
    ///
    /// # Errors
    /// [`Error::Path`] where the daemon does not answer, or there are too many descriptors.
    pub fn mount(&self) -> Result<Mount> {
        match directory::above(self.file.as_fd()) {
            Some((directory, path)) => Mount::of(directory, &path),
            None => self.mount_for_now(),
        }
    }

    /// The mount it lies on, which keeps the file open: for moments.
    fn mount_for_now(&self) -> Result<Mount> {
        let file = self
            .file
            .try_clone()
            .map_err(|error| self.failed("use it twice", Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        Mount::of(file, &self.path)
    }

    /// Reads each segment into the buffer, and waits for it.
    ///
    /// Offsets and lengths are bytes, and need no alignment: what is a multiple of
    /// [`crate::Info::logical_block`] in the file, and of [`crate::Info::memory_alignment`] in the
    /// buffer, moves without a copy. One segment of which the kernel's page cache has all is copied
    /// from there ([`Route::Cache`]), up to 4 MiB, unless [`File::set_caching`] forbids it. Ends
    /// early, and successfully, where the file does; the segments behind that are then not read.
    /// Any number of threads may call it at once, each with a buffer of its own.
    ///
    /// # Errors
    /// [`Error::OutsideBuffer`] before anything moved. [`Error::Transfer`] says what was moved
    /// before; the buffer may have changed in all of the segments then. With `ECONNABORTED` or
    /// `ENOTCONN` the daemon died, and the device may still write what was to be read:
    /// [`crate::Buffer`] has other memory with the same bytes there then; [`crate::HostMemory`] and
    /// [`crate::DeviceMemory`] may change in the segments for as long as the device takes. Any of
    /// them is [`Error::LostBuffer`] afterwards.
    pub fn read<M: Memory>(&self, buffer: &mut Registered<M>, segments: &[Segment]) -> Result<Transfer> {
        self.read_requiring(buffer, segments, Require::default())
    }

    /// [`File::read`], with demands on the way it is done.
    ///
    /// # Errors
    /// Those of [`File::read`].
    pub fn read_requiring<M: Memory>(
        &self,
        buffer: &mut Registered<M>,
        segments: &[Segment],
        require: Require,
    ) -> Result<Transfer> {
        if require.route != Some(Route::Cache) {
            return self.read_to(buffer, segments, require.flags());
        }
        buffer.holds(segments)?;
        let refused = |why: Option<Reason>| {
            let reason = why.unwrap_or(Reason::RouteNotAvailable);
            self.transfer_failed(Command::Read, Errno::OPNOTSUPP, reason, None, Transfer::default())
        };
        self.read_resident(buffer, segments, require.flags(), true).map_err(refused)
    }

    /// Reads segments into registered memory: out of the page cache, where that has them, or by the
    /// daemon. What [`File::transfer`] asks of a caller holds here too.
    pub(crate) fn read_to<M: Memory>(
        &self,
        buffer: &Registered<M>,
        segments: &[Segment],
        flags: TransferFlags,
    ) -> Result<Transfer> {
        buffer.holds(segments)?;
        let cache_reason = match self.read_resident(buffer, segments, flags, false) {
            Ok(done) => return Ok(done),
            Err(why) => why,
        };
        let done = self.transfer(Command::Read, buffer, segments, flags)?;
        Ok(Transfer { cache_reason, ..done })
    }

    /// Writes each segment from the buffer, and waits for it. The file becomes longer where it
    /// ends before.
    ///
    /// Offsets and lengths are bytes, and need no alignment: what is a multiple of
    /// [`crate::Info::block_size`] in the file, and of [`crate::Info::memory_alignment`] in the
    /// buffer, moves without a copy. Like write(2) it is durable after fsync(2).
    ///
    /// # Errors
    /// [`Error::OutsideBuffer`] before anything moved. [`Error::Transfer`] says what was moved
    /// before.
    pub fn write<M: Memory>(&self, buffer: &Registered<M>, segments: &[Segment]) -> Result<Transfer> {
        self.write_requiring(buffer, segments, Require::default())
    }

    /// [`File::write`], with demands on the way it is done.
    ///
    /// # Errors
    /// Those of [`File::write`].
    pub fn write_requiring<M: Memory>(&self, buffer: &Registered<M>, segments: &[Segment], require: Require) -> Result<Transfer> {
        self.transfer(Command::Write, buffer, segments, require.flags())
    }

    /// Where its bytes lie on the device: the extents that touch the `len` bytes at `offset`, in
    /// order. What is not covered is a hole. Each item may be an error ([`Error::Path`]), and is
    /// the last then. The answer is no lease: the file may change a moment later.
    pub fn resolve(&self, offset: u64, len: u64) -> Extents<'_> {
        Extents { file: self, next: offset, end: offset.saturating_add(len), found: VecDeque::new(), over: len == 0 }
    }

    /// Has the kernel write back what processes stored into shared mappings of a range, so that a
    /// transfer finds it; to the end of the file where `len` is 0. Offset and length are bytes.
    /// False where this process may not: the daemon then makes the kernel write back and drop what
    /// it has cached of what is transferred. [`File::read`] and [`File::write`] call it themselves.
    ///
    /// # Errors
    /// [`Error::Path`] where the kernel could not write, with the error that fsync(2) would give.
    pub fn write_back(&self, offset: u64, len: u64) -> Result<bool> {
        let len = if offset.saturating_add(len) > abi::MAX_OFFSET { 0 } else { len };
        match sys::write_back(self.file.as_fd(), offset, len) {
            Ok(()) => Ok(true),
            Err(errno @ (Errno::IO | Errno::NOSPC | Errno::DQUOT)) => {
                Err(self.failed("write back what was stored into it", errno))
            }
            Err(_) => Ok(false),
        }
    }

    /// As [`File::write_back`], of what ranges of the file cover together.
    pub(crate) fn write_back_all(&self, ranges: impl Iterator<Item = (u64, u64)> + Clone) -> Result<bool> {
        let Some(start) = ranges.clone().map(|(offset, _)| offset).min() else { return Ok(true) };
        let end = ranges.map(|(offset, len)| offset.saturating_add(len)).max().unwrap_or(start);
        if end == start { Ok(true) } else { self.write_back(start, end - start) }
    }

    /// How many bytes of the `len` at `offset` the kernel has in its page cache, counted in whole
    /// pages. It tells only the file's owner, and users who may write to it: others hear that it
    /// has all.
    ///
    /// # Errors
    /// [`Error::Path`] where the file is not open for reading, or cannot be mapped.
    pub fn resident(&self, offset: u64, len: u64) -> Result<u64> {
        let len = len.min(self.size()?.saturating_sub(offset));
        sys::resident(self.file.as_fd(), offset, len).map_err(|errno| self.failed("ask what of it is in the page cache", errno))
    }

    /// Makes a request with what shows how the file is open: its descriptor, and a grant that the
    /// daemon gave before, or 0. `ask` returns the grant of the answer, and whether the daemon may
    /// not look at this process's descriptors; then one is sent over the socket, once.
    pub(crate) fn show<T>(&self, mut ask: impl FnMut(i32, u64) -> (T, u64, Option<Errno>)) -> Result<T> {
        let descriptor = self.file.as_raw_fd();
        let (mut answer, mut grant, hidden) = ask(descriptor, self.grant.load(Ordering::Relaxed));
        if let Some(ioctl) = hidden {
            let path = self.mount_for_now()?.connection().socket.clone();
            let sent = socket::grant(&path, self.file.as_fd());
            match sent.map_err(|errno| Error::NotReachable { ioctl, socket: path.clone(), errno })? {
                (None, given) => (answer, grant, _) = ask(descriptor, given.grant),
                (Some(errno), _) => return Err(Error::NotReachable { ioctl, socket: path, errno }),
            }
        }
        if grant != 0 {
            self.grant.store(grant, Ordering::Relaxed);
        }
        Ok(answer)
    }

    /// Moves segments between the file and registered memory. A caller that reads must see to it
    /// that no other code uses those parts of the buffer meanwhile; [`File::read`] borrows it
    /// mutably.
    pub(crate) fn transfer<M: Memory>(
        &self,
        command: Command,
        buffer: &Registered<M>,
        segments: &[Segment],
        flags: TransferFlags,
    ) -> Result<Transfer> {
        buffer.holds(segments)?;
        let is_written_back = self.write_back_all(segments.iter().map(|segment| (segment.file_offset, segment.len)))?;
        let flags = if is_written_back { flags | TransferFlags::WRITTEN_BACK } else { flags };
        let mut done = Transfer::default();
        let mut batch = Batch::new(self.limits.segments, self.limits.bytes, segments);
        let mut argument = Vec::new();
        while let Some((first, part)) = batch.next() {
            let asked: u64 = part.iter().map(|segment| segment.len).sum();
            let header =
                abi::Transfer { buffer: buffer.id, flags: flags.bits(), segments: part.len() as u32, ..abi::Transfer::default() };
            let (result, answer) = self.show(|descriptor, grant| {
                argument.clear();
                argument.extend_from_slice(abi::Transfer { descriptor, grant, ..header.clone() }.as_bytes());
                argument.extend_from_slice(part.as_bytes());
                let result = sys::ioctl(self.file.as_fd(), command.request(part.len()), &mut argument);
                let (answer, _) = abi::Transfer::read_from_prefix(&argument).expect("the argument begins with a header");
                let hidden = result.err().filter(|_| answer.reason == Reason::DescriptorHidden.code());
                let grant = answer.grant;
                ((result, answer), grant, hidden)
            })?;
            if command == Command::Read && matches!(result, Err(Errno::CONNABORTED | Errno::NOTCONN)) {
                buffer.lose(part);
            }
            let failed = result.err().or(status(answer.status));
            let abi::Transfer { p2p, bounce, host, hole, edge, .. } = answer;
            let moved = Moved { p2p, bounce, cache: 0, host, hole, edge };
            let why = (answer.reason != 0).then(|| reason(answer.reason));
            if result.is_ok() {
                done.add(&Transfer { moved, reason: why, cache_reason: None });
            }
            if let Some(errno) = failed {
                let segment =
                    (answer.status != 0 && answer.failed_segment != u32::MAX).then(|| first as u32 + answer.failed_segment);
                return Err(self.transfer_failed(command, errno, why.unwrap_or(Reason::None), segment, done));
            }
            if moved.total() < asked {
                if command == Command::Read {
                    break;
                }
                // The daemon owes a status for this; a file with a gap in it must not pass for
                // written.
                return Err(self.transfer_failed(command, Errno::IO, Reason::None, None, done));
            }
        }
        Ok(done)
    }

    fn transfer_failed(&self, command: Command, errno: Errno, reason: Reason, segment: Option<u32>, done: Transfer) -> Error {
        let action = if command == Command::Read { "read" } else { "write" };
        Error::Transfer { path: self.path.clone(), action, errno, reason, segment, offset: None, done }
    }

    fn failed(&self, action: &'static str, errno: Errno) -> Error {
        Error::Path { path: self.path.clone(), action, errno }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Cuts segments into what one ioctl carries.
struct Batch<'a> {
    max_segments: usize,
    max_bytes: u64,
    segments: &'a [Segment],
    /// The first segment not yet done, and how much of it is.
    at: usize,
    within: u64,
    part: Vec<Segment>,
}

impl<'a> Batch<'a> {
    fn new(max_segments: usize, max_bytes: u64, segments: &'a [Segment]) -> Self {
        Batch { max_segments, max_bytes, segments, at: 0, within: 0, part: Vec::with_capacity(segments.len().min(max_segments)) }
    }

    /// The index of the segment that the next part begins with, and the part.
    fn next(&mut self) -> Option<(usize, &[Segment])> {
        let first = self.at;
        let mut room = self.max_bytes;
        self.part.clear();
        while let Some(segment) = self.segments.get(self.at)
            && self.part.len() < self.max_segments
            && room > 0
        {
            let len = (segment.len - self.within).min(room);
            self.part.push(Segment {
                file_offset: segment.file_offset + self.within,
                buffer_offset: segment.buffer_offset + self.within,
                len,
            });
            room -= len;
            self.within += len;
            if self.within == segment.len {
                self.at += 1;
                self.within = 0;
            }
        }
        (!self.part.is_empty()).then_some((first, &self.part[..]))
    }
}

/// The extents of a range of a file: see [`File::resolve`].
#[derive(Debug)]
pub struct Extents<'a> {
    file: &'a File,
    next: u64,
    end: u64,
    found: VecDeque<Extent>,
    over: bool,
}

impl Extents<'_> {
    fn fetch(&mut self) -> Result<()> {
        let len = self.end - self.next;
        let is_written_back = self.file.write_back(self.next, len)?;
        let flags = if is_written_back { ResolveFlags::WRITTEN_BACK } else { ResolveFlags::empty() };
        let header = abi::Resolve {
            flags: flags.bits(),
            offset: self.next,
            len,
            capacity: abi::MAX_EXTENTS as u32,
            ..abi::Resolve::default()
        };
        let mut argument = header.as_bytes().to_vec();
        argument.resize(argument.len() + abi::MAX_EXTENTS * size_of::<Extent>(), 0);
        sys::ioctl(self.file.as_fd(), Command::Resolve.request(abi::MAX_EXTENTS), &mut argument).map_err(
            |errno| match errno {
                // The file is one of ours: the range is none.
                Errno::INVAL => Error::Path { path: self.file.path.clone(), action: "tell where such a range lies", errno },
                errno => failed(&self.file.path, "tell where it lies", errno),
            },
        )?;
        let (answer, extents) = abi::Resolve::read_from_prefix(&argument).expect("the argument begins with a header");
        for extent in extents.chunks_exact(size_of::<Extent>()).take(answer.count as usize) {
            self.found.push_back(Extent::read_from_bytes(extent).expect("a chunk has the size of an extent"));
        }
        // A daemon that does not get on would be asked for ever.
        self.over = answer.next >= self.end.min(answer.file_size) || answer.next <= self.next;
        self.next = answer.next;
        Ok(())
    }
}

impl Iterator for Extents<'_> {
    type Item = Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.found.is_empty() && !self.over {
            if let Err(error) = self.fetch() {
                self.over = true;
                return Some(Err(error));
            }
        }
        self.found.pop_front().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(file_offset: u64, buffer_offset: u64, len: u64) -> Segment {
        Segment { file_offset, buffer_offset, len }
    }

    /// Whatever the limits, the parts put together are the segments.
    #[test]
    fn batches_add_up() {
        let segments = [segment(0, 100, 10), segment(50, 0, 0), segment(1000, 200, 95), segment(7, 300, 1)];
        let bytes = |segments: &[Segment]| -> Vec<(u64, u64)> {
            segments.iter().flat_map(|s| (0..s.len).map(|at| (s.file_offset + at, s.buffer_offset + at))).collect()
        };
        for max_segments in 1..5 {
            for max_bytes in [1, 3, 10, 64, 1000] {
                let mut batch = Batch::new(max_segments, max_bytes, &segments);
                let mut all = Vec::new();
                while let Some((first, part)) = batch.next() {
                    assert!(part.len() <= max_segments && part.iter().map(|s| s.len).sum::<u64>() <= max_bytes);
                    let origin = segments[first];
                    assert!(part[0].file_offset >= origin.file_offset && part[0].file_offset <= origin.file_offset + origin.len);
                    all.extend(bytes(part));
                }
                assert_eq!(all, bytes(&segments));
            }
        }
    }

    #[test]
    fn elsewhere_nothing_is_created_or_truncated() {
        let directory = tempfile::tempdir().unwrap();
        let (file, new) = (directory.path().join("precious"), directory.path().join("new"));
        std::fs::write(&file, "content").unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("new", &link).unwrap();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        for path in [&file, &new, &link] {
            let refused = File::with_flags(path, flags, Mode::from_raw_mode(0o666)).unwrap_err();
            assert!(matches!(refused, Error::NotGpunvme { path: ref named } if named == path), "{refused}");
        }
        assert_eq!(std::fs::read(&file).unwrap(), b"content");
        assert!(!new.exists());
        let exclusive = File::with_flags(&file, flags | OFlags::EXCL, Mode::empty()).unwrap_err();
        assert!(matches!(exclusive, Error::NotGpunvme { .. }), "{exclusive}");
        let root = File::with_flags(Path::new("/"), flags, Mode::empty()).unwrap_err();
        assert!(matches!(root, Error::Path { errno: Errno::ISDIR, .. }), "{root}");
    }
}
