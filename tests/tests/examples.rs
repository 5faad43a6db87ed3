//! The library's examples (`client/examples`), each built and run on a real mount; the software
//! CUDA driver plays the part of a GPU.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, software_cuda, tree};

/// Several parts of a copy, and not whole blocks.
const LEN: u64 = (33 << 20) + 1234;

/// A volume with the file `from`, and what is in it.
fn volume() -> (Mounted, Vec<u8>) {
    let volume = Mounted::new();
    let bytes = tree::pattern(11, LEN as usize);
    fs::write(volume.path("from"), &bytes).unwrap();
    // A file that is replaced, and was longer.
    fs::write(volume.path("to"), tree::pattern(12, LEN as usize + 5000)).unwrap();
    (volume, bytes)
}

fn run(mut program: Command, files: &[PathBuf]) -> String {
    let output: Output = program.args(files).output().expect("the example runs");
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).expect("it prints text")
}

#[test]
fn copy() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(Command::new(programs::example("copy")), &[volume.path("from"), volume.path("to")]);
    assert_eq!(said, format!("{LEN} bytes by way of host memory\n"));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}

/// Compiles an example in C.
fn in_c(volume: &Mounted, name: &str) -> Command {
    let program = volume.image().path().with_file_name(name);
    let built = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic"])
        .arg(format!("{}/../client/examples/{name}.c", env!("CARGO_MANIFEST_DIR")))
        .args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include"), "-L"])
        .arg(programs::folder())
        .args(["-lgpunvme", "-o"])
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(built.status.success(), "{}", text(&built));
    let mut program = Command::new(program);
    program.env("LD_LIBRARY_PATH", programs::folder());
    program
}

#[test]
fn copy_in_c() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(in_c(&volume, "copy"), &[volume.path("from"), volume.path("to")]);
    assert_eq!(said, format!("{LEN} bytes by way of host memory\n"));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}

#[test]
fn ring_in_c() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(in_c(&volume, "ring"), &[volume.path("from")]);
    let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(said, format!("{LEN} bytes, sum {sum}\n"));
}

#[test]
fn ring() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(Command::new(programs::example("ring")), &[volume.path("from")]);
    let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(said, format!("{LEN} bytes, sum {sum}\n"));
}

