//! Measurements of one subject.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use clap::ValueEnum;
use gpunvme_tests::{bare, mounted::text, programs};
use serde::Deserialize;

use crate::backing::Backing;
use crate::{Arguments, Work};

/// A column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Subject {
    Gpunvme,
    Bare,
    /// cuFileRead and cuFileWrite of our libcufile
    OurCuFile,
    /// Batches of our libcufile
    OurBatch,
    CuFile,
    Batch,
    Pinned,
    Pageable,
    /// A file in the page cache that was prepared, by our library
    Hot,
    /// A file in the page cache, read by our library once, from beginning to end
    HotFirst,
    /// A file in the page cache, read into pinned memory
    PinnedHot,
}

/// How long our program compares what it moves.
const VERIFY: Duration = Duration::from_millis(50);

/// What `gpu-mover` and the peers print.
#[derive(Deserialize)]
struct Printed {
    bytes: u64,
    seconds: f64,
}

impl Subject {
    /// In the order of their columns.
    pub const ALL: [Subject; 11] = [
        Subject::Gpunvme,
        Subject::Bare,
        Subject::OurCuFile,
        Subject::OurBatch,
        Subject::CuFile,
        Subject::Batch,
        Subject::Pinned,
        Subject::Pageable,
        Subject::Hot,
        Subject::HotFirst,
        Subject::PinnedHot,
    ];
    /// Those that are measured only when they are named: they have a file of their own brought into
    /// the page cache.
    pub const NAMED: [Subject; 3] = [Subject::Hot, Subject::HotFirst, Subject::PinnedHot];
    /// Those that a user could pick and that move the same bytes: without the page cache.
    pub const DIRECT: [Subject; 3] = [Subject::CuFile, Subject::Batch, Subject::Pinned];

    /// The head of its column.
    pub fn name(self) -> &'static str {
        match self {
            Subject::Gpunvme => "gpunvme",
            Subject::Bare => "device",
            Subject::OurCuFile => "our cuFile",
            Subject::OurBatch => "our batch",
            Subject::CuFile => "cuFile",
            Subject::Batch => "batch",
            Subject::Pinned => "pinned",
            Subject::Pageable => "pageable",
            Subject::Hot => "hot",
            Subject::HotFirst => "hot, first",
            Subject::PinnedHot => "pinned, hot",
        }
    }

    /// Whether it is measured with this work.
    pub fn can(self, work: &Work) -> bool {
        match self {
            // Batches are for small operations, and take 128 at the most.
            Subject::OurBatch | Subject::Batch => work.random && work.depth <= 128,
            Subject::Hot | Subject::PinnedHot => !work.write,
            Subject::HotFirst => !work.write && !work.random,
            _ => true,
        }
    }

    /// Whether each thread has one operation in flight, whatever the depth.
    pub fn is_one_at_a_time(self) -> bool {
        matches!(self, Subject::OurCuFile | Subject::CuFile | Subject::Pageable)
    }

    /// What the program of the peers calls it, and whether it is served by our libcufile.
    fn method(self) -> (&'static str, bool) {
        match self {
            Subject::OurCuFile => ("cufile", true),
            Subject::OurBatch => ("cufile-batch", true),
            Subject::CuFile => ("cufile", false),
            Subject::Batch => ("cufile-batch", false),
            Subject::Pinned => ("pinned", false),
            Subject::Pageable => ("pageable", false),
            Subject::PinnedHot => ("pinned-hot", false),
            Subject::Gpunvme | Subject::Bare | Subject::Hot | Subject::HotFirst => unreachable!("no peer"),
        }
    }
}

/// A subject that is ready for a piece of work.
pub enum Session<'a> {
    /// Each measurement stands alone.
    Alone { subject: Subject, work: &'a Work, backing: &'a Backing, arguments: &'a Arguments, time: Duration },
    /// The program of the peers, which is set up once, and measures when it is told to.
    Peers(Peers),
}

/// A running program of the peers.
pub struct Peers {
    child: Child,
    turns: ChildStdin,
    printed: BufReader<ChildStdout>,
    size: u64,
}

