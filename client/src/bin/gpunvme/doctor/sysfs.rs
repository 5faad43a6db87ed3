//! Files that the kernel makes, below a root: `/` on a machine, a folder in tests.
//!
//! What is not there is an answer (`None`): sysfs shows what exists by showing files. What is
//! there and may not be read is noted, so that the report can say what it does not know.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Paths are relative to the root: `sys/bus/pci/devices`.
pub struct Tree {
    root: PathBuf,
    refused: RefCell<BTreeSet<String>>,
}

impl Tree {
    pub fn new(root: impl Into<PathBuf>) -> Tree {
        Tree { root: root.into(), refused: RefCell::default() }
    }

    /// What may not be read by this user, of all that was asked for until now.
    pub fn refused(&self) -> Vec<String> {
        self.refused.borrow().iter().cloned().collect()
    }

    pub fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        match std::fs::read(self.root.join(path)) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                if error.kind() == ErrorKind::PermissionDenied {
                    self.refused.borrow_mut().insert(format!("/{path}"));
                }
                None
            }
        }
    }

    /// The content of a file, without the blanks around it.
    pub fn text(&self, path: &str) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes(path)?).trim().to_owned())
    }

    /// A number, decimal or hexadecimal with `0x`. Negative ones are the kernel's way to say that
    /// it does not know.
    pub fn number(&self, path: &str) -> Option<u64> {
        number(&self.text(path)?)
    }

    /// The last part of what a link points to, such as the name of a device's driver.
    pub fn link(&self, path: &str) -> Option<String> {
        let target = std::fs::read_link(self.root.join(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }

    /// What is in a folder, in order of the names.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Whether there is such a file, or a link of that name whatever it points to.
    pub fn has(&self, path: &str) -> bool {
        self.root.join(path).symlink_metadata().is_ok()
    }

    /// Whether this process may open a file for reading and writing.
    pub fn writable(&self, path: &str) -> bool {
        use rustix::fs::Access;
        rustix::fs::access(self.root.join(path), Access::READ_OK | Access::WRITE_OK).is_ok()
    }

    /// Where a path leads when its links are followed, relative to the root again.
    pub fn resolve(&self, path: &str) -> Option<String> {
        let root = self.root.canonicalize().ok()?;
        let place = self.root.join(path).canonicalize().ok()?;
        Some(place.strip_prefix(root).ok()?.to_string_lossy().into_owned())
    }

    /// A path of a user, as one of the tree's. A relative one is the process's own.
    pub fn path(&self, path: &Path) -> PathBuf {
        path.strip_prefix("/").map_or_else(|_| path.to_owned(), |path| self.root.join(path))
    }
}

pub fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}
