//! The NVM Express standard as data: registers, queue entries, opcodes, features. Shared by the
//! driver and the software controller, so it holds no behaviour. Section numbers are those of the
//! NVM Express Base Specification 2.0 ("Base") and the NVM Command Set Specification 1.0 ("NVM").
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub(crate) mod identify;
pub(crate) mod log;
mod status;

pub use status::Status;

/// Registers: offsets in BAR0 (Base 3.1.3).
pub(crate) mod reg {
    /// Controller Capabilities, 8 bytes.
    pub(crate) const CAP: usize = 0x00;
    /// Version.
    pub(crate) const VS: usize = 0x08;
    /// Interrupt Mask Set (pin-based and MSI only).
    pub(crate) const INTMS: usize = 0x0c;
    /// Interrupt Mask Clear.
    pub(crate) const INTMC: usize = 0x10;
    /// Controller Configuration.
    pub(crate) const CC: usize = 0x14;
    /// Controller Status.
    pub(crate) const CSTS: usize = 0x1c;
    /// NVM Subsystem Reset.
    pub(crate) const NSSR: usize = 0x20;
    /// Admin Queue Attributes.
    pub(crate) const AQA: usize = 0x24;
    /// Admin Submission Queue Base Address, 8 bytes.
    pub(crate) const ASQ: usize = 0x28;
    /// Admin Completion Queue Base Address, 8 bytes.
    pub(crate) const ACQ: usize = 0x30;
    /// Controller Memory Buffer Location.
    pub(crate) const CMBLOC: usize = 0x38;
    /// Controller Memory Buffer Size.
    pub(crate) const CMBSZ: usize = 0x3c;
    /// The first doorbell (NVM Express over PCIe Transport 3.1.2).
    pub(crate) const DOORBELLS: usize = 0x1000;

    /// The doorbell of a submission queue's tail; `stride` is [`super::Cap::doorbell_stride`].
    pub(crate) fn sq_tail(queue: u16, stride: usize) -> usize {
        DOORBELLS + 2 * queue as usize * stride
    }

    /// The doorbell of a completion queue's head.
    pub(crate) fn cq_head(queue: u16, stride: usize) -> usize {
        DOORBELLS + (2 * queue as usize + 1) * stride
    }
}

/// Controller Capabilities (Base 3.1.3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cap(pub(crate) u64);

impl Cap {
    /// The most entries that an I/O queue can have (MQES + 1).
    pub(crate) fn max_queue_entries(self) -> u32 {
        (self.0 & 0xffff) as u32 + 1
    }

    /// How long CSTS.RDY may take to follow CC.EN, in milliseconds (TO).
    pub(crate) fn timeout_ms(self) -> u64 {
        (self.0 >> 24 & 0xff) * 500
    }

    /// Bytes from one doorbell to the next (DSTRD).
    pub(crate) fn doorbell_stride(self) -> usize {
        4 << (self.0 >> 32 & 0xf)
    }

    /// Whether there is an NVM subsystem reset (NSSRS).
    pub(crate) fn subsystem_reset(self) -> bool {
        self.0 >> 36 & 1 == 1
    }

    /// Whether the NVM command set is there (CSS bit 0).
    pub(crate) fn nvm_command_set(self) -> bool {
        self.0 >> 37 & 1 == 1
    }

    /// The smallest memory page in bytes (MPSMIN).
    pub(crate) fn min_page(self) -> u64 {
        4096 << (self.0 >> 48 & 0xf)
    }

    /// The largest memory page in bytes (MPSMAX).
    #[cfg(test)]
    pub(crate) fn max_page(self) -> u64 {
        4096 << (self.0 >> 52 & 0xf)
    }
}

/// Controller Configuration (Base 3.1.3.5).
pub(crate) mod cc {
    /// Enable.
    pub(crate) const EN: u32 = 1;
    /// Memory Page Size: 2^(12 + MPS) bytes.
    pub(crate) const MPS_SHIFT: u32 = 7;
    /// Shutdown Notification.
    pub(crate) const SHN_MASK: u32 = 3 << 14;
    /// A normal shutdown.
    pub(crate) const SHN_NORMAL: u32 = 1 << 14;
    /// I/O Submission Queue Entry Size of 2^6 bytes.
    pub(crate) const IOSQES_64: u32 = 6 << 16;
    /// I/O Completion Queue Entry Size of 2^4 bytes.
    pub(crate) const IOCQES_16: u32 = 4 << 20;
}

/// Controller Status (Base 3.1.3.6).
pub(crate) mod csts {
    /// Ready.
    pub(crate) const RDY: u32 = 1;
    /// Controller Fatal Status.
    pub(crate) const CFS: u32 = 1 << 1;
    /// Shutdown Status.
    pub(crate) const SHST_MASK: u32 = 3 << 2;
    /// Shutdown is being processed.
    pub(crate) const SHST_OCCURRING: u32 = 1 << 2;
    /// Shutdown is complete.
    pub(crate) const SHST_COMPLETE: u32 = 2 << 2;
    /// NVM Subsystem Reset Occurred. Written as 1 to clear.
    pub(crate) const NSSRO: u32 = 1 << 4;
}

/// "NVMe", which NSSR takes to reset the subsystem (Base 3.1.3.7).
pub(crate) const NSSR_MAGIC: u32 = 0x4e56_4d65;

