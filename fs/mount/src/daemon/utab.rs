//! The entry of a mount in `/run/mount/utab`, by which umount(8) finds its helper.
//!
//! Where a directory has no entry, umount(8) that root calls with a whole path asks statfs(2) for
//! the type, which is the same for all mounts of FUSE, and looks for `umount.fuse` (util-linux
//! 2.38, `lookup_umount_fs`). With any entry it asks the mount table, and looks for the helper of
//! that type.
//!
//! The file is libmount's, and changed as libmount does it (`libmount/src/tab_update.c`): under a
//! lock, by a new file that takes its place. mount(8) and umount(8) are not told to do it
//! (`--internal-only --fake`): they wait without a limit for that lock, which any user may hold.
//! After a helper that has succeeded umount(8) removes the last entry of the directory itself.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::process::{Pid, PidfdFlags, geteuid, getppid, pidfd_open};

use super::{background, last_word};
use gpunvme_programs::mounts::{Mount, escape};

const FOLDER: &str = "/run/mount";
const TABLE: &str = "/run/mount/utab";
const LOCK: &str = "/run/mount/utab.lock";
/// What becomes the table. Only who has the lock makes it.
const NEW: &str = "/run/mount/utab.gpunvme";
/// What an entry of ours says: options of this kind are for programs that look at them, and for no
/// other.
const OPTS: &[u8] = b"OPTS=x-gpunvme";
/// How long others may have the lock. Without its entry a mount is no worse.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
const LOCK_POLL: Duration = Duration::from_millis(5);
/// How long umount(8) mostly takes from its look at the table to its end.
const UNMOUNT_LIMIT: Duration = Duration::from_secs(1);
/// How long mount(8) may go on: it may have further mounts to make.
const CALLER_LIMIT: Duration = Duration::from_secs(5);

/// Gives the mount on `dir`, a real path, an entry, in place of one of ours that was left there.
///
/// mount(8) makes an entry itself, of options that only programs in user space know, when its
/// helper has ended; but not where it finds one. So where mount(8) has called this program, another
/// process waits for its end. To be called from a process of one thread.
pub fn note_behind_caller(dir: &Path) {
    remove(dir);
    let Some(mount) = Mount::on(dir).ok().filter(|mount| mount.is_ours() && geteuid().is_root()) else { return };
    match getppid().filter(|_| is_called_by("mount")) {
        Some(caller) => background::leave_behind(|| {
            await_end(caller);
            note(&mount);
            std::thread::sleep(UNMOUNT_LIMIT);
            remove_if_gone(&mount);
        }),
        None => note(&mount),
    }
}

/// Whether a program of this name has started this one: by the name that the kernel has, which is a
/// script's too.
pub fn is_called_by(name: &str) -> bool {
    let comm = |caller: Pid| fs::read_to_string(format!("/proc/{}/comm", caller.as_raw_nonzero()));
    getppid().is_some_and(|caller| comm(caller).is_ok_and(|found| found.trim_end() == name))
}

/// Gives a mount an entry, unless it has one. It comes behind those of other mounts on the same
/// directory: umount(8) removes the last. Entries go that were left by mounts which ended otherwise
/// than by umount(8): with their daemon, or by umount(2).
pub fn note(mount: &Mount) {
    let [source, dir] = [mount.source.as_os_str(), mount.dir.as_os_str()].map(escape);
    let (source, target) = ([b"SRC=", &source[..]].concat(), [b"TARGET=", &dir[..]].concat());
    let line = [&source[..], b" ", &target, b" ROOT=/ ", OPTS, b"\n"].concat();
    change(|table| {
        let mut table = without_left(table);
        if !lines(&table).any(|line| has(line, &source) && has(line, &target)) {
            if !table.ends_with(b"\n") && !table.is_empty() {
                table.push(b'\n');
            }
            table.extend_from_slice(&line);
        }
        table
    });
    remove_if_gone(mount);
}

/// The table without entries of ours whose mount is not here, and whose daemon is gone: it may be
/// mounted in another namespace.
fn without_left(table: &[u8]) -> Vec<u8> {
    let Ok(mounts) = Mount::all() else { return table.to_vec() };
    let words = |key: &[u8], value: &OsStr| [key, &escape(value)[..]].concat();
    let targets: Vec<_> = mounts.iter().map(|mount| words(b"TARGET=", mount.dir.as_os_str())).collect();
    let sources: Vec<_> = last_word::speakers().iter().map(|source| words(b"SRC=", source)).collect();
    let is_left = |line: &[u8]| is_ours(line) && !targets.iter().chain(&sources).any(|word| has(line, word));
    lines(table).filter(|line| !is_left(line)).collect::<Vec<_>>().concat()
}

