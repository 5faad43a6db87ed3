//! A progress bar where standard error is a terminal.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Bytes that are done, of those that are to be.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar of `bytes`.
    pub fn new(bytes: u64) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress(ProgressBar::hidden());
        }
        let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta}");
        Progress(ProgressBar::new(bytes).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// So many more are done.
    pub fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    /// The bar goes.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}
