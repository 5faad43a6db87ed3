//! NVIDIA's library, for files that lie elsewhere.
//!
//! It guards against going round in circles. That library calls some of its own functions by name,
//! and this one, loaded first, has the same names: so it is opened with `RTLD_DEEPBIND`, by its
//! path, and never if it turns out to be this library. And it guards that no library is loaded that
//! another user put there, unless this user names it.
#![allow(unsafe_code)]

use crate::abi::{Descriptor, KIND_FD, Status};
use crate::environment;
use crate::failure::{Failure, Result};
use crate::files::Direction;
use crate::transfer::Range;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The file's name, in whichever folder.
const NAME: &str = "libcufile.so.0";

type Register = unsafe extern "C" fn(*mut *mut c_void, *const Descriptor) -> Status;
type Transfer = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize;
type InStream = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut usize, *mut i64, *mut i64, *mut isize, *mut c_void) -> Status;

/// The functions that are forwarded to.
pub struct Library {
    register: Register,
    deregister: unsafe extern "C" fn(*mut c_void),
    read: Transfer,
    write: Transfer,
    read_async: InStream,
    write_async: InStream,
    buffer_register: unsafe extern "C" fn(*const c_void, usize, c_int) -> Status,
    buffer_deregister: unsafe extern "C" fn(*const c_void) -> Status,
    stream_register: unsafe extern "C" fn(*mut c_void, c_uint) -> Status,
    stream_deregister: unsafe extern "C" fn(*mut c_void) -> Status,
    close: unsafe extern "C" fn() -> Status,
    /// Whether it has been told of the buffers and streams.
    used: AtomicBool,
}

static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();

