//! The driver: open, close, version, properties, BARs.

use super::{status, store};
use crate::abi::{Properties, Status};
use crate::failure::{Code, Result};
use crate::{driver, topology, version};
use std::ffi::{CStr, c_char, c_int, c_long, c_uint};

/// Opens the driver, or counts one more use of it.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    status(driver::open())
}

/// Closes the driver, whatever the count: what programs call that were built before cuFile 1.6.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose() -> Status {
    status(driver::close(false))
}

/// Takes one use back, and closes the driver with the last: what `cuFileDriverClose` stands for in
/// C.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose_v2() -> Status {
    status(driver::close(true))
}

/// How many uses were counted.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileUseCount() -> c_long {
    driver::uses()
}

/// The version of cuFile that this library stands for.
///
/// # Safety
/// `version` is NULL or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> Status {
    // SAFETY: as the caller says.
    unsafe { store(version, || Ok(version::reported())) }
}

/// The driver's properties. Opens it.
///
/// # Safety
/// `properties` is NULL or has room for the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(properties: *mut Properties) -> Status {
    // SAFETY: as the caller says.
    unsafe { store(properties, || Ok(driver::open_if_needed()?.properties())) }
}

/// Sets whether to poll for short requests, of up to so many KiB.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetPollMode(poll: bool, threshold: usize) -> Status {
    status(driver::open_if_needed().and_then(|open| open.set_poll(poll, threshold)))
}

/// Sets the longest request to a device, in KiB.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxDirectIOSize(size: usize) -> Status {
    status(driver::open_if_needed().and_then(|open| open.set_max_direct_io(size)))
}

/// Sets how much of a GPU's memory may be used for bouncing, in KiB.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxCacheSize(size: usize) -> Status {
    status(driver::open_if_needed().and_then(|open| open.set_max_cache(size)))
}

/// Sets how much of a GPU's memory may be registered, in KiB.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxPinnedMemSize(size: usize) -> Status {
    status(driver::open_if_needed().and_then(|open| open.set_max_pinned(size)))
}

/// Which filesystems may use which way between SSD and GPU: there are no such settings here.
///
/// # Safety
/// `flags` is NULL or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetP2PFlags(_filesystem: c_uint, flags: *mut c_uint) -> Status {
    // SAFETY: as the caller says.
    unsafe { store(flags, || Err(Code::NotSupported.into())) }
}

/// See [`cuFileDriverGetP2PFlags`].
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetP2PFlags(_filesystem: c_uint, _flags: c_uint) -> Status {
    status(Err(Code::NotSupported.into()))
}

/// The size of a GPU's BAR, in KiB.
///
/// # Safety
/// `size` is NULL or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetBARSizeInKB(gpu: c_int, size: *mut usize) -> Status {
    let find = || topology::bar_kib(usize::try_from(gpu).map_err(|_| Code::InvalidValue)?);
    // SAFETY: as the caller says.
    unsafe { store(size, find) }
}

/// Writes where GPUs and NVMe controllers are on the PCI bus to a file.
///
/// # Safety
/// `path` is NULL or ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileExportPCIeTopology(path: *const c_char) -> Status {
    let export = || -> Result<()> {
        if path.is_null() {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: it is not NULL, and the caller vouches for the end.
        topology::export(unsafe { CStr::from_ptr(path) })
    };
    status(export())
}
