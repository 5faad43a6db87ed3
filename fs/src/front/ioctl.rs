//! The ioctls of the direct path (`docs/ioctl.md`) on open files and directories.
//!
//! Ordinary and direct access to a file see each other's bytes: the kernel's dirty pages are written back before a direct
//! transfer looks, and what it has cached of a range is forgotten after a direct write. Both wait for the kernel, and so does
//! nothing that the kernel waits for.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use gpunvme_gpupath::abi::{self, Command, Info, Reason, Request, Resolve, Route, TransferRequest};
use gpunvme_gpupath::planner::{self, Direction};
use gpunvme_gpupath::registry::{Buffer, Limits, Registry};
use gpunvme_gpupath::ring::Rings;
use gpunvme_gpupath::server::{Answer, Outcome, Reply, Server};
use gpunvme_gpupath::socket::Listener;
use gpunvme_gpupath::transfer::{self, Failed};
use gpunvme_layout::Geometry;
use gpunvme_layout::Timestamp;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::FILE_SIZE_MAX;
use rustix::fs::Mode;
use smallvec::SmallVec;

use super::files::strip;
use super::handles::Handle;
use super::{Caller, Front};
use crate::data::direct::{DirectRead, DirectWrite, WriteFailed, Written};
use crate::data::{Filesystem, system_time};
use crate::error::FsError;
use crate::volume::Mapping;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Where the registration sockets are.
const SOCKETS: &str = "/run/gpunvme";
/// Filling more than this with zeros is not for a loop of the transport.
const QUICK_ZEROES: u64 = 256 << 10;

/// The daemon's end of the direct path for one mount.
pub(super) struct Direct {
    pub(super) server: Arc<Server>,
    pub(super) rings: Rings,
    /// None where nothing can be put into [`SOCKETS`]: whoever is not root registers by ioctl.
    socket: Option<Listener>,
    device: String,
}

/// A transfer that was admitted.
pub(super) struct Transfer {
    pub direction: Direction,
    pub caller: Caller,
    pub ino: u64,
    pub handle: Handle,
    pub request: TransferRequest,
    pub buffer: Arc<Buffer>,
}

/// A write under way: its segments before `first` are done, came to `outcome`, and were to the file what `written` says.
struct Write<D> {
    transfer: Transfer,
    first: usize,
    outcome: Outcome,
    written: Written,
    done: D,
}

impl Transfer {
    /// The ranges of the file that it is about.
    fn ranges(&self) -> impl Iterator<Item = Range<u64>> + Clone {
        let segments = self.request.segments.iter().filter(|s| s.len > 0);
        segments.map(|s| s.file_offset..s.file_offset + s.len)
    }
}

impl Direct {
    /// The direct path to a filesystem, whose device the user called `device`. Up to `serving_threads` threads serve rings.
    ///
    /// # Errors
    /// If the system has no thread or descriptor to give.
    pub fn new(fs: &Filesystem, device: &str, serving_threads: usize) -> io::Result<Direct> {
        let registry = Registry::new(fs.volume().device().clone(), Limits::default())?;
        let server = Arc::new(Server::new(registry));
        let path = socket_path(fs, device);
        let socket = std::fs::create_dir_all(SOCKETS)
            // Everybody may register: what buffers can be used for, the mount's permissions decide.
            .and_then(|()| Listener::bind(&path, Mode::from_raw_mode(0o666), server.clone()))
            .inspect_err(|error| tracing::debug!("{}: {error}", path.display()))
            .ok();
        let rings = Rings::new(server.clone(), fs.volume().io().clone(), serving_threads)?;
        Ok(Direct { server, rings, socket, device: device.to_owned() })
    }

