//! Times of single operations, and the memory of a process.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::peak_memory;
use rustix::process::Pid;

/// Microseconds of single operations of one kind.
#[derive(Default)]
pub struct Sample(Vec<f64>);

impl Sample {
    /// Times an operation.
    pub fn time<T>(&mut self, operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let start = Instant::now();
        let result = operation()?;
        self.0.push(start.elapsed().as_secs_f64() * 1e6);
        Ok(result)
    }

    /// The median: what other work on the machine changes least.
    pub fn median(&mut self) -> Option<f64> {
        self.0.sort_by(f64::total_cmp);
        self.0.get(self.0.len() / 2).copied()
    }
}

/// Has the kernel forget what it knows of names and inodes.
pub fn drop_caches() -> io::Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "2")
}

/// Bytes as MiB.
pub fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Runs a command to its end. Returns its time in seconds, and the most memory that it had, in MiB.
pub fn run(command: &mut Command) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let start = Instant::now();
    // A pipe without a reader would stop it once it is full.
    let mut said = tempfile::tempfile()?;
    let mut child = command.stdout(Stdio::null()).stderr(said.try_clone()?).spawn()?;
    let mut memory = 0;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        memory = peak_memory(Pid::from_child(&child)).unwrap_or(memory);
        std::thread::sleep(Duration::from_millis(2));
    };
    let time = start.elapsed().as_secs_f64();
    if status.success() {
        Ok((time, mebibytes(memory)))
    } else {
        let mut text = Vec::new();
        said.seek(SeekFrom::Start(0))?;
        said.read_to_end(&mut text)?;
        Err(format!("{command:?}: {status}: {}", String::from_utf8_lossy(&text)).into())
    }
}

/// Runs a command of the shell in a folder, and returns its time in seconds.
pub fn shell(folder: &Path, script: &str, variables: &[(&str, &Path)]) -> Result<f64, Box<dyn std::error::Error>> {
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(folder).envs(variables.iter().copied());
    Ok(run(&mut command)?.0)
}

/// Memory that O_DIRECT can use.
pub struct Aligned {
    memory: Vec<u8>,
    len: usize,
}

impl Aligned {
    /// So many bytes, at a multiple of them.
    pub fn new(len: usize) -> Self {
        Self { memory: vec![1; 2 * len], len }
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        let start = self.memory.as_ptr().align_offset(self.len);
        &mut self.memory[start..start + self.len]
    }
}
