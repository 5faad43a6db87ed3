//! What a program would use instead of an array over a file: managed memory that it is read into,
//! and a mapping of it that is registered with CUDA.

use super::application::{Memory, managed, ok};
use cudarc::driver::sys;
use gpunvme_cuda::{Gpu, HostRegistration};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::thread;

/// Threads that read a file.
const READERS: usize = 8;
const HUGE_PAGE: usize = 2 << 20;

/// A file in managed memory, read there by several threads of the processor. Kernels that use it
/// have the driver move its pages.
pub fn managed_words(gpu: Gpu, path: &Path) -> Memory {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    let memory = managed(gpu, len.next_multiple_of(HUGE_PAGE));
    // SAFETY: it is that long, the processor reaches it, and nothing else uses it yet.
    let bytes = unsafe { std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(memory.address() as usize), len) };
    let each = len.div_ceil(READERS).next_multiple_of(4096);
    thread::scope(|scope| {
        for (n, part) in bytes.chunks_mut(each).enumerate() {
            let file = &file;
            scope.spawn(move || file.read_exact_at(part, (n * each) as u64).unwrap());
        }
    });
    memory
}

/// Moves the first bytes of managed memory to a GPU at once, as a program does that knows what its
/// kernels need.
pub fn move_to(gpu: Gpu, memory: &Memory, len: u64) {
    let _entered = gpu.enter().unwrap();
    let mut device = 0;
    // SAFETY: the memory is managed and that long; the calls write a number, and move pages by the
    // default stream.
    unsafe {
        ok(sys::cuDeviceGet(&mut device, gpu.index() as i32));
        ok(sys::cuMemPrefetchAsync(memory.address(), len as usize, device, ptr::null_mut()));
        ok(sys::cuStreamSynchronize(ptr::null_mut()));
    }
}

/// A mapping of a file that kernels read: every word comes over the bus.
pub struct MappedFile {
    registration: Option<HostRegistration>,
    address: *mut c_void,
    len: usize,
    device: u64,
}

impl MappedFile {
    /// Maps and registers it, which reads it into the page cache.
    ///
    /// # Errors
    /// What CUDA says.
    pub fn new(gpu: Gpu, path: &Path) -> Result<MappedFile, String> {
        let file = File::open(path).unwrap();
        let len = (file.metadata().unwrap().len() as usize).next_multiple_of(4096);
        // SAFETY: a new mapping touches none that there is.
        let address = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED | MapFlags::POPULATE, &file, 0) };
        let mut mapped = MappedFile { registration: None, address: address.unwrap(), len, device: 0 };
        let first = NonNull::new(mapped.address.cast()).unwrap();
        // SAFETY: it is unregistered before it is unmapped.
        let registration = unsafe { HostRegistration::read_only(&gpu, first, len) }.map_err(|error| error.to_string())?;
        mapped.device = registration.device_address(&gpu).map_err(|error| error.to_string())?;
        mapped.registration = Some(registration);
        Ok(mapped)
    }

    /// Where kernels find it.
    pub fn address(&self) -> u64 {
        self.device
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        self.registration = None;
        // SAFETY: it was mapped here, and nothing uses it any more.
        unsafe { munmap(self.address, self.len) }.unwrap();
    }
}
