//! What lies at an address of the application: memory that CUDA knows, or ordinary memory.
#![allow(unsafe_code)]

use crate::failure::{Code, Result};
use gpunvme_cuda::{Allocation, Cuda, Place};
use rustix::io::Errno;
use rustix::param::page_size;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// CUDA, if there is a driver with a GPU. It is loaded when it is first asked for.
pub fn cuda() -> Option<&'static Cuda> {
    Cuda::load().ok()
}

/// The allocation at an address; `None` for memory that CUDA does not know.
pub fn at(address: u64) -> Result<Option<Allocation>> {
    match cuda() {
        Some(cuda) => Ok(cuda.memory_at(address)?),
        None => Ok(None),
    }
}

/// Whether what was found at an address is memory of the host.
pub fn is_on_host(found: Option<Allocation>) -> bool {
    found.is_none_or(|found| found.place == Place::Host)
}

/// Where the processor finds a range, if what was found at its address is memory of the host.
///
/// # Errors
/// [`Code::PointerRange`] where it reaches beyond memory that has another address for the
/// processor: behind that is memory which the caller did not mean.
pub fn on_host(found: Option<Allocation>, address: u64, len: u64) -> Result<Option<u64>> {
    match found {
        Some(Allocation { place: Place::Host, host: Some(host), base, len: all, .. }) if host != base => {
            let within = address - base;
            if within.saturating_add(len) > all { Err(Code::PointerRange.into()) } else { Ok(Some(host + within)) }
        }
        found => Ok(is_on_host(found).then_some(address)),
    }
}

/// Checks that all of a range is memory of the application: of CUDA, or mapped. Memory of a GPU
/// goes on as such: behind it the driver has mappings of its own that are nothing to the
/// application.
///
/// # Errors
/// [`Code::PointerInvalid`] where its beginning is none, [`Code::PointerRange`] where it reaches
/// beyond.
pub fn check(address: u64, len: u64) -> Result<()> {
    let end = address.checked_add(len).ok_or(Code::PointerRange)?;
    let (mut at, mut in_ordinary) = (address, true);
    while at < end {
        let Some(found) = self::at(at)? else {
            let outside = if at == address { Code::PointerInvalid } else { Code::PointerRange };
            return if in_ordinary && is_mapped(at, end - at) { Ok(()) } else { Err(outside.into()) };
        };
        in_ordinary = found.place == Place::Host;
        if !(found.base..found.base + found.len).contains(&at) {
            return Err(Code::PointerInvalid.into());
        }
        at = found.base + found.len;
    }
    Ok(())
}

/// Whether CUDA knows all of a range.
///
/// # Errors
/// What CUDA says.
pub fn is_known(address: u64, len: u64) -> Result<bool> {
    let (mut at, end) = (address, address.saturating_add(len));
    while at < end {
        match self::at(at)? {
            Some(found) if (found.base..found.base + found.len).contains(&at) => at = found.base + found.len,
            _ => return Ok(false),
        }
    }
    Ok(true)
}

/// The index of the GPU that an address is of.
pub fn gpu_of(address: u64) -> Option<usize> {
    match at(address).ok()??.place {
        Place::Device(gpu) => Some(gpu.index() as usize),
        Place::Host | Place::Managed => None,
    }
}

/// Whether all pages of a range are mapped in this process.
fn is_mapped(address: u64, len: u64) -> bool {
    let page = page_size() as u64;
    let start = address / page * page;
    let pages = (address + len).div_ceil(page) - start / page;
    // One byte a page: long ranges are asked for in parts.
    let mut resident = [0u8; 4096];
    (0..pages).step_by(resident.len()).all(|first| {
        let count = (pages - first).min(resident.len() as u64);
        let from = (start + first * page) as *mut libc::c_void;
        // SAFETY: mincore(2) touches nothing at the range, and `resident` has a byte for each page.
        unsafe { libc::mincore(from, (count * page) as usize, resident.as_mut_ptr()) == 0 }
    })
}

/// Whether a number of the application's stands for the same open file as a descriptor of ours.
/// Where kcmp(2) is not allowed or not there, as in containers: whether for the same file.
pub fn is_same_open_file(number: i32, descriptor: BorrowedFd<'_>) -> bool {
    /// `KCMP_FILE` of linux/kcmp.h.
    const FILE: libc::c_int = 0;
    let process = std::process::id();
    // SAFETY: kcmp(2) touches no memory.
    match unsafe { libc::syscall(libc::SYS_kcmp, process, process, FILE, number, descriptor.as_raw_fd()) } {
        -1 => is_same_file(number, descriptor),
        order => order == 0,
    }
}

fn is_same_file(number: i32, descriptor: BorrowedFd<'_>) -> bool {
    // Not by a copy, whose end would be that of the process's record locks on the file.
    if number < 0 {
        return false;
    }
    // SAFETY: it is not -1, and fstat(2) refuses what is no descriptor.
    let number = unsafe { BorrowedFd::borrow_raw(number) };
    let (Ok(its), Ok(ours)) = (rustix::fs::fstat(number), rustix::fs::fstat(descriptor)) else { return false };
    (its.st_dev, its.st_ino) == (ours.st_dev, ours.st_ino)
}

/// Another descriptor of the open file behind a number of the application's.
///
/// # Errors
/// `EBADF` where it is no descriptor, `EMFILE` where this process may have no more of them.
pub fn duplicate(number: i32) -> std::result::Result<OwnedFd, Errno> {
    // SAFETY: fcntl(2) with F_DUPFD_CLOEXEC touches no memory, and refuses what is no descriptor.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::BADF));
    }
    // SAFETY: the kernel made it just now, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_with_another_address_for_the_processor_is_used_to_its_end_and_no_further() {
        let pinned = |host| Allocation {
            place: Place::Host,
            base: 0x1000,
            len: 0x100,
            host,
            buffer_id: 1,
            primary: true,
            by_kernel: true,
        };
        let apart = Some(pinned(Some(0x9000)));
        assert_eq!(on_host(apart, 0x1010, 0xf0).unwrap(), Some(0x9010));
        assert!(on_host(apart, 0x1010, 0xf1).is_err());
        // What follows memory that has one address is the application's own affair.
        assert_eq!(on_host(Some(pinned(Some(0x1000))), 0x1010, 0x1000).unwrap(), Some(0x1010));
        assert_eq!(on_host(None, 0x1010, 0x1000).unwrap(), Some(0x1010));
    }
}
