//! cuFile's functions, looked up in the library as a program does that loads it, and memory of the
//! software GPU.

use std::ffi::{CString, c_char, c_int, c_long, c_uint, c_void};
use std::fs::File;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

use gpunvme_cuda::{Cuda, DeviceAllocation, Gpu, Stream, Which};
use gpunvme_tests::cuda::Pinned;
use gpunvme_tests::programs;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub c_int, pub c_int);

pub const OK: Status = Status(0, 0);

/// An error of cuFile's own.
pub fn refused(code: c_int) -> Status {
    Status(code, 0)
}

#[repr(C)]
pub struct Descriptor {
    pub kind: c_int,
    pub number: u64,
    pub operations: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchRequest {
    pub mode: c_uint,
    pub memory: u64,
    pub file_offset: i64,
    pub memory_offset: i64,
    pub size: usize,
    pub file: usize,
    pub opcode: c_uint,
    pub cookie: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchEvent {
    pub cookie: usize,
    pub status: c_uint,
    pub result: isize,
}

pub const COMPLETE: c_uint = 0x10;
pub const CANCELED: c_uint = 0x08;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions, by their names in C.
        #[allow(non_snake_case)]
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            fn load() -> Library {
                let path = CString::new(path().to_str().unwrap()).unwrap();
                // SAFETY: the library is made to be loaded so.
                let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                assert!(!handle.is_null(), "{path:?} does not load");
                Library {
                    $($name: {
                        let name = CString::new(stringify!($name)).unwrap();
                        // SAFETY: the handle is open; the function has this signature.
                        unsafe {
                            let found = libc::dlsym(handle, name.as_ptr());
                            assert!(!found.is_null(), "{name:?} is missing");
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(found)
                        }
                    },)*
                }
            }
        }
    };
}

functions! {
    cuFileDriverOpen: fn() -> Status;
    cuFileDriverClose: fn() -> Status;
    cuFileDriverClose_v2: fn() -> Status;
    cuFileUseCount: fn() -> c_long;
    cuFileHandleRegister: fn(*mut usize, *const Descriptor) -> Status;
    cuFileHandleDeregister: fn(usize) -> ();
    cuFileBufRegister: fn(u64, usize, c_int) -> Status;
    cuFileBufDeregister: fn(u64) -> Status;
    cuFileRead: fn(usize, u64, usize, i64, i64) -> isize;
    cuFileWrite: fn(usize, u64, usize, i64, i64) -> isize;
    cuFileReadv: fn(usize, *const (u64, usize), usize, i64, c_uint) -> isize;
    cuFileWritev: fn(usize, *const (u64, usize), usize, i64, c_uint) -> isize;
    cuFileReadAsync: fn(usize, u64, *mut usize, *mut i64, *mut i64, *mut isize, usize) -> Status;
    cuFileWriteAsync: fn(usize, u64, *mut usize, *mut i64, *mut i64, *mut isize, usize) -> Status;
    cuFileStreamRegister: fn(usize, c_uint) -> Status;
    cuFileStreamDeregister: fn(usize) -> Status;
    cuFileBatchIOSetUp: fn(*mut usize, c_uint) -> Status;
    cuFileBatchIOSubmit: fn(usize, c_uint, *const BatchRequest, c_uint) -> Status;
    cuFileBatchIOGetStatus: fn(usize, c_uint, *mut c_uint, *mut BatchEvent, *const libc::timespec) -> Status;
    cuFileBatchIOCancel: fn(usize) -> Status;
    cuFileBatchIODestroy: fn(usize) -> ();
    cuFileDriverGetProperties: fn(*mut [u32; 14]) -> Status;
    cuFileDriverSetPollMode: fn(bool, usize) -> Status;
    cuFileDriverSetMaxDirectIOSize: fn(usize) -> Status;
    cuFileDriverSetMaxCacheSize: fn(usize) -> Status;
    cuFileDriverSetMaxPinnedMemSize: fn(usize) -> Status;
    cuFileDriverGetP2PFlags: fn(c_uint, *mut c_uint) -> Status;
    cuFileDriverSetP2PFlags: fn(c_uint, c_uint) -> Status;
    cuFileGetBARSizeInKB: fn(c_int, *mut usize) -> Status;
    cuFileExportPCIeTopology: fn(*const c_char) -> Status;
    cuFileSetParameterSizeT: fn(c_uint, usize) -> Status;
    cuFileGetParameterSizeT: fn(c_uint, *mut usize) -> Status;
    cuFileGetParameterMinMaxValue: fn(c_uint, *mut usize, *mut usize) -> Status;
    cuFileSetParameterBool: fn(c_uint, bool) -> Status;
    cuFileGetParameterBool: fn(c_uint, *mut bool) -> Status;
    cuFileSetParameterString: fn(c_uint, *const c_char) -> Status;
    cuFileGetParameterString: fn(c_uint, *mut c_char, c_int) -> Status;
    cuFileSetParameterPosixPoolSlabArray: fn(*const usize, *const usize, c_int) -> Status;
    cuFileGetParameterPosixPoolSlabArray: fn(*mut usize, *mut usize, c_int) -> Status;
    cuFileSetParameterGpuBounceBufferSlabArray: fn(*const usize, *const usize, c_int) -> Status;
    cuFileGetParameterGpuBounceBufferSlabArray: fn(*mut usize, *mut usize, c_int) -> Status;
    cuFileStatsStart: fn() -> Status;
    cuFileStatsStop: fn() -> Status;
    cuFileStatsReset: fn() -> Status;
    cuFileSetStatsLevel: fn(c_int) -> Status;
    cuFileGetStatsLevel: fn(*mut c_int) -> Status;
    cuFileGetStatsL1: fn(*mut u64) -> Status;
    cuFileGetStatsL2: fn(*mut u64) -> Status;
    cuFileGetStatsL3: fn(*mut u64) -> Status;
}

