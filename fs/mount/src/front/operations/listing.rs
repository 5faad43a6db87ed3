//! Listings of directories.

use std::sync::Arc;

use gpunvme_engine::error::{Attempt, Fail, FsError};
use gpunvme_engine::volume::{Attributes, DirEntry};

use crate::front::shared::Front;

/// Entries of a directory that are fetched at once.
const BATCH: usize = 64;

/// A listing that takes the entries of a directory.
pub(crate) trait Listing: Send + 'static {
    /// Whether entries need their attributes.
    const ATTRIBUTES: bool;

    /// Takes an entry; false when there is no room for it.
    fn add(&mut self, entry: &DirEntry, attributes: Option<&Attributes>) -> bool;
}

/// State of reading a directory.
pub(super) struct Reading<L> {
    front: Arc<Front>,
    dir: u64,
    /// Cookie of the last entry in the listing.
    cookie: u64,
    /// Whether the listing has an entry.
    started: bool,
    /// Inodes that are damaged: their names are listed without attributes.
    damaged: Vec<u64>,
    pub listing: L,
}

impl<L: Listing> Reading<L> {
    /// Of the entries after `cookie`.
    pub fn new(front: Arc<Front>, dir: u64, cookie: u64, listing: L) -> Reading<L> {
        Reading { front, dir, cookie, started: false, damaged: Vec::new(), listing }
    }

    /// As [`Reading::fill`], waiting for the device.
    pub fn fill_waiting(&mut self) -> Result<(), FsError> {
        let front = self.front.clone();
        let share = front.listing_budget.enter();
        let mut filled = self.fill();
        while let Err(Fail::Stall(_)) = filled {
            let before = self.cookie;
            // What cannot be brought is met below, where it is the next.
            let _held = front.fs.preload_dir(self.dir, self.cookie, share.entries(), L::ATTRIBUTES);
            filled = self.fill();
            if self.cookie == before && matches!(filled, Err(Fail::Stall(_))) {
                filled = self.bring_next().map_err(Fail::Error).and_then(|()| self.fill());
            }
        }
        match filled {
            // As `fill` has it.
            Err(Fail::Error(error)) if !self.started => Err(error),
            _ => Ok(()),
        }
    }

    /// Continues until the listing is full or the directory is at its end. Entries before an error
    /// make a listing of their own: the reader meets the error when it asks for more.
    pub fn fill(&mut self) -> Attempt<()> {
        match self.add_entries() {
            Err(Fail::Error(_)) if self.started => Ok(()),
            filled => filled,
        }
    }

    /// Brings the next entries into memory one by one, and finds those whose inodes are damaged.
    fn bring_next(&mut self) -> Result<(), FsError> {
        let fs = &self.front.fs;
        let entries = fs.wait(|| fs.read_dir(self.dir, self.cookie, BATCH))?;
        for (at, entry) in entries.iter().filter(|_| L::ATTRIBUTES).enumerate() {
            match fs.wait(|| fs.attributes(entry.ino)) {
                Ok(_) | Err(FsError::NotFound) => {}
                Err(FsError::Corrupt(_)) => self.damaged.push(entry.ino),
                Err(error) if at == 0 => return Err(error),
                // Those before it come first.
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    fn add_entries(&mut self) -> Attempt<()> {
        let front = self.front.clone();
        loop {
            let entries = front.fs.read_dir(self.dir, self.cookie, BATCH)?;
            let Some(last) = entries.last() else { return Ok(()) };
            let inos: Vec<u64> = entries.iter().filter(|_| L::ATTRIBUTES).map(|entry| entry.ino).collect();
            let mut found = front.fs.all_attributes(&inos).into_iter();
            let (mut ready, mut fail) = (Vec::with_capacity(entries.len()), None);
            for entry in &entries {
                match found.next().transpose() {
                    Ok(attributes) => ready.push((entry, attributes)),
                    // Removed since the entry was read: it is not in the directory any more.
                    Err(Fail::Error(FsError::NotFound)) => {}
                    Err(_) if self.damaged.contains(&entry.ino) => ready.push((entry, None)),
                    Err(other) => {
                        fail = Some(other);
                        break;
                    }
                }
            }
            if !self.add_all(&ready) {
                return Ok(());
            }
            match fail {
                Some(fail) => return Err(fail),
                None => self.cookie = last.cookie,
            }
        }
    }

    /// Adds entries. Returns whether there was room for all.
    fn add_all(&mut self, entries: &[(&DirEntry, Option<Attributes>)]) -> bool {
        // `.` and `..` come first. The kernel learns of an inode only with its attributes.
        let is_known = |(entry, attributes): &(&DirEntry, Option<Attributes>)| {
            attributes.is_some() && !matches!(&entry.name[..], b"." | b"..")
        };
        // Counted first: the listing cannot take an entry back.
        let inos: Vec<u64> = entries.iter().filter(|entry| is_known(entry)).map(|(entry, _)| entry.ino).collect();
        let mut counted = self.front.lookups.look_up_all(&inos).into_iter();
        let mut full = false;
        for listed in entries {
            let (entry, attributes) = listed;
            let counted = is_known(listed).then(|| counted.next()).flatten();
            // It is being removed.
            if counted == Some(false) {
                continue;
            }
            full = full || !self.listing.add(entry, attributes.as_ref());
            if !full {
                (self.cookie, self.started) = (entry.cookie, true);
            } else if counted.is_some() {
                self.front.forget([(entry.ino, 1)].into_iter());
            }
        }
        !full
    }
}
