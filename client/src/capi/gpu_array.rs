//! Arrays that kernels use, by `gpunvme_array.h`.

use super::{free, keep, null, store, store_handle};
use crate::file::File;
use crate::gpu::{GpuArray, GpuArraySettings, GpuRing, KernelArray};
use rustix::io::Errno;
use std::ffi::{c_int, c_void};

/// See the header.
#[repr(C)]
pub struct Settings {
    page: u32,
    ways: u32,
    cache: u64,
    len: u64,
    writable: u32,
    reserved: [u32; 3],
}

/// See the header.
#[repr(C)]
pub struct Stats {
    hits: u64,
    misses: u64,
    written: u64,
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_array_create(
    ring: *const GpuRing,
    file: *const File,
    settings: *const Settings,
    array: *mut *mut GpuArray,
) -> c_int {
    let (ring, file) = (get!(ring), get!(file));
    if array.is_null() {
        return null("array");
    }
    let mut told = GpuArraySettings::default();
    // SAFETY: the header asks for NULL or settings.
    if let Some(settings) = unsafe { settings.as_ref() } {
        if settings.reserved != [0; 3] {
            keep("what is reserved of the settings is zero".into());
            return -Errno::INVAL.raw_os_error();
        }
        told = GpuArraySettings {
            page: if settings.page == 0 { told.page } else { settings.page as usize },
            cache: if settings.cache == 0 { told.cache } else { settings.cache as usize },
            ways: if settings.ways == 0 { told.ways } else { settings.ways },
            len: (settings.len != 0).then_some(settings.len),
            writable: settings.writable != 0,
        };
    }
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(array, ring.array(file, told)) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_array_destroy(array: *mut GpuArray) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(array) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_array_for_kernels(array: *const GpuArray, version: u32, parameter: *mut c_void) -> c_int {
    let array = get!(array);
    if parameter.is_null() {
        return null("parameter");
    }
    if version != KernelArray::VERSION {
        keep("the kernel was compiled with the gpunvme_array.h of another version of libgpunvme".into());
        return -Errno::INVAL.raw_os_error();
    }
    // SAFETY: it is not NULL, and the header asks for room for a gpunvme::array.
    unsafe { store(parameter.cast::<KernelArray>(), Ok(array.for_kernels())) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_array_flush(array: *mut GpuArray, file: *const File, bytes: *mut u64) -> c_int {
    let file = get!(file);
    // SAFETY: the header asks for NULL or an open handle, which no other thread uses.
    let Some(array) = (unsafe { array.as_mut() }) else { return null("array") };
    let mut unwanted = 0;
    let bytes = if bytes.is_null() { &raw mut unwanted } else { bytes };
    // SAFETY: the header asks for NULL or room for a number.
    unsafe { store(bytes, array.flush(file)) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_array_stats(array: *const GpuArray, stats: *mut Stats) -> c_int {
    let array = get!(array);
    if stats.is_null() {
        return null("stats");
    }
    let found = array.stats().map(|found| Stats { hits: found.hits, misses: found.misses, written: found.written });
    // SAFETY: it is not NULL, and the header asks for room for it.
    unsafe { store(stats, found) }
}
