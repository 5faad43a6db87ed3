//! Rings that kernels use, by `gpunvme_device.h`.

use super::{free, keep, null, store, store_handle};
use crate::file::File;
use crate::gpu::{GpuRing, GpuRingSettings, KernelRing};
use crate::mount::Mount;
use crate::ring::Attached;
use rustix::io::Errno;
use std::ffi::{c_int, c_void};
use std::time::Duration;

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_ring_create(
    mount: *const Mount,
    gpu: c_int,
    entries: u32,
    slot: usize,
    patience_ms: u32,
    ring: *mut *mut GpuRing,
) -> c_int {
    let mount = get!(mount);
    if ring.is_null() {
        return null("ring");
    }
    let usual = GpuRingSettings::default();
    let settings = GpuRingSettings {
        entries: if entries == 0 { usual.entries } else { entries },
        slot: if slot == 0 { usual.slot } else { slot },
        patience: if patience_ms == 0 { usual.patience } else { Duration::from_millis(patience_ms.into()) },
    };
    let made = match u32::try_from(gpu) {
        Ok(gpu) => GpuRing::on_gpu(mount, gpu, settings),
        Err(_) => GpuRing::on_cpu(mount, settings),
    };
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(ring, made) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_ring_destroy(ring: *mut GpuRing) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(ring) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_ring_for_kernels(ring: *const GpuRing, version: u32, parameter: *mut c_void) -> c_int {
    let ring = get!(ring);
    if parameter.is_null() {
        return null("parameter");
    }
    if version != KernelRing::VERSION {
        keep("the kernel was compiled with the gpunvme_device.h of another version of libgpunvme".into());
        return -Errno::INVAL.raw_os_error();
    }
    // SAFETY: it is not NULL, and the header asks for room for a gpunvme::ring.
    unsafe { store(parameter.cast::<KernelRing>(), Ok(ring.for_kernels())) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_gpu_ring_attach(ring: *const GpuRing, file: *const File, attached: *mut *mut Attached) -> c_int {
    let (ring, file) = (get!(ring), get!(file));
    if attached.is_null() {
        return null("attached");
    }
    // SAFETY: it is not NULL, and the header asks for room for a pointer.
    unsafe { store_handle(attached, ring.attach(file)) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_attached_name(attached: *const Attached) -> u64 {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { attached.as_ref() }.map_or(0, Attached::name)
}
