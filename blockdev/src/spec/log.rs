//! Log pages (Base 5.16.1).
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// SMART / Health Information, log page 02h (Base figure 207).
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SmartLog {
    /// Bit 0: spare below its threshold; 1: temperature; 2: reliability degraded; 3: read-only; 4:
    /// backup of volatile memory failed; 5: persistent memory region.
    pub(crate) critical_warning: u8,
    /// Kelvins.
    pub(crate) temperature: U16,
    /// Percent.
    pub(crate) available_spare: u8,
    /// Percent.
    pub(crate) available_spare_threshold: u8,
    /// Percent of the expected life, up to 255.
    pub(crate) percentage_used: u8,
    pub(crate) reserved_6: [u8; 26],
    /// In units of 1000 times 512 bytes, rounded up.
    pub(crate) data_units_read: U128,
    /// In units of 1000 times 512 bytes, rounded up.
    pub(crate) data_units_written: U128,
    pub(crate) host_reads: U128,
    pub(crate) host_writes: U128,
    /// Minutes.
    pub(crate) controller_busy_time: U128,
    pub(crate) power_cycles: U128,
    pub(crate) power_on_hours: U128,
    pub(crate) unsafe_shutdowns: U128,
    pub(crate) media_errors: U128,
    pub(crate) error_log_entries: U128,
    /// Minutes.
    pub(crate) warning_temperature_time: U32,
    /// Minutes.
    pub(crate) critical_temperature_time: U32,
    /// Kelvins; 0: no such sensor.
    pub(crate) temperature_sensors: [U16; 8],
    pub(crate) reserved_216: [u8; 296],
}

/// An entry of the Error Information log, page 01h (Base figure 206). `error_count` is 0 in an
/// entry that is not in use.
#[derive(Debug, Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct ErrorEntry {
    pub(crate) error_count: U64,
    pub(crate) sq_id: U16,
    pub(crate) cid: U16,
    /// The status in bits 15:1, as in a completion.
    pub(crate) status: U16,
    pub(crate) parameter_error_location: U16,
    pub(crate) lba: U64,
    pub(crate) nsid: U32,
    pub(crate) vendor_specific: u8,
    pub(crate) reserved_29: [u8; 35],
}

const _: () = assert!(size_of::<SmartLog>() == 512 && size_of::<ErrorEntry>() == 64);
const _: () = assert!(std::mem::offset_of!(SmartLog, warning_temperature_time) == 192);
