//! The progress of fsck, shown on a terminal only.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use gpunvme_engine::check::Stage;

/// Time between two looks at the clock's face.
const INTERVAL: Duration = Duration::from_millis(200);

/// A line on stderr that says how far the check is.
pub struct Meter {
    device: String,
    terminal: bool,
    last: Instant,
    shown: bool,
}

impl Meter {
    /// Shows nothing yet, and with `quiet` nothing later.
    pub fn new(device: &str, quiet: bool) -> Meter {
        let terminal = !quiet && std::io::stderr().is_terminal();
        Meter { device: device.to_owned(), terminal, last: Instant::now(), shown: false }
    }

    /// Shows how much of a stage is done, now and then.
    pub fn show(&mut self, stage: Stage, done: u64, of: u64) {
        if !self.terminal || self.last.elapsed() < INTERVAL {
            return;
        }
        let what = match stage {
            Stage::Inodes => "inodes",
            Stage::Groups => "groups",
        };
        let percent = done.min(of) * 100 / of.max(1);
        // Only for show.
        let _ = write!(std::io::stderr(), "\r\x1b[K{}: {percent}% of {of} {what}", self.device);
        (self.last, self.shown) = (Instant::now(), true);
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
