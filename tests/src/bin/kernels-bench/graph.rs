//! Breadth-first search of a synthetic graph whose edges are in a file.

use crate::row::{head, ms, row};
use gpunvme::gpu::{GpuArraySettings, GpuRing, GpuRingSettings};
use gpunvme::{File, Mount};
use gpunvme_cuda::Gpu;
use gpunvme_tests::cuda::{ARRAYS, Memory, Module, Reports, get, good, holding, managed_words, put};
use gpunvme_tests::mounted::Image;
use std::fs;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// A graph: the neighbours of vertex v are `edges[first[v]..first[v + 1]]`.
struct Graph {
    first: Vec<u64>,
    edges: Vec<u32>,
}

impl Graph {
    /// Random: vertices with few neighbours and many, and neighbours that are so many more often.
    fn random(vertices: u32, degree: u64) -> Graph {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let (mut first, mut edges) = (vec![0], Vec::new());
        for vertex in 0..vertices {
            let spread = next() % 16;
            let count = if spread == 0 { degree * 8 } else { next() % degree };
            for _ in 0..count {
                // Of two the smaller: so are the first vertices found more often.
                let (a, b) = (next() % u64::from(vertices), next() % u64::from(vertices));
                edges.push(if vertex % 2 == 0 { a.min(b) } else { a } as u32);
            }
            first.push(edges.len() as u64);
        }
        Graph { first, edges }
    }

    /// The level of each vertex, by the processor.
    fn levels(&self) -> Vec<u32> {
        let mut levels = vec![u32::MAX; self.first.len() - 1];
        let (mut now, mut frontier) = (0, vec![0usize]);
        levels[0] = 0;
        while !frontier.is_empty() {
            now += 1;
            let mut found = Vec::new();
            for vertex in frontier {
                for neighbour in &self.edges[self.first[vertex] as usize..self.first[vertex + 1] as usize] {
                    if levels[*neighbour as usize] == u32::MAX {
                        levels[*neighbour as usize] = now;
                        found.push(*neighbour as usize);
                    }
                }
            }
            frontier = found;
        }
        levels
    }
}

/// A search from vertex 0, by kernels.
pub struct Search<'a> {
    module: &'a Module,
    first: Memory,
    levels: Memory,
    found: Memory,
    vertices: u32,
    /// Levels beyond which it does not go.
    hops: u32,
    expected: Vec<u32>,
    blocks: u32,
    /// Vertices in a row that a warp takes: one, unless it is changed.
    pub run: u32,
}

impl<'a> Search<'a> {
    /// Of a graph whose vertex v has the edges from `first[v]` to `first[v + 1]`: so many hops,
    /// which reach what `expected` has, by so many blocks.
    pub fn new(module: &'a Module, first: &[u64], (hops, expected): (u32, Vec<u32>), blocks: u32) -> Search<'a> {
        let gpu = module.gpu;
        let (levels, found) = (holding(gpu, expected.as_bytes()), holding(gpu, &[0; 4]));
        let vertices = expected.len() as u32;
        Search { module, first: holding(gpu, first.as_bytes()), levels, found, vertices, hops, expected, blocks, run: 1 }
    }

    /// Has CUDA load a kernel, which takes it as long as a small search: a search of no vertices.
    pub fn load(&self, name: &str, words: &[u8]) {
        self.level(name, words, 0, 0);
    }

    /// How long it takes, with every level compared.
    pub fn run(&self, name: &str, words: &[u8]) -> Duration {
        let gpu = self.module.gpu;
        let mut levels = vec![u32::MAX; self.vertices as usize];
        levels[0] = 0;
        put(gpu, &self.levels, levels.as_bytes());
        let begun = Instant::now();
        for now in 0..self.hops {
            put(gpu, &self.found, &[0; 4]);
            self.level(name, words, self.vertices, now);
            if get(gpu, &self.found, 4) == [0; 4] {
                break;
            }
        }
        let took = begun.elapsed();
        assert!(get(gpu, &self.levels, levels.len() * 4) == self.expected.as_bytes(), "{name}: other levels");
        took
    }

    /// One level, of the first so many vertices.
    fn level(&self, name: &str, words: &[u8], vertices: u32, now: u32) {
        let reports = Reports::new(self.module.gpu, self.blocks);
        let [first, levels, found] = [&self.first, &self.levels, &self.found].map(Memory::address);
        let (run, now) = (self.run.as_bytes(), now.as_bytes());
        let parameters = [words, first.as_bytes(), vertices.as_bytes(), run, levels.as_bytes(), now, found.as_bytes()];
        reports.launch(self.module, name, 256, &parameters, &[]);
        self.module.wait();
        good(&reports.get());
    }
}

pub fn measure(gpu: Gpu, quick: bool) {
    let graph = if quick { Graph::random(1 << 12, 16) } else { Graph::random(1 << 21, 64) };
    let len = graph.edges.len() as u64 * 4;
    let (volume, plain) = (Image::formatted_with(len + (512 << 20)).mount(), Image::blank(4096));
    for path in [volume.path("edges"), plain.path()] {
        fs::write(path, graph.edges.as_bytes()).unwrap();
    }
    let mount = Mount::open(volume.root()).unwrap();
    mount.sync().unwrap();
    let module = Module::new(gpu, ARRAYS);
    let ring = GpuRing::on_gpu(&mount, gpu.index(), GpuRingSettings::default()).unwrap();
    let search = Search::new(&module, &graph.first, (u32::MAX, graph.levels()), if quick { 16 } else { 528 });
    head(
        &format!("Breadth-first search, {} vertices, {} MiB of edges; ms", search.vertices, len >> 20),
        &["edges", "until it can begin", "the search", "together"],
    );
    let show = |name: &str, before: Duration, took: Duration| row(name, &[ms(before), ms(took), ms(before + took)]);
    let file = File::open(volume.path("edges")).unwrap();
    // Neighbours lie one after the other: long pages are as good as reading ahead.
    for (room, cache, page) in [
        ("all have", len, 4 << 10),
        ("all have", len, 64 << 10),
        ("a quarter has", len / 4, 4 << 10),
        ("a quarter has", len / 4, 64 << 10),
    ] {
        let begun = Instant::now();
        let settings = GpuArraySettings { cache: cache as usize, page, ..GpuArraySettings::default() };
        let array = ring.array(&file, settings).unwrap();
        let name = &format!("array, pages of {} KiB, {room} room", page >> 10);
        show(name, begun.elapsed(), search.run("search_array", array.for_kernels().as_bytes()));
        show("the same again", Duration::ZERO, search.run("search_array", array.for_kernels().as_bytes()));
    }
    for (name, path) in [("a file of tmpfs", plain.path()), ("the file of the mount", volume.path("edges"))] {
        let begun = Instant::now();
        let managed = managed_words(gpu, &path);
        let before = begun.elapsed();
        show(&format!("managed memory, read from {name}"), before, search.run("search_pointer", managed.address().as_bytes()));
    }
}
