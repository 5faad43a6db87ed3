//! Opens ask nobody: what a process may do with a file is what its descriptors are open for, which
//! the daemon looks at, or a grant that it gave.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Stdio;

use gpunvme::{Mount, RegisteredBy};
use gpunvme_abi::{Command, Reason, Segment, Transfer};
use gpunvme_tests::direct::{Buffer, call};
use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::{needs_mount, tree};

const LEN: u64 = 8192;

/// A transfer with this descriptor and grant: the grant that came back, or the errno and reason.
fn claim(buffer: &Buffer, command: Command, file: &File, descriptor: i32, grant: u64) -> Result<u64, (i32, Reason)> {
    let mut transfer = Transfer { buffer: buffer.id, segments: 1, descriptor, grant, ..Transfer::default() };
    let segment = Segment { file_offset: 0, buffer_offset: 0, len: 4096 };
    match call(file, command, &mut transfer, &mut [segment]) {
        Ok(()) => Ok(transfer.grant),
        Err(error) => Err((error.raw_os_error().unwrap(), Reason::from_code(transfer.reason).unwrap())),
    }
}

struct Opened {
    _volume: Mounted,
    reader: File,
    writer: File,
    other: File,
    buffer: Buffer,
}

fn opened() -> Opened {
    let volume = Mounted::new();
    let [path, other] = ["file", "other"].map(|name| volume.path(name));
    for path in [&path, &other] {
        fs::write(path, tree::pattern(5, LEN as usize)).unwrap();
    }
    let reader = File::open(&path).unwrap();
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    let other = OpenOptions::new().read(true).write(true).open(&other).unwrap();
    let buffer = Buffer::new(&reader, LEN);
    Opened { _volume: volume, reader, writer, other, buffer }
}

#[test]
fn a_descriptor_of_the_file_shows_what_the_process_may_do() {
    needs_mount!();
    let Opened { _volume: volume, reader, writer, other, buffer } = opened();
    let (read, write) = (Command::Read, Command::Write);
    let number = |file: &File| file.as_raw_fd();
    assert!(claim(&buffer, read, &reader, number(&reader), 0).is_ok());
    assert!(claim(&buffer, write, &writer, number(&writer), 0).is_ok());
    // Whichever descriptor the ioctl is called on: the process has the one that it names.
    assert!(claim(&buffer, write, &reader, number(&writer), 0).is_ok());
    let bad = |reason| Err((libc::EBADF, reason));
    assert_eq!(claim(&buffer, write, &reader, number(&reader), 0), bad(Reason::None));
    assert_eq!(claim(&buffer, read, &writer, number(&writer), 0), bad(Reason::None));
    let path_only = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(volume.path("file")).unwrap();
    assert_eq!(claim(&buffer, read, &reader, number(&path_only), 0), bad(Reason::None));
    let elsewhere = tempfile::tempfile().unwrap();
    for wrong in [-1, number(&other), number(&elsewhere), number(&buffer.memory), i32::MAX] {
        assert_eq!(claim(&buffer, write, &reader, wrong, 0), bad(Reason::WrongDescriptor), "{wrong}");
    }
}

#[test]
fn a_grant_is_for_one_file_and_what_it_was_open_for() {
    needs_mount!();
    let Opened { _volume: volume, reader, writer, other, buffer } = opened();
    let reading = claim(&buffer, Command::Read, &reader, reader.as_raw_fd(), 0).unwrap();
    let writing = claim(&buffer, Command::Write, &writer, writer.as_raw_fd(), 0).unwrap();
    assert!(reading != 0 && writing != 0 && reading != writing);
    assert_eq!(claim(&buffer, Command::Read, &reader, -1, reading), Ok(reading));
    assert_eq!(claim(&buffer, Command::Write, &reader, -1, reading), Err((libc::EBADF, Reason::None)));
    // As with a file that is attached to a ring, the descriptor may be closed.
    drop(writer);
    assert_eq!(claim(&buffer, Command::Write, &reader, -1, writing), Ok(writing));
    for wrong in [writing ^ 1 << 40, writing | 7, u64::MAX, 1] {
        assert_eq!(claim(&buffer, Command::Write, &reader, -1, wrong), Err((libc::EBADF, Reason::WrongDescriptor)));
        // A wrong one does no harm where the descriptor shows enough.
        assert!(claim(&buffer, Command::Read, &reader, reader.as_raw_fd(), wrong).is_ok());
    }
    assert_eq!(claim(&buffer, Command::Write, &other, -1, writing), Err((libc::EBADF, Reason::WrongDescriptor)));
    // Of another process.
    let mut client = std::process::Command::new(env!("CARGO_BIN_EXE_direct-client"));
    let output = client.arg(volume.path("file")).args(["grant", &reading.to_string()]).stderr(Stdio::inherit()).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{}\n", libc::EBADF));
}

/// A daemon that may not look at the processes it serves, as in a container: everything works by
/// the socket.
#[test]
fn a_descriptor_that_the_daemon_may_not_look_at_is_sent_to_it() {
    needs_mount!();
    let volume = Image::formatted().mount_by(&["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]);
    let content = tree::pattern(9, LEN as usize);
    fs::write(volume.path("file"), &content).unwrap();
    fs::write(volume.path("other"), &content).unwrap();
    let file = gpunvme::File::open(volume.path("file")).unwrap();
    let mut buffer = Mount::open(volume.root()).unwrap().register(gpunvme::Buffer::memfd(LEN as usize).unwrap()).unwrap();
    assert_eq!(buffer.registered_by(), RegisteredBy::Socket);
    let all = [Segment { file_offset: 0, buffer_offset: 0, len: LEN }];
    let by_the_daemon = gpunvme::Require { route: Some(gpunvme::Route::Host), direct: false };
    // The first time it is sent; then the grant is enough.
    for _ in 0..2 {
        assert_eq!(file.read_requiring(&mut buffer, &all, by_the_daemon).unwrap().bytes(), LEN);
    }
    assert!(buffer[..] == content);
    assert!(file.write(&buffer, &all).is_err(), "it is open for reading");
    let writer = gpunvme::File::create(volume.path("other")).unwrap();
    assert_eq!(writer.write(&buffer, &all).unwrap().bytes(), LEN);
    // Without the library: the reason says what to do.
    let raw = File::open(volume.path("file")).unwrap();
    let number = Buffer { memory: tempfile::tempfile().unwrap(), id: buffer.id() };
    let hidden = Err((libc::EPERM, Reason::DescriptorHidden));
    assert_eq!(claim(&number, Command::Read, &raw, raw.as_raw_fd(), 0), hidden);
}
