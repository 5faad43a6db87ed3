//! The command `write`. It uses two buffers, so that the command reads the next part of the input
//! while the last one is in flight.

use crate::args::{Memory, Write, require};
use crate::device::DeviceBuffer;
use crate::gpu::GpuBuffer;
use crate::meter::Meter;
use crate::output::identity;
use crate::read::{buffers, part, range};
use crate::report::{self, Failure, Report};
use gpunvme::{Error, File, Reason, Registered, Require, Route, Segment};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::io::{Cursor, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::sync_channel;

/// Bytes of the input that are read before the file is touched.
const FIRST: usize = 64 << 10;

pub fn run(args: &Write) -> Result<Report, Failure> {
    let mut input = Input::open(args)?;
    let fresh = Fresh::new(&args.file);
    let file = File::create(&args.file)?;
    let offset = args.offset.unwrap_or(0);
    let mut hash = args.checksum.then(Sha256::new);
    let mut meter = Meter::new(input.len);
    let require = require(&args.require);
    let mut by = None;
    // Only when everything else is in order.
    let begin = |route: Route| {
        takes(&require, route).map_err(|why| Failure(format!("{why}; nothing was written")))?;
        fresh.keep();
        if args.offset.is_none() { Ok::<_, Failure>(file.set_size(0)?) } else { Ok(()) }
    };
    if let Memory::Gpu(which) = args.from {
        let mut buffer = GpuBuffer::new(&file, which, input.len)?;
        let by = buffer.by()?;
        // The staging pool is there for all of a GPU's memory, also where the SSD reaches it.
        begin(if require.route == Some(Route::Bounce) { Route::Bounce } else { by.0 })?;
        buffer.write(&file, offset, require, &mut meter, &mut input.bytes, |bytes| {
            if let Some(hash) = &mut hash {
                hash.update(bytes);
            }
        })?;
        return Ok(outcome(&args.file, offset, meter, hash, Some(by)).on(&buffer.name()));
    }
    if let Memory::Pci(memory) = &args.from {
        let mut buffer = DeviceBuffer::register(&file, memory, input.len)?;
        if args.input.is_some() {
            buffer.fill(&mut input.bytes)?;
        }
        begin(buffer.by().0)?;
        buffer.write(&file, offset, require, &mut meter)?;
        if let Some(hash) = &mut hash {
            buffer.look(|bytes| {
                hash.update(bytes);
                Ok(())
            })?;
        }
        return Ok(outcome(&args.file, offset, meter, hash, Some(buffer.by())));
    }

    let (filled, coming) = sync_channel::<(Registered, Segment)>(2);
    let (empty, returned) = sync_channel::<Registered>(2);
    for buffer in buffers(&file, input.len.unwrap_or(u64::MAX))? {
        by = Some((buffer.route(), buffer.reason()));
        empty.send(buffer).map_err(|_| Failure("internal error: the channel of empty buffers is closed".into()))?;
    }
    begin(by.map_or(Route::None, |(route, _)| route))?;
    std::thread::scope(|scope| {
        let (file, meter) = (&file, &mut meter);
        let writer = scope.spawn(move || -> Result<(), Error> {
            for (buffer, part) in coming {
                meter.time(|| file.write_requiring(&buffer, &[part], require))?;
                let _ = empty.send(buffer); // fails once the last part was sent
            }
            Ok(())
        });
        // Ends too when the writer has: its error is the one to tell.
        let mut at = offset;
        while let Ok(mut buffer) = returned.recv() {
            let mut part = part(at, u64::MAX, &buffer);
            let len = fill(&mut input.bytes, &mut buffer[range(&part)])
                .map_err(|error| Failure(format!("cannot read the input: {error}")))?;
            part.len = len as u64;
            at += part.len;
            if let Some(hash) = &mut hash {
                hash.update(&buffer[range(&part)]);
            }
            if len == 0 || filled.send((buffer, part)).is_err() {
                break;
            }
        }
        drop(filled);
        writer.join().map_err(|_| Failure("the writing thread panicked".into()))?.map_err(Failure::from)
    })?;
    Ok(outcome(&args.file, offset, meter, hash, by))
}

/// Whether memory that has this route does for the route that is required.
pub fn takes(require: &Require, route: Route) -> Result<(), String> {
    let way = if route == Route::Host { " (gpu:NUMBER names a GPU's memory)" } else { "" };
    match require.route {
        Some(required) if required != route => Err(format!("the memory's route is {route}, and {required} is required{way}")),
        _ => Ok(()),
    }
}

/// A file that the command creates, and that is removed again if the command fails.
struct Fresh<'a>(Cell<Option<&'a Path>>);

