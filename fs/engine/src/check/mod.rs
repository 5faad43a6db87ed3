//! Checking a volume, and repairing it.
//!
//! A check is one pass over the metadata, in the order of the tree ([`walk`]): what concerns one
//! inode is judged as its items come by ([`items`]), what concerns several is kept in small
//! records, which are sorted, outside memory if need be ([`spool`]), and compared when the tree is
//! done: names with inodes ([`names`]), blocks with bitmaps ([`space`]).
//!
//! A repair goes in rounds: check, mend what was found, check again, until nothing is found. So a
//! mending may leave behind what the next round settles (the blocks of a file that was cut, the
//! count of a directory that lost an entry), each mending stays small, and a repair that was cut
//! off is simply begun again. In a round the shape of the tree comes first ([`rebuild`]): without
//! it nothing else is known. Then bitmaps and counters, so that the engine can allocate; then
//! items ([`mend`]), by ordinary operations through the journal.

mod finding;
mod items;
mod mend;
mod names;
mod open;
mod orphans;
mod rebuild;
mod space;
mod spool;
mod stop;
mod tally;
mod unshare;
mod walk;

use std::sync::Arc;

use gpunvme_blockdev::Io;
use gpunvme_layout::key::INO_MAX;
use gpunvme_layout::{Block, Timestamp};

pub use finding::{Finding, Findings, Kind, Place};
pub use stop::Stop;

use finding::Fix;
use items::{Items, Kept};
use mend::Mender;
use rebuild::Survey;
use space::{May, Space};
use tally::Tally;
use walk::Reader;

use crate::error::FsError;
use crate::volume::Volume;

/// Findings that are listed, and mended in one round.
const LISTED_MAX: usize = 100_000;
/// Rounds that a repair takes at the most, besides those that many findings need.
const ROUNDS_MAX: u64 = 32;
/// Most metadata that is kept in memory, in bytes; the rest of the memory is for records.
const CACHE: usize = 32 << 20;
/// Memory that a check takes when nothing else is said, in bytes.
pub const MEMORY: usize = 256 << 20;

/// Checks an open volume that no other thread uses. Returns what is wrong with it.
///
/// # Errors
/// The device failed.
pub fn check(volume: &Volume) -> Result<Vec<Finding>, FsError> {
    let mut findings = Findings::new(LISTED_MAX);
    examine(volume, MEMORY, &Stop::default(), &mut findings, None, &mut |_, _, _| ())?;
    Ok(findings.list)
}

/// Stage of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The items of the tree; counted in inodes.
    Inodes,
    /// Bitmaps and descriptors; counted in groups.
    Groups,
}

/// Callback for the progress of a check: stage, count done, and count in all.
pub type Progress<'a> = &'a mut dyn FnMut(Stage, u64, u64);

/// How a volume is checked.
#[derive(Debug, Clone)]
pub struct CheckOptions {
    /// Nothing is written: the journal is replayed in memory only.
    pub read_only: bool,
    /// Memory for metadata and what is kept of it, in bytes; what exceeds it goes to temporary
    /// files.
    pub memory: usize,
    /// The time that is stamped on what a repair makes new.
    pub now: Timestamp,
    /// Ends whatever is done with [`FsError::Cancelled`]; [`Fsck::close`] then makes durable what
    /// was mended.
    pub stop: Stop,
}

/// Result of a repair.
#[derive(Debug)]
pub struct Repaired {
    /// All findings: those of the check before, and those that came up while others were mended.
    pub found: Findings,
    /// Findings that are left.
    pub left: Findings,
    /// Where the tree was built anew, and the number of inodes was known.
    pub refound: Option<Refound>,
}

/// What was found again of a tree that was built anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refound {
    /// Inodes that the volume had.
    pub of: u64,
    /// Those whose items could be read.
    pub inodes: u64,
}

/// A volume under examination.
pub struct Fsck {
    volume: Volume,
    options: CheckOptions,
    /// Findings in the fixed places, and the superblocks that would mend them.
    fixed: Findings,
    superblocks: Vec<Block>,
    /// The journal was left empty on purpose.
    clean: bool,
    /// The journal has to be erased before the first change.
    erase_journal: bool,
    /// The root of the tree is unknown.
    lost: bool,
    /// The anchors say that the volume is in use.
    begun: bool,
    /// There was no room for a new tree, or no time. The part of it in memory must not become
    /// durable: the old tree stays the valid one.
    abandoned: bool,
    refound: Option<Refound>,
}

