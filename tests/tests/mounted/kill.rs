//! The daemon is killed with SIGKILL under load, again and again: what was promised before is there
//! afterwards, fsck finds nothing, programs with open files get errors and do not hang, and a new
//! mount works. A killed daemon loses what it had in memory; the engine's tests cover what a device
//! loses with its power.
//!
//! `KILL_SECONDS` is how long each test goes on (7 by default).

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::{Image, Mounted, text};
use gpunvme_tests::{needs_mount, report_skipped, tree};
use rustix::process::Signal;

/// How long whatever used the mount may take to notice that it is dead.
const NOTICE: Duration = Duration::from_secs(20);

/// Mounts, lets `load` begin, kills the daemon a moment later, waits for the load to notice, checks
/// the image, mounts again and has `verify` look at what is left; until the time is over. Both get
/// the number of the round.
fn rounds<T>(load: impl Fn(&Mounted, u64) -> T, ended: impl Fn(T), verify: impl Fn(&Mounted, u64)) {
    let seconds = std::env::var("KILL_SECONDS").map_or(7, |v| v.parse().expect("a number"));
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut image = Image::formatted();
    for round in 0.. {
        let volume = image.mount();
        let load = load(&volume, round);
        let moment = u64::from_le_bytes(tree::pattern(round, 8).try_into().expect("8 bytes"));
        std::thread::sleep(Duration::from_millis(30 + moment % 700));
        let (status, dead) = volume.signal(Signal::KILL);
        assert_eq!(status.terminating_signal(), Some(libc::SIGKILL));
        ended(load);
        dead.check();
        let volume = dead.mount();
        verify(&volume, round);
        if Instant::now() > end {
            break;
        }
        image = volume.unmount();
    }
}

/// What a thread that writes until it fails reports: each promise that it was given, and its end.
fn promises(receiver: &Receiver<u64>) -> Option<u64> {
    let mut last = None;
    loop {
        match receiver.recv_timeout(NOTICE) {
            Ok(promise) => last = Some(promise),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return last,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("who has a file open on a dead mount hangs"),
        }
    }
}

/// Runs `step` with 1, 2, ... until it fails. Every number that comes out was promised.
fn until_it_fails(mut step: impl FnMut(u64) -> std::io::Result<()> + Send + 'static) -> Receiver<u64> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for number in 1.. {
            if step(number).is_err() || sender.send(number).is_err() {
                break;
            }
        }
    });
    receiver
}

fn record(number: u64) -> [u8; 512] {
    tree::pattern(number, 512).try_into().expect("512 bytes")
}

/// The number of records, one behind the other, that a file has; whatever else it has is wrong.
fn records(path: &Path) -> u64 {
    let data = fs::read(path).unwrap_or_default();
    let (whole, rest) = data.as_chunks::<512>();
    for (number, found) in (1..).zip(whole) {
        assert!(*found == record(number), "{}: record {number} of {}", path.display(), whole.len());
    }
    assert!(rest.is_empty(), "{}: a record was written by half", path.display());
    whole.len() as u64
}

#[test]
fn a_direct_write_to_a_file_opened_for_synchronous_writes_is_durable_when_it_is_answered() {
    needs_mount!();
    let volume = Image::formatted().mount();
    let data = tree::pattern(77, 3 << 20);
    let open = |name: &str, flags| {
        let path = volume.path(name);
        OpenOptions::new().read(true).write(true).create_new(true).custom_flags(flags).open(path).unwrap()
    };
    for (name, flags) in [("sync", libc::O_SYNC), ("dsync", libc::O_DSYNC)] {
        let file = open(name, flags);
        let buffer = Buffer::new(&file, data.len() as u64);
        buffer.put(0, &data);
        assert_eq!(buffer.write(&file, 0, data.len() as u64).unwrap().bytes, data.len() as u64);
    }
    let mount = gpunvme::Mount::open(volume.root()).unwrap();
    let mut ring = gpunvme::Ring::new(&mount, 8).unwrap();
    let file = gpunvme::File::of(open("ring", libc::O_DSYNC), volume.path("ring")).unwrap();
    let buffer = mount.register(gpunvme::Buffer::memfd(data.len()).unwrap()).unwrap().share();
    buffer.copy_in(0, &data);
    let attached = ring.attach(&file).unwrap();
    ring.push(&gpunvme::Operation::write(&attached, 0, &buffer, 0, data.len() as u64)).unwrap();
    let mut done = Vec::new();
    ring.complete(gpunvme::Wait::Timeout(NOTICE), &mut done).unwrap();
    assert_eq!(done.len(), 1);

    let (_, dead) = volume.signal(Signal::KILL);
    let volume = dead.mount();
    for name in ["sync", "dsync", "ring"] {
        assert!(fs::read(volume.path(name)).unwrap() == data, "{name}");
    }
}

