//! A few hops from a vertex of a graph that no memory has, as samplers of neighbours make them: the
//! array beside managed memory that all edges are read into. Both files lie on loop devices, the
//! array's on a gpunvme volume and the other's on ext4.

use crate::cold::{forget, volume_and_peer};
use crate::graph::Search;
use crate::reads::write_each;
use crate::row::{head, ms, row};
use gpunvme::gpu::{GpuArraySettings, GpuRing, GpuRingSettings};
use gpunvme::{File, Mount};
use gpunvme_cuda::Gpu;
use gpunvme_tests::cuda::{ARRAYS, Module, managed_words, word_at};
use std::fs;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Neighbours of each vertex.
const DEGREE: u64 = 64;
/// Hops that are made.
const HOPS: [u32; 2] = [3, 4];

pub fn measure(gpu: Gpu, quick: bool) {
    let (vertices, blocks) = if quick { (1 << 14, 16) } else { (1u64 << 25, 528) };
    let len = vertices * DEGREE * 4;
    let Some((_below, volume, peer)) = volume_and_peer(len) else { return };
    let neighbour = |edge: u64| (u64::from(word_at(edge)) % vertices) as u32;
    let (ours, theirs) = (volume.path("edges"), peer.root.join("edges"));
    for path in [&ours, &theirs] {
        write_each(path, len, neighbour);
        fs::File::open(path).unwrap().sync_all().unwrap();
    }
    let module = Module::new(gpu, ARRAYS);
    let mount = Mount::open(volume.root()).unwrap();
    let first: Vec<u64> = (0..=vertices).map(|vertex| vertex * DEGREE).collect();
    for hops in HOPS {
        let expected = levels(vertices, hops, neighbour);
        let reached = expected.iter().filter(|level| **level != u32::MAX).count();
        let search = Search::new(&module, &first, (hops, expected), blocks);
        head(
            &format!(
                "{hops} hops in a graph of {vertices} vertices, {reached} of them reached; {} MiB of edges that no memory has; ms",
                len >> 20
            ),
            &["edges", "until it can begin", "the search", "together"],
        );
        let show = |name: &str, before: Duration, took: Duration| row(name, &[ms(before), ms(took), ms(before + took)]);
        forget(&ours);
        let begun = Instant::now();
        let ring = GpuRing::on_gpu(&mount, gpu.index(), GpuRingSettings::default()).unwrap();
        let settings = GpuArraySettings { cache: (len / 16) as usize, ..GpuArraySettings::default() };
        let array = ring.array(&File::open(&ours).unwrap(), settings).unwrap();
        show("array, a sixteenth has room", begun.elapsed(), search.run("search_array", array.for_kernels().as_bytes()));
        drop((array, ring));
        forget(&theirs);
        let begun = Instant::now();
        let managed = managed_words(gpu, &theirs);
        let before = begun.elapsed();
        let took = search.run("search_pointer", managed.address().as_bytes());
        show("managed memory, the file read into it", before, took);
    }
}

/// The level of each vertex up to so many hops from vertex 0, by the processor.
fn levels(vertices: u64, hops: u32, neighbour: impl Fn(u64) -> u32) -> Vec<u32> {
    let mut levels = vec![u32::MAX; vertices as usize];
    levels[0] = 0;
    let mut frontier = vec![0u64];
    for now in 1..=hops {
        let mut found = Vec::new();
        for edge in frontier.into_iter().flat_map(|vertex| vertex * DEGREE..(vertex + 1) * DEGREE) {
            let level = &mut levels[neighbour(edge) as usize];
            if *level == u32::MAX {
                *level = now;
                found.push(u64::from(neighbour(edge)));
            }
        }
        frontier = found;
    }
    levels
}
