//! Maintenance of a controller, as `gpunvme nvme DEVICE ...` does it: identity, logs, registers,
//! resets, formatting. The controller has no other user meanwhile, and no volume on it is mounted.
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use super::Running;
use super::controller::Core;
use super::options::Options;
use crate::spec::Status;
use crate::spec::identify::{IdentifyController, IdentifyNamespace, oacs};
use crate::spec::log::{self, SmartLog};
use crate::spec::{NSSR_MAGIC, Sqe, admin, cns, csts, log_page, reg};
use crate::transport::Transport;
use crate::{Error, Result};

/// A format may take this long.
const FORMAT_TIMEOUT: Duration = Duration::from_secs(3600);
/// A subsystem reset may take this long.
const SUBSYSTEM_RESET_TIMEOUT: Duration = Duration::from_secs(10);

/// An NVMe controller, held for maintenance. It is brought up when a command needs it, and shut
/// down when dropped. Locks: `running`, while it is brought up or reset.
pub struct Controller {
    core: Arc<Core>,
    running: Mutex<Option<Arc<Running>>>,
}

/// Identity of a controller (Base 5.17.2.1, Identify Controller).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerInfo {
    /// Model.
    pub model: String,
    /// Serial number.
    pub serial: String,
    /// Firmware revision.
    pub firmware: String,
    /// NVMe Qualified Name of the subsystem.
    pub subsystem: String,
    /// PCI vendor.
    pub vendor: u16,
    /// The standard that it follows: major, minor, tertiary.
    pub version: (u16, u8, u8),
    /// Bytes on it in all; 0 where it does not say.
    pub capacity: u128,
    /// The most bytes of one command; `None`: any number.
    pub max_transfer: Option<u64>,
    /// The highest namespace number.
    pub max_namespaces: u32,
    /// Whether there is a volatile write cache.
    pub volatile_cache: bool,
    /// Whether it takes SGLs.
    pub sgl: bool,
    /// Whether it has shadow doorbells.
    pub shadow_doorbells: bool,
    /// Whether it can be formatted.
    pub format: bool,
    /// Whether a format goes to all of its namespaces at once.
    pub format_all: bool,
    /// Whether it has a subsystem reset.
    pub subsystem_reset: bool,
}

/// An active namespace (NVM 4.1.5.1, Identify Namespace).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Its number.
    pub id: u32,
    /// Bytes on it; 0 if what it says cannot be.
    pub len: u64,
    /// Bytes of a logical block.
    pub logical_block: u32,
    /// Bytes of metadata a block.
    pub metadata: u16,
    /// Whether it is write protected.
    pub read_only: bool,
    /// What it can be formatted to.
    pub formats: Vec<BlockFormat>,
}

/// An LBA format that a namespace supports (NVM 4.1.5.1, LBA Format).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockFormat {
    /// Its number.
    pub index: u8,
    /// Bytes of a logical block.
    pub logical_block: u32,
    /// Bytes of metadata a block.
    pub metadata: u16,
    /// 0 is the fastest, 3 the slowest.
    pub performance: u8,
}

/// SMART / Health Information (Base 5.16.1.3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Smart {
    /// Bit 0: spare below its threshold; 1: temperature; 2: reliability degraded; 3: read-only; 4:
    /// backup of volatile memory failed; 5: persistent memory region.
    pub critical_warning: u8,
    /// Kelvins.
    pub temperature: u16,
    /// Percent.
    pub available_spare: u8,
    /// Percent.
    pub available_spare_threshold: u8,
    /// Percent of the expected life.
    pub percentage_used: u8,
    /// In units of 512,000 bytes.
    pub data_units_read: u128,
    /// In units of 512,000 bytes.
    pub data_units_written: u128,
    /// Read commands.
    pub host_reads: u128,
    /// Write commands.
    pub host_writes: u128,
    /// Minutes.
    pub busy_time: u128,
    /// Power cycles.
    pub power_cycles: u128,
    /// Hours.
    pub power_on_hours: u128,
    /// Losses of power without a shutdown.
    pub unsafe_shutdowns: u128,
    /// Errors of the media or of data integrity.
    pub media_errors: u128,
    /// Entries ever made in the error log.
    pub error_log_entries: u128,
}

