//! A small transformer whose layers are loaded while it computes: more weights than the memory that
//! it is given. Its kernels are in `tests/kernels/model.cu`.

use super::application::{Memory, allocated, own_stream};
use super::arrays::word_at;
use super::kernels::KernelCheck;
use super::launch::{Module, get, holding, put};
use crate::mounted::Mounted;
use gpunvme::gpu::{LayerLoader, LayerSettings, Segment, Tier, Transfers};
use gpunvme::{File, Mount};
use gpunvme_cuda::Gpu;
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

const MODEL: &str = include_str!("../../kernels/model.ptx");
/// Values that a thread of the kernels' blocks stands for.
const THREADS: u32 = 256;
const TILE: u32 = 32;

/// How large a model is.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Layers, all alike.
    pub layers: usize,
    /// Tokens that are computed together.
    pub tokens: u32,
    /// Values of a token, a multiple of the heads.
    pub width: u32,
    /// Heads of the attention.
    pub heads: u32,
    /// Values between the two products of a layer's second half.
    pub inner: u32,
}

impl Shape {
    /// Values of each of a layer's tensors, in the order in which they are in the file: two norms,
    /// four of the attention, three of the rest.
    fn tensors(self) -> [u64; 9] {
        let (width, inner) = (u64::from(self.width), u64::from(self.inner));
        let square = width * width;
        [width, square, square, square, square, width, width * inner, width * inner, inner * width]
    }

    /// Bytes of a layer.
    pub fn layer(self) -> u64 {
        self.tensors().iter().sum::<u64>() * 4
    }

    /// Where the tensors of each layer are in a file that begins with them.
    pub fn ranges(self) -> Vec<Vec<Range<u64>>> {
        let mut at = 0;
        let mut of_layer = || {
            let place = |values: u64| {
                let range = at..at + values * 4;
                at = range.end;
                range
            };
            self.tensors().into_iter().map(place).collect()
        };
        (0..self.layers).map(|_| of_layer()).collect()
    }

    /// Bytes of a token's values for all tokens.
    fn activation(self) -> usize {
        self.tokens as usize * self.width as usize * 4
    }

    /// What goes into the first layer.
    fn input(self) -> Vec<f32> {
        (0..self.tokens as u64 * u64::from(self.width)).map(|n| value(n + 7, 1.0)).collect()
    }

    /// Writes the weights.
    pub fn write(self, file: &mut impl Write) {
        let mut seed = 1u64 << 32;
        for _ in 0..self.layers {
            for (n, values) in self.tensors().into_iter().enumerate() {
                // Norms are about 1; what is multiplied keeps values of about the same size.
                let scale = if n == 8 { self.inner } else { self.width };
                let weight = |at| match n {
                    0 | 5 => 1.0 + value(at, 0.1),
                    _ => value(at, 1.7 / (scale as f32).sqrt()),
                };
                let bytes: Vec<u8> = (seed..seed + values).flat_map(|at| weight(at).to_le_bytes()).collect();
                file.write_all(&bytes).unwrap();
                seed += values;
            }
        }
    }
}

/// A value between -`scale` and `scale`, as random as it looks.
fn value(n: u64, scale: f32) -> f32 {
    (word_at(n) as f32 / (1u64 << 31) as f32 - 1.0) * scale
}

/// The model's kernels and its memory but for the weights.
pub struct Model {
    shape: Shape,
    module: Module,
    stream: usize,
    /// What layers add to.
    values: Memory,
    normed: Memory,
    q: Memory,
    k: Memory,
    v: Memory,
    attended: Memory,
    gate: Memory,
    up: Memory,
}

impl Model {
    /// For models of a shape.
    pub fn new(gpu: Gpu, shape: Shape) -> Model {
        let (activation, inner) = (shape.activation(), shape.tokens as usize * shape.inner as usize * 4);
        let own = |len| allocated(gpu, len);
        Model {
            shape,
            module: Module::new(gpu, MODEL),
            stream: own_stream(gpu),
            values: own(activation),
            normed: own(activation),
            q: own(activation),
            k: own(activation),
            v: own(activation),
            attended: own(activation),
            gate: own(inner),
            up: own(inner),
        }
    }

    /// Puts the input in.
    fn begin(&self) {
        put(self.module.gpu, &self.values, self.shape.input().as_bytes());
    }

    fn matmul(&self, out: &Memory, x: &Memory, weights: u64, (n, k): (u32, u32), add: bool) {
        let (m, out, x) = (self.shape.tokens, out.address(), x.address());
        let blocks = m.div_ceil(TILE) * n.div_ceil(TILE);
        let sizes = [m, n, k, u32::from(add)];
        let mut parameters = vec![out.as_bytes(), x.as_bytes(), weights.as_bytes()];
        parameters.extend(sizes.iter().map(IntoBytes::as_bytes));
        self.module.launch_in(self.stream, "matmul", blocks, THREADS, &parameters);
    }

