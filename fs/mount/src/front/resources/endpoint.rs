//! The daemon's end of the direct path for one mount: buffers, rings, the registration socket, and
//! the answer to `INFO`.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use gpunvme_abi::{self as abi, Direction, Info, Metric, MetricKind, Metrics, Reason, Route, Top, TopList};
use gpunvme_blockdev::{Geometry, Op};
use gpunvme_fuse::{Fallback, Requests, Transport};
use gpunvme_gpupath::registry::{self, Limits, Registry};
use gpunvme_gpupath::ring::Rings;
use gpunvme_gpupath::server::{Reply, Server};
use gpunvme_gpupath::socket::Listener;
use gpunvme_metrics::Reading;
use gpunvme_metrics::activity::{Actor, Done};

use super::super::settings::Settings;
use super::sockets;
use gpunvme_engine::BLOCK_SIZE;
use gpunvme_engine::data::Filesystem;

/// Number of threads that serve rings at the most, beside so many loops: a quarter of the loops or
/// of the device's queues. Each is busy as long as there is work, and has a queue of the device to
/// itself, and for some devices threads of the kernel. Four of them give the device more to do than
/// it can.
pub fn serving_threads(loops: usize, device: &Geometry) -> usize {
    (loops.min(device.max_queues as usize) / 4).clamp(1, 4)
}

/// The operations of the device that are counted apart.
const DEVICE: [Op; Op::KINDS] = [Op::Read, Op::Write { fua: false }, Op::Flush, Op::Discard, Op::WriteZeroes];

/// The daemon's end of the direct path for one mount.
pub(crate) struct Endpoint {
    pub(crate) server: Arc<Server>,
    pub(crate) rings: Rings,
    /// The registration socket; none where the daemon cannot create one ([`sockets`]), as without
    /// root's rights: then processes register by ioctl only.
    socket: Option<Listener>,
    device: String,
    /// What `INFO` tells of the settings.
    settings: Info,
    /// How the kernel's requests come, which is known once they do.
    serving: OnceLock<Serving>,
    since: Instant,
}

/// How the kernel's requests come, and what is counted of them.
struct Serving {
    transport: Transport,
    requests: Requests,
}

impl Endpoint {
    /// The direct path to a filesystem with these settings. Up to `serving_threads` threads serve
    /// rings.
    ///
    /// # Errors
    /// If the system has no thread or descriptor to give.
    pub fn new(fs: &Filesystem, settings: &Settings, serving_threads: usize) -> io::Result<Endpoint> {
        let registry = Registry::new(fs.volume().device().clone(), Limits::default())?;
        let server = Arc::new(Server::new(registry)?);
        let socket = sockets::listen(fs.volume().superblock().volume_uuid(), server.clone());
        let socket = socket.inspect_err(|error| error.log("there is no registration socket")).ok();
        let rings = Rings::new(server.clone(), fs.volume().io().clone(), serving_threads)?;
        let device = settings.device.clone();
        let settings = Info {
            features: if settings.discard { abi::Features::DISCARD } else { abi::Features::empty() }.bits(),
            commit: settings.commit.as_secs() as u32,
            cache: settings.cache,
            write_buffer: settings.write_buffer,
            threads: settings.loops as u32,
            ..Info::default()
        };
        Ok(Endpoint { server, rings, socket, device, settings, serving: OnceLock::new(), since: Instant::now() })
    }

    /// Notes how the kernel's requests come, and what counts them.
    pub fn is_served(&self, transport: Transport, requests: Requests) {
        let set = self.serving.set(Serving { transport, requests });
        assert!(set.is_ok(), "a front end is served once");
    }

