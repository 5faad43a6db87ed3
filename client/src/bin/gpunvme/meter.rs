//! Measures the throughput of a command, and shows a progress bar where standard error is a
//! terminal.

use gpunvme::{Error, Transfer};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// Counts transfers and the time that is spent in them.
pub struct Meter {
    bar: ProgressBar,
    started: Instant,
    busy: Duration,
    done: Transfer,
}

impl Meter {
    /// `expected` is what a bar would be full at, in bytes, where that is known.
    pub fn new(expected: Option<u64>) -> Meter {
        let bar = match expected {
            _ if !std::io::stderr().is_terminal() => ProgressBar::hidden(),
            Some(bytes) => ProgressBar::new(bytes).with_style(style("{wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta}")),
            None => ProgressBar::no_length().with_style(style("{spinner} {bytes}  {bytes_per_sec}")),
        };
        Meter { bar, started: Instant::now(), busy: Duration::ZERO, done: Transfer::default() }
    }

    /// Runs a transfer, and counts it if it comes to its end.
    pub fn time(&mut self, transfer: impl FnOnce() -> Result<Transfer, Error>) -> Result<u64, Error> {
        let began = Instant::now();
        let moved = transfer()?;
        self.busy += began.elapsed();
        self.done.add(&moved);
        self.bar.inc(moved.bytes());
        Ok(moved.bytes())
    }

    /// The sum, and the seconds in transfers and altogether.
    pub fn finish(self) -> (Transfer, Duration, Duration) {
        self.bar.finish_and_clear();
        (self.done, self.busy, self.started.elapsed())
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