impl<'a> Session<'a> {
    /// Gets ready for measurements of this time each.
    pub fn begin(
        subject: Subject,
        work: &'a Work,
        backing: &'a Backing,
        arguments: &'a Arguments,
        time: Duration,
    ) -> Result<Session<'a>, Box<dyn Error>> {
        if matches!(subject, Subject::Gpunvme | Subject::Bare | Subject::Hot | Subject::HotFirst) {
            return Ok(Session::Alone { subject, work, backing, arguments, time });
        }
        let (method, ours) = subject.method();
        let mut peers = Command::new(&arguments.peers);
        peers.args(["--method", method]);
        if ours {
            // The same program: the library loaded first is the one that answers.
            peers.env("LD_PRELOAD", programs::path("libgpunvme_cufile.so")).env("GPUNVME_CUFILE_REAL", "off");
        }
        describe(&mut peers, if ours { &backing.gpunvme } else { &backing.peers }, work, arguments);
        peers.args(["--seconds", &time.as_secs_f64().to_string()]);
        let mut child = peers.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let (turns, printed) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        Ok(Session::Peers(Peers { child, turns, printed: BufReader::new(printed), size: work.size }))
    }

    /// Operations a second.
    pub fn measure(&mut self) -> Result<f64, Box<dyn Error>> {
        match self {
            Session::Alone { subject: Subject::Bare, work, backing, time, .. } => {
                let Work { write, size, random, threads, depth } = **work;
                bare::measure(&[&backing.bare], &bare::Work { write, size, random, threads, depth, len: None }, *time)
            }
            Session::Alone { subject, work, backing, arguments, time } => {
                let (file, caching) = match subject {
                    Subject::Hot => (&backing.hot, "prepared"),
                    Subject::HotFirst => (&backing.hot, "resident"),
                    _ => (&backing.gpunvme, "never"),
                };
                let moved = |time: Option<Duration>, verify: bool| {
                    let mut mover = programs::command("gpu-mover");
                    describe(&mut mover, file, work, arguments);
                    mover.args(["--caching", caching]);
                    match time {
                        Some(time) => mover.args(["--seconds", &time.as_secs_f64().to_string()]),
                        None => mover.args(["--passes", "1"]),
                    };
                    mover.args(verify.then_some("--verify"));
                    rate(&mut mover, work)
                };
                let rate = moved((*subject != Subject::HotFirst).then_some(*time), false)?;
                // The peers compare some operations at the end, our program all of a run that is
                // made for it.
                moved(Some(VERIFY), true)?;
                Ok(rate)
            }
            Session::Peers(peers) => peers.measure(),
        }
    }

    /// Ends it, once what it moved is compared.
    pub fn end(self) -> Result<(), Box<dyn Error>> {
        match self {
            Session::Alone { .. } => Ok(()),
            Session::Peers(peers) => peers.end(),
        }
    }
}

impl Peers {
    fn measure(&mut self) -> Result<f64, Box<dyn Error>> {
        let mut line = String::new();
        // Where it has ended, its end says why.
        let _ = self.turns.write_all(b"\n");
        if self.printed.read_line(&mut line)? == 0 {
            return Err("it ended early".into());
        }
        Ok(serde_json::from_str::<Printed>(&line)?.rate(self.size))
    }

    fn end(self) -> Result<(), Box<dyn Error>> {
        let Peers { mut child, turns, .. } = self;
        drop(turns);
        let mut said = String::new();
        child.stderr.take().expect("a pipe").read_to_string(&mut said)?;
        let status = child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("{status}: {said}").into()) }
    }
}

/// The arguments that all programs take.
fn describe(command: &mut Command, file: &Path, work: &Work, arguments: &Arguments) {
    command.arg("--file").arg(file).args(["--gpu", &arguments.gpu.to_string()]);
    command.args(["--size", &work.size.to_string(), "--pattern", if work.random { "random" } else { "sequential" }]);
    command.args(["--depth", &work.depth.to_string(), "--threads", &work.threads.to_string()]);
    if work.write {
        command.arg("--write");
    }
}

/// Runs `gpu-mover`: operations a second.
fn rate(mover: &mut Command, work: &Work) -> Result<f64, Box<dyn Error>> {
    let output = mover.output()?;
    if !output.status.success() {
        return Err(text(&output).into());
    }
    Ok(serde_json::from_slice::<Printed>(&output.stdout)?.rate(work.size))
}

impl Printed {
    /// Operations a second.
    fn rate(&self, size: u64) -> f64 {
        self.bytes as f64 / size as f64 / self.seconds
    }
}
