//! Replies to requests.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use gpunvme_metrics::activity::{Actor, Done};
use gpunvme_metrics::{Begun, Ended, Meter};
use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

use crate::listing::Listing;
use crate::request::Time;
use crate::wire::{self, Attr, InHeader, OpenFlags, OutHeader, Statfs, WriteIn, opcode};

/// The way that replies take to the kernel.
pub(crate) trait Channel: Send + Sync {
    /// Sends the reply with this header, and the parts of its body. Does not wait for the kernel.
    fn answer(&self, header: OutHeader, body: [&[u8]; 2]) -> io::Result<()>;

    /// What counts the requests that come by it.
    fn meter(&self) -> &Meter;
}

/// The answer to one request, which is given once, from any thread. A reply that is dropped unused
/// is an error of the program: the caller gets EIO, and it is logged.
#[derive(Debug)]
#[must_use = "the caller waits for it"]
pub struct Reply {
    /// None once it is sent.
    open: Option<Open>,
}

struct Open {
    channel: Arc<dyn Channel>,
    unique: u64,
    /// What is said of it in the log.
    ino: u64,
    user: u32,
    thread: u32,
    begun: Begun,
    /// Bytes that the request brings; of another than WRITE 0.
    brings: u64,
    /// Whether the body of the reply is content of a file or a directory.
    fetches: bool,
}

/// How long the kernel may believe a reply.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// That the name means this inode.
    pub entry: Duration,
    /// That the inode has these attributes.
    pub attributes: Duration,
}

impl std::fmt::Debug for Open {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open").field("unique", &self.unique).finish_non_exhaustive()
    }
}

impl Reply {
    /// The reply to a request with this header, which has just arrived.
    pub(crate) fn new(channel: Arc<dyn Channel>, header: &InHeader) -> Reply {
        let begun = channel.meter().begin(header.opcode as usize, 1);
        let brings = match header.opcode {
            opcode::WRITE => u64::from(header.len).saturating_sub((size_of::<InHeader>() + size_of::<WriteIn>()) as u64),
            _ => 0,
        };
        let fetches = matches!(header.opcode, opcode::READ | opcode::READDIR | opcode::READDIRPLUS);
        let InHeader { unique, nodeid: ino, uid: user, pid: thread, .. } = *header;
        Reply { open: Some(Open { channel, unique, ino, user, thread, begun, brings, fetches }) }
    }

    /// It is done, and there is nothing to say.
    pub fn ok(self) {
        self.send([&[], &[]]);
    }

    /// It failed. `errno` is positive, as in C; what is none becomes EIO.
    pub fn error(mut self, errno: i32) {
        self.fail(errno);
    }

    /// Bytes: of a file, or the target of a symbolic link.
    pub fn data(self, data: &[u8]) {
        self.send([data, &[]]);
    }

    /// The inode of a name. Inode 0 says that the name does not exist, for as long as `times`
    /// does.
    pub fn entry(self, attr: &Attr, times: Times) {
        self.structure(&entry_out(attr, times));
    }

    /// The attributes of an inode.
    pub fn attributes(self, attr: &Attr, times: Times) {
        let Times { attributes: valid, .. } = times;
        let (attr_valid, attr_valid_nsec) = (valid.as_secs(), valid.subsec_nanos());
        self.structure(&wire::AttrOut { attr_valid, attr_valid_nsec, dummy: 0, attr: *attr });
    }

    /// The attributes of an inode, and when it was created.
    pub fn statx(self, attr: &Attr, born: Time, times: Times) {
        self.structure(&statx_out(attr, born, times));
    }

    /// A file is open.
    pub fn opened(self, handle: u64, flags: OpenFlags) {
        self.structure(&wire::OpenOut { fh: handle, open_flags: flags.bits(), backing_id: 0 });
    }

    /// A file is created and open.
    pub fn created(self, attr: &Attr, times: Times, handle: u64, flags: OpenFlags) {
        let open = wire::OpenOut { fh: handle, open_flags: flags.bits(), backing_id: 0 };
        self.structure(&wire::CreateOut { entry: entry_out(attr, times), open });
    }

    /// So many bytes were written.
    pub fn written(self, size: u32) {
        self.structure(&wire::SizeOut { size, padding: 0 });
    }

    /// So many bytes were copied; `wide` as in the request.
    pub fn copied(self, len: u64, wide: bool) {
        if wide { self.structure(&len) } else { self.written(u32::try_from(len).unwrap_or(u32::MAX)) }
    }

    /// The place that was sought.
    pub fn offset(self, offset: u64) {
        self.structure(&offset);
    }

    /// What a filesystem has and has left.
    pub fn statfs(self, statfs: &Statfs) {
        self.structure(statfs);
    }

    /// The value of an extended attribute, or the list of them, for a caller with room for `size`
    /// bytes: its length where that is 0, ERANGE where it is too little.
    pub fn value(self, value: &[u8], size: u32) {
        match u32::try_from(value.len()) {
            Ok(len) if size == 0 => self.structure(&wire::SizeOut { size: len, padding: 0 }),
            Ok(len) if len <= size => self.data(value),
            _ => self.error(Errno::RANGE.raw_os_error()),
        }
    }

