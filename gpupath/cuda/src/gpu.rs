//! GPUs: their names, places and abilities, and their primary contexts.

use super::context::{Context, Entered};
use super::driver::Driver;
use super::error::CudaError;
use cudarc::driver::sys::{
    CUdevice, CUdevice_attribute, CUdevice_attribute_enum as Attribute, CUflushGPUDirectRDMAWritesOptions_enum as FlushOption,
    CUflushGPUDirectRDMAWritesScope_enum as FlushScope, CUflushGPUDirectRDMAWritesTarget_enum as FlushTarget, CUuuid,
};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::ptr;
use std::str::FromStr;
use std::sync::OnceLock;
use uuid::Uuid;

/// What is known of a GPU for as long as the process runs.
pub(super) struct Device {
    driver: &'static Driver,
    handle: CUdevice,
    index: u32,
    name: String,
    uuid: Uuid,
    pci_address: String,
    memory: u64,
    dma_buf: bool,
    writes_ordering: WritesOrdering,
    /// For whom the writes of PCIe devices have to be ordered: every GPU of the process may read
    /// this one's memory.
    readers: WritesOrdering,
    flushable: bool,
    streams_flush: bool,
    context: OnceLock<Context>,
}

impl Device {
    pub(super) fn all(driver: &'static Driver) -> Result<Vec<Device>, CudaError> {
        let mut count = 0;
        // SAFETY: it writes an integer.
        unsafe { driver.cuDeviceGetCount(&mut count) }?;
        let readers = if count > 1 { WritesOrdering::AllDevices } else { WritesOrdering::Owner };
        (0..count).map(|ordinal| Device::get(driver, ordinal, readers)).collect()
    }

    pub(super) fn is(&self, handle: CUdevice) -> bool {
        self.handle == handle
    }

    fn get(driver: &'static Driver, ordinal: c_int, readers: WritesOrdering) -> Result<Device, CudaError> {
        let (mut handle, mut uuid, mut memory) = (0, CUuuid { bytes: [0; 16] }, 0);
        // SAFETY: each writes what its first argument points at, of a device that the first found.
        unsafe {
            driver.cuDeviceGet(&mut handle, ordinal)?;
            driver.cuDeviceGetUuid_v2(&mut uuid, handle)?;
            driver.cuDeviceTotalMem_v2(&mut memory, handle)?;
        }
        let attribute = |attribute: CUdevice_attribute| {
            let mut value = 0;
            // SAFETY: it writes an integer.
            unsafe { driver.cuDeviceGetAttribute(&mut value, attribute, handle) }.map(|()| value)
        };
        Ok(Device {
            driver,
            handle,
            index: ordinal.unsigned_abs(),
            // SAFETY: it writes at most so many bytes, the zero at the end included.
            name: text(|out, len| unsafe { driver.cuDeviceGetName(out, len, handle) })?,
            uuid: Uuid::from_bytes(uuid.bytes.map(|byte| byte as u8)),
            // SAFETY: as above.
            pci_address: text(|out, len| unsafe { driver.cuDeviceGetPCIBusId(out, len, handle) })?.to_lowercase(),
            memory: memory as u64,
            dma_buf: attribute(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0,
            readers,
            writes_ordering: match attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)? {
                // NVLink-C2C, told by atomics between processor and GPU: data may take another way
                // to the GPU than the completion that is read there, and the order on one says
                // nothing about the other.
                _ if attribute(Attribute::CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED)? != 0 => WritesOrdering::None,
                ..100 => WritesOrdering::None,
                100..200 => WritesOrdering::Owner,
                200.. => WritesOrdering::AllDevices,
            },
            flushable: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?
                & FlushOption::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int
                != 0,
            streams_flush: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)? != 0,
            context: OnceLock::new(),
        })
    }
}

fn text(get: impl FnOnce(*mut c_char, c_int) -> Result<(), CudaError>) -> Result<String, CudaError> {
    let mut bytes = [0u8; 256];
    get(bytes.as_mut_ptr().cast(), 255)?;
    Ok(CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default())
}

/// For whom a GPU puts what a PCIe device wrote into its memory before what is read later
/// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritesOrdering {
    /// For no reader: [`Gpu::flush_remote_writes`] has work to do.
    None,
    /// For its own kernels and copies.
    Owner,
    /// For those of other GPUs too.
    AllDevices,
}

