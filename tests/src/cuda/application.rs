//! Acts as an application that uses CUDA: memory of every kind, contexts and streams of its own. It
//! goes past the library, as an application does.

use cudarc::driver::sys::{
    self, CUmemAccess_flags, CUmemAccess_flags_enum, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1,
};
use cudarc::driver::sys::{CUcontext, CUdevResource, CUdevResourceType, CUgreenCtxCreate_flags};
use cudarc::driver::sys::{
    CUmemAllocationGranularity_flags_enum, CUmemAllocationType_enum, CUmemAttach_flags_enum, CUmemLocation,
    CUmemLocationType_enum,
};
use cudarc::driver::sys::{CUresult, CUstream_flags_enum, CUstreamCaptureMode_enum};
use gpunvme::Buffer;
use gpunvme_cuda::{Gpu, HostRegistration, Stream};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

/// Memory, freed when it is dropped.
pub struct Memory {
    /// How it was allocated.
    pub kind: &'static str,
    /// The addresses and lengths that it was put together from, in order and without gaps.
    pub pieces: Vec<(u64, u64)>,
    free: Option<Box<dyn FnOnce()>>,
}

impl Memory {
    fn new(kind: &'static str, address: u64, len: usize, free: impl FnOnce() + 'static) -> Memory {
        Memory { kind, pieces: vec![(address, len as u64)], free: Some(Box::new(free)) }
    }

    /// Its first byte.
    pub fn address(&self) -> u64 {
        self.pieces[0].0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(free) = self.free.take() {
            free();
        }
    }
}

/// `len` bytes, a multiple of 4 MiB, of every kind that an application can have.
pub fn every_kind(gpu: Gpu, len: usize) -> Vec<Memory> {
    let registered = Pinned::new(gpu, len);
    let host = registered.address();
    vec![
        allocated(gpu, len),
        pooled(gpu, len),
        mapped(gpu, &[len]),
        mapped(gpu, &[len / 2, len / 2]),
        managed(gpu, len),
        host_allocated("cuMemHostAlloc", gpu, len, 0),
        Memory::new("registered", host, len, move || drop(registered)),
    ]
}

/// `cudaMalloc`.
pub fn allocated(gpu: Gpu, len: usize) -> Memory {
    let memory = gpu.alloc(len).unwrap();
    Memory::new("cuMemAlloc", memory.address(), len, move || drop(memory))
}

/// `cudaMallocAsync`.
fn pooled(gpu: Gpu, len: usize) -> Memory {
    let _entered = gpu.enter().unwrap();
    let mut address = 0;
    // SAFETY: they write an address, and free it.
    unsafe {
        ok(sys::cuMemAllocAsync(&mut address, len, ptr::null_mut()));
        ok(sys::cuStreamSynchronize(ptr::null_mut()));
    }
    let free = move || {
        let _entered = gpu.enter().unwrap();
        // SAFETY: nothing uses it any more.
        unsafe { ok(sys::cuMemFreeAsync(address, ptr::null_mut())) };
    };
    Memory::new("cuMemAllocAsync", address, len, free)
}

/// Memory as PyTorch's expandable segments have it: addresses first, then memory behind them, here
/// one piece after the other.
pub fn mapped(gpu: Gpu, lens: &[usize]) -> Memory {
    let location = CUmemLocation { type_: CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.index() as i32 };
    let properties = CUmemAllocationProp {
        type_: CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location,
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 1,
            usage: 0,
            reserved: [0; 4],
        },
    };
    let len: usize = lens.iter().sum();
    let (mut base, mut granularity, mut pieces) = (0, 0, Vec::new());
    let _entered = gpu.enter().unwrap();
    // SAFETY: each is called as the reference asks; what was reserved has room for all pieces.
    unsafe {
        let smallest = CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        ok(sys::cuMemGetAllocationGranularity(&mut granularity, &properties, smallest));
        // Twice as much, so that the reservation and what is mapped are not the same.
        ok(sys::cuMemAddressReserve(&mut base, 2 * len, 0, 0, 0));
        let mut at = base;
        for len in lens {
            assert!(len.is_multiple_of(granularity), "pieces of {granularity} bytes");
            let mut memory = 0;
            ok(sys::cuMemCreate(&mut memory, *len, &properties, 0));
            ok(sys::cuMemMap(at, *len, 0, memory, 0));
            ok(sys::cuMemRelease(memory));
            pieces.push((at, *len as u64));
            at += *len as u64;
        }
    }
    set_access(gpu, base, len, CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    let free = move || {
        let _entered = gpu.enter().unwrap();
        // SAFETY: nothing uses it any more.
        unsafe {
            ok(sys::cuMemUnmap(base, len));
            ok(sys::cuMemAddressFree(base, 2 * len));
        }
    };
    Memory { kind: if lens.len() == 1 { "cuMemMap" } else { "cuMemMap, several" }, pieces, free: Some(Box::new(free)) }
}

