//! Measures what users do with a tree of small files: unpack it, copy it, look through it, remove
//! it.

use std::error::Error;
use std::fs;
use std::process::Command;
use std::time::Instant;

use gpunvme_tests::results::Work;
use gpunvme_tests::tree;

use crate::Scale;
use crate::names::drop_caches;
use crate::report::Row;
use crate::subject::{Subject, Subjects};

/// In this order, each as a shell command: `$TREE` is the archive, and the folder in which it runs
/// is empty at first.
const WORK: [(&str, &str); 5] = [
    ("tar x", "mkdir a && tar xf \"$TREE\" -C a"),
    ("cp -r", "cp -r a b"),
    ("find, caches dropped", "find . -newer a -size +1000k"),
    ("read all, caches dropped", "tar cf - b | wc -c > /dev/null"),
    ("rm -r", "rm -r a b"),
];

/// A row for each kind of work: how often it could be done in a minute.
pub fn measure(subjects: &Subjects, scale: &Scale) -> Result<Vec<Row>, Box<dyn Error>> {
    let archive = subjects.scratch().join("tree.tar");
    tree::archive(&archive, scale.tree)?;
    let mut rows: Vec<_> = WORK.iter().map(|(name, _)| Row::new(Work::named(format!("{name}, {} files", scale.tree)))).collect();
    for _ in 0..scale.runs {
        for subject in Subject::MOUNTED {
            let folder = subjects.root(subject).join("trees");
            fs::create_dir(&folder)?;
            for (row, (name, command)) in rows.iter_mut().zip(WORK) {
                if name.contains("dropped") {
                    drop_caches()?;
                }
                let start = Instant::now();
                let mut shell = Command::new("sh");
                let status = shell.args(["-c", command]).env("TREE", &archive).current_dir(&folder).status()?;
                if !status.success() {
                    return Err(format!("{name} on {}: {status}", subject.name()).into());
                }
                row.add(subject, 60.0 / start.elapsed().as_secs_f64());
            }
            fs::remove_dir(&folder)?;
        }
    }
    fs::remove_file(&archive)?;
    Ok(rows)
}