    /// Entries of a directory.
    pub fn listing(self, listing: &Listing) {
        self.data(listing.bytes());
    }

    /// The result of an ioctl, and what it says.
    pub fn ioctl(self, result: i32, data: &[u8]) {
        let out = wire::IoctlOut { result, flags: 0, in_iovs: 0, out_iovs: 0 };
        self.send([out.as_bytes(), data]);
    }

    fn structure(self, body: &(impl IntoBytes + Immutable)) {
        self.send([body.as_bytes(), &[]]);
    }

    fn send(mut self, body: [&[u8]; 2]) {
        if let Some(open) = self.open.take() {
            open.send(0, body);
        }
    }

    fn fail(&mut self, errno: i32) {
        if let Some(open) = self.open.take() {
            open.send(errno.wrapping_neg(), [&[], &[]]);
        }
    }
}

impl Open {
    fn send(self, error: i32, body: [&[u8]; 2]) {
        let header = header(self.unique, error, body);
        let fetched = if self.fetches { (body[0].len() + body[1].len()) as u64 } else { 0 };
        // ENOSYS tells the kernel not to ask again.
        let failed = header.error < 0 && header.error != Errno::NOSYS.raw_os_error().wrapping_neg();
        let ended = Ended { count: 1, bytes: self.brings + fetched, failed };
        let meter = self.channel.meter();
        meter.end(self.begun, ended);
        if meter.activity.is_watched() {
            let actor = Actor { user: self.user, thread: self.thread, ino: self.ino };
            let nanoseconds = u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            meter.activity.add(actor, Done { operations: 1, read: fetched, written: self.brings, nanoseconds });
        }
        tracing::trace!(
            operation = opcode::name(self.begun.kind() as u32),
            ino = self.ino,
            user = self.user,
            thread = self.thread,
            bytes = ended.bytes,
            error,
            took = ?self.begun.elapsed(),
            "a request was answered"
        );
        let Err(error) = self.channel.answer(header, body) else { return };
        match Errno::from_io_error(&error) {
            // The caller was killed, or the connection has ended: the kernel waits for nothing.
            Some(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => {
                tracing::trace!(unique = self.unique, %error, "a reply came too late")
            }
            // It answers the caller with EIO.
            _ => tracing::error!(unique = self.unique, %error, "the kernel did not take a reply"),
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(open) = &self.open {
            tracing::error!(unique = open.unique, "a request was not answered");
            self.fail(Errno::IO.raw_os_error());
        }
    }
}

/// The header of a reply. The kernel takes errors from -511 to 0 (`fuse_dev_do_write`), and an
/// error has no body.
fn header(unique: u64, error: i32, body: [&[u8]; 2]) -> OutHeader {
    let error = if (-511..=0).contains(&error) { error } else { -Errno::IO.raw_os_error() };
    let len = size_of::<OutHeader>() + body.iter().map(|part| part.len()).sum::<usize>();
    OutHeader { len: u32::try_from(len).expect("no reply has 4 GiB"), error, unique }
}

/// An entry whose generation is 0: numbers of inodes are never used again.
pub(crate) fn entry_out(attr: &Attr, times: Times) -> wire::EntryOut {
    wire::EntryOut {
        nodeid: attr.ino,
        generation: 0,
        entry_valid: times.entry.as_secs(),
        attr_valid: times.attributes.as_secs(),
        entry_valid_nsec: times.entry.subsec_nanos(),
        attr_valid_nsec: times.attributes.subsec_nanos(),
        attr: *attr,
    }
}

fn statx_out(attr: &Attr, born: Time, times: Times) -> wire::StatxOut {
    /// `STATX_BASIC_STATS | STATX_BTIME` of linux/stat.h.
    const MASK: u32 = 0xfff;
    let time = |tv_sec, tv_nsec| wire::SxTime { tv_sec, tv_nsec, reserved: 0 };
    // How the kernel packs the number of a device into 32 bits (`new_encode_dev`).
    let (major, minor) = (attr.rdev >> 8 & 0xfff, attr.rdev & 0xff | attr.rdev >> 12 & 0xfff00);
    let stat = wire::Statx {
        mask: MASK,
        blksize: attr.blksize,
        attributes: 0,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        mode: attr.mode as u16,
        spare0: 0,
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        attributes_mask: 0,
        atime: time(attr.atime, attr.atimensec),
        btime: time(born.seconds, born.nanoseconds),
        ctime: time(attr.ctime, attr.ctimensec),
        mtime: time(attr.mtime, attr.mtimensec),
        rdev_major: major,
        rdev_minor: minor,
        dev_major: 0,
        dev_minor: 0,
        spare2: [0; 14],
    };
    let valid = times.attributes;
    wire::StatxOut { attr_valid: valid.as_secs(), attr_valid_nsec: valid.subsec_nanos(), flags: 0, spare: [0; 2], stat }
}

#[cfg(test)]
mod tests;
