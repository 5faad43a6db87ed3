//! The manifest of a set in a folder: which objects are there, whole and durable, and which parts
//! of those that are not. It is a journal of JSON lines; a last line that is torn counts for
//! nothing.

use crate::error::{Error, Result};
use crate::names;
use crate::own::Own;
use crate::store::Object;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// The file in the folder that the program keeps for itself.
pub const NAME: &str = "manifest";

/// Most bytes of a line, and of all: another user may have written them.
const LONGEST_LINE: u64 = 64 << 10;
const LONGEST: u64 = 4 << 30;

/// What a set is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Set {
    /// Where it comes from, without credentials.
    pub source: String,
    /// Whether it is never evicted.
    pub pinned: bool,
}

/// A file that is whole and durable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Its length in bytes.
    pub size: u64,
    /// The version of the object that it is.
    pub version: String,
    /// The CRC32C of its bytes.
    pub crc32c: u32,
    /// Its time of modification, in nanoseconds since 1970, by which a change here is noticed.
    pub modified: i128,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Set(Set),
    File {
        name: String,
        entry: Entry,
    },
    /// A file that is whole and durable gets its name next.
    Named {
        partial: String,
        name: String,
        entry: Entry,
    },
    /// A file is gone, and its entry stays as a listing.
    Evicted {
        name: String,
    },
    Part {
        of: String,
        offset: u64,
        len: u64,
        crc32c: u32,
    },
    /// The parts of this count no more.
    Dropped {
        of: String,
    },
}

/// The parts of a file that are durable: offsets, with lengths and CRC32C.
pub type Parts = BTreeMap<u64, (u64, u32)>;

/// The manifest of a folder; one process has it at a time.
#[derive(Debug)]
pub struct Manifest {
    file: File,
    own: Arc<Own>,
    /// The set, unless the manifest is new.
    pub set: Option<Set>,
    /// Files by name.
    pub files: HashMap<String, Entry>,
    /// What files were that were evicted.
    pub evicted: HashMap<String, Entry>,
    /// Files that were to get their names, with those of their partial files.
    named: HashMap<String, (String, Entry)>,
    /// Parts by the partial file that they are in.
    parts: HashMap<String, Parts>,
    /// It ends with half a line, which could not be cut off.
    is_torn: bool,
}

impl Manifest {
    /// Reads the manifest of a folder, and makes it where there is none.
    ///
    /// # Errors
    /// [`Error::Manifest`] where the file is something else, [`Error::Name`] where it has a name
    /// that leads out of the folder, [`Error::Foreign`], [`Error::Path`].
    pub fn open(own: &Arc<Own>) -> Result<Manifest> {
        let path = own.path(NAME);
        let file = own.file(NAME, OFlags::RDWR | OFlags::CREATE)?.ok_or_else(|| Error::Foreign(path.clone()))?;
        let (mut manifest, good) = Manifest::parse(file, own)?;
        manifest.file.set_len(good).map_err(Error::path(&path, "shorten it"))?;
        manifest.file.seek(SeekFrom::End(0)).map_err(Error::path(&path, "read it"))?;
        Ok(manifest)
    }

    /// Reads the manifest of a folder, if there is one, and leaves it as it is.
    ///
    /// # Errors
    /// As [`Manifest::open`].
    pub fn read(own: &Arc<Own>) -> Result<Option<Manifest>> {
        let Some(file) = own.file(NAME, OFlags::RDONLY)? else { return Ok(None) };
        Ok(Some(Manifest::parse(file, own)?.0))
    }

    /// What tells whether the manifest of the set in a folder was changed, if there is one.
    pub fn state(folder: &Path) -> Option<(u64, u64, SystemTime)> {
        let found = std::fs::symlink_metadata(folder.join(names::OWN).join(NAME)).ok()?;
        Some((found.ino(), found.len(), found.modified().ok()?))
    }

    fn path(&self) -> PathBuf {
        self.own.path(NAME)
    }

