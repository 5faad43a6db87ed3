//! A process of the fuzzer: it makes the calls that it is sent, inside one of the two trees, and
//! answers with their results.

use std::fs::File;
use std::io::{self, BufRead, IoSlice, IoSliceMut, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, SeekFrom, XattrFlags};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Gid, Resource, Rlimit, Uid};
use serde::{Deserialize, Serialize};

use super::call::{Access, Call, Limit, Outcome, SLOTS, Step, Sync, Target, Time, Transfer, Value};
use super::facts::{self, Clock, Facts};
use super::raw::{self, Aligned, Flight, Mapping};
use super::transfers::{is_limited, unlimited, without};
use crate::direct::{Buffer, memfd};

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side {
    /// What programs were written for.
    Ext4,
    /// What has to be like it.
    Gpunvme,
}

/// The identity of a process.
#[derive(Clone, Copy, Debug)]
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: &'static [u32],
    /// Capabilities, by their bits; all that there are for root where there is nothing here.
    pub capabilities: Option<u64>,
}

/// Bits of `CAP_CHOWN`, `CAP_FOWNER` and `CAP_FSETID` (linux/capability.h).
const CHOWN: u64 = 1 << 0;
const FOWNER: u64 = 1 << 3;
const FSETID: u64 = 1 << 4;

/// The processes of each side.
pub const IDENTITIES: [Identity; 5] = [
    Identity { uid: 0, gid: 0, groups: &[], capabilities: None },
    Identity { uid: 1000, gid: 1000, groups: &[2000], capabilities: Some(0) },
    Identity { uid: 1001, gid: 2000, groups: &[], capabilities: Some(0) },
    Identity { uid: 0, gid: 0, groups: &[], capabilities: Some(0) },
    Identity { uid: 1002, gid: 1002, groups: &[2000], capabilities: Some(CHOWN | FOWNER | FSETID) },
];

/// Largest transfer, and the length of the registered buffer.
pub const LARGEST: usize = 2 << 20;

/// What a process has.
pub(super) struct Process {
    pub(super) side: Side,
    slots: Vec<Option<OwnedFd>>,
    mapping: Option<Mapping>,
    /// What mappings are read and written by way of.
    between: File,
    /// Memory for direct transfers, registered with gpunvme.
    pub(super) buffer: Buffer,
    clock: Clock,
}

/// Serves calls from stdin, in the tree at `root`, until its end.
///
/// # Errors
/// Those of pipes, and of the change to its user, groups and capabilities.
pub fn serve(root: &Path, side: Side, identity: &Identity, clock: Clock) -> io::Result<()> {
    raw::ignore_signals();
    rustix::process::chroot(root)?;
    rustix::process::chdir("/")?;
    rustix::process::umask(Mode::empty());
    let directory = File::open("/")?;
    take_place(identity)?;
    let memory = memfd(LARGEST as u64);
    let mut process = Process {
        side,
        slots: (0..SLOTS).map(|_| None).collect(),
        mapping: None,
        between: Mapping::between()?,
        // As many descriptors on both sides.
        buffer: match side {
            Side::Ext4 => Buffer { memory, id: 0 },
            Side::Gpunvme => Buffer::of(memory, &directory, LARGEST as u64)?,
        },
        clock,
    };
    drop(directory);
    let mut answers = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let step: Step = serde_json::from_str(&line?)?;
        let outcome = process.step(&step);
        serde_json::to_writer(&mut answers, &outcome)?;
        answers.write_all(b"\n")?;
        answers.flush()?;
    }
    Ok(())
}

#[allow(deprecated, reason = "rustix has nothing in its place yet")]
fn take_place(identity: &Identity) -> io::Result<()> {
    let groups: Vec<_> = identity.groups.iter().map(|&gid| Gid::from_raw(gid)).collect();
    rustix::thread::set_thread_groups(&groups)?;
    rustix::thread::set_keep_capabilities(true)?;
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    if let Some(bits) = identity.capabilities {
        let set = rustix::thread::CapabilitySet::from_bits_retain(bits);
        let sets = rustix::thread::CapabilitySets {
            effective: set,
            permitted: set,
            inheritable: rustix::thread::CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, sets)?;
    }
    Ok(())
}

