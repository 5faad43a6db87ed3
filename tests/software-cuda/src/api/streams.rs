//! The exported functions about streams, events and kernels.

use super::{Answer, handle, put};
use crate::memory::{HostSpan, Kind};
use crate::stream::{Stream, Work};
use crate::{Code, Software};
use cudarc::driver::sys::cudaError_enum::*;
use cudarc::driver::sys::*;
use std::ffi::{CStr, c_char, c_uint, c_ulonglong, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

exports! {
    fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) {
        let software = Software::running()?;
        let current = software.current()?;
        let new = match current.green_of {
            // It shares the primary context's memory, kernels and end.
            Some(primary) => Stream::new(software, software.context(primary)?, Some(current.handle)),
            None => Stream::new(software, current, None),
        };
        let new = Arc::new(new);
        let mut handles = software.handles.lock().unwrap();
        let name = handles.reused.pop().unwrap_or_else(|| software.new_handle());
        handles.streams.insert(name, new);
        put(stream, handle(name))
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        let software = Software::running()?;
        let mut handles = software.handles.lock().unwrap();
        let removed = handles.streams.remove(&stream.addr()).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        // What is in it is done all the same.
        handles.ends.retain(|end| !end.passed());
        handles.ends.push(removed.mark());
        if software.settings.streams_reused {
            handles.reused.push(stream.addr());
        }
        Ok(())
    }

    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) {
        let software = Software::running()?;
        if stream.addr() <= 2 {
            return put(context, handle(software.current()?.handle));
        }
        let found = software.handles.lock().unwrap().streams.get(&stream.addr()).map(|stream| stream.green.unwrap_or(stream.context.handle));
        put(context, handle(found.ok_or(CUDA_ERROR_INVALID_HANDLE)?))
    }

    fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong) {
        put(id, Software::running()?.stream(stream.addr())?.id as c_ulonglong)
    }

    fn cuStreamQuery(stream: CUstream) {
        let stream = Software::running()?.stream(stream.addr())?;
        match stream.context.broken() {
            Some(code) => Err(code),
            None if stream.mark().passed() => Ok(()),
            None => Err(CUDA_ERROR_NOT_READY),
        }
    }

    fn cuStreamSynchronize(stream: CUstream) {
        let stream = Software::running()?.stream(stream.addr())?;
        stream.mark().wait();
        stream.context.broken().map_or(Ok(()), Err)
    }

    fn cuStreamBeginCapture_v2(stream: CUstream, _mode: CUstreamCaptureMode) {
        Software::running()?.stream(stream.addr())?.begin_capture();
        Ok(())
    }

    fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus) {
        let captured = Software::running()?.stream(stream.addr())?.is_captured();
        put(status, if captured { CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE } else { CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE })
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        let software = Software::running()?;
        let nodes = software.stream(stream.addr())?.end_capture().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        let name = software.new_handle();
        software.handles.lock().unwrap().graphs.insert(name, nodes);
        put(graph, handle(name))
    }

    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        let found = Software::running()?.handles.lock().unwrap().graphs.get(&graph.addr()).copied();
        if !nodes.is_null() {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        put(count, found.ok_or(CUDA_ERROR_INVALID_HANDLE)?)
    }

    fn cuGraphDestroy(graph: CUgraph) {
        let removed = Software::running()?.handles.lock().unwrap().graphs.remove(&graph.addr());
        removed.map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) {
        let software = Software::running()?;
        let stream = software.stream(stream.addr())?;
        let (_, mark) = software.handles.lock().unwrap().events.get(&event.addr()).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        if let Some(mark) = mark {
            stream.put(Work::Await(mark));
        }
        Ok(())
    }

    fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: cuuint32_t, flags: c_uint) {
        let software = Software::running()?;
        let stream = software.stream(stream.addr())?;
        let flush = CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_FLUSH as u32;
        let passed = match flags & !flush {
            0 => true,
            1 => false,
            _ => return Err(CUDA_ERROR_NOT_SUPPORTED),
        };
        if Some(software.waits.fetch_add(1, Ordering::Relaxed) + 1) == software.settings.wait_fails {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let _turn = software.turn();
        stream.put(Work::AwaitValue(word(software, address)?, value, passed));
        Ok(())
    }

    fn cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: cuuint32_t, _flags: c_uint) {
        let software = Software::running()?;
        let stream = software.stream(stream.addr())?;
        let _turn = software.turn();
        stream.put(Work::WriteValue(word(software, address)?, value));
        Ok(())
    }

    fn cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream) {
        copy(to, from, len, stream, |_, _| true)
    }

    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, len: usize, stream: CUstream) {
        copy(to, from.addr() as u64, len, stream, |to, _| to)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, len: usize, stream: CUstream) {
        copy(to.addr() as u64, from, len, stream, |_, from| from)
    }

    fn cuEventCreate(event: *mut CUevent, _flags: c_uint) {
        let software = Software::running()?;
        let (name, context) = (software.new_handle(), software.current()?);
        software.handles.lock().unwrap().events.insert(name, (context, None));
        put(event, handle(name))
    }

    fn cuEventDestroy_v2(event: CUevent) {
        let removed = Software::running()?.handles.lock().unwrap().events.remove(&event.addr());
        removed.map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        let software = Software::running()?;
        let stream = software.stream(stream.addr())?;
        let mut handles = software.handles.lock().unwrap();
        let (context, mark) = handles.events.get_mut(&event.addr()).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        if context.handle != stream.context.handle {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        *mark = Some(stream.mark());
        Ok(())
    }

    fn cuEventQuery(event: CUevent) {
        let software = Software::running()?;
        let handles = software.handles.lock().unwrap();
        let (context, mark) = handles.events.get(&event.addr()).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        if Some(software.queries.fetch_add(1, Ordering::Relaxed) + 1) == software.settings.query_fails {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let passed = mark.as_ref().is_none_or(|mark| mark.passed());
        match context.broken() {
            Some(code) => Err(code),
            None if passed => Ok(()),
            None => Err(CUDA_ERROR_NOT_READY),
        }
    }

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        let software = Software::running()?;
        software.current()?;
        // SAFETY: text ends with a zero, and other images are none that anything here passes.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_bytes().to_vec();
        if !text.windows(7).any(|word| word == b".entry ") {
            return Err(CUDA_ERROR_INVALID_IMAGE);
        }
        let name = software.new_handle();
        software.handles.lock().unwrap().modules.insert(name, text);
        put(module, handle(name))
    }

    fn cuModuleUnload(module: CUmodule) {
        let removed = Software::running()?.handles.lock().unwrap().modules.remove(&module.addr());
        removed.map(drop).ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        let software = Software::running()?;
        let context = software.current()?;
        // SAFETY: the caller passes a name.
        let wanted = unsafe { CStr::from_ptr(name) };
        let entry = [b".entry ", wanted.to_bytes(), b"("].concat();
        let mut handles = software.handles.lock().unwrap();
        let text = handles.modules.get(&module.addr()).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        if wanted != c"gpunvme_scatter" || !text.windows(entry.len()).any(|words| words == entry) {
            return Err(CUDA_ERROR_NOT_FOUND);
        }
        let new = software.new_handle();
        handles.functions.insert(new, context.handle);
        put(function, handle(new))
    }

    fn cuLaunchKernel(
        function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, _shared_bytes: c_uint, stream: CUstream,
        parameters: *mut *mut c_void, _extra: *mut *mut c_void
    ) {
        let software = Software::running()?;
        let stream = software.stream(stream.addr())?;
        let loaded = software.handles.lock().unwrap().functions.get(&function.addr()).copied();
        if loaded != Some(stream.context.handle) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        if [grid_x, grid_y, grid_z, block_x, block_y, block_z].contains(&0) || block_x * block_y * block_z > 256 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the kernel has these two parameters, and the caller passes them.
        let (table, count) = unsafe { ((*parameters).cast::<u64>().read(), (*parameters.add(1)).cast::<u32>().read()) };
        let _turn = software.turn();
        stream.put(Work::Scatter(table, count));
        Ok(())
    }
}

