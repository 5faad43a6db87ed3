//! Measures what users do with large trees, on gpunvme, on ext4 and in memory.

use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use gpunvme_tests::mounted::Image;
use gpunvme_tests::peers::{self, Kind, LoopMounted, MemFs};
use gpunvme_tests::results::Work;
use gpunvme_tests::{scratch_dir, scratch_root};

use crate::sample::{self, drop_caches};
use crate::table::Table;
use crate::{Scale, progress};

/// Bytes of the volumes.
const VOLUME: u64 = 16 << 30;

/// In this order, each as a shell command in a folder that is empty at first. `$TREE` is an archive
/// of a tree, `$REPOSITORY` this project's own, `$SOURCES` an archive of a program.
const WORK: [(&str, &str); 9] = [
    ("tar x", "mkdir a && tar xf \"$TREE\" -C a"),
    ("cp -r", "cp -r a b"),
    ("find, forgotten by the kernel", "find . -size +1000k"),
    ("read all, forgotten by the kernel", "tar cf - b | wc -c"),
    ("rm -r", "rm -r a b"),
    ("git clone", "git -c safe.directory='*' clone --quiet --no-local \"$REPOSITORY\" clone"),
    ("git status, forgotten by the kernel", "git -C clone status"),
    ("tar x of sources", "tar xf \"$SOURCES\""),
    ("make -j2", "make --silent -j2"),
];

/// A table of times, which judges by rates: twice is twice as slow.
pub fn measure(scale: &Scale) -> Result<Vec<Table>, Box<dyn Error>> {
    let scratch = scratch_dir();
    let (archive, sources) = (scratch.path().join("tree.tar"), scratch.path().join("sources.tar"));
    progress("trees: gathering files");
    pack_tree(&archive, scale.tree)?;
    pack_sources(&sources, scale.sources)?;
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("a workspace")?;

    let mounted = Image::formatted_with(VOLUME).mount();
    let image = scratch.path().join("ext4");
    File::create(&image)?.set_len(VOLUME)?;
    let ext4 = LoopMounted::set_up(&image, Kind::Ext4)?;
    let memfs = MemFs::set_up(scratch.path())?;
    let roots: [PathBuf; 3] = [ext4.root.clone(), mounted.root(), memfs.root.clone()];

    let title = format!("a tree of {} files, this project's repository, a program of {} files", scale.tree, scale.sources);
    let mut table = Table::new(title, "seconds", &["ext4", "gpunvme", "memfs"], Some(0));
    for (name, script) in WORK {
        if name.starts_with("git") && !repository.join(".git").exists() {
            continue;
        }
        let mut times = Vec::new();
        for root in &roots {
            progress(&format!("trees: {name} in {}", root.display()));
            let folder = root.join(if name.contains("make") || name.contains("sources") { "program" } else { "trees" });
            fs::create_dir_all(&folder)?;
            drop_caches()?;
            let variables = [("TREE", archive.as_path()), ("SOURCES", &sources), ("REPOSITORY", repository)];
            times.push(Some(sample::shell(&folder, script, &variables)?));
        }
        table.row(Work::named(name), times);
    }
    Ok(vec![table])
}

/// Makes an archive of so many files of this system, each less than a megabyte; of copies, where it
/// has not as many.
fn pack_tree(archive: &Path, files: usize) -> Result<(), Box<dyn Error>> {
    let list = archive.with_extension("list");
    let script = "find /usr/share /usr/include /usr/lib ${CARGO_HOME:-$HOME/.cargo}/registry/src -xdev -type f -size -1000k | head -n \"$FILES\" > \"$LIST\"";
    peers::run(Command::new("sh").args(["-c", script]).env("FILES", files.to_string()).env("LIST", &list))?;
    let found = fs::read_to_string(&list)?.lines().count();
    if found == 0 {
        return Err("no files in /usr".into());
    }
    File::create(archive)?.set_len(10240)?;
    for copy in 0..files.div_ceil(found) {
        let mut tar = Command::new("tar");
        tar.arg("rf").arg(archive).arg("--absolute-names").arg(format!("--transform=s,^/,copy {copy}/,")).arg("-T").arg(&list);
        peers::run(&mut tar)?;
    }
    Ok(())
}

/// Makes an archive of a program in C: each file includes headers of the tree, and needs a moment
/// to compile.
fn pack_sources(archive: &Path, files: usize) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir_in(scratch_root())?;
    let names = |suffix: &str| (0..files).map(|n| format!("part{n}.{suffix}")).collect::<Vec<_>>().join(" ");
    let mut main = String::new();
    for n in 0..files {
        let includes: String = (n.saturating_sub(20)..n).map(|of| format!("#include \"part{of}.h\"\n")).collect();
        fs::write(folder.path().join(format!("part{n}.h")), format!("#pragma once\nint part{n}(int);\n"))?;
        let body = format!(
            "{includes}#include <stdio.h>\n#include <stdlib.h>\nint part{n}(int x) {{ return printf(\"%d\", x * {n}); }}\n"
        );
        fs::write(folder.path().join(format!("part{n}.c")), body)?;
        main += &format!("int part{n}(int);\n");
    }
    fs::write(folder.path().join("main.c"), format!("{main}int main(void) {{ return part0(0) < 0; }}\n"))?;
    let objects = names("o");
    fs::write(
        folder.path().join("Makefile"),
        format!("program: main.o {objects}\n\tcc -o $@ $^\n%.o: %.c\n\tcc -O1 -c -o $@ $<\n"),
    )?;
    peers::run(Command::new("tar").arg("cf").arg(archive).arg("-C").arg(folder.path()).arg("."))?;
    Ok(())
}
