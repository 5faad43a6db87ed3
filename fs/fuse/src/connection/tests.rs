//! Connections of the real kernel, with a filesystem that has an empty root.

use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;

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
        let times = Times { entry: std::time::Duration::ZERO, attributes: std::time::Duration::ZERO };
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
    /// What the parameter was.
    before: String,
}

impl Mount {
    /// None, said aloud, where this cannot be tried.
    fn new(test: &str) -> Option<(Mount, Device)> {
        let skip = |why: &str| eprintln!("SKIPPED {test}: {why}");
        let Some(before) = fs::read_to_string(PARAMETER).ok().filter(|_| fs::write(PARAMETER, "Y").is_ok()) else {
            skip("FUSE over io_uring cannot be switched on here (Linux 6.14, as root)");
            return None;
        };
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let dir = tempfile::tempdir().unwrap();
        let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
        let options = CString::new(options).unwrap();
        if let Err(error) = rustix::mount::mount("test", dir.path(), "fuse", MountFlags::empty(), options.as_c_str()) {
            skip(&format!("nothing can be mounted here: {error}"));
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
        let _ = fs::write(PARAMETER, &self.before);
    }
}

#[test]
fn where_the_kernel_refuses_a_queue_requests_come_by_the_device() {
    let Some((mount, device)) = Mount::new("where_the_kernel_refuses_a_queue_requests_come_by_the_device") else { return };
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
