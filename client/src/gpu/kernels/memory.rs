//! Memory that the threads of kernels share among themselves: of the GPU that runs them, or of this
//! process where they are compiled for the CPU.

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use gpunvme_cuda::{DeviceAllocation, Gpu};
use std::path::{Path, PathBuf};

/// The memory. That of a GPU is freed after its kernels.
#[derive(Debug)]
pub enum Own {
    /// Of a GPU.
    Gpu {
        /// The memory.
        memory: DeviceAllocation,
        /// The GPU.
        gpu: Gpu,
        /// For messages.
        path: PathBuf,
    },
    /// Of this process.
    Cpu {
        /// The memory.
        memory: Buffer,
    },
}

impl Own {
    /// Of a GPU, where there is one. What is in it is undefined.
    ///
    /// # Errors
    /// [`Error::Memory`] and [`Error::Cuda`].
    pub fn new(path: &Path, gpu: Option<Gpu>, len: usize) -> Result<Own> {
        let Some(gpu) = gpu else { return Ok(Own::Cpu { memory: Buffer::memfd(len)? }) };
        let failed = |error| Error::on_gpu(path, "get memory for kernels of", &gpu, error);
        Ok(Own::Gpu { memory: gpu.alloc(len).map_err(failed)?, gpu, path: path.to_owned() })
    }

    /// The address for kernels.
    pub fn address(&self) -> u64 {
        match self {
            Own::Gpu { memory, .. } => memory.address(),
            Own::Cpu { memory } => memory.as_ptr() as u64,
        }
    }

    /// Fills a part of it, which no kernel uses meanwhile.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Panics
    /// Where it is not as long.
    pub fn put(&mut self, path: &Path, at: usize, bytes: &[u8]) -> Result<()> {
        match self {
            Own::Gpu { memory, gpu, .. } => {
                assert!(at + bytes.len() <= memory.len(), "{} bytes at {at} of {}", bytes.len(), memory.len());
                let copy = || {
                    let stream = gpu.stream()?;
                    // SAFETY: it is that long, and the stream is waited for while both live.
                    unsafe { stream.copy_in(memory.address() + at as u64, bytes.as_ptr() as u64, bytes.len()) }?;
                    stream.synchronize()
                };
                copy().map_err(|error| Error::on_gpu(path, "fill memory for kernels of", gpu, error))
            }
            Own::Cpu { memory } => {
                memory[at..at + bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    /// A copy of a part of it. Words that kernels change meanwhile are what they were at some
    /// moment.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    ///
    /// # Panics
    /// Where it is not as long.
    pub fn get(&self, at: usize, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        match self {
            Own::Gpu { memory, gpu, path } => {
                assert!(at + len <= memory.len(), "{len} bytes at {at} of {}", memory.len());
                let mut copy = || {
                    let stream = gpu.stream()?;
                    // SAFETY: it is that long, and the stream is waited for while both live.
                    unsafe { stream.copy_out(bytes.as_mut_ptr() as u64, memory.address() + at as u64, len) }?;
                    stream.synchronize()
                };
                copy().map_err(|error| Error::on_gpu(path, "read memory of kernels of", gpu, error))?;
            }
            Own::Cpu { memory } => bytes.copy_from_slice(&memory[at..at + len]),
        }
        Ok(bytes)
    }
}