    /// The answer to `METRICS`.
    pub fn metrics(&self, fs: &Filesystem, asked: &Metrics) -> Reply {
        let (usage, cache) = (fs.usage(), fs.volume().cache_use());
        let requests = self.serving.get().into_iter().flat_map(|serving| serving.requests.read());
        let requests = requests.map(|(name, reading)| metric(MetricKind::Request, name, &reading));
        let transfers = self.server.stats.transfers().map(|(direction, route, reading)| {
            let direction = if direction == Direction::Read { "read" } else { "write" };
            metric(MetricKind::Transfer, &format!("{direction}-{route}"), &reading)
        });
        let meter = fs.volume().io().meter();
        let device = DEVICE.into_iter().map(|op| metric(MetricKind::Device, &op.to_string(), &meter.read(op.kind())));
        let all = requests.chain(transfers).chain(device).filter(|metric| metric.begun > 0);
        let entries: Vec<Metric> = all.take(asked.capacity as usize).collect();
        let header = Metrics {
            count: entries.len() as u32,
            uptime: u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX),
            volume_bytes: usage.blocks * BLOCK_SIZE as u64,
            free: usage.available * BLOCK_SIZE as u64,
            dirty: fs.buffered(),
            cache_lookups: cache.lookups,
            cache_misses: cache.misses,
            cache_bytes: cache.bytes,
            rings: self.rings.count() as u64,
            ..asked.clone()
        };
        Reply::with_entries(&header, &entries)
    }

    /// The answer to `TOP`, for a caller that sees what users do whom `is_shown` chooses.
    pub fn top(&self, asked: &TopList, is_shown: impl Fn(u32) -> bool) -> Reply {
        let requests = self.serving.get().map(|serving| serving.requests.activity().look(&is_shown)).unwrap_or_default();
        let transfers = self.server.stats.activity().look(&is_shown);
        let mut sums: HashMap<Actor, [Done; 2]> = HashMap::new();
        for (number, seen) in [&requests, &transfers].into_iter().enumerate() {
            seen.actors.iter().for_each(|(actor, done)| sums.entry(*actor).or_default()[number] = *done);
        }
        let entry = |(Actor { user, thread, ino }, [requests, transfers]): (Actor, [Done; 2])| Top {
            user,
            thread,
            ino,
            requests: requests.operations,
            transfers: transfers.operations,
            read: requests.read.saturating_add(transfers.read),
            written: requests.written.saturating_add(transfers.written),
            // Those of an ioctl took part of its request's time.
            nanoseconds: requests.nanoseconds.max(transfers.nanoseconds),
            reserved: 0,
        };
        let mut entries: Vec<Top> = sums.into_iter().map(entry).collect();
        entries.sort_unstable_by_key(|entry| (Reverse(entry.nanoseconds), entry.thread, entry.ino));
        let left_out = entries.len().saturating_sub(asked.capacity as usize);
        entries.truncate(asked.capacity as usize);
        let others = requests.others.operations + transfers.others.operations;
        let header = TopList { count: entries.len() as u32, left_out: left_out as u64, others, ..asked.clone() };
        Reply::with_entries(&header, &entries)
    }

    /// The answer to `INFO`.
    pub fn info(&self, fs: &Filesystem) -> Info {
        let superblock = fs.volume().superblock();
        let (geometry, stripe) = (fs.volume().device().geometry(), fs.volume().device().stripe());
        let usage = fs.usage();
        let limits = self.server.registry.limits();
        let mut features = abi::Features::empty();
        features.set(abi::Features::READ_ONLY, fs.volume().is_read_only());
        features |= match self.serving.get().map(|serving| serving.transport) {
            None | Some(Transport::Classic(None)) => abi::Features::empty(),
            Some(Transport::IoUring) => abi::Features::IO_URING,
            Some(Transport::Classic(Some(Fallback::Refused))) => abi::Features::IO_URING_REFUSED,
            Some(Transport::Classic(Some(Fallback::NotOffered))) => abi::Features::IO_URING_NOT_OFFERED,
            Some(Transport::Classic(Some(Fallback::NotRegistered))) => abi::Features::IO_URING_NOT_REGISTERED,
        };
        let (route, reason) = match registry::peer_to_peer(&**fs.volume().device()) {
            Ok(()) => (Route::P2p, Reason::None),
            Err(reason) => (Route::Bounce, reason),
        };
        let mut info = Info {
            magic: abi::INFO_MAGIC,
            features: features.bits() | self.settings.features,
            uuid: superblock.volume_uuid(),
            capacity: usage.blocks * BLOCK_SIZE as u64,
            free: usage.available * BLOCK_SIZE as u64,
            max_transfer: abi::MAX_TRANSFER,
            max_buffer_bytes: limits.process.bytes,
            max_buffers: limits.process.buffers as u32,
            max_segments: abi::MAX_SEGMENTS as u32,
            block_size: BLOCK_SIZE as u32,
            logical_block: geometry.logical_block,
            memory_alignment: geometry.memory_alignment,
            devices: stripe.map_or(1, |stripe| stripe.members() as u32),
            stripe_unit: stripe.map_or(0, |stripe| stripe.unit()),
            sets: stripe.map_or(1, |stripe| stripe.sets() as u32),
            route: route.code(),
            reason: reason.code(),
            ..self.settings.clone()
        };
        let path = self.socket.as_ref().map_or(Path::new(""), Listener::path);
        abi::put_text(&mut info.label, &superblock.names.label);
        abi::put_text(&mut info.socket, &path.to_string_lossy());
        // What it was named as at the mount, unless it has become more devices since.
        let device = if stripe.is_some() { fs.volume().device().name() } else { &self.device };
        abi::put_text(&mut info.device, device);
        abi::put_text(&mut info.daemon, concat!("mount.gpunvme ", env!("CARGO_PKG_VERSION")));
        info
    }
}

/// What was counted, as `METRICS` tells it.
fn metric(kind: MetricKind, name: &str, reading: &Reading) -> Metric {
    let Reading { begun, failed, bytes, nanoseconds, buckets } = *reading;
    let kind = kind as u32;
    let mut metric = Metric { kind, reserved: 0, name: [0; 24], begun, failed, bytes, nanoseconds, buckets };
    abi::put_text(&mut metric.name, name);
    metric
}
