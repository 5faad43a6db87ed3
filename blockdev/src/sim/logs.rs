//! Log pages (Base 5.16.1): errors, health, firmware slots, changed namespaces.
use std::collections::VecDeque;

use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromZeros, IntoBytes};

use super::controller::Controller;
use super::status;
use crate::spec::Status;
use crate::spec::log::{ErrorEntry, SmartLog};
use crate::spec::log_page;

/// Entries of the error log.
pub(super) const ERRORS: usize = 64;
/// What the controller is called and says of itself.
pub(super) const FIRMWARE: &[u8; 8] = b"1.0     ";
/// Status code type of media errors.
const MEDIA: u8 = 2;
/// Bytes of a "data unit".
const UNIT: u64 = 512_000;

pub(super) struct Logs {
    errors: VecDeque<ErrorEntry>,
    error_count: u64,
    media_errors: u64,
    /// Commands and bytes: read, written.
    commands: [u64; 2],
    bytes: [u64; 2],
    pub(super) power_cycles: u64,
    pub(super) unsafe_shutdowns: u64,
    /// Kelvins.
    pub(super) temperature: u16,
    pub(super) threshold: u16,
    pub(super) changed: Vec<u32>,
}

impl Default for Logs {
    fn default() -> Self {
        Self {
            errors: VecDeque::new(),
            error_count: 0,
            media_errors: 0,
            commands: [0; 2],
            bytes: [0; 2],
            power_cycles: 1,
            unsafe_shutdowns: 0,
            temperature: 310,
            threshold: 343,
            changed: Vec::new(),
        }
    }
}

impl Logs {
    /// A command failed.
    pub(super) fn record(&mut self, sq: u16, cid: u16, status: Status) {
        self.error_count += 1;
        self.media_errors += u64::from(status.kind() == MEDIA);
        let mut entry = ErrorEntry::new_zeroed();
        entry.error_count = U64::new(self.error_count);
        (entry.sq_id, entry.cid) = (U16::new(sq), U16::new(cid));
        entry.status = U16::new(status.in_completion());
        self.errors.push_front(entry);
        self.errors.truncate(ERRORS);
    }

    /// Data was moved.
    pub(super) fn count(&mut self, write: bool, len: u64) {
        self.commands[usize::from(write)] += 1;
        self.bytes[usize::from(write)] += len;
    }

    fn health(&self, read_only: bool) -> SmartLog {
        let mut log = SmartLog::new_zeroed();
        log.critical_warning = u8::from(self.temperature >= self.threshold) << 1 | u8::from(read_only) << 3;
        log.temperature = U16::new(self.temperature);
        (log.available_spare, log.available_spare_threshold) = (100, 10);
        let units = |bytes: u64| U128::new(bytes.div_ceil(UNIT).into());
        (log.data_units_read, log.data_units_written) = (units(self.bytes[0]), units(self.bytes[1]));
        (log.host_reads, log.host_writes) = (U128::new(self.commands[0].into()), U128::new(self.commands[1].into()));
        log.power_cycles = U128::new(self.power_cycles.into());
        log.unsafe_shutdowns = U128::new(self.unsafe_shutdowns.into());
        log.media_errors = U128::new(self.media_errors.into());
        log.error_log_entries = U128::new(self.error_count.into());
        log
    }
}

impl Controller {
    /// The bytes of a log page; `retain` keeps its event masked (RAE).
    pub(super) fn log_page(&mut self, page: u8, retain: bool) -> Result<Vec<u8>, Status> {
        let bytes = match page {
            log_page::ERROR => {
                let mut bytes: Vec<u8> = self.logs.errors.iter().flat_map(|entry| entry.as_bytes().to_vec()).collect();
                bytes.resize(ERRORS * size_of::<ErrorEntry>(), 0);
                bytes
            }
            log_page::SMART => self.logs.health(self.read_only).as_bytes().to_vec(),
            log_page::FIRMWARE_SLOT => {
                let mut bytes = vec![0; 512];
                bytes[0] = 1; // slot 1 is active
                bytes[8..16].copy_from_slice(FIRMWARE);
                bytes
            }
            log_page::CHANGED_NAMESPACES => {
                let mut bytes = vec![0; 4096];
                for (entry, nsid) in bytes.chunks_exact_mut(4).zip(std::mem::take(&mut self.logs.changed)) {
                    entry.copy_from_slice(U32::new(nsid).as_bytes());
                }
                bytes
            }
            _ => return Err(status::INVALID_LOG_PAGE),
        };
        if !retain {
            self.unmask(page);
        }
        Ok(bytes)
    }
}
