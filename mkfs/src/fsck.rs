//! fsck.gpunvme: checks a volume, says what is wrong with it, and repairs it.
//!
//! The work is done by `gpunvme_engine::check`; here are the conventions of fsck(8): options,
//! questions, exit codes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{IsTerminal, Stdin};
use std::time::{Duration, Instant};

use clap::Parser;
use gpunvme_blockdev::{Io, OpenMode};
use gpunvme_engine::Corrupt;
use gpunvme_engine::FsError;
use gpunvme_engine::check::{CheckOptions, Finding, Findings, Fsck, Kind, Refound, Stop};
use gpunvme_programs::claim::reason;
use gpunvme_programs::completions::{Completions, Printed};
use gpunvme_programs::members;
use gpunvme_programs::tag;
use gpunvme_programs::terminal::{complain, print};
use nix::sys::signal::{SigSet, Signal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;
use uuid::Uuid;

use crate::meter::Meter;
use crate::{json, now};

/// Exit codes of fsck(8).
const CLEAN: u8 = 0;
const CORRECTED: u8 = 1;
const ERRORS_LEFT: u8 = 4;
const FAILED: u8 = 8;
const USAGE: u8 = 16;
const CANCELLED: u8 = 32;

/// Findings of one kind that are printed without -v.
const SHOWN: usize = 10;
/// Least memory that can be asked for, in MiB.
const MEMORY_MIN: u64 = 64;

/// Checks a gpunvme volume that is not mounted, and repairs it. Without -n, -p or -y it asks on a
/// terminal, and changes nothing where there is none.
#[derive(Debug, Parser)]
#[command(name = "fsck.gpunvme", bin_name = "fsck.gpunvme", version)]
pub struct Arguments {
    /// A block device (/dev/nvme1n1), an image file, an NVMe controller (vfio:0000:01:00.0), or
    /// LABEL=... or UUID=... of a volume on block devices
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub device: String,
    /// Another device of the same volume, where it is not found by itself; may be given several
    /// times
    #[arg(long, value_name = "DEVICE")]
    pub with: Vec<String>,
    /// Write nothing at all; the journal is replayed in memory
    #[arg(short = 'n', long)]
    pub no_change: bool,
    /// Repair what has one right answer that loses nothing, without asking
    #[arg(short = 'p', short_alias = 'a', visible_alias = "preen", long = "automatic", conflicts_with = "no_change")]
    pub automatic: bool,
    /// Repair everything without asking; what has lost its place goes to lost+found
    #[arg(short = 'y', long, conflicts_with_all = ["no_change", "automatic"])]
    pub yes: bool,
    /// Print every finding, not the first of each kind
    #[arg(short = 'v', long)]
    pub verbose: bool,
    /// Say nothing about a volume without errors, and show no progress
    #[arg(short, long, conflicts_with_all = ["verbose", "json"])]
    pub quiet: bool,
    /// Say what was found as JSON
    #[arg(long)]
    pub json: bool,
    /// Memory that a check or a repair uses, in MiB; what exceeds it goes to temporary files
    #[arg(long, value_name = "MIB", default_value_t = (gpunvme_engine::check::MEMORY >> 20) as u64, value_parser = clap::value_parser!(u64).range(MEMORY_MIN..=1 << 20))]
    pub memory: u64,
    /// Check although the volume was unmounted cleanly; it is checked anyway
    #[arg(short = 'f', long)]
    pub force: bool,
    /// Write how far the check is to this descriptor, as lines of PASS DONE OF DEVICE; a terminal
    /// shows a bar anyway
    #[arg(short = 'C', value_name = "FD", allow_hyphen_values = true)]
    pub progress: Option<i32>,
    /// Print what a shell needs to complete this command line
    #[arg(long, value_name = "SHELL", value_parser = Completions)]
    pub completions: Option<Printed>,
}

/// What was found on a volume, and what became of it.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    label: String,
    uuid: Uuid,
    inodes: u64,
    blocks: u64,
    free_blocks: u64,
    /// Whether it was unmounted.
    unmounted: bool,
    /// Whether the journal was replayed.
    recovered: bool,
    findings: Vec<Line>,
    /// How many findings there are of each kind, those that are not listed counted, too.
    counts: BTreeMap<&'static str, u64>,
    /// How many of them are not listed.
    unlisted: u64,
    /// Findings that are left.
    left: u64,
    /// Inodes that no readable leaf has any more, where the tree was built anew.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost_inodes: Option<u64>,
    /// Inodes that got a name in lost+found.
    connected: u64,
    #[serde(skip)]
    refound: Option<Refound>,
    /// What is left has one right answer that loses nothing.
    #[serde(skip)]
    safe: bool,
}