#[test]
fn whoever_syncs_loses_nothing() {
    needs_mount!();
    let last: std::sync::Mutex<Vec<u64>> = std::sync::Mutex::default();
    let promised = AtomicU64::new(0);
    let load = |volume: &Mounted, round: u64| {
        let dir = volume.path(format!("{round}"));
        fs::create_dir(&dir).unwrap();
        let replaced = dir.clone();
        let replace = until_it_fails(move |number| {
            let mut file = File::create(replaced.join("new"))?;
            file.write_all(&tree::pattern(number, 100_000 + number as usize))?;
            file.sync_all()?;
            fs::rename(replaced.join("new"), replaced.join("current"))?;
            File::open(&replaced)?.sync_all()
        });
        // Opened once: what comes back afterwards are errors of files that are open on a dead
        // mount.
        let append = |name: &str, flags: i32, sync: fn(&File) -> std::io::Result<()>| {
            let mut file = OpenOptions::new().create(true).append(true).custom_flags(flags).open(dir.join(name)).unwrap();
            until_it_fails(move |number| {
                file.write_all(&record(number))?;
                sync(&file)
            })
        };
        let mut writers = vec![replace];
        writers.push(append("O_SYNC", libc::O_SYNC, |_| Ok(())));
        writers.push(append("O_DSYNC", libc::O_DSYNC, |_| Ok(())));
        writers.push(append("fsync", 0, File::sync_all));
        writers.push(append("fdatasync", 0, File::sync_data));
        let names = dir.clone();
        writers.push(until_it_fails(move |number| {
            File::create(names.join(format!("name {number}")))?;
            File::open(&names)?.sync_all()
        }));
        writers
    };
    let ended = |writers: Vec<Receiver<u64>>| {
        *last.lock().unwrap() = writers.iter().map(|writer| promises(writer).unwrap_or(0)).collect();
    };
    let verify = |volume: &Mounted, round: u64| {
        let last = last.lock().unwrap();
        let dir = volume.path(format!("{round}"));
        let current = fs::read(dir.join("current")).unwrap_or_default();
        let number = (current.len() as u64).saturating_sub(100_000);
        assert!(number >= last[0] && number <= last[0] + 1, "{number} replaces, {} were promised", last[0]);
        assert!(current == tree::pattern(number, current.len()), "what replaced another is not whole");
        for (name, promised) in ["O_SYNC", "O_DSYNC", "fsync", "fdatasync"].iter().zip(&last[1..]) {
            let found = records(&dir.join(name));
            assert!(found >= *promised, "{name}: {found} records, {promised} were promised");
        }
        assert!((1..=last[5]).all(|number| dir.join(format!("name {number}")).exists()), "{} names were promised", last[5]);
        println!("round {round}: promised {last:?}");
        promised.fetch_add(last.iter().sum(), Ordering::Relaxed);
    };
    rounds(load, ended, verify);
    assert!(promised.load(Ordering::Relaxed) > 0, "nothing was promised in any round");
}

