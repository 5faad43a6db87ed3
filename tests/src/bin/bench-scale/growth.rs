//! Measures what operations cost on a volume with many inodes and on a huge one, beside a small
//! one.

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use gpunvme_blockdev::{Io, OpenMode};
use gpunvme_engine::data::resize::Allocate;
use gpunvme_engine::data::{Filesystem, Inline, Options, system_time};
use gpunvme_engine::volume::{Context, NewNode};
use gpunvme_engine::{FsError, VolumeOptions};
use gpunvme_tests::mounted::{Image, Mounted, text};
use gpunvme_tests::programs;
use gpunvme_tests::random::Random;
use gpunvme_tests::results::Work;

use crate::sample::{self, Aligned, Sample, drop_caches};
use crate::table::Table;
use crate::{Scale, progress};

/// Inodes of a volume that is nearly empty.
const FEW: u64 = 10_000;
/// Files of a folder of the population.
const FOLDER: u64 = 1000;
/// Bytes of a volume that is not huge.
const USUAL: u64 = 64 << 30;
/// Bytes of the file that is read and written.
const DATA: u64 = 64 << 20;
const BLOCK: u64 = 4096;
/// Inode number of the root.
const ROOT: u64 = 1;

const OPERATIONS: [&str; 8] = [
    "create",
    "look up, forgotten by the kernel",
    "open and close",
    "rename",
    "unlink",
    "read 4 KiB at random, O_DIRECT",
    "write 4 KiB at random, O_DIRECT",
    "look up anywhere after mounting",
];

struct Subject {
    name: String,
    inodes: u64,
    mounted: Mounted,
    samples: [Sample; OPERATIONS.len()],
    mkfs: f64,
}

/// Tables of operations, of whole volumes, and of memory.
pub fn measure(scale: &Scale) -> Result<Vec<Table>, Box<dyn Error>> {
    let mut subjects = vec![
        Subject::set_up(format!("{FEW} inodes"), USUAL, FEW)?,
        Subject::set_up(format!("{} inodes", scale.inodes), USUAL, scale.inodes)?,
        Subject::set_up(format!("{} TiB", scale.large.div_ceil(1 << 40)), scale.large, FEW)?,
    ];
    for subject in &mut subjects {
        subject.look_up_anywhere(scale.operations)?;
        subject.prepare_data()?;
    }
    // From here on the daemon has as many inodes in its tables, and as full a cache, as it gets.
    let million = subjects[1].find(1_000_000)?;
    for round in 0..scale.rounds {
        progress(&format!("growth: round {} of {}", round + 1, scale.rounds));
        let count = subjects.len();
        (0..count).try_for_each(|turn| subjects[(round + turn) % count].round(round, scale.operations))?;
    }
    let columns: Vec<_> = subjects.iter().map(|subject| subject.name.clone()).collect();
    let mut operations = Table::new("operations on a volume", "µs, median", &columns, Some(0));
    for (i, name) in OPERATIONS.iter().enumerate() {
        operations.row(Work::named(*name), subjects.iter_mut().map(|subject| subject.samples[i].median()).collect());
    }
    let mut volumes = Table::new("whole volumes", "seconds", &columns, Some(0));
    let mut memory = Table::new("most memory: cache=256M and write_buffer=64M, fsck --memory as it is", "MiB", &columns, None);
    let mkfs = subjects.iter().map(|subject| Some(subject.mkfs)).collect();
    let daemons = subjects.iter().map(|subject| Some(sample::mebibytes(subject.mounted.peak_memory()))).collect();
    let ends = subjects.into_iter().map(Subject::take_down).collect::<Result<Vec<_>, _>>()?;
    volumes.row(Work::named("mkfs"), mkfs);
    volumes.row(Work::named("mount"), ends.iter().map(|end| Some(end.mount)).collect());
    volumes.row(Work::named("unmount"), ends.iter().map(|end| Some(end.unmount)).collect());
    volumes.row(Work::named("fsck"), ends.iter().map(|end| Some(end.fsck.0)).collect());
    volumes.row(Work::named("find over a million files"), vec![None, Some(million), None]);
    memory.row(Work::named("daemon"), daemons);
    memory.row(Work::named("fsck"), ends.iter().map(|end| Some(end.fsck.1)).collect());
    Ok(vec![operations, volumes, memory])
}

/// How the life of a volume ended.
struct End {
    unmount: f64,
    mount: f64,
    /// Time, and memory.
    fsck: (f64, f64),
}

impl Subject {
    fn set_up(name: String, len: u64, inodes: u64) -> Result<Self, Box<dyn Error>> {
        progress(&format!("growth: a volume with {name}"));
        let image = Image::blank(len);
        let start = Instant::now();
        let output = image.mkfs(&[]);
        let mkfs = start.elapsed().as_secs_f64();
        if !output.status.success() {
            return Err(text(&output).into());
        }
        populate(&image.path(), inodes)?;
        Ok(Self { name, inodes, mounted: image.mount(), samples: Default::default(), mkfs })
    }

    fn data(&self) -> PathBuf {
        self.mounted.path("data")
    }