impl<'a> Fresh<'a> {
    /// To be asked before the file is created.
    fn new(path: &'a Path) -> Fresh<'a> {
        Fresh(Cell::new(Some(path).filter(|path| std::fs::symlink_metadata(path).is_err())))
    }

    fn keep(&self) {
        self.0.set(None);
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.0.get() {
            let _ = std::fs::remove_file(path); // why nothing came of it is what matters
        }
    }
}

/// Where the data comes from.
struct Input {
    bytes: Box<dyn Read>,
    /// How much it is, where that is known.
    len: Option<u64>,
}

impl Input {
    /// Looks at the input, and has its first bytes: what cannot be read costs no file its content.
    fn open(args: &Write) -> Result<Input, Failure> {
        let path = args.input.as_deref().filter(|path| *path != Path::new("-"));
        let name = path.unwrap_or(Path::new("standard input")).display();
        let failed = |error: std::io::Error| Failure(format!("{name}: {error}"));
        let itself = Failure(format!("{name}: is the file that is written"));
        let target = std::fs::metadata(&args.file).ok().map(|target| (target.dev(), target.ino()));
        let (mut bytes, len): (Box<dyn Read>, _) = match path {
            // A device's memory is written as it is where no input is named.
            None if matches!(args.from, Memory::Pci(_)) => {
                return Ok(Input { bytes: Box::new(std::io::empty()), len: args.length });
            }
            None if target == Some(identity(std::io::stdin()).map_err(failed)?) => return Err(itself),
            None => (Box::new(std::io::stdin().lock()), None),
            Some(path) => {
                let file = std::fs::File::open(path).map_err(failed)?;
                let stat = file.metadata().map_err(failed)?;
                if target == Some((stat.dev(), stat.ino())) {
                    return Err(itself);
                }
                (Box::new(file), stat.is_file().then_some(stat.len()))
            }
        };
        let mut first = vec![0; args.length.map_or(FIRST, |length| FIRST.min(length as usize))];
        let filled = fill(&mut bytes, &mut first).map_err(failed)?;
        first.truncate(filled);
        let bytes = Box::new(Cursor::new(first).chain(bytes));
        Ok(match args.length {
            Some(length) => {
                // Of the length that was asked for, an input of unknown length may still have
                // less.
                Input { bytes: Box::new(bytes.take(length)), len: Some(len.map_or(length, |len| len.min(length))) }
            }
            None => Input { bytes, len },
        })
    }
}

/// Fills a buffer as far as the input goes.
pub fn fill(input: &mut dyn Read, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(more) => filled += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// What `read` and `write` report. `by` is how the buffers were registered, which says what a
/// transfer of nothing cannot.
pub fn outcome(path: &Path, offset: u64, meter: Meter, hash: Option<Sha256>, by: Option<(Route, Reason)>) -> Report {
    let (done, busy, elapsed) = meter.finish();
    let (route, reason) = match (report::route(&done.moved), done.reason, by) {
        (Route::None, None, Some((route, reason))) => (route, reason),
        (route, reason, _) => (route, reason.unwrap_or(Reason::None)),
    };
    let speed = if busy.is_zero() { 0.0 } else { done.bytes() as f64 / busy.as_secs_f64() / 1e9 };
    let sum = hash.map(|hash| hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let mut report = Report::new(json!({
        "file": path.to_string_lossy(),
        "offset": offset,
        "bytes": done.bytes(),
        "route": route.name(),
        "bytes_by_route": report::routes_json(&done.moved),
        "reason": reason.name(),
        "seconds_moving": busy.as_secs_f64(),
        "seconds": elapsed.as_secs_f64(),
        "gb_per_s": speed,
    }));
    report.line("file", path.display());
    report.line("route", route);
    // Host memory has no other route: there is nothing to explain.
    if (route, reason) != (Route::Host, Reason::NotGpuMemory) {
        report.line("reason", report::reason(reason));
    }
    report.line("bytes", format!("{}: {}", done.bytes(), report::routes(&done.moved)));
    report.line("speed", format!("{speed:.2} GB/s ({:.3} s moving, {:.3} s in all)", busy.as_secs_f64(), elapsed.as_secs_f64()));
    if let Some(sum) = sum {
        report.line("sha256", &sum);
        report.json["sha256"] = json!(sum);
    }
    report
}
