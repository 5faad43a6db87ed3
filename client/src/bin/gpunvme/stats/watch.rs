//! `stats --watch`: what happened in each interval. On a terminal each table takes the place of
//! the one before; in a pipe they follow each other, and as JSON each is a line.

use super::table::{self, Units};
use super::{Reading, told};
use crate::report::{Failure, Report};
use gpunvme::{OperationKind, Operations};
use serde_json::{Value, json};
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

/// Takes the cursor to the upper left corner, and what is behind it away (ECMA-48: CUP, ED).
const HOME: &str = "\x1b[H\x1b[J";

pub fn run(mount: &Path, seconds: u32, count: Option<u64>, units: Units, json: bool) -> Result<Report, Failure> {
    let mut before = Reading::of(mount)?;
    let mut out = std::io::stdout();
    let is_terminal = out.is_terminal();
    let mut times = 0;
    while count.is_none_or(|count| times < count) {
        std::thread::sleep(Duration::from_secs(seconds.into()));
        let now = Reading::of(mount)?;
        let over = now.metrics.uptime.checked_sub(before.metrics.uptime).filter(|over| !over.is_zero());
        let Some(over) = over else {
            return Err(Failure(format!("{}: was mounted anew", mount.display())));
        };
        let changes = changes(&before.metrics.operations, &now.metrics.operations);
        let text = match json {
            true => format!("{}\n", json_line(&now, over, &changes)),
            false => {
                let head = format!(
                    "{}: up {}, {} free, {} in the write buffer\n",
                    now.info.device,
                    table::uptime(now.metrics.uptime, units),
                    units.bytes(now.metrics.free),
                    units.bytes(now.metrics.dirty)
                );
                format!("{}{head}{}\n", if is_terminal { HOME } else { "" }, table::of(&changes, units, Some(over)))
            }
        };
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // A reader that closes the pipe early has what it wanted.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => break,
            written => written?,
        }
        before = now;
        times += 1;
    }
    Ok(Report::silent())
}

/// What was counted between two readings.
fn changes(before: &[Operations], now: &[Operations]) -> Vec<Operations> {
    let same = |now: &Operations| before.iter().find(|before| before.kind == now.kind && before.name == now.name);
    let changed = |now: &Operations| same(now).map_or_else(|| now.clone(), |before| now.since(before));
    now.iter().map(changed).filter(|operations| operations.begun > 0 || operations.ended() > 0).collect()
}

fn json_line(now: &Reading, over: Duration, changes: &[Operations]) -> Value {
    let of = |kind: OperationKind| {
        let some = changes.iter().filter(|operations| operations.kind == kind);
        some.map(|operations| (operations.name.clone(), told(operations))).collect::<serde_json::Map<_, _>>()
    };
    json!({
        "uptime": now.metrics.uptime.as_secs_f64(),
        "seconds": over.as_secs_f64(),
        "free": now.metrics.free,
        "dirty": now.metrics.dirty,
        "requests": of(OperationKind::Request),
        "transfers": of(OperationKind::Transfer),
        "device_requests": of(OperationKind::Device),
    })
}
