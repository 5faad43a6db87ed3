//! Finds the memory behind a Python object: of PyTorch, by `__cuda_array_interface__` (CuPy,
//! Numba), by the buffer protocol (NumPy, `bytearray`, `mmap`), by `__array_interface__` (NumPy's
//! dtypes that the buffer protocol has not) or by DLPack (JAX and others), in this order. Of
//! DLPack the exchange API is asked first, of PyTorch too.

use crate::dlpack;
use crate::exchange::Api;
use crate::stream::Busy;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyDict, PyMemoryView, PyTuple, PyType};

/// Contiguous memory that an object holds.
pub struct Memory {
    pub address: u64,
    /// In bytes.
    pub len: u64,
    /// Whether it is CUDA's to copy: memory of a GPU, or managed.
    pub on_gpu: bool,
    /// The stream on which its library may still be working on it.
    pub busy: Option<Busy>,
    /// What keeps the memory in existence.
    pub keep: Py<PyAny>,
}

/// What is asked of memory.
#[derive(Clone, Copy)]
pub struct Ask {
    /// Whether it is to be written to.
    pub writable: bool,
    /// The stream that the request goes into, if it goes into one.
    pub stream: Option<usize>,
}

/// The memory of an object.
///
/// # Errors
/// `TypeError` for an object that holds no memory that can be found; `ValueError` for memory that
/// is not contiguous, or may not be written.
pub fn of(object: &Bound<'_, PyAny>, ask: Ask) -> PyResult<Memory> {
    let py = object.py();
    if let Some(tensor) = torch_tensor(py)?
        && object.is_instance(tensor)?
    {
        return of_torch(object, Api::of(&object.get_type()), ask);
    }
    if let Some(interface) = object.getattr_opt(intern!(py, "__cuda_array_interface__"))? {
        return of_interface(object, interface.cast::<PyDict>()?, true, ask);
    }
    if let Ok(view) = PyMemoryView::from(object) {
        return of_buffer(object, &view, ask);
    }
    if let Some(interface) = object.getattr_opt(intern!(py, "__array_interface__"))? {
        return of_interface(object, interface.cast::<PyDict>()?, false, ask);
    }
    if ask.stream.is_none()
        && let Some(api) = Api::of(&object.get_type())
        && let Some(capsule) = api.export(object)
        && let Some(memory) = of_export(object, api, capsule, ask)?
    {
        return Ok(memory);
    }
    if object.hasattr(intern!(py, "__dlpack_device__"))? {
        return of_dlpack(object, ask);
    }
    Err(PyTypeError::new_err(format!(
        "{} holds no memory that can be found: a tensor or array is needed (PyTorch, CuPy, NumPy, JAX, Numba, DLPack) or a buffer",
        name(object)
    )))
}

