//! The software controller's IOMMU: the one way from an address in a command to memory of this
//! process. It guards what tests of the driver rest on: memory that is not mapped, or not for
//! writing, is never touched; every attempt is counted; and when [`Iommu::unmap`] returns, no
//! access to that memory is in flight.
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::spec::Cqe;

/// Granularity of mappings.
pub(super) const PAGE: u64 = 4096;
/// What can be mapped: 48 bits without the window of message-signalled interrupts, as on a PC.
const RANGES: [RangeInclusive<u64>; 2] = [0..=0xfedf_ffff, 0xfef0_0000..=(1 << 48) - 1];

/// An access of the controller that the IOMMU refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DmaFault {
    /// First byte.
    pub iova: u64,
    /// Length in bytes of the whole access.
    pub len: usize,
    /// Whether the controller wanted to write.
    pub write: bool,
}

/// A range of this process's memory that an access reaches.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostRange {
    pub(super) address: *mut u8,
    pub(super) len: usize,
}

#[derive(Default)]
pub(super) struct Iommu {
    mappings: RwLock<BTreeMap<u64, Mapping>>,
    faults: Mutex<Vec<DmaFault>>,
}

struct Mapping {
    /// A pointer, kept as a number: it belongs to no thread.
    address: usize,
    len: u64,
    writable: bool,
}

/// The mappings, held still for an access.
pub(super) struct Access<'a> {
    iommu: &'a Iommu,
    mappings: RwLockReadGuard<'a, BTreeMap<u64, Mapping>>,
}

impl Iommu {
    pub(super) fn ranges() -> Vec<RangeInclusive<u64>> {
        RANGES.to_vec()
    }

    /// `EINVAL` for what is misaligned or cannot be mapped anywhere, `EEXIST` where something is
    /// mapped (as VFIO's type1).
    pub(super) fn map(&self, address: *mut u8, len: usize, iova: u64, writable: bool) -> Result<(), Errno> {
        let len = len as u64;
        let aligned = [address as u64, len, iova].iter().all(|number| number % PAGE == 0);
        let last = iova.checked_add(len).and_then(|end| end.checked_sub(1)).ok_or(Errno::INVAL)?;
        if !aligned || len == 0 || !RANGES.iter().any(|range| range.contains(&iova) && range.contains(&last)) {
            return Err(Errno::INVAL);
        }
        let mut mappings = self.mappings.write();
        if mappings.range(..=last).next_back().is_some_and(|(start, mapping)| start + mapping.len > iova) {
            return Err(Errno::EXIST);
        }
        mappings.insert(iova, Mapping { address: address as usize, len, writable });
        Ok(())
    }

