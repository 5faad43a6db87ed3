//! Drops what rings let go of: attached files, each of which may be the last reference to an inode,
//! and take long to drop. A process can attach many thousands, and end.
//!
//! It guards the threads that others wait for, those that serve rings and hear of their owners: a
//! thread of its own drops what rings leave, one thing after another.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// The channel to the thread that drops things, which may wait.
#[derive(Clone)]
pub(super) struct Leavings(mpsc::Sender<Leaving>);

enum Leaving {
    Dropped(Box<dyn Send>),
    /// No ring is left.
    End,
}

impl Leavings {
    /// With the thread that drops, until [`Leavings::end`].
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn new(
        spawn: impl FnOnce(String, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) -> io::Result<(Leavings, JoinHandle<()>)> {
        let (sender, receiver) = mpsc::channel();
        let thread = spawn("ring-leavings".into(), Box::new(move || drop_all(&receiver)))?;
        Ok((Leavings(sender), thread))
    }

    /// Has the thread drop something.
    pub fn leave(&self, what: impl Send + 'static) {
        let _ = self.0.send(Leaving::Dropped(Box::new(what))); // after the end it is dropped here
    }

    /// Ends the thread, after what was left before.
    pub fn end(&self) {
        let _ = self.0.send(Leaving::End); // it has ended
    }
}

fn drop_all(left: &mpsc::Receiver<Leaving>) {
    while let Ok(Leaving::Dropped(what)) = left.recv() {
        drop(what);
    }
    // To drop it leaves more: files of a ring's.
    while let Ok(leaving) = left.try_recv() {
        drop(leaving);
    }
}

/// What a ring holds. The thread that drops it may be one that must not wait: it goes elsewhere.
pub(super) struct Held<T: ?Sized + Send + Sync + 'static> {
    /// `None` only while being dropped.
    held: Option<Arc<T>>,
    leavings: Leavings,
}

impl<T: ?Sized + Send + Sync + 'static> Held<T> {
    pub fn new(held: Arc<T>, leavings: &Leavings) -> Held<T> {
        Held { held: Some(held), leavings: leavings.clone() }
    }
}

impl<T: ?Sized + Send + Sync + 'static> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: ?Sized + Send + Sync + 'static> Drop for Held<T> {
    fn drop(&mut self) {
        self.leavings.leave(self.held.take());
    }
}