#[derive(Debug, Serialize)]
struct Line {
    kind: &'static str,
    place: String,
    what: String,
    fixed: bool,
}

/// Runs the program with `args`, the first being its name. Returns its exit code, as fsck(8) has
/// them.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = match Arguments::try_parse_from(args) {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print(); // the output is gone, and nothing else can be told
            return if error.use_stderr() { USAGE } else { CLEAN };
        }
    };
    match examine(&arguments) {
        Ok(report) => {
            let text = match (arguments.json, arguments.quiet && report.counts.is_empty()) {
                (true, _) => format!("{}\n", json(&report)),
                (_, true) => String::new(),
                _ => report.text(arguments.verbose, arguments.yes),
            };
            let found = match (report.left, report.counts.is_empty()) {
                (0, true) => CLEAN,
                (0, false) => CORRECTED,
                _ => ERRORS_LEFT,
            };
            match print(format_args!("{text}")) {
                Ok(()) => found,
                Err(error) => {
                    complain(format_args!("fsck.gpunvme: {}: the report could not be written: {error}", arguments.device));
                    found | FAILED
                }
            }
        }
        Err(Failure::Cancelled) => {
            complain(format_args!("fsck.gpunvme: {}: interrupted; what was mended until then stays so", arguments.device));
            CANCELLED
        }
        Err(Failure::Usage(error)) => {
            complain(format_args!("fsck.gpunvme: {error}"));
            USAGE
        }
        Err(Failure::Other(error)) => {
            complain(format_args!("fsck.gpunvme: {}: {error}", arguments.device));
            FAILED
        }
    }
}

/// Why there is no report.
enum Failure {
    /// A signal came.
    Cancelled,
    /// The command line is wrong.
    Usage(String),
    /// Anything else, without the device's name.
    Other(String),
}

impl Failure {
    fn new(device: &str, error: FsError) -> Failure {
        match error {
            FsError::Cancelled => Failure::Cancelled,
            FsError::Corrupt(Corrupt::Superblock(why)) => Failure::Other(why),
            error => Failure::Other(reason(device, &error)),
        }
    }
}

/// Signals within this time are one wish: fsck(8) and timeout(1) send another one after that of the
/// terminal or the session.
const ONE_WISH: Duration = Duration::from_secs(1);

/// What SIGINT and SIGTERM ask for an end, from now on, rather than kill: a change in flight is
/// finished. Where that hangs, at the device or at a pipe without a reader, another signal ends
/// the program as a power cut would.
fn stop_on_signals() -> Stop {
    let stop = Stop::default();
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM]);
    // Before any thread is started, so that all of them leave the signals to the one that waits.
    if signals.thread_block().is_ok() {
        let stop = stop.clone();
        std::thread::spawn(move || {
            let mut asked = None;
            while signals.wait().is_ok() {
                stop.ask();
                if asked.get_or_insert_with(Instant::now).elapsed() >= ONE_WISH {
                    std::process::exit(CANCELLED.into());
                }
            }
        });
    }
    stop
}

/// Checks, and repairs, the volume that the command line names.
fn examine(arguments: &Arguments) -> Result<Report, Failure> {
    let name = &*tag::device_of(&arguments.device).map_err(Failure::Other)?;
    let mut meter = Meter::new(name, arguments.quiet, arguments.progress)
        .map_err(|error| Failure::Usage(format!("-C {}: {error}", arguments.progress.unwrap_or_default())))?;
    let stop = stop_on_signals();
    let asks = std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && !arguments.json;
    let read_only = arguments.no_change || !(arguments.automatic || arguments.yes || asks);
    let mode = if read_only { OpenMode::ReadOnly } else { OpenMode::ReadWrite };
    let device = members::open(name, &arguments.with, mode).map_err(|e| Failure::Other(e.to_string()))?;
    let text = |error: FsError| Failure::new(name, error);
    let io = Io::inline(device).map_err(|error| text(error.into()))?;
    let options = CheckOptions { read_only, memory: (arguments.memory as usize) << 20, now: now(), stop: stop.clone() };
    let mut fsck = Fsck::open(io, options).map_err(text)?;
    let mut findings = fsck.check(&mut |stage, done, of| meter.show(stage, done, of)).map_err(text)?;
    let (unmounted, recovered) = (fsck.was_clean(), !fsck.was_clean() && !read_only);
    let mut left = findings.clone();
    let mut refound = None;
    if findings.total() > 0 && !read_only {
        meter.clear();
        let mut answers = BTreeMap::new();
        if asks && !arguments.automatic && !arguments.yes {
            list(name, &findings, arguments.verbose);
        }
        let counts = findings.counts.clone();
        let mut may = |kind: Kind| match (arguments.yes, arguments.automatic) {
            (true, _) => true,
            (_, true) => kind.is_safe(),
            _ => *answers.entry(kind).or_insert_with(|| ask(kind, counts.get(&kind).copied().unwrap_or(0), &stop)),
        };
        let repaired = fsck.repair(&mut may, &mut |stage, done, of| meter.show(stage, done, of));
        // Where a question was left without an answer, the repair went on as after a no.
        let repaired = match repaired.and_then(|repaired| stop.check().map(|()| repaired)) {
            Ok(repaired) => repaired,
            Err(FsError::Cancelled) => {
                fsck.close(false).map_err(text)?;
                return Err(Failure::Cancelled);
            }
            Err(error) => return Err(text(error)),
        };
        (findings, left, refound) = (repaired.found, repaired.left, repaired.refound);
    }
    meter.clear();
    let report = Report::new(name, &fsck, (unmounted, recovered), findings, &left, refound);
    fsck.close(left.total() == 0).map_err(text)?;
    Ok(report)
}

