//! Runs a transformer whose weights exceed the GPU memory that it is given: its layers are named in
//! a file of safetensors, and each is loaded while those before it compute.
//!
//!     cargo run --release --example layers -- /data/model.safetensors BYTES
//!
//! BYTES of the GPU's memory may be used for weights that stay, besides two layers' that are loaded
//! in turns. The file has, for each layer N from 0 on, `layers.N.` and `query`, `key`, `value`,
//! `output` (each WIDTH x WIDTH), `up` (INNER x WIDTH) and `down` (WIDTH x INNER), all F32.
//!
//! So that it needs no compiler for GPUs, the arithmetic is the processor's: it copies each layer
//! out of the GPU's memory in the stream in which a real model would launch its kernels. What comes
//! before and after that place is what such a model needs.

use gpunvme::gpu::{LayerLoader, LayerSettings, Tier, Transfers};
use gpunvme::{File, Mount};
use gpunvme_cuda::{Cuda, Stream, Which};
use std::error::Error;

const TOKENS: usize = 8;
const PARTS: [&str; 6] = ["query", "key", "value", "output", "up", "down"];

/// Rows of as many numbers as the model is wide, or one of its weights.
type Matrix = Vec<f32>;

fn main() -> Result<(), Box<dyn Error>> {
    let [path, resident] = std::env::args().skip(1).collect::<Vec<_>>().try_into().map_err(|_| "usage: layers MODEL BYTES")?;
    let transfers = Transfers::new(&Mount::open(&path)?)?;
    let file = File::open(path)?;
    let tensors = file.safetensors()?;
    let shape = |name: &str| tensors.iter().find(|tensor| tensor.name == name).map(|tensor| tensor.shape.clone());
    let names = |layer: usize| PARTS.map(|part| format!("layers.{layer}.{part}")).to_vec();
    let layers: Vec<_> = (0..).map(names).take_while(|names| shape(&names[0]).is_some()).collect();
    let [inner, width] =
        shape("layers.0.up").and_then(|shape| shape.try_into().ok()).ok_or("no layers.0.up of two dimensions")?;
    let (width, inner) = (width as usize, inner as usize);

    let settings = LayerSettings { resident: resident.parse()?, ..LayerSettings::default() };
    let mut loader = LayerLoader::by_names(&transfers, file, 0, &layers, settings)?;
    let weights: u64 = tensors.iter().map(|tensor| tensor.range.end - tensor.range.start).sum();
    eprintln!("{} layers, {weights} bytes of weights, {} of GPU memory", loader.len(), loader.gpu_bytes());

    let stream = Cuda::load()?.gpu(Which::Index(0))?.stream()?;
    let mut tokens: Matrix = (0..TOKENS * width).map(|n| (n as f32).sin()).collect();
    for _ in 0..loader.len() {
        // SAFETY: the stream outlives the loader's last call.
        let layer = unsafe { loader.next(stream.number()) }?;
        // A model launches its kernels here, with the addresses in `layer.tensors`, and goes on to
        // the next layer at once.
        let mut weights = Vec::new();
        for (part, address) in PARTS.iter().zip(&layer.tensors) {
            let len = if ["up", "down"].contains(part) { width * inner } else { width * width };
            weights.push(copied(&stream, *address, len)?);
        }
        tokens = computed(&tokens, &weights, width);
        eprintln!("layer {} came from {}", layer.number, if layer.tier == Tier::Resident { "memory" } else { "the SSD" });
    }
    // SAFETY: as above. What could not be read is told here, if not before.
    unsafe { loader.finish(stream.number()) }?;
    let last: Vec<_> = tokens[(TOKENS - 1) * width..].iter().map(|value| format!("{value:.4}")).collect();
    println!("{}", last.join(" "));
    Ok(())
}

/// Numbers of a layer, when the stream has come to them.
fn copied(stream: &Stream, address: u64, len: usize) -> Result<Matrix, Box<dyn Error>> {
    let mut matrix = vec![0.0f32; len];
    // SAFETY: the vector is that long, and waited for; the layer's memory is this one's until the
    // next layer is asked for.
    unsafe { stream.copy_out(matrix.as_mut_ptr() as u64, address, len * size_of::<f32>()) }?;
    stream.synchronize()?;
    Ok(matrix)
}

/// A layer: attention of each token to those up to it, then two matrices for each by itself.
fn computed(tokens: &[f32], weights: &[Matrix], width: usize) -> Matrix {
    let [query, key, value, output, up, down] = weights else { unreachable!("a layer has six tensors") };
    let seen = normalized(tokens, width);
    let [queries, keys, values] = [query, key, value].map(|matrix| times(&seen, matrix, width));
    let mut attention = vec![0.0; tokens.len()];
    for at in 0..TOKENS {
        let row = |of: &Matrix, token: usize| of[token * width..(token + 1) * width].to_vec();
        let score = |other: usize| dot(&row(&queries, at), &row(&keys, other)) / (width as f32).sqrt();
        let shares: Vec<f32> = (0..=at).map(|other| score(other).exp()).collect();
        let sum: f32 = shares.iter().sum();
        for (other, share) in shares.iter().enumerate() {
            for (n, value) in row(&values, other).iter().enumerate() {
                attention[at * width + n] += share / sum * value;
            }
        }
    }
    let tokens = added(tokens, &times(&attention, output, width));
    let mut hidden = times(&normalized(&tokens, width), up, width);
    hidden.iter_mut().for_each(|value| *value = value.max(0.0));
    added(&tokens, &times(&hidden, down, down.len() / width))
}

/// Each row with a mean square of 1.
fn normalized(rows: &[f32], width: usize) -> Matrix {
    let scaled = |row: &[f32]| {
        let scale = 1.0 / (dot(row, row) / width as f32 + 1e-5).sqrt();
        row.iter().map(move |value| value * scale).collect::<Vec<_>>()
    };
    rows.chunks(width).flat_map(scaled).collect()
}

/// Each row, multiplied by a matrix, which has a row for each number of the result.
fn times(rows: &[f32], matrix: &[f32], width: usize) -> Matrix {
    rows.chunks(width).flat_map(|row| matrix.chunks(width).map(|weights| dot(row, weights)).collect::<Vec<_>>()).collect()
}

fn dot(one: &[f32], other: &[f32]) -> f32 {
    one.iter().zip(other).map(|(one, other)| one * other).sum()
}

fn added(one: &[f32], other: &[f32]) -> Matrix {
    one.iter().zip(other).map(|(one, other)| one + other).collect()
}
