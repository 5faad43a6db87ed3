//! Random reads of 4 KiB: by blocks of a kernel, by a thread of the library into memory of the GPU
//! and of the host, of the bare device. On a volume of one device, where the thread of the kernel
//! that serves it is the limit, and of four, where it is not.
//!
//! Kernels compare what they read while they are measured. The others would take as long for
//! that as for reading: they make the same reads once more after the measured time, and compare
//! all.

use crate::row::{head, row, thousands};
use crate::transfers;
use gpunvme::gpu::GpuRingSettings;
use gpunvme::{File, Mount, Operation, Ring, Wait};
use gpunvme_blockdev::{OpenMode, Region, Request, Wait as DeviceWait};
use gpunvme_cuda::Gpu;
use gpunvme_tests::cuda::{KernelReads, word_at};
use gpunvme_tests::mounted::Image;
use gpunvme_tests::rings;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

pub const PAGE: u64 = 4096;
/// For what a filesystem keeps for itself.
const SPARE: u64 = 512 << 20;

pub fn measure(gpu: Gpu, quick: bool, kernels: bool, devices: usize) {
    let len: u64 = if quick { 16 << 20 } else { 512 << 20 };
    if devices > 1 {
        let volume = Image::on_block_devices("kernels-bench", devices, len / devices as u64 + SPARE);
        return volume.into_iter().for_each(|volume| {
            on(gpu, &format!("{devices} loop devices"), (volume, None), (len, quick), kernels);
        });
    }
    let one = Image::on_block_device("kernels-bench", len + SPARE);
    let bare = one.as_ref().and_then(|_| Image::on_block_device("kernels-bench", len));
    match (one, bare) {
        (Some(volume), Some(bare)) => on(gpu, "a loop device", (volume, Some(bare)), (len, quick), kernels),
        _ => on(gpu, "an image file", (Image::formatted_with(len + SPARE), Some(Image::blank(len))), (len, quick), kernels),
    }
    on(gpu, "four image files", (Image::striped(4, len / 4 + SPARE), None), (len, quick), kernels);
}

/// On a volume, beside a device of the same kind that is read bare.
fn on(gpu: Gpu, medium: &str, (volume, bare): (Image, Option<Image>), (len, quick): (u64, bool), kernels: bool) {
    let volume = volume.mount();
    write_words(&volume.path("file"), len);
    if let Some(bare) = &bare {
        write_words(&bare.device(), len);
    }
    Mount::open(volume.root()).unwrap().sync().unwrap();
    let blocks = kernels.then(|| KernelReads::new(gpu, &volume.path("file"), GpuRingSettings::default()));
    head(
        &format!("Random reads of 4 KiB, of {} MiB on {medium}, thousand a second", len >> 20),
        &[
            "in flight",
            "blocks of a kernel",
            "each, us",
            "library, one thread, into GPU memory",
            "each, us",
            "into host memory",
            "each, us",
            "device",
            "each, us",
            "kernel of library",
            "of host memory",
            "of device",
        ],
    );
    for in_flight in [1, 8, 32, 128, 512] {
        let reads = match (quick, in_flight) {
            (true, _) => 2_000,
            (false, 1) => 10_000,
            (false, _) => 150_000,
        };
        // In turns: what serves a device is now on one core, now on another.
        let (mut turns, rounds) = ([const { Vec::new() }; 4], if quick { 1 } else { 9 });
        for round in 0..rounds {
            if let Some(blocks) = &blocks {
                turns[0].push(blocks.run(in_flight as u32, len / PAGE, reads / in_flight).mul_f64(share(reads, in_flight)));
            }
            let (root, file, compare) = (volume.root(), volume.path("file"), round == 0);
            turns[1].push(transfers::measure(gpu, (&root, &file), len, in_flight, reads, compare));
            turns[2].push(library(&root, &file, len, in_flight, reads, compare));
            if let Some(bare) = &bare {
                turns[3].push(device(&bare.device(), len, in_flight, reads, compare));
            }
        }
        let took = turns.map(median);
        let mut values = Vec::new();
        for took in &took {
            values.push(took.map_or("-".into(), |took| thousands(reads, took)));
            values.push(
                took.map_or("-".into(), |took| format!("{:.1}", took.as_secs_f64() * 1e6 * in_flight as f64 / reads as f64)),
            );
        }
        for other in &took[1..] {
            let ratio = took[0].zip(*other).map(|(kernel, other)| other.as_secs_f64() / kernel.as_secs_f64());
            values.push(ratio.map_or("-".into(), |ratio| format!("{ratio:.2}")));
        }
        row(&in_flight.to_string(), &values);
    }
}

/// Of what the turns took; none without turns.
fn median(mut turns: Vec<Duration>) -> Option<Duration> {
    turns.sort();
    turns.get(turns.len() / 2).copied()
}

/// Blocks make the same number of reads each: what is left of `reads` is reckoned in.
fn share(reads: u64, in_flight: u64) -> f64 {
    reads as f64 / (reads / in_flight * in_flight) as f64
}

/// A file of the words that kernels expect.
pub fn write_words(path: &Path, len: u64) {
    write_each(path, len, word_at);
}

