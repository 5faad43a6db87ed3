//! The ioctls of the direct path (`docs/reference/ioctl.md`) on open files and directories. What `READ` and `WRITE` do
//! once they are admitted is in [`super::transfers`].

use std::io;
use std::path::Path;
use std::sync::Arc;

use gpunvme_abi::{self as abi, Command, Direction, Info, Reason, Request, Resolve, Route, TransferRequest};
use gpunvme_gpupath::limits;
use gpunvme_gpupath::registry::{self, Limits, Registry};
use gpunvme_gpupath::ring::Rings;
use gpunvme_gpupath::server::{Answer, Reply, Server};
use gpunvme_gpupath::socket::Listener;
use gpunvme_layout::Geometry;
use gpunvme_layout::block::BLOCK_SIZE;
use gpunvme_layout::item::FILE_SIZE_MAX;

use super::handles::Handle;
use super::transfers::Transfer;
use super::{Caller, Front, sockets};
use gpunvme_engine::data::Filesystem;
use gpunvme_engine::volume::Mapping;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// The daemon's end of the direct path for one mount.
pub(super) struct Direct {
    pub(super) server: Arc<Server>,
    pub(super) rings: Rings,
    /// None where it cannot have one ([`sockets`]): whoever is not root registers by ioctl.
    socket: Option<Listener>,
    device: String,
}

impl Direct {
    /// The direct path to a filesystem, whose device the user called `device`. Up to `serving_threads` threads serve rings.
    ///
    /// # Errors
    /// If the system has no thread or descriptor to give.
    pub fn new(fs: &Filesystem, device: &str, serving_threads: usize) -> io::Result<Direct> {
        let registry = Registry::new(fs.volume().device().clone(), Limits::default())?;
        let server = Arc::new(Server::new(registry));
        let name = socket_name(fs, device);
        let socket = sockets::listen(&name, server.clone()).inspect_err(|error| tracing::debug!("{name}: {error}")).ok();
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
        let (route, reason) = match registry::peer_to_peer(&**fs.volume().device()) {
            Ok(()) => (Route::P2p, Reason::None),
            Err(reason) => (Route::Bounce, reason),
        };
        let mut info = Info {
            magic: abi::INFO_MAGIC,
            features: features.bits(),
            uuid: superblock.uuid,
            capacity: usage.blocks * BLOCK,
            free: usage.available * BLOCK,
            max_transfer: abi::MAX_TRANSFER,
            max_buffer_bytes: limits.process.bytes,
            max_buffers: limits.process.buffers as u32,
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

/// A name of its own for each mount: copies of a volume share its UUID.
fn socket_name(fs: &Filesystem, device: &str) -> String {
    use std::hash::Hasher;
    let mut hasher = rustc_hash::FxHasher::default();
    hasher.write(device.as_bytes());
    let uuid = u128::from_be_bytes(fs.volume().superblock().uuid);
    format!("{uuid:032x}-{:016x}.sock", hasher.finish())
}

impl Caller {
    /// The caller, as the direct path knows it.
    fn of_direct(&self) -> registry::Caller {
        registry::Caller { thread: self.thread, user: self.context.uid }
    }
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
                server.register_soon(caller.of_direct(), register, done);
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
                server.take_in(caller.context.uid, move |may| {
                    done(match may {
                        Ok(()) => front.direct.rings.open(caller.of_direct(), &ring),
                        Err(refusal) => Reply::new(refusal.errno(), &ring),
                    });
                });
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
            Ok(buffer) => {
                let transfer = Transfer { direction, caller, ino, handle, request, buffer, owner: None };
                let limit = if direction == Direction::Write { limits::file_size(caller.thread) } else { u64::MAX };
                self.begin_transfer(transfer, limit, done);
            }
            Err(refusal) => done(refusal),
        }
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