    /// The manifest, and how many bytes of the file are whole lines.
    fn parse(file: File, own: &Arc<Own>) -> Result<(Manifest, u64)> {
        let mut lines = BufReader::new(file.try_clone().map_err(Error::path(own.path(NAME), "use it twice"))?).take(LONGEST);
        let mut manifest = Manifest {
            file,
            own: own.clone(),
            set: None,
            files: HashMap::new(),
            evicted: HashMap::new(),
            named: HashMap::new(),
            parts: HashMap::new(),
            is_torn: false,
        };
        let (mut good, mut line) = (0, Vec::new());
        loop {
            line.clear();
            let read = (&mut lines).take(LONGEST_LINE).read_until(b'\n', &mut line);
            read.map_err(Error::path(manifest.path(), "read it"))?;
            let Some(parsed) = line.strip_suffix(b"\n").and_then(|line| serde_json::from_slice(line).ok()) else { break };
            if let Line::File { name, .. } | Line::Named { name, .. } = &parsed {
                names::check(name)?;
            }
            good += line.len() as u64;
            manifest.apply(parsed);
        }
        // What is no line is torn, if it is the last one: nothing was written behind it.
        let is_torn = !line.ends_with(b"\n") && (line.len() as u64) < LONGEST_LINE && lines.limit() > 0;
        if manifest.set.is_none() && good == 0 && !is_torn {
            return Err(Error::Manifest(manifest.path()));
        }
        Ok((manifest, good))
    }

    fn apply(&mut self, line: Line) {
        match line {
            Line::Set(set) => self.set = Some(set),
            Line::File { name, entry } => {
                self.evicted.remove(&name);
                self.named.remove(&name);
                self.files.insert(name, entry);
            }
            Line::Named { partial, name, entry } => {
                self.named.insert(name, (partial, entry));
            }
            Line::Evicted { name } => {
                if let Some((name, entry)) = self.files.remove_entry(&name) {
                    self.evicted.insert(name, entry);
                }
            }
            Line::Part { of, offset, len, crc32c } => {
                self.parts.entry(of).or_default().insert(offset, (len, crc32c));
            }
            Line::Dropped { of } => {
                self.parts.remove(&of);
            }
        }
    }

    fn append(&mut self, lines: Vec<Line>) -> Result<()> {
        let mut text = Vec::new();
        for line in &lines {
            serde_json::to_writer(&mut text, line).expect("a line of strings and numbers");
            text.push(b'\n');
        }
        let path = self.path();
        let failed = || Error::path(&path, "write it");
        if self.is_torn {
            return Err(failed()(std::io::Error::from_raw_os_error(libc::EIO)));
        }
        let before = self.file.stream_position().map_err(failed())?;
        if let Err(error) = self.file.write_all(&text) {
            // Nothing behind half a line would be read again.
            let cut = self.file.set_len(before).and_then(|()| (&self.file).seek(SeekFrom::Start(before)));
            self.is_torn = cut.is_err();
            return Err(failed()(error));
        }
        lines.into_iter().for_each(|line| self.apply(line));
        Ok(())
    }

    /// Says what the set is.
    ///
    /// # Errors
    /// [`Error::Path`], as all that follow.
    pub fn begin(&mut self, set: Set) -> Result<()> {
        self.append(vec![Line::Set(set)])
    }

    /// The file that is this version of an object.
    pub fn entry(&self, object: &Object) -> Option<&Entry> {
        self.files.get(&object.name).filter(|entry| entry.size == object.size && entry.version == object.version)
    }

    /// The durable parts of a partial file.
    pub fn parts(&self, of: &str) -> Parts {
        self.parts.get(of).cloned().unwrap_or_default()
    }

    /// A part is durable.
    pub fn add_part(&mut self, of: &str, offset: u64, len: u64, crc32c: u32) -> Result<()> {
        self.append(vec![Line::Part { of: of.into(), offset, len, crc32c }])
    }

    /// A partial file is gone. That is durable before a new one of its name has parts.
    pub fn drop_parts(&mut self, of: &str) -> Result<()> {
        if !self.parts.contains_key(of) {
            return Ok(());
        }
        self.append(vec![Line::Dropped { of: of.into() }])?;
        self.sync()
    }

    /// The same of all partial files but those that `is_there` says are there.
    pub fn drop_parts_unless(&mut self, is_there: impl Fn(&str) -> bool) -> Result<()> {
        let gone: Vec<_> = self.parts.keys().filter(|of| !is_there(of)).cloned().collect();
        gone.iter().try_for_each(|of| self.drop_parts(of))
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(Error::path(self.path(), "make it durable"))
    }

    /// All files that there may be, with those that may have got their names.
    pub fn there(&self) -> impl Iterator<Item = (&String, &Entry)> {
        self.files.iter().chain(self.named.iter().map(|(name, (_, entry))| (name, entry)))
    }

    /// Bytes of the files that `is_there` says are there, by their names and what they are.
    pub fn bytes(&self, is_there: impl Fn(&str, &Entry) -> bool) -> u64 {
        let there = self.files.iter().filter(|(name, entry)| is_there(name, entry));
        there.fold(0, |sum, (_, entry)| sum.saturating_add(entry.size))
    }

