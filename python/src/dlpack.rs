//! Reads what a DLPack capsule says of a tensor. The capsule stays the owner: it is never
//! consumed, only kept.
//!
//! Source of the structures: `dlpack.h` of DLPack 1.3.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use std::ffi::{CStr, c_void};
use std::slice;

/// `DLDeviceType` of memory that the processor reaches.
pub const CPU: i32 = 1;
/// Of a CUDA device.
pub const CUDA: i32 = 2;
/// Of host memory that CUDA allocated.
pub const CUDA_HOST: i32 = 3;
/// Of managed memory.
pub const CUDA_MANAGED: i32 = 13;

/// `DLDataTypeCode` of complex numbers.
pub const COMPLEX: u8 = 5;

/// What a capsule of a [`Versioned`] is called until it is consumed.
pub const VERSIONED: &CStr = c"dltensor_versioned";

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;
/// `DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED`: items of less than a byte have one each.
const PADDED: u64 = 4;

/// `DLTensor`.
#[repr(C)]
pub struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

impl Versioned {
    /// Has the library that made it end it.
    ///
    /// # Safety
    /// It is one, of whatever version, or null, and is not used afterwards.
    pub unsafe fn delete(managed: *mut Versioned) {
        if managed.is_null() {
            return;
        }
        // SAFETY: the caller vouches for it; the deleter's place is the same in all versions.
        if let Some(delete) = unsafe { (&raw const (*managed).deleter).read() } {
            // SAFETY: as above.
            unsafe { delete(managed) };
        }
    }
}

/// What a library says of a tensor.
pub struct Tensor<'a> {
    pub address: u64,
    pub device_type: i32,
    pub device: i32,
    /// The kind of its items.
    pub code: u8,
    /// Bytes of an item; none where that is no whole number.
    pub item_size: Option<usize>,
    pub shape: &'a [i64],
    /// In items; none where it is contiguous.
    pub strides: Option<&'a [i64]>,
    pub read_only: bool,
}

/// Reads a capsule that `__dlpack__` returned.
///
/// # Errors
/// It is none, or of a version that is not known.
pub fn read<'a>(capsule: &'a Bound<'_, PyCapsule>) -> PyResult<Tensor<'a>> {
    if capsule.is_valid_checked(Some(VERSIONED)) {
        let managed = capsule.pointer_checked(Some(VERSIONED))?.cast::<Versioned>();
        // SAFETY: a capsule of this name that was not consumed holds this structure, whose first
        // two fields are the same in all versions.
        let major = unsafe { (&raw const (*managed.as_ptr()).major).read() };
        if major != 1 {
            return Err(PyBufferError::new_err(format!("a tensor of DLPack {major} cannot be read: 1 is known")));
        }
        // SAFETY: as above, and the rest of it is known.
        let managed = unsafe { managed.as_ref() };
        // SAFETY: the capsule keeps what the structure names.
        return Ok(unsafe { tensor(&managed.tensor, managed.flags) });
    }
    let managed = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlTensor>();
    // SAFETY: a capsule of this name that was not consumed holds a `DLManagedTensor`, which begins
    // with the tensor. It cannot say that it may be written, and those that cannot be are exported
    // so (JAX): like NumPy, it is taken for read-only. The capsule keeps what it names.
    Ok(unsafe { tensor(managed.as_ref(), READ_ONLY) })
}

/// What a structure says that a library filled with what it keeps itself. Whether the memory may
/// be written it does not say.
///
/// # Safety
/// What it names exists for `'a`.
pub unsafe fn borrowed<'a>(filled: DlTensor) -> Tensor<'a> {
    // SAFETY: the caller vouches for it.
    unsafe { tensor(&filled, 0) }
}

/// # Safety
/// The numbers that it names exist for `'a`.
unsafe fn tensor<'a>(tensor: &DlTensor, flags: u64) -> Tensor<'a> {
    let count = usize::try_from(tensor.ndim).unwrap_or(0);
    // SAFETY: where there are dimensions, the structure names as many numbers.
    let numbers = |from: *const i64| unsafe { slice::from_raw_parts(from, count) };
    let given = count > 0 && !tensor.strides.is_null();
    let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
    let is_padded = flags & PADDED != 0 && tensor.lanes == 1;
    Tensor {
        address: (tensor.data as u64).wrapping_add(tensor.byte_offset),
        device_type: tensor.device_type,
        device: tensor.device_id,
        code: tensor.code,
        item_size: (bits.is_multiple_of(8) || is_padded).then_some(bits.div_ceil(8)),
        shape: if count > 0 { numbers(tensor.shape) } else { &[] },
        strides: given.then(|| numbers(tensor.strides)),
        read_only: flags & READ_ONLY != 0,
    }
}
