//! DESTROY, the kernel's last request to a mount of a block device (`fuseblk`). umount(2) waits for
//! its answer, which is given when the volume is written down: not by the thread that it comes to.

use std::sync::mpsc::{self, Receiver, Sender};

use crate::reply::Reply;

/// Where the threads of a connection leave the answer to DESTROY.
#[derive(Clone)]
pub(crate) struct Destroyed(Sender<Reply>);

/// Where it is left, and had from. The receiver learns also that all threads have ended without.
pub(crate) fn channel() -> (Destroyed, Receiver<Reply>) {
    let (sender, receiver) = mpsc::channel();
    (Destroyed(sender), receiver)
}

impl Destroyed {
    /// Leaves the answer. Of a mount that has not come about none will ask for it: then it is given
    /// at once.
    pub fn has_come(&self, reply: Reply) {
        if let Err(unsent) = self.0.send(reply) {
            unsent.0.ok();
        }
    }
}