impl Fsck {
    /// Opens a volume, damaged as it may be. Writes nothing.
    ///
    /// # Errors
    /// The device failed, or carries no volume that this program knows.
    pub fn open(io: Arc<Io>, options: CheckOptions) -> Result<Fsck, FsError> {
        let mut fixed = Findings::new(LISTED_MAX);
        let opened = open::open(io, options.read_only, cache(options.memory), &options.stop, &mut fixed)?;
        let lost = fixed.counts.contains_key(&Kind::State);
        let open::Opened { volume, clean, erase_journal, superblocks } = opened;
        Ok(Fsck {
            volume,
            options,
            fixed,
            superblocks,
            clean,
            erase_journal,
            lost,
            begun: false,
            abandoned: false,
            refound: None,
        })
    }

    /// The volume.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Whether the volume was unmounted cleanly.
    pub fn was_clean(&self) -> bool {
        self.clean
    }

    /// Checks everything. Writes nothing.
    ///
    /// # Errors
    /// The device failed.
    pub fn check(&self, progress: Progress) -> Result<Findings, FsError> {
        let mut findings = self.fixed.clone();
        if !self.lost {
            examine(&self.volume, self.memory(), &self.options.stop, &mut findings, None, progress)?;
        }
        Ok(findings)
    }

    /// Memory for records, in bytes.
    fn memory(&self) -> usize {
        self.options.memory - cache(self.options.memory)
    }

    /// Mends what is found, as far as `may` allows it for a kind.
    ///
    /// # Errors
    /// The device failed.
    pub fn repair(&mut self, may: May, progress: Progress) -> Result<Repaired, FsError> {
        let first = self.check(progress)?;
        // What may be another filesystem's is not written to.
        let forbidden = [Kind::Journal, Kind::Foreign].into_iter().any(|kind| first.counts.contains_key(&kind) && !may(kind));
        if self.abandoned || forbidden {
            return Ok(Repaired { found: first.clone(), left: first, refound: None });
        }
        self.begin()?;
        if !self.superblocks.is_empty() && (!first.counts.contains_key(&Kind::Superblock) || may(Kind::Superblock)) {
            open::write_superblocks(self.volume.io(), &std::mem::take(&mut self.superblocks))?;
            self.volume.know_front();
        }
        let left = !self.superblocks.is_empty();
        self.fixed.retain(|kind| matches!(kind, Kind::Superblock | Kind::Foreign) && left);
        let mut tally = Tally::new(first);
        let mut before = Vec::new();
        let mut rounds = 0;
        // A round mends what it lists.
        while rounds < ROUNDS_MAX + tally.total() / LISTED_MAX as u64 {
            let mut findings = self.fixed.clone();
            let goes_on = self.round(&mut findings, may, progress)?;
            tally.add(&findings);
            let mendable = findings.counts.keys().any(|kind| may(*kind));
            if !goes_on || !mendable || findings.list == before {
                return Ok(Repaired { found: tally.into_findings(), left: findings, refound: self.refound });
            }
            before = findings.list;
            rounds += 1;
        }
        Ok(Repaired { found: tally.into_findings(), left: self.check(progress)?, refound: self.refound })
    }

    /// Says in the anchor that the volume is in use, and where the journal begins, before the
    /// first change.
    fn begin(&mut self) -> Result<(), FsError> {
        if !self.begun {
            self.volume.checkpoint()?;
            if std::mem::take(&mut self.erase_journal) {
                self.volume.erase_journal()?;
            }
            self.begun = true;
        }
        Ok(())
    }

    /// Checks, and mends what was found. Returns whether another round may help.
    fn round(&mut self, findings: &mut Findings, may: May, progress: Progress) -> Result<bool, FsError> {
        if self.lost {
            findings.add(Kind::State, Place::State, Fix::Elsewhere, || "the root of the tree is not known".into());
        } else {
            examine(&self.volume, self.memory(), &self.options.stop, findings, Some(&mut *may), progress)?;
        }
        if let Some(refound) = &mut self.refound {
            let counted = findings.list.iter().filter_map(|finding| match finding.fix {
                Fix::Inodes(inodes) => Some(inodes),
                _ => None,
            });
            // What is missing is made anew after the first count, the root directory say.
            refound.inodes = counted.fold(refound.inodes, u64::min);
        }
        self.settle()?;
        if findings.tree_is_broken() {
            if !findings.counts.keys().filter(|kind| kind.is_shape()).all(|kind| may(*kind)) {
                return Ok(false);
            }
            return match self.rebuild() {
                Ok(()) => Ok(true),
                Err(error) => {
                    self.abandoned = true;
                    if matches!(error, FsError::NoSpace) { Ok(false) } else { Err(error) }
                }
            };
        }
        // As long as blocks in use may be marked free, nothing may be allocated: it could be they.
        let misled = findings.counts.keys().any(|kind| kind.misleads_allocator())
            && !findings.counts.keys().filter(|kind| kind.is_space()).all(|kind| may(*kind));
        let mut mender = Mender::new(&self.volume, self.options.now, &self.options.stop);
        // Counters first: what others make new takes its number from one, and counts.
        let (counters, others): (Vec<&Finding>, Vec<&Finding>) = findings.list.iter().partition(|f| f.kind == Kind::Counter);
        for finding in counters.into_iter().chain(others) {
            if !misled && may(finding.kind) {
                mender.mend(finding.fix)?;
            }
        }
        mender.finish()?;
        self.settle()?;
        Ok(true)
    }

