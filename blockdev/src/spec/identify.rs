//! Identify data structures (Base 5.17.2, NVM 4.1.5).
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Identify Controller, CNS 01h (Base figure 275). Fields that are not used here are in `reserved`
/// ones, named by their offset.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct IdentifyController {
    /// PCI vendor.
    pub(crate) vid: U16,
    /// PCI subsystem vendor.
    pub(crate) ssvid: U16,
    /// Serial number, ASCII padded with blanks.
    pub(crate) sn: [u8; 20],
    /// Model number.
    pub(crate) mn: [u8; 40],
    /// Firmware revision.
    pub(crate) fr: [u8; 8],
    pub(crate) rab: u8,
    pub(crate) ieee: [u8; 3],
    pub(crate) cmic: u8,
    /// The largest transfer is 2^MDTS smallest pages; 0: no limit.
    pub(crate) mdts: u8,
    pub(crate) cntlid: U16,
    /// Version, as in the register VS.
    pub(crate) ver: U32,
    pub(crate) rtd3r: U32,
    /// How long a shutdown may take, in microseconds; 0: not told.
    pub(crate) rtd3e: U32,
    /// Optional asynchronous events supported.
    pub(crate) oaes: U32,
    pub(crate) ctratt: U32,
    pub(crate) reserved_100: [u8; 11],
    pub(crate) cntrltype: u8,
    pub(crate) reserved_112: [u8; 144],
    /// Optional admin commands: [`oacs`].
    pub(crate) oacs: U16,
    /// Aborts that may be outstanding, counted from 0.
    pub(crate) acl: u8,
    /// Asynchronous Event Requests that may be outstanding, counted from 0.
    pub(crate) aerl: u8,
    pub(crate) frmw: u8,
    pub(crate) lpa: u8,
    /// Entries in the error log, counted from 0.
    pub(crate) elpe: u8,
    pub(crate) npss: u8,
    pub(crate) avscc: u8,
    pub(crate) apsta: u8,
    /// Warning composite temperature threshold in kelvins.
    pub(crate) wctemp: U16,
    /// Critical composite temperature threshold in kelvins.
    pub(crate) cctemp: U16,
    pub(crate) reserved_270: [u8; 10],
    /// Capacity in bytes.
    pub(crate) tnvmcap: U128,
    pub(crate) unvmcap: U128,
    pub(crate) reserved_312: [u8; 200],
    /// Submission queue entry size: required in bits 3:0, maximum in bits 7:4, as powers of two.
    pub(crate) sqes: u8,
    /// Completion queue entry size, likewise.
    pub(crate) cqes: u8,
    pub(crate) maxcmd: U16,
    /// The highest namespace number.
    pub(crate) nn: U32,
    /// Optional NVM commands: [`oncs`].
    pub(crate) oncs: U16,
    pub(crate) fuses: U16,
    /// Format attributes: bit 0 says that a format goes to all namespaces.
    pub(crate) fna: u8,
    /// Volatile write cache: bit 0 says that there is one.
    pub(crate) vwc: u8,
    pub(crate) awun: U16,
    pub(crate) awupf: U16,
    pub(crate) reserved_530: [u8; 6],
    /// SGL support: [`sgls`].
    pub(crate) sgls: U32,
    pub(crate) reserved_540: [u8; 228],
    /// The subsystem's NVMe Qualified Name, ended by a zero.
    pub(crate) subnqn: [u8; 256],
    pub(crate) reserved_1024: [u8; 3072],
}

/// Bits of [`IdentifyController::oacs`].
pub(crate) mod oacs {
    pub(crate) const FORMAT: u16 = 1 << 1;
    pub(crate) const DOORBELL_BUFFER: u16 = 1 << 8;
}

/// Bits of [`IdentifyController::oncs`].
pub(crate) mod oncs {
    pub(crate) const DATASET_MANAGEMENT: u16 = 1 << 2;
    pub(crate) const WRITE_ZEROES: u16 = 1 << 3;
}

