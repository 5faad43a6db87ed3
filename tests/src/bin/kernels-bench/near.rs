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
use std::path::Path;
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
    let module = Module::new(gpu, ARRAYS);
    let mount = Mount::open(volume.root()).unwrap();
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
        // Of a page, and one: what suits one subject need not suit the other.
        let runs = [(page as u64 / DEGREE / 4) as u32, 1];
        let mut turns: [[Vec<Turn>; 4]; 2] = Default::default();
        for turn in 0..if quick { 1 } else { TURNS } {
            for (run, [by_array, by_memory, by_managed, by_moved]) in runs.into_iter().zip(&mut turns) {
                search.run = run;
                let once = |name: &str, begun: Instant, words: &[u8]| {
                    let before = begun.elapsed();
                    if turn == 0 {
                        search.load(name, words);
                    }
                    Turn { before, took: search.run(name, words) }
                };
                forget(&ours);
                let begun = Instant::now();
                let ring = GpuRing::on_gpu(&mount, gpu.index(), GpuRingSettings::default()).unwrap();
                let settings = GpuArraySettings { cache: (len / part) as usize, page, ..GpuArraySettings::default() };
                let array = ring.array(&File::open(&ours).unwrap(), settings).unwrap();
                by_array.push(once("search_array", begun, array.for_kernels().as_bytes()));
                drop((array, ring));
                forget(&ours);
                let begun = Instant::now();
                let memory = read(gpu, &mount, &ours, len);
                by_memory.push(once("search_pointer", begun, memory.address().as_bytes()));
                drop(memory);
                for (is_moved, turns) in [(false, &mut *by_managed), (true, &mut *by_moved)] {
                    forget(&theirs);
                    let begun = Instant::now();
                    let managed = managed_words(gpu, &theirs);
                    if is_moved {
                        move_to(gpu, &managed, len);
                    }
                    turns.push(once("search_pointer", begun, managed.address().as_bytes()));
                }
            }
        }
        for (run, [by_array, by_memory, by_managed, by_moved]) in runs.into_iter().zip(turns) {
            let room = if part == 1 { "all have room" } else { "a sixteenth has room" };
            show(&format!("array, pages of {} KiB, {room}; {run}", page >> 10), by_array);
            show(&format!("memory of the GPU, read by the library; {run}"), by_memory);
            show(&format!("managed memory, the file read into it; {run}"), by_managed);
            show(&format!("the same, moved to the GPU at once; {run}"), by_moved);
        }
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

/// A row of the turn in the middle, if there were turns.
fn show(name: &str, mut turns: Vec<Turn>) {
    turns.sort_by_key(|turn| turn.before + turn.took);
    if let Some(Turn { before, took }) = turns.get(turns.len() / 2) {
        row(name, &[ms(*before), ms(*took), ms(*before + *took)]);
    }
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
