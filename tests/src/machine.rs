//! Describes the machine on which a measurement was taken: without it no figure means anything.

use std::fmt;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// A machine, at a date.
#[derive(Debug, Serialize, Deserialize)]
pub struct Machine {
    /// When.
    pub date: String,
    /// Its model, as /proc/cpuinfo has it.
    pub processor: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory, rounded up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_gib: Option<u64>,
    /// Release of Linux.
    pub kernel: String,
    /// The filesystem that the image files lie on, and its device.
    pub backing: String,
    /// Model of the GPU and version of its driver, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// Processes that wanted a processor when the bench began, as the mean of a minute. More than
    /// one on an otherwise idle machine says that other work took part of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
}

/// This machine, with images in `scratch`.
pub fn describe(scratch: &Path) -> Machine {
    let line = |file: &str, key: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix(key)?.split_once(':').map(|(_, value)| value.trim().to_owned()))
    };
    let kibibytes = line("/proc/meminfo", "MemTotal").and_then(|memory| memory.split(' ').next()?.parse::<u64>().ok());
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    Machine {
        date: first_line(Command::new("date").args(["--utc", "+%F %R UTC"])),
        processor: line("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into()),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        memory_gib: kibibytes.map(|kibibytes| kibibytes.div_ceil(1 << 20)),
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        backing: first_line(Command::new("findmnt").args(["--noheadings", "--output", "FSTYPE,SOURCE", "--target"]).arg(scratch)),
        gpu: None,
        load: load.split(' ').next().and_then(|minute| minute.parse().ok()),
    }
}

/// Model and driver of a GPU.
pub fn describe_gpu(number: usize) -> String {
    let query = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    first_line(Command::new("nvidia-smi").args(query).args(["--id", &number.to_string()]))
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Machine { date, processor, cores, memory_gib, kernel, backing, gpu, load } = self;
        write!(f, "{date}, {processor}, {cores} cores")?;
        memory_gib.iter().try_for_each(|memory| write!(f, ", {memory} GiB"))?;
        gpu.iter().try_for_each(|gpu| write!(f, ", {gpu}"))?;
        write!(f, ", Linux {kernel}, images on {backing}")?;
        load.iter().try_for_each(|load| write!(f, ", load {load}"))
    }
}

fn first_line(command: &mut Command) -> String {
    let output = command.output().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    output.lines().next().unwrap_or("unknown").split_whitespace().collect::<Vec<_>>().join(" ")
}
