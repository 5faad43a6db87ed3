//! Messages about what a caller can bring about as often as it likes: the first of a kind is logged, and of those after it one in a while, with how many
//! were left out.

use std::sync::{Arc, LazyLock};

use gpunvme_gpupath::seldom::Seldom;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use gpunvme_engine::error::FsError;

/// What was being done, and what is said of it.
type Kind = (&'static str, &'static str);

static KINDS: LazyLock<Mutex<FxHashMap<Kind, Arc<Seldom>>>> = LazyLock::new(Mutex::default);

/// Whether a message of this kind is to be logged now, and then how many were not since the last one.
fn seldom(operation: &'static str, kind: &'static str) -> Option<u64> {
    let seldom = KINDS.lock().entry((operation, kind)).or_default().clone();
    seldom.now()
}

/// An operation failed: logs what is not the caller's doing.
pub(super) fn failed(operation: &'static str, ino: u64, error: &FsError) {
    let kind = match error {
        FsError::Device(_) => "device",
        FsError::Corrupt(_) => "damaged",
        _ => return,
    };
    if let Some(left_out) = seldom(operation, kind) {
        tracing::error!(operation, ino, left_out, "{error}");
    }
}

/// The kernel was to be told something of a file.
pub(super) fn not_told(ino: u64, error: &std::io::Error) {
    if let Some(left_out) = seldom("notify", "refused") {
        tracing::warn!(ino, %error, left_out, "the kernel did not take a notification: it may show what this file was before");
    }
}

/// An inode without a name stays until the next mount tries again.
pub(super) fn not_removed(ino: u64, error: &FsError) {
    if let Some(left_out) = seldom("remove", "failed") {
        tracing::warn!(ino, %error, left_out, "an inode without a name could not be removed");
    }
}

/// A pool has more tasks than threads.
pub(super) fn no_thread(pool: &'static str, error: &std::io::Error) {
    if let Some(left_out) = seldom(pool, "no thread") {
        tracing::warn!(pool, %error, left_out, "no thread to be had");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_each_kind_is_logged_and_no_other_at_once() {
        for kind in ["device", "damaged"] {
            assert_eq!(seldom("test", kind), Some(0));
            assert!((0..20_000).all(|_| seldom("test", kind).is_none()));
        }
        assert_eq!(seldom("another test", "device"), Some(0));
    }
}