impl Process {
    fn step(&mut self, step: &Step) -> Outcome {
        let concerns = if step.look { step.call.concerns() } else { Vec::new() };
        let before: Vec<_> = concerns.iter().map(|target| self.look(target)).collect();
        let mut facts = Facts::default();
        let result = self.call(&step.call, &mut facts);
        for (before, target) in before.iter().zip(&concerns) {
            let after = self.look(target);
            facts.compare(before, &after, self.clock, result.is_ok());
        }
        let value = result.unwrap_or_else(|error| match error.raw_os_error() {
            Some(errno) => -i64::from(errno),
            None => panic!("{error}"),
        });
        Outcome { value, facts: facts.0 }
    }

    fn look(&self, target: &Target) -> facts::Look {
        match target {
            Target::Slot(slot) => match self.slot(*slot) {
                Ok(fd) => facts::look(fd, "", AtFlags::EMPTY_PATH),
                Err(error) => Err(error.raw_os_error().unwrap_or(0)),
            },
            Target::Path(path) => facts::look(CWD, bytes(path), AtFlags::empty()),
            Target::Link(path) => facts::look(CWD, bytes(path), AtFlags::SYMLINK_NOFOLLOW),
        }
    }

    pub(super) fn slot(&self, slot: u8) -> io::Result<BorrowedFd<'_>> {
        let fd = self.slots.get(usize::from(slot)).and_then(Option::as_ref);
        fd.map(AsFd::as_fd).ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    #[allow(clippy::too_many_lines, reason = "one arm for each system call")]
    fn call(&mut self, call: &Call, facts: &mut Facts) -> io::Result<i64> {
        match call {
            Call::Open { slot, path, flags, mode } => {
                self.slots[usize::from(*slot)] = None;
                // A FIFO must not make it wait.
                let flags = OFlags::from_bits_retain(flags.0) | OFlags::CLOEXEC | OFlags::NONBLOCK;
                let fd = rustix::fs::open(bytes(path), flags, Mode::from_bits_retain(*mode))?;
                self.slots[usize::from(*slot)] = Some(fd);
            }
            Call::Close { slot } => {
                self.slot(*slot)?;
                self.slots[usize::from(*slot)] = None;
            }
            Call::Duplicate { slot, to } => {
                let copy = rustix::io::fcntl_dupfd_cloexec(self.slot(*slot)?, 0)?;
                self.slots[usize::from(*to)] = Some(copy);
            }
            Call::Read { slot, at, len, flags } => {
                let mut memory = Aligned::new(*len);
                let n = self.aligned_or_buffered(*slot, *at, *len, None, |fd| match (at, flags) {
                    (None, 0) => Ok(rustix::io::read(fd, memory.as_mut())?),
                    _ => {
                        let mut one = [IoSliceMut::new(memory.as_mut())];
                        Ok(rustix::io::preadv2(fd, &mut one, at.unwrap_or(u64::MAX), ReadWriteFlags::from_bits_retain(*flags))?)
                    }
                })?;
                facts.bytes(&memory.as_ref()[..n]);
                return Ok(n as i64);
            }
            Call::Write { slot, at, len, flags, seed } => {
                let data = Aligned::holding(&content(*seed, at.unwrap_or(0), *len));
                let n = self.aligned_or_buffered(*slot, *at, *len, Some(*flags), |fd| match (at, flags) {
                    (None, 0) => Ok(rustix::io::write(fd, data.as_ref())?),
                    _ => {
                        let one = [IoSlice::new(data.as_ref())];
                        Ok(rustix::io::pwritev2(fd, &one, at.unwrap_or(u64::MAX), ReadWriteFlags::from_bits_retain(*flags))?)
                    }
                })?;
                return Ok(n as i64);
            }
            Call::Seek { slot, whence, offset } => {
                let to = match *whence {
                    libc::SEEK_SET => SeekFrom::Start(*offset as u64),
                    libc::SEEK_CUR => SeekFrom::Current(*offset),
                    libc::SEEK_END => SeekFrom::End(*offset),
                    libc::SEEK_DATA => SeekFrom::Data(*offset as u64),
                    _ => SeekFrom::Hole(*offset as u64),
                };
                let fd = self.slot(*slot)?;
                // Places in a directory are numbers of the filesystem's own
                // (`directory-positions`).
                if FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::Directory {
                    return Err(io::Error::from_raw_os_error(libc::EISDIR));
                }
                return Ok(rustix::fs::seek(fd, to)? as i64);
            }
            Call::Truncate { target: Target::Slot(slot), len } => rustix::fs::ftruncate(self.slot(*slot)?, *len)?,
            Call::Truncate { target: Target::Path(path) | Target::Link(path), len } => raw::truncate(bytes(path), *len)?,
            Call::Allocate { slot, mode, offset, len } => {
                let file = self.slot(*slot)?;
                let done = rustix::fs::fallocate(file, FallocateFlags::from_bits_retain(*mode), *offset, *len);
                if done.is_err() {
                    // `times-of-failures`: so that the times agree from here on.
                    let _ = rustix::fs::futimens(file, &self.clock.timestamps(Time::Omit, Time::Now));
                }
                if done == Err(Errno::FBIG) {
                    // `refused-fallocate`: so that what a change takes from a file is gone on both.
                    let _ = rustix::fs::fstat(file).and_then(|found| rustix::fs::ftruncate(file, found.st_size as u64));
                }
                done?;
            }
            Call::CopyRange { from, to, from_at, to_at, len } => {
                let (mut from_at, mut to_at) = (*from_at, *to_at);
                return self.copy((*from, *to), *len, |from, to, len| {
                    Ok(rustix::fs::copy_file_range(from, from_at.as_mut(), to, to_at.as_mut(), len)?)
                });
            }
            Call::SendFile { from, to, at, len } => {
                let mut at = *at;
                return self.copy((*from, *to), *len, |from, to, len| Ok(rustix::fs::sendfile(to, from, at.as_mut(), len)?));
            }
            Call::Sync { slot, how: Sync::Data } => rustix::fs::fdatasync(self.slot(*slot)?)?,
            Call::Sync { slot, how: Sync::All } => rustix::fs::fsync(self.slot(*slot)?)?,
            Call::Sync { slot, how: Sync::Filesystem } => rustix::fs::syncfs(self.slot(*slot)?)?,
            Call::Map { slot, shared, writable, offset, len } => {
                self.mapping = None;
                let how = if *shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
                let protection = if *writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
                let between = self.between.try_clone()?;
                self.mapping = Some(Mapping::new(self.slot(*slot)?, between, how, protection, *offset, *len)?);
            }
            Call::Use { access, offset, len, seed } => {
                let mapping = self.mapping.as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::ENODATA))?;
                let offset = (*offset).min(mapping.len());
                let len = (*len).min(mapping.len() - offset);
                match access {
                    Access::Read => {
                        let bytes = unlimited(|| mapping.read(offset, len))??;
                        facts.bytes(&bytes);
                        return Ok(bytes.len() as i64);
                    }
                    Access::Write => {
                        return Ok(unlimited(|| mapping.write(offset, &content(*seed, offset as u64, len)))?? as i64);
                    }
                    Access::Sync => mapping.sync()?,
                    Access::Forget => mapping.forget()?,
                }
            }
            Call::Unmap => self.mapping = None,
            Call::Rename { from, to, flags } => {
                rustix::fs::renameat_with(CWD, bytes(from), CWD, bytes(to), RenameFlags::from_bits_retain(*flags))?;
            }
            Call::Link { from, to, follow } => {
                let flags = if *follow { AtFlags::SYMLINK_FOLLOW } else { AtFlags::empty() };
                rustix::fs::linkat(CWD, bytes(from), CWD, bytes(to), flags)?;
            }
            Call::Symlink { target, path } => rustix::fs::symlinkat(bytes(target), CWD, bytes(path))?,
            Call::ReadLink { path } => {
                let target = rustix::fs::readlinkat(CWD, bytes(path), Vec::new())?;
                facts.add("target", String::from_utf8_lossy(target.to_bytes()));
            }
            Call::Unlink { path } => rustix::fs::unlinkat(CWD, bytes(path), AtFlags::empty())?,
            Call::Rmdir { path } => rustix::fs::unlinkat(CWD, bytes(path), AtFlags::REMOVEDIR)?,
            Call::Mkdir { path, mode } => rustix::fs::mkdirat(CWD, bytes(path), Mode::from_bits_retain(*mode))?,
            Call::Mknod { path, mode, device } => {
                let (kind, mode) = (FileType::from_raw_mode(*mode), Mode::from_raw_mode(*mode));
                rustix::fs::mknodat(CWD, bytes(path), kind, mode, *device)?;
            }
            Call::List { path } => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let dir = Dir::new(rustix::fs::open(bytes(path), flags, Mode::empty())?)?;
                let mut names = Vec::new();
                for entry in dir {
                    let entry = entry?;
                    names.push(format!("{:?} {}", entry.file_type(), entry.file_name().to_string_lossy()));
                }
                // Each filesystem has an order of its own.
                names.sort();
                facts.add("names", names.join(","));
            }
            Call::Chmod { target: Target::Slot(slot), mode } => {
                rustix::fs::fchmod(self.slot(*slot)?, Mode::from_bits_retain(*mode))?;
            }
            Call::Chmod { target: Target::Path(path) | Target::Link(path), mode } => {
                rustix::fs::chmodat(CWD, bytes(path), Mode::from_bits_retain(*mode), AtFlags::empty())?;
            }
            Call::Chown { target, uid, gid } => {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                match target {
                    Target::Slot(slot) => rustix::fs::fchown(self.slot(*slot)?, uid, gid)?,
                    Target::Path(path) => rustix::fs::chownat(CWD, bytes(path), uid, gid, AtFlags::empty())?,
                    Target::Link(path) => rustix::fs::chownat(CWD, bytes(path), uid, gid, AtFlags::SYMLINK_NOFOLLOW)?,
                }
            }
            Call::SetTimes { target, accessed, modified } => {
                let times = self.clock.timestamps(*accessed, *modified);
                match target {
                    Target::Slot(slot) => rustix::fs::futimens(self.slot(*slot)?, &times)?,
                    Target::Path(path) => rustix::fs::utimensat(CWD, bytes(path), &times, AtFlags::empty())?,
                    Target::Link(path) => rustix::fs::utimensat(CWD, bytes(path), &times, AtFlags::SYMLINK_NOFOLLOW)?,
                }
            }
            Call::Stat { target } => {
                let look = self.look(target);
                facts.look(&look, self.clock);
                look.map_err(io::Error::from_raw_os_error)?;
            }
            Call::MayAccess { path, mode, effective } => {
                let flags = if *effective { AtFlags::EACCESS } else { AtFlags::empty() };
                rustix::fs::accessat(CWD, bytes(path), rustix::fs::Access::from_bits_retain(*mode), flags)?;
            }
            Call::SetAttribute { target, name, value, flags } => {
                let (name, value, flags) = (bytes(name), value.bytes(), XattrFlags::from_bits_retain(*flags));
                match target {
                    Target::Slot(slot) => rustix::fs::fsetxattr(self.slot(*slot)?, name, &value, flags)?,
                    Target::Path(path) => rustix::fs::setxattr(bytes(path), name, &value, flags)?,
                    Target::Link(path) => rustix::fs::lsetxattr(bytes(path), name, &value, flags)?,
                }
            }
            Call::GetAttribute { target, name, room } => {
                let (name, mut value) = (bytes(name), vec![0; *room]);
                let n = match target {
                    Target::Slot(slot) => rustix::fs::fgetxattr(self.slot(*slot)?, name, &mut value[..])?,
                    Target::Path(path) => rustix::fs::getxattr(bytes(path), name, &mut value[..])?,
                    Target::Link(path) => rustix::fs::lgetxattr(bytes(path), name, &mut value[..])?,
                };
                facts.bytes(&value[..n.min(*room)]);
                return Ok(n as i64);
            }
            Call::ListAttributes { target, room } => {
                let mut list = vec![0; *room];
                let n = match target {
                    Target::Slot(slot) => rustix::fs::flistxattr(self.slot(*slot)?, &mut list[..])?,
                    Target::Path(path) => rustix::fs::listxattr(bytes(path), &mut list[..])?,
                    Target::Link(path) => rustix::fs::llistxattr(bytes(path), &mut list[..])?,
                };
                facts.add("attributes", facts::names(&list[..n.min(*room)]).join(","));
                return Ok(n as i64);
            }
            Call::RemoveAttribute { target, name } => match target {
                Target::Slot(slot) => rustix::fs::fremovexattr(self.slot(*slot)?, bytes(name))?,
                Target::Path(path) => rustix::fs::removexattr(bytes(path), bytes(name))?,
                Target::Link(path) => rustix::fs::lremovexattr(bytes(path), bytes(name))?,
            },
            Call::Limit { which, value } => {
                let which = if *which == Limit::FileSize { Resource::Fsize } else { Resource::Nofile };
                let maximum = rustix::process::getrlimit(which).maximum;
                let current = match (*value, maximum) {
                    (Some(value), Some(maximum)) => Some(value.min(maximum)),
                    (value, maximum) => value.or(maximum),
                };
                rustix::process::setrlimit(which, Rlimit { current, maximum })?;
            }
            Call::Umask { mask } => {
                return Ok(rustix::process::umask(Mode::from_bits_retain(*mask)).bits().into());
            }
            Call::SetFlags { slot, flags } => {
                let flags = OFlags::from_bits_retain(flags.0) | OFlags::NONBLOCK;
                rustix::fs::fcntl_setfl(self.slot(*slot)?, flags)?;
            }
            Call::GetFlags { slot } => return Ok(rustix::fs::fcntl_getfl(self.slot(*slot)?)?.bits().into()),
            Call::Flock { slot, how } => {
                let how = match *how {
                    libc::LOCK_SH => FlockOperation::NonBlockingLockShared,
                    libc::LOCK_EX => FlockOperation::NonBlockingLockExclusive,
                    _ => FlockOperation::NonBlockingUnlock,
                };
                rustix::fs::flock(self.slot(*slot)?, how)?;
            }
            Call::Lock { slot, open_file, test, kind, start, len } => {
                let found = raw::lock(self.slot(*slot)?, *open_file, *test, *kind, *start, *len)?;
                if *test {
                    facts.add("lock", format!("{found:?}"));
                }
            }
            Call::Batch { slot, engine, seed, fresh, transfers } => {
                let mut flights: Vec<_> = transfers.iter().map(|transfer| flight(*seed, transfer)).collect();
                let fd = self.slot(*slot)?;
                if FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::Fifo {
                    // io_uring waits for one that is empty, whatever its flags say.
                    return Err(Errno::AGAIN.into());
                }
                if *fresh {
                    rustix::fs::ftruncate(fd, 0)?;
                    rustix::fs::ftruncate(fd, 4 << 20)?;
                }
                // No system promises which of several appends comes first.
                let mut off = OFlags::APPEND;
                if self.side == Side::Ext4 && is_limited() {
                    // `unaligned-direct`: a limit cuts a write where it likes.
                    off |= OFlags::DIRECT;
                }
                let flags = rustix::fs::fcntl_getfl(fd)?;
                without(fd, flags, off, |fd| raw::fly(fd, *engine, &mut flights))?;
                for (number, flight) in flights.iter().enumerate() {
                    facts.add(format!("result {number}"), flight.result);
                    if !flight.write && flight.result > 0 {
                        facts.bytes(&flight.memory.as_ref()[..flight.result as usize]);
                    }
                }
            }
            Call::DirectWrite { slot, seed, segments } => return self.direct_write(*slot, *seed, segments),
            Call::DirectRead { slot, segments } => {
                let bytes = self.direct_read(*slot, segments)?;
                facts.bytes(&bytes);
                return Ok(bytes.len() as i64);
            }
            Call::Become { uid } => {
                let uid = Uid::from_raw(*uid);
                rustix::thread::set_keep_capabilities(false)?;
                rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            }
        }
        Ok(0)
    }
}