/// [`IdentifyController::sgls`].
pub(crate) mod sgls {
    /// Whether there are SGLs, and of which alignment.
    pub(crate) const SUPPORT_MASK: u32 = 3;
    /// Of any alignment.
    pub(crate) const BYTES: u32 = 1;
    /// Addresses and lengths are multiples of four bytes.
    pub(crate) const DWORDS: u32 = 2;
}

/// Identify Namespace, CNS 00h (NVM figure 97).
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct IdentifyNamespace {
    /// Logical blocks on it.
    pub(crate) nsze: U64,
    /// Logical blocks that may be allocated.
    pub(crate) ncap: U64,
    /// Logical blocks allocated.
    pub(crate) nuse: U64,
    pub(crate) nsfeat: u8,
    /// LBA formats, counted from 0.
    pub(crate) nlbaf: u8,
    /// The LBA format in use in bits 3:0 and (above 16 formats) 6:5; bit 4: metadata is at the end
    /// of each block.
    pub(crate) flbas: u8,
    pub(crate) mc: u8,
    pub(crate) dpc: u8,
    /// Protection information in use in bits 2:0; 0: none.
    pub(crate) dps: u8,
    pub(crate) nmic: u8,
    pub(crate) rescap: u8,
    pub(crate) fpi: u8,
    /// Deallocated blocks: bits 2:0 say what a read of them finds (1: zeroes).
    pub(crate) dlfeat: u8,
    pub(crate) reserved_34: [u8; 14],
    pub(crate) nvmcap: U128,
    pub(crate) reserved_64: [u8; 35],
    /// Namespace attributes: bit 0 says that it is write protected.
    pub(crate) nsattr: u8,
    pub(crate) reserved_100: [u8; 4],
    pub(crate) nguid: [u8; 16],
    pub(crate) eui64: [u8; 8],
    pub(crate) lbaf: [LbaFormat; 64],
    pub(crate) reserved_384: [u8; 3712],
}

/// Identify Controller of the NVM command set, CNS 06h (NVM 4.1.5.4). A limit of 0 is none.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct IdentifyNvmController {
    pub(crate) vsl: u8,
    pub(crate) wzsl: u8,
    pub(crate) wusl: u8,
    pub(crate) dmrl: u8,
    /// The most logical blocks of a range of Dataset Management.
    pub(crate) dmrsl: U32,
    /// The most logical blocks of all ranges of a Dataset Management command.
    pub(crate) dmsl: U64,
    pub(crate) reserved_16: [u8; 4080],
}

/// An LBA format (NVM figure 98).
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct LbaFormat {
    /// Bytes of metadata a block.
    pub(crate) ms: U16,
    /// A block has 2^LBADS bytes; 0: the format is not available.
    pub(crate) lbads: u8,
    /// Relative performance, 0 is the best.
    pub(crate) rp: u8,
}

impl IdentifyNamespace {
    /// Number of the LBA format in use.
    pub(crate) fn format(&self) -> usize {
        let low = usize::from(self.flbas & 0xf);
        if self.nlbaf < 16 { low } else { low | usize::from(self.flbas >> 5 & 3) << 4 }
    }

    /// Bytes on it, if they can be counted.
    pub(crate) fn bytes(&self) -> Option<u64> {
        1u64.checked_shl(self.lbaf[self.format()].lbads.into())?.checked_mul(self.nsze.get())
    }
}

const _: () = assert!(size_of::<IdentifyController>() == 4096 && size_of::<IdentifyNamespace>() == 4096);
const _: () = assert!(size_of::<IdentifyNvmController>() == 4096);
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(IdentifyController, oacs) == 256 && offset_of!(IdentifyController, sqes) == 512);
    assert!(offset_of!(IdentifyController, sgls) == 536 && offset_of!(IdentifyController, subnqn) == 768);
    assert!(offset_of!(IdentifyController, cntrltype) == 111 && offset_of!(IdentifyController, tnvmcap) == 280);
    assert!(offset_of!(IdentifyNamespace, nsattr) == 99 && offset_of!(IdentifyNamespace, lbaf) == 128);
};
