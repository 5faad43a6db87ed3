//! Memory that files are read into and written from.
//!
//! It guards the rule that makes plain slices of it sound: while the daemon may write to a buffer it is borrowed mutably, and while it is registered it
//! cannot be unmapped.

use crate::error::{Error, Result};
use crate::mount::Connection;
use crate::sys::Mapping;
use crate::{Reason, Route};
use rustix::fs::{MemfdFlags, SealFlags};
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Host memory that can be registered: a memfd, sealed against shrinking and mapped here. It dereferences to its bytes.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) memory: OwnedFd,
    pub(crate) mapping: Mapping,
}

impl Buffer {
    /// Zeroed memory of `len` bytes, page aligned. Pages come into being when they are touched.
    ///
    /// # Errors
    /// [`Error::Memory`], also for a `len` of 0.
    pub fn memfd(len: usize) -> Result<Buffer> {
        let make = || {
            let memory = rustix::fs::memfd_create("gpunvme", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&memory, len as u64)?;
            rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            let mapping = Mapping::new(std::os::fd::AsFd::as_fd(&memory), len)?;
            Ok(Buffer { memory, mapping })
        };
        make().map_err(|errno| Error::Memory { len, errno })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.mapping.bytes()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.mapping.bytes_mut()
    }
}

/// How a buffer reached the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisteredBy {
    /// The daemon fetched it from this process (`pidfd_getfd`).
    Ioctl,
    /// It was sent over the registration socket, because the daemon may not fetch it.
    Socket,
}

/// A buffer that a mount knows. It dereferences to its bytes. Dropping it unregisters it.
#[derive(Debug)]
pub struct Registered {
    pub(crate) buffer: Buffer,
    pub(crate) id: u64,
    pub(crate) connection: Arc<Connection>,
    pub(crate) route: Route,
    pub(crate) reason: Reason,
    pub(crate) by: RegisteredBy,
}

impl Registered {
    /// The route that transfers to and from it take.
    pub fn route(&self) -> Route {
        self.route
    }

    /// Why that is not `p2p`.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// How it reached the daemon.
    pub fn registered_by(&self) -> RegisteredBy {
        self.by
    }

    /// Its name in the ioctls.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.buffer.mapping
    }
}

impl Deref for Registered {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer
    }
}

impl DerefMut for Registered {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.connection.unregister(self.id);
    }
}
