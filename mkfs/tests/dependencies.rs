//! What the crates of this workspace link. mkfs and fsck work on machines that never mount a
//! volume, so they, and the engine that they share with the mount, have nothing of FUSE and of the
//! daemon in them.

use std::process::Command;

/// The names of all packages that `package` links, its own included.
fn linked(package: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none", "--format", "{p}", "--package", package])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect()
}

#[track_caller]
fn assert_links_none_of(package: &str, unwanted: &[&str]) {
    let linked = linked(package);
    assert!(linked.iter().any(|name| name == "gpunvme-layout"), "{linked:?}");
    let found: Vec<_> = linked.iter().filter(|name| unwanted.contains(&name.as_str())).collect();
    assert!(found.is_empty(), "{package} links {found:?}");
}

#[test]
fn mkfs_and_fsck_link_no_fuse() {
    assert_links_none_of("gpunvme-mkfs", &["gpunvme-fuse", "seccompiler", "tracing-subscriber", "gpunvme-fs"]);
}

#[test]
fn the_engine_links_nothing_of_a_program() {
    assert_links_none_of(
        "gpunvme-engine",
        &["gpunvme-fuse", "clap", "seccompiler", "tracing-subscriber", "gpunvme-fs", "gpunvme-programs"],
    );
}

#[test]
fn the_mount_links_fuse() {
    assert!(linked("gpunvme-fs").iter().any(|name| name == "gpunvme-fuse"));
}
