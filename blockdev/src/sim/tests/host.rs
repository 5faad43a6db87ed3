//! The plainest driver there can be: it brings a controller up and sends commands one by one,
//! right or wrong.
use std::sync::Arc;
use std::time::{Duration, Instant};

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::super::SimController;
use crate::spec::Status;
use crate::spec::{Cqe, NSID_ALL, SglDescriptor, Sqe, admin, cc, csts, nvm, reg};
use crate::transport::Transport;
use crate::{OpenMode, Region};

/// Where things are mapped: queues, then [`DATA`] for the tests.
const ADMIN_SQ: u64 = 0x10_0000;
const ADMIN_CQ: u64 = 0x10_1000;
const IO_SQ: u64 = 0x10_2000;
const IO_CQ: u64 = 0x10_3000;
pub(super) const DATA: u64 = 0x20_0000;
pub(super) const DATA_LEN: usize = 1 << 20;
/// Entries of each queue.
pub(super) const ENTRIES: u32 = 8;

pub(super) struct Host {
    pub(super) sim: Arc<SimController>,
    queues: Arc<Region>,
    pub(super) data: Arc<Region>,
    sq_tail: [u32; 2],
    cq_head: [u32; 2],
    phase: [bool; 2],
    pub(super) sq_head: u16,
}

impl Host {
    /// A controller that is up, with one I/O queue pair.
    pub(super) fn new(options: &str) -> Self {
        let mut host = Self::off(options);
        host.enable();
        host.create_io_queues();
        host
    }

    /// A controller that is not enabled.
    pub(super) fn off(options: &str) -> Self {
        let device = format!("sim:test,memory=16M,inline=on{options}");
        let sim = SimController::new(&device, OpenMode::ReadWrite).expect("a controller");
        let queues = Region::allocate(4 * 4096).expect("memory");
        let data = Region::allocate(DATA_LEN).expect("memory");
        for (region, iova) in [(&queues, ADMIN_SQ), (&data, DATA)] {
            // SAFETY: the regions live as long as the controller does, in this struct, and are
            // only copied from and to.
            unsafe { sim.map(region.as_ptr(), region.len(), iova, true) }.expect("mapped");
        }
        Self { sim, queues, data, sq_tail: [0; 2], cq_head: [0; 2], phase: [true; 2], sq_head: 0 }
    }

    pub(super) fn configure(&mut self) {
        self.sim.write32(reg::AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        self.sim.write64(reg::ASQ, ADMIN_SQ);
        self.sim.write64(reg::ACQ, ADMIN_CQ);
    }

    pub(super) fn enable(&mut self) {
        self.configure();
        self.queues.zero_at(0, self.queues.len()).expect("inside");
        (self.sq_tail, self.cq_head, self.phase) = ([0; 2], [0; 2], [true; 2]);
        self.sim.write32(reg::CC, cc::EN | cc::IOSQES_64 | cc::IOCQES_16);
        assert_eq!(self.status(), csts::RDY);
    }

    pub(super) fn disable(&mut self) {
        self.sim.write32(reg::CC, 0);
    }

    pub(super) fn create_io_queues(&mut self) {
        assert_eq!(self.create(admin::CREATE_CQ, 1, ENTRIES, IO_CQ, 1), Status::SUCCESS);
        assert_eq!(self.create(admin::CREATE_SQ, 1, ENTRIES, IO_SQ, 1 << 16 | 1), Status::SUCCESS);
    }

    pub(super) fn create(&mut self, opcode: u8, id: u32, entries: u32, base: u64, cdw11: u32) -> Status {
        self.admin(Sqe {
            opcode,
            dptr: [U64::new(base), U64::new(0)],
            cdw10: U32::new(entries.wrapping_sub(1) << 16 | id),
            cdw11: U32::new(cdw11),
            ..Sqe::default()
        })
        .0
    }

    pub(super) fn status(&self) -> u32 {
        self.sim.read32(reg::CSTS)
    }

    /// Sends a command, and does not wait for it.
    pub(super) fn send(&mut self, queue: usize, command: Sqe) {
        let offset = queue * 2 * 4096 + self.sq_tail[queue] as usize * size_of::<Sqe>();
        self.queues.write_at(offset, command.as_bytes()).expect("inside");
        self.sq_tail[queue] = (self.sq_tail[queue] + 1) % ENTRIES;
        self.sim.write32(reg::sq_tail(queue as u16, 4), self.sq_tail[queue]);
    }

    /// The next completion, if it is there.
    pub(super) fn poll(&mut self, queue: usize) -> Option<Cqe> {
        let mut bytes = [0; size_of::<Cqe>()];
        self.queues.read_at(queue * 2 * 4096 + 4096 + self.cq_head[queue] as usize * bytes.len(), &mut bytes).expect("inside");
        let completion = Cqe::read_from_bytes(&bytes).expect("16 bytes");
        if (completion.status.get() & 1 == 1) != self.phase[queue] {
            return None;
        }
        self.cq_head[queue] = (self.cq_head[queue] + 1) % ENTRIES;
        self.phase[queue] ^= self.cq_head[queue] == 0;
        self.sq_head = completion.sq_head.get();
        Some(completion)
    }

    /// Tells the controller of the completions taken.
    pub(super) fn acknowledge(&mut self, queue: usize) {
        self.sim.write32(reg::cq_head(queue as u16, 4), self.cq_head[queue]);
    }

    pub(super) fn wait(&mut self, queue: usize) -> Cqe {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(completion) = self.poll(queue) {
                self.acknowledge(queue);
                return completion;
            }
            assert!(Instant::now() < deadline, "the controller does not answer");
            std::thread::yield_now();
        }
    }