    fn prepare_data(&self) -> io::Result<()> {
        let file = File::create(self.data())?;
        for piece in 0..DATA >> 20 {
            file.write_all_at(&[piece as u8; 1 << 20], piece << 20)?;
        }
        file.sync_all()
    }

    /// Looks up files of the population that were not looked up since the volume was mounted.
    fn look_up_anywhere(&mut self, count: usize) -> io::Result<()> {
        let mut random = Random(7);
        for _ in 0..count {
            let number = random.below(self.inodes);
            let path = self.mounted.path(folder_name(number / FOLDER)).join(file_name(number));
            // The way to the folder is not part of it.
            fs::symlink_metadata(path.parent().expect("a folder"))?;
            self.samples[7].time(|| fs::symlink_metadata(&path))?;
        }
        Ok(())
    }

    /// Some operations of each kind, in a new folder.
    fn round(&mut self, round: usize, count: usize) -> io::Result<()> {
        let folder = self.mounted.path(format!("round {round}"));
        fs::create_dir(&folder)?;
        let (file, moved) = (|n| folder.join(format!("file {n}")), |n| folder.join(format!("moved {n}")));
        let [create, look_up, open, rename, unlink, read, write, _] = &mut self.samples;
        (0..count).try_for_each(|n| create.time(|| File::create_new(file(n))).map(drop))?;
        drop_caches()?;
        fs::symlink_metadata(&folder)?;
        (0..count).try_for_each(|n| look_up.time(|| fs::symlink_metadata(file(n))).map(drop))?;
        (0..count).try_for_each(|n| open.time(|| File::open(file(n)).map(drop)))?;
        (0..count).try_for_each(|n| rename.time(|| fs::rename(file(n), moved(n))))?;
        (0..count).try_for_each(|n| unlink.time(|| fs::remove_file(moved(n))))?;
        fs::remove_dir(&folder)?;

        let data = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(self.mounted.path("data"))?;
        let mut block = Aligned::new(BLOCK as usize);
        let mut random = Random(round as u64);
        for _ in 0..count {
            let offset = random.below(DATA / BLOCK) * BLOCK;
            read.time(|| data.read_exact_at(block.bytes(), offset))?;
            write.time(|| data.write_all_at(block.bytes(), offset))?;
        }
        Ok(())
    }

    /// Seconds of a `find` over so many files of the population, which the kernel knows nothing of.
    fn find(&self, files: u64) -> Result<f64, Box<dyn Error>> {
        progress("growth: find");
        drop_caches()?;
        let folders = files.min(self.inodes).div_ceil(FOLDER);
        let script = format!("seq -f 'folder %.0f' 0 {} | tr '\\n' '\\0' | find -files0-from - -size +1000k", folders - 1);
        sample::shell(&self.mounted.root(), &script, &[])
    }

    fn take_down(self) -> Result<End, Box<dyn Error>> {
        progress(&format!("growth: fsck of {}", self.name));
        let start = Instant::now();
        let image = self.mounted.unmount_unchecked();
        let unmount = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mounted = image.mount();
        let mount = start.elapsed().as_secs_f64();
        let image = mounted.unmount_unchecked();
        let fsck = sample::run(programs::command("fsck.gpunvme").arg("-n").arg(image.path()))?;
        Ok(End { unmount, mount, fsck })
    }
}

/// Files that have a block each, made by the engine: through a mount it would take much longer.
fn populate(image: &Path, inodes: u64) -> Result<(), Box<dyn Error>> {
    let device = gpunvme_blockdev::open(image.to_str().ok_or("a scratch path that is not UTF-8")?, OpenMode::ReadWrite)?;
    let options = Options { volume: VolumeOptions { read_only: false, cache: 256 << 20, discard: false }, write_buffer: 4 << 20 };
    let fs = Filesystem::open(Io::inline(device)?, options, Arc::new(Inline))?;
    for first in (0..inodes).step_by(FOLDER as usize) {
        let folder = create(&fs, ROOT, &folder_name(first / FOLDER), libc::S_IFDIR)?;
        for number in first..inodes.min(first + FOLDER) {
            let file = create(&fs, folder, &file_name(number), libc::S_IFREG)?;
            fs.allocate(&context(), file, 0, BLOCK, Allocate::Reserve { grow: true })?;
        }
        if fs.volume().wants_commit() {
            fs.commit()?;
        }
        if fs.volume().wants_checkpoint() {
            fs.volume().checkpoint()?;
        }
    }
    Ok(fs.close()?)
}

fn folder_name(number: u64) -> String {
    format!("folder {number}")
}

fn file_name(number: u64) -> String {
    format!("file {number}")
}

fn context() -> Context {
    Context { uid: 0, gid: 0, now: system_time() }
}

fn create(fs: &Arc<Filesystem>, folder: u64, name: &str, file_type: u32) -> Result<u64, FsError> {
    let new = NewNode { mode: file_type | 0o755, umask: 0, rdev: 0, target: &[] };
    Ok(fs.wait(|| fs.create(&context(), folder, name.as_bytes(), &new))?.ino)
}
