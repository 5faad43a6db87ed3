//! DLPack's C exchange API: a class names a table of functions, which tell of its objects' memory
//! in one call of C. The attributes and methods that Python has for it take five times as long.
//!
//! The table is the library's, and stays for as long as the process. It says less than Python does
//! (of borrowed memory not whether it is read-only, of PyTorch's tensors not whether they are
//! negated), which [`crate::memory`] has to see to.
//!
//! Source of the structures: `dlpack.h` of DLPack 1.3.

use crate::dlpack::{self, DlTensor, Tensor, Versioned};
use parking_lot::Mutex;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyType};
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

/// What the capsule of a table is called.
const NAME: &CStr = c"dlpack_exchange_api";
/// `DLPACK_MAJOR_VERSION`. Tables of another one have other functions.
const MAJOR: u32 = 1;
/// How many classes are remembered, and thereby kept: those of libraries, which last anyway.
const MOST: usize = 16;
/// A class whose objects are in memory what those of its base are. Others may be made of something
/// else than the base's memory.
const AS_ITS_BASE: &str = "torch.nn.parameter.Parameter";

/// `DLPackExchangeAPIHeader`, the same in all versions.
#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    /// A table of an older version.
    previous: *const Header,
}

/// `DLPackExchangeAPI`. What is not called here has no type.
#[repr(C)]
struct Table {
    header: Header,
    allocate: *const c_void,
    export: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut *mut Versioned) -> c_int>,
    import: *const c_void,
    view: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut DlTensor) -> c_int>,
    stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

/// The functions of a class.
#[derive(Clone, Copy)]
pub struct Api(&'static Table);

// SAFETY: nothing changes a table, and its functions may be called by any thread that has the
// interpreter, which those of `Api` ask for.
unsafe impl Send for Api {}

/// The classes that have an API. A class that were not kept could leave its address to another.
static KNOWN: Mutex<Vec<(Py<PyType>, Api)>> = Mutex::new(Vec::new());

impl Api {
    /// The API of a class itself, not of one that it is derived from.
    pub fn of(class: &Bound<'_, PyType>) -> Option<Api> {
        if let Some((_, api)) = KNOWN.lock().iter().find(|(known, _)| known.is(class)) {
            return Some(*api);
        }
        let api = Api(table(&capsule(class).ok()??)?);
        let mut known = KNOWN.lock();
        if known.len() < MOST {
            known.push((class.clone().unbind(), api));
        }
        Some(api)
    }

    /// What an object of the class says of its memory, without keeping it; none where it has
    /// something else to say.
    pub fn view<'a>(self, object: &'a Bound<'_, PyAny>) -> Option<Tensor<'a>> {
        // A library that leaves a field as it is means a zero.
        let mut tensor = MaybeUninit::zeroed();
        // SAFETY: the object is of the table's class, and the interpreter is held.
        let code = unsafe { self.0.view?(object.as_ptr(), tensor.as_mut_ptr()) };
        // SAFETY: it is filled where there was no error. Shape and strides are the object's, which
        // the caller keeps.
        succeeded(object.py(), code).then(|| unsafe { dlpack::borrowed(tensor.assume_init()) })
    }

    /// A capsule, as `__dlpack__` returns it, that keeps the object's memory; none where there is
    /// none to be had. What its library still does to the memory is not waited for.
    pub fn export<'py>(self, object: &Bound<'py, PyAny>) -> Option<Bound<'py, PyCapsule>> {
        let mut managed = ptr::null_mut();
        // SAFETY: the object is of the table's class, and the interpreter is held.
        let code = unsafe { self.0.export?(object.as_ptr(), &mut managed) };
        if !succeeded(object.py(), code) {
            return None;
        }
        let managed = NonNull::new(managed.cast())?;
        // SAFETY: the name is that of what it points to, which `release` gives back.
        unsafe { PyCapsule::new_with_pointer_and_destructor(object.py(), managed, dlpack::VERSIONED, Some(release)) }.ok()
    }

    /// The stream that the library puts its work on a device into, in this thread.
    pub fn stream(self, py: Python<'_>, device_type: i32, device: i32) -> Option<usize> {
        let mut stream = ptr::null_mut();
        // SAFETY: it writes a handle, and the interpreter is held.
        let code = unsafe { self.0.stream?(device_type, device, &mut stream) };
        succeeded(py, code).then_some(stream as usize)
    }
}

/// Gives an exported tensor back to its library.
///
/// # Safety
/// It is the destructor of a capsule of [`Api::export`], whose tensor was taken by no other.
unsafe extern "C" fn release(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule was made with this name.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, dlpack::VERSIONED.as_ptr()) };
    // SAFETY: it is what the library exported, and nothing uses it any more.
    unsafe { Versioned::delete(managed.cast()) };
}

/// Whether a function did what it was asked for. What it raised else is dropped: Python's way is
/// gone then, which says it better.
fn succeeded(py: Python<'_>, code: c_int) -> bool {
    if code != 0 {
        drop(PyErr::take(py));
    }
    code == 0
}

/// The capsule that a class names, if it is its own.
fn capsule<'py>(class: &Bound<'py, PyType>) -> PyResult<Option<Bound<'py, PyCapsule>>> {
    let name = intern!(class.py(), "__dlpack_c_exchange_api__");
    let Some(found) = class.getattr_opt(name)? else { return Ok(None) };
    for base in class.bases() {
        let is_inherited = base.getattr_opt(name)?.is_some_and(|inherited| inherited.is(&found));
        if is_inherited && class.fully_qualified_name()? != AS_ITS_BASE {
            return Ok(None);
        }
    }
    Ok(found.cast_into().ok())
}

/// The table in a capsule, of the version that is known.
fn table(capsule: &Bound<'_, PyCapsule>) -> Option<&'static Table> {
    let mut header: *const Header = capsule.pointer_checked(Some(NAME)).ok()?.as_ptr().cast();
    // SAFETY: a capsule of this name holds a table that begins with a header, which stays for as
    // long as the process, as do those that it leads to.
    while let Some(known) = unsafe { header.as_ref() } {
        if known.major == MAJOR {
            // SAFETY: of this version it is the beginning of such a table.
            return unsafe { header.cast::<Table>().as_ref() };
        }
        header = known.previous;
    }
    None
}
