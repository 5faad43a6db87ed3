//! The journal of a folder that is published: what the store has of it, so that an interrupted
//! `publish` goes on from there.

use crate::error::{Error, Result};
use crate::own::Own;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The file in the folder that the program keeps for itself, and the most bytes of it.
const NAME: &str = "published";
const LONGEST: u64 = 4 << 30;

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

/// An upload in parts that was begun.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Begun {
    /// Of the file that is sent.
    pub state: Sent,
    /// As the store named it.
    pub id: String,
    /// Bytes of each part but the last.
    pub part: u64,
    /// The parts that the store has: by their indices what it calls them, and their CRC32C.
    #[serde(skip)]
    pub parts: BTreeMap<usize, (String, u32)>,
}

/// The first line.
#[derive(Serialize, Deserialize)]
struct Head<'a> {
    #[serde(borrow)]
    destination: Cow<'a, str>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    File {
        name: String,
        state: Sent,
        crc32c: u32,
        /// As the store named it.
        version: Option<String>,
    },
    Upload {
        name: String,
        begun: Begun,
    },
    Part {
        of: String,
        index: usize,
        tag: String,
        crc32c: u32,
    },
    /// The upload is over, and no object.
    Dropped {
        of: String,
    },
}

/// What was sent to one destination.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
    sent: HashMap<String, (Sent, u32, Option<String>)>,
    begun: HashMap<String, Begun>,
}

impl Journal {
    /// The journal of a folder, which begins anew where it is of another destination. If uploads to
    /// that one are not over, it is told that they never will be.
    ///
    /// # Errors
    /// [`Error::Foreign`], [`Error::Path`].
    pub fn open(own: &Own, destination: &str) -> Result<Journal> {
        let path = own.path(NAME);
        let failed = |action| Error::path(&path, action);
        let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE;
        let file = own.file(NAME, flags)?.ok_or_else(|| Error::Foreign(path.clone()))?;
        let mut text = String::new();
        // A journal that cannot be read is as none: everything is sent.
        let is_text = (&file).take(LONGEST).read_to_string(&mut text).is_ok();
        let whole = text.rfind('\n').filter(|_| is_text).map_or(0, |at| at + 1);
        let mut lines = text[..whole].lines();
        let head = lines.next().and_then(|line| serde_json::from_str::<Head<'_>>(line).ok());
        let mut journal = Journal { file, path: path.clone(), sent: HashMap::new(), begun: HashMap::new() };
        lines.filter_map(|line| serde_json::from_str(line).ok()).for_each(|line| journal.apply(line));
        match head.map(|head| head.destination) {
            Some(there) if there.trim_end_matches('/') == destination => {
                journal.file.set_len(whole as u64).map_err(failed("shorten it"))?;
                return Ok(journal);
            }
            Some(there) if !journal.begun.is_empty() => eprintln!(
                "gpunvme: {} files were sent to {there} in part, which {destination} takes the place of: abort their uploads there",
                journal.begun.len()
            ),
            _ => {}
        }
        (journal.sent, journal.begun) = Default::default();
        let head = serde_json::to_string(&Head { destination: destination.into() }).expect("a string has a form in JSON");
        let begin = journal.file.set_len(0).and_then(|()| writeln!(journal.file, "{head}"));
        begin.map_err(failed("write it"))?;
        Ok(journal)
    }

    fn apply(&mut self, line: Line) {
        match line {
            Line::File { name, state, crc32c, version } => {
                self.begun.remove(&name);
                self.sent.insert(name, (state, crc32c, version));
            }
            Line::Upload { name, begun } => {
                self.begun.insert(name, begun);
            }
            Line::Part { of, index, tag, crc32c } => {
                if let Some(begun) = self.begun.get_mut(&of) {
                    begun.parts.insert(index, (tag, crc32c));
                }
            }
            Line::Dropped { of } => {
                self.begun.remove(&of);
            }
        }
    }

    fn append(&mut self, line: Line) -> Result<()> {
        let mut text = serde_json::to_vec(&line).expect("a line of strings and numbers");
        text.push(b'\n');
        self.file.write_all(&text).map_err(Error::path(&self.path, "write it"))?;
        self.apply(line);
        Ok(())
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
    /// [`Error::Path`], as all that follow.
    pub fn add(&mut self, name: &str, state: &Sent, crc32c: u32, version: Option<String>) -> Result<()> {
        self.append(Line::File { name: name.into(), state: state.clone(), crc32c, version })
    }

    /// The upload of a file that was begun and is not over.
    pub fn begun(&self, name: &str) -> Option<Begun> {
        self.begun.get(name).cloned()
    }

    /// The files whose uploads are not over, with their states.
    pub fn all_begun(&self) -> impl Iterator<Item = (&str, &Sent)> {
        self.begun.iter().map(|(name, begun)| (name.as_str(), &begun.state))
    }

    /// An upload begins.
    pub fn begin(&mut self, name: &str, begun: Begun) -> Result<()> {
        self.append(Line::Upload { name: name.into(), begun })
    }

    /// The store has a part.
    pub fn add_part(&mut self, of: &str, index: usize, tag: String, crc32c: u32) -> Result<()> {
        self.append(Line::Part { of: of.into(), index, tag, crc32c })
    }

    /// An upload is over, and no object.
    pub fn drop_begun(&mut self, of: &str) -> Result<()> {
        self.append(Line::Dropped { of: of.into() })
    }
}
