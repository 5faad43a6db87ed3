//! A few hops from a vertex of a graph that no memory has, as samplers of neighbours make them, or
//! all hops: the array, memory of the GPU that the library reads all edges into, and managed memory
//! that they are read into, which is moved to the GPU at once or by the driver as kernels need it,
//! in turns. The files lie on loop devices, ours on a gpunvme volume and managed memory's on ext4
//! or btrfs.

use crate::cold::{forget, volume_and_peer};
use crate::graph::Search;
use crate::reads::write_each;
use crate::row::{head, ms, row};
use gpunvme::gpu::{GpuArraySettings, GpuRing, GpuRingSettings, Segment, Transfers};
use gpunvme::{File, Mount, Wait};
use gpunvme_cuda::{DeviceAllocation, Gpu};
use gpunvme_tests::cuda::{ARRAYS, Module, managed_words, move_to, word_at};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Neighbours of each vertex.
const DEGREE: u64 = 64;
/// Searches: hops that are made, the part of the edges for which the array has room, and the bytes
/// of its pages.
const SEARCHES: [(u32, u64, usize); 3] = [(3, 16, 4 << 10), (4, 16, 4 << 10), (u32::MAX, 1, 64 << 10)];
/// Bytes of a request of the library.
const REQUEST: u64 = 64 << 20;
/// Turns of each subject, of which the one in the middle counts.
const TURNS: usize = 3;

pub fn measure(gpu: Gpu, quick: bool, devices: usize) {
    let (vertices, blocks) = if quick { (1 << 14, 16) } else { (1u64 << 25, 528) };
    let len = vertices * DEGREE * 4;
    let Some((volume, peer)) = volume_and_peer(len, devices) else { return };
    let neighbour = |edge: u64| (u64::from(word_at(edge)) % vertices) as u32;
    let (ours, theirs) = (volume.path("edges"), peer.root().join("edges"));
    for path in [&ours, &theirs] {
        write_each(path, len, neighbour);
        fs::File::open(path).unwrap().sync_all().unwrap();
    }
    let site = Site { gpu, mount: Mount::open(volume.root()).unwrap(), ours, theirs, len };
    let module = Module::new(gpu, ARRAYS);
    let first: Vec<u64> = (0..=vertices).map(|vertex| vertex * DEGREE).collect();
    for (hops, part, page) in SEARCHES {
        let expected = levels(vertices, hops, neighbour);
        let reached = expected.iter().filter(|level| **level != u32::MAX).count();
        let mut search = Search::new(&module, &first, (hops, expected), blocks);
        let hops = if hops == u32::MAX { "all".into() } else { hops.to_string() };
        head(
            &format!(
                "{hops} hops in a graph of {vertices} vertices, {reached} of them reached; {} MiB of edges that no memory has; ms",
                len >> 20
            ),
            &["edges; vertices that a warp takes", "until it can begin", "the search", "together"],
        );
        let room = if part == 1 { "all have room" } else { "a sixteenth has room" };
        let names = [
            &format!("array, pages of {} KiB, {room}", page >> 10),
            "memory of the GPU, read by the library",
            "managed memory, the file read into it",
            "the same, moved to the GPU at once",
        ];
        // Of a page, and one: what suits one subject need not suit the other.
        let runs = [(page as u64 / DEGREE / 4) as u32, 1];
        let mut turns: [[Vec<Turn>; 4]; 2] = Default::default();
        for _ in 0..if quick { 1 } else { TURNS } {
            for (run, turns) in runs.into_iter().zip(&mut turns) {
                search.run = run;
                turns[0].push(site.by_array(&search, len / part, page));
                turns[1].push(site.by_memory(&search));
                turns[2].push(site.by_managed(&search, false));
                turns[3].push(site.by_managed(&search, true));
            }
        }
        for (run, turns) in runs.into_iter().zip(turns) {
            names.iter().zip(turns).for_each(|(name, turns)| show(&format!("{name}; {run}"), turns));
        }
    }
}

/// Where the edges are: two files of `len` bytes.
struct Site {
    gpu: Gpu,
    mount: Mount,
    /// On the mount.
    ours: PathBuf,
    theirs: PathBuf,
    len: u64,
}

