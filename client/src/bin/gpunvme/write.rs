//! `write`: through two buffers, so that the next part is taken in while the last one is on its way.

use crate::args::{Memory, Write};
use crate::meter::Meter;
use crate::read::{buffers, part, range};
use crate::report::{self, Failure, Report};
use gpunvme::{Error, File, Reason, Registered, Route, Segment};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::sync_channel;

pub fn run(args: &Write) -> Result<Report, Failure> {
    let Memory::Host = args.from;
    let (mut input, expected) = open(args.input.as_deref())?;
    let file = File::create(&args.file)?;
    let offset = args.offset.unwrap_or(0);
    if args.offset.is_none() {
        file.set_size(0)?;
    }
    let mut hash = args.checksum.then(Sha256::new);
    let mut meter = Meter::new(expected);
    let mut by = None;

    let (filled, coming) = sync_channel::<(Registered, Segment)>(2);
    let (empty, returned) = sync_channel::<Registered>(2);
    for buffer in buffers(&file, expected.unwrap_or(u64::MAX))? {
        by = Some((buffer.route(), buffer.reason()));
        empty.send(buffer).map_err(|_| Failure("a channel is closed that nobody has closed".into()))?;
    }
    std::thread::scope(|scope| {
        let (file, meter) = (&file, &mut meter);
        let writer = scope.spawn(move || -> Result<(), Error> {
            for (buffer, part) in coming {
                meter.time(|| file.write(&buffer, &[part]))?;
                let _ = empty.send(buffer); // nobody waits for it at the end
            }
            Ok(())
        });
        // Ends too when the writer has: its error is the one to tell.
        let mut at = offset;
        while let Ok(mut buffer) = returned.recv() {
            let mut part = part(at, u64::MAX, &buffer);
            let len = fill(&mut input, &mut buffer[range(&part)])
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

/// The input, and its length where that is known.
fn open(path: Option<&Path>) -> Result<(Box<dyn Read>, Option<u64>), Failure> {
    let Some(path) = path.filter(|path| *path != Path::new("-")) else {
        return Ok((Box::new(std::io::stdin().lock()), None));
    };
    let failed = |error| Failure(format!("{}: {error}", path.display()));
    let file = std::fs::File::open(path).map_err(failed)?;
    let stat = file.metadata().map_err(failed)?;
    Ok((Box::new(file), stat.is_file().then_some(stat.len())))
}

/// Fills a buffer as far as the input goes.
fn fill(input: &mut dyn Read, buffer: &mut [u8]) -> std::io::Result<usize> {
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

/// What `read` and `write` report. `by` is how the buffers were registered, which says what a transfer of nothing cannot.
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
    report.line("reason", report::reason(reason));
    report.line("bytes", format!("{}: {}", done.bytes(), report::routes(&done.moved)));
    report.line("speed", format!("{speed:.2} GB/s ({:.3} s moving, {:.3} s in all)", busy.as_secs_f64(), elapsed.as_secs_f64()));
    if let Some(sum) = sum {
        report.line("sha256", &sum);
        report.json["sha256"] = json!(sum);
    }
    report
}