fn flight(seed: u8, transfer: &Transfer) -> Flight {
    let memory =
        if transfer.write { Aligned::holding(&content(seed, transfer.at, transfer.len)) } else { Aligned::new(transfer.len) };
    Flight { write: transfer.write, at: transfer.at, memory, result: 0 }
}

/// Bytes that their place in the file decides, and a seed: transfers that overlap write the same
/// where they do.
pub fn content(seed: u8, at: u64, len: usize) -> Vec<u8> {
    (at..at.saturating_add(len as u64))
        .map(|at| {
            let word =
                (at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(u64::from(seed).wrapping_mul(0x2545_f491_4f6c_dd1d));
            (word >> (8 * (at % 8)) ^ word >> 56) as u8 | 1
        })
        .collect()
}

/// The bytes of a name.
fn bytes(name: &str) -> Vec<u8> {
    name.chars().map(|character| character as u8).collect()
}

impl Value {
    /// As the kernel takes it.
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Pattern(seed, len) => content(*seed, 0, *len),
            Self::Acl(entries) => {
                let mut acl = 2u32.to_le_bytes().to_vec();
                for (tag, permissions, id) in entries {
                    acl.extend(tag.to_le_bytes());
                    acl.extend(permissions.to_le_bytes());
                    acl.extend(id.to_le_bytes());
                }
                acl
            }
            Self::Capability(number) => {
                let mut value = 0x0200_0001u32.to_le_bytes().to_vec();
                let bit: u64 = 1 << number;
                value.extend((bit as u32).to_le_bytes());
                value.extend(0u32.to_le_bytes());
                value.extend(((bit >> 32) as u32).to_le_bytes());
                value.extend(0u32.to_le_bytes());
                value
            }
        }
    }
}