    fn info(&self, fs: &Filesystem) -> Info {
        let superblock = fs.volume().superblock();
        let geometry = fs.volume().device().geometry();
        let usage = fs.usage();
        let limits = self.server.registry.limits();
        let mut features = abi::Features::empty();
        features.set(abi::Features::READ_ONLY, fs.volume().is_read_only());
        let (route, reason) = match fs.volume().device().peer_to_peer() {
            Ok(()) => (Route::P2p, Reason::None),
            Err(no) => (Route::Bounce, no.into()),
        };
        let mut info = Info {
            magic: abi::INFO_MAGIC,
            features: features.bits(),
            uuid: superblock.uuid,
            capacity: usage.blocks * BLOCK,
            free: usage.available * BLOCK,
            max_transfer: abi::MAX_TRANSFER,
            max_buffer_bytes: limits.bytes_per_process,
            max_buffers: limits.buffers_per_process,
            max_segments: abi::MAX_SEGMENTS as u32,
            block_size: BLOCK_SIZE as u32,
            logical_block: geometry.logical_block,
            memory_alignment: geometry.memory_alignment,
            devices: 1,
            route: route.code(),
            reason: reason.code(),
            ..Info::default()
        };
        let path = self.socket.as_ref().map_or(Path::new(""), Listener::path);
        abi::put_text(&mut info.label, &superblock.label);
        abi::put_text(&mut info.socket, &path.to_string_lossy());
        abi::put_text(&mut info.device, &self.device);
        abi::put_text(&mut info.daemon, concat!("mount.gpunvme ", env!("CARGO_PKG_VERSION")));
        info
    }
}

/// A path of its own for each mount: copies of a volume share its UUID.
fn socket_path(fs: &Filesystem, device: &str) -> PathBuf {
    use std::hash::Hasher;
    let mut hasher = rustc_hash::FxHasher::default();
    hasher.write(device.as_bytes());
    let uuid = u128::from_be_bytes(fs.volume().superblock().uuid);
    Path::new(SOCKETS).join(format!("{uuid:032x}-{:016x}.sock", hasher.finish()))
}

impl Front {
    /// An ioctl with this request number and argument, called by `thread` on an open file or directory.
    pub fn ioctl(
        self: &Arc<Self>,
        caller: Caller,
        ino: u64,
        handle: Handle,
        request: u32,
        argument: &[u8],
        done: impl FnOnce(Reply) + Send + 'static,
    ) {
        let front = self.clone();
        let server = &self.direct.server;
        match abi::decode(request, argument) {
            Err(error) => done(error.into()),
            Ok(Request::Info) => {
                server.stats.call(Command::Info, false);
                done(Reply::new(0, &self.direct.info(&self.fs)));
            }
            Ok(Request::Stats) => done(server.stats()),
            Ok(Request::Register(register)) => {
                self.general.run(move || done(front.direct.server.register(caller.thread, &register)));
            }
            Ok(Request::Unregister(unregister)) => {
                self.general.run(move || done(front.direct.server.unregister(caller.thread, &unregister)));
            }
            Ok(Request::Resolve(resolve)) => self.resolve(ino, resolve, done),
            Ok(Request::Read(request)) => {
                self.transfer(Direction::Read, caller, ino, handle, request, |answer| done(answer.into()));
            }
            Ok(Request::Write(request)) => {
                self.transfer(Direction::Write, caller, ino, handle, request, |answer| done(answer.into()));
            }
            Ok(Request::Ring(ring)) => {
                self.general.run(move || done(front.direct.rings.open(caller.thread, &ring)));
            }
            Ok(Request::Attach(attach)) => self.attach(caller, ino, handle, attach, done),
            Ok(Request::Detach(detach)) => {
                // What goes with a file may be the last of it.
                self.general.run(move || done(front.direct.rings.detach(caller.thread, &detach)));
            }
        }
    }

    fn transfer(
        self: &Arc<Self>,
        direction: Direction,
        caller: Caller,
        ino: u64,
        handle: Handle,
        request: TransferRequest,
        done: impl FnOnce(Answer) + Send + 'static,
    ) {
        if let Err(refusal) = self.may_transfer(direction, handle, &request) {
            return done(refusal);
        }
        match self.direct.server.admit(caller.thread, direction, &request) {
            Ok(buffer) => self.begin_transfer(Transfer { direction, caller, ino, handle, request, buffer }, done),
            Err(refusal) => done(refusal),
        }
    }