/// Of a stream, its context, or for one of a green context the primary context and the green one.
/// Not in `cudarc`'s CUDA 12.4.
///
/// # Safety
/// As the driver API's reference says.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn cuStreamGetCtx_v2(stream: CUstream, context: *mut CUcontext, green: *mut CUgreenCtx) -> CUresult {
    let answer = || -> Answer {
        let found = Software::running()?.handles.lock().unwrap().streams.get(&stream.addr()).cloned();
        let found = found.ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        put(context, handle(found.context.handle))?;
        put(green, found.green.map_or(std::ptr::null_mut(), handle))
    };
    answer().err().unwrap_or(CUDA_SUCCESS)
}

fn word(software: &Software, address: u64) -> Result<HostSpan, Code> {
    let piece = software.addresses.lock().unwrap().pieces(address, 4)?.pop();
    piece.filter(|piece| piece.known && address.is_multiple_of(4)).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// `right` is told which side CUDA knows, and says whether that will do.
fn copy(to: CUdeviceptr, from: CUdeviceptr, len: usize, stream: CUstream, right: fn(bool, bool) -> bool) -> Answer {
    let software = Software::running()?;
    let stream = software.stream(stream.addr())?;
    if Some(software.copies.fetch_add(1, Ordering::Relaxed) + 1) == software.settings.copy_fails {
        return Err(CUDA_ERROR_ECC_UNCORRECTABLE);
    }
    let addresses = software.addresses.lock().unwrap();
    let on_gpu = |address| addresses.find(address).is_some_and(|(_, found)| !matches!(found.kind, Kind::Host(_)));
    let between_host = !on_gpu(to) && !on_gpu(from);
    let (to, from) = (addresses.pieces(to, len as u64)?, addresses.pieces(from, len as u64)?);
    drop(addresses);
    let [knows_to, knows_from] = [&to, &from].map(|pieces| pieces.iter().all(|piece| piece.known));
    if !right(knows_to, knows_from) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let turn = software.turn();
    match from.as_slice() {
        // What the driver of an H200 does with registered host memory (580.159): a process whose
        // file has become shorter gets a SIGBUS here.
        [span] if span.pinned.is_some() && len <= software.settings.copies_by_processor => {
            let mut bytes = vec![0u8; len];
            // SAFETY: it is the caller's mapping, and nothing in the process writes there.
            unsafe { std::ptr::copy_nonoverlapping(span.at, bytes.as_mut_ptr(), len) };
            stream.put(Work::CopyBytes(to, bytes));
        }
        _ => stream.put(Work::Copy(to, from)),
    }
    drop(turn);
    if !knows_to || !knows_from || between_host {
        stream.mark().wait();
    }
    Ok(())
}
