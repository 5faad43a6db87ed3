//! The memory of a staging pool: a memfd that the daemon, this process and a GPU all reach.
//!
//! It guards the order in which it ends: the daemon lets go of it first, then CUDA, then it is
//! unmapped. Behind the pool, out of the daemon's transfers, lie the tables of the scatter kernel
//! and the words that streams write and wait for.

use crate::buffer::{Memory, sealed};
use crate::error::{Error, Result};
use crate::sys::Mapping;
use gpunvme_abi::{Direction, RegisterFlags};
use gpunvme_cuda::{Gpu, HostRegistration};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};

/// Host memory that is registered with CUDA.
#[derive(Debug)]
pub struct Staging {
    /// Before the mapping, so that it ends first.
    _registration: HostRegistration,
    pub mapping: Mapping,
    memory: OwnedFd,
    /// Bytes of it that are the pool.
    pool: usize,
    /// Where the GPU finds it.
    pub device_address: u64,
}

impl Staging {
    /// A pool of `pool` bytes for a GPU, on its NUMA node, and `rest` bytes behind it. `path` is
    /// the mount's.
    pub fn new(path: &Path, gpu: &Gpu, pool: usize, rest: usize) -> Result<Staging> {
        let len = pool + rest;
        let make = || {
            let memory = rustix::fs::memfd_create("gpunvme-staging", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&memory, len as u64)?;
            rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            let mapping = Mapping::new(memory.as_fd(), len)?;
            Ok((memory, mapping))
        };
        let (memory, mapping) = make().map_err(|errno| Error::Memory { len, errno })?;
        if let Some(node) = gpu.numa_node() {
            mapping.prefer_node(node);
        }
        mapping.use_huge_pages();
        let failed = |error| Error::on_gpu(path, "register a staging pool with", gpu, error);
        let address = NonNull::new(mapping.as_ptr()).expect("a mapping has an address");
        // SAFETY: the mapping is dropped after the registration.
        let registration = unsafe { HostRegistration::new(gpu, address, len) }.map_err(failed)?;
        let device_address = registration.device_address(gpu).map_err(failed)?;
        Ok(Staging { _registration: registration, mapping, memory, pool, device_address })
    }

    /// Copies `len` bytes between `at` in it and host memory of the application.
    ///
    /// # Safety
    /// The bytes at `host` are the application's, and no other code uses them meanwhile.
    pub unsafe fn copy_on_host(&self, direction: Direction, at: usize, host: u64, len: usize) {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.pool), "{len} bytes at {at} of a pool of {}", self.pool);
        let host: *mut u8 = ptr::with_exposed_provenance_mut(host as usize);
        // SAFETY: the range lies in the mapping, and no other request uses it; the caller vouches
        // for the other one.
        unsafe {
            let slot = self.mapping.as_ptr().add(at);
            match direction {
                Direction::Read => ptr::copy_nonoverlapping(slot, host, len),
                Direction::Write => ptr::copy_nonoverlapping(host, slot, len),
            }
        }
    }
}

/// Where a copy between memory and a slot goes to, and where it comes from.
pub fn ends(direction: Direction, memory: u64, slot: u64) -> (u64, u64) {
    match direction {
        Direction::Read => (memory, slot),
        Direction::Write => (slot, memory),
    }
}

impl Memory for Staging {}

impl sealed::Memory for Staging {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    fn length(&self) -> usize {
        self.pool
    }

    fn flags(&self) -> RegisterFlags {
        RegisterFlags::STAGING
    }
}
