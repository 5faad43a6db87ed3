//! A FUSE filesystem with one file that cannot be closed: its server does not answer FLUSH until it
//! gives in. Not even SIGKILL ends a process that closes it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr,
    ReplyEmpty, ReplyEntry, ReplyOpen, Request, SessionACL,
};
use parking_lot::Mutex;

const FOREVER: Duration = Duration::from_secs(3600);

/// The filesystem, mounted. Dropping it gives in.
pub struct Stubborn {
    root: PathBuf,
    held: Held,
    _served: fuser::BackgroundSession,
}

/// The closes that wait; none after giving in.
type Held = Arc<Mutex<Option<Vec<ReplyEmpty>>>>;

impl Stubborn {
    pub fn mount(root: &Path) -> Stubborn {
        std::fs::create_dir(root).expect("a mount point");
        let held: Held = Arc::new(Mutex::new(Some(Vec::new())));
        let mut config = Config::default();
        config.acl = SessionACL::All;
        let served = fuser::spawn_mount(Server(held.clone()), root, &config).expect("a mount");
        Stubborn { root: root.to_owned(), held, _served: served }
    }

    /// The file.
    pub fn file(&self) -> PathBuf {
        self.root.join("file")
    }

    /// How many closes wait.
    pub fn held(&self) -> usize {
        self.held.lock().as_ref().map_or(0, Vec::len)
    }

    /// Answers them, and all that come.
    pub fn give_in(&self) {
        self.held.lock().take().into_iter().flatten().for_each(ReplyEmpty::ok);
    }
}

impl Drop for Stubborn {
    fn drop(&mut self) {
        self.give_in();
    }
}

struct Server(Held);

fn attributes(ino: INodeNo) -> FileAttr {
    let is_root = ino == INodeNo::ROOT;
    let now = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino,
        size: 0,
        blocks: 0,
        atime: now,
        mtime: now,
        ctime: now,
        crtime: now,
        kind: if is_root { FileType::Directory } else { FileType::RegularFile },
        perm: if is_root { 0o755 } else { 0o666 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Server {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("file") => reply.entry(&FOREVER, &attributes(INodeNo(2)), Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&FOREVER, &attributes(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        match &mut *self.0.lock() {
            Some(held) => held.push(reply),
            None => reply.ok(),
        }
    }
}
