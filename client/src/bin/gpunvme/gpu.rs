//! GPU memory as the other end of a transfer: as much of it as one part of the file, used again
//! for each part. What arrived there is looked at by way of CUDA's copies.

use crate::meter::Meter;
use crate::report::Failure;
use gpunvme::gpu::{Caching, Segment, Settings, Transfers};
use gpunvme::{Error, File, Mount, Reason, Require, Route, Transfer};
use gpunvme_cuda::{Cuda, CudaError, DeviceAllocation, Gpu, Stream, Which};
use std::io::Read;

/// Most bytes of GPU memory that are used, and of one transfer.
const PART: u64 = 512 << 20;
/// Bytes that are looked at at a time.
const STEP: usize = 16 << 20;

/// Memory of a GPU, with a stream for copies that wait.
pub struct Memory {
    allocation: DeviceAllocation,
    stream: Stream,
}

impl Memory {
    pub fn new(gpu: &Gpu, len: usize) -> Result<Memory, CudaError> {
        Ok(Memory { allocation: gpu.alloc(len)?, stream: gpu.stream()? })
    }

    pub fn address(&self) -> u64 {
        self.allocation.address()
    }

    pub fn len(&self) -> usize {
        self.allocation.len()
    }

    /// Copies bytes into it.
    pub fn put(&self, offset: usize, bytes: &[u8]) -> Result<(), CudaError> {
        assert!(offset + bytes.len() <= self.len(), "a copy reaches past the end of GPU memory");
        // SAFETY: both ranges are there until the copy is waited for, and no other code uses them.
        unsafe { self.stream.copy_in(self.address() + offset as u64, bytes.as_ptr() as u64, bytes.len()) }?;
        self.stream.synchronize()
    }

    /// Copies bytes out of it.
    pub fn get(&self, offset: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        assert!(offset + bytes.len() <= self.len(), "a copy reaches past the end of GPU memory");
        // SAFETY: as above; the slice is borrowed mutably.
        unsafe { self.stream.copy_out(bytes.as_mut_ptr() as u64, self.address() + offset as u64, bytes.len()) }?;
        self.stream.synchronize()
    }
}

/// GPU memory, and what moves files to and from it.
pub struct GpuBuffer {
    gpu: Gpu,
    memory: Memory,
    transfers: Transfers,
}

/// What moves bytes between a mount's files and GPU memory, whatever the page cache has: these
/// commands show what the device does.
pub fn transfers(mount: &Mount) -> Result<Transfers, Failure> {
    let mut settings = Settings::default();
    settings.caching = Caching::Never;
    Ok(Transfers::with(mount, settings)?)
}

impl GpuBuffer {
    /// Memory for a transfer of `len` bytes, as far as that is known.
    pub fn new(file: &File, which: Which, len: Option<u64>) -> Result<GpuBuffer, Failure> {
        let gpu = find(which)?;
        let len = len.unwrap_or(PART).clamp(1, PART);
        Ok(GpuBuffer { gpu, memory: Memory::new(&gpu, len as usize)?, transfers: transfers(&file.mount()?)? })
    }

    /// The route that transfers take, and why not a faster one.
    pub fn by(&self) -> Result<(Route, Reason), Failure> {
        Ok(self.transfers.route(self.memory.address())?)
    }

    /// Its GPU, for people.
    pub fn name(&self) -> String {
        self.gpu.to_string()
    }

    /// Reads `len` bytes of a file in parts, and shows each to `see`, if there is one.
    pub fn read(
        &mut self,
        file: &File,
        (offset, len): (u64, u64),
        require: Require,
        meter: &mut Meter,
        mut see: Option<impl FnMut(&[u8]) -> Result<(), Failure>>,
    ) -> Result<(), Failure> {
        let mut bytes = vec![0; if see.is_some() { STEP.min(self.memory.len()) } else { 0 }];
        let mut at = 0;
        while at < len {
            let asked = (len - at).min(self.memory.len() as u64);
            let segment = Segment { file_offset: offset + at, address: self.memory.address(), len: asked };
            // SAFETY: the memory is this buffer's.
            let moved = meter.time(|| unsafe { self.transfers.requiring(require).read(file, &[segment]) })?;
            let mut seen = 0;
            while let Some(see) = see.as_mut().filter(|_| seen < moved) {
                let step = (moved - seen).min(STEP as u64) as usize;
                self.memory.get(seen as usize, &mut bytes[..step])?;
                see(&bytes[..step])?;
                seen += step as u64;
            }
            at += moved;
            if moved < asked {
                break;
            }
        }
        Ok(())
    }

