//! The progress of fsck: a bar on a terminal, and lines for a descriptor that `-C` names.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use gpunvme_engine::check::Stage;

/// Time between two looks at the clock's face.
const INTERVAL: Duration = Duration::from_millis(200);
/// Characters of the bar.
const BAR: u64 = 24;
/// Before this an estimate of the time left is a guess.
const ESTIMATE_AFTER: Duration = Duration::from_secs(2);

/// What says how far the check is.
pub struct Meter {
    device: String,
    /// On stderr, because that is a terminal.
    bar: bool,
    descriptor: Option<File>,
    begun: Instant,
    stage: Option<Stage>,
    last: Option<Instant>,
    shown: bool,
}

impl Meter {
    /// Shows nothing yet, and with `quiet` no bar later. `descriptor` gets lines of `PASS DONE OF
    /// DEVICE`, as e2fsck(8) writes them; a negative one is none, and 0 means the bar, which a
    /// terminal gets anyway.
    ///
    /// # Errors
    /// The descriptor is not open for writing.
    pub fn new(device: &str, quiet: bool, descriptor: Option<i32>) -> io::Result<Meter> {
        let number = descriptor.filter(|number| *number > 0);
        let descriptor = number.map(|number| OpenOptions::new().append(true).open(format!("/proc/self/fd/{number}"))).transpose();
        let descriptor = descriptor.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::other("no descriptor of that number is open"),
            _ => error,
        })?;
        let bar = !quiet && io::stderr().is_terminal();
        Ok(Meter { device: device.to_owned(), bar, descriptor, begun: Instant::now(), stage: None, last: None, shown: false })
    }

    /// Shows how much of a stage is done: its begin and end, and in between now and then.
    pub fn show(&mut self, stage: Stage, done: u64, of: u64) {
        let done = done.min(of);
        if self.stage != Some(stage) {
            (self.stage, self.begun, self.last) = (Some(stage), Instant::now(), None);
        }
        if done < of && self.last.is_some_and(|last| last.elapsed() < INTERVAL) {
            return;
        }
        self.last = Some(Instant::now());
        // Both are only for show: a reader that has gone ends no check.
        if let Some(descriptor) = &mut self.descriptor {
            let _ = writeln!(descriptor, "{} {done} {of} {}", pass(stage), self.device);
        }
        if self.bar {
            let _ = write!(io::stderr(), "\r\x1b[K{}: {}", self.device, line(stage, done, of, self.begun.elapsed()));
            self.shown = true;
        }
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

/// The pass of e2fsck that does the same: programs that show a percentage know how long each takes.
fn pass(stage: Stage) -> u32 {
    match stage {
        Stage::Inodes => 1,
        Stage::Groups => 5,
    }
}

fn line(stage: Stage, done: u64, of: u64, elapsed: Duration) -> String {
    let what = match stage {
        Stage::Inodes => "inodes",
        Stage::Groups => "groups",
    };
    let of = of.max(1);
    let full = (done * BAR / of) as usize;
    let bar = format!("{}{}", "=".repeat(full), " ".repeat(BAR as usize - full));
    let seconds = elapsed.as_secs();
    let left = if elapsed < ESTIMATE_AFTER || done == 0 {
        String::new()
    } else {
        format!(", {} s left", (elapsed.as_secs_f64() * (of - done) as f64 / done as f64).ceil())
    };
    format!("[{bar}] {:>3}% of {of} {what}, {seconds} s{left}", done * 100 / of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_has_percent_and_time() {
        let at = |done, seconds| line(Stage::Inodes, done, 1000, Duration::from_secs(seconds));
        assert_eq!(at(0, 0), "[                        ]   0% of 1000 inodes, 0 s");
        assert_eq!(at(250, 10), "[======                  ]  25% of 1000 inodes, 10 s, 30 s left");
        assert_eq!(at(1000, 12), "[========================] 100% of 1000 inodes, 12 s, 0 s left");
        assert!(line(Stage::Groups, 0, 0, Duration::ZERO).ends_with("  0% of 1 groups, 0 s"));
    }
}