#[test]
fn files_that_are_open_on_a_dead_mount_give_errors() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 1 << 20)).unwrap();
    let mut file = OpenOptions::new().read(true).write(true).open(volume.path("file")).unwrap();
    let root = volume.root();
    let (_, image) = volume.signal(Signal::KILL);
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let errors = [
            file.write_at(b"x", 2 << 20).map(drop),
            file.sync_all(),
            file.set_len(5),
            file.metadata().map(drop),
            // Not in the kernel's cache.
            file.read_exact_at(&mut [0; 10], 2 << 20),
        ];
        let _ = file.read(&mut [0; 10]);
        sender.send(errors.map(|result| result.map_err(|e| e.raw_os_error()))).unwrap();
    });
    let errors = receiver.recv_timeout(NOTICE).expect("no caller hangs");
    assert!(errors.iter().all(|result| result.is_err()), "{errors:?}");
    assert_eq!(errors[0], Err(Some(libc::ENOTCONN)));
    assert!(fs::read_dir(root).unwrap().next().is_none(), "the mount is released");
    drop(image.mount());
}

/// The device of a dead daemon may still write: the pages that were read to are not the caller's
/// any more.
#[test]
fn memory_that_was_read_to_when_the_daemon_died_is_not_handed_back() {
    needs_mount!();
    let volume = Mounted::new();
    let mut written = File::create(volume.path("file")).unwrap();
    written.write_all(&tree::pattern(1, 1 << 20)).unwrap();
    written.sync_all().unwrap();
    let mount = gpunvme::Mount::open(volume.root()).unwrap();
    let file = gpunvme::File::open(volume.path("file")).unwrap();
    let mut buffer = mount.register(gpunvme::Buffer::memfd(4 << 20).unwrap()).unwrap();
    let old = tree::pattern(2, buffer.len());
    buffer.copy_from_slice(&old);
    let pages = File::from(buffer.memory().to_read().unwrap());
    let memory = rustix::fs::memfd_create("own", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, 1 << 20).unwrap();
    rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::SHRINK).unwrap();
    let mut own = mount.register(gpunvme::HostMemory::memfd(memory, 1 << 20)).unwrap();
    let (_, image) = volume.signal(Signal::KILL);

    // Two segments: one alone the page cache may have.
    let segment = |file_offset, buffer_offset, len| gpunvme::Segment { file_offset, buffer_offset, len };
    let segments = [segment(0, 8192, 8192), segment(8192, 100_000, 500)];
    let error = file.read(&mut buffer, &segments).unwrap_err();
    assert!(matches!(error.errno().raw_os_error(), libc::ECONNABORTED | libc::ENOTCONN), "{error}");
    assert!(*buffer == old, "it has other bytes");
    buffer.fill(0xAB);
    let mut seen = vec![0; old.len()];
    pages.read_exact_at(&mut seen, 0).unwrap();
    let is_replaced = |at: usize| seen[at..][..4096] == old[at..][..4096];
    assert!(is_replaced(8192) && is_replaced(12288) && is_replaced(100_000 / 4096 * 4096), "the device still writes here");
    assert!(!is_replaced(4096) && !is_replaced(16384), "more was replaced than was read to");
    assert_eq!(buffer.memory().to_read().unwrap_err().errno().raw_os_error(), libc::ESTALE);

    let error = file.read(&mut own, &segments[..1]).unwrap_err();
    assert!(error.to_string().contains("the device may still write to memory"), "{error}");
    let volume = image.mount();
    let file = gpunvme::File::open(volume.path("file")).unwrap();
    for error in [file.read(&mut buffer, &segments), file.write(&buffer, &segments), file.read(&mut own, &segments[..1])] {
        let error = error.unwrap_err();
        assert!(matches!(error, gpunvme::Error::LostBuffer { .. }), "{error}");
    }
}

/// A program that runs until the mount dies, and the lines that it printed, each a promise.
struct Program {
    child: Child,
    lines: Receiver<String>,
}

impl Program {
    fn start(command: &mut Command) -> Program {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it runs");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Program { child, lines }
    }

