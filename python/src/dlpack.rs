//! Reads what a DLPack capsule says of a tensor. The capsule stays the owner: it is never
//! consumed, only kept.
//!
//! Source of the structures: `dlpack.h` of DLPack 1.1.

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods};
use std::ffi::c_void;

/// `DLDeviceType` of memory that the processor reaches.
pub const CPU: i32 = 1;
/// Of a CUDA device.
pub const CUDA: i32 = 2;
/// Of host memory that CUDA allocated.
pub const CUDA_HOST: i32 = 3;
/// Of managed memory.
pub const CUDA_MANAGED: i32 = 13;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

#[repr(C)]
struct DlTensor {
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
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: *mut c_void,
    flags: u64,
    tensor: DlTensor,
}

/// What a capsule says.
pub struct Tensor {
    pub address: u64,
    pub item_size: usize,
    pub shape: Vec<i64>,
    /// In items; none where it is contiguous.
    pub strides: Option<Vec<i64>>,
    pub read_only: bool,
}

/// Reads a capsule that `__dlpack__` returned.
///
/// # Errors
/// It is none, or of a version that is not known.
pub fn read(capsule: &Bound<'_, PyCapsule>) -> PyResult<Tensor> {
    if capsule.is_valid_checked(Some(c"dltensor_versioned")) {
        let managed = capsule.pointer_checked(Some(c"dltensor_versioned"))?.cast::<Versioned>();
        // SAFETY: a capsule of this name that was not consumed holds this structure, whose first
        // two fields are the same in all versions.
        let major = unsafe { (&raw const (*managed.as_ptr()).major).read() };
        if major != 1 {
            return Err(PyBufferError::new_err(format!("a tensor of DLPack {major} cannot be read: 1 is known")));
        }
        // SAFETY: as above, and the rest of it is known.
        let managed = unsafe { managed.as_ref() };
        return Ok(tensor(&managed.tensor, managed.flags & READ_ONLY != 0));
    }
    let managed = capsule.pointer_checked(Some(c"dltensor"))?.cast::<DlTensor>();
    // SAFETY: a capsule of this name that was not consumed holds a `DLManagedTensor`, which begins
    // with the tensor. It cannot say that it may be written, and those that cannot be are exported
    // so (JAX): like NumPy, it is taken for read-only.
    Ok(tensor(unsafe { managed.as_ref() }, true))
}

fn tensor(tensor: &DlTensor, read_only: bool) -> Tensor {
    let count = usize::try_from(tensor.ndim).unwrap_or(0);
    // SAFETY: where there are dimensions, the structure names as many numbers.
    let numbers = |from: *const i64| unsafe { std::slice::from_raw_parts(from, count) }.to_vec();
    let given = count > 0 && !tensor.strides.is_null();
    Tensor {
        address: (tensor.data as u64).wrapping_add(tensor.byte_offset),
        item_size: (usize::from(tensor.bits) * usize::from(tensor.lanes)).div_ceil(8),
        shape: if count > 0 { numbers(tensor.shape) } else { Vec::new() },
        strides: given.then(|| numbers(tensor.strides)),
        read_only,
    }
}