    /// `EINVAL` unless this is what was mapped at once (as TYPE1v2).
    pub(super) fn unmap(&self, iova: u64, len: usize) -> Result<(), Errno> {
        let mut mappings = self.mappings.write();
        match mappings.get(&iova) {
            Some(mapping) if mapping.len == len as u64 => {
                mappings.remove(&iova);
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// What was refused so far.
    pub(super) fn faults(&self) -> Vec<DmaFault> {
        self.faults.lock().clone()
    }

    pub(super) fn note(&self, fault: DmaFault) {
        self.faults.lock().push(fault);
    }

    /// How many mappings there are.
    pub(super) fn mapped(&self) -> usize {
        self.mappings.read().len()
    }

    pub(super) fn access(&self) -> Access<'_> {
        Access { iommu: self, mappings: self.mappings.read() }
    }

    /// Reads a structure.
    pub(super) fn read<T: FromBytes + IntoBytes>(&self, iova: u64) -> Result<T, DmaFault> {
        let mut value = T::new_zeroed();
        self.read_bytes(iova, value.as_mut_bytes())?;
        Ok(value)
    }

    pub(super) fn read_bytes(&self, iova: u64, mut out: &mut [u8]) -> Result<(), DmaFault> {
        let access = self.access();
        for range in access.resolve(iova, out.len(), false)? {
            let (part, rest) = out.split_at_mut(range.len);
            // SAFETY: the range is mapped memory for as long as `access` lives (`Transport::map`'s
            // contract), and nothing in Rust borrows it. A mixture of old and new bytes is what a
            // device would see too.
            unsafe { ptr::copy_nonoverlapping(range.address, part.as_mut_ptr(), range.len) };
            out = rest;
        }
        Ok(())
    }

    pub(super) fn write_bytes(&self, iova: u64, mut data: &[u8]) -> Result<(), DmaFault> {
        let access = self.access();
        for range in access.resolve(iova, data.len(), true)? {
            let (part, rest) = data.split_at(range.len);
            // SAFETY: as in `read_bytes`, and the range is mapped for writing.
            unsafe { ptr::copy_nonoverlapping(part.as_ptr(), range.address, range.len) };
            data = rest;
        }
        Ok(())
    }

    /// Writes a completion as the driver must be able to rely on: the dword with the phase tag
    /// last.
    pub(super) fn write_completion(&self, iova: u64, completion: &Cqe) -> Result<(), DmaFault> {
        let access = self.access();
        for (number, bytes) in completion.as_bytes().chunks_exact(4).enumerate() {
            let value = u32::from_ne_bytes(bytes.try_into().expect("four bytes"));
            access.atomic(iova + 4 * number as u64, true)?.store(value, Ordering::Release);
        }
        Ok(())
    }

    pub(super) fn load(&self, iova: u64) -> Result<u32, DmaFault> {
        Ok(u32::from_le(self.access().atomic(iova, false)?.load(Ordering::SeqCst)))
    }

    pub(super) fn store(&self, iova: u64, value: u32) -> Result<(), DmaFault> {
        self.access().atomic(iova, true)?.store(value.to_le(), Ordering::SeqCst);
        Ok(())
    }
}

impl Access<'_> {
    /// The memory behind a range of IOVAs. All of it is reachable, or none.
    pub(super) fn resolve(&self, iova: u64, len: usize, write: bool) -> Result<Vec<HostRange>, DmaFault> {
        let mut ranges = Vec::with_capacity(1);
        self.resolve_into(iova, len, write, &mut ranges)?;
        Ok(ranges)
    }

    /// [`Access::resolve`], behind the ranges that are there; what adjoins the last of them makes
    /// it longer.
    pub(super) fn resolve_into(&self, iova: u64, len: usize, write: bool, ranges: &mut Vec<HostRange>) -> Result<(), DmaFault> {
        let fault = || {
            let fault = DmaFault { iova, len, write };
            tracing::debug!(?fault, "DMA refused");
            self.iommu.note(fault);
            fault
        };
        let (mut at, mut left) = (iova, len as u64);
        while left > 0 {
            let (start, mapping) = self.mappings.range(..=at).next_back().ok_or_else(fault)?;
            let within = at - start;
            if within >= mapping.len || write && !mapping.writable {
                return Err(fault());
            }
            let part = left.min(mapping.len - within);
            let address = (mapping.address as *mut u8).wrapping_add(within as usize);
            match ranges.last_mut() {
                Some(last) if last.address.wrapping_add(last.len) == address => last.len += part as usize,
                _ => ranges.push(HostRange { address, len: part as usize }),
            }
            (at, left) = (at.checked_add(part).ok_or_else(fault)?, left - part);
        }
        Ok(())
    }

    fn atomic(&self, iova: u64, write: bool) -> Result<&AtomicU32, DmaFault> {
        let misaligned = DmaFault { iova, len: 4, write };
        if !iova.is_multiple_of(4) {
            self.iommu.note(misaligned);
            return Err(misaligned);
        }
        let range = self.resolve(iova, 4, write)?[0];
        // SAFETY: the four bytes are mapped memory for as long as `self` lives and aligned:
        // mappings are by pages. All who touch them do so atomically or by copies that may see a
        // mixture.
        Ok(unsafe { AtomicU32::from_ptr(range.address.cast()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Region;

    #[test]
    fn what_is_not_mapped_is_not_reached() {
        let iommu = Iommu::default();
        let region = Region::allocate(3 * 4096).expect("memory");
        let page = |number: usize| region.as_ptr().wrapping_add(number * 4096);
        assert_eq!(iommu.map(page(0), 4096, 0xfee0_0000, true), Err(Errno::INVAL), "interrupts are there");
        assert_eq!(iommu.map(page(0), 4096, 1 << 48, true), Err(Errno::INVAL), "behind the end");
        assert_eq!(iommu.map(page(0), 100, 0x1000, true), Err(Errno::INVAL));
        iommu.map(page(0), 4096, 0x1000, true).expect("mapped");
        iommu.map(page(2), 4096, 0x2000, false).expect("mapped, to be read only");
        assert_eq!(iommu.map(page(1), 8192, 0, true), Err(Errno::EXIST), "overlaps");
        assert_eq!(iommu.map(page(1), 4096, 0x1000, true), Err(Errno::EXIST));

        iommu.write_bytes(0x1ffc, &[1, 2, 3, 4]).expect("inside");
        region.write_at(8192, &[5, 6]).expect("inside");
        let mut bytes = [0; 6];
        iommu.read_bytes(0x1ffc, &mut bytes).expect("across both mappings");
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6]);
        assert_eq!(iommu.faults(), []);

        let refused = DmaFault { iova: 0x1ffe, len: 4, write: true };
        assert_eq!(iommu.write_bytes(0x1ffe, &[9; 4]), Err(refused), "the second mapping is for reading");
        iommu.read_bytes(0x1ffc, &mut bytes).expect("readable");
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6], "nothing of a refused write is done");
        assert_eq!(iommu.unmap(0x1000, 8192), Err(Errno::INVAL), "two mappings");
        iommu.unmap(0x1000, 4096).expect("as it was mapped");
        assert!(iommu.read_bytes(0x1000, &mut bytes).is_err() && iommu.load(0x2002).is_err());
        assert_eq!((iommu.faults().len(), iommu.mapped()), (3, 1));
    }
}
