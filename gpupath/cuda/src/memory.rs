//! Memory that CUDA knows: what lies at an address, host memory that is registered, and memory of
//! the library's own.

use super::context::Context;
use super::cuda::Cuda;
use super::driver::Driver;
use super::error::CudaError;
use super::gpu::{Gpu, Which};
use cudarc::driver::sys::{
    CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS_enum as AccessFlags, CUmemRangeHandleType_enum, CUmemorytype_enum,
    CUpointer_attribute_enum as Attribute,
};
use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: for every context, and within
/// reach of kernels.
const REGISTER: u32 = 1 | 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`: of memory that the process may only read, as a mapping of a
/// file's pages. CUDA refuses it without.
const READ_ONLY: u32 = 8;

/// Memory that CUDA knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Where it is.
    pub place: Place,
    /// Its first byte. Memory that was mapped piece by piece (`cuMemMap`) is as many allocations.
    pub base: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Where the processor finds its first byte, if it may.
    pub host: Option<u64>,
    /// Its number ([`Cuda::buffer_id`]).
    pub buffer_id: u64,
    /// Whether the GPU's primary context can reach it: not if it was allocated in another one.
    pub primary: bool,
    /// Whether the GPU's kernels may read and write it: not what was mapped (`cuMemMap`) and is
    /// not, or not wholly, accessible to this GPU (`cuMemSetAccess`).
    pub by_kernel: bool,
}

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On a GPU.
    Device(Gpu),
    /// In host memory that is pinned: allocated by CUDA, or registered with it.
    Host,
    /// Where it was touched last (`cudaMallocManaged`).
    Managed,
}

impl Cuda {
    /// What lies at an address, or `None` where CUDA knows nothing of it: memory that was never
    /// CUDA's, or is freed.
    ///
    /// # Errors
    /// What CUDA says; after a kernel of the application crashed that is the crash.
    pub fn memory_at(&'static self, address: u64) -> Result<Option<Allocation>, CudaError> {
        at(self, address)
    }

    /// The number of the allocation at an address, which no other allocation of this process ever
    /// had or will have; `None` as for [`Cuda::memory_at`]. It is the cheap way to ask whether
    /// what was there is still there.
    ///
    /// # Errors
    /// As [`Cuda::memory_at`].
    pub fn buffer_id(&self, address: u64) -> Result<Option<u64>, CudaError> {
        buffer_id(self.driver, address)
    }
}

impl Gpu {
    /// New memory of `len` bytes, aligned to at least 256.
    ///
    /// # Errors
    /// What CUDA says.
    pub fn alloc(&self, len: usize) -> Result<DeviceAllocation, CudaError> {
        DeviceAllocation::new(self.context()?, len)
    }

    /// A dma-buf over `len` bytes of one allocation in this GPU's memory. Both are multiples of 64
    /// KiB, or the allocation's own bounds. It holds the memory: after the application freed it,
    /// the dma-buf still stands for it.
    ///
    /// # Errors
    /// What CUDA says; not every driver and not all memory can be exported.
    pub fn export_dma_buf(&self, address: u64, len: usize) -> Result<OwnedFd, CudaError> {
        export_dma_buf(self.context()?, address, len)
    }

    /// Makes CUDA's synchronous copies to and from the allocation at `address` really synchronous,
    /// from now on: they are not while they look so, and what a PCIe device does to the memory
    /// meanwhile would meet a copy still running (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`).
    ///
    /// # Errors
    /// What CUDA says: `CUDA_ERROR_INVALID_VALUE` where there is no allocation; not all memory has
    /// the setting.
    pub fn sync_memops(&self, address: u64) -> Result<(), CudaError> {
        sync_memops(self.context()?, address)
    }
}

