//! Measures the pieces in which large files land on an old volume: filled, and a part of its files
//! replaced by others again and again.

use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use gpunvme_tests::mounted::Image;
use gpunvme_tests::peers::{self, Kind, LoopMounted};
use gpunvme_tests::random::Random;
use gpunvme_tests::results::Work;
use gpunvme_tests::{scratch_dir, tree};

use crate::table::Table;
use crate::{Scale, progress};

/// Parts of a volume that are in use while it ages, and when the large files are written the second
/// time.
const FULL: f64 = 0.9;
const HALF: f64 = 0.5;
/// Part of the files that go in each round.
const REPLACED: f64 = 0.3;
/// Files of a folder.
const FOLDER: u64 = 200;
/// What fits into the largest file that is not one of the large ones.
const LARGEST: u64 = 64 << 20;

/// A filesystem that ages.
struct Subject {
    name: &'static str,
    root: PathBuf,
    /// Pieces in which a file lies.
    pieces: fn(&Path) -> Result<u64, Box<dyn Error>>,
}

/// A table of how large the pieces of large files are.
pub fn measure(scale: &Scale) -> Result<Vec<Table>, Box<dyn Error>> {
    let mut found = Vec::new();
    {
        let mounted = Image::formatted_with(scale.ageing).mount();
        found.push(age(&Subject { name: "gpunvme", root: mounted.root(), pieces: of_ours }, scale)?);
    }
    for kind in [Kind::Ext4, Kind::Xfs] {
        let scratch = scratch_dir();
        let image = scratch.path().join(kind.name());
        File::create(&image)?.set_len(scale.ageing.max(512 << 20))?;
        let mounted = LoopMounted::set_up(&image, kind)?;
        found.push(age(&Subject { name: kind.name(), root: mounted.root.clone(), pieces: of_kernel }, scale)?);
    }
    let mut table = Table::new(
        format!("average piece of large files, after {} rounds of churn on {} GiB", scale.churns, scale.ageing >> 30),
        "MiB",
        &["gpunvme", "ext4", "xfs"],
        None,
    );
    for (i, when) in ["on the new volume", "aged, 90 % in use", "aged, 50 % in use"].into_iter().enumerate() {
        table.row(Work::named(when), found.iter().map(|averages| Some(averages[i])).collect());
    }
    Ok(vec![table])
}

/// Makes a filesystem old, and says which one it was if it cannot be done.
fn age(subject: &Subject, scale: &Scale) -> Result<[f64; 3], Box<dyn Error>> {
    averages(subject, scale).map_err(|error| format!("{}: {error}", subject.name).into())
}

/// Average pieces of large files, in MiB: on the volume when it is new, when it is old and full,
/// and old and half full.
fn averages(subject: &Subject, scale: &Scale) -> Result<[f64; 3], Box<dyn Error>> {
    let mut churn =
        Churn { root: subject.root.clone(), files: Vec::new(), next: 0, random: Random(11), bytes: tree::pattern(5, 4 << 20) };
    let new = large(subject)?;
    churn.fill(FULL)?;
    for round in 0..scale.churns {
        progress(&format!("ageing: {}, round {} of {}", subject.name, round + 1, scale.churns));
        churn.thin_out(|churn| churn.random.below(1000) < (REPLACED * 1000.0) as u64)?;
        churn.fill(FULL)?;
    }
    let full = large(subject)?;
    while used(&subject.root)? > HALF {
        churn.thin_out(|churn| churn.random.below(10) == 0)?;
    }
    Ok([new, full, large(subject)?])
}

