//! The NVMe driver on the software controller, when all goes well: every kind of controller, every
//! kind of request, and what is read is what was written.
use std::sync::Arc;

use gpunvme_blockdev::sim::SimController;
use gpunvme_blockdev::{BlockDevice, BufferPool, Error, Io, OpenMode, Region, Request, open};

fn controller(options: &str) -> Arc<SimController> {
    SimController::new(&format!("sim:test,memory=32M{options}"), OpenMode::ReadWrite).expect("a controller")
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    *state >> 33
}

/// Requests of many sizes, from memory that is mapped and memory that is not, in spans as odd as
/// the device takes them.
fn storm(device: Arc<dyn BlockDevice>, seed: u64) -> Vec<u8> {
    const LEN: usize = 8 << 20;
    let geometry = device.geometry().clone();
    let (block, alignment) = (geometry.logical_block as usize, geometry.memory_alignment as usize);
    let regions = [Region::allocate(2 << 20).expect("memory"), Region::allocate(2 << 20).expect("memory")];
    device.map(&regions[0]).expect("mapped");
    let io = Io::threaded(device.clone(), 2).expect("queues");
    let mut model = vec![0; LEN];
    let mut state = seed;
    for round in 0..120u64 {
        let len = match random(&mut state) % 3 {
            0 => block,
            1 => block * (1 + random(&mut state) as usize % 40),
            _ => (1 << 20) / block * block,
        };
        let offset = random(&mut state) as usize % ((LEN - len) / block) * block;
        let region = &regions[random(&mut state) as usize % 2];
        let start = random(&mut state) as usize % 1000 * alignment;
        // Two spans with a hole in between, cut anywhere that is aligned.
        let cut = random(&mut state) as usize % (len / alignment) * alignment;
        let spans = || {
            let spans = [region.span(start..start + cut), region.span(start + cut + 8192..start + len + 8192)];
            spans.into_iter().filter(|span| span.len > 0).collect::<Vec<_>>()
        };
        match random(&mut state) % 8 {
            0..4 => {
                let bytes: Vec<u8> = (0..len).map(|n| (n as u64 / 251 + n as u64 + round) as u8).collect();
                region.write_at(start, &bytes[..cut]).expect("inside");
                region.write_at(start + cut + 8192, &bytes[cut..]).expect("inside");
                io.run(vec![Request::write(offset as u64, spans(), round % 2 == 0)]).expect("written");
                model[offset..offset + len].copy_from_slice(&bytes);
            }
            4 => {
                io.run(vec![Request::write_zeroes(offset as u64, len as u64)]).expect("zeroed");
                model[offset..offset + len].fill(0);
            }
            5 => {
                io.run(vec![Request::discard(offset as u64, len as u64)]).expect("discarded");
                model[offset..offset + len].fill(0);
            }
            _ => {
                region.zero_at(0, region.len()).expect("inside");
                io.run(vec![Request::read(offset as u64, spans())]).expect("read");
                let mut bytes = vec![0xff; len];
                region.read_at(start, &mut bytes[..cut]).expect("inside");
                region.read_at(start + cut + 8192, &mut bytes[cut..]).expect("inside");
                assert!(bytes == model[offset..offset + len], "round {round}: {len} bytes at {offset}");
            }
        }
    }
    io.run(vec![Request::flush()]).expect("flushed");
    drop(io);
    device.unmap(&regions[0]);
    model
}

#[test]
fn what_is_read_is_what_was_written_on_every_kind_of_controller() {
    for (number, (options, driver)) in [
        ("", ""),
        (",lba=4096", ""),
        (",mdts=1", "depth=4"),
        (",mdts=0,sgls=none", ""),
        (",sgls=dword,dbbuf=on", "queues=2"),
        (",inline=on", "completion=poll"),
        (",inline=on,dbbuf=on,mdts=3", "completion=interrupt"),
        (",vectors=0,entries=4", ""),
        (",vectors=1,io-queues=2,dstrd=3", "completion=interrupt"),
        (",vwc=off,lba=4096", "sgl=off,completion=adaptive,depth=1"),
    ]
    .into_iter()
    .enumerate()
    {
        let sim = controller(options);
        let device = sim.attach(driver).expect("the driver comes up");
        let model = storm(device, number as u64);
        assert!(sim.contents(1, true)[..model.len()] == model, "{options}: flushed, and shut down");
        assert_eq!((sim.dma_faults(), sim.unmapped_in_flight(), sim.mapped()), (vec![], 0, 0), "{options}");
        assert_eq!(sim.stalled(), 0);
    }
}

