//! A mount: its properties, its counters, and the registration of buffers with it.

use crate::activity::Activity;
use crate::buffer::{Memory, Registered, RegisteredBy};
use crate::codes::{reason, route};
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::metrics::Metrics;
use crate::transfer::Moved;
use crate::{socket, sys};
use gpunvme_abi::{self as abi, Command, Features, Reason, Route};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

/// A mounted volume.
#[derive(Clone, Debug)]
pub struct Mount {
    connection: Arc<Connection>,
}

/// What a mount is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// The device, as it was named to `mount.gpunvme`; of several all names, in the order of their
    /// numbers, with `+` between them.
    pub device: String,
    /// Label of the volume.
    pub label: String,
    /// UUID of the volume.
    pub uuid: [u8; 16],
    /// Name and version of the daemon.
    pub daemon: String,
    /// Whether it is mounted read-only.
    pub read_only: bool,
    /// How the kernel's requests come to the daemon.
    pub transport: Transport,
    /// Loops that take them.
    pub threads: u32,
    /// Bytes of the metadata cache.
    pub cache: u64,
    /// Bytes of small writes that wait in the daemon's memory.
    pub write_buffer: u64,
    /// Time between two commits of the journal.
    pub commit: Duration,
    /// Whether the device is told of blocks that files gave up.
    pub discard: bool,
    /// Bytes that the volume can hold.
    pub capacity: u64,
    /// Bytes of it that are free.
    pub free: u64,
    /// Block size of the filesystem in bytes: writes of whole blocks go direct.
    pub block_size: u32,
    /// Logical block of the device in bytes: reads of whole logical blocks go direct.
    pub logical_block: u32,
    /// What addresses and lengths of memory must be a multiple of to go direct, in bytes.
    pub memory_alignment: u32,
    /// Number of devices under the volume.
    pub devices: u32,
    /// Sets of devices, one behind the other: all but the first were added while it was used.
    pub sets: u32,
    /// Bytes that lie on one device before those of the next begin; 0 where there is one device.
    pub stripe_unit: u64,
    /// Most bytes that one ioctl moves. The library cuts what is longer.
    pub max_transfer: u64,
    /// Most segments of one ioctl. The library cuts what are more.
    pub max_segments: u32,
    /// Most buffers of one process.
    pub max_buffers: u32,
    /// Most bytes in the buffers of one process.
    pub max_buffer_bytes: u64,
    /// The fastest route that GPU memory can take here.
    pub route: Route,
    /// Why that is not `p2p`.
    pub reason: Reason,
    /// Path of the registration socket; empty where there is none.
    pub socket: String,
}

/// Counters of a mount since it was mounted, over all processes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Calls, by command.
    pub calls: [(&'static str, u64); Command::ALL.len()],
    /// Calls that failed.
    pub failed: u64,
    /// Bytes read, by route.
    pub read: Moved,
    /// Bytes written, by route.
    pub write: Moved,
    /// Buffers registered now.
    pub buffers: u64,
    /// Bytes in them.
    pub buffer_bytes: u64,
    /// Processes that own them.
    pub processes: u64,
    /// Transfers by the reason they reported, where there were any.
    pub reasons: Vec<(Reason, u64)>,
}

/// How the kernel's requests come to a mount's daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// By `/dev/fuse`.
    Classic,
    /// By `/dev/fuse`: the system refuses io_uring to the daemon.
    Refused,
    /// By `/dev/fuse`: the kernel does not offer io_uring.
    NotOffered,
    /// By `/dev/fuse`: the kernel refused a queue of io_uring.
    NotRegistered,
    /// Through io_uring.
    IoUring,
}

impl Transport {
    fn of(features: Features) -> Transport {
        let flags = [
            (Features::IO_URING, Transport::IoUring),
            (Features::IO_URING_REFUSED, Transport::Refused),
            (Features::IO_URING_NOT_OFFERED, Transport::NotOffered),
            (Features::IO_URING_NOT_REGISTERED, Transport::NotRegistered),
        ];
        flags.into_iter().find(|(flag, _)| features.contains(*flag)).map_or(Transport::Classic, |(_, transport)| transport)
    }

