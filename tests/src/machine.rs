//! Describes the machine on which a measurement was taken: without it no figure means anything.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde::Serialize;

/// A machine, at a date.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// When.
    pub date: String,
    /// Its model, as /proc/cpuinfo has it.
    pub processor: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory, rounded up.
    pub memory_gib: u64,
    /// Release of Linux.
    pub kernel: String,
    /// The filesystem that the image files lie on, and its device.
    pub backing: String,
}

/// This machine, with images in `scratch`.
pub fn describe(scratch: &Path) -> Machine {
    let line = |file: &str, key: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let value =
            text.lines().find_map(|line| line.strip_prefix(key)?.split_once(':').map(|(_, value)| value.trim().to_owned()));
        value.unwrap_or_else(|| "unknown".to_owned())
    };
    let memory = line("/proc/meminfo", "MemTotal");
    let kibibytes: u64 = memory.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0);
    Machine {
        date: first_line(Command::new("date").args(["--utc", "+%F %R UTC"])),
        processor: line("/proc/cpuinfo", "model name"),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_gib: kibibytes.div_ceil(1 << 20),
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        backing: first_line(Command::new("findmnt").args(["--noheadings", "--output", "FSTYPE,SOURCE", "--target"]).arg(scratch)),
    }
}

fn first_line(command: &mut Command) -> String {
    let output = command.output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    output.lines().next().unwrap_or("unknown").split_whitespace().collect::<Vec<_>>().join(" ")
}
