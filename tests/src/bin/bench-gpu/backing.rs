//! The files that are measured: for each subject one of the same length on the same kind of
//! backing, and everything taken down again.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::text;
use gpunvme_tests::programs;
use tempfile::TempDir;

/// Room for metadata and journals beside the file.
const SPARE: u64 = 512 << 20;

/// How long a daemon may take to end after its volume was unmounted.
const LETTING_GO: Duration = Duration::from_secs(20);

/// What lies below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Loop devices over a tmpfs
    Memory,
    /// Files on the machine's disk
    Disk,
}

impl Kind {
    /// For titles.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Memory => "loop devices over a tmpfs",
            Kind::Disk => "the machine's disk",
        }
    }
}

/// Where each subject finds its file. Dropping it unmounts and removes everything. Fields are
/// dropped in this order.
pub struct Backing {
    /// On the gpunvme volume.
    pub gpunvme: PathBuf,
    /// There as well, and in the page cache, if it is wanted.
    pub hot: PathBuf,
    /// On ext4.
    pub peers: PathBuf,
    /// A block device, or a file, that nothing is mounted on.
    pub bare: PathBuf,
    _volume: Volume,
    _known: Vec<Known>,
    _mounts: Vec<Mount>,
    _loops: Vec<Loop>,
    _tmpfs: Option<Mount>,
    _scratch: TempDir,
}

impl Backing {
    /// Makes everything, and files of `len` bytes with random content; where `is_hot`, those that
    /// are read through the page cache too.
    pub fn set_up(kind: Kind, len: u64, is_hot: bool) -> Result<Backing, Box<dyn Error>> {
        let scratch = gpunvme_tests::scratch_dir();
        let (mut loops, mut mounts, mut tmpfs) = (Vec::new(), Vec::new(), None);
        let (image, peers, bare);
        let room = if is_hot { 2 * len } else { len } + SPARE;
        match kind {
            Kind::Memory => {
                let folder = scratch.path().join("tmpfs");
                tmpfs = Some(Mount::new(&folder, &["-t", "tmpfs", "-o", "size=90%", "tmpfs"])?);
                let mut device = |name: &str, room: u64| -> Result<PathBuf, Box<dyn Error>> {
                    let file = folder.join(name);
                    write_whole(&file, room, false)?;
                    loops.push(Loop::new(&file)?);
                    Ok(loops.last().expect("one was pushed").0.clone())
                };
                image = device("gpunvme", room)?;
                bare = device("bare", len + SPARE)?;
                let ext4 = device("ext4", len + SPARE)?;
                run(Command::new("mkfs.ext4")
                    .args(["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"])
                    .arg(&ext4))?;
                let root = scratch.path().join("ext4");
                mounts.push(Mount::new(&root, &[ext4.to_str().ok_or("a path that is not UTF-8")?])?);
                peers = root.join("file");
            }
            Kind::Disk => {
                image = scratch.path().join("gpunvme");
                bare = scratch.path().join("bare");
                peers = scratch.path().join("file");
                write_whole(&image, room, false)?;
                write_whole(&bare, len, true)?;
            }
        }
        write_whole(&peers, len, true)?;
        let known = Known::tell(&peers)?;
        let root = scratch.path().join("gpunvme.mnt");
        fs::create_dir(&root)?;
        run(programs::command("mkfs.gpunvme").args(["--quiet", "--force"]).arg(&image))?;
        let (gpunvme, hot) = (root.join("file"), root.join("hot"));
        {
            let _volume = Volume::mount(&image, &root)?;
            write_whole(&gpunvme, len, true)?;
            if is_hot {
                write_whole(&hot, len, true)?;
            }
        }
        // Mounted anew, nothing of the file is in the kernel's page cache, as of a file that was
        // copied there some time ago.
        let volume = Volume::mount(&image, &root)?;
        if is_hot {
            for file in [&hot, &peers] {
                io::copy(&mut File::open(file)?, &mut io::sink())?;
            }
        }
        Ok(Backing {
            gpunvme,
            hot,
            peers,
            bare,
            _volume: volume,
            _known: known,
            _mounts: mounts,
            _loops: loops,
            _tmpfs: tmpfs,
            _scratch: scratch,
        })
    }
}

/// Writes a file from end to end, with bytes that nothing can compress, or with zeros, so that its
/// blocks are all there.
fn write_whole(path: &Path, len: u64, random: bool) -> Result<(), Box<dyn Error>> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    let mut piece = vec![0u8; 4 << 20];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut left = len;
    while left > 0 {
        if random {
            for word in piece.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_le_bytes());
            }
        }
        let step = left.min(piece.len() as u64);
        file.write_all(&piece[..step as usize])?;
        left -= step;
    }
    Ok(file.sync_all()?)
}

/// A loop device with direct I/O below it.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Result<Loop, Box<dyn Error>> {
        // A tmpfs takes no direct I/O before Linux 6.6, and a loop device then does without.
        let device = run(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(file))
            .or_else(|_| run(Command::new("losetup").args(["--find", "--show"]).arg(file)))?;
        Ok(Loop(device.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// A filesystem that the kernel mounted.
struct Mount(PathBuf);

impl Mount {
    fn new(root: &Path, arguments: &[&str]) -> Result<Mount, Box<dyn Error>> {
        fs::create_dir(root)?;
        run(Command::new("mount").args(arguments).arg(root))?;
        Ok(Mount(root.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A loop device on it may take a moment to go.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A gpunvme volume.
struct Volume {
    root: PathBuf,
}

impl Volume {
    fn mount(device: &Path, root: &Path) -> Result<Volume, Box<dyn Error>> {
        let mut mount = programs::command("mount.gpunvme");
        mount.arg(device).arg(root);
        // The daemon before may still be letting go of the device.
        let start = Instant::now();
        while let Err(error) = run(&mut mount) {
            if start.elapsed() > LETTING_GO {
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(Volume { root: root.to_owned() })
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.root).status();
    }
}

/// What cuFile reads of a block device in udev's records, where no udev runs: without it, it
/// refuses the file.
struct Known(PathBuf);

impl Known {
    fn tell(file: &Path) -> Result<Vec<Known>, Box<dyn Error>> {
        let device = fs::metadata(file)?.dev();
        let record = format!("/run/udev/data/b{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let mut told = Vec::new();
        fs::create_dir_all("/run/udev/data")?;
        for (path, content) in [(record.as_str(), "E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n"), ("/run/udev/control", "")] {
            if !Path::new(path).exists() {
                fs::write(path, content)?;
                told.push(Known(path.into()));
            }
        }
        Ok(told)
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn run(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let output = command.output()?;
    if output.status.success() {
        Ok(String::from_utf8(output.stdout)?)
    } else {
        Err(format!("{}: {}", command.get_program().to_string_lossy(), text(&output)).into())
    }
}