/// An entry of the Error Information log (Base 5.16.1.2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorEntry {
    /// Counts errors; the entry with the highest is the latest.
    pub count: u64,
    /// Submission queue of the command.
    pub queue: u16,
    /// Command identifier.
    pub command: u16,
    /// What the command ended with.
    pub status: Status,
    /// First logical block concerned.
    pub lba: u64,
    /// Namespace concerned.
    pub namespace: u32,
}

/// A register of the controller (Base 3.1.3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Register {
    /// Offset in BAR0.
    pub offset: u32,
    /// Its name in the specification.
    pub name: &'static str,
    /// Bytes: 4 or 8.
    pub size: u8,
    /// What it held.
    pub value: u64,
}

/// How a format erases (Base 5.14, Secure Erase Settings).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Erase {
    /// No secure erase: the data may be found when the device is taken apart.
    No,
    /// User data erase.
    UserData,
    /// Cryptographic erase: the key is thrown away.
    Cryptographic,
}

impl Controller {
    /// Holds the controller that the transport reaches, without touching it.
    pub(crate) fn new(name: Arc<str>, transport: Arc<dyn Transport>, options: Options) -> Result<Self> {
        Ok(Self { core: Arc::new(Core::new(name, transport, options)?), running: Mutex::default() })
    }

    /// The DEVICE string.
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// Asks the controller for its identity.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Controller`], [`Error::Admin`] and [`Error::System`] when the
    /// controller cannot be brought up, or fails the command.
    pub fn identify(&self) -> Result<ControllerInfo> {
        let core = self.up()?;
        let identity: Box<IdentifyController> = Box::new(core.admin.identify(cns::CONTROLLER, 0, core.setup_timeout())?);
        let version = identity.ver.get();
        Ok(ControllerInfo {
            model: text(&identity.mn),
            serial: text(&identity.sn),
            firmware: text(&identity.fr),
            subsystem: text(&identity.subnqn),
            vendor: identity.vid.get(),
            version: ((version >> 16) as u16, (version >> 8) as u8, version as u8),
            capacity: identity.tnvmcap.get(),
            max_transfer: core.max_transfer(),
            max_namespaces: identity.nn.get(),
            volatile_cache: identity.vwc & 1 != 0,
            sgl: core.has_sgl(),
            shadow_doorbells: identity.oacs.get() & oacs::DOORBELL_BUFFER != 0,
            format: identity.oacs.get() & oacs::FORMAT != 0,
            format_all: identity.fna & 1 != 0,
            subsystem_reset: core.cap.subsystem_reset(),
        })
    }

    /// The active namespaces, asked for anew: what was attached, detached or resized meanwhile
    /// shows.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Controller`], [`Error::Admin`] and [`Error::System`] when the
    /// controller cannot be brought up, or fails the command.
    pub fn namespaces(&self) -> Result<Vec<NamespaceInfo>> {
        let core = self.up()?;
        let timeout = core.setup_timeout();
        let describe = |id| {
            let identity: Box<IdentifyNamespace> = Box::new(core.admin.identify(cns::NAMESPACE, id, timeout)?);
            let current = identity.lbaf[identity.format()];
            let formats = identity.lbaf.iter().take(usize::from(identity.nlbaf) + 1).enumerate();
            let formats = formats.filter(|(_, format)| (9..32).contains(&format.lbads)).map(|(index, format)| BlockFormat {
                index: index as u8,
                logical_block: 1 << format.lbads,
                metadata: format.ms.get(),
                performance: format.rp & 3,
            });
            Ok(NamespaceInfo {
                id,
                len: identity.bytes().unwrap_or(0),
                logical_block: 1u32.checked_shl(current.lbads.into()).unwrap_or(0),
                metadata: current.ms.get(),
                read_only: identity.nsattr & 1 != 0,
                formats: formats.collect(),
            })
        };
        core.admin.namespaces(timeout)?.into_iter().map(describe).collect()
    }

