//! The command `top`: which processes, or files, keep a mount busy. As JSON each table is a line.

use crate::report::{Failure, Report};
use crate::screen::{Screen, printable};
use crate::stats::table::Units;
use gpunvme::{Activity, ActivityEntry, Mount};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Lines of a table.
const LINES: usize = 20;

#[derive(clap::Args)]
pub struct Top {
    /// The mount, or anything in it
    mount: PathBuf,
    /// What a line is: a process, or a file
    #[arg(long, value_name = "WHAT", default_value = "process")]
    by: By,
    /// Seconds between two tables
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=5))]
    interval: u32,
    /// Stop after so many tables
    #[arg(long, value_name = "TIMES")]
    count: Option<u64>,
    /// Print bytes and nanoseconds
    #[arg(long)]
    exact: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum By {
    Process,
    File,
}

/// A line: the sum of some entries.
#[derive(Clone, Default)]
struct Line {
    user: u32,
    process: u32,
    command: String,
    ino: u64,
    path: Option<PathBuf>,
    sum: ActivityEntry,
}

pub fn run(top: &Top, json: bool) -> Result<Report, Failure> {
    let mount = Mount::open(&top.mount)?;
    let device = fs::metadata(&top.mount).map_err(|error| Failure(format!("{}: {error}", top.mount.display())))?.dev();
    let units = if top.exact { Units::Exact } else { Units::Human };
    let (mut before, mut since) = (mount.activity()?, Instant::now());
    let mut screen = Screen::new();
    let mut times = 0;
    while top.count.is_none_or(|count| times < count) {
        std::thread::sleep(Duration::from_secs(top.interval.into()));
        let now = mount.activity()?;
        let over = since.elapsed();
        since = Instant::now();
        let lines = lines(changes(&before, &now), top.by, device);
        let goes_on = if json {
            let others = now.others.saturating_sub(before.others);
            let lines: Vec<Value> = lines.iter().map(|line| told(line, top.by)).collect();
            let (seconds, left_out) = (over.as_secs_f64(), now.left_out);
            let line = json!({ "seconds": seconds, "entries": lines, "left_out": left_out, "others": others });
            screen.line(&line.to_string())?
        } else {
            screen.show(&format!("{}\n", table(&lines, top.by, units, over)))?
        };
        if !goes_on {
            break;
        }
        before = now;
        times += 1;
    }
    Ok(Report::silent())
}

/// What was done between two looks.
fn changes(before: &Activity, now: &Activity) -> Vec<ActivityEntry> {
    let key = |entry: &ActivityEntry| (entry.user, entry.thread, entry.ino);
    let before: HashMap<_, _> = before.entries.iter().map(|entry| (key(entry), entry)).collect();
    let change = |now: &ActivityEntry| before.get(&key(now)).map_or(*now, |before| now.since(before));
    now.entries.iter().map(change).filter(|entry| entry.requests > 0 || entry.transfers > 0).collect()
}

/// The lines, those that took longest first.
fn lines(entries: Vec<ActivityEntry>, by: By, device: u64) -> Vec<Line> {
    let mut lines: HashMap<(u32, u64), Line> = HashMap::new();
    let mut threads: HashMap<u32, (u32, String)> = HashMap::new();
    let mut paths = Paths { device, known: HashMap::new() };
    for entry in entries {
        let (process, command) = threads.entry(entry.thread).or_insert_with(|| process_of(entry.thread)).clone();
        let key = if by == By::Process { (process, 0) } else { (0, entry.ino) };
        let line = lines.entry(key).or_default();
        line.sum.requests += entry.requests;
        line.sum.transfers += entry.transfers;
        line.sum.read += entry.read;
        line.sum.written += entry.written;
        line.sum.time += entry.time;
        if by == By::File {
            line.ino = entry.ino;
            line.path = line.path.take().or_else(|| paths.of(process, entry.ino));
        } else {
            (line.user, line.process, line.command) = (entry.user, process, command);
        }
    }
    let mut lines: Vec<Line> = lines.into_values().collect();
    lines.sort_by_key(|line| (Reverse(line.sum.time), line.process, line.ino));
    lines
}

