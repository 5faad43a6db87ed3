//! Trees of files: a varied one made from a seed, and an exact comparison of two.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

/// SHA-256 of everything that `reader` yields.
pub fn digest(mut reader: impl Read) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match reader.read(&mut buffer)? {
            0 => return Ok(hash.finalize().into()),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// Bytes that look random and that `seed` decides.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        // xorshift64*: fast, and no two blocks of a file alike, so that a misplaced block is seen.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// What has to be equal of one entry in two trees that are copies of each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Type and permission bits, as `st_mode` has them.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// Bytes of a regular file, 0 for anything else: directories have sizes of their own on each
    /// filesystem.
    pub len: u64,
    /// Time of last modification, in seconds and nanoseconds.
    pub modified: (i64, i64),
    /// SHA-256 of the contents of a file, the target of a symlink, the number of a device node.
    pub contents: Vec<u8>,
}

/// Lists the tree below `root` by relative path, without the root itself. Symlinks are not
/// followed.
pub fn walk(root: &Path) -> io::Result<Vec<(PathBuf, Metadata)>> {
    let mut found = Vec::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(folder) = pending.pop() {
        for entry in fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            let relative = folder.join(entry.file_name());
            let metadata = entry.metadata()?;
            if metadata.is_dir() {
                pending.push(relative.clone());
            }
            found.push((relative, metadata));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}

/// Reads the tree below `root`, contents and all.
pub fn read(root: &Path) -> io::Result<BTreeMap<PathBuf, Entry>> {
    let mut tree = BTreeMap::new();
    for (relative, metadata) in walk(root)? {
        let path = root.join(&relative);
        let kind = metadata.file_type();
        let contents = if kind.is_file() {
            digest(File::open(&path)?)?.to_vec()
        } else if kind.is_symlink() {
            fs::read_link(&path)?.as_os_str().as_bytes().to_vec()
        } else if kind.is_block_device() || kind.is_char_device() {
            metadata.rdev().to_le_bytes().to_vec()
        } else {
            Vec::new()
        };
        let entry = Entry {
            mode: metadata.mode(),
            owner: (metadata.uid(), metadata.gid()),
            len: if kind.is_file() { metadata.len() } else { 0 },
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            contents,
        };
        tree.insert(relative, entry);
    }
    Ok(tree)
}

/// Panics, naming the first entry that differs, unless the two trees are equal.
pub fn assert_same(expected: &BTreeMap<PathBuf, Entry>, actual: &BTreeMap<PathBuf, Entry>) {
    for (path, entry) in expected {
        match actual.get(path) {
            None => panic!("{} is missing", path.display()),
            Some(found) => assert_eq!(entry, found, "{} differs", path.display()),
        }
    }
    if let Some(extra) = actual.keys().find(|path| !expected.contains_key(*path)) {
        panic!("{} should not be there", extra.display());
    }
}

/// Makes a tree below `root` with `files` regular files of 0 bytes to 2 MiB, folders, symlinks and
/// hard links.
pub fn make(root: &Path, seed: u64, files: usize) -> io::Result<()> {
    for number in 0..files {
        let random = u64::from_le_bytes(pattern(seed ^ number as u64, 8).try_into().expect("8 bytes"));
        let mut folder = root.to_path_buf();
        for level in 0..random % 4 {
            folder.push(format!("folder {}", (random >> (8 + 4 * level)) % 5));
        }
        fs::create_dir_all(&folder)?;
        // Mostly small, a few that need several extents or blocks, and lengths at and beside block
        // boundaries.
        let len = match random >> 20 & 7 {
            0 => 0,
            1 => 4096,
            2 => 4097,
            3..=5 => (random >> 24) % 20_000,
            6 => (random >> 24) % 300_000,
            _ => (random >> 24) % (2 << 20),
        };
        let path = folder.join(format!("file {number}.bin"));
        fs::write(&path, pattern(random, len as usize))?;
        match number % 10 {
            3 => std::os::unix::fs::symlink(format!("file {number}.bin"), folder.join(format!("link {number}")))?,
            7 => fs::hard_link(&path, folder.join(format!("twin {number}")))?,
            _ => {}
        }
    }
    Ok(())
}

/// Makes an archive of a tree with so many small files, 20 to a folder, as in a source tree.
pub fn archive(archive: &Path, files: usize) -> io::Result<()> {
    const FILES_PER_FOLDER: usize = 20;
    const LENGTHS: [usize; 5] = [300, 1200, 3000, 7000, 20_000];
    let tree = tempfile::tempdir()?;
    for number in 0..files {
        let folder = number / FILES_PER_FOLDER;
        let folder = tree.path().join(format!("part {}", folder / FILES_PER_FOLDER)).join(format!("folder {folder}"));
        if number % FILES_PER_FOLDER == 0 {
            fs::create_dir_all(&folder)?;
        }
        fs::write(folder.join(format!("file {number}")), vec![b'a' + (number % 26) as u8; LENGTHS[number % LENGTHS.len()]])?;
    }
    let status = Command::new("tar").arg("cf").arg(archive).arg("-C").arg(tree.path()).arg(".").status()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("tar: {status}"))) }
}
