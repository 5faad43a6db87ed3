//! The output of the command `read`.
//!
//! It guards a file that exists already. A file is written beside the old one and takes its place
//! when everything has arrived. Where that would lose something (further names, another owner,
//! attributes, a device), the old one is written itself, from the first byte that arrived on. The
//! file that is read is never the output.

use crate::report::Failure;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Stdout, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

pub enum Output {
    Stdout(Stdout),
    /// A file that is not replaced. What was in it goes when the first byte comes.
    InPlace {
        file: File,
        cut: bool,
    },
    /// A file that takes the place of `path` at the end.
    Beside {
        file: NamedTempFile,
        path: PathBuf,
    },
}

impl Output {
    /// The output that a path names, `-` being standard output, for the bytes of `source`.
    pub fn open(path: &Path, source: &gpunvme::File) -> Result<Output, Failure> {
        let failed = |error: io::Error| Failure(format!("{}: {error}", path.display()));
        let source = identity(source).map_err(failed)?;
        let refuse = || Err(Failure(format!("{}: is the file that is read", path.display())));
        let stdout = identity(io::stdout()).map_err(failed)?;
        if is_stdout(path) {
            return if stdout == source { refuse() } else { Ok(Output::Stdout(io::stdout())) };
        }
        let old = match fs::metadata(path) {
            Ok(old) => Some(old),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        match &old {
            Some(old) if (old.dev(), old.ino()) == source => return refuse(),
            // `/dev/stdout`, by this or another name: its place in the file is the shell's.
            Some(old) if (old.dev(), old.ino()) == stdout => return Ok(Output::Stdout(io::stdout())),
            _ => {}
        }
        match beside(path, old.as_ref()) {
            Some(output) => Ok(output),
            None => {
                let file = OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(failed)?;
                let is_file = file.metadata().map_err(failed)?.is_file();
                Ok(Output::InPlace { file, cut: !is_file })
            }
        }
    }

    pub fn is_stdout(&self) -> bool {
        matches!(self, Output::Stdout(_))
    }

    /// Everything has arrived.
    pub fn finish(mut self) -> Result<(), Failure> {
        self.flush()?;
        match self {
            Output::Stdout(_) => Ok(()),
            Output::InPlace { cut: true, .. } => Ok(()),
            Output::InPlace { file, cut: false } => Ok(file.set_len(0)?),
            Output::Beside { file, path } => {
                // A crash must not leave neither file.
                file.as_file().sync_data()?;
                file.persist(&path).map(drop).map_err(|error| Failure(format!("{}: {}", path.display(), error.error)))
            }
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Output::Stdout(stdout) => stdout.write(bytes),
            Output::InPlace { file, cut } => {
                if !std::mem::replace(cut, true) {
                    file.set_len(0)?;
                }
                file.write(bytes)
            }
            Output::Beside { file, .. } => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Output::Stdout(stdout) => stdout.flush(),
            Output::InPlace { .. } | Output::Beside { .. } => Ok(()),
        }
    }
}

fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Device and inode.
pub fn identity(file: impl AsFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// A new file in the same directory, with the owner and the mode of the old one; `None` where it
/// could not take its place whole.
fn beside(path: &Path, old: Option<&Metadata>) -> Option<Output> {
    let (path, mode) = match old {
        Some(old) => {
            let path = fs::canonicalize(path).ok()?;
            let whole = old.is_file()
                && old.nlink() == 1
                && old.uid() == rustix::process::geteuid().as_raw()
                && rustix::fs::listxattr(&path, &mut [0; 0][..]).is_ok_and(|length| length == 0)
                // A file that may not be written is not replaced either.
                && OpenOptions::new().write(true).open(&path).is_ok();
            (whole.then_some(path)?, old.mode() & 0o7777)
        }
        // A link that leads nowhere is written through.
        None if fs::symlink_metadata(path).is_ok() => return None,
        None => (path.to_owned(), 0o666),
    };
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut prefix = path.file_name()?.to_owned();
    prefix.push(".");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(".part");
    let file = match old {
        // The umask decides.
        None => builder.permissions(Permissions::from_mode(mode)).tempfile_in(directory).ok()?,
        Some(old) => {
            let file = builder.tempfile_in(directory).ok()?;
            if file.as_file().metadata().ok()?.gid() != old.gid() {
                std::os::unix::fs::fchown(&file, None, Some(old.gid())).ok()?;
            }
            file.as_file().set_permissions(Permissions::from_mode(mode)).ok()?;
            file
        }
    };
    Some(Output::Beside { file, path })
}
