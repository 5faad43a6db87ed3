//! One measurement of one subject.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use gpunvme_tests::{mounted::text, programs};
use serde::Deserialize;

use crate::backing::Backing;
use crate::{Arguments, Work, bare};

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
    pub const ALL: [Subject; 8] = [
        Subject::Gpunvme,
        Subject::Bare,
        Subject::OurCuFile,
        Subject::OurBatch,
        Subject::CuFile,
        Subject::Batch,
        Subject::Pinned,
        Subject::Pageable,
    ];
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
        }
    }

    /// Whether it is measured with this work.
    pub fn can(self, work: &Work) -> bool {
        // Batches are for small operations, and take 128 at the most.
        !matches!(self, Subject::OurBatch | Subject::Batch) || (work.random && work.depth <= 128)
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
            Subject::Gpunvme | Subject::Bare => unreachable!("no peer"),
        }
    }
}

/// Operations a second.
pub fn measure(subject: Subject, work: &Work, backing: &Backing, arguments: &Arguments, time: Duration) -> Result<f64, String> {
    let measured = match subject {
        Subject::Bare => bare::measure(&backing.bare, work, time),
        Subject::Gpunvme => {
            child(&mut programs::command("gpu-mover"), &backing.gpunvme, work, arguments, time).and_then(|rate| {
                // The peers compare some operations after their time is up, our program all of a
                // run that is made for it.
                let mut verify = programs::command("gpu-mover");
                child(verify.arg("--verify"), &backing.gpunvme, work, arguments, VERIFY)?;
                Ok(rate)
            })
        }
        _ => {
            let (method, ours) = subject.method();
            let mut peers = Command::new(&arguments.peers);
            peers.args(["--method", method]);
            if ours {
                // The same program: the library loaded first is the one that answers.
                peers.env("LD_PRELOAD", programs::path("libgpunvme_cufile.so")).env("GPUNVME_CUFILE_REAL", "off");
            }
            child(&mut peers, if ours { &backing.gpunvme } else { &backing.peers }, work, arguments, time)
        }
    };
    measured.map_err(|error| error.to_string())
}

fn child(command: &mut Command, file: &Path, work: &Work, arguments: &Arguments, time: Duration) -> Result<f64, Box<dyn Error>> {
    command.arg("--file").arg(file).args(["--gpu", &arguments.gpu.to_string()]);
    command.args(["--size", &work.size.to_string(), "--pattern", if work.random { "random" } else { "sequential" }]);
    command.args(["--depth", &work.depth.to_string(), "--threads", &work.threads.to_string()]);
    command.args(["--seconds", &time.as_secs_f64().to_string()]);
    if work.write {
        command.arg("--write");
    }
    let output = command.output()?;
    if !output.status.success() {
        return Err(text(&output).into());
    }
    let printed: Printed = serde_json::from_slice(&output.stdout)?;
    Ok(printed.bytes as f64 / work.size as f64 / printed.seconds)
}