    /// `io_uring` or `classic`, as in the mount option.
    pub fn name(self) -> &'static str {
        if self == Transport::IoUring { "io_uring" } else { "classic" }
    }

    /// Why requests do not come through io_uring, where the mount was to have it.
    pub fn refusal(self) -> Option<&'static str> {
        match self {
            Transport::Classic | Transport::IoUring => None,
            Transport::Refused => Some("the system refuses io_uring (io_uring_disabled, or a container's seccomp filter)"),
            Transport::NotOffered => {
                Some("the kernel does not offer io_uring (from Linux 6.14 on: /sys/module/fuse/parameters/enable_uring)")
            }
            Transport::NotRegistered => Some("the kernel refused a queue of io_uring"),
        }
    }
}

impl Info {
    fn of(info: abi::Info) -> Info {
        let features = Features::from_bits_truncate(info.features);
        Info {
            device: abi::get_text(&info.device),
            label: abi::get_text(&info.label),
            uuid: info.uuid,
            daemon: abi::get_text(&info.daemon),
            read_only: features.contains(Features::READ_ONLY),
            transport: Transport::of(features),
            threads: info.threads,
            cache: info.cache,
            write_buffer: info.write_buffer,
            commit: Duration::from_secs(info.commit.into()),
            discard: features.contains(Features::DISCARD),
            capacity: info.capacity,
            free: info.free,
            block_size: info.block_size,
            logical_block: info.logical_block,
            memory_alignment: info.memory_alignment,
            devices: info.devices,
            sets: info.sets,
            stripe_unit: info.stripe_unit,
            max_transfer: info.max_transfer,
            max_segments: info.max_segments,
            max_buffers: info.max_buffers,
            max_buffer_bytes: info.max_buffer_bytes,
            route: route(info.route),
            reason: reason(info.reason),
            socket: abi::get_text(&info.socket),
        }
    }
}