    fn norm(&self, weights: u64) {
        let (out, x) = (self.normed.address(), self.values.address());
        let parameters = [out.as_bytes(), x.as_bytes(), weights.as_bytes(), self.shape.width.as_bytes()];
        self.module.launch_in(self.stream, "normalize", self.shape.tokens, THREADS, &parameters);
    }

    /// Puts a layer into the stream, whose weights are there.
    fn layer(&self, weights: &[u64]) {
        let Shape { tokens, width, heads, inner, .. } = self.shape;
        let square = (width, width);
        self.norm(weights[0]);
        for (out, weights) in [(&self.q, weights[1]), (&self.k, weights[2]), (&self.v, weights[3])] {
            self.matmul(out, &self.normed, weights, square, false);
        }
        let addresses = [&self.attended, &self.q, &self.k, &self.v].map(Memory::address);
        let sizes = [heads, width / heads];
        let words = addresses.iter().map(IntoBytes::as_bytes).chain(sizes.iter().map(IntoBytes::as_bytes));
        self.module.launch_in(self.stream, "attention", tokens * heads, THREADS, &words.collect::<Vec<_>>());
        self.matmul(&self.values, &self.attended, weights[4], square, true);
        self.norm(weights[5]);
        self.matmul(&self.gate, &self.normed, weights[6], (inner, width), false);
        self.matmul(&self.up, &self.normed, weights[7], (inner, width), false);
        let (gate, up, count) = (self.gate.address(), self.up.address(), tokens * inner);
        let parameters = [gate.as_bytes(), up.as_bytes(), count.as_bytes()];
        self.module.launch_in(self.stream, "gated", count.div_ceil(THREADS), THREADS, &parameters);
        self.matmul(&self.values, &self.gate, weights[8], (width, inner), true);
    }

    /// What came out.
    fn output(&self) -> Vec<f32> {
        self.module.wait_for(self.stream);
        let bytes = get(self.module.gpu, &self.values, self.shape.activation());
        bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    /// Computes with layers that a loader brings.
    pub fn loaded(&self, loader: &mut LayerLoader) -> (Vec<f32>, Duration) {
        self.begin();
        let begun = Instant::now();
        for number in 0..self.shape.layers {
            // SAFETY: the stream is never destroyed.
            let layer = unsafe { loader.next(self.stream) }.unwrap();
            assert_eq!(layer.number, number);
            self.layer(&layer.tensors);
        }
        // SAFETY: as above.
        unsafe { loader.finish(self.stream) }.unwrap();
        let took = begun.elapsed();
        (self.output(), took)
    }

    /// Computes with weights that are all in memory.
    pub fn resident(&self, weights: &Memory) -> (Vec<f32>, Duration) {
        self.begin();
        let begun = Instant::now();
        for ranges in self.shape.ranges() {
            let addresses: Vec<_> = ranges.iter().map(|range| weights.address() + range.start).collect();
            self.layer(&addresses);
        }
        self.module.wait_for(self.stream);
        let took = begun.elapsed();
        (self.output(), took)
    }

    /// The stream of the application.
    pub fn stream(&self) -> usize {
        self.stream
    }
}

/// The same by the processor, in double precision.
fn plain(shape: Shape, weights: &[u8]) -> Vec<f64> {
    let [tokens, width, heads, inner] = [shape.tokens, shape.width, shape.heads, shape.inner].map(|n| n as usize);
    let tensor = |range: &Range<u64>| -> Vec<f64> {
        let bytes = &weights[range.start as usize..range.end as usize];
        bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()).into()).collect()
    };
    let matmul = |x: &[f64], w: &[f64], n: usize, k: usize| -> Vec<f64> {
        let cell = |row: usize, column: usize| (0..k).map(|at| x[row * k + at] * w[at * n + column]).sum();
        (0..tokens * n).map(|at| cell(at / n, at % n)).collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let scale = |row: &[f64]| 1.0 / (row.iter().map(|value| value * value).sum::<f64>() / width as f64 + 1e-5).sqrt();
        x.chunks(width).flat_map(|row| row.iter().zip(w).map(move |(value, weight)| value * scale(row) * weight)).collect()
    };
    let mut values: Vec<f64> = shape.input().into_iter().map(f64::from).collect();
    for ranges in shape.ranges() {
        let w: Vec<_> = ranges.iter().map(tensor).collect();
        let x = norm(&values, &w[0]);
        let [q, k, v] = [1, 2, 3].map(|n| matmul(&x, &w[n], width, width));
        let (mut attended, each) = (vec![0.0; tokens * width], width / heads);
        for token in 0..tokens {
            for head in 0..heads {
                let at = |row: usize| row * width + head * each;
                let dot = |other: usize| (0..each).map(|n| q[at(token) + n] * k[at(other) + n]).sum::<f64>();
                let scores: Vec<_> = (0..=token).map(|other| (dot(other) / (each as f64).sqrt()).exp()).collect();
                let total: f64 = scores.iter().sum();
                for n in 0..each {
                    attended[at(token) + n] =
                        scores.iter().enumerate().map(|(other, s)| s * v[at(other) + n]).sum::<f64>() / total;
                }
            }
        }
        let add = |values: &mut [f64], more: &[f64]| values.iter_mut().zip(more).for_each(|(value, more)| *value += more);
        add(&mut values, &matmul(&attended, &w[4], width, width));
        let x = norm(&values, &w[5]);
        let (gate, up) = (matmul(&x, &w[6], inner, width), matmul(&x, &w[7], inner, width));
        let gated: Vec<_> = gate.iter().zip(&up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        add(&mut values, &matmul(&gated, &w[8], width, inner));
    }
    values
}