impl Library {
    /// The library; looked for when it is first asked for. None where there is none, or
    /// `GPUNVME_CUFILE_REAL` is `off`. What is not found for want of descriptors is looked for
    /// again.
    pub fn get() -> Option<&'static Library> {
        static FINDING: Mutex<()> = Mutex::new(());
        if let Some(known) = LIBRARY.get() {
            return known.as_ref();
        }
        let _finding = FINDING.lock();
        if let Some(known) = LIBRARY.get() {
            return known.as_ref(); // by another thread, meanwhile
        }
        let found = Library::find();
        if found.is_none() && gpunvme_cuda::is_short_of_descriptors() {
            return None;
        }
        LIBRARY.get_or_init(|| found).as_ref()
    }

    /// The library, if it was asked for before.
    pub fn loaded() -> Option<&'static Library> {
        LIBRARY.get()?.as_ref()
    }

    fn find() -> Option<Library> {
        if let Some(path) = environment::variable("GPUNVME_CUFILE_REAL") {
            return if path == "off" { None } else { Library::open(Path::new(&path)) };
        }
        let found = folders().into_iter().filter_map(|folder| folder.join(NAME).canonicalize().ok());
        found.filter(|path| is_trusted(path)).find_map(|path| Library::open(&path))
    }

    fn open(path: &Path) -> Option<Library> {
        let path = path.canonicalize().ok()?;
        if own_path().is_some_and(|own| own == path) {
            return None;
        }
        let name = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: the name ends in a zero byte. What the library does when it is loaded is what it
        // does in every program that uses cuFile.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND) };
        if handle.is_null() {
            tracing::warn!(path = %path.display(), "cuFile's library does not load: {}", load_error());
            return None;
        }
        let symbol = |name: &CStr| {
            // SAFETY: the handle is open, and the name ends in a zero byte.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        };
        macro_rules! function {
            ($name:literal, $type:ty) => {
                // SAFETY: cuFile's function of this name has this signature, in all versions.
                unsafe { std::mem::transmute::<*mut c_void, $type>(symbol($name)?) }
            };
        }
        let library = Library {
            register: function!(c"cuFileHandleRegister", Register),
            deregister: function!(c"cuFileHandleDeregister", unsafe extern "C" fn(*mut c_void)),
            read: function!(c"cuFileRead", Transfer),
            write: function!(c"cuFileWrite", Transfer),
            read_async: function!(c"cuFileReadAsync", InStream),
            write_async: function!(c"cuFileWriteAsync", InStream),
            buffer_register: function!(c"cuFileBufRegister", unsafe extern "C" fn(*const c_void, usize, c_int) -> Status),
            buffer_deregister: function!(c"cuFileBufDeregister", unsafe extern "C" fn(*const c_void) -> Status),
            stream_register: function!(c"cuFileStreamRegister", unsafe extern "C" fn(*mut c_void, c_uint) -> Status),
            stream_deregister: function!(c"cuFileStreamDeregister", unsafe extern "C" fn(*mut c_void) -> Status),
            close: function!(c"cuFileDriverClose", unsafe extern "C" fn() -> Status),
            used: AtomicBool::new(false),
        };
        tracing::debug!(path = %path.display(), "NVIDIA's library serves files elsewhere");
        Some(library)
    }

    /// Registers a file with it. The first time it is told of the buffers and streams that there
    /// are: by `tell`.
    pub fn register(&'static self, file: OwnedFd, tell: impl FnOnce(&Library)) -> Result<RealFile> {
        if !self.used.swap(true, Ordering::SeqCst) {
            tell(self);
        }
        let number = file.as_raw_fd() as u32;
        let descriptor = Descriptor { kind: KIND_FD, handle: number.into(), operations: std::ptr::null() };
        let mut handle = std::ptr::null_mut();
        // SAFETY: both are this function's, and the descriptor stays open as long as the handle.
        check(unsafe { (self.register)(&mut handle, &descriptor) })?;
        Ok(RealFile { library: self, handle: handle as usize, _file: file })
    }

    /// Tells it of memory that was registered. If it does not take it, its transfers bounce.
    pub fn add_buffer(&self, address: u64, len: u64) {
        if self.used.load(Ordering::SeqCst) {
            // SAFETY: the application vouched for the range when it registered it.
            let status = unsafe { (self.buffer_register)(address as *const c_void, len as usize, 0) };
            tracing::debug!(?status, "NVIDIA's library was told of a buffer");
        }
    }

    /// The memory is registered no longer.
    pub fn remove_buffer(&self, address: u64) {
        if self.used.load(Ordering::SeqCst) {
            // SAFETY: it is a number to be looked up.
            let _ = unsafe { (self.buffer_deregister)(address as *const c_void) }; // it may not have taken it
        }
    }

    /// Tells it of a stream, or that the stream ends.
    pub fn stream(&self, stream: usize, flags: Option<u32>) {
        if !self.used.load(Ordering::SeqCst) {
            return;
        }
        let stream = stream as *mut c_void;
        // SAFETY: the application vouches for its stream.
        let _ = unsafe {
            match flags {
                Some(flags) => (self.stream_register)(stream, flags),
                None => (self.stream_deregister)(stream),
            }
        }; // it has other ways
    }

    /// Closes it, if it was used.
    pub fn close(&self) {
        if self.used.swap(false, Ordering::SeqCst) {
            // SAFETY: all its files are deregistered, and nothing is in flight.
            let _ = unsafe { (self.close)() }; // the process goes on without it
        }
    }
}

/// A file that is registered with it.
pub struct RealFile {
    library: &'static Library,
    handle: usize,
    _file: OwnedFd,
}

impl RealFile {
    /// Moves bytes, and waits for it.
    ///
    /// # Safety
    /// The range is memory of the application's, which nothing else uses until this returns.
    pub unsafe fn transfer(&self, direction: Direction, range: Range) -> Result<usize> {
        // It looks for a buffer that is registered by the address where that begins.
        let (handle, memory) = (self.handle as *mut c_void, range.base as *mut c_void);
        let memory_offset = (range.address - range.base) as i64;
        let call = if direction == Direction::Read { self.library.read } else { self.library.write };
        // SAFETY: the handle is registered; the caller vouches for the memory.
        let moved = unsafe { call(handle, memory, range.len, range.file_offset as i64, memory_offset) };
        let errno = std::io::Error::last_os_error();
        usize::try_from(moved).map_err(|_| match moved {
            -1 => Failure::System(Errno::from_io_error(&errno).unwrap_or(Errno::IO)),
            code => Failure::Real(Status { code: -code as i32, cuda: 0 }),
        })
    }