impl Mount {
    /// The mount that a file or directory lies on, which must be readable by the caller. Copies of
    /// what is returned share one descriptor, and any number of threads may use them.
    ///
    /// # Errors
    /// [`Error::NotGpunvme`] where it lies on another filesystem, [`Error::WrongKind`] where it is
    /// neither a file nor a directory, [`Error::Path`] where it cannot be opened,
    /// [`Error::OtherVersion`] where the daemon is another version's.
    pub fn open(path: impl AsRef<Path>) -> Result<Mount> {
        let path = path.as_ref();
        // Nonblocking, so that a FIFO is refused and not waited for.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| Error::Path {
            path: path.to_owned(),
            action: "open it",
            errno,
        })?;
        let mount = Mount::of(file, path)?;
        mount.connection.make_known();
        Ok(mount)
    }

    /// The mount of an open file or directory; `path` is for messages.
    pub(crate) fn of(file: OwnedFd, path: &Path) -> Result<Mount> {
        Ok(Mount { connection: Arc::new(Connection::of(file, path)?) })
    }

    pub(crate) fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// What it is and can do, asked of the daemon now.
    ///
    /// # Errors
    /// [`Error::Path`] where the daemon does not answer.
    pub fn info(&self) -> Result<Info> {
        self.connection.raw_info().map(Info::of)
    }

    /// What it did since it was mounted, asked of the daemon now.
    ///
    /// # Errors
    /// [`Error::Path`] where the daemon does not answer.
    pub fn stats(&self) -> Result<Stats> {
        let stats = self.connection.raw_stats()?;
        const NAMES: [&str; Command::ALL.len()] = [
            "info",
            "register",
            "unregister",
            "resolve",
            "read",
            "write",
            "stats",
            "ring",
            "attach",
            "detach",
            "grant",
            "sync",
            "metrics",
            "log",
            "top",
            "trim",
            "grow",
        ];
        let counted = stats.reasons.iter().enumerate().filter(|(_, count)| **count > 0);
        Ok(Stats {
            calls: std::array::from_fn(|at| (NAMES[at], stats.calls(Command::ALL[at]))),
            failed: stats.failed,
            read: stats.read.into(),
            write: stats.write.into(),
            buffers: stats.buffers,
            buffer_bytes: stats.buffer_bytes,
            processes: stats.processes,
            reasons: counted.map(|(code, count)| (reason(code as u32), *count)).collect(),
        })
    }

    /// How many operations there were since it was mounted, of each kind, and how long they took,
    /// asked of the daemon now.
    ///
    /// # Errors
    /// [`Error::Path`] where the daemon does not answer.
    pub fn metrics(&self) -> Result<Metrics> {
        let (header, entries) = self.connection.raw_metrics()?;
        Ok(Metrics::of(&header, &entries))
    }

    /// What threads and processes did with files since it was first asked for: the daemon counts it
    /// from the first call on, as long as there is one every 10 s. A caller sees what its own user
    /// does; who administers the mount sees all.
    ///
    /// # Errors
    /// [`Error::Path`] where the daemon does not answer.
    pub fn activity(&self) -> Result<Activity> {
        let (header, entries) = self.connection.raw_top()?;
        Ok(Activity::of(&header, &entries))
    }

    /// Makes everything durable that any process did to the volume before: as sync(2) does for all
    /// filesystems, but for FUSE's. The kernel is asked to write back what was stored into shared
    /// mappings, and may not wait until that has been done: msync(2) waits.
    ///
    /// # Errors
    /// [`Error::Path`] with `EIO` where some of it could not be written: which file lost data,
    /// fsync(2) of it tells. [`Error::Path`] also where the daemon does not answer.
    pub fn sync(&self) -> Result<()> {
        let file = self.connection.file.as_fd();
        let action = "make it durable";
        let failed = |errno| Error::Path { path: self.connection.path.clone(), action, errno };
        rustix::fs::syncfs(file).map_err(failed)?;
        self.connection.call(Command::Sync, abi::Sync::default(), action).map(|_| ())
    }

    /// Tells the devices of the volume which of its bytes from `start` on, `len` at the most, no
    /// file has, so that they need not keep them: free bytes that lie side by side, `minimum` at
    /// least. `progress` is told from time to time where on the volume it is, and says whether to
    /// go on.
    /// Returns how many bytes the devices were told of.
    ///
    /// # Errors
    /// [`Error::NotDone`] with `EPERM` for callers that do not administer the mount, `EOPNOTSUPP`
    /// where a device has no discard, `EROFS` where the mount is read-only, `EIO` where a device
    /// failed.
    pub fn trim(&self, start: u64, len: u64, minimum: u64, mut progress: impl FnMut(u64) -> bool) -> Result<u64> {
        let end = start.saturating_add(len);
        let (mut at, mut trimmed) = (start, 0);
        loop {
            let mut argument = abi::Trim { start: at, len: end - at, minimum, ..abi::Trim::default() };
            let answer = sys::ioctl(self.connection.file.as_fd(), Command::Trim.request(0), argument.as_mut_bytes());
            answer.map_err(|errno| self.not_done("tell the devices what is free", errno, &argument.why))?;
            trimmed += argument.trimmed;
            at = argument.next;
            if at >= end || !progress(at) {
                return Ok(trimmed);
            }
        }
    }

    /// Gives a volume of several devices further ones, named as its daemon is to open them, whose
    /// first and last MiB are zero; without any, makes it as large as its devices have become.
    /// Returns how many bytes it could hold before, and can hold now.
    ///
    /// # Errors
    /// [`Error::NotDone`] with `EPERM` for callers that do not administer the mount, `EINVAL` where
    /// the devices have no room for more or cannot be the volume's, `EROFS` where the mount is
    /// read-only, `EIO` where a device failed.
    pub fn grow(&self, devices: &[&str]) -> Result<[u64; 2]> {
        self.grow_with(abi::GrowFlags::empty(), devices)
    }

    /// Whether [`Mount::grow`] could give the volume these devices, whatever they hold.
    ///
    /// # Errors
    /// As [`Mount::grow`].
    pub fn may_grow(&self, devices: &[&str]) -> Result<()> {
        self.grow_with(abi::GrowFlags::CHECK, devices).map(|_| ())
    }

    fn grow_with(&self, flags: abi::GrowFlags, devices: &[&str]) -> Result<[u64; 2]> {
        let action = "make the volume larger";
        let mut argument = abi::Grow { flags: flags.bits(), ..abi::Grow::default() }.as_bytes().to_vec();
        if devices.len() > abi::MAX_NEW_DEVICES {
            let why = format!("{} devices are too many at once: {} are the most", devices.len(), abi::MAX_NEW_DEVICES);
            return Err(Error::NotDone { path: self.connection.path.clone(), action, errno: Errno::INVAL, why });
        }
        for name in devices {
            let mut device = abi::NewDevice { name: [0; 256] };
            abi::put_text(&mut device.name, name);
            if abi::get_text(&device.name) != **name {
                let why = format!("{name}: the name is too long, or none");
                return Err(Error::NotDone { path: self.connection.path.clone(), action, errno: Errno::INVAL, why });
            }
            argument.extend_from_slice(device.as_bytes());
        }
        let answer = sys::ioctl(self.connection.file.as_fd(), Command::Grow.request(devices.len()), &mut argument);
        let (grown, _) = abi::Grow::read_from_prefix(&argument).expect("it begins with one");
        answer.map_err(|errno| self.not_done(action, errno, &grown.why))?;
        Ok([grown.before, grown.capacity])
    }

    fn not_done<const N: usize>(&self, action: &'static str, errno: Errno, why: &[u8; N]) -> Error {
        let path = self.connection.path.clone();
        match abi::get_text(why) {
            why if why.is_empty() => Error::Path { path, action, errno },
            why => Error::NotDone { path, action, errno, why },
        }
    }

    /// Which events the daemon logs: a filter in the syntax of the mount option `log`. Where one is
    /// given it holds from now on, and the one that held before is returned.
    ///
    /// # Errors
    /// [`Error::Path`] with `EPERM` for callers that do not administer the mount, with `EINVAL` for
    /// what is no filter, and where the daemon does not answer.
    pub fn log(&self, filter: Option<&str>) -> Result<String> {
        let mut argument = abi::Log::default();
        let is_text =
            |filter: &str| !filter.is_empty() && filter.len() < abi::Log::default().filter.len() && !filter.contains('\0');
        let answer = if filter.is_none_or(is_text) {
            abi::put_text(&mut argument.filter, filter.unwrap_or_default());
            sys::ioctl(self.connection.file.as_fd(), Command::Log.request(0), argument.as_mut_bytes())
        } else {
            Err(Errno::INVAL)
        };
        let action = match answer {
            Err(Errno::INVAL) => "use this filter: it is not in the syntax of the mount option \"log\"",
            _ => "ask for or change what its daemon logs, as only those do who may mount it",
        };
        answer.map_err(|errno| Error::Path { path: self.connection.path.clone(), action, errno })?;
        Ok(abi::get_text(&argument.filter))
    }

    /// Makes a buffer known to the mount, as a whole. Registering pins its memory, costs a system
    /// call or two, and is meant to be done once, not for each transfer. What is returned
    /// unregisters it when it is dropped.
    ///
    /// Where the daemon may not fetch the buffer from this process, it is sent over the mount's
    /// socket; [`Registered::registered_by`] tells.
    ///
    /// # Errors
    /// [`Error::Refused`] with the reason; [`Error::NotReachable`] where neither way is open;
    /// [`Error::Memory`] where there are no pages for it.
    pub fn register<M: Memory>(&self, memory: M) -> Result<Registered<M>> {
        let (answer, by) = match self.ask_to_register(&memory) {
            // The daemon pays for no page of it.
            Err(Error::Refused { reason: Reason::NotAllocated, .. }) => {
                let len = memory.length();
                sys::allocate(memory.descriptor(), len as u64).map_err(|errno| Error::Memory { len, errno })?;
                self.ask_to_register(&memory)?
            }
            answer => answer?,
        };
        let connection = self.connection.clone();
        Ok(Registered {
            memory,
            id: answer.buffer,
            connection,
            route: route(answer.route),
            reason: reason(answer.reason),
            by,
            lost: AtomicBool::new(false),
        })
    }

    fn ask_to_register<M: Memory>(&self, memory: &M) -> Result<(abi::Register, RegisteredBy)> {
        let fd = memory.descriptor().as_raw_fd();
        let (len, flags) = (memory.length() as u64, memory.flags().bits());
        let request = abi::Register { fd, len, flags, ..abi::Register::default() };
        let mut answer = request.clone();
        match sys::ioctl(self.connection.file.as_fd(), Command::Register.request(0), answer.as_mut_bytes()) {
            Ok(()) => Ok((answer, RegisteredBy::Ioctl)),
            Err(ioctl @ (Errno::PERM | Errno::SRCH)) => {
                Ok((self.send(memory.descriptor(), &request, ioctl)?, RegisteredBy::Socket))
            }
            Err(errno) => Err(Error::Refused { reason: reason(answer.reason), errno }),
        }
    }

    fn send(&self, memory: BorrowedFd<'_>, request: &abi::Register, ioctl: Errno) -> Result<abi::Register> {
        let path = &self.connection.socket;
        let answer = socket::register(path, memory, &abi::Register { fd: -1, ..request.clone() });
        match answer.map_err(|errno| Error::NotReachable { ioctl, socket: path.clone(), errno })? {
            (None, answer) => Ok(answer),
            (Some(errno @ Errno::SRCH), _) => Err(Error::NotReachable { ioctl, socket: path.clone(), errno }),
            (Some(errno), answer) => Err(Error::Refused { reason: reason(answer.reason), errno }),
        }
    }
}
