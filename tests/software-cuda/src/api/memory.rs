//! The exported functions about memory.

use super::{Answer, gpu, put};
use crate::memory::{GRANULARITY, Kind, free_host_memory, host_memory};
use crate::pinned::PinnedPages;
use crate::stream::Work;
use crate::{Code, ENTERED, Software};
use cudarc::driver::sys::cudaError_enum::*;
use cudarc::driver::sys::*;
use rustix::io::fcntl_dupfd_cloexec;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::IntoRawFd;
use std::ptr;

exports! {
    fn cuPointerGetAttribute(value: *mut c_void, attribute: CUpointer_attribute, address: CUdeviceptr) {
        let software = Software::running()?;
        unbroken()?;
        software.addresses.lock().unwrap().find(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        put_attribute(software, value, attribute, address)
    }

    fn cuPointerGetAttributes(count: c_uint, attributes: *mut CUpointer_attribute, values: *mut *mut c_void, address: CUdeviceptr) {
        let software = Software::running()?;
        unbroken()?;
        (0..count as usize).try_for_each(|i| {
            // SAFETY: the caller passes so many of both.
            let (value, attribute) = unsafe { (values.add(i).read(), attributes.add(i).read()) };
            put_attribute(software, value, attribute, address)
        })
    }

    fn cuPointerSetAttribute(_value: *const c_void, attribute: CUpointer_attribute, address: CUdeviceptr) {
        let software = Software::running()?;
        software.current()?;
        if attribute != CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        match software.addresses.lock().unwrap().find(address) {
            Some((_, allocation)) if matches!(allocation.kind, Kind::Device(_)) => Ok(()),
            Some(_) => Err(CUDA_ERROR_NOT_SUPPORTED),
            None => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuMemAlloc_v2(address: *mut CUdeviceptr, len: usize) {
        let software = Software::running()?;
        let context = software.current()?;
        let _turn = software.turn();
        put(address, place(software, Kind::Device(context.handle), context.gpu, len)?)
    }

    fn cuMemFree_v2(address: CUdeviceptr) {
        let software = Software::running()?;
        software.current()?;
        free(software, address, |kind| matches!(kind, Kind::Device(_) | Kind::Pool | Kind::Managed(_)))
    }

    fn cuMemAllocAsync(address: *mut CUdeviceptr, len: usize, stream: CUstream) {
        let software = Software::running()?;
        let gpu = software.stream(stream.addr())?.context.gpu;
        put(address, place(software, Kind::Pool, gpu, len)?)
    }

    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) {
        let software = Software::running()?;
        let stream = software.stream(stream.addr())?;
        software.addresses.lock().unwrap().beginning_at(address).filter(|found| found.kind == Kind::Pool).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        stream.put(Work::Free(address));
        Ok(())
    }

    fn cuMemAllocManaged(address: *mut CUdeviceptr, len: usize, _flags: c_uint) {
        let software = Software::running()?;
        let kind = Kind::Managed(software.current()?.gpu);
        put(address, host(software, kind, len)?)
    }

    fn cuMemHostAlloc(address: *mut *mut c_void, len: usize, _flags: c_uint) {
        let software = Software::running()?;
        let kind = Kind::Host(software.current()?.handle);
        put(address, ptr::with_exposed_provenance_mut(host(software, kind, len)? as usize))
    }

    fn cuMemFreeHost(address: *mut c_void) {
        let software = Software::running()?;
        software.current()?;
        free(software, address.addr() as u64, |kind| matches!(kind, Kind::Host(_)))
    }

    fn cuMemHostRegister_v2(address: *mut c_void, len: usize, flags: c_uint) {
        let software = Software::running()?;
        let context = software.current()?;
        let (base, len) = (address.expose_provenance() as u64, len as u64);
        let _turn = software.turn();
        let mut addresses = software.addresses.lock().unwrap();
        if len == 0 || base.checked_add(len).is_none() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if addresses.overlaps(base, len) {
            return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let kind = Kind::Host(context.handle);
        if flags & CU_MEMHOSTREGISTER_READ_ONLY == 0 {
            addresses.insert(base, len, kind, None, true);
            return Ok(());
        }
        // SAFETY: the caller passes memory that may be read.
        let pinned = unsafe { PinnedPages::new(address.cast(), len as usize) }.map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        addresses.insert_pinned(base, len, kind, pinned);
        Ok(())
    }

    fn cuMemHostUnregister(address: *mut c_void) {
        let software = Software::running()?;
        software.current()?;
        let base = address.addr() as u64;
        let registered = |software: &Software| software.addresses.lock().unwrap().beginning_at(base).is_some_and(|found| matches!(found.kind, Kind::Host(_)));
        if !registered(software) {
            return Err(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        }
        software.settle();
        drop(software.addresses.lock().unwrap().remove(base));
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, address: *mut c_void, _flags: c_uint) {
        let software = Software::running()?;
        software.current()?;
        let address = address.addr() as u64;
        let addresses = software.addresses.lock().unwrap();
        match addresses.find(address) {
            Some((_, allocation)) if matches!(allocation.kind, Kind::Host(_)) => put(device, address),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, _properties: *const CUmemAllocationProp, _option: CUmemAllocationGranularity_flags) {
        Software::running()?;
        put(granularity, GRANULARITY as usize)
    }

    fn cuMemCreate(memory: *mut CUmemGenericAllocationHandle, len: usize, properties: *const CUmemAllocationProp, _flags: c_ulonglong) {
        let software = Software::running()?;
        // SAFETY: the caller passes properties.
        let gpu = gpu(software, unsafe { (*properties).location.id })?;
        if len == 0 || !(len as u64).is_multiple_of(GRANULARITY) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let backing = software.take(gpu, len as u64)?;
        let new = software.new_handle() as u64;
        software.handles.lock().unwrap().memory.insert(new, backing);
        put(memory, new)
    }

    fn cuMemRelease(memory: CUmemGenericAllocationHandle) {
        let removed = Software::running()?.handles.lock().unwrap().memory.remove(&memory);
        removed.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    fn cuMemAddressReserve(address: *mut CUdeviceptr, len: usize, _alignment: usize, _wanted: CUdeviceptr, _flags: c_ulonglong) {
        put(address, Software::running()?.addresses.lock().unwrap().reserve((len as u64).next_multiple_of(GRANULARITY))?)
    }

    fn cuMemAddressFree(address: CUdeviceptr, len: usize) {
        Software::running()?.addresses.lock().unwrap().unreserve(address, (len as u64).next_multiple_of(GRANULARITY))
    }

    fn cuMemMap(address: CUdeviceptr, len: usize, offset: usize, memory: CUmemGenericAllocationHandle, _flags: c_ulonglong) {
        let software = Software::running()?;
        let backing = software.handles.lock().unwrap().memory.get(&memory).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        software.addresses.lock().unwrap().map(address, len as u64, backing, offset as u64)
    }

    fn cuMemUnmap(address: CUdeviceptr, len: usize) {
        let software = Software::running()?;
        let mapped = software.addresses.lock().unwrap().mappings(address, len as u64)?;
        software.settle();
        let mut addresses = software.addresses.lock().unwrap();
        mapped.into_iter().for_each(|base| drop(addresses.remove(base)));
        Ok(())
    }

    fn cuMemSetAccess(address: CUdeviceptr, len: usize, access: *const CUmemAccessDesc, _count: usize) {
        // SAFETY: the caller passes at least one.
        let flags = unsafe { (*access).flags };
        let accessible = flags == CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        Software::running()?.addresses.lock().unwrap().set_access(address, len as u64, accessible)
    }

    fn cuMemGetHandleForAddressRange(handle: *mut c_void, address: CUdeviceptr, len: usize, kind: CUmemRangeHandleType, flags: c_ulonglong) {
        let software = Software::running()?;
        software.current()?;
        if kind != CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || len == 0 || !len.is_multiple_of(4096) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if !software.settings.dma_buf || flags != 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let addresses = software.addresses.lock().unwrap();
        let (base, allocation) = addresses.find(address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let (backing, offset) = allocation.backing.as_ref().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if address != base || *offset != 0 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        if len as u64 > backing.len() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let fd = fcntl_dupfd_cloexec(backing.descriptor(), 0).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        put(handle.cast::<c_int>(), fd.into_raw_fd())
    }

    fn cuFlushGPUDirectRDMAWrites(_target: CUflushGPUDirectRDMAWritesTarget, _scope: CUflushGPUDirectRDMAWritesScope) {
        Software::running()?.current().map(drop)
    }
}

/// For calls that need no context, but say what ended the one that there is.
fn unbroken() -> Answer {
    ENTERED.with_borrow(|entered| entered.last().and_then(|context| context.broken())).map_or(Ok(()), Err)
}

fn place(software: &Software, kind: Kind, gpu: usize, len: usize) -> Result<u64, Code> {
    if len == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let backing = software.take(gpu, len as u64)?;
    software.addresses.lock().unwrap().place(kind, len as u64, backing)
}

fn host(software: &Software, kind: Kind, len: usize) -> Result<u64, Code> {
    let base = host_memory(len)?;
    software.addresses.lock().unwrap().insert(base, len as u64, kind, None, true);
    Ok(base)
}

/// Frees what begins at an address, after everything that may use it.
fn free(software: &Software, address: u64, of_kind: impl Fn(Kind) -> bool) -> Answer {
    let found = software.addresses.lock().unwrap().beginning_at(address).is_some_and(|found| of_kind(found.kind));
    if !found {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    software.settle();
    if let Some(removed) = software.addresses.lock().unwrap().remove(address)
        && matches!(removed.kind, Kind::Managed(_) | Kind::Host(_))
    {
        // SAFETY: CUDA gave it out, and the application gives it back.
        unsafe { free_host_memory(address, removed.len) };
    }
    Ok(())
}

fn put_attribute(software: &Software, value: *mut c_void, attribute: CUpointer_attribute, address: u64) -> Answer {
    use CUpointer_attribute_enum::*;
    let addresses = software.addresses.lock().unwrap();
    let found = addresses.find(address);
    let kind = found.map(|(_, allocation)| allocation.kind);
    let owner = |context: usize| software.context(context).map_or(-2, |context| context.gpu as c_int);
    let backing = found.and_then(|(_, allocation)| allocation.backing.as_ref());
    match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => match kind {
            Some(Kind::Device(context) | Kind::Host(context)) => put(value.cast(), context),
            _ => put(value.cast(), 0usize),
        },
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => put(
            value.cast(),
            match kind {
                Some(Kind::Device(_) | Kind::Pool | Kind::Mapped(..) | Kind::Managed(_)) => {
                    CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u32
                }
                Some(Kind::Host(_)) => CUmemorytype_enum::CU_MEMORYTYPE_HOST as u32,
                None => 0,
            },
        ),
        CU_POINTER_ATTRIBUTE_HOST_POINTER => put(
            value.cast(),
            match kind {
                Some(Kind::Managed(_) | Kind::Host(_)) => address,
                _ => 0,
            },
        ),
        CU_POINTER_ATTRIBUTE_IS_MANAGED => put(value.cast(), u32::from(matches!(kind, Some(Kind::Managed(_))))),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => put(
            value.cast(),
            match kind {
                Some(Kind::Device(context) | Kind::Host(context)) => owner(context),
                Some(Kind::Managed(gpu)) => gpu as c_int,
                Some(Kind::Pool | Kind::Mapped(..)) => backing.map_or(-2, |(backing, _)| backing.gpu as c_int),
                None => -2,
            },
        ),
        CU_POINTER_ATTRIBUTE_BUFFER_ID => put(value.cast(), found.map_or(0, |(_, allocation)| allocation.buffer_id)),
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => put(
            value.cast(),
            match (kind, found) {
                (Some(Kind::Mapped(base, _)), _) => base,
                (_, found) => found.map_or(0, |(base, _)| base),
            },
        ),
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => put(
            value.cast(),
            match (kind, found) {
                (Some(Kind::Mapped(_, len)), _) => len,
                (_, found) => found.map_or(0, |(_, allocation)| allocation.len),
            },
        ),
        CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
            put(value.cast(), found.filter(|_| backing.is_some()).map_or(0, |(base, _)| base))
        }
        CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
            put(value.cast(), found.filter(|_| backing.is_some()).map_or(0, |(_, allocation)| allocation.len))
        }
        CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => {
            let gpu = software.current()?.gpu;
            let (_, allocation) = found.ok_or(CUDA_ERROR_INVALID_VALUE)?;
            let reached = allocation.accessible && backing.is_none_or(|(backing, _)| backing.gpu == gpu);
            let all = CUDA_POINTER_ATTRIBUTE_ACCESS_FLAGS_enum::CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE as u32;
            put(value.cast(), if reached { all } else { 0 })
        }
        CU_POINTER_ATTRIBUTE_MAPPED => put(value.cast(), u32::from(found.is_some_and(|(_, allocation)| allocation.accessible))),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}
