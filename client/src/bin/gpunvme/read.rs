//! The command `read`. It uses two buffers, so that the next part is in flight while the command
//! processes the last one.

use crate::args::{Memory, Read, require};
use crate::device::DeviceBuffer;
use crate::gpu::GpuBuffer;
use crate::meter::Meter;
use crate::output::Output;
use crate::report::{Failure, Report};
use crate::write;
use gpunvme::gpu::Caching;
use gpunvme::{Buffer, Error, File, Registered, Segment};
use sha2::{Digest, Sha256};
use std::io::Write;
use std::ops::Range;
use std::sync::mpsc::sync_channel;

/// Bytes of one buffer.
const PART: u64 = 32 << 20;
/// The coarsest alignment that transfers profit from.
const BLOCK: u64 = 4096;

/// What of the file goes through a buffer next. It lies in the buffer as it lies in its block, so
/// that all but its ends goes direct.
pub fn part(file_offset: u64, len: u64, buffer: &[u8]) -> Segment {
    let buffer_offset = file_offset % BLOCK;
    Segment { file_offset, buffer_offset, len: len.min(buffer.len() as u64 - buffer_offset) }
}

/// Where a part lies in its buffer.
pub fn range(part: &Segment) -> Range<usize> {
    part.buffer_offset as usize..(part.buffer_offset + part.len) as usize
}

pub fn run(args: &Read) -> Result<Report, Failure> {
    let file = File::open(&args.file)?;
    // Whatever the page cache has: the command shows what the device does.
    file.set_caching(Some(Caching::Never));
    let rest = file.size()?.saturating_sub(args.offset);
    let len = args.length.map_or(rest, |length| length.min(rest));
    let mut output = args.output.as_deref().map(|path| Output::open(path, &file)).transpose()?;
    let mut hash = args.checksum.then(Sha256::new);
    let mut meter = Meter::new(Some(len));
    let require = require(&args.require);
    let mut by = None;
    if let Memory::Gpu(which) = args.to {
        let mut buffer = GpuBuffer::new(&file, which, Some(len))?;
        let by = buffer.by()?;
        let looks = hash.is_some() || output.is_some();
        let see = looks.then_some(|bytes: &[u8]| consume(bytes, &mut hash, &mut output));
        buffer.read(&file, (args.offset, len), require, &mut meter, see)?;
        let report = write::outcome(&args.file, args.offset, meter, hash, Some(by)).on(&buffer.name());
        return finish(output, report);
    }
    if let Memory::Pci(memory) = &args.to {
        let mut buffer = DeviceBuffer::register(&file, memory, Some(len))?;
        buffer.read(&file, args.offset, require, &mut meter)?;
        buffer.look(|bytes| consume(bytes, &mut hash, &mut output))?;
        return finish(output, write::outcome(&args.file, args.offset, meter, hash, Some(buffer.by())));
    }

    // Filled buffers come one way, empty ones go the other.
    let (filled, arrived) = sync_channel::<(Registered, Segment)>(2);
    let (empty, returned) = sync_channel::<Registered>(2);
    for buffer in buffers(&file, len)? {
        by = Some((buffer.route(), buffer.reason()));
        write::takes(&require, buffer.route()).map_err(|why| Failure(format!("{why}; nothing was read")))?;
        empty.send(buffer).map_err(|_| Failure("internal error: the channel of empty buffers is closed".into()))?;
    }
    std::thread::scope(|scope| {
        // Dropped when this end gives up, so that the other does not wait for a buffer.
        let empty = empty;
        let (file, meter) = (&file, &mut meter);
        let reader = scope.spawn(move || -> Result<(), Error> {
            let mut at = 0;
            while at < len {
                // Either end may have given up; the other one knows why.
                let Ok(mut buffer) = returned.recv() else { return Ok(()) };
                let part = part(args.offset + at, len - at, &buffer);
                let bytes = meter.time(|| file.read_requiring(&mut buffer, &[part], require))?;
                at += bytes;
                if filled.send((buffer, Segment { len: bytes, ..part })).is_err() || bytes < part.len {
                    break;
                }
            }
            Ok(())
        });
        for (buffer, part) in arrived {
            consume(&buffer[range(&part)], &mut hash, &mut output)?;
            let _ = empty.send(buffer); // fails once the reader has ended
        }
        reader.join().map_err(|_| Failure("the reading thread panicked".into()))?.map_err(Failure::from)
    })?;
    finish(output, write::outcome(&args.file, args.offset, meter, hash, by))
}

/// Everything has arrived.
fn finish(output: Option<Output>, mut report: Report) -> Result<Report, Failure> {
    if let Some(output) = output {
        report.to_stderr = output.is_stdout();
        output.finish()?;
    }
    Ok(report)
}

/// Hashes bytes that arrived, or writes them out, as the command line asks.
fn consume(bytes: &[u8], hash: &mut Option<Sha256>, output: &mut Option<Output>) -> Result<(), Failure> {
    if let Some(hash) = hash {
        hash.update(bytes);
    }
    match output {
        Some(output) => output.write_all(bytes).map_err(|error| Failure(format!("cannot write what arrived: {error}"))),
        None => Ok(()),
    }
}

/// As many as keep both ends busy, and no larger than the whole.
pub fn buffers(file: &File, len: u64) -> Result<Vec<Registered>, Error> {
    let mount = file.mount()?;
    // One block more, for where the first part begins in its block.
    let size = (len.min(PART) + BLOCK).next_multiple_of(BLOCK).min(PART);
    let count = if size == PART { 2 } else { 1 };
    (0..count).map(|_| mount.register(Buffer::memfd(size as usize)?)).collect()
}
