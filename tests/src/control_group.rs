//! Control groups with a limit of memory, of whichever version the machine has.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A group, removed when it is dropped.
pub struct ControlGroup {
    folder: PathBuf,
}

impl ControlGroup {
    /// One whose processes have so many bytes of memory. None where the machine has no such groups
    /// that this user may make.
    pub fn with_memory(name: &str, bytes: u64) -> Option<ControlGroup> {
        let make = |root: &str, limit: &str| -> io::Result<ControlGroup> {
            let folder = Path::new(root).join(format!("{name}-{}", std::process::id()));
            fs::create_dir(&folder)?;
            let group = ControlGroup { folder };
            fs::write(group.folder.join(limit), bytes.to_string())?;
            Ok(group)
        };
        // Of version 2 the limit is there only where the group above it hands the controller on.
        make("/sys/fs/cgroup/memory", "memory.limit_in_bytes").or_else(|_| make("/sys/fs/cgroup", "memory.max")).ok()
    }

    /// Takes this process in. What it has already stays where it counts.
    pub fn enter(&self) {
        fs::write(self.folder.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }

    /// Takes this process back to the group above.
    pub fn leave(&self) {
        let above = self.folder.parent().expect("it has one above it");
        fs::write(above.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder); // one that still has processes stays
    }
}
