//! The journal of a folder that is published: what the store has of it, so that an interrupted
//! `publish` goes on from there.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The state of a file, which is another one when the file changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sent {
    /// Its length in bytes.
    pub size: u64,
    inode: u64,
    /// Its times of modification and change, in nanoseconds.
    times: [i128; 2],
}

impl Sent {
    /// That of a file.
    pub fn of(meta: &Metadata) -> Sent {
        let time = |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        let times = [time(meta.mtime(), meta.mtime_nsec()), time(meta.ctime(), meta.ctime_nsec())];
        Sent { size: meta.len(), inode: meta.ino(), times }
    }
}

#[derive(Serialize, Deserialize)]
struct Line {
    name: String,
    state: Sent,
    crc32c: u32,
    /// As the store named it.
    version: Option<String>,
}

/// What was sent to one destination.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
    sent: HashMap<String, (Sent, u32, Option<String>)>,
}

impl Journal {
    /// The journal at `path`, which begins anew where it is of another destination.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn open(path: &Path, destination: &str) -> Result<Journal> {
        let failed = |action| Error::path(path, action);
        let mut options = File::options();
        let mut file = options.read(true).append(true).create(true).open(path).map_err(failed("open it"))?;
        let mut text = String::new();
        // A journal that cannot be read is as none: everything is sent.
        let is_text = file.read_to_string(&mut text).is_ok();
        let head = format!("{}\n", serde_json::json!({ "destination": destination }));
        let mut sent = HashMap::new();
        if is_text && text.starts_with(&head) {
            let whole = text.rfind('\n').map_or(0, |at| at + 1);
            for line in text[head.len()..whole].lines() {
                if let Ok(line) = serde_json::from_str::<Line>(line) {
                    sent.insert(line.name, (line.state, line.crc32c, line.version));
                }
            }
            file.set_len(whole as u64).map_err(failed("shorten it"))?;
        } else {
            file.set_len(0).and_then(|()| file.write_all(head.as_bytes())).map_err(failed("write it"))?;
        }
        Ok(Journal { file, path: path.into(), sent })
    }

    /// Whether the store has this state of a file; `there` is the size and version that it has.
    pub fn has(&self, name: &str, state: &Sent, there: Option<&(u64, Option<String>)>) -> bool {
        let Some((sent, _, version)) = self.sent.get(name) else { return false };
        sent == state && there.is_some_and(|(size, now)| *size == state.size && now == version)
    }

    /// The CRC32C of a file that was sent.
    pub fn crc32c(&self, name: &str) -> u32 {
        self.sent.get(name).map_or(0, |(_, crc32c, _)| *crc32c)
    }

    /// The store has this state of a file.
    ///
    /// # Errors
    /// [`Error::Path`].
    pub fn add(&mut self, name: &str, state: &Sent, crc32c: u32, version: Option<String>) -> Result<()> {
        let line = Line { name: name.into(), state: state.clone(), crc32c, version };
        let mut text = serde_json::to_vec(&line).expect("a line of strings and numbers");
        text.push(b'\n');
        self.file.write_all(&text).map_err(Error::path(&self.path, "write it"))
    }
}