    /// Whether a file is open for a transfer, and its volume there for it.
    pub(super) fn may_transfer(&self, direction: Direction, handle: Handle, request: &TransferRequest) -> Result<(), Answer> {
        let access = match direction {
            Direction::Read => handle.readable(),
            Direction::Write => {
                handle.writable().and_then(|()| if self.fs.volume().is_read_only() { Err(FsError::ReadOnly) } else { Ok(()) })
            }
        };
        access.map_err(|error| self.direct.server.refuse(direction, request, error.errno(), Reason::None, None))
    }

    /// Begins a transfer that was admitted.
    pub(super) fn begin_transfer(self: &Arc<Self>, transfer: Transfer, done: impl FnOnce(Answer) + Send + 'static) {
        let front = self.clone();
        let ranges: SmallVec<[Range<u64>; 1]> = transfer.ranges().collect();
        self.written_back(transfer.ino, ranges.into_iter(), move || match transfer.direction {
            Direction::Read => front.direct_read(transfer, done),
            Direction::Write => {
                let written = Written { in_place: true, shown: false };
                front.write_group(Write { transfer, first: 0, outcome: Outcome::default(), written, done });
            }
        });
    }

    fn direct_read(self: &Arc<Self>, transfer: Transfer, done: impl FnOnce(Answer) + Send + 'static) {
        self.attempt_for(
            transfer,
            |fs, transfer| fs.plan_direct_read(transfer.ino, &transfer.request.segments, &transfer.buffer.region),
            |front, transfer, read| match front.admitted(&transfer, read, |read| &read.plan) {
                // Holes are filled by the thread that begins the transfer.
                Ok(read) if read.plan.hole > QUICK_ZEROES => {
                    let (front, general) = (front.clone(), front.general.clone());
                    general.run(move || front.begin_read(read, transfer, done));
                }
                Ok(read) => front.begin_read(read, transfer, done),
                Err(refusal) => done(refusal),
            },
        );
    }

    fn begin_read(self: &Arc<Self>, read: DirectRead, transfer: Transfer, done: impl FnOnce(Answer) + Send + 'static) {
        let DirectRead { plan, alignment, guard } = read;
        let front = self.clone();
        let complete = Outcome::done(&transfer.buffer, &plan);
        let buffer = transfer.buffer.clone();
        transfer::read(self.fs.volume().io(), self.fs.buffers(), alignment, plan, buffer, move |result| {
            drop(guard);
            let outcome = result.map_or_else(|error| failed(&transfer, error), |()| complete);
            front.answer(transfer, &outcome, done);
        });
    }

