//! What a `hydrate` with a quota may bring its set to, so that the sets below a folder keep the
//! quota at every moment, also where several are hydrated at once.
//!
//! Its locks: `quota` in the folder that the sets are below is held while sets are counted and
//! evicted; `reserved` in a set's folder is taken then, and held as long as its number counts: as
//! long as the process lives. A process that waits for the first may have the lock of its set; one
//! that has it takes those of other sets only where they are free.

use crate::error::{Error, Result};
use crate::evict::{self, Evicted, Gone};
use crate::folder::Folder;
use crate::names::OWN;
use crate::own::Own;
use crate::sets::{self, Status};
use gpunvme_programs::sets::Quota;
use gpunvme_programs::terminal::complain;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The locks, and most digits of a number of bytes.
const QUOTA: &str = "quota";
const RESERVED: &str = "reserved";
const DIGITS: usize = 20;

/// What the sets below a folder may hold.
#[derive(Clone, Debug)]
pub struct Limit {
    /// The folder, or that above the set's.
    pub root: Option<PathBuf>,
    pub quota: Quota,
}

/// How many bytes a set may come to. It ends when it is dropped, or when the process ends.
#[derive(Debug)]
pub struct Reservation {
    root: PathBuf,
    quota: Quota,
    /// Of the set.
    folder: PathBuf,
    file: File,
    bytes: u64,
}

/// What of the sets has to go so that another may come to so many bytes.
struct Plan<'a> {
    /// What the set may come to, and all of them.
    bytes: u64,
    quota: u64,
    /// Of all other sets, with what was reserved for them.
    held: u64,
    /// The least recently used first.
    may_go: Vec<&'a Status>,
}

impl Limit {
    /// Evicts what has to go so that the set in `folder`, which is there, may come to `bytes`, and
    /// reserves them. `own` is what the program keeps in that folder.
    ///
    /// # Errors
    /// [`Error::OverQuota`] where that is more than the quota leaves; nothing has gone if that was
    /// to be seen before. [`Error::NotBelow`], [`Error::Path`].
    pub fn reserve(&self, folder: &Path, own: &Own, bytes: u64) -> Result<(Reservation, Evicted)> {
        let (root, folder) = self.places(folder)?;
        let flags = OFlags::CREATE | OFlags::RDWR;
        let file = own.file(RESERVED, flags)?.ok_or_else(|| Error::Foreign(own.path(RESERVED)))?;
        let mut reservation = Reservation { root, quota: self.quota, folder, file, bytes: 0 };
        let evicted = reservation.raise(bytes)?;
        Ok((reservation, evicted))
    }

    /// What would go if nothing is open, for a set in `folder`, which may not be there yet.
    ///
    /// # Errors
    /// As [`Limit::reserve`].
    pub fn dry_run(&self, folder: &Path, bytes: u64) -> Result<Evicted> {
        let (root, folder) = self.places(folder)?;
        let there = root.ancestors().find(|above| above.exists()).unwrap_or(&root);
        let sets = if there == root { sets::below(&root)? } else { Vec::new() };
        let plan = Plan::of(&root, &folder, Folder::bytes_of(self.quota, there)?, &sets, bytes)?;
        let mut evicted = Evicted::default();
        plan.evict(&mut evicted, |set| Ok(Gone { files: set.files, bytes: set.bytes, partial: set.partial }))?;
        Ok(evicted)
    }

    /// Where the sets are, and the set itself.
    fn places(&self, folder: &Path) -> Result<(PathBuf, PathBuf)> {
        let folder = resolved(folder)?;
        let root = match &self.root {
            Some(root) => resolved(root)?,
            None => folder.parent().unwrap_or(&folder).into(),
        };
        if folder.starts_with(&root) { Ok((root, folder)) } else { Err(Error::NotBelow { folder, root }) }
    }
}

