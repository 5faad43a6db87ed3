//! How far a command is: a bar where standard error is a terminal, or lines of JSON for programs.

use indicatif::{ProgressBar, ProgressStyle};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The least time between two lines.
const PAUSE: Duration = Duration::from_millis(200);

/// Bytes that are done, of those that are to be.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// When the last line was said, where lines are wanted.
    said: Option<Mutex<Instant>>,
}

impl Progress {
    /// Of `bytes`; with `lines` a line of JSON now and then, `{"done":BYTES,"of":BYTES}`.
    pub fn new(bytes: u64, lines: bool) -> Progress {
        let bar = ProgressBar::new(bytes);
        if lines || !std::io::stderr().is_terminal() {
            bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
        let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { bar, said: lines.then(|| Mutex::new(Instant::now())) }
    }

    /// So many more are done.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
        if let Some(said) = &self.said {
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            if said.elapsed() >= PAUSE {
                *said = Instant::now();
                self.say();
            }
        }
    }

    /// All is done, and the bar goes.
    pub fn finish(&self) {
        if self.said.is_some() {
            self.say();
        }
        self.bar.finish_and_clear();
    }

    /// Where the program that reads them is gone, or takes none, the work goes on without.
    fn say(&self) {
        let stderr = std::io::stderr();
        let mut polled = [PollFd::new(&stderr, PollFlags::OUT)];
        if rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) {
            // In one write, so that no reader sees half of a line.
            let line = format!("{}\n", serde_json::json!({ "done": self.bar.position(), "of": self.bar.length() }));
            let _ = stderr.lock().write_all(line.as_bytes());
        }
    }
}