/// The class of PyTorch's tensors, if the program has loaded it.
fn torch_tensor(py: Python<'_>) -> PyResult<Option<&Bound<'_, PyType>>> {
    static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static MODULES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    if let Some(tensor) = TENSOR.get(py) {
        return Ok(Some(tensor.bind(py)));
    }
    let modules = MODULES.import(py, "sys", "modules")?;
    let Some(torch) = modules.get_item(intern!(py, "torch"))? else { return Ok(None) };
    // While it is being imported it has none yet.
    let Some(tensor) = torch.getattr_opt(intern!(py, "Tensor"))? else { return Ok(None) };
    let tensor = tensor.cast_into::<PyType>()?.unbind();
    Ok(Some(TENSOR.get_or_init(py, || tensor).bind(py)))
}

/// Where a contiguous tensor of PyTorch is said to lie.
struct Place {
    address: u64,
    len: u64,
    /// The number of its GPU; none in host memory.
    gpu: Option<i32>,
    may_be_conjugated: bool,
}

fn of_torch(tensor: &Bound<'_, PyAny>, api: Option<Api>, ask: Ask) -> PyResult<Memory> {
    let py = tensor.py();
    let call = |name| tensor.call_method0(name);
    let Place { address, len, gpu, may_be_conjugated } = match api.and_then(|api| seen(tensor, api)) {
        Some(place) => place,
        None => asked(tensor)?,
    };
    let holds_others = |name| call(name)?.extract::<bool>();
    if may_be_conjugated && holds_others(intern!(py, "is_conj"))? || holds_others(intern!(py, "is_neg"))? {
        return Err(PyValueError::new_err(
            "this tensor is a view whose memory holds other numbers (conjugated or negated): use resolve_conj() or resolve_neg()",
        ));
    }
    let storage = call(intern!(py, "untyped_storage"))?;
    if len > 0 {
        // Of a tensor that is made of others (DTensor) it is asked in vain.
        let of_storage = |name| -> PyResult<u64> {
            let told = storage.call_method0(name).or_else(|_| Err(unreachable(tensor)?))?;
            told.extract()
        };
        let (begin, size) = (of_storage(intern!(py, "data_ptr"))?, of_storage(intern!(py, "nbytes"))?);
        // None on the device `meta`, of a fake tensor, and where the storage was given up. A view
        // of nothing has an address: how far it lies behind the beginning.
        if begin == 0 || address < begin || address.saturating_add(len) > begin.saturating_add(size) {
            return Err(unreachable(tensor)?);
        }
    }
    if ask.writable {
        note_change(tensor)?;
    }
    let busy = match gpu {
        Some(gpu) if ask.stream.is_none() => Some(Busy { stream: torch_stream(py, api, gpu)?, gpu: Some(gpu), address }),
        _ => None,
    };
    // The tensor itself may be given another storage meanwhile. What goes into a stream is recorded
    // there, which takes a tensor.
    let keep = if ask.stream.is_some() { call(intern!(py, "detach"))? } else { storage };
    Ok(Memory { address, len, on_gpu: gpu.is_some(), busy, keep: keep.unbind() })
}

/// Where a tensor lies by the exchange API. None for all that is to be refused, and for what the
/// API does not know (quantized dtypes): Python says which.
fn seen(tensor: &Bound<'_, PyAny>, api: Api) -> Option<Place> {
    let view = api.view(tensor)?;
    let gpu = match view.device_type {
        dlpack::CPU | dlpack::CUDA_HOST => None,
        dlpack::CUDA => Some(view.device),
        _ => return None,
    };
    if view.strides.is_some_and(|strides| !is_contiguous(view.shape, strides, 1)) {
        return None;
    }
    let len = byte_len(view.shape, view.item_size? as i64)?;
    Some(Place { address: view.address, len, gpu, may_be_conjugated: view.code == dlpack::COMPLEX })
}

/// Where a tensor lies by its attributes and methods.
fn asked(tensor: &Bound<'_, PyAny>) -> PyResult<Place> {
    let py = tensor.py();
    let call = |name| tensor.call_method0(name);
    if let Some(layout) = tensor.getattr_opt(intern!(py, "layout"))?
        && let layout = layout.str()?
        && layout != "torch.strided"
    {
        return Err(PyValueError::new_err(format!("{} is of the layout {layout}: use its parts, or to_dense()", name(tensor))));
    }
    if !call(intern!(py, "is_contiguous"))?.extract::<bool>()? {
        let (shape, strides): (Vec<i64>, Vec<i64>) =
            (tensor.getattr(intern!(py, "shape"))?.extract()?, call(intern!(py, "stride"))?.extract()?);
        return Err(strided(tensor, &shape, &strides));
    }
    let on_gpu: bool = tensor.getattr(intern!(py, "is_cuda"))?.extract()?;
    let device: i32 = call(intern!(py, "get_device"))?.extract()?;
    if !on_gpu && device >= 0 {
        return Err(unreachable(tensor)?);
    }
    let address = call(intern!(py, "data_ptr")).or_else(|_| Err(unreachable(tensor)?))?.extract()?;
    let len = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
    Ok(Place { address, len, gpu: on_gpu.then_some(device), may_be_conjugated: true })
}

fn unreachable(tensor: &Bound<'_, PyAny>) -> PyResult<PyErr> {
    let py = tensor.py();
    let device = tensor.getattr(intern!(py, "device"))?;
    let way_out = if tensor.hasattr(intern!(py, "to_local"))? { ": use what to_local() returns" } else { "" };
    Ok(PyTypeError::new_err(format!("{} on {device} has no memory that can be reached{way_out}", name(tensor))))
}

/// Tells autograd that a tensor changes, as an operation in place does: a gradient for which the
/// tensor was saved is then an error, and not one of other numbers.
fn note_change(tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    static INCREMENT: PyOnceLock<Option<Py<PyAny>>> = PyOnceLock::new();
    let py = tensor.py();
    // Older ones have none.
    let find = || py.import("torch.autograd.graph").and_then(|graph| graph.getattr("increment_version")).ok().map(Bound::unbind);
    let Some(increment) = INCREMENT.get_or_init(py, find) else { return Ok(()) };
    if !tensor.call_method0(intern!(py, "is_inference"))?.extract::<bool>()? {
        increment.call1(py, (tensor,))?;
    }
    Ok(())
}

/// The stream that PyTorch puts its work on a GPU into, in this thread.
fn torch_stream(py: Python<'_>, api: Option<Api>, gpu: i32) -> PyResult<usize> {
    static CURRENT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let Some(stream) = api.and_then(|api| api.stream(py, dlpack::CUDA, gpu)) {
        return Ok(stream);
    }
    // What torch.cuda.current_stream(gpu).cuda_stream is, without an object being made.
    CURRENT.import(py, "torch._C", "_cuda_getCurrentRawStream")?.call1((gpu,))?.extract()
}

/// By `__cuda_array_interface__`, or by NumPy's interface for host memory, which has the same form.
fn of_interface(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>, on_gpu: bool, ask: Ask) -> PyResult<Memory> {
    let item = |key| interface.get_item(key).transpose();
    let missing = |key| PyTypeError::new_err(format!("the array interface of {} lacks {key:?}", name(object)));
    let (address, read_only): (u64, bool) = item("data").ok_or_else(|| missing("data"))??.extract()?;
    let shape: Vec<i64> = item("shape").ok_or_else(|| missing("shape"))??.extract()?;
    let kind: String = item("typestr").ok_or_else(|| missing("typestr"))??.extract()?;
    // What a structure consists of is said elsewhere, and may be objects.
    if kind.get(1..2) == Some("O") || kind.get(1..2) == Some("V") && has_objects(interface)? {
        return Err(objects(object));
    }
    // "<f4", "<M8[ns]": byte order, kind, the bytes of an item, and the unit of a time.
    let item_size =
        kind.split('[').next().and_then(|kind| kind.get(2..)).and_then(|size| size.parse().ok()).filter(|size: &i64| *size > 0);
    let item_size = item_size.ok_or_else(|| missing("typestr"))?;
    let strides: Option<Vec<i64>> = item("strides").transpose()?.map(|strides| strides.extract()).transpose()?.flatten();
    if let Some(strides) = &strides
        && !is_contiguous(&shape, strides, item_size)
    {
        return Err(strided(object, &shape, strides));
    }
    if ask.writable && read_only {
        return Err(not_writable(object));
    }
    let stream: Option<usize> = item("stream").transpose()?.map(|stream| stream.extract()).transpose()?.flatten();
    let busy = stream.map(|stream| Busy { stream, gpu: None, address });
    let len = byte_len(&shape, item_size).ok_or_else(|| endless(object, &shape))?;
    Ok(Memory { address, len, on_gpu, busy, keep: object.clone().unbind() })
}

/// Whether a structure has objects in it, or does not say what it has: `descr` is nested lists of
/// names and types.
fn has_objects(interface: &Bound<'_, PyDict>) -> PyResult<bool> {
    let Some(fields) = interface.get_item("descr")? else { return Ok(true) };
    let said = fields.repr()?.to_string();
    Ok(["'|O", "'<O", "'>O", "'=O", "'O"].iter().any(|kind| said.contains(kind)))
}

fn of_buffer(object: &Bound<'_, PyAny>, view: &Bound<'_, PyMemoryView>, ask: Ask) -> PyResult<Memory> {
    let py = object.py();
    let format: String = view.getattr(intern!(py, "format"))?.extract()?;
    // Names of fields stand between colons.
    if format.split(':').step_by(2).any(|kinds| kinds.contains('O')) {
        return Err(objects(object));
    }
    // A buffer without dimensions has no shape, which PyO3 does not take. Its bytes have one, and
    // do not say what they are.
    let flat = if view.getattr(intern!(py, "ndim"))?.extract::<usize>()? == 0 {
        Some(view.call_method1(intern!(py, "cast"), ("B",))?)
    } else {
        None
    };
    let buffer = PyUntypedBuffer::get(flat.as_ref().unwrap_or(view))?;
    if !buffer.is_c_contiguous() {
        let shape: Vec<i64> = buffer.shape().iter().map(|&size| size as i64).collect();
        let strides: Vec<i64> = buffer.strides().iter().map(|&stride| stride as i64).collect();
        return Err(strided(object, &shape, &strides));
    }
    if ask.writable && buffer.readonly() {
        return Err(not_writable(object));
    }
    // The view keeps the memory where it is: a bytearray cannot be resized meanwhile.
    Ok(Memory {
        address: buffer.buf_ptr() as u64,
        len: buffer.len_bytes() as u64,
        on_gpu: false,
        busy: None,
        keep: view.clone().into_any().unbind(),
    })
}

/// By a capsule of the exchange API; none where its library does not say what it works on the
/// memory in, and is to be asked to have done with it.
fn of_export(object: &Bound<'_, PyAny>, api: Api, capsule: Bound<'_, PyCapsule>, ask: Ask) -> PyResult<Option<Memory>> {
    let tensor = dlpack::read(&capsule)?;
    let device = (tensor.device_type, tensor.device);
    let stream = if is_cuda(object, device.0)? {
        let Some(stream) = api.stream(object.py(), device.0, device.1) else { return Ok(None) };
        Some(stream)
    } else {
        None
    };
    of_capsule(object, capsule, stream, ask).map(Some)
}

fn of_dlpack(object: &Bound<'_, PyAny>, ask: Ask) -> PyResult<Memory> {
    let py = object.py();
    let device = object.call_method0(intern!(py, "__dlpack_device__"))?.cast_into::<PyTuple>()?;
    // The legacy default stream, unless the request goes into one: its library has it wait for
    // what is still being done to the memory.
    const LEGACY: usize = 1;
    let on_gpu = is_cuda(object, device.get_item(0)?.extract()?)?;
    let stream = on_gpu.then(|| ask.stream.filter(|stream| *stream != 0).unwrap_or(LEGACY));
    let arguments = PyDict::new(py);
    arguments.set_item(intern!(py, "stream"), stream)?;
    arguments.set_item(intern!(py, "max_version"), (1, 1))?;
    let export = || object.getattr(intern!(py, "__dlpack__"));
    let capsule = match export()?.call((), Some(&arguments)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            arguments.del_item(intern!(py, "max_version"))?;
            export()?.call((), Some(&arguments))?
        }
        capsule => capsule?,
    };
    of_capsule(object, capsule.cast_into()?, stream, ask)
}