/// `cudaMallocManaged`.
pub fn managed(gpu: Gpu, len: usize) -> Memory {
    let _entered = gpu.enter().unwrap();
    let mut address = 0;
    // SAFETY: it writes an address.
    unsafe { ok(sys::cuMemAllocManaged(&mut address, len, CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL as u32)) };
    let free = move || {
        let _entered = gpu.enter().unwrap();
        // SAFETY: nothing uses it any more.
        unsafe { ok(sys::cuMemFree_v2(address)) };
    };
    Memory::new("cuMemAllocManaged", address, len, free)
}

/// `cudaHostAlloc`, of memory that the processor writes past its caches.
pub fn write_combined(gpu: Gpu, len: usize) -> Memory {
    host_allocated("cuMemHostAlloc, write-combined", gpu, len, sys::CU_MEMHOSTALLOC_WRITECOMBINED)
}

/// `cudaHostAlloc`.
fn host_allocated(kind: &'static str, gpu: Gpu, len: usize, flags: u32) -> Memory {
    let _entered = gpu.enter().unwrap();
    let (mut address, mut number) = (ptr::null_mut(), 0);
    // SAFETY: they write addresses, which may differ where the memory is write-combined.
    unsafe {
        ok(sys::cuMemHostAlloc(&mut address, len, flags));
        ok(sys::cuMemHostGetDevicePointer_v2(&mut number, address, 0));
    }
    let address = address as usize;
    let free = move || {
        let _entered = gpu.enter().unwrap();
        // SAFETY: nothing uses it any more.
        unsafe { ok(sys::cuMemFreeHost(ptr::with_exposed_provenance_mut(address))) };
    };
    Memory::new(kind, number, len, free)
}

/// Host memory that is registered with CUDA, as the library's staging pool is.
pub struct Pinned {
    _registration: HostRegistration,
    buffer: Buffer,
    device: u64,
}

impl Pinned {
    /// `len` zeroed bytes.
    pub fn new(gpu: Gpu, len: usize) -> Pinned {
        let mut buffer = Buffer::memfd(len).unwrap();
        // SAFETY: the registration is dropped before the buffer.
        let registration = unsafe { HostRegistration::new(&gpu, NonNull::from(&mut buffer[..]).cast(), len) }.unwrap();
        let device = registration.device_address(&gpu).unwrap();
        Pinned { _registration: registration, buffer, device }
    }

    /// The device address of its first byte.
    pub fn address(&self) -> u64 {
        self.device
    }

    /// Its bytes, while no stream works on them.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Four of its bytes, which streams may work on.
    pub fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: they lie in the mapping and are aligned, and nothing borrows the bytes meanwhile.
        unsafe { AtomicU32::from_ptr(self.buffer[offset..offset + 4].as_ptr().cast_mut().cast()) }
    }

    /// Copies bytes through its beginning to memory, and waits for it.
    pub fn put(&mut self, stream: &Stream, address: u64, bytes: &[u8]) {
        self.bytes()[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: both ranges stay until the stream is done.
        unsafe { stream.copy(address, self.address(), bytes.len()) }.unwrap();
        stream.synchronize().unwrap();
    }

    /// Copies bytes from memory through its beginning, and waits for it.
    pub fn get(&mut self, stream: &Stream, address: u64, len: usize) -> &[u8] {
        // SAFETY: both ranges stay until the stream is done.
        unsafe { stream.copy(self.address(), address, len) }.unwrap();
        stream.synchronize().unwrap();
        &self.bytes()[..len]
    }
}