    /// Makes durable what was mended, and leaves no image of it in the journal: freed blocks can
    /// be used for anything then.
    fn settle(&self) -> Result<(), FsError> {
        self.volume.commit()?;
        self.volume.checkpoint()
    }

    /// Builds the tree anew from its leaves.
    fn rebuild(&mut self) -> Result<(), FsError> {
        let reader = Reader::new(&self.volume, &self.options.stop);
        let inodes = self.volume.usage().inodes;
        if !self.lost && self.refound.is_none() {
            self.refound = Some(Refound { of: inodes, inodes });
        }
        let mut kept = Kept::new(self.memory(), &self.options.stop);
        let survey = Survey::new(&self.volume, &reader, self.lost, self.memory(), &mut kept)?;
        // Nothing that a leaf holds may be given to the new nodes.
        let mut ignored = Findings::new(0);
        let mut all = |_| true;
        let space = Space::new(&self.volume, &reader, &mut ignored, false, Some(&mut all));
        space.compare(kept.used.sorted()?, &mut |_| ())?;
        self.volume.restart_journal()?;
        survey.build(&self.volume, &reader)?;
        self.lost = false;
        self.settle()
    }

    /// Ends an examination. A volume without errors is left as an unmount leaves it; of one with
    /// errors, what was mended is durable.
    ///
    /// # Errors
    /// The device failed, or the end was asked for before all that a crash left to do was done:
    /// what was done is durable, the rest stays noted.
    pub fn close(mut self, sound: bool) -> Result<(), FsError> {
        if self.options.read_only || self.abandoned || (self.clean && !self.begun) || (!sound && !self.begun) {
            return Ok(());
        }
        self.begin()?;
        let finished = if sound { orphans::finish(&self.volume, &self.options.stop) } else { Ok(()) };
        self.volume.close_journal()?;
        finished
    }
}

/// The part of `memory` that is for metadata.
fn cache(memory: usize) -> usize {
    CACHE.min(memory / 2)
}

/// One check of everything behind the fixed places; mends bitmaps, descriptors and their counters
/// on the way, if it may.
fn examine(
    volume: &Volume,
    memory: usize,
    stop: &Stop,
    findings: &mut Findings,
    may: Option<May>,
    progress: Progress,
) -> Result<(), FsError> {
    let state = volume.meta.read().state;
    let superblock = volume.superblock();
    let (geometry, reader) = (volume.geometry(), Reader::new(volume, stop));
    let mut tell = |done: u64| progress(Stage::Inodes, done, state.inodes);
    let mut items = Items::new(geometry, superblock.name_hash(), Kept::new(memory, stop), findings, &mut tell);
    walk::walk(&reader, state.root, state.level, &mut items)?;
    let kept = items.finish()?;
    let used = kept.used.sorted()?;
    // Of a tree that is not whole, what its parts say of each other is not to be believed.
    let whole = !findings.tree_is_broken();
    if whole {
        let totals = names::compare(kept.inodes.sorted()?, kept.names.sorted()?, kept.orphans.sorted()?, memory, stop, findings)?;
        names::tell_names(volume, findings);
        if totals.inodes != state.inodes {
            let what = || format!("counts {} inodes, there are {}", state.inodes, totals.inodes);
            findings.add(Kind::Counter, Place::State, Fix::Inodes(totals.inodes), what);
        }
        // Of the last number none is given out next.
        if totals.highest >= state.next_ino && state.next_ino < INO_MAX {
            let what = || format!("would give out inode {} next, and {} is there", state.next_ino, totals.highest);
            findings.add(Kind::Counter, Place::State, Fix::NextInode(totals.highest + 1), what);
        }
    }
    let space = Space::new(volume, &reader, findings, whole, may.filter(|_| whole));
    space.compare(used, &mut |done| progress(Stage::Groups, done, geometry.groups))
}
