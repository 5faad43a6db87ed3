//! Random reads of 4 KiB: by blocks of a kernel, by a thread of the library into memory of the GPU
//! and of the host, of the bare device.
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

pub fn measure(gpu: Gpu, quick: bool, kernels: bool) {
    let len: u64 = if quick { 16 << 20 } else { 512 << 20 };
    let (volume, bare) = (Image::formatted_with(len + (512 << 20)).mount(), Image::blank(len));
    for path in [volume.path("file"), bare.path()] {
        write_words(&path, len);
    }
    Mount::open(volume.root()).unwrap().sync().unwrap();
    let blocks = kernels.then(|| KernelReads::new(gpu, &volume.path("file"), GpuRingSettings::default()));
    head(
        &format!("Random reads of 4 KiB, of {} MiB, thousand a second", len >> 20),
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
            (false, 1) => 20_000,
            (false, _) => 300_000,
        };
        // In turns, and the best of six: what serves the device is now on one core, now on another.
        let (mut best, rounds) = ([Duration::MAX; 4], if quick { 1 } else { 6 });
        for round in 0..rounds {
            if let Some(blocks) = &blocks {
                best[0] =
                    best[0].min(blocks.run(in_flight as u32, len / PAGE, reads / in_flight).mul_f64(share(reads, in_flight)));
            }
            let (root, file, compare) = (volume.root(), volume.path("file"), round == 0);
            best[1] = best[1].min(transfers::measure(gpu, (&root, &file), len, in_flight, reads, compare));
            best[2] = best[2].min(library(&root, &file, len, in_flight, reads, compare));
            best[3] = best[3].min(device(&bare.path(), len, in_flight, reads, compare));
        }
        let mut values = Vec::new();
        for took in best {
            let each = took.as_secs_f64() * 1e6 * in_flight as f64 / reads as f64;
            let known = took < Duration::MAX;
            values.push(if known { thousands(reads, took) } else { "-".into() });
            values.push(if known { format!("{each:.1}") } else { "-".into() });
        }
        for other in &best[1..] {
            let ratio = other.as_secs_f64() / best[0].as_secs_f64();
            values.push(if blocks.is_some() { format!("{ratio:.2}") } else { "-".into() });
        }
        row(&in_flight.to_string(), &values);
    }
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

/// Of an image file as that below the volume, as the daemon reads it.
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