impl Reservation {
    /// The set may come to so many bytes more, for which others go.
    ///
    /// # Errors
    /// As [`Limit::reserve`]. What was reserved before stays so.
    pub fn raise(&mut self, more: u64) -> Result<Evicted> {
        let bytes = self.bytes.saturating_add(more);
        let at_root = rustix::fs::open(&self.root, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let own = Own::make(at_root.map_err(Error::path(&self.root, "open it"))?, &self.root)?;
        // Another user may have made it.
        let counting = own.file(QUOTA, OFlags::CREATE | OFlags::RDONLY)?.ok_or_else(|| Error::Foreign(own.path(QUOTA)))?;
        if rustix::fs::flock(&counting, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK) {
            complain(format_args!("gpunvme: another process counts the sets in {}; waiting", self.root.display()));
            lock(&counting).map_err(Error::path(own.path(QUOTA), "lock it"))?;
        }
        let path = self.folder.join(OWN).join(RESERVED);
        lock(&self.file).map_err(Error::path(&path, "lock it"))?;
        let sets = sets::below(&self.root)?;
        let plan = Plan::of(&self.root, &self.folder, Folder::bytes_of(self.quota, &self.root)?, &sets, bytes)?;
        let mut evicted = Evicted::default();
        // What another user made of a set is no reason to leave the others.
        plan.evict(&mut evicted, |set| {
            let gone = evict::empty(&self.root, &set.folder);
            Ok(gone.inspect_err(sets::pass_over).unwrap_or_default())
        })?;
        self.file.write_all_at(format!("{bytes:>DIGITS$}").as_bytes(), 0).map_err(Error::path(path, "write it"))?;
        self.bytes = bytes;
        Ok(evicted)
    }
}

impl<'a> Plan<'a> {
    /// For the set in `folder` to come to `bytes`.
    fn of(root: &Path, folder: &Path, quota: u64, sets: &'a [Status], bytes: u64) -> Result<Plan<'a>> {
        let mut plan = Plan { quota, held: 0, may_go: Vec::new(), bytes };
        let mut stays: u64 = 0;
        for set in sets.iter().filter(|set| set.folder != folder) {
            let reserved = reserved(root, &set.folder).inspect_err(sets::pass_over).unwrap_or_default();
            let held = set.held().max(reserved.unwrap_or(0));
            plan.held = plan.held.saturating_add(held);
            if set.pinned || reserved.is_some() { stays = stays.saturating_add(held) } else { plan.may_go.push(set) }
        }
        plan.check(stays, 0).map(|()| plan)
    }

    fn check(&self, held: u64, evicted: u64) -> Result<()> {
        let (bytes, quota) = (self.bytes, self.quota);
        if held.saturating_add(bytes) <= quota { Ok(()) } else { Err(Error::OverQuota { bytes, quota, held, evicted }) }
    }

    /// Has sets go, until the quota is kept: `empty` says what went of one.
    fn evict(&self, evicted: &mut Evicted, empty: impl Fn(&Status) -> Result<Gone>) -> Result<()> {
        let mut held = self.held;
        for set in &self.may_go {
            if held.saturating_add(self.bytes) <= self.quota {
                break;
            }
            let gone = empty(set)?;
            held -= (gone.bytes + gone.partial).min(held);
            evicted.add(&gone);
        }
        self.check(held, evicted.evicted_bytes)
    }
}

/// What the set in a folder may come to, while a process that lives says so.
fn reserved(root: &Path, set: &Path) -> Result<Option<u64>> {
    let Some(own) = Own::open(sets::open(root, set)?, set)? else { return Ok(None) };
    let Some(file) = own.file(RESERVED, OFlags::RDONLY)? else { return Ok(None) };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => return Ok(None),
        Err(Errno::WOULDBLOCK) => {}
        Err(errno) => return Err(Error::path(own.path(RESERVED), "lock it")(errno)),
    }
    let mut text = String::new();
    file.take(DIGITS as u64).read_to_string(&mut text).map_err(Error::path(own.path(RESERVED), "read it"))?;
    Ok(Some(text.trim().parse().unwrap_or(0)))
}

fn lock(file: &File) -> std::result::Result<(), Errno> {
    rustix::io::retry_on_intr(|| rustix::fs::flock(file, FlockOperation::LockExclusive))
}

/// A path without symbolic links, also where its end is not there yet.
fn resolved(path: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(path).map_err(Error::path(path, "find it"))?;
    let there = absolute.ancestors().find_map(|above| above.canonicalize().ok().map(|found| (above, found)));
    let (above, found) = there.unwrap_or((&absolute, absolute.clone()));
    Ok(absolute.strip_prefix(above).map_or(found.clone(), |rest| found.join(rest)))
}
