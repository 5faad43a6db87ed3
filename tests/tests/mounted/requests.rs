//! What the kernel asks: no kind of request beyond those that docs/internals/requests.md explains,
//! and none of them more often.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::requests::{Counts, Requests};
use gpunvme_tests::{needs_mount, report_skipped};

/// Files that each test works on.
const FILES: usize = 10;

/// A volume, with its files' names in a folder, and the count of requests to it; None where they
/// cannot be counted.
fn set_up() -> Option<(Mounted, Vec<PathBuf>, Requests)> {
    let volume = Mounted::new();
    fs::create_dir(volume.path("folder")).unwrap();
    let names = (0..FILES).map(|number| volume.path(format!("folder/file {number}"))).collect();
    let requests = Requests::to(&volume.root());
    if requests.is_none() {
        report_skipped("requests", "needs the tracepoint fuse:fuse_request_send");
    }
    Some((volume, names, requests?))
}

/// Insists that there were at most so many requests of these kinds, and none of others.
fn assert_at_most(limits: &[(&str, usize)], counts: &Counts) {
    for (kind, count) in counts {
        let limit = limits.iter().find(|(name, _)| name == kind).map_or(0, |(_, limit)| *limit);
        assert!(*count <= limit, "{kind}: {count}, and not {limit} at most; all: {counts:?}");
    }
}

fn make(names: &[PathBuf]) {
    names.iter().for_each(|name| File::create_new(name).unwrap().write_all(b"contents").unwrap());
}

#[test]
fn a_new_file_costs_one_request_of_each_kind() {
    needs_mount!();
    let Some((volume, names, requests)) = set_up() else { return };
    // From the first the kernel learns not to send OPEN, CREATE and FLUSH any more.
    make(&[volume.path("folder/first")]);
    let counts = requests.of(|| make(&names));
    for kind in ["FUSE_MKNOD", "FUSE_WRITE"] {
        assert_eq!(counts.get(kind), Some(&FILES), "{counts:?}");
    }
    let each = ["FUSE_LOOKUP", "FUSE_GETATTR", "FUSE_MKNOD", "FUSE_GETXATTR", "FUSE_WRITE"].map(|kind| (kind, FILES));
    assert_at_most(&each, &counts);
}

#[test]
fn a_name_is_asked_for_once_whether_it_is_there_or_not() {
    needs_mount!();
    let Some((volume, names, requests)) = set_up() else { return };
    make(&names);
    let missing = volume.path("folder/missing");
    assert!(!missing.exists());
    let counts = requests.of(|| {
        names.iter().for_each(|name| assert!(name.exists()));
        assert!(!missing.exists());
    });
    // Rust's library asks for the time of birth too, and a write changed the other times.
    assert_at_most(&[("FUSE_STATX", FILES)], &counts);
    assert_eq!(requests.of(|| names.iter().for_each(|name| assert!(name.exists()))), Counts::new());
}

#[test]
fn a_listing_brings_the_attributes_along() {
    needs_mount!();
    let Some((volume, names, requests)) = set_up() else { return };
    make(&names);
    drop(requests);
    let volume = volume.remount();
    let requests = Requests::to(&volume.root()).expect("the trace that was there");
    fs::metadata(volume.path("folder")).unwrap();
    let counts = requests.of(|| {
        assert_eq!(fs::read_dir(volume.path("folder")).unwrap().count(), FILES);
        // Not of Rust's library, which asks for the time of birth: that is in no listing.
        names.iter().for_each(|name| assert_eq!(rustix::fs::stat(name).unwrap().st_size, 8));
    });
    assert_eq!(counts.get("FUSE_READDIRPLUS"), Some(&1), "{counts:?}");
    // The first directory that is opened in a mount; the end of the listing.
    assert_at_most(&[("FUSE_OPENDIR", 1), ("FUSE_READDIRPLUS", 1), ("FUSE_READDIR", 1)], &counts);
}

#[test]
fn what_the_kernel_has_of_files_is_read_without_the_daemon() {
    needs_mount!();
    let Some((volume, names, requests)) = set_up() else { return };
    make(&names);
    drop(requests);
    let volume = volume.remount();
    let requests = Requests::to(&volume.root()).expect("the trace that was there");
    // Looks at the length first, as most programs do.
    let read = || names.iter().for_each(|name| assert_eq!(fs::read(name).unwrap(), b"contents"));
    let first = requests.of(read);
    assert_eq!((first.get("FUSE_READ"), first.get("FUSE_OPEN")), (Some(&FILES), Some(&1)), "{first:?}");
    // A READ makes the kernel ask for the time of the last access, here with that of birth.
    assert_at_most(&[("FUSE_STATX", FILES)], &requests.of(read));
    assert_eq!(requests.of(read), Counts::new());
}
