//! How far a command is: a bar where standard error is a terminal, or lines of JSON for programs,
//! which may also follow what of which files is there.

use indicatif::{ProgressBar, ProgressStyle};
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
    follow: bool,
}

/// What happens to a file, for a program that reads along.
#[derive(serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Event<'a> {
    /// It is whole and has its name.
    There(&'a str),
    /// These bytes of it are in its partial file, not checked.
    Written { name: &'a str, partial: &'a str, offset: u64, len: u64 },
    /// What was written of it counts no more.
    Dropped(&'a str),
}

impl Progress {
    /// Of `bytes`; with `lines` a line of JSON now and then, `{"done":BYTES,"of":BYTES}`, and with
    /// `follow` one for each [`Event`].
    pub fn new(bytes: u64, lines: bool, follow: bool) -> Progress {
        let bar = ProgressBar::new(bytes);
        if lines || follow || !std::io::stderr().is_terminal() {
            bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
        let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Progress { bar, said: lines.then(|| Mutex::new(Instant::now())), follow }
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

    /// Tells of an event, where that is wanted.
    pub fn tell(&self, event: &Event<'_>) {
        if self.follow {
            line(event);
        }
    }

    fn say(&self) {
        line(&serde_json::json!({ "done": self.bar.position(), "of": self.bar.length() }));
    }
}

/// Where nobody listens, the work goes on.
fn line(what: &impl serde::Serialize) {
    let text = serde_json::to_string(what).expect("names and numbers have a form in JSON");
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
