//! What the kernel is told unasked.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::wire::{self, OutHeader};

/// Tells the kernel what it has not asked for. Waits for the kernel, which may wait for replies:
/// not to be used where a request of the same inode waits for this thread.
#[derive(Clone, Debug)]
pub struct Notifier(Arc<OwnedFd>);

impl Notifier {
    pub(crate) fn new(device: Arc<OwnedFd>) -> Notifier {
        Notifier(device)
    }

    /// The kernel writes back and forgets `len` bytes of a file's pages from `offset` on (to its
    /// end where `len` is 0), and its attributes. A negative offset: the attributes only, without
    /// waiting (`fuse_reverse_inval_inode`).
    ///
    /// # Errors
    /// The connection has ended.
    pub fn invalidate(&self, ino: u64, offset: i64, len: i64) -> io::Result<()> {
        let out = wire::NotifyInvalInodeOut { ino, off: offset, len };
        self.send(wire::NOTIFY_INVAL_INODE, [out.as_bytes(), &[]])
    }

    /// The kernel puts bytes into its cache, and makes the file at least as long.
    ///
    /// # Errors
    /// The connection has ended, or there is no memory.
    pub fn store(&self, ino: u64, offset: u64, data: &[u8]) -> io::Result<()> {
        let size = u32::try_from(data.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let out = wire::NotifyStoreOut { nodeid: ino, offset, size, padding: 0 };
        self.send(wire::NOTIFY_STORE, [out.as_bytes(), data])
    }

    fn send(&self, code: i32, body: [&[u8]; 2]) -> io::Result<()> {
        let len = size_of::<OutHeader>() + body.iter().map(|part| part.len()).sum::<usize>();
        let len = u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        // A notification has no request, and its code where a reply has an error.
        let header = OutHeader { len, error: code, unique: 0 };
        let message = [header.as_bytes(), body[0], body[1]].map(IoSlice::new);
        match rustix::io::writev(&self.0, &message) {
            // The kernel does not know the inode (any more), and so nothing of it.
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
