//! The functions of libcuda that are called, found when it is loaded.
//!
//! It guards against what `cudarc`'s own wrappers of them would do to an application: they panic
//! where a symbol is missing, and they return an enum, which a newer driver's unknown result must
//! never become. So from `cudarc` come the search for the library, the types, and the signatures:
//! the compiler compares each with the one in here.

use super::error::{CudaError, Unavailable, Version};
use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUflushGPUDirectRDMAWritesScope,
    CUflushGPUDirectRDMAWritesTarget, CUfunction, CUmemRangeHandleType, CUmodule, CUpointer_attribute, CUresult, CUstream,
    CUstreamCaptureMode, CUstreamCaptureStatus, CUuuid,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

/// The oldest driver API that has every function and every attribute that is asked for.
const NEEDED: Version = Version(12_000);

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The functions, by the names that libcuda exports.
        #[allow(non_snake_case)]
        pub(super) struct Driver {
            error_name: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint,
            stream_contexts: Option<StreamContexts>,
            $($name: unsafe extern "C" fn($($type),*) -> c_uint,)*
        }

        impl Driver {
            fn find() -> Result<Driver, Unavailable> {
                Ok(Driver {
                    // SAFETY: this is its signature; an enum's results and arguments are integers
                    // in C.
                    error_name: unsafe { symbol("cuGetErrorName") }?,
                    // SAFETY: this is its signature, of drivers from CUDA 12.5 on.
                    stream_contexts: unsafe { symbol("cuStreamGetCtx_v2") }.ok(),
                    // SAFETY: these are their signatures, as is checked below.
                    $($name: unsafe { symbol(stringify!($name)) }?,)*
                })
            }

            $(
                /// As the driver API's reference says, its requirements included.
                #[allow(non_snake_case, clippy::too_many_arguments)]
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), CudaError> {
                    // SAFETY: the caller meets what the reference asks for.
                    let code = unsafe { (self.$name)($($argument),*) };
                    self.check(stringify!($name), code)
                }
            )*
        }

        $(const _: unsafe fn($($type),*) -> CUresult = sys::$name;)*
    };
}

functions! {
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice);
    fn cuDeviceGetPCIBusId(address: *mut c_char, len: c_int, device: CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    fn cuCtxGetCurrent(context: *mut CUcontext);
    fn cuCtxPushCurrent_v2(context: CUcontext);
    fn cuCtxPopCurrent_v2(context: *mut CUcontext);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    fn cuPointerGetAttribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
    fn cuPointerGetAttributes(count: c_uint, attributes: *mut CUpointer_attribute, values: *mut *mut c_void, address: CUdeviceptr);
    fn cuPointerSetAttribute(value: *const c_void, attribute: CUpointer_attribute, address: CUdeviceptr);
    fn cuMemAlloc_v2(address: *mut CUdeviceptr, len: usize);
    fn cuMemFree_v2(address: CUdeviceptr);
    fn cuMemHostRegister_v2(address: *mut c_void, len: usize, flags: c_uint);
    fn cuMemHostUnregister(address: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, address: *mut c_void, flags: c_uint);
    fn cuMemGetHandleForAddressRange(handle: *mut c_void, address: CUdeviceptr, len: usize, kind: CUmemRangeHandleType, flags: c_ulonglong);
    fn cuFlushGPUDirectRDMAWrites(target: CUflushGPUDirectRDMAWritesTarget, scope: CUflushGPUDirectRDMAWritesScope);
    fn cuCtxGetDevice(device: *mut CUdevice);
    fn cuCtxGetId(context: CUcontext, id: *mut c_ulonglong);
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: CUstream);
    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong);
    fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    fn cuStreamQuery(stream: CUstream);
    fn cuStreamSynchronize(stream: CUstream);
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint);
    fn cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint);
    fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream);
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream);
    fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: CUevent);
    fn cuEventRecord(event: CUevent, stream: CUstream);
    fn cuEventQuery(event: CUevent);
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    fn cuModuleUnload(module: CUmodule);
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint,
        stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void
    );
}

