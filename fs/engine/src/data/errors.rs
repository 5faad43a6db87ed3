//! Errors of write-back: which processes have learned that data of a file was lost. Each process
//! that was there learns once; one that begins later learns of it only if no other has yet. That is
//! what Linux does for open files (`Documentation/core-api/errseq.rst`), by processes: opens are
//! not known here. Nothing else comes of an error: what is written after it is written as ever.

use crate::error::FsError;

/// Who asks whether data was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asker {
    /// A process.
    Process {
        /// Its number, and no other process's that asks.
        id: u64,
        /// When it began, and what time it is: of one clock, in any unit.
        began: u64,
        /// The time now.
        now: u64,
    },
    /// A process that cannot be told from others, or the kernel for one. It learns each time.
    Unknown,
}

/// The last error of writing a file out.
#[derive(Default)]
pub(super) struct Errors {
    /// How many errors there were so far.
    count: u64,
    last: Option<Lost>,
}

struct Lost {
    error: FsError,
    /// Processes that have learned of it.
    told: Vec<u64>,
    /// When the first of them did.
    since: Option<u64>,
    /// Whether any caller has.
    is_known: bool,
}

impl Errors {
    /// Data was lost.
    pub fn add(&mut self, error: FsError) {
        self.count += 1;
        self.last = Some(Lost { error, told: Vec::new(), since: None, is_known: false });
    }

    /// How many errors there were so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether there is none that a process may still have to learn of.
    pub fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    /// The last error, if no caller knows of it.
    pub fn unknown(&self) -> Option<&FsError> {
        self.last.as_ref().filter(|lost| !lost.is_known).map(|lost| &lost.error)
    }

    /// Tells of the last error, if the process was there and does not know.
    ///
    /// # Errors
    /// That error.
    pub fn tell(&mut self, asker: impl FnOnce() -> Asker) -> Result<(), FsError> {
        let Some(lost) = &mut self.last else { return Ok(()) };
        if let Asker::Process { id, began, now } = asker() {
            if lost.told.contains(&id) || lost.since.is_some_and(|since| began > since) {
                return Ok(());
            }
            lost.told.push(id);
            lost.since.get_or_insert(now);
        }
        lost.is_known = true;
        Err(lost.error.clone())
    }

    /// Tells a caller that is no process of the last error, if no other knows.
    ///
    /// # Errors
    /// That error.
    pub fn tell_anyone(&mut self) -> Result<(), FsError> {
        if self.unknown().is_some() { self.tell_again() } else { Ok(()) }
    }

    /// Tells a caller of the last error, even if other callers know of it.
    ///
    /// # Errors
    /// That error.
    pub fn tell_again(&mut self) -> Result<(), FsError> {
        let Some(lost) = &mut self.last else { return Ok(()) };
        lost.is_known = true;
        Err(lost.error.clone())
    }

    /// No process has the file open: the error is kept only if no caller knows of it.
    pub fn closed(&mut self) {
        self.last.take_if(|lost| lost.is_known);
    }

    /// The file is gone, and its data with it.
    pub fn clear(&mut self) {
        self.last = None;
    }
}