impl Site {
    /// By an array with so much room, and pages of so many bytes.
    fn by_array(&self, search: &Search, room: u64, page: usize) -> Turn {
        forget(&self.ours);
        let begun = Instant::now();
        let ring = GpuRing::on_gpu(&self.mount, self.gpu.index(), GpuRingSettings::default()).unwrap();
        let settings = GpuArraySettings { cache: room as usize, page, ..GpuArraySettings::default() };
        let array = ring.array(&File::open(&self.ours).unwrap(), settings).unwrap();
        Turn::of(search, "search_array", begun, array.for_kernels().as_bytes())
    }

    /// By memory of the GPU that the library reads the file into.
    fn by_memory(&self, search: &Search) -> Turn {
        forget(&self.ours);
        let begun = Instant::now();
        let memory = read(self.gpu, &self.mount, &self.ours, self.len);
        Turn::of(search, "search_pointer", begun, memory.address().as_bytes())
    }

    /// By managed memory that the file is read into.
    fn by_managed(&self, search: &Search, is_moved: bool) -> Turn {
        forget(&self.theirs);
        let begun = Instant::now();
        let managed = managed_words(self.gpu, &self.theirs);
        if is_moved {
            move_to(self.gpu, &managed, self.len);
        }
        Turn::of(search, "search_pointer", begun, managed.address().as_bytes())
    }
}

/// A file of `len` bytes in memory of the GPU, by the library.
fn read(gpu: Gpu, mount: &Mount, path: &Path, len: u64) -> DeviceAllocation {
    let transfers = Transfers::new(mount).unwrap();
    let (file, memory) = (File::open(path).unwrap(), gpu.alloc(len as usize).unwrap());
    let mut queue = transfers.queue().unwrap();
    for offset in (0..len).step_by(REQUEST as usize) {
        let segment = Segment { file_offset: offset, address: memory.address() + offset, len: REQUEST.min(len - offset) };
        // SAFETY: the memory is that long, and lives until all requests are done.
        unsafe { queue.read(&file, &[segment], offset) }.unwrap();
    }
    let (mut left, mut done) = (len, Vec::new());
    while left > 0 {
        queue.complete(Wait::Forever, &mut done).unwrap();
        left -= done.drain(..).map(|finished| finished.result.unwrap().bytes()).sum::<u64>();
    }
    memory
}

/// How long a search takes.
struct Turn {
    /// Until it can begin.
    before: Duration,
    took: Duration,
}

impl Turn {
    /// Of a search that could begin now, and has been prepared since `begun`.
    fn of(search: &Search, name: &str, begun: Instant, words: &[u8]) -> Turn {
        let before = begun.elapsed();
        search.load(name, words);
        Turn { before, took: search.run(name, words) }
    }
}

/// A row of the turn in the middle.
fn show(name: &str, mut turns: Vec<Turn>) {
    turns.sort_by_key(|turn| turn.before + turn.took);
    let Turn { before, took } = turns[turns.len() / 2];
    row(name, &[ms(before), ms(took), ms(before + took)]);
}

/// The level of each vertex up to so many hops from vertex 0, by the processors.
fn levels(vertices: u64, hops: u32, neighbour: impl Fn(u64) -> u32 + Sync) -> Vec<u32> {
    let levels: Vec<_> = (0..vertices).map(|_| AtomicU32::new(u32::MAX)).collect();
    levels[0].store(0, Ordering::Relaxed);
    let mut frontier = vec![0u32];
    let threads = thread::available_parallelism().map_or(1, usize::from);
    for now in 1..=hops {
        let part = frontier.len().div_ceil(threads).max(1);
        let find = |part: &[u32]| {
            let edges = part.iter().flat_map(|vertex| u64::from(*vertex) * DEGREE..(u64::from(*vertex) + 1) * DEGREE);
            let is_new = |of: &u32| {
                let level = &levels[*of as usize];
                level.compare_exchange(u32::MAX, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            };
            edges.map(&neighbour).filter(is_new).collect::<Vec<_>>()
        };
        let found = thread::scope(|scope| {
            let parts: Vec<_> = frontier.chunks(part).map(|part| scope.spawn(|| find(part))).collect();
            parts.into_iter().flat_map(|part| part.join().unwrap()).collect::<Vec<_>>()
        });
        if found.is_empty() {
            break;
        }
        frontier = found;
    }
    levels.into_iter().map(AtomicU32::into_inner).collect()
}
