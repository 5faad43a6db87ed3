//! Connections of the real kernel, with a filesystem that has an empty root.

use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};

use super::*;
use crate::request::{Forgets, Operation, Request};
use crate::wire::Attr;
use crate::{InitFlags, Times};

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
const WISHES: Wishes =
    Wishes { capabilities: InitFlags::empty(), max_write: 1 << 20, max_background: 16, congestion: 12, io_uring: true };

struct EmptyRoot;

impl Handler for EmptyRoot {
    fn request(&self, request: Request<'_>, reply: Reply) {
        let times = Times { entry: Duration::ZERO, attributes: Duration::ZERO };
        match request.operation {
            Operation::GetAttr => reply.attributes(&Attr { ino: 1, mode: 0o40_755, nlink: 2, ..Attr::default() }, times),
            Operation::Lookup { .. } => reply.error(Errno::NOENT.raw_os_error()),
            _ => reply.error(Errno::NOSYS.raw_os_error()),
        }
    }

    fn forget(&self, _: Forgets<'_>) {}
}

/// A mount of ours, gone when it is dropped.
struct Mount {
    dir: tempfile::TempDir,
    /// What the parameter was, if it was changed.
    before: Option<String>,
}

impl Mount {
    /// None, said aloud, where this cannot be tried.
    fn over_io_uring(test: &str) -> Option<(Mount, Device)> {
        let before = fs::read_to_string(PARAMETER).ok().filter(|_| fs::write(PARAMETER, "Y").is_ok());
        if before.is_none() {
            eprintln!("SKIPPED {test}: FUSE over io_uring cannot be switched on here (Linux 6.14, as root)");
            return None;
        }
        Mount::new(test, before)
    }

    fn new(test: &str, before: Option<String>) -> Option<(Mount, Device)> {
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let dir = tempfile::tempdir().unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = CString::new(options).unwrap();
        if let Err(error) = rustix::mount::mount("test", dir.path(), "fuse", MountFlags::empty(), options.as_c_str()) {
            eprintln!("SKIPPED {test}: nothing can be mounted here: {error}");
            return None;
        }
        Some((Mount { dir, before }, Device::new(device, &Arc::new(Meter::new(opcode::KINDS)))))
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH);
        if let Some(before) = &self.before {
            let _ = fs::write(PARAMETER, before);
        }
    }
}

#[test]
fn where_the_kernel_refuses_a_queue_requests_come_by_the_device() {
    let test = "where_the_kernel_refuses_a_queue_requests_come_by_the_device";
    let Some((mount, device)) = Mount::over_io_uring(test) else { return };
    // Entries that are too small for the requests that are agreed on.
    let queues = Agreed::Queues(Queues::new(1 << 20).unwrap().with_payload(4096));
    let connection = Connection::negotiate_with(device, &WISHES, queues).unwrap();
    let served = connection.serve(&Arc::new(EmptyRoot), 2).unwrap();
    assert_eq!(served.transport(), Transport::Classic(Some(Fallback::NotRegistered)));
    assert_eq!(fs::metadata(mount.path()).unwrap().len(), 0);
    assert!(fs::metadata(mount.path().join("name")).is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
    drop(mount);
    served.join().finish().unwrap();
}

/// As on a machine with so many processors that loops spin: each way from sleep to spinning and
/// back, with one client and several, while loops come and go.
#[test]
fn loops_that_spin_miss_no_request_and_end_with_the_mount() {
    let test = "loops_that_spin_miss_no_request_and_end_with_the_mount";
    let Some((mount, device)) = Mount::new(test, None) else { return };
    let connection = Connection::negotiate_with(device, &Wishes { io_uring: false, ..WISHES }, Agreed::None(None)).unwrap();
    let served = connection.serve_on(&Arc::new(EmptyRoot), 6, 16).unwrap();
    let look = |client: usize, times: usize| {
        for name in 0..times {
            let path = mount.path().join(format!("{client}-{name}"));
            assert!(fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound));
        }
    };
    for round in 0..30 {
        look(round, 100);
        std::thread::sleep(Duration::from_micros(40 * round as u64));
        if round % 3 == 0 {
            let look = &look;
            std::thread::scope(|scope| (0..4).for_each(|client| drop(scope.spawn(move || look(client, 100)))));
        }
    }
    drop(mount);
    served.join().finish().unwrap();
}
