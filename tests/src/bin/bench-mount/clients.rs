//! Clients: this program once more for each of them, all told to begin at the same moment.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use gpunvme_tests::random::Random;
use gpunvme_tests::tree;
use serde::{Deserialize, Serialize};

/// Memory for O_DIRECT begins at a multiple of this many bytes.
const PAGE: usize = 4096;
/// Bytes of a request of a stream.
const BLOCK: usize = 1 << 20;
/// Bytes of an append.
const APPEND: usize = 200;
/// Files of a folder of the data set.
const FILES_PER_FOLDER: usize = 1000;

/// What clients do. They share the files of a data set and the names out among themselves.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub enum Work {
    /// Makes the files of a data set.
    WriteFiles { files: usize, len: usize },
    /// Opens, asks for the length of, reads and closes the files, in an order of each client's own.
    ReadFiles { files: usize, len: usize },
    /// Makes names, in a folder of each client's own.
    Create { names: usize },
    /// Asks for the attributes of names.
    Stat { names: usize },
    /// Gives names other names.
    Rename { names: usize },
    /// Removes names that were renamed.
    Unlink { names: usize },
    /// Appends to a file of each client's own, and makes each append durable.
    Append { time: Duration },
    /// Writes a file in order, and makes it durable.
    WriteStream { len: u64, direct: bool },
    /// Reads it in order.
    ReadStream { len: u64, direct: bool },
}

/// The work of one client.
#[derive(Clone, Serialize, Deserialize)]
pub struct Task {
    work: Work,
    folder: PathBuf,
    client: usize,
    clients: usize,
}

impl FromStr for Task {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(text)
    }
}

/// Operations (files, names, appends, or bytes of a stream) a second that so many clients get done
/// together in a folder.
pub fn rate(work: Work, folder: &Path, clients: usize) -> Result<f64, Box<dyn Error>> {
    let mut children = Vec::new();
    for client in 0..clients {
        let task = serde_json::to_string(&Task { work, folder: folder.into(), client, clients })?;
        let mut command = Command::new(std::env::current_exe()?);
        let mut child = command.arg("--client").arg(task).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut output = BufReader::new(child.stdout.take().ok_or("a pipe")?);
        output.read_line(&mut String::new())?;
        children.push((child, output));
    }
    let start = Instant::now();
    for (child, _) in &mut children {
        drop(child.stdin.take());
    }
    let mut done = 0;
    for (_, output) in &mut children {
        let mut line = String::new();
        output.read_line(&mut line)?;
        done += line.trim().parse::<u64>().map_err(|_| "a client failed")?;
    }
    let seconds = start.elapsed().as_secs_f64();
    for (mut child, _) in children {
        child.wait()?;
    }
    Ok(done as f64 / seconds)
}

impl Task {
    /// Says that it is ready, works once its input ends, and says how much it did.
    pub fn serve(&self) -> io::Result<()> {
        let mut order: Vec<usize> = (self.client..self.count()).step_by(self.clients).collect();
        if matches!(self.work, Work::ReadFiles { .. }) {
            let mut random = Random(self.client as u64 + 1);
            (1..order.len()).rev().for_each(|last| order.swap(last, random.below(last as u64 + 1) as usize));
        }
        println!("ready");
        io::stdin().read_to_end(&mut Vec::new())?;
        println!("{}", self.go(&order)?);
        Ok(())
    }

    /// Files or names of all clients.
    fn count(&self) -> usize {
        match self.work {
            Work::WriteFiles { files, .. } | Work::ReadFiles { files, .. } => files,
            Work::Create { names } | Work::Stat { names } | Work::Rename { names } | Work::Unlink { names } => names,
            Work::Append { .. } | Work::WriteStream { .. } | Work::ReadStream { .. } => 0,
        }
    }

    fn go(&self, order: &[usize]) -> io::Result<u64> {
        let each = |operation: &dyn Fn(usize) -> io::Result<()>| {
            order.iter().try_for_each(|&number| operation(number)).map(|()| order.len() as u64)
        };
        let name = |number: usize| self.folder.join(format!("client {}", self.client)).join(format!("name {number}"));
        let moved = |number: usize| name(number).with_extension("moved");
        match self.work {
            Work::WriteFiles { len, .. } => {
                let data = tree::pattern(self.client as u64, len);
                each(&|number| File::create_new(self.file(number))?.write_all(&data))
            }
            Work::ReadFiles { len, .. } => self.read_files(order, len),
            Work::Create { .. } => {
                fs::create_dir(self.folder.join(format!("client {}", self.client)))?;
                each(&|number| File::create_new(name(number)).map(drop))
            }
            Work::Stat { .. } => each(&|number| Ok(rustix::fs::lstat(name(number)).map(drop)?)),
            Work::Rename { .. } => each(&|number| fs::rename(name(number), moved(number))),
            Work::Unlink { .. } => {
                let done = each(&|number| fs::remove_file(moved(number)))?;
                fs::remove_dir(self.folder.join(format!("client {}", self.client)))?;
                Ok(done)
            }
            Work::Append { time } => self.append(time),
            Work::WriteStream { len, direct } => {
                let file = self.stream(OpenOptions::new().write(true).create(true).truncate(true), direct)?;
                blocks(len, |memory| (&file).write_all(memory))?;
                file.sync_data().map(|()| len)
            }
            Work::ReadStream { len, direct } => {
                let file = self.stream(OpenOptions::new().read(true), direct)?;
                blocks(len, |memory| (&file).read_exact(memory)).map(|()| len)
            }
        }
    }

    /// A file of the data set.
    fn file(&self, number: usize) -> PathBuf {
        self.folder.join(format!("part {}", number / FILES_PER_FOLDER)).join(format!("sample {number}"))
    }

    fn read_files(&self, order: &[usize], len: usize) -> io::Result<u64> {
        let mut memory = vec![0; len];
        for &number in order {
            let mut file = File::open(self.file(number))?;
            // As Python's open() does; Rust's library would ask for the time of birth as well.
            if rustix::fs::fstat(&file)?.st_size != len as i64 {
                return Err(io::Error::other(format!("{} is not {len} bytes long", self.file(number).display())));
            }
            file.read_exact(&mut memory)?;
        }
        Ok(order.len() as u64)
    }

    fn append(&self, time: Duration) -> io::Result<u64> {
        let path = self.folder.join(format!("log {}", self.client));
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        let start = Instant::now();
        let mut done = 0;
        while start.elapsed() < time {
            file.write_all(&[7; APPEND])?;
            file.sync_all()?;
            done += 1;
        }
        Ok(done)
    }

    fn stream(&self, options: &mut OpenOptions, direct: bool) -> io::Result<File> {
        options.custom_flags(if direct { libc::O_DIRECT } else { 0 }).open(self.folder.join("stream"))
    }
}

/// Makes the folders of a data set.
pub fn make_folders(folder: &Path, files: usize) -> io::Result<()> {
    (0..files.div_ceil(FILES_PER_FOLDER)).try_for_each(|part| fs::create_dir_all(folder.join(format!("part {part}"))))
}

/// Does something with one block of memory for each of a stream.
fn blocks(len: u64, mut operation: impl FnMut(&mut [u8]) -> io::Result<()>) -> io::Result<()> {
    let mut memory = tree::pattern(1, BLOCK + PAGE);
    let start = memory.as_ptr().align_offset(PAGE);
    (0..len / BLOCK as u64).try_for_each(|_| operation(&mut memory[start..start + BLOCK]))
}
