//! The order of two messages to the kernel about a file's length: its last byte after a direct
//! write, and the answer to a truncation.
//!
//! It guards that the kernel is not left with a length from before a truncation: the daemon reads
//! the length, then tells the kernel, and in between the file can be made shorter. So the answer to
//! a truncation, which carries the new length, is sent after the messages that were in flight when
//! the file became shorter. No thread waits with it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// Sends an answer.
type Answer = Box<dyn FnOnce() + Send>;

/// The messages about lengths that are in flight, for all files.
pub(crate) struct Lengths<A = Answer> {
    next: AtomicU64,
    files: Mutex<FxHashMap<u64, File<A>>>,
}

struct File<A> {
    /// Numbers of the messages in flight, in the order in which they began.
    tellings: BTreeSet<u64>,
    /// Answers, each to be sent after all messages with a lower number.
    answers: Vec<(u64, A)>,
}

/// The kernel is being told a length that is read from now on, until it is given to
/// [`Lengths::told`].
#[must_use]
pub(crate) struct Telling {
    ino: u64,
    number: u64,
}

impl<A> Default for Lengths<A> {
    fn default() -> Self {
        Lengths { next: AtomicU64::new(0), files: Mutex::default() }
    }
}

impl<A> Lengths<A> {
    /// The length of a file is about to be read, and told to the kernel.
    pub fn tell(&self, ino: u64) -> Telling {
        let mut files = self.files.lock();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let file = files.entry(ino).or_insert_with(|| File { tellings: BTreeSet::new(), answers: Vec::new() });
        file.tellings.insert(number);
        Telling { ino, number }
    }

    /// The kernel was told. Returns the answers that may be sent now.
    #[must_use]
    pub fn told(&self, Telling { ino, number }: Telling) -> Vec<A> {
        let mut files = self.files.lock();
        let Some(file) = files.get_mut(&ino) else { return Vec::new() };
        file.tellings.remove(&number);
        let first = file.tellings.first().copied().unwrap_or(u64::MAX);
        let (ready, waiting) = std::mem::take(&mut file.answers).into_iter().partition(|(before, _)| *before <= first);
        file.answers = waiting;
        if file.tellings.is_empty() {
            files.remove(&ino);
        }
        let ready: Vec<(u64, A)> = ready;
        ready.into_iter().map(|(_, answer)| answer).collect()
    }

    /// A file has become shorter. Returns the answer where it may be sent at once, and keeps it
    /// where not.
    #[must_use]
    pub fn shortened(&self, ino: u64, answer: A) -> Option<A> {
        let mut files = self.files.lock();
        let Some(file) = files.get_mut(&ino) else { return Some(answer) };
        file.answers.push((self.next.load(Ordering::Relaxed), answer));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_waits_for_what_was_being_told_before_and_for_nothing_that_came_later() {
        let lengths = Lengths::default();
        assert_eq!(lengths.shortened(1, "at once"), Some("at once"));
        let (first, second) = (lengths.tell(1), lengths.tell(1));
        assert_eq!(lengths.shortened(2, "another file"), Some("another file"));
        assert_eq!(lengths.shortened(1, "held"), None);
        let later = lengths.tell(1);
        assert!(lengths.told(second).is_empty());
        assert_eq!(lengths.shortened(1, "later"), None);
        assert_eq!(lengths.told(first), ["held"]);
        assert_eq!(lengths.told(later), ["later"]);
        assert!(lengths.files.lock().is_empty());
    }
}
