//! What rings let go of: attached files, each of which may be the last of an inode, and take long to go. A process can attach many thousands, and end.
//!
//! It guards the threads that others wait for, those that serve rings and hear of their owners: a thread of its own drops what rings leave, one thing after another.

use super::service::AttachedFile;
use std::io;
use std::ops::Deref;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// Where to put what is to be dropped by a thread that may wait.
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

    /// Drops something elsewhere.
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

/// An attached file. Who drops it may be a thread that must not wait: the file goes elsewhere.
pub(super) struct Held {
    /// `None` only while being dropped.
    file: Option<Arc<dyn AttachedFile>>,
    leavings: Leavings,
}

impl Held {
    pub fn new(file: Arc<dyn AttachedFile>, leavings: &Leavings) -> Held {
        Held { file: Some(file), leavings: leavings.clone() }
    }
}

impl Deref for Held {
    type Target = dyn AttachedFile;

    fn deref(&self) -> &Self::Target {
        &**self.file.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.leavings.leave(self.file.take());
    }
}
