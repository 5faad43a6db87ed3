//! Turns a request into commands, one after the other, each as large as the controller takes it
//! (NVM 3.2). It guards that a command names memory that the controller reaches, its own lists
//! included.
use std::sync::Arc;

use zerocopy::little_endian::{U32, U64};

use super::bounce::Bounce;
use super::dma::{Dma, DmaMemory};
use super::queue_setup::QueueSetup;
use super::scatter::{self, Cursor, Cut, IovaRange, List};
use crate::spec::{DsmRange, PSDT_SGL, Sqe, nvm};
use crate::{Error, Op, Region, Request, Result};

/// The most blocks of a write-zeroes command: its length has 16 bits.
const MAX_ZERO_BLOCKS: u64 = 1 << 16;

/// A queue's lists and its bounce buffer.
pub(super) struct Encoder {
    setup: Arc<QueueSetup>,
    dma: Arc<Dma>,
    /// For each command in flight a list of PRPs, of SGL descriptors, or of ranges.
    lists: DmaMemory,
    pub(super) bounce: Bounce,
    ranges: Vec<IovaRange>,
    entries: Vec<U64>,
}

/// A command without its identifier.
pub(super) struct Encoded {
    pub(super) sqe: Sqe,
    /// Bytes of the request that it does.
    pub(super) len: u64,
    /// Its chunk of the bounce buffer.
    pub(super) bounce: Option<usize>,
}

impl Encoder {
    pub(super) fn new(setup: &Arc<QueueSetup>, dma: &Arc<Dma>) -> Result<Self> {
        Ok(Self {
            lists: dma.allocate(setup.geometry.queue_depth as usize * setup.limits.list_len())?,
            bounce: Bounce::new(dma, setup.limits.bounce)?,
            setup: setup.clone(),
            dma: dma.clone(),
            ranges: Vec::new(),
            entries: Vec::new(),
        })
    }

    /// Makes the command that goes on with a request at the cursor, with the list of this slot.
    /// `None` if it has to wait for a chunk of the bounce buffer.
    pub(super) fn next(&mut self, request: &Request, cursor: &Cursor, slot: u16) -> Result<Option<Encoded>> {
        let limits = &self.setup.limits;
        let block = limits.block;
        let start = (request.offset + cursor.done) / block;
        let left = request.len - cursor.done;
        let list = List { memory: &self.lists, offset: slot as usize * limits.list_len() };
        let mut sqe = Sqe { nsid: U32::new(self.setup.namespace), ..Sqe::default() };
        let address = |sqe: &mut Sqe, len: u64, flags: u32| {
            sqe.cdw10 = U32::new(start as u32);
            sqe.cdw11 = U32::new((start >> 32) as u32);
            sqe.cdw12 = U32::new((len / block - 1) as u32 | flags);
        };
        let (len, bounce) = match request.op {
            Op::Read | Op::Write { .. } => {
                let iova = |region: &Region| self.dma.address(region);
                let (len, bounce) = match scatter::cut(limits, &request.spans, cursor, iova, &mut self.ranges) {
                    Cut::Direct(len) => (len, None),
                    Cut::Bounce(len) => {
                        refuse_device_memory(&self.setup.name, request, cursor, len)?;
                        let Some(chunk) = self.bounce.take() else { return Ok(None) };
                        if matches!(request.op, Op::Write { .. })
                            && let Err(error) = self.bounce.fill(chunk, &request.spans, cursor, len as usize)
                        {
                            self.bounce.put(chunk);
                            return Err(error);
                        }
                        self.ranges.clear();
                        self.ranges.push(IovaRange { iova: self.bounce.iova(chunk), len });
                        (len, Some(chunk))
                    }
                };
                let data = scatter::describe(limits, &self.ranges, &list, &mut self.entries);
                sqe.dptr = data.dptr.map(U64::new);
                sqe.flags = if data.sgl { PSDT_SGL } else { 0 };
                sqe.opcode = if request.op == Op::Read { nvm::READ } else { nvm::WRITE };
                address(&mut sqe, len, if request.op == (Op::Write { fua: true }) { nvm::FUA } else { 0 });
                (len, bounce)
            }
            Op::Flush => {
                sqe.opcode = nvm::FLUSH;
                (0, None)
            }
            Op::WriteZeroes => {
                let len = left.min(limits.max_zeroes.min(MAX_ZERO_BLOCKS * block));
                sqe.opcode = nvm::WRITE_ZEROES;
                address(&mut sqe, len, 0);
                (len, None)
            }
            Op::Discard => {
                let len = left.min(self.setup.max_discard);
                let range = DsmRange { attributes: U32::new(0), blocks: U32::new((len / block) as u32), start: U64::new(start) };
                list.memory.write(list.offset, &range);
                sqe.opcode = nvm::DATASET_MANAGEMENT;
                sqe.dptr[0] = U64::new(list.memory.iova(list.offset));
                sqe.cdw11 = U32::new(nvm::DEALLOCATE);
                (len, None)
            }
        };
        Ok(Some(Encoded { sqe, len, bounce }))
    }
}

/// Other devices' memory is reached directly or not at all: its owner wants no copy in host
/// memory.
fn refuse_device_memory(device: &Arc<str>, request: &Request, cursor: &Cursor, len: u64) -> Result<()> {
    cursor.walk(&request.spans, len as usize, |span, _, _| {
        if !span.region.is_device_memory() {
            return Ok(());
        }
        let reason = "cannot reach this memory of another device directly: it has to be mapped, and to meet other memory in one \
                      request only between logical blocks";
        Err(Error::Unsupported { device: device.clone(), reason: reason.into() })
    })
}