/// Time between two looks at whether a question is still worth an answer.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Waits for input. Returns whether it came before the end was asked for.
fn comes(input: &Stdin, stop: &Stop) -> bool {
    while !stop.is_asked() {
        match poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&LOOK)) {
            Ok(0) | Err(Errno::INTR) => {}
            // What went wrong, reading tells.
            _ => return true,
        }
    }
    false
}

/// Asks on the terminal whether findings of a kind may be mended.
fn ask(kind: Kind, count: u64, stop: &Stop) -> bool {
    let what = match count {
        0 => format!("{} (came up while mending)", kind.name()),
        1 => format!("{} (1 finding)", kind.name()),
        n => format!("{} ({n} findings)", kind.name()),
    };
    while !stop.is_asked() {
        // A terminal that is gone answers nothing below.
        let _ = print(format_args!("Mend {what}? yes or no: "));
        let (mut answer, input) = (String::new(), std::io::stdin());
        // A terminal gives a line at a time: none waits in the buffer.
        if !comes(&input, stop) || !input.read_line(&mut answer).is_ok_and(|read| read > 0) {
            return false;
        }
        match answer.trim().to_lowercase().as_str() {
            "y" | "yes" => return true,
            "n" | "no" => return false,
            _ => {}
        }
    }
    false
}

fn list(device: &str, findings: &Findings, all: bool) {
    let mut shown: BTreeMap<&str, usize> = BTreeMap::new();
    for finding in &findings.list {
        let shown = shown.entry(finding.kind.name()).or_default();
        *shown += 1;
        if all || *shown <= SHOWN {
            let _ = print(format_args!("{device}: {finding}\n")); // nor does it then
        }
    }
}

impl Report {
    fn new(
        device: &str,
        fsck: &Fsck,
        (unmounted, recovered): (bool, bool),
        findings: Findings,
        left: &Findings,
        refound: Option<Refound>,
    ) -> Report {
        let lost = |findings: &Findings| findings.counts.get(&Kind::Lost).copied().unwrap_or(0);
        let (usage, superblock) = (fsck.volume().usage(), fsck.volume().superblock());
        let still: std::collections::HashSet<_> = left.list.iter().map(|f| (f.kind, f.place)).collect();
        let all_fixed = left.total() == 0;
        let line = |finding: Finding| Line {
            kind: finding.kind.name(),
            place: finding.place.to_string(),
            fixed: all_fixed || !still.contains(&(finding.kind, finding.place)),
            what: finding.what,
        };
        Report {
            device: device.to_owned(),
            label: superblock.names.label.clone(),
            uuid: Uuid::from_bytes(superblock.volume_uuid()),
            inodes: usage.inodes,
            blocks: usage.blocks,
            free_blocks: usage.free,
            unmounted,
            recovered,
            connected: lost(&findings).saturating_sub(lost(left)),
            lost_inodes: refound.map(|refound| refound.of - refound.inodes),
            refound,
            safe: left.counts.keys().all(|kind| kind.is_safe()),
            unlisted: findings.unlisted().values().sum(),
            counts: findings.counts.iter().map(|(kind, count)| (kind.name(), *count)).collect(),
            findings: findings.list.into_iter().map(line).collect(),
            left: left.total(),
        }
    }

