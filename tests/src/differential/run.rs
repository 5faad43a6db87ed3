//! Carries a sequence out on both sides, and compares the results.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::call::{Outcome, Step};
use super::facts::Clock;
use super::pair::Pair;
use super::process::{IDENTITIES, Side};
use super::trees;

/// How long a call may take: far more than any does, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the two did not agree on.
#[derive(Clone, Debug)]
pub struct Disagreement {
    /// The step; behind the last where it was seen at the end.
    pub step: usize,
    /// What kind of disagreement: those of one kind have one cause, mostly.
    pub kind: String,
    /// The result on ext4.
    pub ext4: String,
    /// And on gpunvme.
    pub gpunvme: String,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n    ext4:    {}\n    gpunvme: {}", self.kind, self.ext4, self.gpunvme)
    }
}

/// The programs and what they share.
#[derive(Clone, Debug)]
pub struct Runner {
    /// The program that makes calls: [`super::process::serve`].
    pub program: PathBuf,
    /// Kinds of disagreement that were found before, and are passed over.
    pub known: BTreeSet<String>,
}

/// A process of one side.
struct Process {
    child: Child,
    calls: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Process {
    fn start(program: &Path, root: &Path, side: Side, identity: usize, clock: Clock) -> Self {
        let mut child = Command::new(program)
            .arg(root)
            .args([format!("{side:?}"), identity.to_string(), clock.0.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let (calls, answers) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        Self { child, calls, answers: BufReader::new(answers) }
    }

    fn ask(&mut self, line: &str) -> Result<(), String> {
        self.calls.write_all(line.as_bytes()).map_err(|error| format!("the process is gone: {error}"))
    }

    fn answer(&mut self) -> Result<Outcome, String> {
        let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        let mut poll = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
        if rustix::event::poll(&mut poll, Some(&patience)).expect("poll") == 0 {
            return Err(format!("no answer in {PATIENCE:?}"));
        }
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|error| error.to_string())?;
        serde_json::from_str(&line).map_err(|_| format!("the process ended: {:?}", self.child.wait()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It holds the folder; what it was doing no longer matters.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SIDES: [Side; 2] = [Side::Ext4, Side::Gpunvme];

impl Runner {
    /// Carries `steps` out in fresh folders; what they agree on to the last, the trees included, is
    /// `Ok`. With `remount` also what is there after a remount, and that fsck.gpunvme finds
    /// nothing.
    ///
    /// # Errors
    /// The first disagreement.
    pub fn run(&self, pair: &mut Pair, steps: &[Step], remount: bool) -> Result<(), Disagreement> {
        pair.start_afresh();
        let clock = Clock::start();
        let mut processes: [Vec<Option<Process>>; 2] = SIDES.map(|_| IDENTITIES.iter().map(|_| None).collect());
        for (number, step) in steps.iter().enumerate() {
            let line = serde_json::to_string(step).expect("a step") + "\n";
            let mut asked = Vec::new();
            for (side, processes) in SIDES.into_iter().zip(&mut processes) {
                let process = processes[step.process]
                    .get_or_insert_with(|| Process::start(&self.program, &pair.folder(side), side, step.process, clock));
                asked.push((process.ask(&line), process));
            }
            let mut outcomes = asked.into_iter().map(|(asked, process)| asked.and_then(|()| process.answer()));
            let (ext4, gpunvme) = (outcomes.next().expect("two"), outcomes.next().expect("two"));
            let gone = ext4.is_err() || gpunvme.is_err();
            match compare(number, step, ext4, gpunvme) {
                Err(found) if !self.known.contains(&found.kind) => return Err(found),
                // Without one of the two processes all that follows would differ.
                Err(_) if gone => return Ok(()),
                _ => {}
            }
        }
        self.compare_trees(pair, steps.len(), clock, "at the end")?;
        if remount {
            drop(processes);
            pair.remount().map_err(|text| Disagreement {
                step: steps.len(),
                kind: "unmount, fsck.gpunvme, mount".to_owned(),
                ext4: "well".to_owned(),
                gpunvme: text,
            })?;
            self.compare_trees(pair, steps.len(), clock, "after a remount")?;
        }
        Ok(())
    }

    fn compare_trees(&self, pair: &Pair, step: usize, clock: Clock, when: &str) -> Result<(), Disagreement> {
        let disagreement =
            |kind: String, ext4: String, gpunvme: String| Disagreement { step, kind: format!("{kind} {when}"), ext4, gpunvme };
        let [ext4, gpunvme] = SIDES.map(|side| trees::read(&pair.folder(side), clock));
        match (ext4, gpunvme) {
            (Ok(ext4), Ok(gpunvme)) => {
                match trees::difference(&ext4, &gpunvme, |what| !self.known.contains(&format!("{what} {when}"))) {
                    None => Ok(()),
                    Some((path, what, ext4, gpunvme)) => {
                        Err(disagreement(what, format!("{path}: {ext4}"), format!("{path}: {gpunvme}")))
                    }
                }
            }
            (ext4, gpunvme) => {
                let text = |tree: std::io::Result<_>| tree.map_or_else(|error| error.to_string(), |_| "can be read".to_owned());
                Err(disagreement("the tree cannot be read".to_owned(), text(ext4), text(gpunvme)))
            }
        }
    }
}

fn compare(
    number: usize,
    step: &Step,
    ext4: Result<Outcome, String>,
    gpunvme: Result<Outcome, String>,
) -> Result<(), Disagreement> {
    let text = |outcome: &Result<Outcome, String>| outcome.as_ref().map_or_else(Clone::clone, ToString::to_string);
    let (said_ext4, said_gpunvme) = (text(&ext4), text(&gpunvme));
    let what = match (&ext4, &gpunvme) {
        (Ok(ext4), Ok(gpunvme)) => match ext4.difference(gpunvme) {
            None => return Ok(()),
            Some(what) if what == "result" => format!("result {} instead of {}", word(gpunvme.value), word(ext4.value)),
            Some(what) => what,
        },
        _ => "no answer".to_owned(),
    };
    let kind = format!("{}: {what}", step.call.kind());
    Err(Disagreement { step: number, kind, ext4: said_ext4, gpunvme: said_gpunvme })
}

/// What a call returned, as far as it names a kind.
fn word(value: i64) -> String {
    if value < 0 { rustix::io::Errno::from_raw_os_error(-value as i32).to_string() } else { "success".to_owned() }
}
