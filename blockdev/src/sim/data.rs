//! The data of a command: PRP entries and lists (Base 4.1.1), SGL descriptors and segments (Base
//! 4.1.2). It guards that the result is exactly as many bytes as the command moves, or the status
//! that the specification has for the mistake, whatever the driver put there.
use zerocopy::FromBytes;

use super::iommu::{Access, HostRange, Iommu};
use super::options::Sgls;
use super::status;
use crate::spec::Status;
use crate::spec::{PSDT_SGL, SglDescriptor, Sqe, sgl};

/// Bytes of an entry of a PRP list.
const PRP: u64 = 8;
const DESCRIPTOR: u64 = size_of::<SglDescriptor>() as u64;
/// Segments that a chain may have: no command of ours needs more, and a ring of segments ends.
const SEGMENTS: usize = 4096;

/// A range of IOVAs.
pub(super) type IovaRange = (u64, usize);

/// The IOVAs of a command's `len` bytes, in order. `page` is the controller's memory page.
pub(super) fn locate(iommu: &Iommu, sqe: &Sqe, len: usize, page: u64, sgls: Sgls) -> Result<Vec<IovaRange>, Status> {
    match sqe.flags >> 6 {
        0 => prps(iommu, sqe.dptr[0].get(), sqe.dptr[1].get(), len, page),
        psdt if psdt == PSDT_SGL >> 6 && sgls != Sgls::None => Walk { iommu, sgls, left: len, found: Vec::new() }.run(sqe),
        _ => Err(status::INVALID_FIELD),
    }
}

/// The memory of what [`locate`] found.
pub(super) fn reach(access: &Access<'_>, ranges: &[IovaRange], write: bool) -> Result<Vec<HostRange>, Status> {
    let mut memory = Vec::with_capacity(1);
    for (iova, len) in ranges {
        access.resolve_into(*iova, *len, write, &mut memory).map_err(|_| status::DATA_TRANSFER_ERROR)?;
    }
    Ok(memory)
}

fn prps(iommu: &Iommu, prp1: u64, prp2: u64, len: usize, page: u64) -> Result<Vec<IovaRange>, Status> {
    if !prp1.is_multiple_of(4) {
        return Err(status::PRP_OFFSET_INVALID);
    }
    let first = len.min((page - prp1 % page) as usize);
    let mut ranges = vec![(prp1, first)];
    let mut left = len - first;
    if left == 0 {
        return Ok(ranges);
    }
    if left <= page as usize {
        if !prp2.is_multiple_of(page) {
            return Err(status::PRP_OFFSET_INVALID);
        }
        ranges.push((prp2, left));
        return Ok(ranges);
    }
    if !prp2.is_multiple_of(PRP) {
        return Err(status::PRP_OFFSET_INVALID);
    }
    let mut list = prp2;
    let mut entries = Vec::new();
    while left > 0 {
        // A list ends with its page; the last entry there leads to the next one where more is
        // needed.
        let room = ((page - list % page) / PRP) as usize;
        let needed = left.div_ceil(page as usize);
        entries.resize(room.min(needed) * PRP as usize, 0);
        iommu.read_bytes(list, &mut entries).map_err(|_| status::DATA_TRANSFER_ERROR)?;
        for (number, entry) in entries.chunks_exact(PRP as usize).enumerate() {
            let entry = u64::from_le_bytes(entry.try_into().expect("eight bytes"));
            if entry % page != 0 {
                return Err(status::PRP_OFFSET_INVALID);
            }
            if number + 1 == room && needed > room {
                list = entry;
                break;
            }
            ranges.push((entry, left.min(page as usize)));
            left -= left.min(page as usize);
        }
    }
    Ok(ranges)
}

/// A walk along an SGL.
struct Walk<'a> {
    iommu: &'a Iommu,
    sgls: Sgls,
    left: usize,
    found: Vec<IovaRange>,
}

impl Walk<'_> {
    fn run(mut self, sqe: &Sqe) -> Result<Vec<IovaRange>, Status> {
        let dptr = [sqe.dptr[0].get().to_le_bytes(), sqe.dptr[1].get().to_le_bytes()].concat();
        let mut next = SglDescriptor::read_from_bytes(&dptr).expect("16 bytes");
        if next.kind == sgl::DATA_BLOCK {
            self.block(&next)?;
            return self.finish();
        }
        for _ in 0..SEGMENTS {
            let last = match next.kind {
                sgl::SEGMENT => false,
                sgl::LAST_SEGMENT => true,
                _ => return Err(status::SGL_TYPE_INVALID),
            };
            let len = u64::from(next.len.get());
            if len == 0 || len % DESCRIPTOR != 0 {
                return Err(status::INVALID_SGL_SEGMENT);
            }
            let count = len / DESCRIPTOR;
            for number in 0..count {
                let at = next.address.get().wrapping_add(number * DESCRIPTOR);
                let descriptor: SglDescriptor = self.iommu.read(at).map_err(|_| status::DATA_TRANSFER_ERROR)?;
                match descriptor.kind {
                    sgl::DATA_BLOCK => self.block(&descriptor)?,
                    // Only at the end, and not of the last segment.
                    sgl::SEGMENT | sgl::LAST_SEGMENT if !last && number + 1 == count => next = descriptor,
                    sgl::SEGMENT | sgl::LAST_SEGMENT => return Err(status::INVALID_SGL_SEGMENT),
                    _ => return Err(status::SGL_TYPE_INVALID),
                }
                if !last && number + 1 == count && descriptor.kind == sgl::DATA_BLOCK {
                    return Err(status::INVALID_SGL_SEGMENT);
                }
            }
            if last {
                return self.finish();
            }
        }
        Err(status::INVALID_SGL_COUNT)
    }

    fn block(&mut self, descriptor: &SglDescriptor) -> Result<(), Status> {
        let (address, len) = (descriptor.address.get(), descriptor.len.get() as usize);
        if self.sgls == Sgls::Dword && (address % 4 != 0 || len % 4 != 0) {
            return Err(status::SGL_GRANULARITY_INVALID);
        }
        // More than the command moves is a mistake too: SGLS says so.
        self.left = self.left.checked_sub(len).ok_or(status::SGL_LENGTH_INVALID)?;
        if len > 0 {
            self.found.push((address, len));
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<IovaRange>, Status> {
        if self.left > 0 { Err(status::SGL_LENGTH_INVALID) } else { Ok(self.found) }
    }
}
