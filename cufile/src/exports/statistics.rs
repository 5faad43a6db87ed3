//! Statistics. Their structures grew with cuFile 1.19, so that they are filled as the version has
//! them that this library reports.

use super::{status, store};
use crate::abi::{Level1, PerGpu, Sizes, Status, Vectored};
use crate::failure::{Code, Result};
use crate::statistics::Told;
use crate::{driver, statistics, version};
use std::ffi::{c_int, c_void};

/// Counts again, after [`cuFileStatsStop`]. Before that a level is enough.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStart() -> Status {
    status(driver::opened().map(|_| statistics::start()))
}

/// Ends counting. What was counted can still be asked for.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStop() -> Status {
    status(driver::opened().map(|_| statistics::stop()))
}

/// Sets what was counted to zero.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsReset() -> Status {
    status(driver::opened().map(|_| statistics::reset()))
}

/// Sets how much is counted: 0 for nothing, to 3.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetStatsLevel(level: c_int) -> Status {
    status(statistics::set_level(level))
}

/// # Safety
/// `level` is NULL or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsLevel(level: *mut c_int) -> Status {
    // SAFETY: as the caller says.
    unsafe { store(level, || Ok(statistics::level())) }
}

/// Writes what there is up to a level.
///
/// # Errors
/// [`Code::InvalidValue`] where less is counted.
///
/// # Safety
/// `to` is NULL or has room for that level's structure, of the version that is reported.
unsafe fn tell(to: *mut c_void, level: i32) -> Result<()> {
    if to.is_null() {
        return Err(Code::InvalidValue.into());
    }
    driver::opened()?;
    if statistics::level() < level {
        return Err(Code::InvalidValue.into());
    }
    let Told { basic, vectored, sizes, gpus } = statistics::told();
    // SAFETY: each structure follows the one before it, and their lengths are multiples of 8; the
    // caller vouches for the room.
    unsafe {
        let mut at = to.cast::<u8>();
        at.cast::<Level1>().write_unaligned(basic);
        at = at.add(size_of::<Level1>());
        if version::counts_vectors() {
            at.cast::<Vectored>().write_unaligned(vectored);
            at = at.add(size_of::<Vectored>());
        }
        if level >= 2 {
            at.cast::<Sizes>().write_unaligned(sizes);
            at = at.add(size_of::<Sizes>());
        }
        if level >= 3 {
            at.cast::<PerGpu>().write_unaligned(gpus);
        }
    }
    Ok(())
}

/// # Safety
/// `to` is NULL or has room for the structure of the version that is reported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL1(to: *mut c_void) -> Status {
    // SAFETY: as the caller says.
    status(unsafe { tell(to, 1) })
}

/// # Safety
/// As [`cuFileGetStatsL1`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL2(to: *mut c_void) -> Status {
    // SAFETY: as the caller says.
    status(unsafe { tell(to, 2) })
}

/// # Safety
/// As [`cuFileGetStatsL1`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL3(to: *mut c_void) -> Status {
    // SAFETY: as the caller says.
    status(unsafe { tell(to, 3) })
}
