//! The line at the end of a process that says which way its bytes went, and the log, both for those
//! who ask for them.

use crate::environment;
use crate::statistics::{TOTALS, Totals};
use gpunvme::Reason;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

/// The process that the line is about.
static PROCESS: OnceLock<u32> = OnceLock::new();

/// Has the line written at the end if `GPUNVME_CUFILE_REPORT` asks for it, and begins to log.
pub fn start() {
    PROCESS.get_or_init(|| {
        if let Some(filter) = environment::text("GPUNVME_CUFILE_LOG") {
            let colours = std::io::stderr().is_terminal();
            let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
            let _ = log.try_init(); // the application may have one
        }
        if environment::variable("GPUNVME_CUFILE_REPORT").is_some() {
            crate::exports::at_exit(write);
        }
        std::process::id()
    });
}

fn write() {
    // What a process counted is not told again by those that were forked from it.
    if PROCESS.get() != Some(&std::process::id()) {
        return;
    }
    let Some(place) = environment::variable("GPUNVME_CUFILE_REPORT") else { return };
    let line = line();
    // There is nobody left to tell of a failure.
    let _ = if place == "1" {
        std::io::stderr().write_all(line.as_bytes())
    } else {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(place);
        file.and_then(|mut file| file.write_all(line.as_bytes()))
    };
}

/// One line: requests and bytes, by direction and way. What gpunvme moved is by its routes; `call`
/// is ordinary memory and a gpunvme mount, `real` NVIDIA's library, `plain` pread and pwrite
/// elsewhere. Then how many requests on a gpunvme mount had a reason not to go a faster way.
fn line() -> String {
    let mut line = format!("gpunvme cufile: process {}", std::process::id());
    for (name, totals) in ["read", "write"].into_iter().zip(&TOTALS) {
        let Totals { p2p, bounce, cache, host, hole, edge, call, real, plain, requests, failed, reasons } = totals;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        // Writing to a String cannot fail.
        let _ = write!(line, "; {name}: {} requests, {} failed, bytes", get(requests), get(failed));
        let ways = [
            ("p2p", p2p),
            ("bounce", bounce),
            ("cache", cache),
            ("host", host),
            ("hole", hole),
            ("edge", edge),
            ("call", call),
            ("real", real),
            ("plain", plain),
        ];
        for (way, bytes) in ways {
            let _ = write!(line, " {way} {}", get(bytes));
        }
        for (code, requests) in (0..).zip(reasons).filter(|(_, requests)| get(requests) > 0) {
            let reason = Reason::from_code(code).unwrap_or(Reason::Unknown);
            let _ = write!(line, ", reason {reason} {}", get(requests));
        }
    }
    line.push('\n');
    line
}
