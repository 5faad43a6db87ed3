//! Kernels of a module, launched as an application does.

use super::application::{Memory, Pinned, allocated, ok};
use cudarc::driver::sys::{self, CUfunction, CUmodule};
use gpunvme_cuda::Gpu;
use std::ffi::CString;
use std::ptr;

/// A module of a GPU.
pub struct Module {
    /// The GPU.
    pub gpu: Gpu,
    module: CUmodule,
}

impl Module {
    /// Of PTX.
    pub fn new(gpu: Gpu, ptx: &str) -> Module {
        let _entered = gpu.enter().unwrap();
        let (mut module, image) = (ptr::null_mut(), CString::new(ptx).unwrap());
        // SAFETY: the image is text with a zero at its end.
        unsafe { ok(sys::cuModuleLoadData(&mut module, image.as_ptr().cast())) };
        Module { gpu, module }
    }

    /// Begins a kernel in a stream, with the bytes of each of its parameters.
    pub fn launch_in(&self, stream: usize, name: &str, blocks: u32, threads: u32, parameters: &[&[u8]]) {
        // Whatever a parameter is, it is aligned enough.
        let mut copies: Vec<Vec<u128>> = parameters.iter().map(|bytes| vec![0; bytes.len().div_ceil(16)]).collect();
        for (copy, bytes) in copies.iter_mut().zip(parameters) {
            // SAFETY: the copy is as long.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), copy.as_mut_ptr().cast(), bytes.len()) };
        }
        let mut addresses: Vec<_> = copies.iter_mut().map(|copy| copy.as_mut_ptr().cast()).collect();
        let _entered = self.gpu.enter().unwrap();
        let (mut function, name): (CUfunction, _) = (ptr::null_mut(), CString::new(name).unwrap());
        // SAFETY: the parameters are those of the kernel, and are copied before the call returns.
        unsafe {
            ok(sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()));
            let stream = ptr::without_provenance_mut(stream);
            let none = ptr::null_mut();
            ok(sys::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, addresses.as_mut_ptr(), none));
        }
    }

    /// Begins a kernel in the default stream.
    pub fn launch(&self, name: &str, blocks: u32, threads: u32, parameters: &[&[u8]]) {
        self.launch_in(0, name, blocks, threads, parameters);
    }

    /// Waits for a stream.
    pub fn wait_for(&self, stream: usize) {
        let _entered = self.gpu.enter().unwrap();
        // SAFETY: it lives.
        unsafe { ok(sys::cuStreamSynchronize(ptr::without_provenance_mut(stream))) };
    }

    /// Waits for the default stream.
    pub fn wait(&self) {
        self.wait_for(0);
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _entered = self.gpu.enter().unwrap();
        // SAFETY: it was loaded in this context, and its kernels have ended.
        unsafe { ok(sys::cuModuleUnload(self.module)) };
    }
}

/// Memory of a GPU with these bytes.
pub fn holding(gpu: Gpu, bytes: &[u8]) -> Memory {
    let memory = allocated(gpu, bytes.len());
    put(gpu, &memory, bytes);
    memory
}

/// Fills the beginning of memory of a GPU.
pub fn put(gpu: Gpu, memory: &Memory, bytes: &[u8]) {
    let stream = gpu.stream().unwrap();
    let mut pinned = Pinned::new(gpu, bytes.len().next_multiple_of(4096));
    pinned.put(&stream, memory.address(), bytes);
}

/// The beginning of memory of a GPU.
pub fn get(gpu: Gpu, memory: &Memory, len: usize) -> Vec<u8> {
    let mut pinned = Pinned::new(gpu, len.next_multiple_of(4096));
    pinned.get(&gpu.stream().unwrap(), memory.address(), len).to_vec()
}
