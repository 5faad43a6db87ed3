//! The manifest of a set in a folder: which objects are there, whole and durable, and which parts
//! of those that are not. It is a journal of JSON lines; a last line that is torn counts for
//! nothing.

use crate::error::{Error, Result};
use crate::store::Object;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

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
    path: PathBuf,
    /// The set, unless the manifest is new.
    pub set: Option<Set>,
    /// Files by name.
    pub files: HashMap<String, Entry>,
    /// What files were that were evicted.
    pub evicted: HashMap<String, Entry>,
    /// Parts by the partial file that they are in.
    parts: HashMap<String, Parts>,
}

impl Manifest {
    /// Reads the manifest at `path`, and makes it where there is none.
    ///
    /// # Errors
    /// [`Error::Manifest`] where the file is something else, [`Error::Path`].
    pub fn open(path: &Path) -> Result<Manifest> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path).map_err(Error::path(path, "open it"))?;
        let (mut manifest, good) = Manifest::parse(file, path)?;
        manifest.file.set_len(good).map_err(Error::path(path, "shorten it"))?;
        manifest.file.seek(std::io::SeekFrom::End(0)).map_err(Error::path(path, "read it"))?;
        Ok(manifest)
    }

    /// Reads the manifest at `path`, and leaves it as it is.
    ///
    /// # Errors
    /// As [`Manifest::open`].
    pub fn read(path: &Path) -> Result<Manifest> {
        let file = File::open(path).map_err(Error::path(path, "open it"))?;
        Ok(Manifest::parse(file, path)?.0)
    }

    /// The manifest, and how many bytes of the file are whole lines.
    fn parse(mut file: File, path: &Path) -> Result<(Manifest, u64)> {
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(Error::path(path, "read it"))?;
        let mut manifest = Manifest {
            file,
            path: path.into(),
            set: None,
            files: HashMap::new(),
            evicted: HashMap::new(),
            parts: HashMap::new(),
        };
        let mut good = 0;
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let Some(parsed) = line.strip_suffix(b"\n").and_then(|line| serde_json::from_slice(line).ok()) else { break };
            good += line.len();
            manifest.apply(parsed);
        }
        if manifest.set.is_none() && good == 0 && text.contains(&b'\n') {
            return Err(Error::Manifest(path.into()));
        }
        Ok((manifest, good as u64))
    }

    fn apply(&mut self, line: Line) {
        match line {
            Line::Set(set) => self.set = Some(set),
            Line::File { name, entry } => {
                self.evicted.remove(&name);
                self.files.insert(name, entry);
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
        self.file.write_all(&text).map_err(Error::path(&self.path, "write it"))?;
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
        self.file.sync_data().map_err(Error::path(&self.path, "make it durable"))
    }

    /// Files are durable under their names.
    pub fn add_files(&mut self, files: impl Iterator<Item = (String, Entry)>) -> Result<()> {
        self.append(files.map(|(name, entry)| Line::File { name, entry }).collect())
    }

    /// A file is gone. Should this line be lost, the file is missing all the same.
    pub fn evict(&mut self, name: &str) -> Result<()> {
        self.append(vec![Line::Evicted { name: name.into() }])
    }

    /// Nothing is in flight. The manifest becomes as short as it can be, and durable.
    pub fn compact(&mut self) -> Result<()> {
        let set = self.set.iter().cloned().map(Line::Set);
        let sorted: BTreeMap<_, _> = self.files.iter().chain(&self.evicted).collect();
        let files = sorted.into_iter().map(|(name, entry)| Line::File { name: name.clone(), entry: entry.clone() });
        let evicted = self.evicted.keys().map(|name| Line::Evicted { name: name.clone() });
        let mut text = Vec::new();
        for line in set.chain(files).chain(evicted) {
            serde_json::to_writer(&mut text, &line).expect("a line of strings and numbers");
            text.push(b'\n');
        }
        let new = self.path.with_extension("new");
        let failed = || Error::path(&new, "write it");
        let mut file = File::create(&new).map_err(failed())?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(failed())?;
        std::fs::rename(&new, &self.path).map_err(Error::path(&self.path, "replace it"))?;
        self.file = file;
        self.parts.clear();
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
        let path = folder.path().join("manifest");
        let mut whole = Manifest::open(&path).unwrap();
        whole.begin(Set { source: "s3://a".into(), pinned: true }).unwrap();
        for at in 0..20 {
            whole.add_part("p", at * 10, 10, at as u32).unwrap();
            whole.add_files([(format!("n{at}"), entry(at as u32))].into_iter()).unwrap();
        }
        let text = std::fs::read(&path).unwrap();
        for len in 0..=text.len() {
            std::fs::write(&path, &text[..len]).unwrap();
            let cut = Manifest::open(&path).unwrap();
            let lines = text[..len].iter().filter(|&&byte| byte == b'\n').count();
            assert_eq!(usize::from(cut.set.is_some()) + cut.parts("p").len() + cut.files.len(), lines);
            let kept = std::fs::read(&path).unwrap();
            assert!(text.starts_with(&kept) && (kept.is_empty() || kept.ends_with(b"\n")));
        }
        let mut again = Manifest::open(&path).unwrap();
        again.drop_parts("p").unwrap();
        again.evict("n3").unwrap();
        again.compact().unwrap();
        let last = Manifest::open(&path).unwrap();
        assert!(
            last.set == again.set && last.files == again.files && last.evicted == again.evicted && last.parts("p").is_empty()
        );
        assert!(last.files.len() == 19 && last.evicted["n3"] == entry(3));
        std::fs::write(&path, "something\nelse\n").unwrap();
        assert!(matches!(Manifest::open(&path), Err(Error::Manifest(_))));
    }
}