    /// Puts a request into a stream.
    ///
    /// # Safety
    /// As cuFile asks of `cuFileReadAsync`.
    pub unsafe fn in_stream(&self, direction: Direction, request: &crate::streams::Request) -> Result<()> {
        let call = if direction == Direction::Read { self.library.read_async } else { self.library.write_async };
        let crate::streams::Request { memory, size, file_offset, memory_offset, done, stream } = *request;
        // SAFETY: the handle is registered; the caller vouches for the rest.
        check(unsafe { call(self.handle as *mut c_void, memory, size, file_offset, memory_offset, done, stream) })
    }
}

impl Drop for RealFile {
    fn drop(&mut self) {
        // SAFETY: it was registered, and nothing refers to it any more.
        unsafe { (self.library.deregister)(self.handle as *mut c_void) }
    }
}

fn check(status: Status) -> Result<()> {
    if status.code == 0 { Ok(()) } else { Err(Failure::Real(status)) }
}

/// Where it may lie, in the order in which it is looked for: where the loader would find it, beside
/// libraries of CUDA's that this process has loaded, and where CUDA is installed.
fn folders() -> Vec<PathBuf> {
    let listed = environment::variable("LD_LIBRARY_PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::env::split_paths(&listed).filter(|folder| folder.is_absolute()).collect();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    folders.extend(maps.lines().filter_map(folder_of_library).map(Path::to_owned));
    folders.extend(
        ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
            .map(PathBuf::from),
    );
    folders
}

/// The folder of a library of CUDA's, if that is what a line of proc_pid_maps(5) is about. Other
/// files may lie where anyone may put a library beside them.
fn folder_of_library(line: &str) -> Option<&Path> {
    let is_code = line.split(' ').nth(1)?.contains('x');
    let path = Path::new(&line[line.find('/')?..]);
    let name = path.file_name()?.to_str()?;
    (is_code && name.starts_with("libcu") && name.contains(".so")).then_some(path.parent()?)
}

/// Whether only root and this user may put something else in the place of a file: by writing to
/// it, or to a folder on the way to it. `path` has no links.
fn is_trusted(path: &Path) -> bool {
    let is_trusted = path.ancestors().all(is_kept);
    if !is_trusted {
        tracing::warn!(path = %path.display(), "another user may replace it: not taken unless GPUNVME_CUFILE_REAL names it");
    }
    is_trusted
}

/// Whether only root and this user may change what a path names. A group may write to it if it is
/// root's, or the one that a user has alone, whose number is the user's. In a folder with the
/// sticky bit others cannot rename or remove what is not theirs.
fn is_kept(path: &Path) -> bool {
    const GROUP: u32 = 0o020;
    const OTHERS: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let trusted = [0, rustix::process::geteuid().as_raw()];
    path.metadata().is_ok_and(|found| {
        let by_others = found.mode() & OTHERS != 0 || found.mode() & GROUP != 0 && !trusted.contains(&found.gid());
        trusted.contains(&found.uid()) && (!by_others || found.is_dir() && found.mode() & STICKY != 0)
    })
}

/// The file of this library.
fn own_path() -> Option<PathBuf> {
    // SAFETY: a `Dl_info` of zeros is four null pointers and numbers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: it looks the address of a function of this library up, and writes the structure.
    let found = unsafe { libc::dladdr(own_path as *const c_void, &mut info) } != 0 && !info.dli_fname.is_null();
    // SAFETY: the loader's names end in a zero byte, and stay as long as the library.
    let name = found.then(|| unsafe { CStr::from_ptr(info.dli_fname) })?;
    Path::new(std::ffi::OsStr::from_bytes(name.to_bytes())).canonicalize().ok()
}

fn load_error() -> String {
    // SAFETY: it returns a string of this thread's, or NULL.
    let said: *const c_char = unsafe { libc::dlerror() };
    // SAFETY: as above; it is copied at once.
    if said.is_null() { String::new() } else { unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned() }
}