    /// Writes what an input has to a file, part by part, and shows it to `see`.
    pub fn write(
        &mut self,
        file: &File,
        offset: u64,
        require: Require,
        meter: &mut Meter,
        input: &mut dyn Read,
        mut see: impl FnMut(&[u8]),
    ) -> Result<(), Failure> {
        let mut bytes = vec![0; STEP.min(self.memory.len())];
        let mut at = offset;
        loop {
            let mut filled = 0;
            while filled < self.memory.len() {
                let step = STEP.min(self.memory.len() - filled);
                let read = crate::write::fill(input, &mut bytes[..step])
                    .map_err(|error| Failure(format!("cannot read the input: {error}")))?;
                self.memory.put(filled, &bytes[..read])?;
                see(&bytes[..read]);
                filled += read;
                if read < step {
                    break;
                }
            }
            if filled == 0 {
                return Ok(());
            }
            let segment = Segment { file_offset: at, address: self.memory.address(), len: filled as u64 };
            // SAFETY: the memory is this buffer's.
            at += meter.time(|| unsafe { self.transfers.requiring(require).write(file, &[segment]) })?;
        }
    }
}

/// GPU memory for several threads.
pub struct GpuParts {
    gpu: Gpu,
    memory: Memory,
    transfers: Transfers,
}

/// The part of one thread.
pub struct GpuPart<'a> {
    transfers: &'a Transfers,
    address: u64,
    len: u64,
}

impl GpuParts {
    /// `len` bytes of memory, which hold what `fill` makes.
    pub fn new(mount: &Mount, which: Which, len: usize, mut fill: impl FnMut(&mut [u8])) -> Result<GpuParts, Failure> {
        let gpu = find(which)?;
        let memory = Memory::new(&gpu, len)?;
        let mut bytes = vec![0; STEP.min(len)];
        for at in (0..len).step_by(STEP) {
            fill(&mut bytes);
            memory.put(at, &bytes[..STEP.min(len - at)])?;
        }
        Ok(GpuParts { gpu, memory, transfers: transfers(mount)? })
    }

    /// Its GPU, for people.
    pub fn name(&self) -> String {
        self.gpu.to_string()
    }

    /// The memory, cut into parts of `len` bytes.
    pub fn split(&mut self, len: u64) -> impl Iterator<Item = GpuPart<'_>> {
        let (transfers, address) = (&self.transfers, self.memory.address());
        (0..self.memory.len() as u64 / len).map(move |at| GpuPart { transfers, address: address + at * len, len })
    }
}

impl GpuPart<'_> {
    /// Reads the file from an offset on, as much as the part holds.
    pub fn read(&mut self, file: &File, file_offset: u64) -> Result<Transfer, Error> {
        // SAFETY: the part is borrowed mutably, and overlaps no other.
        unsafe { self.transfers.read(file, &[self.segment(file_offset)]) }
    }

    /// Writes all of the part to the file, from an offset on.
    pub fn write(&mut self, file: &File, file_offset: u64) -> Result<Transfer, Error> {
        // SAFETY: as above.
        unsafe { self.transfers.write(file, &[self.segment(file_offset)]) }
    }

    fn segment(&self, file_offset: u64) -> Segment {
        Segment { file_offset, address: self.address, len: self.len }
    }
}

/// The GPU of that name.
pub fn find(which: Which) -> Result<Gpu, Failure> {
    let cuda = Cuda::load().map_err(gpunvme::Error::NoCuda)?;
    Ok(cuda.gpu(which)?)
}