    /// Writes the segments from `first` on, as many as do not overlap: those that do have an order, and what is in flight
    /// together has none.
    fn write_group<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, write: Write<D>) {
        let next = write.first + planner::disjoint(&write.transfer.request.segments[write.first..]).len();
        let now = system_time();
        self.attempt_for(
            write,
            move |fs, Write { transfer, first, .. }| {
                // As for any other write: whoever changes a program does not get to keep it somebody else's.
                if transfer.caller.context.uid != 0 {
                    strip(fs, &transfer.caller, transfer.ino)?;
                }
                fs.plan_direct_write(transfer.ino, &transfer.request.segments[*first..next], &transfer.buffer.region, now)
            },
            move |front, write, planned| {
                let planned = match planned {
                    // Only the first group can be refused as if nothing had been asked.
                    Err(error) if write.first > 0 => {
                        return front.end_group(write, next, Outcome::failed(error.errno(), None), None);
                    }
                    planned => front.admitted(&write.transfer, planned, |planned| &planned.plan),
                };
                match planned {
                    Ok(planned) if planned.plan.edges.is_empty() => front.begin_group(planned, write, next),
                    // Was only to see whether it is admitted: edges go first.
                    Ok(planned) => {
                        drop(planned);
                        let (front, general) = (front.clone(), front.general.clone());
                        general.run(move || match front.write_edges(&write, next, now) {
                            Ok(planned) => front.begin_group(planned, write, next),
                            Err(error) => front.end_group(write, next, Outcome::failed(error.errno(), None), None),
                        });
                    }
                    Err(refusal) => (write.done)(refusal),
                }
            },
        );
    }

    /// Writes the edges of a group, and plans the rest of it.
    fn write_edges<D>(&self, write: &Write<D>, next: usize, now: Timestamp) -> Result<DirectWrite, FsError> {
        let Transfer { ino, request, buffer, .. } = &write.transfer;
        let segments = &request.segments[write.first..next];
        self.fs.write_edges(*ino, segments, &buffer.region, now)?;
        self.fs.wait(|| self.fs.plan_direct_write(*ino, segments, &buffer.region, now))
    }

    fn begin_group<D: FnOnce(Answer) + Send + 'static>(self: &Arc<Self>, planned: DirectWrite, write: Write<D>, next: usize) {
        let front = self.clone();
        let complete = Outcome::done(&write.transfer.buffer, &planned.plan);
        self.fs.submit_direct_write(planned, move |result| {
            let (outcome, written) = match result {
                Ok(written) => (complete, Some(written)),
                Err(WriteFailed::Device(error)) => (failed(&write.transfer, error), None),
                Err(WriteFailed::Mapping(error)) => (Outcome::failed(error.errno(), None), None),
            };
            front.end_group(write, next, outcome, written);
        });
    }

    /// A group is over: goes on with the one that begins with segment `next`, or answers. `written` is what it was to the file, if it was written.
    fn end_group<D: FnOnce(Answer) + Send + 'static>(
        self: &Arc<Self>,
        write: Write<D>,
        next: usize,
        outcome: Outcome,
        written: Option<Written>,
    ) {
        let Write { transfer, first, outcome: before, written: Written { in_place, shown }, done } = write;
        let outcome = before.then(outcome, first as u32);
        let written = Written {
            in_place: in_place && written.is_some_and(|w| w.in_place),
            shown: shown || written.is_none_or(|w| w.shown),
        };
        if outcome.status == 0 && next < transfer.request.segments.len() {
            let (front, general) = (self.clone(), self.general.clone());
            let write = Write { transfer, first: next, outcome, written, done };
            return general.run(move || front.write_group(write));
        }
        self.end_write(transfer, outcome, written, done);
    }

    /// The bytes of a write are the file's, as far as they will be: has the kernel forget what it knew of them, and answers.
    fn end_write(
        self: &Arc<Self>,
        transfer: Transfer,
        outcome: Outcome,
        written: Written,
        done: impl FnOnce(Answer) + Send + 'static,
    ) {
        let ends_inside = || {
            let end = transfer.ranges().map(|range| range.end).max().unwrap_or(0);
            matches!(self.fs.attributes(transfer.ino), Ok(now) if end < now.inode.size)
        };
        // Asked when the device has the data: what the kernel asks for from here on is new.
        let only_attributes = (written.in_place || ends_inside()) && !self.nodes.may_have(transfer.ino, transfer.ranges());
        if only_attributes && let Some(kernel) = self.kernel.get() {
            if written.shown {
                let since = Instant::now();
                if kernel.invalidate_attributes(transfer.ino) {
                    self.fs.take_attributes_back(transfer.ino, since);
                }
            }
            return self.answer_write(transfer, outcome, done);
        }
        let front = self.clone();
        self.invalidations.run(move || {
            let last = if outcome.status == 0 { front.last_byte(&transfer) } else { None };
            front.invalidate(transfer.ino, transfer.ranges().collect(), last);
            front.answer_write(transfer, outcome, done);
        });
    }

    /// Answers a write. Of a file that was opened with `O_DSYNC` or `O_SYNC`, when it is durable: nobody else syncs for the caller, as
    /// the kernel does after write(2).
    fn answer_write(self: &Arc<Self>, transfer: Transfer, outcome: Outcome, done: impl FnOnce(Answer) + Send + 'static) {
        if !transfer.handle.is_sync() || outcome.moved.total() == 0 {
            return self.answer(transfer, &outcome, done);
        }
        let front = self.clone();
        self.sync(transfer.ino, move |synced| {
            let outcome = synced.map_or_else(|error| Outcome::failed(error.errno(), None), |()| outcome);
            front.answer(transfer, &outcome, done);
        });
    }

    /// The last byte of a file that a write may have extended, and where it is, for the kernel to learn the length from. It asks by
    /// itself before it shows the length, but not before it appends; and it takes a length only with the bytes before it.
    fn last_byte(&self, transfer: &Transfer) -> Option<(u64, u8)> {
        let segments = transfer.request.segments.iter().filter(|s| s.len > 0);
        let last = segments.max_by_key(|s| s.file_offset + s.len)?;
        let end = last.file_offset + last.len;
        let reaches_end = self.fs.wait(|| self.fs.attributes(transfer.ino)).is_ok_and(|now| now.inode.size == end);
        let mut byte = [0];
        let read = transfer.buffer.region.read_at((last.buffer_offset + last.len - 1) as usize, &mut byte);
        (reaches_end && read.is_ok()).then_some((end - 1, byte[0]))
    }

    /// Whether a transfer that was planned may begin; the answer to give where not.
    fn admitted<P>(
        &self,
        transfer: &Transfer,
        planned: Result<P, FsError>,
        plan: impl FnOnce(&P) -> &gpunvme_gpupath::planner::Plan,
    ) -> Result<P, Answer> {
        let Transfer { direction, request, .. } = transfer;
        let server = &self.direct.server;
        let planned = planned.map_err(|error| server.refuse(*direction, request, error.errno(), Reason::None, None))?;
        server.admit_plan(*direction, request, plan(&planned))?;
        Ok(planned)
    }

    /// Answers a transfer that was begun. Before that it lets go of the buffer: whoever unregisters it after the answer finds the memory free.
    fn answer(&self, transfer: Transfer, outcome: &Outcome, done: impl FnOnce(Answer)) {
        let answer = self.direct.server.finish(transfer.direction, &transfer.request, &transfer.buffer, outcome);
        drop(transfer);
        done(answer);
    }

    fn resolve(self: &Arc<Self>, ino: u64, request: Resolve, done: impl FnOnce(Reply) + Send + 'static) {
        let front = self.clone();
        let end = request.offset.saturating_add(request.len).min(FILE_SIZE_MAX);
        let start = request.offset.min(end);
        self.written_back(ino, std::iter::once(start..end), move || {
            let (from, file_end) = (start / BLOCK, FILE_SIZE_MAX.div_ceil(BLOCK));
            front.attempt(
                // One more than there is room for says whether there is more.
                move |fs| fs.resolve(ino, from, file_end, request.capacity as usize + 1),
                move |front, resolved| {
                    front.direct.server.stats.call(Command::Resolve, resolved.is_err());
                    done(match resolved {
                        Ok((mappings, size)) => resolved_reply(&request, end, &mappings, size),
                        Err(error) => Reply::new(error.errno(), &request),
                    });
                },
            );
        });
    }
}

