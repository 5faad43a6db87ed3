//! Memory of a PCI device as the source or target of a transfer: one buffer, registered once. The
//! CPU reads its content through a mapping.

use crate::args::PciMemory;
use crate::meter::Meter;
use crate::report::Failure;
use gpunvme::{DeviceMapping, DeviceMemory, Error, File, Reason, Registered, Require, Route, Segment};
use std::io::Read;

/// Bytes of one call, so that there is progress to show.
const PART: u64 = 64 << 20;
/// Bytes that the CPU copies at a time.
const STEP: usize = 1 << 20;

/// A piece of a device's memory that is registered with the mount.
pub struct DeviceBuffer {
    registered: Registered<DeviceMemory>,
    mapping: DeviceMapping,
    /// Where in the memory it begins.
    offset: u64,
    /// How much of the memory is in use, in bytes.
    len: u64,
}

impl DeviceBuffer {
    /// Registers `len` bytes, or all bytes of the memory from the offset on.
    pub fn register(file: &File, memory: &PciMemory, len: Option<u64>) -> Result<DeviceBuffer, Failure> {
        let PciMemory { address, resource, offset } = memory;
        let whole = DeviceMemory::pci_resource(address, resource)?;
        let room = (whole.len() as u64).saturating_sub(*offset);
        let len = len.unwrap_or(room);
        if len > room {
            let why = "are too many: there is room for";
            return Err(Failure(format!("pci:{address}/{resource}: {len} bytes {why} {room} (--length moves a part)")));
        }
        // From its beginning, because that is how memory is registered.
        let memory = whole.first((offset + len).max(1) as usize);
        let mapping = memory.map()?;
        Ok(DeviceBuffer { registered: file.mount()?.register(memory)?, mapping, offset: *offset, len })
    }

    /// How it was registered.
    pub fn by(&self) -> (Route, Reason) {
        (self.registered.route(), self.registered.reason())
    }

    /// Reads a file into the memory, and keeps as many bytes in use as the file had.
    pub fn read(&mut self, file: &File, file_offset: u64, require: Require, meter: &mut Meter) -> Result<(), Error> {
        let registered = &mut self.registered;
        self.len = parts(self.len, file_offset, self.offset, |segment| {
            meter.time(|| file.read_requiring(registered, &[segment], require))
        })?;
        Ok(())
    }

    /// Writes the bytes in use to a file.
    pub fn write(&self, file: &File, file_offset: u64, require: Require, meter: &mut Meter) -> Result<(), Error> {
        parts(self.len, file_offset, self.offset, |segment| {
            meter.time(|| file.write_requiring(&self.registered, &[segment], require))
        })?;
        Ok(())
    }

    /// Passes the bytes in use to `see`, piece by piece.
    pub fn look(&self, mut see: impl FnMut(&[u8]) -> Result<(), Failure>) -> Result<(), Failure> {
        let mut bytes = vec![0; STEP];
        let mut at = 0;
        while at < self.len {
            let step = &mut bytes[..STEP.min((self.len - at) as usize)];
            self.mapping.read_at((self.offset + at) as usize, step)?;
            see(step)?;
            at += step.len() as u64;
        }
        Ok(())
    }

    /// Fills the memory from the input, and keeps as many bytes in use as the input had.
    pub fn fill(&mut self, input: &mut dyn Read) -> Result<(), Failure> {
        let mut bytes = vec![0; STEP];
        let mut at = 0;
        while at < self.len {
            let step = STEP.min((self.len - at) as usize);
            let filled = input.read(&mut bytes[..step]).map_err(|error| Failure(format!("cannot read the input: {error}")))?;
            if filled == 0 {
                break;
            }
            self.mapping.write_at((self.offset + at) as usize, &bytes[..filled])?;
            at += filled as u64;
        }
        self.len = at;
        Ok(())
    }
}

/// Moves `len` bytes in parts, each by `part`, which says how much it moved. Says how much all
/// did; it ends where one fell short.
fn parts(len: u64, file: u64, memory: u64, mut part: impl FnMut(Segment) -> Result<u64, Error>) -> Result<u64, Error> {
    let mut at = 0;
    while at < len {
        let asked = PART.min(len - at);
        let moved = part(Segment { file_offset: file + at, buffer_offset: memory + at, len: asked })?;
        at += moved;
        if moved < asked {
            break;
        }
    }
    Ok(at)
}