/// A file of `len` bytes, each word of which depends on its number.
pub fn write_each(path: &Path, len: u64, word: impl Fn(u64) -> u32) {
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    let each = 1 << 20;
    for from in (0..len / 4).step_by(each) {
        let words = from..(from + each as u64).min(len / 4);
        file.write_all(&words.flat_map(|n| word(n).to_le_bytes()).collect::<Vec<_>>()).unwrap();
    }
}

/// The next of a row of random numbers.
pub fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// That the page at `offset` of the file is what it should be.
pub fn check(page: &[u8], offset: u64) {
    for (n, word) in page.chunks(4).enumerate() {
        let expected = word_at(offset / 4 + n as u64);
        assert_eq!(u32::from_le_bytes(word.try_into().unwrap()), expected, "word {n} at {offset}");
    }
}

/// By a ring, with so many in flight.
fn library(root: &Path, path: &Path, len: u64, in_flight: u64, reads: u64, compare: bool) -> Duration {
    let took = by_ring(root, path, len, in_flight, reads, |_, _| {});
    if !compare {
        return took;
    }
    let mut compared = 0;
    by_ring(root, path, len, in_flight, reads, |page, offset| {
        check(&page(), offset);
        compared += 1;
    });
    assert_eq!(compared, reads);
    took
}

/// Of a device as that below the volume, as the daemon reads it.
fn device(path: &Path, len: u64, in_flight: u64, reads: u64, compare: bool) -> Duration {
    let took = by_device(path, len, in_flight, reads, |_, _| {});
    if !compare {
        return took;
    }
    let mut compared = 0;
    by_device(path, len, in_flight, reads, |page, offset| {
        check(&page(), offset);
        compared += 1;
    });
    assert_eq!(compared, reads);
    took
}

/// A page that was read, copied where it is called for.
type Page<'a> = &'a dyn Fn() -> Vec<u8>;

/// The same offsets each time, with the same arguments.
fn by_ring(root: &Path, path: &Path, len: u64, in_flight: u64, reads: u64, mut then: impl FnMut(Page, u64)) -> Duration {
    let mount = Mount::open(root).unwrap();
    let mut ring = Ring::new(&mount, 1024).unwrap();
    let file = ring.attach(&File::open(path).unwrap()).unwrap();
    let buffer = rings::shared(&mount, in_flight * PAGE);
    let (mut state, mut begun, mut ended, mut done) = (0x9e37_79b9u64, 0, 0, Vec::new());
    let mut offsets = vec![0; in_flight as usize];
    let mut free: Vec<u64> = (0..in_flight).collect();
    let start = Instant::now();
    while ended < reads {
        while begun < reads
            && let Some(slot) = free.pop()
        {
            let at = next(&mut state) % (len / PAGE) * PAGE;
            offsets[slot as usize] = at;
            ring.push(&Operation::read(&file, at, &buffer, slot * PAGE, PAGE).tagged(slot)).unwrap();
            begun += 1;
        }
        ring.complete(Wait::Forever, &mut done).unwrap();
        for completed in done.drain(..) {
            assert_eq!(completed.result.unwrap().bytes(), PAGE);
            let slot = completed.user_data;
            then(&|| rings::bytes_of(&buffer, slot * PAGE, PAGE), offsets[slot as usize]);
            free.push(slot);
            ended += 1;
        }
    }
    start.elapsed()
}

/// The same offsets each time, with the same arguments.
fn by_device(path: &Path, len: u64, in_flight: u64, reads: u64, mut then: impl FnMut(Page, u64)) -> Duration {
    let device = gpunvme_blockdev::open(path.to_str().unwrap(), OpenMode::ReadOnly).unwrap();
    let region = Region::allocate((in_flight * PAGE).max(2 << 20) as usize).unwrap();
    device.map(&region).unwrap();
    let queue = device.open_queue().unwrap();
    let (mut state, mut begun, mut ended, mut done) = (0x9e37_79b9u64, 0, 0, Vec::new());
    let mut offsets = vec![0; in_flight as usize];
    let mut free: Vec<u64> = (0..in_flight).collect();
    let start = Instant::now();
    while ended < reads {
        let mut requests = Vec::new();
        while begun < reads
            && let Some(slot) = free.pop()
        {
            let at = next(&mut state) % (len / PAGE) * PAGE;
            offsets[slot as usize] = at;
            let place = (slot * PAGE) as usize;
            let mut request = Request::read(at, vec![region.span(place..place + PAGE as usize)]);
            request.tag = slot;
            requests.push(request);
            begun += 1;
        }
        queue.submit(&mut requests);
        queue.complete(DeviceWait::Forever, &mut done).unwrap();
        for completed in done.drain(..) {
            completed.result.unwrap();
            let slot = completed.tag;
            let page = || {
                let mut page = vec![0; PAGE as usize];
                region.read_at((slot * PAGE) as usize, &mut page).unwrap();
                page
            };
            then(&page, offsets[slot as usize]);
            free.push(slot);
            ended += 1;
        }
    }
    start.elapsed()
}