/// Whether memory of a kind of device of DLPack's is CUDA's to copy.
fn is_cuda(object: &Bound<'_, PyAny>, device_type: i32) -> PyResult<bool> {
    match device_type {
        dlpack::CPU | dlpack::CUDA_HOST => Ok(false),
        dlpack::CUDA | dlpack::CUDA_MANAGED => Ok(true),
        other => Err(PyTypeError::new_err(format!(
            "{} lies on a device that CUDA does not reach (DLPack's number {other})",
            name(object)
        ))),
    }
}

/// By a capsule of DLPack's, of memory that its library works on in a stream, if on a GPU.
fn of_capsule(object: &Bound<'_, PyAny>, capsule: Bound<'_, PyCapsule>, stream: Option<usize>, ask: Ask) -> PyResult<Memory> {
    let tensor = dlpack::read(&capsule)?;
    if let Some(strides) = tensor.strides
        && !is_contiguous(tensor.shape, strides, 1)
    {
        return Err(strided(object, tensor.shape, strides));
    }
    if ask.writable && tensor.read_only {
        return Err(not_writable(object));
    }
    let Some(item_size) = tensor.item_size else {
        return Err(PyTypeError::new_err(format!("{} has items that share bytes: give it another dtype", name(object))));
    };
    let len = byte_len(tensor.shape, item_size as i64).ok_or_else(|| endless(object, tensor.shape))?;
    let (address, gpu) = (tensor.address, Some(tensor.device));
    let busy = stream.map(|stream| Busy { stream, gpu, address });
    Ok(Memory { address, len, on_gpu: stream.is_some(), busy, keep: capsule.into_any().unbind() })
}