    /// The SMART log.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Controller`], [`Error::Admin`] and [`Error::System`] when the
    /// controller cannot be brought up, or fails the command.
    pub fn smart(&self) -> Result<Smart> {
        let core = self.up()?;
        let log = core.admin.log_page(log_page::SMART, size_of::<SmartLog>(), core.setup_timeout())?;
        let log = SmartLog::read_from_bytes(&log).expect("it was asked for in this length");
        Ok(Smart {
            critical_warning: log.critical_warning,
            temperature: log.temperature.get(),
            available_spare: log.available_spare,
            available_spare_threshold: log.available_spare_threshold,
            percentage_used: log.percentage_used,
            data_units_read: log.data_units_read.get(),
            data_units_written: log.data_units_written.get(),
            host_reads: log.host_reads.get(),
            host_writes: log.host_writes.get(),
            busy_time: log.controller_busy_time.get(),
            power_cycles: log.power_cycles.get(),
            power_on_hours: log.power_on_hours.get(),
            unsafe_shutdowns: log.unsafe_shutdowns.get(),
            media_errors: log.media_errors.get(),
            error_log_entries: log.error_log_entries.get(),
        })
    }

    /// The error log, the latest entry first: at most 64.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Controller`], [`Error::Admin`] and [`Error::System`] when the
    /// controller cannot be brought up, or fails the command.
    pub fn errors(&self) -> Result<Vec<ErrorEntry>> {
        const ENTRY: usize = size_of::<log::ErrorEntry>();
        let core = self.up()?;
        let entries = (usize::from(core.identity().elpe) + 1).min(64);
        let log = core.admin.log_page(log_page::ERROR, entries * ENTRY, core.setup_timeout())?;
        let entries = log.chunks_exact(ENTRY).map(|entry| log::ErrorEntry::read_from_bytes(entry).expect("of this length"));
        let entries = entries.filter(|entry| entry.error_count.get() != 0).map(|entry| ErrorEntry {
            count: entry.error_count.get(),
            queue: entry.sq_id.get(),
            command: entry.cid.get(),
            status: Status::from_completion(entry.status.get()),
            lba: entry.lba.get(),
            namespace: entry.nsid.get(),
        });
        Ok(entries.collect())
    }

    /// The contents of the registers, in the order of their offsets. The controller is not brought
    /// up for it.
    ///
    /// # Errors
    /// [`Error::Gone`] when the registers read as all ones.
    pub fn registers(&self) -> Result<Vec<Register>> {
        self.core.status()?;
        let transport = &self.core.transport;
        let wide = [(reg::CAP, "CAP"), (reg::ASQ, "ASQ"), (reg::ACQ, "ACQ")];
        let narrow = [
            (reg::VS, "VS"),
            (reg::INTMS, "INTMS"),
            (reg::INTMC, "INTMC"),
            (reg::CC, "CC"),
            (reg::CSTS, "CSTS"),
            (reg::NSSR, "NSSR"),
            (reg::AQA, "AQA"),
            (reg::CMBLOC, "CMBLOC"),
            (reg::CMBSZ, "CMBSZ"),
        ];
        let register = |offset: usize, name, size, value| Register { offset: offset as u32, name, size, value };
        let wide = wide.map(|(offset, name)| register(offset, name, 8, transport.read64(offset)));
        let narrow = narrow.map(|(offset, name)| register(offset, name, 4, transport.read32(offset).into()));
        let mut all: Vec<Register> = wide.into_iter().chain(narrow).collect();
        all.sort_by_key(|register| register.offset);
        Ok(all)
    }

    /// Resets the controller (CC.EN, Base 3.7.2), or its PCI function where it does not answer to
    /// that. No data is lost.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Controller`], [`Error::Admin`] and [`Error::System`] when the
    /// controller cannot be brought up, or fails the command.
    pub fn reset(&self) -> Result<()> {
        let mut running = self.running.lock();
        if let Some(running) = &*running {
            return running.core.recover("it was asked for");
        }
        let started = Running::start(self.core.clone()).or_else(|error| {
            tracing::warn!(%error, "the controller reset failed; trying a function-level reset");
            self.core.transport.reset()?;
            Running::start(self.core.clone())
        });
        *running = Some(started?);
        Ok(())
    }

