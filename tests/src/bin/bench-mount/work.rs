//! The rows: a data set, names, appends, streams, trees.

use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use gpunvme_tests::results;
use gpunvme_tests::tree;

use crate::Scale;
use crate::clients::{self, Work};
use crate::report::{Report, Rows};
use crate::subject::Subjects;

/// Bytes of a file of the data set.
pub const FILE: usize = 110 << 10;

/// Processes that read a data set, and that append.
const CLIENTS: [usize; 3] = [1, 8, 16];

/// In this order, each as a shell command in a folder that is empty at first. `$TREE` is an archive
/// of a tree.
const TREES: [(&str, &str); 4] = [
    ("tar x", "mkdir a && tar xf \"$TREE\" -C a"),
    ("cp -r", "cp -r a b"),
    ("read all, forgotten by the kernel", "tar cf - b | wc -c > /dev/null"),
    ("rm -r", "rm -r a b"),
];

/// A data set of many files is written, and read several times.
pub fn data_set(subjects: &Subjects, scale: &Scale, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let files = scale.files;
    let section = format!("a data set of {files} files of {}", results::bytes(FILE as u64));
    let folder = |root: &Path| root.join("dataset");
    let mut rows = Rows::new(&section, "files/s");
    for run in 0..scale.runs {
        for (subject, root) in subjects.all() {
            if run > 0 {
                fs::remove_dir_all(folder(root))?;
            }
            clients::make_folders(&folder(root), files)?;
            let rate = clients::rate(Work::WriteFiles { files, len: FILE }, &folder(root), 8)?;
            rows.add(&results::Work::named("write").by(8), subject, rate);
            rustix::fs::sync();
        }
    }
    report.add(rows)?;
    for clients in CLIENTS {
        let mut rows = Rows::new(&section, "MB/s");
        for _ in 0..scale.runs {
            for (subject, root) in subjects.all() {
                drop_caches()?;
                for pass in ["read, forgotten by the kernel", "read, second pass", "read, third pass"] {
                    let rate = clients::rate(Work::ReadFiles { files, len: FILE }, &folder(root), clients)?;
                    rows.add(&results::Work::named(pass).by(clients), subject, rate * FILE as f64 / 1e6);
                }
            }
        }
        report.add(rows)?;
    }
    Ok(subjects.all().try_for_each(|(_, root)| fs::remove_dir_all(folder(root)))?)
}

/// Names are made, looked at, changed and removed.
pub fn names(subjects: &Subjects, scale: &Scale, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let names = scale.names;
    let operations = [
        ("create", Work::Create { names }),
        ("stat, forgotten by the kernel", Work::Stat { names }),
        ("rename", Work::Rename { names }),
        ("unlink", Work::Unlink { names }),
    ];
    for clients in [1, 8] {
        let mut rows = Rows::new(&format!("{names} names, a folder for each client"), "thousand/s");
        for _ in 0..scale.runs {
            for (subject, root) in subjects.all() {
                for (name, work) in operations {
                    if matches!(work, Work::Stat { .. }) {
                        drop_caches()?;
                    }
                    rows.add(&results::Work::named(name).by(clients), subject, clients::rate(work, root, clients)? / 1e3);
                }
            }
        }
        report.add(rows)?;
    }
    Ok(())
}

/// Small appends are made durable, each before the next.
pub fn appends(subjects: &Subjects, scale: &Scale, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let mut rows = Rows::new("200 bytes appended and made durable, a file for each client", "thousand/s");
    for clients in CLIENTS {
        for _ in 0..scale.runs {
            for (subject, root) in subjects.all() {
                let rate = clients::rate(Work::Append { time: scale.time }, root, clients)?;
                rows.add(&results::Work::named("append and fsync").by(clients), subject, rate / 1e3);
            }
        }
    }
    report.add(rows)
}

/// One process writes and reads a large file in order.
pub fn streaming(subjects: &Subjects, scale: &Scale, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let len = scale.stream;
    let mut rows = Rows::new(&format!("one file of {}, in order, 1 MiB at a time", results::bytes(len)), "MB/s");
    for _ in 0..scale.runs {
        for (subject, root) in subjects.all() {
            for (way, direct) in [("through the page cache", false), ("O_DIRECT", true)] {
                for (name, work) in [("write", Work::WriteStream { len, direct }), ("read", Work::ReadStream { len, direct })] {
                    drop_caches()?;
                    let rate = clients::rate(work, root, 1)?;
                    rows.add(&results::Work::named(format!("{name}, {way}")), subject, rate / 1e6);
                }
            }
            fs::remove_file(root.join("stream"))?;
        }
    }
    report.add(rows)
}

/// A tree of small files is unpacked, copied, read and removed.
pub fn trees(subjects: &Subjects, scale: &Scale, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let archive: PathBuf = subjects.scratch().join("tree.tar");
    tree::archive(&archive, scale.tree)?;
    let mut rows = Rows::new(&format!("a tree of {} small files", scale.tree), "times/minute");
    for _ in 0..scale.runs {
        for (subject, root) in subjects.all() {
            let folder = root.join("trees");
            fs::create_dir(&folder)?;
            for (name, script) in TREES {
                if name.contains("forgotten") {
                    drop_caches()?;
                }
                let start = Instant::now();
                let status = Command::new("sh").args(["-c", script]).env("TREE", &archive).current_dir(&folder).status()?;
                if !status.success() {
                    return Err(format!("{name} on {subject}: {status}").into());
                }
                rows.add(&results::Work::named(name), subject, 60.0 / start.elapsed().as_secs_f64());
            }
            fs::remove_dir(&folder)?;
        }
    }
    fs::remove_file(&archive)?;
    report.add(rows)
}

/// Has the kernel forget names, inodes and contents.
fn drop_caches() -> io::Result<()> {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3")
}
