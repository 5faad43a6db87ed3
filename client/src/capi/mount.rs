//! Mounts.

use super::{fail, free, null, path, store, store_handle};
use crate::mount::Mount;
use gpunvme_abi as abi;
use std::ffi::{c_char, c_int};

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_open(name: *const c_char, mount: *mut *mut Mount) -> c_int {
    if name.is_null() || mount.is_null() {
        return null("path and mount");
    }
    // SAFETY: neither is NULL, and the header asks for a string and for room for a pointer.
    unsafe { store_handle(mount, Mount::open(path(name))) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_info(mount: *const Mount, info: *mut abi::Info) -> c_int {
    let mount = get!(mount);
    if info.is_null() {
        return null("info");
    }
    // SAFETY: it is not NULL, and the header asks for room for the structure.
    unsafe { store(info, mount.connection().raw_info()) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_stats(mount: *const Mount, stats: *mut abi::Stats) -> c_int {
    let mount = get!(mount);
    if stats.is_null() {
        return null("stats");
    }
    // SAFETY: it is not NULL, and the header asks for room for the structure.
    unsafe { store(stats, mount.connection().raw_stats()) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_close(mount: *mut Mount) {
    // SAFETY: the header asks for NULL or an open handle.
    unsafe { free(mount) }
}

/// See the header.
///
/// # Safety
/// Pointers are as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpunvme_mount_sync(mount: *const Mount) -> c_int {
    get!(mount).sync().map_or_else(|error| fail(&error), |()| 0)
}