/// The library as it is built.
pub fn path() -> PathBuf {
    programs::path("libgpunvme_cufile.so")
}

/// The library, loaded.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(Library::load)
}

/// The library, whose driver is closed when this is dropped: registered files keep a volume
/// mounted.
pub struct InUse;

/// The library, for as long as a test runs.
pub fn in_use() -> InUse {
    InUse
}

impl Deref for InUse {
    type Target = Library;

    fn deref(&self) -> &Library {
        library()
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        library().close();
    }
}

impl Library {
    /// Registers an open file, and returns its handle.
    pub fn register(&self, file: &File) -> Result<usize, Status> {
        self.register_number(file.as_raw_fd())
    }

    /// Registers whatever is behind a number.
    pub fn register_number(&self, number: c_int) -> Result<usize, Status> {
        let descriptor = Descriptor { kind: 1, number: u64::from(number as u32), operations: ptr::null() };
        let mut handle = 0;
        // SAFETY: both are this function's.
        match unsafe { (self.cuFileHandleRegister)(&mut handle, &descriptor) } {
            OK => Ok(handle),
            error => Err(error),
        }
    }

    pub fn deregister(&self, handle: usize) {
        // SAFETY: a handle is a number to be looked up.
        unsafe { (self.cuFileHandleDeregister)(handle) }
    }

    /// Reads, and returns what cuFile returns.
    pub fn read(&self, handle: usize, memory: u64, len: usize, file_offset: i64, memory_offset: i64) -> isize {
        // SAFETY: tests name memory of their own, or what is to be refused.
        unsafe { (self.cuFileRead)(handle, memory, len, file_offset, memory_offset) }
    }

    pub fn write(&self, handle: usize, memory: u64, len: usize, file_offset: i64, memory_offset: i64) -> isize {
        // SAFETY: as for `read`.
        unsafe { (self.cuFileWrite)(handle, memory, len, file_offset, memory_offset) }
    }

    /// Reads one range of a file into many of memory, by address and length.
    pub fn readv(&self, handle: usize, vectors: &[(u64, usize)], file_offset: i64) -> isize {
        // SAFETY: as for `read`.
        unsafe { (self.cuFileReadv)(handle, vectors.as_ptr(), vectors.len(), file_offset, 0) }
    }

    pub fn writev(&self, handle: usize, vectors: &[(u64, usize)], file_offset: i64) -> isize {
        // SAFETY: as for `read`.
        unsafe { (self.cuFileWritev)(handle, vectors.as_ptr(), vectors.len(), file_offset, 0) }
    }

    /// Registers memory. What is none is to be refused.
    pub fn add_buffer(&self, address: u64, len: usize) -> Status {
        // SAFETY: it is a range to be looked up.
        unsafe { (self.cuFileBufRegister)(address, len, 0) }
    }

    pub fn remove_buffer(&self, address: u64) -> Status {
        // SAFETY: it is a number to be looked up.
        unsafe { (self.cuFileBufDeregister)(address) }
    }

    pub fn close(&self) -> Status {
        // SAFETY: it takes nothing.
        unsafe { (self.cuFileDriverClose)() }
    }
}

pub fn gpu() -> Gpu {
    Cuda::load().unwrap().gpu(Which::Index(0)).unwrap()
}

/// Memory of a GPU.
pub struct Device {
    pub memory: DeviceAllocation,
    stream: Stream,
}

impl Device {
    /// Holds these bytes.
    pub fn with(bytes: &[u8]) -> Device {
        let device = Device { memory: gpu().alloc(bytes.len()).unwrap(), stream: gpu().stream().unwrap() };
        device.put(bytes);
        device
    }

    pub fn zeroed(len: usize) -> Device {
        Device::with(&vec![0; len])
    }

    pub fn address(&self) -> u64 {
        self.memory.address()
    }

    pub fn put(&self, bytes: &[u8]) {
        // SAFETY: the memory is this value's, and as long; the copy is waited for.
        unsafe { self.stream.copy_in(self.address(), bytes.as_ptr() as u64, bytes.len()) }.unwrap();
        self.stream.synchronize().unwrap();
    }

    pub fn get(&self, from: usize, len: usize) -> Vec<u8> {
        let mut pinned = Pinned::new(gpu(), self.memory.len());
        pinned.get(&self.stream, self.address(), self.memory.len())[from..from + len].to_vec()
    }
}