    /// Waits for its end. Returns the last promise.
    fn end(mut self) -> Option<String> {
        let until = Instant::now() + NOTICE;
        while self.child.try_wait().expect("it is our child").is_none() {
            if Instant::now() > until {
                let _ = self.child.kill();
                panic!("a program on a dead mount hangs");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.lines.iter().last()
    }
}

fn has(program: &str) -> bool {
    Command::new("which").arg(program).output().is_ok_and(|output| output.status.success())
}

fn shell(script: &str, dir: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-euc", script]).current_dir(dir).env("HOME", "/nonexistent").stdin(Stdio::null());
    command
}

fn output(script: &str, dir: &Path) -> String {
    let output = shell(script, dir).output().unwrap();
    assert!(output.status.success(), "{script}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn sqlite_has_every_transaction_that_it_acknowledged() {
    needs_mount!();
    if !has("sqlite3") {
        return report_skipped("sqlite_has_every_transaction_that_it_acknowledged", "needs sqlite3");
    }
    let modes = ["delete", "wal"];
    let last = std::sync::Mutex::new(Vec::new());
    let dir = |volume: &Mounted, mode: &str, round: u64| -> PathBuf { volume.path(format!("{mode} {round}")) };
    let load = |volume: &Mounted, round: u64| {
        modes.map(|mode| {
            let dir = dir(volume, mode, round);
            fs::create_dir(&dir).unwrap();
            output(&format!("sqlite3 db 'pragma journal_mode={mode}; create table t(n integer primary key, b blob);'"), &dir);
            // With `full`, sqlite does not sync the directory after it has removed a journal, and
            // says so.
            let script = r#"n=1; { echo 'pragma synchronous=extra;'; while :; do
                echo "begin; insert into t values($n, randomblob(2000)); update t set b = zeroblob(500) where n = $n / 2; commit; select $n;"
                n=$((n + 1)); done; } | sqlite3 -bail db"#;
            Program::start(&mut shell(script, &dir))
        })
    };
    let ended = |programs: [Program; 2]| {
        let number = |program: Program| program.end().map_or(0, |line| line.parse::<u64>().expect("a number"));
        let [delete, wal] = programs.map(number);
        // Where sqlite cannot open the directory to sync the removal of its journal, because the
        // mount has just died, it takes the transaction for done all the same (`unixDelete` in its
        // os_unix.c). The next acknowledgement proves that it could.
        *last.lock().unwrap() = vec![delete.saturating_sub(1), wal];
    };
    let verify = |volume: &Mounted, round: u64| {
        for (mode, promised) in modes.iter().zip(last.lock().unwrap().iter()) {
            let dir = dir(volume, mode, round);
            assert_eq!(output("sqlite3 db 'pragma integrity_check;'", &dir), "ok", "{mode}");
            let found: u64 =
                output("sqlite3 db 'select count(*) from t where n <= (select max(n) from t);'", &dir).parse().unwrap();
            let max: u64 = output("sqlite3 db 'select ifnull(max(n), 0) from t;'", &dir).parse().unwrap();
            assert!(found == max && max >= *promised, "{mode}: {found} rows up to {max}, {promised} were acknowledged");
            println!("round {round}: {mode}: {promised} acknowledged, {max} found");
        }
    };
    rounds(load, ended, verify);
}

#[test]
fn git_has_every_commit_that_it_made_and_synced() {
    needs_mount!();
    if !has("git") {
        return report_skipped("git_has_every_commit_that_it_made_and_synced", "needs git");
    }
    let last = std::sync::Mutex::new(None);
    let dir = |volume: &Mounted, round: u64| volume.path(format!("{round}"));
    let load = |volume: &Mounted, round: u64| {
        let dir = dir(volume, round);
        fs::create_dir(&dir).unwrap();
        output(
            "git init -q -b main . && git config user.name t && git config user.email t@example.com && git config core.fsync all && sync $(find .)",
            &dir,
        );
        // git syncs what a name is about to point to, and not the name: the program that needs it
        // must sync the name.
        let script = r#"n=1; while :; do echo $n > $((n % 10)); seq $n > big; git add . && git commit -qm "change $n"
            sync .git/refs/heads; git rev-parse HEAD; n=$((n + 1)); done"#;
        Program::start(&mut shell(script, &dir))
    };
    let ended = |program: Program| *last.lock().unwrap() = program.end();
    let verify = |volume: &Mounted, round: u64| {
        let dir = dir(volume, round);
        output("git fsck --strict --no-dangling", &dir);
        if let Some(commit) = &*last.lock().unwrap() {
            output(&format!("git merge-base --is-ancestor {commit} main && git show {commit}:big >/dev/null"), &dir);
        }
        println!("round {round}: {:?}", last.lock().unwrap());
    };
    rounds(load, ended, verify);
}