/// Takes mapped memory from the GPU, without unmapping it.
pub fn take_access(gpu: Gpu, memory: &Memory) {
    for &(base, len) in &memory.pieces {
        set_access(gpu, base, len as usize, CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_NONE);
    }
}

fn set_access(gpu: Gpu, base: u64, len: usize, flags: CUmemAccess_flags) {
    let location = CUmemLocation { type_: CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.index() as i32 };
    // SAFETY: all of it is mapped, and nothing uses it meanwhile.
    unsafe { ok(sys::cuMemSetAccess(base, len, &CUmemAccessDesc { location, flags }, 1)) };
}

/// The calling thread's context.
pub fn current_context() -> CUcontext {
    let mut context = ptr::null_mut();
    // SAFETY: it writes a handle.
    unsafe { ok(sys::cuCtxGetCurrent(&mut context)) };
    context
}

/// A context of the application's own, current on the calling thread from now on, and memory in it.
pub fn own_context(gpu: Gpu, len: usize) -> (CUcontext, u64) {
    let (mut context, mut address) = (ptr::null_mut(), 0);
    // SAFETY: they write a handle and an address.
    unsafe {
        ok(sys::cuCtxCreate_v2(&mut context, 0, gpu.index() as i32));
        ok(sys::cuMemAlloc_v2(&mut address, len));
    }
    (context, address)
}

/// Ends it, with its memory.
pub fn destroy_context(context: CUcontext) {
    // SAFETY: nothing uses it any more.
    unsafe { ok(sys::cuCtxDestroy_v2(context)) };
}

/// A stream of the application's own; it is never destroyed.
pub fn own_stream(gpu: Gpu) -> usize {
    let _entered = gpu.enter().unwrap();
    let mut stream = ptr::null_mut();
    // SAFETY: it writes a handle.
    unsafe { ok(sys::cuStreamCreate(&mut stream, CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32)) };
    stream as usize
}

/// A stream of a green context of the application's own, with all of the GPU's processors; it is
/// never destroyed.
pub fn green_stream(gpu: Gpu) -> usize {
    let (device, sm) = (gpu.index() as i32, CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM);
    let _entered = gpu.enter().unwrap();
    let mut resource = MaybeUninit::<CUdevResource>::zeroed();
    let (mut desc, mut green) = (ptr::null_mut(), ptr::null_mut());
    let (mut context, mut stream, mut popped) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: each writes what it is given a place for; the resource was filled in by the driver.
    unsafe {
        ok(sys::cuDeviceGetDevResource(device, resource.as_mut_ptr(), sm));
        ok(sys::cuDevResourceGenerateDesc(&mut desc, resource.as_mut_ptr(), 1));
        ok(sys::cuGreenCtxCreate(&mut green, desc, device, CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32));
        ok(sys::cuCtxFromGreenCtx(&mut context, green));
        ok(sys::cuCtxPushCurrent_v2(context));
        ok(sys::cuStreamCreate(&mut stream, CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32));
        ok(sys::cuCtxPopCurrent_v2(&mut popped));
    }
    stream as usize
}

/// Begins the capture of a stream, as PyTorch does.
pub fn begin_capture(gpu: Gpu, stream: usize) {
    let _entered = gpu.enter().unwrap();
    let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream lives.
    unsafe { ok(sys::cuStreamBeginCapture_v2(ptr::without_provenance_mut(stream), mode)) };
}

/// Ends it, and returns how many nodes its graph has.
pub fn end_capture(gpu: Gpu, stream: usize) -> usize {
    let _entered = gpu.enter().unwrap();
    let (mut graph, mut nodes) = (ptr::null_mut(), 0);
    // SAFETY: each writes what its last argument points at; the graph lives until it is destroyed.
    unsafe {
        ok(sys::cuStreamEndCapture(ptr::without_provenance_mut(stream), &mut graph));
        ok(sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut nodes));
        ok(sys::cuGraphDestroy(graph));
    }
    nodes
}

/// Fails unless CUDA says success.
pub fn ok(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}
