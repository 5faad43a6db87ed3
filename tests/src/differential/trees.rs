//! Whole trees of files, as the facts that can be compared.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, SeekFrom};

use super::facts::{self, Clock, Facts};

/// The facts of each entry, by its path.
pub type Tree = BTreeMap<String, Facts>;

/// Reads all below `root`, and `root` itself.
///
/// # Errors
/// Those of reading, with the path in them.
pub fn read(root: &Path, clock: Clock) -> io::Result<Tree> {
    let mut tree = Tree::new();
    let mut first_names = BTreeMap::new();
    let mut pending = vec![String::from(".")];
    while let Some(relative) = pending.pop() {
        let path = root.join(latin1(&relative));
        let in_context = |error: io::Error| io::Error::new(error.kind(), format!("{relative}: {error}"));
        let look = facts::look(CWD, &path, AtFlags::SYMLINK_NOFOLLOW);
        let mut facts = Facts::default();
        facts.look(&look, clock);
        let found = look.map_err(|errno| in_context(io::Error::from_raw_os_error(errno)))?;
        let kind = FileType::from_raw_mode(found.stx_mode.into());
        match kind {
            FileType::Directory => {
                for entry in fs::read_dir(&path).map_err(in_context)? {
                    let name: String =
                        entry.map_err(in_context)?.file_name().as_bytes().iter().map(|&byte| byte as char).collect();
                    pending.push(format!("{relative}/{name}"));
                }
            }
            FileType::RegularFile => facts.add("content", content(&path).map_err(in_context)?),
            FileType::Symlink => facts.add("target", fs::read_link(&path).map_err(in_context)?.display()),
            _ => {}
        }
        attributes(&path, &mut facts).map_err(in_context)?;
        tree.insert(relative, facts);
        if kind != FileType::Directory && found.stx_nlink > 1 {
            first_names.entry(found.stx_ino).or_insert_with(Vec::new).push(path);
        }
    }
    // Names of one file, by the first of them.
    for names in first_names.values_mut() {
        names.sort();
        for name in names.iter() {
            let relative = |path: &Path| path.strip_prefix(root).expect("below the root").display().to_string();
            let key = format!(
                "./{}",
                name.strip_prefix(root)
                    .expect("below the root")
                    .as_os_str()
                    .as_bytes()
                    .iter()
                    .map(|&byte| byte as char)
                    .collect::<String>()
            );
            let key = key.replace("././", "./");
            if let Some(facts) = tree.get_mut(&key) {
                facts.add("same file as", relative(&names[0]));
            }
        }
    }
    Ok(tree)
}

/// Bytes of a file: a digest of each block that holds more than zeros, so that holes and zeros are
/// alike.
fn content(path: &Path) -> io::Result<String> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(path)?;
    let mut blocks = Vec::new();
    let mut memory = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => at = data / 4096 * 4096,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        }
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(at))?;
        while at < hole {
            let n = file.read_at(&mut memory, at)?;
            if n == 0 {
                break;
            }
            for (number, block) in memory[..n].chunks(4096).enumerate() {
                if block.iter().any(|&byte| byte != 0) {
                    // To the last byte that is not zero: the size is compared by itself.
                    let len = block.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
                    blocks.push(format!("{}:{}", at + number as u64 * 4096, facts::digest(&block[..len])));
                }
            }
            at += n as u64;
            if n < memory.len() {
                at = at.max(hole);
            }
        }
    }
    blocks.sort();
    blocks.dedup();
    Ok(if blocks.len() > 3 {
        format!("{} blocks {}", blocks.len(), facts::digest(blocks.join(",").as_bytes()))
    } else {
        blocks.join(",")
    })
}

fn attributes(path: &Path, facts: &mut Facts) -> io::Result<()> {
    let mut list = vec![0; 65_536];
    let n = rustix::fs::llistxattr(path, &mut list[..])?;
    let mut value = vec![0; 65_536];
    for name in facts::names(&list[..n]) {
        match rustix::fs::lgetxattr(path, &name, &mut value[..]) {
            Ok(n) => facts.add(name, facts::digest(&value[..n])),
            Err(error) => facts.add(name, io::Error::from(error)),
        }
    }
    Ok(())
}

/// The bytes of a name in which each character is one.
fn latin1(name: &str) -> std::ffi::OsString {
    let bytes: Vec<u8> = name.chars().map(|character| character as u8).collect();
    std::os::unix::ffi::OsStringExt::from_vec(bytes)
}

/// The first entry that differs in a fact that counts: its path, the name of the fact, and what
/// each has.
pub fn difference(ext4: &Tree, gpunvme: &Tree, counts: impl Fn(&str) -> bool) -> Option<(String, String, String, String)> {
    let paths: std::collections::BTreeSet<_> = ext4.keys().chain(gpunvme.keys()).collect();
    paths.into_iter().find_map(|path| {
        let (Some(ours), Some(theirs)) = (ext4.get(path), gpunvme.get(path)) else {
            let is = |tree: &Tree| if tree.contains_key(path) { "is there" } else { "is missing" }.to_owned();
            return counts("name").then(|| (path.clone(), "name".to_owned(), is(ext4), is(gpunvme)));
        };
        let names: std::collections::BTreeSet<_> = ours.0.iter().chain(&theirs.0).map(|fact| &fact.0).collect();
        names.into_iter().find_map(|name| {
            let of =
                |facts: &Facts| facts.0.iter().find(|fact| &fact.0 == name).map_or("nothing".to_owned(), |fact| fact.1.clone());
            let (ext4, gpunvme) = (of(ours), of(theirs));
            (ext4 != gpunvme && counts(name)).then(|| (path.clone(), name.clone(), ext4, gpunvme))
        })
    })
}
