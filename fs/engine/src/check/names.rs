//! Compares inodes with the names that directories have for them: link counts, parents, types,
//! entries that lead nowhere, inodes that no entry leads to, and cycles of directories.

use gpunvme_layout::key::INO_ROOT;
use gpunvme_layout::{Dirent, FileType, Key, Kind as ItemKind};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::finding::{Findings, Fix, Kind, Place};
use super::items::{BEYOND, InodeRecord, NameRecord, UNUSABLE, article};
use super::spool::{Sorted, Spool};
use super::stop::Stop;
use crate::error::FsError;
use crate::volume::{Volume, tree};

/// Names of one directory that are told from each other; it should have one.
const NAMES_MAX: usize = 1000;

/// A directory, and the entry that leads to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Link {
    ino: u64,
    dir: u64,
    offset: u64,
}

/// Totals over all inodes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Totals {
    /// Number of inodes.
    pub inodes: u64,
    /// Highest inode number.
    pub highest: u64,
}

/// Says of entries that lead nowhere what they are called: that is what was lost.
pub(crate) fn tell_names(volume: &Volume, findings: &mut Findings) {
    for finding in findings.list.iter_mut().filter(|finding| finding.kind == Kind::EntryDangling) {
        let Place::Entry(dir, offset) = finding.place else { continue };
        let name = volume.wait(|| {
            let meta = volume.meta.read();
            let item = tree::get(&*meta, Key::new(dir, ItemKind::Dirent, offset))?;
            Ok(item.and_then(|item| Some(Dirent::decode(dir, offset, item).ok()?.name.to_vec())))
        });
        if let Ok(Some(name)) = name {
            finding.what = format!("{:?} {}", String::from_utf8_lossy(&name), finding.what);
        }
    }
}

/// Compares inodes with names.
pub(crate) fn compare(
    mut inodes: Sorted<InodeRecord>,
    mut names: Sorted<NameRecord>,
    mut orphans: Sorted<u64>,
    memory: usize,
    stop: &Stop,
    findings: &mut Findings,
) -> Result<Totals, FsError> {
    let mut totals = Totals::default();
    let mut links = Spool::new(memory / 4, stop);
    let mut has_root = false;
    loop {
        let heads = [inodes.peek().map(|r| r.ino), names.peek().map(|r| r.target), orphans.peek()];
        let Some(ino) = heads.into_iter().flatten().min() else { break };
        let record = inodes.next_if(|r| r.ino == ino)?;
        let mut orphan = false;
        while orphans.next_if(|o| *o == ino)?.is_some() {
            orphan = true;
        }
        let Some(record) = record else {
            if orphan {
                let fix = Fix::Remove(Key::new(0, ItemKind::Orphan, ino));
                findings.add(Kind::Orphan, Place::Inode(ino), fix, || "is an orphan, and is not there".into());
            }
            while let Some(name) = names.next_if(|n| n.target == ino)? {
                let what = || format!("names inode {ino}, which is not there");
                findings.add(Kind::EntryDangling, entry(&name), Fix::Remove(key(&name)), what);
            }
            continue;
        };
        totals.inodes += 1;
        totals.highest = ino;
        has_root |= ino == INO_ROOT;
        let mut judged = Judged { record, orphan, names: 0, file_type: FileType::from_number(record.file_type as u8) };
        let mut several: Vec<NameRecord> = Vec::new();
        while let Some(name) = names.next_if(|n| n.target == ino)? {
            judged.name(&name, findings);
            if several.len() < NAMES_MAX {
                several.push(name);
            }
        }
        if let Some(link) = judged.finish(&several, findings) {
            links.push(link)?;
        }
    }
    if !has_root {
        let fix = Fix::Rebuild(INO_ROOT, FileType::Directory);
        findings.add(Kind::Inode, Place::Inode(INO_ROOT), fix, || "the root directory is not there".into());
    }
    connect(&links, findings)?;
    Ok(totals)
}

fn entry(name: &NameRecord) -> Place {
    Place::Entry(name.dir(), name.offset)
}

fn key(name: &NameRecord) -> Key {
    Key::new(name.dir(), ItemKind::Dirent, name.offset)
}

struct Judged {
    record: InodeRecord,
    orphan: bool,
    names: u32,
    /// Its type, if anything tells.
    file_type: Option<FileType>,
}

impl Judged {
    fn name(&mut self, name: &NameRecord, findings: &mut Findings) {
        self.names += 1;
        match self.file_type {
            Some(file_type) if file_type as u32 != name.file_type() => {
                let what = || format!("says that inode {} is of another type, which is {}", self.record.ino, article(file_type));
                findings.add(Kind::EntryType, entry(name), Fix::EntryType(key(name), file_type), what);
            }
            Some(_) => {}
            None => self.file_type = FileType::from_number(name.file_type() as u8),
        }
    }