/// What a transfer came to when the device failed: the application gets the errno, and the log says what the device said.
fn failed(transfer: &Transfer, failed: Failed) -> Outcome {
    tracing::error!(ino = transfer.ino, direction = ?transfer.direction, "a direct transfer failed: {failed}");
    failed.into()
}

/// The answer to `RESOLVE`: of what a file has from the offset on, what lies before `end` and fits.
fn resolved_reply(request: &Resolve, end: u64, mappings: &[Mapping], file_size: u64) -> Reply {
    let capacity = request.capacity as usize;
    let is_all = mappings.len() <= capacity;
    let mut extents: Vec<abi::Extent> = mappings.iter().take(capacity).map(extent).collect();
    if is_all && let Some(last) = extents.last_mut() {
        last.flags |= abi::ExtentFlags::LAST.bits();
    }
    extents.retain(|extent| extent.file_offset < end);
    let next = match extents.last() {
        Some(last) if !is_all && extents.len() == capacity => last.file_offset + last.len,
        _ => end,
    };
    let count = extents.len() as u32;
    Reply::with_entries(&Resolve { next, file_size, count, ..request.clone() }, &extents)
}

fn extent(mapping: &Mapping) -> abi::Extent {
    let flags = if mapping.extent.unwritten { abi::ExtentFlags::UNWRITTEN } else { abi::ExtentFlags::empty() };
    abi::Extent {
        file_offset: mapping.offset * BLOCK,
        device_offset: Geometry::byte(mapping.extent.block),
        len: u64::from(mapping.extent.len) * BLOCK,
        device: 0,
        flags: flags.bits(),
    }
}