/// The process of a thread, and its name: the thread itself where it has ended.
fn process_of(thread: u32) -> (u32, String) {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let of = |status: &str, name: &str| status.lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned()));
    let Some(process) = of(&status, "Tgid:").and_then(|text| text.parse().ok()) else { return (thread, "-".to_owned()) };
    let name = fs::read_to_string(format!("/proc/{process}/comm")).map(|name| name.trim().to_owned());
    (process, name.unwrap_or_else(|_| "-".to_owned()))
}

/// Paths of files that processes have open.
struct Paths {
    /// The mount's.
    device: u64,
    /// By process.
    known: HashMap<u32, HashMap<u64, PathBuf>>,
}

impl Paths {
    fn of(&mut self, process: u32, ino: u64) -> Option<PathBuf> {
        let device = self.device;
        self.known.entry(process).or_insert_with(|| open_files(process, device)).get(&ino).cloned()
    }
}

/// The files of a device that a process has open or mapped, as far as they may be seen.
fn open_files(process: u32, device: u64) -> HashMap<u64, PathBuf> {
    let links = |folder: &str| fs::read_dir(format!("/proc/{process}/{folder}")).into_iter().flatten().flatten();
    let file = |link: fs::DirEntry| {
        let found = fs::metadata(link.path()).ok().filter(|found| found.dev() == device)?;
        Some((found.ino(), fs::read_link(link.path()).ok()?))
    };
    links("fd").chain(links("map_files")).filter_map(file).collect()
}

fn name(line: &Line) -> String {
    line.path.as_deref().map_or_else(|| format!("inode {}", line.ino), |path| Path::display(path).to_string())
}

fn table(lines: &[Line], by: By, units: Units, over: Duration) -> String {
    let rate = |number: u64| (number as f64 / over.as_secs_f64()).round() as u64;
    let numbers = |sum: &ActivityEntry| {
        format!(
            "{:>10} {:>10} {:>12} {:>12} {:>8.1}",
            units.count(rate(sum.requests)),
            units.count(rate(sum.transfers)),
            units.cell(rate(sum.read)),
            units.cell(rate(sum.written)),
            sum.time.as_secs_f64() / over.as_secs_f64(),
        )
    };
    let heads = format!("{:>10} {:>10} {:>12} {:>12} {:>8}", "requests/s", "transfers/s", "read/s", "written/s", "waiting");
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = match by {
        By::Process => writeln!(text, "{:>8} {:>6} {heads}  command", "process", "user"),
        By::File => writeln!(text, "{heads}  file"),
    };
    for line in lines.iter().take(LINES) {
        let numbers = numbers(&line.sum);
        let _ = match by {
            By::Process => writeln!(text, "{:>8} {:>6} {numbers}  {}", line.process, line.user, printable(&line.command)),
            By::File => writeln!(text, "{numbers}  {}", printable(&name(line))),
        };
    }
    text
}

fn told(line: &Line, by: By) -> Value {
    let sum = &line.sum;
    let mut told = json!({
        "requests": sum.requests,
        "transfers": sum.transfers,
        "read": sum.read,
        "written": sum.written,
        "time": sum.time.as_secs_f64(),
    });
    match by {
        By::Process => {
            told["process"] = json!(line.process);
            told["user"] = json!(line.user);
            told["command"] = json!(line.command);
        }
        By::File => {
            told["inode"] = json!(line.ino);
            told["path"] = json!(line.path);
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An administrator sees names that any user chose.
    #[test]
    fn names_do_not_control_the_terminal() {
        let line = Line { command: "a\x1b[2Jb\n".into(), path: Some("/mnt/\x1b]0;x\x07".into()), ..Line::default() };
        for by in [By::Process, By::File] {
            let table = table(std::slice::from_ref(&line), by, Units::Human, Duration::from_secs(1));
            assert_eq!(table.lines().count(), 2, "{table:?}");
            assert!(table.chars().all(|char| char == '\n' || !char.is_control()), "{table:?}");
        }
    }
}
