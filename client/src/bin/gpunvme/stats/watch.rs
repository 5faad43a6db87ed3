//! `stats --watch`: what happened in each interval. As JSON each table is a line.

use super::table::{self, Units};
use super::{Reading, told};
use crate::report::{Failure, Report};
use crate::screen::Screen;
use gpunvme::{OperationKind, Operations};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

pub fn run(mount: &Path, seconds: u32, count: Option<u64>, units: Units, json: bool) -> Result<Report, Failure> {
    let mut before = Reading::of(mount)?;
    let mut screen = Screen::new();
    let mut times = 0;
    while count.is_none_or(|count| times < count) {
        std::thread::sleep(Duration::from_secs(seconds.into()));
        let now = Reading::of(mount)?;
        let over = now.metrics.uptime.checked_sub(before.metrics.uptime).filter(|over| !over.is_zero());
        let Some(over) = over else {
            return Err(Failure(format!("{}: was mounted anew", mount.display())));
        };
        let changes = changes(&before.metrics.operations, &now.metrics.operations);
        let goes_on = if json {
            screen.line(&json_line(&now, over, &changes).to_string())?
        } else {
            let head = format!(
                "{}: up {}, {} free, {} in the write buffer\n",
                now.info.device,
                table::uptime(now.metrics.uptime, units),
                units.bytes(now.metrics.free),
                units.bytes(now.metrics.dirty)
            );
            screen.show(&format!("{head}{}\n", table::of(&changes, units, Some(over))))?
        };
        if !goes_on {
            break;
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