    /// For people. All findings, or the first of each kind; `tried`: whether all were to be mended.
    fn text(&self, all: bool, tried: bool) -> String {
        let device = &self.device;
        let mut text = String::new();
        if !self.unmounted {
            let journal = if self.recovered { "was replayed" } else { "is replayed by the next mount, or by fsck.gpunvme -p" };
            text += &format!("{device}: was not unmounted, the journal {journal}\n");
        }
        let mut shown: BTreeMap<&str, u64> = BTreeMap::new();
        for line in &self.findings {
            let shown = shown.entry(line.kind).or_default();
            if all || *shown < SHOWN as u64 {
                *shown += 1;
                let fixed = if line.fixed { " (mended)" } else { "" };
                text += &format!("{device}: {}: {}{fixed}\n", line.place, line.what);
            }
        }
        for (kind, count) in &self.counts {
            let hidden = count - shown.get(kind).copied().unwrap_or(0).min(*count);
            if hidden > 0 {
                text += &format!("{device}: {hidden} more of kind {kind}\n");
            }
        }
        let total: u64 = self.counts.values().sum();
        let them = if self.left == 1 { "it" } else { "them" };
        let advice = if tried {
            "they cannot be mended: copy away what can be read, and format the volume anew".to_owned()
        } else if self.safe {
            format!("fsck.gpunvme -p mends {them}, and nothing is lost by that")
        } else {
            format!("fsck.gpunvme -y mends {them}; copy the device first, for what cannot be read is given up")
        };
        let verdict = match (total, self.left) {
            (0, _) => "clean".to_owned(),
            (1, 0) => "1 error mended".to_owned(),
            (n, 0) => format!("{n} errors mended"),
            (1, _) => "1 error, left as it is".to_owned(),
            (n, left) if left >= n => format!("{left} errors, left as they are"),
            (n, left) => format!("{} errors mended, {left} left", n - left),
        };
        if let Some(refound) = self.refound.filter(|refound| refound.inodes < refound.of) {
            let lost = refound.of - refound.inodes;
            text += &format!("{device}: {lost} of {} inodes could not be found again\n", refound.of);
        }
        match self.connected {
            0 => {}
            1 => text += &format!("{device}: 1 inode had no name any more; it is in /lost+found\n"),
            n => text += &format!("{device}: {n} inodes had no name any more; they are in /lost+found\n"),
        }
        let used = self.blocks - self.free_blocks;
        let inodes = if self.inodes == 1 { "1 inode".to_owned() } else { format!("{} inodes", self.inodes) };
        text += &match self.left > 0 && self.counts.contains_key(Kind::State.name()) {
            true => format!("{device}: {verdict}; how much is in use is not known before that is mended\n"),
            false => format!("{device}: {verdict}, {inodes}, {used}/{} blocks\n", self.blocks),
        };
        if self.left > 0 {
            text += &format!("{device}: {advice}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(count: u64, left: u64) -> Report {
        Report {
            device: "disk.img".to_owned(),
            label: String::new(),
            uuid: Uuid::nil(),
            inodes: 7,
            blocks: 14336,
            free_blocks: 13336,
            unmounted: true,
            recovered: false,
            findings: Vec::new(),
            counts: BTreeMap::from([("node", count)]),
            unlisted: count,
            left,
            lost_inodes: None,
            connected: 0,
            refound: None,
            safe: false,
        }
    }

    #[test]
    fn the_summary_says_what_was_lost() {
        let refound = Some(Refound { of: 7, inodes: 1 });
        assert_eq!(
            Report { connected: 1, refound, ..report(0, 0) }.text(false, true),
            "disk.img: 6 of 7 inodes could not be found again\n\
             disk.img: 1 inode had no name any more; it is in /lost+found\n\
             disk.img: clean, 7 inodes, 1000/14336 blocks\n"
        );
        let all = Some(Refound { of: 7, inodes: 7 });
        assert_eq!(
            Report { connected: 2, refound: all, ..report(0, 0) }.text(false, true),
            "disk.img: 2 inodes had no name any more; they are in /lost+found\n\
             disk.img: clean, 7 inodes, 1000/14336 blocks\n"
        );
    }

    #[test]
    fn what_cannot_be_told_is_not_told_as_zero() {
        let lost = Report { inodes: 0, counts: BTreeMap::from([("state", 1)]), ..report(1, 1) };
        let text = lost.text(false, false);
        assert!(text.contains("1 error, left as it is; how much is in use is not known before that is mended\n"), "{text}");
        assert!(Report { left: 0, ..lost }.text(false, true).contains(" 0 inodes, 1000/14336 blocks\n"));
    }

    #[test]
    fn what_is_left_has_a_next_step() {
        let last = |report: Report, tried| report.text(false, tried).lines().last().map(str::to_owned);
        let step = |text: &str| Some(format!("disk.img: {text}"));
        assert_eq!(
            last(report(2, 2), false),
            step("fsck.gpunvme -y mends them; copy the device first, for what cannot be read is given up")
        );
        assert_eq!(
            last(Report { safe: true, ..report(1, 1) }, false),
            step("fsck.gpunvme -p mends it, and nothing is lost by that")
        );
        assert_eq!(
            last(report(2, 1), true),
            step("they cannot be mended: copy away what can be read, and format the volume anew")
        );
    }
}