/// What needs a GPU that runs kernels.
pub const LAYER_CHECK: KernelCheck =
    ("a transformer computes the same with a part of its weights in memory", a_model_of_more_than_its_memory);

/// A model computes with a third of its weights in memory as with all of them, and as the
/// processor does.
fn a_model_of_more_than_its_memory(gpu: Gpu) {
    let shape = Shape { layers: 12, tokens: 20, width: 64, heads: 4, inner: 160 };
    let volume = Mounted::new();
    let mut weights = Vec::new();
    shape.write(&mut weights);
    fs::write(volume.path("model"), &weights).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    mount.sync().unwrap();
    let transfers = Transfers::new(&mount).unwrap();
    let model = Model::new(gpu, shape);
    let (resident, _) = model.resident(&holding(gpu, &weights));
    let expected = plain(shape, &weights);
    let worst = resident.iter().zip(&expected).map(|(got, right)| (f64::from(*got) - right).abs()).fold(0.0, f64::max);
    let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    assert!(worst < 1e-3 * largest, "off by {worst} of {largest}");
    let layer = shape.layer();
    for (resident_layers, pinned, buffers) in [(0, 0, 2), (2, 0, 2), (1, 4, 3), (0, 12, 2), (12, 0, 2)] {
        let settings = LayerSettings { resident: resident_layers * (layer + 4096), pinned: pinned * (layer + 4096), buffers };
        let file = File::open(volume.path("model")).unwrap();
        let mut loader = LayerLoader::new(&transfers, file, gpu.index(), &shape.ranges(), settings).unwrap();
        assert!(resident_layers == 12 || loader.gpu_bytes() < weights.len() as u64 / 2, "{} bytes", loader.gpu_bytes());
        for pass in 0..3 {
            let (output, _) = model.loaded(&mut loader);
            assert!(output == resident, "{settings:?}, pass {pass}: other values than with all weights in memory");
        }
    }
}

/// A model on a volume, for a bench.
pub struct ModelSite {
    // Before the volume, so that it ends first.
    transfers: Transfers,
    volume: Mounted,
    shape: Shape,
}

impl ModelSite {
    /// Writes its weights to a volume.
    pub fn new(volume: Mounted, shape: Shape) -> ModelSite {
        let mut file = std::io::BufWriter::with_capacity(4 << 20, fs::File::create(volume.path("model")).unwrap());
        shape.write(&mut file);
        drop(file);
        let mount = Mount::open(volume.root()).unwrap();
        mount.sync().unwrap();
        ModelSite { transfers: Transfers::new(&mount).unwrap(), volume, shape }
    }

    /// A loader of its layers.
    pub fn loader(&self, gpu: Gpu, settings: LayerSettings) -> LayerLoader {
        let file = File::open(self.volume.path("model")).unwrap();
        LayerLoader::new(&self.transfers, file, gpu.index(), &self.shape.ranges(), settings).unwrap()
    }

    /// All weights, in memory.
    pub fn weights(&self, gpu: Gpu) -> Memory {
        let file = File::open(self.volume.path("model")).unwrap();
        let len = self.shape.layer() * self.shape.layers as u64;
        let memory = allocated(gpu, len as usize);
        // SAFETY: it is that long.
        unsafe { self.transfers.read(&file, &[Segment { file_offset: 0, address: memory.address(), len }]) }.unwrap();
        memory
    }

    /// How long it takes to load every layer once, and compute nothing.
    pub fn load_alone(&self, loader: &mut LayerLoader, stream: usize) -> (Duration, usize) {
        let (begun, mut read) = (Instant::now(), 0);
        for _ in 0..loader.len() {
            // SAFETY: the stream is never destroyed.
            read += usize::from(unsafe { loader.next(stream) }.unwrap().tier == Tier::Ssd);
        }
        // SAFETY: as above.
        unsafe { loader.finish(stream) }.unwrap();
        (begun.elapsed(), read)
    }
}