impl Driver {
    /// Loads libcuda and initialises it, once a process, if it can be done.
    pub(super) fn load() -> Result<&'static Driver, Unavailable> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        match DRIVER.get() {
            Some(driver) => Ok(driver),
            None => Driver::start().map(|driver| DRIVER.get_or_init(|| driver)),
        }
    }

    fn start() -> Result<Driver, Unavailable> {
        // SAFETY: libcuda's constructors are made to run in any process that looks for it.
        let is_there = unsafe { sys::is_culib_present() };
        // What was there is opened once more for good, or else that panics: descriptors may be
        // gone by then.
        // SAFETY: as above.
        if !is_there || std::panic::catch_unwind(|| unsafe { sys::culib() }).is_err() {
            return Err(Unavailable::NotFound);
        }
        let found = version()?;
        if found < NEEDED {
            return Err(Unavailable::TooOld { found, needed: NEEDED });
        }
        let driver = Driver::find()?;
        // SAFETY: it may be called at any time, and again.
        match unsafe { driver.cuInit(0) } {
            Ok(()) => Ok(driver),
            Err(error) if error.code == CudaError::NO_DEVICE => Err(Unavailable::NoGpu),
            Err(error) => Err(Unavailable::Init(error)),
        }
    }

    /// The context that a stream works in. For one of a green context that is the GPU's primary
    /// context, whose memory and kernels it uses, and which any thread may enter: a green context
    /// is for one thread at a time.
    ///
    /// # Safety
    /// It is a stream of this process, and none of the default streams.
    pub(super) unsafe fn context_of(&self, stream: CUstream) -> Result<CUcontext, CudaError> {
        let (mut context, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
        match self.stream_contexts {
            Some(get) => {
                // SAFETY: the caller vouches for the stream; it writes two handles.
                let code = unsafe { get(stream, &mut context, &mut green) };
                self.check("cuStreamGetCtx_v2", code)?;
            }
            // SAFETY: as above; it writes one.
            None => unsafe { self.cuStreamGetCtx(stream, &mut context) }?,
        }
        Ok(context)
    }

    /// The driver API's version, which is older or newer than that of the application's toolkit.
    pub(super) fn version(&self) -> Result<Version, CudaError> {
        let mut version = 0;
        // SAFETY: it writes an integer.
        unsafe { self.cuDriverGetVersion(&mut version) }?;
        Ok(Version(version.unsigned_abs()))
    }

    fn check(&self, call: &'static str, code: c_uint) -> Result<(), CudaError> {
        if code == 0 { Ok(()) } else { Err(self.error(call, code)) }
    }

    pub(super) fn error(&self, call: &'static str, code: c_uint) -> CudaError {
        let mut name = std::ptr::null();
        // SAFETY: it writes the address of a string, or nothing.
        let known = unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null();
        // SAFETY: the string is the library's, which stays loaded for the life of the process.
        let name = known.then(|| unsafe { CStr::from_ptr(name) }.to_str().ok()).flatten();
        CudaError { call, code, name: name.unwrap_or("unknown to this driver") }
    }
}

/// `cuStreamGetCtx_v2`: of a stream, its context, or for one of a green context the GPU's primary
/// context and the green one.
type StreamContexts = unsafe extern "C" fn(CUstream, *mut CUcontext, *mut *mut c_void) -> c_uint;

/// Before anything else is looked up: what an old driver lacks is explained by its age.
fn version() -> Result<Version, Unavailable> {
    // SAFETY: this is its signature.
    let get: unsafe extern "C" fn(*mut c_int) -> c_uint = unsafe { symbol("cuDriverGetVersion") }?;
    let mut version = 0;
    // SAFETY: it writes an integer, and needs no initialisation before.
    match unsafe { get(&mut version) } {
        0 => Ok(Version(version.unsigned_abs())),
        CudaError::STUB_LIBRARY => Err(Unavailable::Stub),
        code => Err(Unavailable::Init(CudaError { call: "cuDriverGetVersion", code, name: "unknown" })),
    }
}

/// A function of libcuda, which must be present.
///
/// # Safety
/// `F` is the type of a pointer to it.
unsafe fn symbol<F: Copy>(name: &'static str) -> Result<F, Unavailable> {
    // SAFETY: the library stays loaded for the life of the process, and the type is the caller's
    // business.
    unsafe { sys::culib().get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_| Unavailable::Symbol { name })
}