#[test]
fn the_geometry_is_what_the_controller_says() {
    let sim = controller(",lba=4096,mdts=4,io-queues=3,entries=64,vwc=off");
    let device = sim.attach("queues=8,depth=200").expect("the driver comes up");
    let geometry = device.geometry();
    assert_eq!((geometry.len.get(), geometry.logical_block), (32 << 20, 4096));
    assert!(geometry.max_transfer <= 64 << 10 && geometry.max_transfer >= 60 << 10, "{}", geometry.max_transfer);
    assert_eq!((geometry.queue_depth, geometry.max_queues, geometry.volatile_cache), (63, 3, false));
    assert!(geometry.discard && geometry.write_zeroes && !geometry.read_only);
    drop(device);
    let device = sim.attach("depth=2,queues=1").expect("the driver comes up again");
    assert_eq!((device.geometry().queue_depth, device.geometry().max_queues), (2, 1));
    let queue = device.open_queue().expect("the one queue");
    assert!(matches!(device.open_queue(), Err(Error::Unsupported { .. })));
    drop(queue);
    device.open_queue().expect("it is free again");
}

#[test]
fn a_controller_at_the_ends_of_what_its_registers_can_say_works_or_is_refused_by_name() {
    for options in
        [",entries=2", ",mdts=51", ",mdts=52", ",mdts=255", ",mpsmin=4", ",mpsmin=4,mdts=1,sgls=none", ",dstrd=13,io-queues=2"]
    {
        let sim = controller(options);
        let device = sim.attach("").unwrap_or_else(|error| panic!("{options}: {error}"));
        storm(device, 11);
        assert_eq!(sim.dma_faults(), vec![], "{options}");
    }
    for (options, named) in
        [(",entries=1", "CAP.MQES"), (",dstrd=15", "CAP.DSTRD"), (",mpsmin=5", "CAP.MPSMIN"), (",mpsmin=15", "CAP.MPSMIN")]
    {
        let error = controller(options).attach("").err().unwrap_or_else(|| panic!("{options} was accepted"));
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(named), "{options}: {error}");
    }
}

#[test]
fn a_discard_is_cut_into_ranges_that_the_controller_takes() {
    for options in ["", ",dmrsl=1000", ",dmrsl=1,lba=4096"] {
        let sim = controller(options);
        let device = sim.attach("depth=16").expect("the driver comes up");
        let region = Region::allocate(2 << 20).expect("memory");
        region.write_at(0, &[9; 2 << 20]).expect("inside");
        let io = Io::inline(device).expect("a queue");
        io.run(vec![Request::write(0, vec![region.span(0..2 << 20)], false)]).expect("written");
        io.run(vec![Request::discard(4096, (2 << 20) - 8192)]).unwrap_or_else(|error| panic!("{options}: {error}"));
        let contents = sim.contents(1, false);
        let kept = |byte: usize| contents[byte..byte + 4096] == [9; 4096];
        assert!(kept(0) && kept((2 << 20) - 4096), "{options}");
        assert!(contents[4096..(2 << 20) - 4096].iter().all(|byte| *byte == 0), "{options}");
    }
}

