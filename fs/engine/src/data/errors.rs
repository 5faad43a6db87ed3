//! Errors of write-back: which opens of a file have learned that data of it was lost. Each open
//! that was there learns once, as in Linux (`Documentation/core-api/errseq.rst`); an open made
//! later learns of it only if no other has yet. Nothing else comes of an error: what is written
//! after it is written as ever.

use crate::error::FsError;

/// An open of a file: its number among those of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open(pub u64);

/// The opens of a file, and the last error of writing it out.
#[derive(Default)]
pub(super) struct Errors {
    /// How many opens there were so far.
    opens: u64,
    /// How many errors there were so far.
    count: u64,
    last: Option<Lost>,
}

struct Lost {
    error: FsError,
    /// The last open that is to learn of it.
    last_open: u64,
    /// Opens that have.
    told: Vec<u64>,
    /// Whether any caller has.
    is_known: bool,
}

impl Errors {
    /// The file is opened.
    pub fn open(&mut self) -> Open {
        self.opens += 1;
        if let Some(lost) = self.last.as_mut().filter(|lost| !lost.is_known) {
            lost.last_open = self.opens;
        }
        Open(self.opens)
    }

    /// Data was lost.
    pub fn add(&mut self, error: FsError) {
        self.count += 1;
        self.last = Some(Lost { error, last_open: self.opens, told: Vec::new(), is_known: false });
    }

    /// How many errors there were so far.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether there is none that an open may still have to learn of.
    pub fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    /// The last error, if no caller knows of it.
    pub fn unknown(&self) -> Option<&FsError> {
        self.last.as_ref().filter(|lost| !lost.is_known).map(|lost| &lost.error)
    }

    /// Tells an open of the last error, if it was there and does not know.
    ///
    /// # Errors
    /// That error.
    pub fn tell(&mut self, open: Open) -> Result<(), FsError> {
        match &mut self.last {
            Some(lost) if open.0 <= lost.last_open && !lost.told.contains(&open.0) => {
                lost.told.push(open.0);
                lost.is_known = true;
                Err(lost.error.clone())
            }
            _ => Ok(()),
        }
    }

    /// Tells a caller that has no open of the last error, if no other knows.
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

    /// The last open is closed: the error is kept only if no caller knows of it.
    pub fn closed(&mut self) {
        self.last.take_if(|lost| lost.is_known);
    }

    /// The file is gone, and its data with it.
    pub fn clear(&mut self) {
        self.last = None;
    }
}