/// Opcodes of admin commands (Base figure 138).
pub(crate) mod admin {
    pub(crate) const DELETE_SQ: u8 = 0x00;
    pub(crate) const CREATE_SQ: u8 = 0x01;
    pub(crate) const GET_LOG_PAGE: u8 = 0x02;
    pub(crate) const DELETE_CQ: u8 = 0x04;
    pub(crate) const CREATE_CQ: u8 = 0x05;
    pub(crate) const IDENTIFY: u8 = 0x06;
    pub(crate) const ABORT: u8 = 0x08;
    pub(crate) const SET_FEATURES: u8 = 0x09;
    pub(crate) const GET_FEATURES: u8 = 0x0a;
    pub(crate) const ASYNC_EVENT: u8 = 0x0c;
    pub(crate) const DOORBELL_BUFFER_CONFIG: u8 = 0x7c;
    pub(crate) const FORMAT_NVM: u8 = 0x80;
}

/// Opcodes of the NVM command set (NVM figure 18).
pub(crate) mod nvm {
    pub(crate) const FLUSH: u8 = 0x00;
    pub(crate) const WRITE: u8 = 0x01;
    pub(crate) const READ: u8 = 0x02;
    pub(crate) const WRITE_ZEROES: u8 = 0x08;
    pub(crate) const DATASET_MANAGEMENT: u8 = 0x09;

    /// Force Unit Access, in command dword 12 of READ, WRITE and WRITE_ZEROES.
    pub(crate) const FUA: u32 = 1 << 30;
    /// Deallocate, in command dword 11 of DATASET_MANAGEMENT.
    pub(crate) const DEALLOCATE: u32 = 1 << 2;
}

/// Feature identifiers (Base figure 317).
pub(crate) mod feature {
    pub(crate) const TEMPERATURE_THRESHOLD: u8 = 0x04;
    pub(crate) const VOLATILE_WRITE_CACHE: u8 = 0x06;
    pub(crate) const NUMBER_OF_QUEUES: u8 = 0x07;
    pub(crate) const ASYNC_EVENT_CONFIG: u8 = 0x0b;
}

/// What an Identify command asks for (CNS, Base figure 273).
pub(crate) mod cns {
    pub(crate) const NAMESPACE: u8 = 0x00;
    pub(crate) const CONTROLLER: u8 = 0x01;
    pub(crate) const ACTIVE_NAMESPACES: u8 = 0x02;
    pub(crate) const DESCRIPTORS: u8 = 0x03;
    /// Of a command set; the NVM command set is number 0.
    pub(crate) const COMMAND_SET_CONTROLLER: u8 = 0x06;
}

/// Log page identifiers (Base figure 202).
pub(crate) mod log_page {
    pub(crate) const ERROR: u8 = 0x01;
    pub(crate) const SMART: u8 = 0x02;
    pub(crate) const FIRMWARE_SLOT: u8 = 0x03;
    pub(crate) const CHANGED_NAMESPACES: u8 = 0x04;
}

/// Asynchronous events: bits of the Async Event Configuration feature (Base figure 326).
pub(crate) mod async_event {
    /// The critical warnings of the SMART log, one bit each.
    pub(crate) const SMART_WARNINGS: u32 = 0x1f;
    /// Namespace Attribute Notices.
    pub(crate) const NAMESPACE_CHANGED: u32 = 1 << 8;
}

/// "All namespaces".
pub(crate) const NSID_ALL: u32 = 0xffff_ffff;

/// A submission queue entry (Base 3.3.3.1).
#[derive(Debug, Default, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Sqe {
    pub(crate) opcode: u8,
    /// FUSE in bits 1:0, PSDT in bits 7:6.
    pub(crate) flags: u8,
    pub(crate) cid: U16,
    pub(crate) nsid: U32,
    pub(crate) cdw2: U32,
    pub(crate) cdw3: U32,
    pub(crate) mptr: U64,
    /// PRP1 and PRP2, or one SGL descriptor.
    pub(crate) dptr: [U64; 2],
    pub(crate) cdw10: U32,
    pub(crate) cdw11: U32,
    pub(crate) cdw12: U32,
    pub(crate) cdw13: U32,
    pub(crate) cdw14: U32,
    pub(crate) cdw15: U32,
}

/// PSDT: DPTR is an SGL descriptor; a metadata pointer, if any, is a plain address.
pub(crate) const PSDT_SGL: u8 = 1 << 6;

/// A completion queue entry (Base 3.3.3.2).
#[derive(Debug, Default, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Cqe {
    pub(crate) dw0: U32,
    pub(crate) dw1: U32,
    pub(crate) sq_head: U16,
    pub(crate) sq_id: U16,
    pub(crate) cid: U16,
    /// Phase tag in bit 0, the status in bits 15:1.
    pub(crate) status: U16,
}

/// An SGL descriptor (Base 4.1.2).
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SglDescriptor {
    pub(crate) address: U64,
    pub(crate) len: U32,
    pub(crate) reserved: [u8; 3],
    /// Type in bits 7:4, subtype (0: an address) in bits 3:0.
    pub(crate) kind: u8,
}

/// Values of [`SglDescriptor::kind`].
pub(crate) mod sgl {
    pub(crate) const DATA_BLOCK: u8 = 0x00;
    #[cfg(test)]
    pub(crate) const BIT_BUCKET: u8 = 0x10;
    pub(crate) const SEGMENT: u8 = 0x20;
    pub(crate) const LAST_SEGMENT: u8 = 0x30;
}

/// A range of a Dataset Management command (NVM 3.2.3).
#[derive(Debug, Default, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct DsmRange {
    pub(crate) attributes: U32,
    /// Logical blocks, counted from 1.
    pub(crate) blocks: U32,
    pub(crate) start: U64,
}

const _: () = assert!(size_of::<Sqe>() == 64 && size_of::<Cqe>() == 16);
const _: () = assert!(size_of::<SglDescriptor>() == 16 && size_of::<DsmRange>() == 16);
