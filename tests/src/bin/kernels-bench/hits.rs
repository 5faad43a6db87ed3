//! Arrays over files: hits a second, misses a second, and random gathers beside memory that the
//! driver moves by itself and a file that is mapped.

use crate::gather::Gather;
use crate::reads::write_words;
use crate::row::{head, ms, row, thousands};
use gpunvme::gpu::{GpuArraySettings, GpuRing, GpuRingSettings};
use gpunvme::{File, Mount};
use gpunvme_cuda::Gpu;
use gpunvme_tests::cuda::{ARRAYS, MappedFile, Module, Reports, good, managed_words};
use gpunvme_tests::mounted::{Image, Mounted};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

pub fn measure(gpu: Gpu, quick: bool) {
    let len: u64 = if quick { 16 << 20 } else { 1 << 30 };
    let volume = Image::formatted_with(len + (512 << 20)).mount();
    write_words(&volume.path("file"), len);
    let plain = Image::blank(len);
    write_words(&plain.path(), len);
    let mount = Mount::open(volume.root()).unwrap();
    mount.sync().unwrap();
    let module = Module::new(gpu, ARRAYS);
    let ring = GpuRing::on_gpu(&mount, gpu.index(), GpuRingSettings::default()).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    random_words(&module, &ring, &file, len, quick);
    gathers(&module, &volume, &ring, &file, &plain, len, quick);
}

/// Random words of an array: in the cache, and not.
fn random_words(module: &Module, ring: &GpuRing, file: &File, len: u64, quick: bool) {
    let (blocks, threads) = if quick { (16, 128) } else { (528, 256) };
    head(
        "array<u32>, each thread random words, each compared",
        &["of", "million gets a second", "hits", "misses", "thousand misses a second"],
    );
    // What fits is read once before.
    let within = len / 4 / 8;
    let array = ring.array(file, GpuArraySettings { cache: (len / 4) as usize, ..GpuArraySettings::default() }).unwrap();
    let run = |array: &gpunvme::gpu::GpuArray, words: u64, count: u64, seed: u64| {
        let before = array.stats().unwrap();
        let reports = Reports::new(module.gpu, blocks);
        let begun = Instant::now();
        reports.launch(module, "get_random", threads, &[array.for_kernels().as_bytes()], &[words, count, seed]);
        module.wait();
        let took = begun.elapsed();
        let (done, after) = (good(&reports.get()), array.stats().unwrap());
        (done, took, after.hits - before.hits, after.misses - before.misses)
    };
    let reports = Reports::new(module.gpu, blocks);
    reports.launch(module, "get_in_order", threads, &[array.for_kernels().as_bytes()], &[within]);
    module.wait();
    good(&reports.get());
    let show = |name: &str, (done, took, hits, misses): (u64, Duration, u64, u64)| {
        let rate = done as f64 / took.as_secs_f64() / 1e6;
        row(name, &[format!("{rate:.1}"), hits.to_string(), misses.to_string(), thousands(misses, took)]);
    };
    show("what is in the cache", run(&array, within, if quick { 200 } else { 20_000 }, 1));
    show("one page, which is", run(&array, 1024, if quick { 200 } else { 5_000 }, 2));
    let small = ring.array(file, GpuArraySettings { cache: (len / 64) as usize, ..GpuArraySettings::default() }).unwrap();
    show("64 times the cache", run(&small, len / 4, if quick { 2 } else { 8 }, 3));
}

/// Rows of a table that is in a file, as of embeddings.
fn gathers(module: &Module, volume: &Mounted, ring: &GpuRing, file: &File, plain: &Image, len: u64, quick: bool) {
    let gpu = module.gpu;
    let (row_words, count) = (128u32, if quick { 2_000 } else { 200_000 });
    let gather = Gather::new(module, len, (count, row_words), if quick { 16 } else { 528 });
    head(
        &format!("{count} random rows of {} bytes of {} MiB, gathered once; ms", row_words * 4, len >> 20),
        &["by", "until it can begin", "the kernel", "together"],
    );
    let show = |name: &str, before: Duration, took: Duration| row(name, &[ms(before), ms(took), ms(before + took)]);
    let begun = Instant::now();
    let array =
        ring.array(file, GpuArraySettings { cache: (len / 4) as usize, page: 512, ..GpuArraySettings::default() }).unwrap();
    show("array, pages of 512 bytes", begun.elapsed(), gather.run("gather_array", array.for_kernels().as_bytes()));
    show("the same again", Duration::ZERO, gather.run("gather_array", array.for_kernels().as_bytes()));
    drop(array);
    let begun = Instant::now();
    let array = ring.array(file, GpuArraySettings { cache: (len / 4) as usize, ..GpuArraySettings::default() }).unwrap();
    show("array, pages of 4096 bytes", begun.elapsed(), gather.run("gather_array", array.for_kernels().as_bytes()));
    drop(array);
    for (name, path) in [("a file of tmpfs", plain.path()), ("the file of the mount", volume.path("file"))] {
        let begun = Instant::now();
        let managed = managed_words(gpu, &path);
        let before = begun.elapsed();
        show(&format!("managed memory, read from {name}"), before, gather.run("gather_pointer", managed.address().as_bytes()));
        drop(managed);
        let begun = Instant::now();
        match MappedFile::new(gpu, &path) {
            Ok(mapped) => {
                let before = begun.elapsed();
                show(
                    &format!("{name}, mapped and registered"),
                    before,
                    gather.run("gather_pointer", mapped.address().as_bytes()),
                );
            }
            Err(error) => println!("| {name}, mapped and registered | {error} | - | - |"),
        }
    }
}
