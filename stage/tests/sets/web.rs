//! Web servers, which tell less of their objects than stores do.

use crate::access::certified;
use crate::store::{Store, Tag};
use crate::{ends_well, fails, gpunvme};
use gpunvme_tests::tree;
use std::fs;
use std::process::Command;
use tempfile::TempDir;

const SIZE: usize = 3_000_000;

/// A server with an object of many parts, and a folder with its authority.
fn server() -> (Store, TempDir) {
    let here = tempfile::tempdir().unwrap();
    let store = Store::secure(certified(here.path()));
    store.state().objects.insert("large".into(), tree::pattern(1, SIZE));
    (store, here)
}

fn hydrate(store: &Store, here: &TempDir) -> Command {
    let mut command = gpunvme("hydrate");
    command.env("SSL_CERT_FILE", here.path().join("ca.pem"));
    command.arg(store.url("/bucket/large")).arg(here.path().join("set"));
    command
}

#[test]
fn an_object_that_changes_is_no_mixture_where_etags_are_weak_or_none() {
    let weak: Tag = |bytes| Some(format!("W/\"{:08x}\"", crc32c::crc32c(bytes)));
    for tag in [weak, |_| None] {
        let (store, here) = server();
        store.state().tag = Some(tag);
        let new = tree::pattern(2, SIZE);
        store.state().change = Some(("large".into(), 7, new.clone()));
        ends_well(&hydrate(&store, &here).output().unwrap());
        assert!(fs::read(here.path().join("set/large")).unwrap() == new, "the object that the server has now");
        assert!(ends_well(&hydrate(&store, &here).output().unwrap()).contains("fetched: 0"));
    }
}

#[test]
fn a_server_that_refuses_what_it_does_not_have_gives_what_it_has() {
    let (store, here) = server();
    store.state().refuses_absent = true;
    let said = fails(&hydrate(&store, &here).arg("--published").output().unwrap());
    assert!(said.contains("gpunvme-manifest.json") && said.contains("403"), "{said}");
    ends_well(&hydrate(&store, &here).output().unwrap());
    assert!(fs::read(here.path().join("set/large")).unwrap() == tree::pattern(1, SIZE));
}

#[test]
fn an_etag_that_is_too_long_is_kept_nowhere() {
    let (store, here) = server();
    store.state().tag = Some(|_| Some(format!("\"{}\"", "x".repeat(2000))));
    let said = fails(&hydrate(&store, &here).output().unwrap());
    assert!(said.contains("its ETag is longer than 1024 bytes") && !here.path().join("set").exists(), "{said}");
}
