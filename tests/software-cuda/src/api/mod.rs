//! The functions that a `libcuda.so` exports, each as the driver API's reference describes it. The
//! compiler compares their signatures with `cudarc`'s.
//!
//! In here are those of the driver, devices and contexts.

use crate::{Code, Context, ENTERED, Software};
use cudarc::driver::sys::cudaError_enum::*;
use cudarc::driver::sys::*;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

type Answer = Result<(), Code>;

macro_rules! exports {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {
        $(
            /// # Safety
            /// As the driver API's reference says.
            #[unsafe(no_mangle)]
            #[allow(non_snake_case)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
                let answer = || -> Answer { $body };
                answer().err().unwrap_or(CUDA_SUCCESS)
            }

            const _: unsafe fn($($type),*) -> CUresult = cudarc::driver::sys::$name;
        )*
    };
}

mod memory;
mod streams;

exports! {
    fn cuGetErrorName(error: CUresult, name: *mut *const c_char) {
        let text: &CStr = match error {
            CUDA_SUCCESS => c"CUDA_SUCCESS",
            CUDA_ERROR_INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
            CUDA_ERROR_OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
            CUDA_ERROR_NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
            CUDA_ERROR_NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
            CUDA_ERROR_INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
            CUDA_ERROR_INVALID_IMAGE => c"CUDA_ERROR_INVALID_IMAGE",
            CUDA_ERROR_INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
            CUDA_ERROR_ECC_UNCORRECTABLE => c"CUDA_ERROR_ECC_UNCORRECTABLE",
            CUDA_ERROR_INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
            CUDA_ERROR_NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
            CUDA_ERROR_NOT_READY => c"CUDA_ERROR_NOT_READY",
            CUDA_ERROR_ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            CUDA_ERROR_NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
            CUDA_ERROR_SYSTEM_NOT_READY => c"CUDA_ERROR_SYSTEM_NOT_READY",
            CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            _ => c"CUDA_ERROR_UNKNOWN",
        };
        put(name, text.as_ptr())
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, Software::get().settings.version)
    }

    fn cuInit(_flags: c_uint) {
        let software = Software::get();
        match software.settings.init {
            Some(code) => return Err(code_of(code)),
            None if software.settings.gpus == 0 => return Err(CUDA_ERROR_NO_DEVICE),
            None => software.initialised.store(true, Ordering::Release),
        }
        Ok(())
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        put(count, Software::running()?.settings.gpus as c_int)
    }

    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) {
        put(device, gpu(Software::running()?, ordinal)? as CUdevice)
    }

    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) {
        gpu(Software::running()?, device)?;
        put_text(name, len, "Software GPU")
    }

    fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) {
        let gpu = gpu(Software::running()?, device)?;
        let mut bytes = *b"software-gpu----";
        bytes[15] = b'0' + gpu as u8;
        put(uuid, CUuuid { bytes: bytes.map(|byte| byte as c_char) })
    }

    fn cuDeviceGetPCIBusId(address: *mut c_char, len: c_int, device: CUdevice) {
        // A bus that no machine has, so that nothing is ever found there.
        let gpu = gpu(Software::running()?, device)?;
        put_text(address, len, &format!("FFFF:FF:{gpu:02X}.0"))
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) {
        use CUdevice_attribute_enum::*;
        let software = Software::running()?;
        gpu(software, device)?;
        put(value, match attribute {
            CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING => 1,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED => 1,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED => 1,
            CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED => c_int::from(software.settings.c2c),
            CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED => c_int::from(software.settings.dma_buf),
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED => 1,
            CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES => 1,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS => 1,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING => software.settings.writes_ordering,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) {
        let software = Software::running()?;
        gpu(software, device)?;
        put(bytes, software.settings.memory as usize)
    }

    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) {
        let software = Software::running()?;
        put(context, handle(software.primary(gpu(software, device)?).handle))
    }

    fn cuCtxCreate_v2(context: *mut CUcontext, _flags: c_uint, device: CUdevice) {
        let software = Software::running()?;
        let new = software.new_context(gpu(software, device)?, None);
        put(context, handle(new.handle))?;
        enter(new);
        Ok(())
    }

    fn cuCtxDestroy_v2(context: CUcontext) {
        let software = Software::running()?;
        let context = software.context(context.addr())?;
        software.settle();
        ENTERED.with_borrow_mut(|entered| entered.retain(|other| other.handle != context.handle));
        software.handles.lock().unwrap().contexts.remove(&context.handle);
        Ok(())
    }

    fn cuDeviceGetDevResource(device: CUdevice, resource: *mut CUdevResource, _kind: CUdevResourceType) {
        gpu(Software::running()?, device)?;
        if resource.is_null() { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(()) }
    }

    fn cuDevResourceGenerateDesc(desc: *mut CUdevResourceDesc, _resources: *mut CUdevResource, _count: c_uint) {
        put(desc, handle(Software::running()?.new_handle()))
    }

    fn cuGreenCtxCreate(context: *mut CUgreenCtx, _desc: CUdevResourceDesc, device: CUdevice, _flags: c_uint) {
        let software = Software::running()?;
        let gpu = gpu(software, device)?;
        let primary = software.primary(gpu).handle;
        put(context, handle(software.new_context(gpu, Some(primary)).handle))
    }

    fn cuCtxFromGreenCtx(context: *mut CUcontext, green: CUgreenCtx) {
        put(context, handle(Software::running()?.context(green.addr())?.handle))
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        Software::running()?;
        let current = ENTERED.with_borrow(|entered| entered.last().map_or(0, |context| context.handle));
        put(context, handle(current))
    }

    fn cuCtxGetDevice(device: *mut CUdevice) {
        put(device, Software::running()?.current()?.gpu as c_int)
    }

    fn cuCtxGetId(context: CUcontext, id: *mut c_ulonglong) {
        put(id, Software::running()?.context(context.addr())?.handle as c_ulonglong)
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        enter(Software::running()?.context(context.addr())?);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        Software::running()?;
        let popped = ENTERED.with_borrow_mut(Vec::pop).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
        put(context, handle(popped.handle))
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) {
        // No call ends a capture; every thread is in the mode that it would begin with.
        Software::running()?;
        put(mode, CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL)
    }
}

fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller of the driver passes a place for the answer.
    unsafe { out.write(value) };
    Ok(())
}

fn put_text(out: *mut c_char, len: c_int, text: &str) -> Answer {
    let text = &text.as_bytes()[..text.len().min(len.max(1) as usize - 1)];
    // SAFETY: the caller of the driver passes so many bytes.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), out, text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

/// What `cuInit` is set up to say.
fn code_of(code: u32) -> Code {
    let known = [CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH];
    known.into_iter().find(|known| *known as u32 == code).unwrap_or(CUDA_ERROR_UNKNOWN)
}

fn handle<T>(name: usize) -> *mut T {
    ptr::without_provenance_mut(name)
}

fn gpu(software: &Software, device: c_int) -> Result<usize, Code> {
    usize::try_from(device).ok().filter(|gpu| *gpu < software.settings.gpus).ok_or(CUDA_ERROR_INVALID_DEVICE)
}

fn enter(context: Arc<Context>) {
    ENTERED.with_borrow_mut(|entered| entered.push(context));
}
