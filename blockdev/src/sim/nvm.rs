//! The NVM command set: read, write, flush, write zeroes and deallocate, with every check that the
//! specification asks for before data moves (NVM 3.2).
use std::ops::RangeInclusive;

use rustix::io::Errno;
use zerocopy::FromBytes;

use super::controller::Controller;
use super::medium::Medium;
use super::{data, status};
use crate::spec::Status;
use crate::spec::{DsmRange, NSID_ALL, Sqe, nvm};

/// Bytes of a range of Dataset Management.
const DSM_RANGE: usize = size_of::<DsmRange>();

impl Controller {
    /// Does an I/O command.
    pub(super) fn io(&mut self, sqe: &Sqe) -> Result<(), Status> {
        if sqe.flags & 3 != 0 {
            return Err(status::INVALID_FIELD); // fused
        }
        if sqe.opcode == nvm::FLUSH && sqe.nsid.get() == NSID_ALL {
            return self.namespaces.iter_mut().try_for_each(Medium::flush).map_err(|_| status::WRITE_FAULT);
        }
        let namespace = self.namespace(sqe.nsid.get())?;
        let durable = sqe.cdw12.get() & nvm::FUA != 0 || !self.write_cache;
        if self.read_only && !matches!(sqe.opcode, nvm::READ | nvm::FLUSH) {
            return Err(status::WRITE_PROTECTED);
        }
        match sqe.opcode {
            nvm::FLUSH => self.namespaces[namespace].flush().map_err(|_| status::WRITE_FAULT),
            nvm::READ | nvm::WRITE => self.transfer(namespace, sqe, durable),
            nvm::WRITE_ZEROES => {
                let medium = &mut self.namespaces[namespace];
                let range = bytes(medium, sqe.start(), sqe.blocks())?;
                medium.zero(range, durable).map_err(|_| status::WRITE_FAULT)
            }
            nvm::DATASET_MANAGEMENT => self.dataset_management(namespace, sqe),
            _ => Err(status::INVALID_OPCODE),
        }
    }

    fn transfer(&mut self, namespace: usize, sqe: &Sqe, durable: bool) -> Result<(), Status> {
        let medium = &mut self.namespaces[namespace];
        let range = bytes(medium, sqe.start(), sqe.blocks())?;
        let len = range.end - range.start;
        let (mdts, smallest) = (u32::from(self.options.mdts), 12 + u32::from(self.options.mpsmin));
        if mdts > 0 && 1u64.checked_shl(smallest + mdts).is_some_and(|most| len > most) {
            return Err(status::INVALID_FIELD);
        }
        let page = self.page();
        let write = sqe.opcode == nvm::WRITE;
        let ranges = data::locate(&self.iommu, sqe, len as usize, page, self.options.sgls)?;
        let access = self.iommu.access();
        let memory = data::reach(&access, &ranges, !write)?;
        let medium = &mut self.namespaces[namespace];
        let (moved, media) = match write {
            true => (medium.write(range.start, &memory, durable), status::WRITE_FAULT),
            false => (medium.read(range.start, &memory), status::UNRECOVERED_READ),
        };
        drop(access);
        self.logs.count(write, len);
        moved.map_err(|errno| if errno == Errno::FAULT { status::DATA_TRANSFER_ERROR } else { media })
    }

    fn dataset_management(&mut self, namespace: usize, sqe: &Sqe) -> Result<(), Status> {
        let count = (sqe.cdw10.get() & 0xff) as usize + 1;
        let mut list = vec![0; count * DSM_RANGE];
        let ranges = data::locate(&self.iommu, sqe, list.len(), self.page(), self.options.sgls)?;
        let mut rest = &mut list[..];
        for (iova, len) in ranges {
            let (part, behind) = rest.split_at_mut(len);
            self.iommu.read_bytes(iova, part).map_err(|_| status::DATA_TRANSFER_ERROR)?;
            rest = behind;
        }
        if sqe.cdw11.get() & nvm::DEALLOCATE == 0 {
            return Ok(()); // the other attributes are hints
        }
        let through = !self.write_cache;
        let medium = &mut self.namespaces[namespace];
        let most = Some(self.options.dmrsl).filter(|most| *most > 0);
        let parse = |range: &[u8]| {
            let range = DsmRange::read_from_bytes(range).expect("16 bytes");
            if most.is_some_and(|most| range.blocks.get() > most) {
                return Err(status::SIZE_LIMIT);
            }
            bytes(medium, range.start.get(), range.blocks.get().into())
        };
        let ranges = list.chunks_exact(DSM_RANGE).map(parse).collect::<Result<Vec<_>, _>>()?;
        ranges.into_iter().try_for_each(|range| medium.zero(range, through)).map_err(|_| status::WRITE_FAULT)
    }

    /// The index of a namespace that commands may name.
    pub(super) fn namespace(&self, nsid: u32) -> Result<usize, Status> {
        let index = nsid.checked_sub(1).map(|index| index as usize);
        index.filter(|index| *index < self.namespaces.len()).ok_or(status::INVALID_NAMESPACE)
    }

    /// The logical blocks that an I/O command is about, where it names them.
    pub(super) fn blocks(&self, sqe: &Sqe) -> Option<RangeInclusive<u64>> {
        let named = matches!(sqe.opcode, nvm::READ | nvm::WRITE | nvm::WRITE_ZEROES);
        named.then(|| sqe.start()..=sqe.start().saturating_add(sqe.blocks() - 1))
    }

    /// Bytes of memory that an I/O command names.
    pub(super) fn data_len(&self, sqe: &Sqe) -> usize {
        match (sqe.opcode, self.namespace(sqe.nsid.get())) {
            (nvm::READ | nvm::WRITE, Ok(namespace)) => (sqe.blocks() * self.namespaces[namespace].block()) as usize,
            (nvm::DATASET_MANAGEMENT, _) => ((sqe.cdw10.get() & 0xff) as usize + 1) * DSM_RANGE,
            _ => 0,
        }
    }
}

/// The bytes of a range of logical blocks.
fn bytes(medium: &Medium, start: u64, blocks: u64) -> Result<std::ops::Range<u64>, Status> {
    let size = medium.len() / medium.block();
    match start.checked_add(blocks) {
        Some(end) if end <= size => Ok(start * medium.block()..end * medium.block()),
        _ => Err(status::LBA_OUT_OF_RANGE),
    }
}

impl Sqe {
    /// SLBA.
    fn start(&self) -> u64 {
        u64::from(self.cdw11.get()) << 32 | u64::from(self.cdw10.get())
    }

    /// NLB, counted from 1.
    fn blocks(&self) -> u64 {
        u64::from(self.cdw12.get() & 0xffff) + 1
    }
}