#[test]
fn namespaces_are_apart_and_one_that_is_not_there_is_named() {
    let sim = controller(",namespaces=2");
    let device = sim.attach("ns=2").expect("the driver comes up");
    let region = Region::allocate(4096).expect("memory");
    region.write_at(0, &[6; 4096]).expect("inside");
    Io::inline(device).expect("a queue").run(vec![Request::write(4096, vec![region.span(0..4096)], true)]).expect("written");
    assert!(sim.contents(2, true)[4096..8192] == [6; 4096] && sim.contents(1, false).iter().all(|byte| *byte == 0));
    let error = sim.attach("ns=3").err().expect("there are two").to_string();
    assert!(error.contains("namespace 3") && error.contains("[1, 2]"), "{error}");
}

#[test]
fn a_file_is_the_same_through_the_controller_and_by_its_path_and_has_one_user() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("image");
    let image = std::fs::File::create(&path).expect("an image");
    image.set_len((1 << 20) + 100).expect("its length");
    let path = path.to_str().expect("text");
    let write = |device: &str, byte: u8| {
        let device = open(device, OpenMode::ReadWrite).expect("it opens");
        assert_eq!(device.geometry().len.get(), 1 << 20);
        let region = Region::allocate(8192).expect("memory");
        region.write_at(0, &[byte; 8192]).expect("inside");
        let io = Io::inline(device).expect("a queue");
        io.run(vec![Request::write(0, vec![region.span(0..8192)], false)]).expect("written");
        assert!(matches!(open(path, OpenMode::ReadWrite), Err(Error::Busy { .. })));
        assert!(matches!(open(&format!("sim:{path},lba=4096"), OpenMode::ReadOnly), Err(Error::Busy { .. })));
    };
    for (byte, device) in [(1, format!("sim:{path}")), (2, path.to_owned()), (3, format!("sim:{path},lba=4096,depth=4"))] {
        write(&device, byte);
        assert_eq!(std::fs::read(path).expect("the image")[..8192], vec![byte; 8192], "{device}");
    }
    let device = open(&format!("sim:{path}"), OpenMode::ReadOnly).expect("it opens");
    assert!(device.geometry().read_only);
    for (wrong, named) in [("colour=red", "colour"), ("lba=1024", "lba=1024"), ("fault=explode", "fault=explode")] {
        let error = open(&format!("sim:{path},{wrong}"), OpenMode::ReadWrite).err().expect(wrong).to_string();
        assert!(error.contains(named), "{error}");
    }
    assert!(matches!(open("sim:/nowhere/at/all", OpenMode::ReadWrite), Err(Error::NotFound { .. })));
}

#[test]
fn memory_that_its_owner_cut_off_is_an_error_and_no_signal() {
    let sim = controller("");
    let device = sim.attach("").expect("the driver comes up");
    let memfd = rustix::fs::memfd_create("client", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&memfd, 64 << 10).expect("its length");
    let region = Region::from_fd(memfd.try_clone().expect("a handle"), 64 << 10, true).expect("mapped");
    device.map(&region).expect("mapped for DMA");
    rustix::fs::ftruncate(&memfd, 4096).expect("cut off");
    let io = Io::inline(device.clone()).expect("a queue");
    for request in [Request::read(0, vec![region.span(0..64 << 10)]), Request::write(0, vec![region.span(8192..16384)], false)] {
        let error = io.run(vec![request]).expect_err("the memory is not there");
        assert!(error.to_string().contains("Data Transfer Error"), "{error}");
    }
    io.run(vec![Request::read(0, vec![region.span(0..4096)])]).expect("what is left works");
    drop(io);
    device.unmap(&region);
}

#[test]
fn a_pool_of_buffers_leaves_nothing_mapped() {
    let sim = controller("");
    let device = sim.attach("").expect("the driver comes up");
    let before = sim.mapped();
    let pool = BufferPool::new(device.clone(), 1 << 20);
    let mut buffers: Vec<_> = (0..3).map(|_| pool.get(8192).expect("memory")).collect();
    // Given back while a request may still use it, and never looked at again.
    let span = buffers[0].span(0..8192);
    drop(buffers);
    drop(span);
    assert_eq!(sim.mapped(), before + 3);
    drop(pool);
    assert_eq!(sim.mapped(), before);
}
