//! Files for measurements and proofs, which leave nothing behind.

use crate::report::Failure;
use std::fs::{File, OpenOptions, remove_file};
use std::path::Path;

/// A file without a name in a directory, open for reading and writing: gone when it is closed,
/// however the process ends.
pub fn file(directory: &Path) -> Result<File, Failure> {
    let path = directory.join(format!(".gpunvme-{}", std::process::id()));
    let failed = |error| Failure(format!("{}: {error}", path.display()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
    remove_file(&path).map_err(failed)?;
    Ok(file)
}