fn at(cuda: &'static Cuda, address: u64) -> Result<Option<Allocation>, CudaError> {
    const ATTRIBUTES: [Attribute; 10] = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
        Attribute::CU_POINTER_ATTRIBUTE_HOST_POINTER,
    ];
    let mut attributes = ATTRIBUTES;
    let mut values = [0u64; ATTRIBUTES.len()];
    let mut pointers = values.each_mut().map(|value| ptr::from_mut(value).cast::<c_void>());
    // SAFETY: no attribute is longer than 8 bytes. Those that are shorter leave the rest zero. No
    // address is too wrong to ask for.
    unsafe {
        cuda.driver.cuPointerGetAttributes(ATTRIBUTES.len() as u32, attributes.as_mut_ptr(), pointers.as_mut_ptr(), address)
    }?;
    let [kind, managed, ordinal, context, range, range_len, mapping, mapping_len, buffer_id, host] = values;

    let place = match kind as u32 {
        _ if managed != 0 => Place::Managed,
        kind if kind == CUmemorytype_enum::CU_MEMORYTYPE_HOST as u32 => Place::Host,
        kind if kind == CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u32 => match cuda.gpu(Which::Index(ordinal as u32)) {
            Ok(gpu) => Place::Device(gpu),
            Err(_) => return Ok(None),
        },
        _ => return Ok(None),
    };
    // For memory mapped by `cuMemMap` the range is all that was reserved, and for other memory the
    // mapping is the block that it was taken from.
    let (mut base, mut end) = (range, range.saturating_add(range_len));
    if mapping_len != 0 {
        (base, end) = (base.max(mapping), end.min(mapping.saturating_add(mapping_len)));
    }
    let primary = match place {
        // Memory without a context is every context's: mapped memory, and that of pools.
        Place::Device(gpu) => context == 0 || gpu.context()?.is(ptr::without_provenance_mut(context as usize)),
        Place::Host | Place::Managed => true,
    };
    let by_kernel = match place {
        Place::Device(gpu) if context == 0 => is_writable(gpu.context()?, address)?,
        Place::Device(_) => primary,
        Place::Host | Place::Managed => false,
    };
    let host = (host != 0).then(|| host.wrapping_sub(address.wrapping_sub(base)));
    Ok(Some(Allocation { place, base, len: end.saturating_sub(base), host, buffer_id, primary, by_kernel }))
}

/// Whether kernels in a context may read and write the memory at an address that CUDA knows.
fn is_writable(context: Context, address: u64) -> Result<bool, CudaError> {
    // The answer is for the context that is current.
    let _entered = context.enter()?;
    let mut flags = 0u64;
    let attribute = Attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS;
    // SAFETY: it writes no more than 8 bytes. No address is too wrong to ask for.
    match unsafe { context.driver.cuPointerGetAttribute((&raw mut flags).cast(), attribute, address) } {
        Ok(()) => Ok(flags == AccessFlags::CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE as u64),
        // Freed meanwhile, or no memory that has flags.
        Err(error) if [CudaError::INVALID_VALUE, CudaError::NOT_SUPPORTED].contains(&error.code) => Ok(false),
        Err(error) => Err(error),
    }
}

fn buffer_id(driver: &Driver, address: u64) -> Result<Option<u64>, CudaError> {
    let mut id = 0u64;
    // SAFETY: it writes 8 bytes. No address is too wrong to ask for.
    match unsafe { driver.cuPointerGetAttribute((&raw mut id).cast(), Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, address) } {
        Ok(()) => Ok(Some(id)),
        Err(error) if error.code == CudaError::INVALID_VALUE => Ok(None),
        Err(error) => Err(error),
    }
}

fn sync_memops(context: Context, address: u64) -> Result<(), CudaError> {
    let _entered = context.enter()?;
    let on = 1u32;
    // SAFETY: it reads 4 bytes, and makes the application's copies slower at worst.
    unsafe { context.driver.cuPointerSetAttribute((&raw const on).cast(), Attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address) }
}

fn export_dma_buf(context: Context, address: u64, len: usize) -> Result<OwnedFd, CudaError> {
    let _entered = context.enter()?;
    let mut fd: c_int = -1;
    let kind = CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    // SAFETY: for this kind of handle it writes a descriptor.
    unsafe { context.driver.cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, len, kind, 0) }?;
    // SAFETY: CUDA made it just now, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Host memory of the application or the library that is registered with CUDA: pinned, and within