/// How many bytes items of a shape are.
fn byte_len(shape: &[i64], item: i64) -> Option<u64> {
    let len = shape.iter().try_fold(item, |len, &size| len.checked_mul(size));
    len.and_then(|len| u64::try_from(len).ok())
}

/// Whether items lie side by side, the last index first. `item` is what a stride of one counts.
fn is_contiguous(shape: &[i64], strides: &[i64], item: i64) -> bool {
    let mut expected = item;
    shape.contains(&0)
        || shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == expected;
            expected = expected.saturating_mul(size);
            fits
        })
}

fn strided(object: &Bound<'_, PyAny>, shape: &[i64], strides: &[i64]) -> PyErr {
    PyValueError::new_err(format!(
        "{} is a strided view (shape {shape:?}, strides {strides:?}): name its contiguous parts as (part, offset) pairs, or make it contiguous",
        name(object)
    ))
}

fn endless(object: &Bound<'_, PyAny>, shape: &[i64]) -> PyErr {
    PyValueError::new_err(format!("{} has a shape that no memory has ({shape:?})", name(object)))
}

fn objects(object: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("{} holds objects of Python's, whose bytes mean nothing in a file", name(object)))
}

fn not_writable(object: &Bound<'_, PyAny>) -> PyErr {
    PyValueError::new_err(format!("{} is read-only: nothing can be read into it", name(object)))
}

/// What an object is called in messages: its class.
pub fn name(object: &Bound<'_, PyAny>) -> String {
    let class = object.get_type();
    class.fully_qualified_name().map_or_else(|_| "the object".to_owned(), |name| name.to_string())
}
