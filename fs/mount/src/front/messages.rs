//! Log messages that a caller can cause as often as it likes: the first of a kind is logged, then
//! one in ten seconds, with the number of those that were left out.

use std::sync::{Arc, LazyLock};

use gpunvme_abi::Direction;
use gpunvme_blockdev::{self as blockdev, Op};
use gpunvme_gpupath::rate_limit::RateLimit;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use gpunvme_engine::error::FsError;

/// The operation that failed, what is logged about it, and how the device failed, if it did.
type Kind = (&'static str, &'static str, Option<Failure>);

/// The command to the device and the error of the device or of the kernel below it. Any device has
/// few of them, so kinds are few.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Failure {
    Command(Op, blockdev::nvme::Status),
    Io(Op, i32),
    Other(i32),
}

static KINDS: LazyLock<Mutex<FxHashMap<Kind, Arc<RateLimit>>>> = LazyLock::new(Mutex::default);

/// Whether a message of this kind is to be logged now, and then how many were not since the last
/// one.
fn left_out(operation: &'static str, kind: &'static str) -> Option<u64> {
    of_kind((operation, kind, None))
}

fn of_kind(kind: Kind) -> Option<u64> {
    let limit = KINDS.lock().entry(kind).or_default().clone();
    limit.allow()
}

/// An operation failed: logs what is not the caller's doing.
pub(super) fn failed(operation: &'static str, ino: u64, error: &FsError) {
    let kind = match error {
        FsError::Device(error) => (operation, "device", Some(failure(error))),
        FsError::Corrupt(_) => (operation, "damaged", None),
        _ => return,
    };
    if let Some(left_out) = of_kind(kind) {
        tracing::error!(operation, ino, left_out, "{error}");
    }
}

/// The device, or the buffer, failed a direct transfer. The buffer is the application's, which can
/// make it fail as often as it likes.
pub(super) fn transfer_failed(direction: Direction, ino: u64, error: &blockdev::Error) {
    if let Some(left_out) = of_kind(("transfer", "device", Some(failure(error)))) {
        tracing::error!(ino, ?direction, left_out, "a direct transfer failed: {error}");
    }
}

fn failure(error: &blockdev::Error) -> Failure {
    match *error {
        blockdev::Error::Command { op, status, .. } => Failure::Command(op, status),
        blockdev::Error::Io { op, errno, .. } => Failure::Io(op, errno),
        ref error => Failure::Other(error.errno()),
    }
}

/// The kernel was to be told something of a file.
pub(super) fn not_told(ino: u64, error: &std::io::Error) {
    if let Some(left_out) = left_out("notify", "refused") {
        tracing::warn!(ino, %error, left_out, "the kernel did not take a notification: it may show what this file was before");
    }
}

/// An inode without a name stays until the next mount tries again.
pub(super) fn not_removed(ino: u64, error: &FsError) {
    if let Some(left_out) = left_out("remove", "failed") {
        tracing::warn!(ino, %error, left_out, "an inode without a name could not be removed");
    }
}

/// A pool has more tasks than threads.
pub(super) fn no_thread(pool: &'static str, error: &std::io::Error) {
    if let Some(left_out) = left_out(pool, "no thread") {
        tracing::warn!(pool, %error, left_out, "no thread to be had");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_each_kind_is_logged_and_no_other_at_once() {
        for kind in ["device", "damaged"] {
            assert_eq!(left_out("test", kind), Some(0));
            assert!((0..20_000).all(|_| left_out("test", kind).is_none()));
        }
        assert_eq!(left_out("another test", "device"), Some(0));
    }

    #[test]
    fn another_answer_of_the_device_is_another_kind() {
        let failed = |op, errno| {
            let error = blockdev::Error::Io { device: "test".into(), op, offset: 0, len: 4096, errno };
            of_kind(("ioctl", "device", Some(failure(&error))))
        };
        assert_eq!(failed(Op::Read, libc::EIO), Some(0));
        assert_eq!(failed(Op::Read, libc::EIO), None);
        assert_eq!(failed(Op::Read, libc::EREMOTEIO), Some(0));
        assert_eq!(failed(Op::Discard, libc::EIO), Some(0));
    }
}
