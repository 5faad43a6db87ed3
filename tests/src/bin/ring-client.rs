//! A process with a ring on a mount, for tests.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use gpunvme::{Mount, Operation, Ring, Wait};
use gpunvme_abi as abi;
use gpunvme_tests::direct;
use gpunvme_tests::rings::{attach, shared, wait_for};
use rustix::process::{Resource, Rlimit};

const MIB: u64 = 1 << 20;

#[derive(Parser)]
enum Arguments {
    /// Keeps the ring full until it is killed, and says `busy` when it is. The file `big` of 64 MiB
    /// gets the bytes that it has.
    Busy {
        /// The mount.
        root: PathBuf,
        /// Entries of the ring.
        entries: u32,
        /// Bytes of one transfer.
        len: u64,
    },
    /// Sets its own limit of file sizes to 1 MiB and a few bytes, and fails unless transfers by
    /// ioctl and by the ring keep to it.
    Limited {
        /// The mount.
        root: PathBuf,
    },
}

fn main() {
    match Arguments::parse() {
        Arguments::Busy { root, entries, len } => keep_busy(&root, entries, len),
        Arguments::Limited { root } => keep_to_the_limit(&root),
    }
}

fn keep_busy(root: &Path, entries: u32, len: u64) {
    let mount = Mount::open(root).unwrap();
    let buffer = shared(&mount, 64 * MIB);
    buffer.copy_in(0, &fs::read(root.join("big")).unwrap());
    let mut ring = Ring::new(&mount, entries).unwrap();
    let file = attach(&ring, root.join("big"));
    let mut done = Vec::new();
    for number in 0u64.. {
        if ring.room() == 0 {
            ring.complete(Wait::Forever, &mut done).unwrap();
            done.clear();
        }
        if number == 200 {
            println!("busy");
        }
        let at = number * len % (64 * MIB);
        let operation = if number % 3 == 0 { Operation::write } else { Operation::read };
        ring.push(&operation(&file, at, &buffer, at, len)).unwrap();
    }
}

fn keep_to_the_limit(root: &Path) {
    const LIMIT: u64 = MIB + 100;
    let path = root.join("limited");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    let mount = Mount::open(root).unwrap();
    let memory = shared(&mount, 4 * MIB);
    let buffer = direct::Buffer::new(&file, 4 * MIB);
    let mut ring = Ring::new(&mount, 8).unwrap();
    let attached = attach(&ring, &path);
    rustix::process::setrlimit(Resource::Fsize, Rlimit { current: Some(LIMIT), maximum: None }).unwrap();
    // A ring looks now and then.
    std::thread::sleep(Duration::from_millis(50));
    let size = || fs::metadata(&path).unwrap().len();

    let short = buffer.write(&file, 4096, 4 * MIB).unwrap();
    assert_eq!((short.bytes, short.status, short.failed_segment), (LIMIT - 4096, libc::EFBIG, 0));
    // The kernel knows the length without having to ask: sendfile(2) does not.
    let nowhere = OpenOptions::new().write(true).open("/dev/null").unwrap();
    assert_eq!(rustix::fs::sendfile(nowhere, &file, Some(&mut (LIMIT - 100)), 200), Ok(100));
    assert_eq!(size(), LIMIT);
    let write = abi::Command::Write;
    let short = buffer.transfer(write, &file, &[(0, 0, 4096), (MIB, 0, 4096), (0, 0, 4096)]).unwrap();
    assert_eq!((short.bytes, short.status, short.failed_segment), (4096 + 100, libc::EFBIG, 1));
    for offset in [LIMIT, 3 * MIB] {
        assert_eq!(buffer.write(&file, offset, 4096).unwrap_err().raw_os_error(), Some(libc::EFBIG));
    }
    ring.push(&Operation::write(&attached, 0, &memory, 0, 4 * MIB)).unwrap();
    ring.push(&Operation::write(&attached, LIMIT, &memory, 0, 4096)).unwrap();
    for completed in wait_for(&mut ring, 2) {
        assert_eq!(completed.result.unwrap_err().errno().raw_os_error(), libc::EFBIG);
    }
    ring.push(&Operation::write(&attached, 0, &memory, 0, LIMIT)).unwrap();
    assert_eq!(wait_for(&mut ring, 1).remove(0).result.unwrap().bytes(), LIMIT);
    assert_eq!(size(), LIMIT);
}