/// A GPU. It costs nothing to hold; nothing of it is used before a method is called that makes or
/// does something.
#[derive(Clone, Copy)]
pub struct Gpu(&'static Device);

impl Gpu {
    pub(super) fn new(device: &'static Device) -> Gpu {
        Gpu(device)
    }

    /// Its number among those that this process may use.
    pub fn index(&self) -> u32 {
        self.0.index
    }

    /// Its UUID, or that of the MIG slice that it is.
    pub fn uuid(&self) -> Uuid {
        self.0.uuid
    }

    /// Its model, such as `NVIDIA H200`.
    pub fn name(&self) -> &'static str {
        &self.0.name
    }

    /// Its address, such as `0000:01:00.0`.
    pub fn pci_address(&self) -> &'static str {
        &self.0.pci_address
    }

    /// Its memory in bytes.
    pub fn memory(&self) -> u64 {
        self.0.memory
    }

    /// The NUMA node that it is attached to; `None` on machines that have only one.
    pub fn numa_node(&self) -> Option<u32> {
        let node = std::fs::read_to_string(format!("/sys/bus/pci/devices/{}/numa_node", self.0.pci_address)).ok()?;
        node.trim().parse().ok() // -1 where there is none
    }

    /// Whether [`Gpu::export_dma_buf`] can work.
    pub fn dma_buf_supported(&self) -> bool {
        self.0.dma_buf
    }

    /// For whom it orders the writes of PCIe devices. [`WritesOrdering::None`] on machines with
    /// NVLink-C2C, whatever the driver says: what it says is true of one of the ways into the
    /// memory.
    pub fn writes_ordering(&self) -> WritesOrdering {
        self.0.writes_ordering
    }

    /// Makes its primary context current on this thread until the guard is dropped: for a thread
    /// that makes many calls. Everything else does so for itself.
    ///
    /// # Errors
    /// What CUDA says; the first time it may be that the GPU's memory is full, or that another
    /// process uses the GPU exclusively.
    pub fn enter(&self) -> Result<Entered, CudaError> {
        self.context()?.enter()
    }

    /// The primary context. It is never released: at the end of a process libcuda may be gone
    /// before what would release it.
    pub(super) fn context(&self) -> Result<Context, CudaError> {
        if let Some(context) = self.0.context.get() {
            return Ok(*context);
        }
        let mut raw = ptr::null_mut();
        // SAFETY: it writes a handle. Two threads that get here at once retain it twice, which
        // does no harm.
        unsafe { self.0.driver.cuDevicePrimaryCtxRetain(&mut raw, self.0.handle) }?;
        Ok(*self.0.context.get_or_init(|| Context::new(self.0.driver, raw)))
    }

    /// Whether what PCIe devices wrote into its memory can be there for a stream of `other` that
    /// waits for a word which was written afterwards, and for all that comes after in the order of
    /// CUDA, on other GPUs of the process too: by itself, or because the stream flushes
    /// ([`crate::Stream::wait_value_and_flush`]), which it does for its own GPU only.
    pub fn orders_writes_for_streams_of(&self, other: &Gpu) -> bool {
        self.0.writes_ordering >= self.0.readers
            || self.0.readers == WritesOrdering::Owner && self == other && self.0.streams_flush
    }

    /// Whether [`Gpu::flush_remote_writes`] has work to do.
    pub fn needs_flush(&self) -> bool {
        self.0.writes_ordering < self.0.readers
    }

    /// Puts what PCIe devices wrote into this GPU's memory before what any GPU of the process
    /// reads there from now on. Where it does so by itself ([`Gpu::writes_ordering`]) this does
    /// nothing.
    ///
    /// # Errors
    /// What CUDA says: `CUDA_ERROR_NOT_SUPPORTED` where the GPU needs the flush, and the host
    /// cannot ask for it.
    pub fn flush_remote_writes(&self) -> Result<(), CudaError> {
        if !self.needs_flush() {
            return Ok(());
        }
        if !self.0.flushable {
            return Err(self.0.driver.error("cuFlushGPUDirectRDMAWrites", CudaError::NOT_SUPPORTED));
        }
        let context = self.context()?;
        let _entered = context.enter()?;
        let target = FlushTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = match self.0.readers {
            WritesOrdering::AllDevices => FlushScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES,
            _ => FlushScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
        };
        // SAFETY: it has no requirements.
        unsafe { context.driver.cuFlushGPUDirectRDMAWrites(target, scope) }
    }
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Gpu) -> bool {
        self.0.index == other.0.index
    }
}

impl Eq for Gpu {}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (GPU-{}, {})", self.0.index, self.0.uuid, self.0.name)
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({self})")
    }
}

/// What names a GPU: `0`, or `GPU-` and its UUID, as `nvidia-smi -L` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Its number among those that the process may use.
    Index(u32),
    /// Its UUID, or that of a MIG slice.
    Uuid(Uuid),
}

impl Which {
    pub(super) fn is(&self, gpu: &Gpu) -> bool {
        match self {
            Which::Index(index) => *index == gpu.index(),
            Which::Uuid(uuid) => *uuid == gpu.uuid(),
        }
    }
}

impl FromStr for Which {
    type Err = NoGpuName;

    fn from_str(name: &str) -> Result<Which, NoGpuName> {
        let uuid = name.strip_prefix("GPU-").or_else(|| name.strip_prefix("MIG-"));
        match uuid {
            Some(uuid) => uuid.parse().ok().map(Which::Uuid),
            None => name.parse().ok().map(Which::Index),
        }
        .ok_or_else(|| NoGpuName(name.to_owned()))
    }
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Which::Index(index) => write!(f, "{index}"),
            Which::Uuid(uuid) => write!(f, "GPU-{uuid}"),
        }
    }
}

/// The error that a text names no GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no GPU: give its number, such as 0, or its UUID with GPU- or MIG- before it, as `nvidia-smi -L` shows it")]
pub struct NoGpuName(String);

/// There is no such GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no GPU {which} for this process; there is {}", list(gpus))]
pub struct NoSuchGpu {
    /// What was asked for.
    pub which: Which,
    /// What there is.
    pub gpus: Vec<Gpu>,
}

fn list(gpus: &[Gpu]) -> String {
    gpus.iter().map(Gpu::to_string).collect::<Vec<_>>().join(", ")
}