/// Writes large files into half of the space that is left, and takes them away again. Returns the
/// average size of a piece in MiB.
fn large(subject: &Subject) -> Result<f64, Box<dyn Error>> {
    let space = rustix::fs::statvfs(&subject.root)?;
    let len = (space.f_bavail * space.f_frsize / 4) & !((1 << 20) - 1);
    let bytes = tree::pattern(6, 4 << 20);
    let mut pieces = 0;
    for number in 0..2 {
        let path = subject.root.join(format!("large {number}"));
        write(&path, len, &bytes)?.sync_all()?;
        pieces += (subject.pieces)(&path)?;
    }
    (0..2).try_for_each(|number| fs::remove_file(subject.root.join(format!("large {number}"))))?;
    Ok((2 * len) as f64 / pieces as f64 / f64::from(1 << 20))
}

/// The part of a filesystem that is in use.
fn used(root: &Path) -> io::Result<f64> {
    let space = rustix::fs::statvfs(root)?;
    Ok(1.0 - space.f_bavail as f64 / space.f_blocks as f64)
}

/// The files of a filesystem that ages.
struct Churn {
    root: PathBuf,
    files: Vec<PathBuf>,
    next: u64,
    random: Random,
    bytes: Vec<u8>,
}

impl Churn {
    /// Writes files until that part of the filesystem is in use.
    fn fill(&mut self, part: f64) -> io::Result<()> {
        loop {
            for _ in 0..20 {
                let folder = self.root.join(format!("folder {}", self.next / FOLDER));
                fs::create_dir_all(&folder)?;
                let path = folder.join(format!("file {}", self.next));
                let len = self.length();
                write(&path, len, &self.bytes)?;
                self.files.push(path);
                self.next += 1;
            }
            if used(&self.root)? >= part {
                break;
            }
        }
        sync(&self.root)
    }

    /// Takes away what is chosen.
    fn thin_out(&mut self, mut goes: impl FnMut(&mut Self) -> bool) -> io::Result<()> {
        let files = std::mem::take(&mut self.files);
        for path in files {
            if goes(self) {
                fs::remove_file(path)?;
            } else {
                self.files.push(path);
            }
        }
        sync(&self.root)
    }

    /// Bytes of a file as users have them: half are below 16 KiB, and most of the space is in a few
    /// large ones. Each doubling beyond is a little more than half as frequent, so that every size
    /// holds about as many bytes as the next.
    fn length(&mut self) -> u64 {
        let mut limit = 16 << 10;
        while limit < LARGEST && self.random.below(100) < 55 {
            limit *= 2;
        }
        limit / 2 + self.random.below(limit / 2)
    }
}

/// Makes a file of `len` bytes.
fn write(path: &Path, len: u64, bytes: &[u8]) -> io::Result<File> {
    let mut file = File::create(path)?;
    let mut left = len;
    while left > 0 {
        let step = left.min(bytes.len() as u64);
        file.write_all(&bytes[..step as usize])?;
        left -= step;
    }
    Ok(file)
}

/// Writes out what a filesystem has in memory, and has freed space be free.
fn sync(root: &Path) -> io::Result<()> {
    let root = File::open(root)?;
    rustix::fs::syncfs(&root)?;
    // Where syncfs does not reach the filesystem, this does.
    root.sync_all()
}

/// Pieces that a file of a gpunvme volume lies in.
fn of_ours(path: &Path) -> Result<u64, Box<dyn Error>> {
    let (mut pieces, mut end) = (0, None);
    for extent in gpunvme::File::open(path)?.resolve(0, u64::MAX) {
        let extent = extent?;
        pieces += u64::from(end != Some(extent.device_offset));
        end = Some(extent.device_offset + extent.len);
    }
    Ok(pieces)
}

/// Pieces that a file of a filesystem of the kernel lies in: filefrag(8) says "PATH: N extents
/// found".
fn of_kernel(path: &Path) -> Result<u64, Box<dyn Error>> {
    let text = peers::run(Command::new("filefrag").arg(path))?;
    let words: Vec<&str> = text.split_whitespace().collect();
    let number = words.len().checked_sub(3).map(|at| words[at].parse());
    Ok(number.ok_or_else(|| format!("filefrag says {text:?}"))??)
}