    /// Judges the inode when all its names are known. Returns the one entry that leads to a
    /// directory.
    fn finish(&self, names: &[NameRecord], findings: &mut Findings) -> Option<Link> {
        let InodeRecord { ino, parent, nlink, .. } = self.record;
        let place = Place::Inode(ino);
        let root = ino == INO_ROOT;
        let directory = root || self.file_type == Some(FileType::Directory);
        let mut single = if directory && !root { names.iter().find(|n| n.dir() == parent).or(names.first()) } else { None };
        if directory {
            for extra in names.iter().filter(|n| Some(*n) != single) {
                let what = || format!("is one name too many of directory {ino}");
                findings.add(Kind::DirectoryLink, entry(extra), Fix::Remove(key(extra)), what);
            }
        }
        if let Some(name) = single.filter(|n| n.dir() == ino) {
            findings.add(Kind::Cycle, entry(name), Fix::Remove(key(name)), || "is the directory itself".into());
            single = None;
        }
        let named = if directory { u32::from(single.is_some()) } else { self.names };
        if self.record.flags & UNUSABLE != 0 {
            let file_type = if root { Some(FileType::Directory) } else { self.file_type };
            let fix = file_type.map_or(Fix::RemoveAll(ino), |t| Fix::Rebuild(ino, t));
            findings.add(Kind::Inode, place, fix, || "has items, and no inode that makes sense".into());
        } else {
            if root && self.file_type != Some(FileType::Directory) {
                let fix = Fix::FileType(ino, FileType::Directory);
                findings.add(Kind::FileType, place, fix, || "the root is not a directory".into());
            }
            let whole = if directory { 2 + self.record.subdirectories } else { named };
            // An inode without a name is an orphan, or lost.
            let expected = if named > 0 || root { whole } else { 0 };
            if named == 0 && !root && !(self.orphan && nlink == 0) {
                let what = || format!("{} without a name", self.file_type.map_or("an inode", article));
                findings.add(Kind::Lost, place, Fix::Connect(ino, if directory { whole } else { 1 }), what);
            } else if nlink != expected {
                let what = || format!("link count is {nlink}, should be {expected}");
                findings.add(Kind::LinkCount, place, Fix::Links(ino, expected), what);
            }
            let lies_in = if root { Some(ino) } else { single.map(NameRecord::dir) };
            if let Some(lies_in) = lies_in.filter(|dir| directory && *dir != parent) {
                let what = || format!("says that it lies in directory {parent}, lies in {lies_in}");
                findings.add(Kind::Parent, place, Fix::Parent(ino, lies_in), what);
            }
            if self.record.flags & BEYOND != 0 && !self.orphan {
                findings.add(Kind::FileSize, place, Fix::Grow(ino), || "has written blocks beyond its end".into());
            }
        }
        single.map(|name| Link { ino, dir: name.dir(), offset: name.offset })
    }
}

/// Finds directories that lie in one another. A loop has at least one directory whose number is
/// lower than that of the one it lies in, which only a rename can bring about: the ways to the
/// root from those are followed, each part of a way once.
fn connect(links: &Spool<Link>, findings: &mut Findings) -> Result<(), FsError> {
    const UNKNOWN: u8 = 0;
    const ON_THE_WAY: u8 = 1;
    const DONE: u8 = 2;
    let mut state = vec![UNKNOWN; links.len() as usize];
    for start in 0..links.len() {
        let first = links.get(start)?;
        if first.dir < first.ino {
            continue;
        }
        let mut way = vec![];
        let mut at = Some(start);
        while let Some(index) = at.filter(|index| state[*index as usize] == UNKNOWN) {
            state[index as usize] = ON_THE_WAY;
            way.push(index);
            at = find(links, links.get(index)?.dir)?;
        }
        if let Some(index) = at.filter(|index| state[*index as usize] == ON_THE_WAY) {
            let link = links.get(index)?;
            let fix = Fix::Remove(Key::new(link.dir, ItemKind::Dirent, link.offset));
            let what = || format!("directory {} lies in itself, and the root does not lead to it", link.ino);
            findings.add(Kind::Cycle, Place::Entry(link.dir, link.offset), fix, what);
        }
        way.into_iter().for_each(|index| state[index as usize] = DONE);
    }
    Ok(())
}

/// The entry that leads to a directory.
fn find(links: &Spool<Link>, ino: u64) -> Result<Option<u64>, FsError> {
    let (mut low, mut high) = (0, links.len());
    while low < high {
        let middle = low + (high - low) / 2;
        let found = links.get(middle)?.ino;
        match found.cmp(&ino) {
            std::cmp::Ordering::Less => low = middle + 1,
            std::cmp::Ordering::Greater => high = middle,
            std::cmp::Ordering::Equal => return Ok(Some(middle)),
        }
    }
    Ok(None)
}
