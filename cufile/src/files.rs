//! The files that the application registered, and who serves each.
//!
//! A handle is a number that is never given twice: one that is unknown, or no longer known, is told
//! apart from every other without looking at memory.
//!
//! Locks: `Files::table`, for moments.

use crate::driver::Open;
use crate::failure::{Code, Failure, Result};
use crate::mounts::OnMount;
use crate::real::{Library, RealFile};
use gpunvme::{Error, File};
use parking_lot::RwLock;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// `FUSE_SUPER_MAGIC` of linux/magic.h. Only files of FUSE are asked whether they are gpunvme's.
const FUSE: u64 = 0x6573_5546;
/// The lowest bits of a handle: no pointer that C's malloc returns has them.
const TAG: usize = 0b1011;

/// A registered file.
pub struct Registered {
    number: i32,
    /// Another descriptor of the application's open file.
    opened: OwnedFd,
    readable: bool,
    writable: bool,
    pub server: Server,
}

/// Who moves the bytes of a file.
pub enum Server {
    /// gpunvme: it lies on one of its mounts.
    Mount(MountFile),
    /// NVIDIA's library.
    Real(RealFile),
    /// pread(2) and pwrite(2) on a descriptor without `O_DIRECT`, which need no alignment.
    Plain(OwnedFd),
}

/// A file of a gpunvme mount.
pub struct MountFile {
    pub file: File,
    pub mount: Arc<OnMount>,
}

impl Registered {
    /// Checks that the file was opened for what is asked for.
    ///
    /// # Errors
    /// `EBADF`, as read(2) and write(2).
    pub fn check(&self, direction: Direction) -> Result<()> {
        if self.allows(direction) { Ok(()) } else { Err(Errno::BADF.into()) }
    }

    /// Whether the file was opened for what is asked for.
    pub fn allows(&self, direction: Direction) -> bool {
        match direction {
            Direction::Read => self.readable,
            Direction::Write => self.writable,
        }
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

/// The registered files.
#[derive(Default)]
pub struct Files {
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    files: HashMap<usize, Arc<Registered>>,
    /// Handles by descriptor.
    by_number: HashMap<i32, usize>,
}

impl Table {
    /// A descriptor is registered once; one that was closed and is another open file's now is free.
    fn check_free(&self, number: i32) -> Result<()> {
        let known = self.by_number.get(&number).and_then(|handle| self.files.get(handle));
        if known.is_some_and(|known| crate::memory::is_same_open_file(number, known.opened.as_fd())) {
            Err(Code::HandleAlreadyRegistered.into())
        } else {
            Ok(())
        }
    }
}

impl Files {
    /// Registers the file behind a descriptor of the application, and returns its handle.
    pub fn register(&self, open: &Open, number: i32) -> Result<usize> {
        let file = crate::memory::duplicate(number)?;
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Code::InvalidFileType.into());
        }
        let flags = rustix::fs::fcntl_getfl(&file)?;
        if flags.contains(OFlags::PATH) {
            return Err(Code::InvalidOpenFlag.into());
        }
        self.table.read().check_free(number)?;
        let opened = file.try_clone().map_err(|_| Code::NoDescriptor)?;
        let mode = flags & OFlags::RWMODE;
        // Where requests go is said by their offsets.
        let file = if flags.contains(OFlags::APPEND) { reopen(&file, flags, OFlags::APPEND)? } else { file };
        let server = serve(open, file, number, stat.st_dev, flags)?;
        let (readable, writable) = (mode != OFlags::WRONLY, mode != OFlags::RDONLY);
        let registered = Arc::new(Registered { number, opened, readable, writable, server });
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        let handle = NEXT.fetch_add(1, Ordering::Relaxed) << 4 | TAG;
        let mut table = self.table.write();
        // Another thread may have done the same meanwhile.
        table.check_free(number)?;
        table.by_number.insert(number, handle);
        table.files.insert(handle, registered);
        Ok(handle)
    }

    /// The file behind a handle.
    ///
    /// # Errors
    /// [`Code::HandleNotRegistered`].
    pub fn get(&self, handle: usize) -> Result<Arc<Registered>> {
        self.table.read().files.get(&handle).cloned().ok_or(Code::HandleNotRegistered.into())
    }

    /// Takes a file out. Requests in flight go on.
    pub fn remove(&self, handle: usize) -> Result<()> {
        let mut table = self.table.write();
        let file = table.files.remove(&handle).ok_or(Code::HandleNotRegistered)?;
        if table.by_number.get(&file.number) == Some(&handle) {
            table.by_number.remove(&file.number);
        }
        drop(table); // the file's end may be long
        Ok(())
    }
}

fn proc_path(number: i32) -> PathBuf {
    format!("/proc/self/fd/{number}").into()
}

/// Finds who serves a file.
fn serve(open: &Open, file: OwnedFd, number: i32, device: u64, flags: OFlags) -> Result<Server> {
    if rustix::fs::fstatfs(&file)?.f_type as u64 == FUSE {
        let path = std::fs::read_link(proc_path(number)).unwrap_or_else(|_| proc_path(number));
        match File::of(file.try_clone().map_err(|_| Code::NoDescriptor)?, &path) {
            Ok(file) => {
                let mount = open.mounts.of(&file, device)?;
                tracing::debug!(path = %path.display(), "gpunvme serves it");
                return Ok(Server::Mount(MountFile { file, mount }));
            }
            Err(Error::NotGpunvme { .. }) => {}
            Err(error) => {
                // On our own mount nothing falls back in silence.
                tracing::error!(%error, "a file of a gpunvme mount cannot be served");
                return Err((&error).into());
            }
        }
    }
    if let Some(library) = Library::get() {
        tracing::debug!(number, "NVIDIA's library serves it");
        let tell = |library: &Library| {
            open.buffers.tell(library);
            open.streams.tell(library);
        };
        return library.register(file, tell).map(Server::Real);
    }
    tracing::debug!(number, "pread and pwrite serve it");
    if !flags.contains(OFlags::DIRECT) {
        return Ok(Server::Plain(file));
    }
    match reopen(&file, flags, OFlags::DIRECT | OFlags::APPEND) {
        Err(Failure::Cufile(Code::InvalidOpenFlag)) => Ok(Server::Plain(file)),
        buffered => buffered.map(Server::Plain),
    }
}

/// The file behind a descriptor, opened with its flags but for some.
///
/// # Errors
/// `EMFILE` and `ENFILE` where there are no more descriptors; [`Code::InvalidOpenFlag`] where the
/// kernel does not open it again for another reason.
fn reopen(file: &OwnedFd, flags: OFlags, but: OFlags) -> Result<OwnedFd> {
    let flags = flags.difference(but | OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC) | OFlags::CLOEXEC;
    rustix::fs::open(proc_path(file.as_raw_fd()), flags, Mode::empty()).map_err(|errno| match errno {
        Errno::MFILE | Errno::NFILE => errno.into(),
        _ => Code::InvalidOpenFlag.into(),
    })
}