    /// Files that are whole and durable get their names next: those of partial files, and theirs.
    /// That is durable afterwards: a file that no manifest knows would never be evicted.
    pub fn name_files(&mut self, files: impl Iterator<Item = (String, String, Entry)>) -> Result<()> {
        self.append(files.map(|(partial, name, entry)| Line::Named { partial, name, entry }).collect())?;
        self.sync()
    }

    /// A process was killed while it gave files their names: `has_name` says which of them have
    /// theirs, by the names of their partial files, their own, and what they are.
    pub fn recover(&mut self, has_name: impl Fn(&str, &str, &Entry) -> bool) -> Result<()> {
        let named = std::mem::take(&mut self.named).into_iter();
        let files: Vec<_> = named.filter(|(name, (partial, entry))| has_name(partial, name, entry)).collect();
        self.add_files(files.into_iter().map(|(name, (_, entry))| (name, entry)))
    }

    /// Files are durable under their names.
    pub fn add_files(&mut self, files: impl Iterator<Item = (String, Entry)>) -> Result<()> {
        self.append(files.map(|(name, entry)| Line::File { name, entry }).collect())
    }

    /// A file is gone. Should this line be lost, the file is missing all the same.
    pub fn evict(&mut self, name: &str) -> Result<()> {
        self.append(vec![Line::Evicted { name: name.into() }])
    }

    /// Nothing is in flight. The manifest becomes as short as it can be, and durable. Parts of
    /// files that are not whole count no more, unless their partial files are among those that
    /// `stays` says do.
    pub fn compact(&mut self, stays: impl Fn(&str) -> bool) -> Result<()> {
        self.parts.retain(|partial, _| stays(partial));
        let set = self.set.iter().cloned().map(Line::Set);
        let sorted: BTreeMap<_, _> = self.files.iter().chain(&self.evicted).collect();
        let files = sorted.into_iter().map(|(name, entry)| Line::File { name: name.clone(), entry: entry.clone() });
        let evicted = self.evicted.keys().map(|name| Line::Evicted { name: name.clone() });
        let mut text = Vec::new();
        let parts = self.parts.iter().flat_map(|(of, parts)| {
            parts.iter().map(|(&offset, &(len, crc32c))| Line::Part { of: of.clone(), offset, len, crc32c })
        });
        for line in set.chain(files).chain(evicted).chain(parts) {
            serde_json::to_writer(&mut text, &line).expect("a line of strings and numbers");
            text.push(b'\n');
        }
        self.file = self.own.replace(NAME, &text)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(crc32c: u32) -> Entry {
        Entry { size: 7, version: "v".into(), crc32c, modified: -1 }
    }

    #[test]
    fn a_manifest_cut_anywhere_is_what_was_written_before() {
        let folder = tempfile::tempdir().unwrap();
        let own = Arc::new(Own::make(File::open(folder.path()).unwrap(), folder.path()).unwrap());
        let path = own.path(NAME);
        let mut whole = Manifest::open(&own).unwrap();
        whole.begin(Set { source: "s3://a".into(), pinned: true }).unwrap();
        for at in 0..20 {
            whole.add_part("p", at * 10, 10, at as u32).unwrap();
            whole.add_files([(format!("n{at}"), entry(at as u32))].into_iter()).unwrap();
        }
        let text = std::fs::read(&path).unwrap();
        for len in 0..=text.len() {
            std::fs::write(&path, &text[..len]).unwrap();
            let cut = Manifest::open(&own).unwrap();
            let lines = text[..len].iter().filter(|&&byte| byte == b'\n').count();
            assert_eq!(usize::from(cut.set.is_some()) + cut.parts("p").len() + cut.files.len(), lines);
            let kept = std::fs::read(&path).unwrap();
            assert!(text.starts_with(&kept) && (kept.is_empty() || kept.ends_with(b"\n")));
        }
        let mut again = Manifest::open(&own).unwrap();
        again.compact(|partial| partial == "p").unwrap();
        assert_eq!(Manifest::open(&own).unwrap().parts("p"), whole.parts("p"));
        again.drop_parts("p").unwrap();
        again.evict("n3").unwrap();
        again.compact(|_| false).unwrap();
        let last = Manifest::open(&own).unwrap();
        assert!(
            last.set == again.set && last.files == again.files && last.evicted == again.evicted && last.parts("p").is_empty()
        );
        assert!(last.files.len() == 19 && last.evicted["n3"] == entry(3));
        std::fs::write(&path, "something\nelse\n").unwrap();
        assert!(matches!(Manifest::open(&own), Err(Error::Manifest(_))));
    }
}