/// Who unmounted it, and looked for an entry before there was one, removed none.
fn remove_if_gone(mount: &Mount) {
    if !Mount::all().is_ok_and(|mounts| mounts.iter().any(|listed| listed.id == mount.id)) {
        remove(&mount.dir);
    }
}

/// Removes the entry of ours for a directory, and no other.
pub fn remove(dir: &Path) {
    remove_unless(dir, |_| false);
}

/// The same where `dir` was unmounted for umount(8), which removes the last entry of the directory
/// after this: ours is left to it where it would take another's.
pub fn remove_before_umount(dir: &Path) {
    remove_unless(dir, |others| others > 0);
}

/// Removes it unless `is_kept` says otherwise, by the number of others' entries for the directory.
fn remove_unless(dir: &Path, is_kept: impl Fn(usize) -> bool) {
    let target = [b"TARGET=", &escape(dir.as_os_str())[..]].concat();
    let is_ours = |line: &[u8]| is_ours(line) && has(line, &target);
    change(|table| match is_kept(lines(table).filter(|line| has(line, &target) && !is_ours(line)).count()) {
        true => table.to_vec(),
        false => lines(table).filter(|line| !is_ours(line)).collect::<Vec<_>>().concat(),
    });
}

fn lines(table: &[u8]) -> impl Iterator<Item = &[u8]> {
    table.split_inclusive(|byte| *byte == b'\n')
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|byte| b" \n".contains(byte))
}

/// Whether nobody has added to an entry of ours.
fn is_ours(line: &[u8]) -> bool {
    has(line, OPTS) && !words(line).any(|word| word.starts_with(b"ATTRS="))
}

fn has(line: &[u8], word: &[u8]) -> bool {
    words(line).any(|found| found == word)
}

/// Has the table as `edit` makes it. Where this process may not change it, or others do for long,
/// it stays: no more depends on it than which program umount(8) calls.
fn change(edit: impl Fn(&[u8]) -> Vec<u8>) {
    let is_as_wanted = || read().map(|table| edit(&table) == table);
    if geteuid().is_root() && is_as_wanted().is_ok_and(|is| !is) {
        let _ = replace(edit);
    }
}

fn replace(edit: impl Fn(&[u8]) -> Vec<u8>) -> io::Result<()> {
    // It may be there. The caller's umask counts where it is made.
    if DirBuilder::new().create(FOLDER).is_ok() {
        fs::set_permissions(FOLDER, Permissions::from_mode(0o755))?;
    }
    let _lock = lock()?;
    let table = edit(&read()?);
    let put = || {
        let mut new = opened(File::options().write(true).create(true).truncate(true), NEW)?;
        new.write_all(&table)?;
        new.set_permissions(Permissions::from_mode(0o644))?;
        fs::rename(NEW, TABLE)
    };
    put().inspect_err(|_| drop(fs::remove_file(NEW)))
}

/// The table; nothing where there is none.
fn read() -> io::Result<Vec<u8>> {
    let mut table = Vec::new();
    match opened(File::options().read(true), TABLE) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        file => drop(file?.read_to_end(&mut table)?),
    }
    Ok(table)
}

/// Opened for reading: programs that watch the table are told when such a descriptor of the lock is
/// closed (`libmount/src/monitor.c`).
fn lock() -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(open(LOCK, flags, Mode::from_raw_mode(0o644))?);
    file.set_permissions(Permissions::from_mode(0o644))?;
    let until = Instant::now() + LOCK_LIMIT;
    while let Err(errno) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if Instant::now() > until {
            return Err(errno.into());
        }
        std::thread::sleep(LOCK_POLL);
    }
    Ok(file)
}

fn opened(options: &mut OpenOptions, path: &str) -> io::Result<File> {
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).mode(0o644).open(path)
}

fn await_end(process: Pid) {
    // One that has gone has ended.
    let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else { return };
    let limit = Timespec { tv_sec: CALLER_LIMIT.as_secs() as _, tv_nsec: 0 };
    let _ = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
}