    pub(super) fn run(&mut self, queue: usize, command: Sqe) -> (Status, u32) {
        let cid = command.cid;
        self.send(queue, command);
        let completion = self.wait(queue);
        assert_eq!((completion.cid, completion.sq_id.get()), (cid, queue as u16));
        (Status::from_completion(completion.status.get()), completion.dw0.get())
    }

    pub(super) fn admin(&mut self, command: Sqe) -> (Status, u32) {
        self.run(0, command)
    }

    /// An I/O command.
    pub(super) fn io(&mut self, command: Sqe) -> Status {
        self.run(1, command).0
    }

    pub(super) fn identify(&mut self, cns: u8, nsid: u32) -> (Status, Vec<u8>) {
        let command = Sqe { opcode: admin::IDENTIFY, cdw10: U32::new(cns.into()), nsid: U32::new(nsid), ..prps(DATA, 0) };
        let status = self.admin(command).0;
        (status, self.bytes(0, 4096))
    }

    pub(super) fn log(&mut self, page: u8, len: u32, retain: bool) -> Status {
        let cdw10 = (len / 4 - 1) << 16 | u32::from(retain) << 15 | u32::from(page);
        let command = Sqe { opcode: admin::GET_LOG_PAGE, nsid: U32::new(NSID_ALL), cdw10: U32::new(cdw10), ..prps(DATA, 0) };
        self.admin(command).0
    }

    pub(super) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.data.read_at(offset, &mut bytes).expect("inside");
        bytes
    }

    pub(super) fn fill(&self, offset: usize, byte: u8, len: usize) {
        self.data.write_at(offset, &vec![byte; len]).expect("inside");
    }

    /// Stores little-endian numbers in the data region.
    pub(super) fn store(&self, offset: usize, numbers: &[u64]) {
        self.data.write_at(offset, numbers.as_bytes()).expect("inside");
    }

    pub(super) fn store_sgl(&self, offset: usize, descriptors: &[SglDescriptor]) {
        self.data.write_at(offset, descriptors.as_bytes()).expect("inside");
    }
}

/// A command with this data pointer.
pub(super) fn prps(prp1: u64, prp2: u64) -> Sqe {
    Sqe { dptr: [U64::new(prp1), U64::new(prp2)], ..Sqe::default() }
}

/// READ or WRITE of so many blocks of namespace 1.
pub(super) fn transfer(opcode: u8, lba: u64, blocks: u32, pointer: Sqe) -> Sqe {
    Sqe {
        opcode,
        nsid: U32::new(1),
        cdw10: U32::new(lba as u32),
        cdw11: U32::new((lba >> 32) as u32),
        cdw12: U32::new(blocks - 1),
        ..pointer
    }
}

pub(super) fn flush() -> Sqe {
    Sqe { opcode: nvm::FLUSH, nsid: U32::new(1), ..Sqe::default() }
}

pub(super) fn with_cid(cid: u16, command: Sqe) -> Sqe {
    Sqe { cid: U16::new(cid), ..command }
}
