//! Drops on a thread of its own what may take long to drop: attached files, each of which may be
//! the last reference to an inode, and eventfds, for which any number may wait. A process can
//! attach many thousands, and end.
//!
//! It guards the threads that others wait for, those that serve rings and those that learn that a
//! process ended.

use std::io;
use std::ops::Deref;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

/// The channel to the thread that drops things, which may wait.
#[derive(Clone)]
pub(super) struct DeferredDrop(mpsc::Sender<Message>);

enum Message {
    Drop(Box<dyn Send>),
    /// No ring is left.
    End,
}

impl DeferredDrop {
    /// Starts the thread that drops, which runs until [`DeferredDrop::end`].
    ///
    /// # Errors
    /// If the system has no thread to give.
    pub fn new(
        spawn: impl FnOnce(String, Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>>,
    ) -> io::Result<(DeferredDrop, JoinHandle<()>)> {
        let (sender, receiver) = mpsc::channel();
        let thread = spawn("ring-drops".into(), Box::new(move || drop_all(&receiver)))?;
        Ok((DeferredDrop(sender), thread))
    }

    /// Has the thread drop `what`.
    pub fn drop_later(&self, what: impl Send + 'static) {
        let _ = self.0.send(Message::Drop(Box::new(what))); // after the end it is dropped here
    }

    /// Ends the thread, after it has dropped all that came before.
    pub fn end(&self) {
        let _ = self.0.send(Message::End); // it has ended
    }
}

fn drop_all(messages: &mpsc::Receiver<Message>) {
    while let Ok(Message::Drop(what)) = messages.recv() {
        drop(what);
    }
    // Dropping a ring sends more: its files.
    while let Ok(message) = messages.try_recv() {
        drop(message);
    }
}

/// A reference that a ring holds. Whichever thread drops this, the deferred-drop thread drops the
/// reference.
pub(super) struct Held<T: ?Sized + Send + Sync + 'static> {
    /// `None` only while being dropped.
    held: Option<Arc<T>>,
    deferred_drop: DeferredDrop,
}

impl<T: ?Sized + Send + Sync + 'static> Held<T> {
    pub fn new(held: Arc<T>, deferred_drop: &DeferredDrop) -> Held<T> {
        Held { held: Some(held), deferred_drop: deferred_drop.clone() }
    }

    /// What is held, for a further reference, which whoever has it drops.
    pub fn as_arc(&self) -> &Arc<T> {
        self.held.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: ?Sized + Send + Sync + 'static> Deref for Held<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.as_arc()
    }
}

impl<T: ?Sized + Send + Sync + 'static> Drop for Held<T> {
    fn drop(&mut self) {
        self.deferred_drop.drop_later(self.held.take());
    }
}