/// reach of every GPU. Unregistered when it is dropped.
pub struct HostRegistration {
    context: Context,
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: it is a range that CUDA knows, by all threads alike; nothing is accessed through it.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// Registers `len` bytes from `address` on, whole pages of a mapping, and for `gpu` first of
    /// all. It takes about 0.4 ms a MiB.
    ///
    /// # Safety
    /// The memory stays mapped until what is returned is dropped.
    ///
    /// # Errors
    /// What CUDA says: `CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED` where some of it is.
    pub unsafe fn new(gpu: &Gpu, address: NonNull<u8>, len: usize) -> Result<HostRegistration, CudaError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { HostRegistration::with(gpu, address, len, REGISTER) }
    }

    /// As [`HostRegistration::new`], of memory that the process may only read, and GPUs as well.
    ///
    /// # Safety
    /// As for [`HostRegistration::new`].
    ///
    /// # Errors
    /// As [`HostRegistration::new`].
    pub unsafe fn read_only(gpu: &Gpu, address: NonNull<u8>, len: usize) -> Result<HostRegistration, CudaError> {
        // SAFETY: the caller vouches for the memory.
        unsafe { HostRegistration::with(gpu, address, len, REGISTER | READ_ONLY) }
    }

    unsafe fn with(gpu: &Gpu, address: NonNull<u8>, len: usize, flags: u32) -> Result<HostRegistration, CudaError> {
        let context = gpu.context()?;
        let _entered = context.enter()?;
        // SAFETY: the caller vouches for the memory.
        unsafe { context.driver.cuMemHostRegister_v2(address.as_ptr().cast(), len, flags) }?;
        Ok(HostRegistration { context, address, len })
    }

    /// Where a GPU's kernels and streams find its first byte.
    ///
    /// # Errors
    /// What CUDA says.
    pub fn device_address(&self, gpu: &Gpu) -> Result<u64, CudaError> {
        let context = gpu.context()?;
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: it writes an address; the memory is registered.
        unsafe { context.driver.cuMemHostGetDevicePointer_v2(&mut address, self.address.as_ptr().cast(), 0) }?;
        Ok(address)
    }
}

impl fmt::Debug for HostRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostRegistration({:p}, {} bytes)", self.address, self.len)
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        // SAFETY: it was registered here, and the caller that put work into a stream vouched that
        // the stream has passed it.
        let unregistered = self
            .context
            .enter()
            .and_then(|_entered| unsafe { self.context.driver.cuMemHostUnregister(self.address.as_ptr().cast()) });
        if let Err(error) = unregistered {
            tracing::debug!(%error, "host memory stays registered with CUDA");
        }
    }
}

/// Memory on a GPU, freed when it is dropped.
pub struct DeviceAllocation {
    context: Context,
    address: u64,
    len: usize,
}

impl DeviceAllocation {
    fn new(context: Context, len: usize) -> Result<DeviceAllocation, CudaError> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: it writes an address.
        unsafe { context.driver.cuMemAlloc_v2(&mut address, len) }?;
        Ok(DeviceAllocation { context, address, len })
    }

    /// The address of its first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    #[allow(clippy::len_without_is_empty)] // CUDA allocates no empty memory
    pub fn len(&self) -> usize {
        self.len
    }
}

impl fmt::Debug for DeviceAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceAllocation({:#x}, {} bytes)", self.address, self.len)
    }
}

impl Drop for DeviceAllocation {
    fn drop(&mut self) {
        // SAFETY: it was allocated here. CUDA finishes what uses it first.
        let freed = self.context.enter().and_then(|_entered| unsafe { self.context.driver.cuMemFree_v2(self.address) });
        if let Err(error) = freed {
            tracing::debug!(%error, "memory of a GPU stays allocated");
        }
    }
}