#[test]
fn gpu() {
    needs_mount!();
    let (volume, bytes) = volume();
    // What the page cache has would come from there.
    let from = fs::File::open(volume.path("from")).unwrap();
    from.sync_all().unwrap();
    rustix::fs::fadvise(&from, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut program = Command::new(programs::example("gpu"));
    program.env("LD_LIBRARY_PATH", software_cuda::folder());
    let said = run(program, &[volume.path("from"), volume.path("to")]);
    // The file ends within a block, of which the processor copies what there is.
    let edge = LEN % 512;
    let moved = format!("Moved {{ p2p: 0, bounce: {}, cache: 0, host: 0, hole: 0, edge: {edge} }}", LEN - edge);
    assert_eq!(said, format!("{LEN} bytes by way of {moved}\n"));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}

/// Layers of a transformer in a file of safetensors, and what the model makes of its tokens,
/// reckoned with double precision and all weights at hand.
struct Transformer {
    layers: usize,
    width: usize,
    inner: usize,
}

impl Transformer {
    const TOKENS: usize = 8;

    fn shapes(&self) -> [(&'static str, usize, usize); 6] {
        let (width, inner) = (self.width, self.inner);
        let square = |name| (name, width, width);
        [square("query"), square("key"), square("value"), square("output"), ("up", inner, width), ("down", width, inner)]
    }

    fn weight(&self, layer: usize, part: usize, at: usize) -> f32 {
        let n = ((layer * 6 + part) * 1_000_003 + at) as u32;
        (n.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 / 4.0 - 0.125
    }

    /// The file, with its layers in the opposite order.
    fn file(&self) -> Vec<u8> {
        let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
        for layer in (0..self.layers).rev() {
            for (part, (name, rows, columns)) in self.shapes().into_iter().enumerate() {
                let start = bytes.len();
                bytes.extend((0..rows * columns).flat_map(|at| self.weight(layer, part, at).to_le_bytes()));
                let tensor =
                    serde_json::json!({ "dtype": "F32", "shape": [rows, columns], "data_offsets": [start, bytes.len()] });
                header.insert(format!("layers.{layer}.{name}"), tensor);
            }
        }
        let header = serde_json::to_vec(&header).unwrap();
        [&(header.len() as u64).to_le_bytes()[..], &header, &bytes].concat()
    }

    fn times(&self, layer: usize, part: usize, input: &[f64]) -> Vec<f64> {
        let (_, rows, columns) = self.shapes()[part];
        assert_eq!(columns, input.len());
        let weight = |row: usize, column: usize| f64::from(self.weight(layer, part, row * columns + column));
        (0..rows).map(|row| (0..columns).map(|column| weight(row, column) * input[column]).sum()).collect()
    }

    fn last_token(&self) -> Vec<f64> {
        let width = self.width;
        let normalized = |row: &Vec<f64>| {
            let mean = row.iter().map(|value| value * value).sum::<f64>() / width as f64;
            row.iter().map(|value| value / (mean + 1e-5).sqrt()).collect::<Vec<_>>()
        };
        let add = |to: &mut Vec<f64>, more: Vec<f64>| to.iter_mut().zip(more).for_each(|(to, more)| *to += more);
        let mut tokens: Vec<Vec<f64>> =
            (0..Self::TOKENS).map(|token| (0..width).map(|n| f64::from(((token * width + n) as f32).sin())).collect()).collect();
        for layer in 0..self.layers {
            let seen: Vec<_> = tokens.iter().map(normalized).collect();
            let [queries, keys, values] =
                [0, 1, 2].map(|part| seen.iter().map(|row| self.times(layer, part, row)).collect::<Vec<_>>());
            for at in 0..Self::TOKENS {
                let score = |key: &Vec<f64>| key.iter().zip(&queries[at]).map(|(key, query)| key * query).sum::<f64>();
                let shares: Vec<f64> = keys[..=at].iter().map(|key| (score(key) / (width as f64).sqrt()).exp()).collect();
                let sum: f64 = shares.iter().sum();
                let mixed = |n: usize| shares.iter().zip(&values).map(|(share, value)| share * value[n]).sum::<f64>() / sum;
                let attention: Vec<f64> = (0..width).map(mixed).collect();
                add(&mut tokens[at], self.times(layer, 3, &attention));
                let hidden = self.times(layer, 4, &normalized(&tokens[at])).into_iter().map(|value| value.max(0.0));
                let hidden: Vec<f64> = hidden.collect();
                add(&mut tokens[at], self.times(layer, 5, &hidden));
            }
        }
        tokens.pop().unwrap()
    }
}

#[test]
fn layers() {
    needs_mount!();
    let volume = Mounted::new();
    let model = Transformer { layers: 9, width: 32, inner: 96 };
    fs::write(volume.path("model"), model.file()).unwrap();
    let expected = model.last_token();
    let layer = (4 * 32 * 32 + 2 * 32 * 96) * 4;
    for resident in [0, 3 * layer + 100] {
        let mut program = Command::new(programs::example("layers"));
        program.arg(volume.path("model")).arg(resident.to_string()).env("LD_LIBRARY_PATH", software_cuda::folder());
        let output = program.output().expect("the example runs");
        let (said, told) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{told}");
        let found: Vec<f64> = said.split_whitespace().map(|number| number.parse().unwrap()).collect();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-3 * expected.abs().max(1.0), "{found} and not {expected}");
        }
        // Less than half of the model, in any case.
        let memory = resident / layer * layer + 2 * layer;
        assert!(told.starts_with(&format!("9 layers, {} bytes of weights, {memory} of GPU memory\n", 9 * layer)), "{told}");
        let count = |from: &str| told.matches(from).count();
        assert_eq!((count("came from memory"), count("came from the SSD")), (resident / layer, 9 - resident / layer), "{told}");
    }
}
