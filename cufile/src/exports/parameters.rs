//! Parameters.

use super::{list, status, store};
use crate::abi::Status;
use crate::failure::{Code, Result};
use crate::parameters::{self, Slabs};
use std::ffi::{CStr, c_char, c_int, c_uint};

/// # Safety
/// `value` is NULL or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterSizeT(which: c_uint, value: *mut usize) -> Status {
    // SAFETY: as the caller says.
    unsafe { store(value, || parameters::get_size(which)) }
}

/// Sets a number, before the driver opens.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetParameterSizeT(which: c_uint, value: usize) -> Status {
    status(parameters::set_size(which, value))
}

/// # Safety
/// Each is NULL or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterMinMaxValue(which: c_uint, min: *mut usize, max: *mut usize) -> Status {
    let limits =
        parameters::get_limits(which).and_then(|limits| if max.is_null() { Err(Code::InvalidValue.into()) } else { Ok(limits) });
    // SAFETY: as the caller says.
    unsafe {
        store(min, || {
            let (least, most) = limits?;
            max.write(most);
            Ok(least)
        })
    }
}

/// # Safety
/// `value` is NULL or has room for a bool.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterBool(which: c_uint, value: *mut bool) -> Status {
    // SAFETY: as the caller says.
    unsafe { store(value, || parameters::get_switch(which)) }
}

/// Sets a switch, before the driver opens.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetParameterBool(which: c_uint, value: bool) -> Status {
    status(parameters::set_switch(which, value))
}

/// # Safety
/// `text` is NULL or has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterString(which: c_uint, text: *mut c_char, len: c_int) -> Status {
    let get = || -> Result<()> {
        let value = parameters::get_text(which)?;
        let room = usize::try_from(len).map_err(|_| Code::InvalidValue)?;
        if text.is_null() || value.len() >= room {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: the caller vouches for the room, which the text and its end fit into.
        unsafe {
            text.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), value.len());
            text.add(value.len()).write(0);
        }
        Ok(())
    };
    status(get())
}

/// Sets a text, before the driver opens.
///
/// # Safety
/// `text` is NULL or ends in a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterString(which: c_uint, text: *const c_char) -> Status {
    let set = || -> Result<()> {
        if text.is_null() {
            return Err(Code::InvalidValue.into());
        }
        // SAFETY: it is not NULL, and the caller vouches for the end.
        parameters::set_text(which, unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    status(set())
}

/// # Safety
/// Both are NULL or of `len` numbers.
unsafe fn set_slabs(which: Slabs, sizes: *const usize, counts: *const usize, len: c_int) -> Result<()> {
    let len = usize::try_from(len).ok().filter(|&len| len > 0).ok_or(Code::InvalidValue)?;
    // SAFETY: as the caller says.
    let (sizes, counts) = unsafe { (list(sizes, len)?, list(counts, len)?) };
    parameters::set_slabs(which, sizes.iter().copied().zip(counts.iter().copied()).collect())
}

/// # Safety
/// Both are NULL or have room for `len` numbers.
unsafe fn get_slabs(which: Slabs, sizes: *mut usize, counts: *mut usize, len: c_int) -> Result<()> {
    let len = usize::try_from(len).ok().filter(|&len| len > 0).ok_or(Code::InvalidValue)?;
    if sizes.is_null() || counts.is_null() {
        return Err(Code::InvalidValue.into());
    }
    for (at, (size, count)) in parameters::get_slabs(which, len)?.into_iter().enumerate() {
        // SAFETY: the list has `len` entries, which the caller has room for.
        unsafe {
            sizes.add(at).write(size);
            counts.add(at).write(count);
        }
    }
    Ok(())
}

/// Sets the buffers of the compatible path, in KiB, before the driver opens.
///
/// # Safety
/// Both are NULL or of `len` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterPosixPoolSlabArray(sizes: *const usize, counts: *const usize, len: c_int) -> Status {
    // SAFETY: as the caller says.
    status(unsafe { set_slabs(Slabs::Posix, sizes, counts, len) })
}

/// # Safety
/// Both are NULL or have room for `len` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterPosixPoolSlabArray(sizes: *mut usize, counts: *mut usize, len: c_int) -> Status {
    // SAFETY: as the caller says.
    status(unsafe { get_slabs(Slabs::Posix, sizes, counts, len) })
}

/// Sets the buffers in GPU memory, in KiB, before the driver opens.
///
/// # Safety
/// Both are NULL or of `len` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterGpuBounceBufferSlabArray(
    sizes: *const usize,
    counts: *const usize,
    len: c_int,
) -> Status {
    // SAFETY: as the caller says.
    status(unsafe { set_slabs(Slabs::Gpu, sizes, counts, len) })
}

/// # Safety
/// Both are NULL or have room for `len` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterGpuBounceBufferSlabArray(sizes: *mut usize, counts: *mut usize, len: c_int) -> Status {
    // SAFETY: as the caller says.
    status(unsafe { get_slabs(Slabs::Gpu, sizes, counts, len) })
}