    /// Resets the whole NVM subsystem (NSSR, Base 3.7.1): all of its controllers, as if power had
    /// been cut, so that writes which were not flushed are lost. The device has to be opened anew
    /// afterwards.
    ///
    /// # Errors [`Error::Unsupported`] without CAP.NSSRS; [`Error::Controller`] when the
    /// controller does not come back within 10 s; [`Error::Gone`].
    pub fn subsystem_reset(self) -> Result<()> {
        let core = &self.core;
        if !core.cap.subsystem_reset() {
            return Err(self.unsupported("its controller has no subsystem reset"));
        }
        core.transport.write32(reg::NSSR, NSSR_MAGIC);
        // Registers may read as all ones while the link is down.
        let started = Instant::now();
        while core.status().map_or(true, |status| status & csts::RDY != 0) {
            if started.elapsed() > SUBSYSTEM_RESET_TIMEOUT {
                let what = "does not come back after a subsystem reset";
                return Err(Error::Controller { device: core.name.clone(), what });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        core.take_subsystem_reset().map(drop)
    }

    /// Formats a namespace to logical blocks of `logical_block` bytes, without metadata (Base
    /// 5.14, Format NVM). All of its data is lost; where [`ControllerInfo::format_all`] is set,
    /// that of all namespaces. It may take minutes, and is given up after an hour.
    ///
    /// # Errors
    /// [`Error::Unsupported`] without that command, namespace or block size; otherwise
    /// [`Error::Gone`], [`Error::Controller`] and [`Error::Admin`].
    pub fn format(&self, namespace: u32, logical_block: u32, erase: Erase) -> Result<()> {
        let core = self.up()?;
        if core.identity().oacs.get() & oacs::FORMAT == 0 {
            return Err(self.unsupported("its controller has no Format NVM command"));
        }
        let Some(info) = self.namespaces()?.into_iter().find(|info| info.id == namespace) else {
            return Err(self.unsupported(&format!("has no namespace {namespace}")));
        };
        let fitting = info.formats.iter().filter(|format| format.logical_block == logical_block && format.metadata == 0);
        let Some(format) = fitting.min_by_key(|format| format.performance) else {
            return Err(self.unsupported(&format!("cannot be formatted to blocks of {logical_block} bytes without metadata")));
        };
        let erase = match erase {
            Erase::No => 0,
            Erase::UserData => 1,
            Erase::Cryptographic => 2,
        };
        let index = u32::from(format.index);
        let command = Sqe {
            opcode: admin::FORMAT_NVM,
            nsid: U32::new(namespace),
            cdw10: U32::new(index & 0xf | (index >> 4) << 12 | erase << 9),
            ..Sqe::default()
        };
        core.admin.run(command, "Format NVM", FORMAT_TIMEOUT).map(drop)
    }

    /// The controller, brought up.
    fn up(&self) -> Result<&Core> {
        let mut running = self.running.lock();
        if running.is_none() {
            *running = Some(Running::start(self.core.clone())?);
        }
        Ok(&self.core)
    }

    fn unsupported(&self, reason: &str) -> Error {
        Error::Unsupported { device: self.core.name.clone(), reason: reason.into() }
    }
}

/// ASCII that is padded with blanks or ended by a zero.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpenMode;
    use crate::device_name::DeviceName;
    use crate::sim::{Effect, Fault, On, SimController};

    #[test]
    fn a_controller_that_comes_up_at_the_second_try_is_looked_after() {
        let sim = SimController::new("sim:test,memory=1M", OpenMode::ReadWrite).expect("a controller");
        let mut name = DeviceName::parse("sim:test,timeout=500ms").expect("a backend");
        let options = Options::take(&mut name).expect("options");
        let controller = Controller::new(name.device(), sim.clone(), options).expect("a controller");
        sim.inject(Fault::new(On::Enable, Effect::Lose).once());
        controller.identify().expect_err("it does not come up");
        controller.identify().expect("now it does");
        // What the host asks for, the supervisor hears.
        sim.request_release();
        let started = Instant::now();
        while controller.identify().is_ok() {
            assert!(started.elapsed() < Duration::from_secs(60), "the controller has no supervisor");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
