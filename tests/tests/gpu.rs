//! Files of a real mount in GPU memory, with the software CUDA driver.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use gpunvme::gpu::{Observer, Segment, Settings, Transfers};
use gpunvme::{Error, File, Mount, Ring, Transfer, Wait};
use gpunvme_cuda::{Cuda, DeviceAllocation, Gpu, Move, Which};
use gpunvme_tests::cuda::{CRASH_CHECK, Pinned, Site, TRANSFER_CHECKS, from_the_device, mapped, own_stream, take_access};
use gpunvme_tests::mounted::{Image, Mounted, text};
use gpunvme_tests::software_cuda::{self, with_software_cuda};
use gpunvme_tests::{needs_mount, programs, tree, with_descriptors};
use rustix::io::Errno;
use rustix::process::{Signal, kill_process};
use zerocopy::IntoBytes;

const MIB: u64 = 1 << 20;

fn gpu() -> Gpu {
    Cuda::load().unwrap().gpu(Which::Index(0)).unwrap()
}

/// A file of that many MiB on a volume, and as much memory.
fn sample(volume: &Mounted, mib: u64) -> (File, Vec<u8>, DeviceAllocation) {
    let bytes = tree::pattern(mib, (mib * MIB) as usize);
    fs::write(volume.path("sample"), &bytes).unwrap();
    (File::open(volume.path("sample")).unwrap(), bytes, gpu().alloc((mib * MIB) as usize).unwrap())
}

fn look(memory: &DeviceAllocation) -> Vec<u8> {
    Pinned::new(gpu(), memory.len()).get(&gpu().stream().unwrap(), memory.address(), memory.len()).to_vec()
}

fn whole(memory: &DeviceAllocation) -> [Segment; 1] {
    [Segment { file_offset: 0, address: memory.address(), len: memory.len() as u64 }]
}

#[test]
fn what_holds_on_a_gpu_holds_on_the_software_driver() {
    needs_mount!();
    with_software_cuda("gpus=2", || {
        let site = Site::new(gpu());
        for (name, check) in TRANSFER_CHECKS {
            println!("{name}");
            check(&site);
        }
    });
}

#[test]
fn requests_are_answered_whose_streams_a_kernel_that_crashes_ended() {
    needs_mount!();
    with_software_cuda("", || CRASH_CHECK.1(&Site::new(gpu())));
}

/// A caller's own pool has room for one device's work.
#[test]
fn of_a_volume_of_several_devices_callers_do_short_requests_only() {
    needs_mount!();
    with_software_cuda("", || {
        for (members, long) in [(1, 2), (2, 1)] {
            let volume = Image::striped(members, 96 << 20).mount();
            let (file, bytes, memory) = sample(&volume, 16);
            let mount = Mount::open(volume.root()).unwrap();
            let made = || mount.stats().unwrap().calls.iter().find(|(name, _)| *name == "ring").unwrap().1;
            let transfers = Transfers::new(&mount).unwrap();
            // SAFETY: the memory is this test's.
            assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), 16 * MIB);
            assert!(look(&memory) == bytes);
            assert_eq!(made(), long, "16 MiB of {members} devices");
            let short = [Segment { len: MIB, ..whole(&memory)[0] }];
            // SAFETY: as above.
            assert_eq!(unsafe { transfers.read(&file, &short) }.unwrap().bytes(), MIB);
            assert_eq!(made(), 2, "1 MiB of {members} devices");
        }
    });
}

/// The pools of more would not stay in the processor's cache.
#[test]
fn of_many_callers_two_at_a_time_do_large_requests() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes, _) = sample(&volume, 1);
        let mount = Mount::open(volume.root()).unwrap();
        let mut settings = Settings::default();
        settings.callers = 8;
        let transfers = Transfers::with(&mount, settings).unwrap();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let memory = gpu().alloc(MIB as usize).unwrap();
                    for _ in 0..50 {
                        // SAFETY: the memory is this thread's.
                        assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), MIB);
                    }
                    assert!(look(&memory) == bytes);
                });
            }
        });
        let made = mount.stats().unwrap().calls.iter().find(|(name, _)| *name == "ring").unwrap().1;
        assert!((2..=3).contains(&made), "{made} rings, one of them the library's thread's");
    });
}

/// Rings and pools of callers are for speed alone.
#[test]
fn callers_who_get_no_ring_are_served_all_the_same() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 1);
        let mount = Mount::open(volume.root()).unwrap();
        let transfers = Transfers::new(&mount).unwrap();
        let mut rings: Vec<Ring> = std::iter::from_fn(|| Ring::new(&mount, 8).ok()).take(1000).collect();
        assert!(rings.len() < 1000, "a process may have so many rings only");
        let made = || mount.stats().unwrap().calls.iter().find(|(name, _)| *name == "ring").unwrap().1;
        let before = made();
        for _ in 0..2 {
            let other = vec![0xee; memory.len()];
            Pinned::new(gpu(), memory.len()).put(&gpu().stream().unwrap(), memory.address(), &other);
            // SAFETY: the memory is this test's.
            assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), MIB);
            assert!(look(&memory) == bytes);
            let asked = made() - before;
            assert!((1..=2).contains(&asked), "it was asked for one, and for another a second later at the soonest: {asked}");
            rings.clear();
        }
    });
}

/// The sixth copy is one of those that empty the pool.
#[test]
fn a_copy_that_fails_is_named_with_its_file_and_offset() {
    needs_mount!();
    with_software_cuda("copy-fails=6", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 16);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        // SAFETY: the memory is this test's.
        let error = unsafe { transfers.read(&file, &whole(&memory)) }.unwrap_err();
        let Error::Copy { path, error: Some(cuda), done, .. } = &error else { panic!("{error}") };
        assert_eq!(cuda.name, "CUDA_ERROR_ECC_UNCORRECTABLE");
        assert_eq!(Path::new(path), volume.path("sample"));
        assert!(error.to_string().contains(" at byte ") && error.to_string().contains(cuda.name), "{error}");
        assert!(done.bytes() >= 5 * MIB / 4 && done.bytes() < 16 * MIB, "{done:?}");
        // It was that one copy.
        // SAFETY: as above.
        assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), 16 * MIB);
        assert!(look(&memory) == bytes);
    });
}

/// Of three batches the second fails, and the third is made up while the first still waits for its
/// turn.
#[test]
fn a_batch_that_failed_leaves_the_table_of_another_alone() {
    needs_mount!();
    with_software_cuda("copy-fails=2,copy-takes=300000", || {
        let volume = Mounted::new();
        let (_, bytes, memory) = sample(&volume, 1);
        let file = File::create(volume.path("sample")).unwrap();
        // The first copy.
        Pinned::new(gpu(), bytes.len()).put(&gpu().stream().unwrap(), memory.address(), &bytes);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        // So many small segments, not side by side, are moved by the kernel.
        let small = |from: u64| (0..8).map(move |n| from + n * 8192).map(|at| segment_at(&memory, at)).collect::<Vec<_>>();
        let (first, third) = (small(0), small(MIB / 2));
        let mut queue = transfers.queue().unwrap();
        fs::write(volume.path("sample"), vec![0; bytes.len()]).unwrap();
        // SAFETY: the memory is this test's.
        unsafe { queue.write(&file, &first, 1) }.unwrap();
        thread::sleep(Duration::from_millis(100));
        // SAFETY: as above.
        unsafe { queue.write(&file, &[segment_at(&memory, MIB / 4)], 2) }.unwrap();
        let mut done = Vec::new();
        queue.complete(Wait::Forever, &mut done).unwrap();
        assert!(done.len() == 1 && done[0].user_data == 2 && done[0].result.is_err(), "{done:?}");
        // SAFETY: as above.
        unsafe { queue.write(&file, &third, 3) }.unwrap();
        while queue.in_flight() > 0 {
            queue.complete(Wait::Forever, &mut done).unwrap();
        }
        assert!(done[1..].iter().all(|done| done.result.is_ok()), "{done:?}");
        let written = fs::read(volume.path("sample")).unwrap();
        for segment in first.iter().chain(&third) {
            let range = segment.file_offset as usize..(segment.file_offset + segment.len) as usize;
            assert!(written[range.clone()] == bytes[range], "what was written at byte {}", segment.file_offset);
        }
    });
}

/// The stream of a context that is gone does nothing more, and reports that only when it is asked.
#[test]
fn a_kernel_of_the_application_that_crashes_ends_its_requests_with_a_reason() {
    needs_mount!();
    with_software_cuda("copy-takes=400000", || {
        let volume = Mounted::new();
        let (file, _, memory) = sample(&volume, 1);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        let (stream, scatter) = (gpu().stream().unwrap(), gpu().scatter().unwrap());
        let mut table = Pinned::new(gpu(), 4096);
        let entry = Move { to: gpu().alloc(4096).unwrap().address(), from: table.address() + 2048, len: 16 };
        table.bytes()[..24].copy_from_slice(entry.as_bytes());
        let mut queue = transfers.queue().unwrap();
        // Four copies, of which the kernel outruns the last ones.
        // SAFETY: the memory is this test's.
        unsafe { queue.read(&file, &whole(&memory), 1) }.unwrap();
        // SAFETY: what it does wrong is the point; the table stays until the end.
        unsafe { stream.scatter(&scatter, table.address(), 1) }.unwrap();
        let mut done = Vec::new();
        queue.complete(Wait::Timeout(Duration::from_secs(20)), &mut done).unwrap();
        let Some(Err(error)) = done.first().map(|done| &done.result) else { panic!("{done:?}") };
        assert!(matches!(error, Error::Copy { error: Some(cuda), .. } if cuda.name == "CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        assert!(error.to_string().contains("a new process"), "{error}");
        // What is to be made anew cannot be, and says where.
        let anew = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        // SAFETY: as above.
        let error = unsafe { anew.read(&file, &whole(&memory)) }.unwrap_err();
        assert!(matches!(error, Error::Cuda { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&gpu().to_string()) && text.contains(&*volume.root().to_string_lossy()), "{text}");
    });
}

#[test]
fn a_stream_that_does_not_exist_is_named_with_the_file() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, _, memory) = sample(&volume, 1);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        // SAFETY: this driver looks its handles up.
        let error = unsafe { transfers.read_on_stream(&file, &whole(&memory), 0xdead0) }.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("0xdead0") && text.contains("sample") && text.contains("CUDA_ERROR_INVALID_HANDLE"), "{text}");
    });
}

/// What CUDA refuses in the middle: the stream goes on with what it got, and so does the next
/// request.
#[test]
fn a_stream_that_takes_half_of_a_request_goes_on() {
    needs_mount!();
    with_software_cuda("copy-fails=5", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 8);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        let stream = own_stream(gpu());
        // SAFETY: the stream is never destroyed, and the memory is this test's.
        let handle = unsafe { Cuda::load().unwrap().application_stream(stream) }.unwrap();
        // SAFETY: as above.
        let error = unsafe { transfers.read_on_stream(&file, &whole(&memory), stream) }.unwrap_err();
        assert!(matches!(&error, Error::Cuda { error, .. } if error.name == "CUDA_ERROR_ECC_UNCORRECTABLE"), "{error}");
        handle.synchronize().unwrap();
        // SAFETY: as above.
        let done = unsafe { transfers.read_on_stream(&file, &whole(&memory), stream) }.unwrap().wait();
        assert_eq!(done.unwrap().bytes(), 8 * MIB);
        assert!(look(&memory) == bytes);
    });
}

/// The request's steps are all in the stream, and what follows them is not.
#[test]
fn a_stream_that_takes_no_waits_leaves_no_request_behind() {
    needs_mount!();
    with_software_cuda("wait-fails=1", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 1);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        let (stream, block) = (own_stream(gpu()), [segment_at(&memory, 0)]);
        // SAFETY: the stream is never destroyed, and the memory is this test's.
        let error = unsafe { transfers.read_on_stream(&file, &block, stream) }.unwrap_err();
        assert!(matches!(&error, Error::Cuda { error, .. } if error.name == "CUDA_ERROR_NOT_SUPPORTED"), "{error}");
        // The next has another window, and the end of it all does not wait for the one that was
        // refused.
        // SAFETY: as above.
        let done = unsafe { transfers.read_on_stream(&file, &whole(&memory), stream) }.unwrap().wait();
        assert_eq!(done.unwrap().bytes(), MIB);
        assert!(look(&memory) == bytes);
        let (over, ended) = mpsc::channel();
        thread::spawn(move || {
            drop(transfers);
            over.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(10)).expect("transfers end");
        // The window of the one that was refused is the stream's as long as the process, and keeps
        // the mount busy.
        drop((file, volume.signal(Signal::KILL)));
    });
}

/// The first request is one step, and waits once. Calls take so long that the second's first steps
/// are begun before it is to wait.
#[test]
fn a_request_that_cuda_takes_no_more_of_is_refused_when_nothing_touches_its_memory() {
    needs_mount!();
    with_software_cuda("wait-fails=2,call-takes=20000000", || {
        let volume = Mounted::new();
        let (file, ..) = sample(&volume, 4);
        let mut memory = Pinned::new(gpu(), 4 * MIB as usize);
        let part = |len| [Segment { file_offset: 0, address: memory.address(), len }];
        let (whole, first) = (part(4 * MIB), part(4096));
        let transfers = from_the_device(&Mount::open(volume.root()).unwrap());
        let stream = own_stream(gpu());
        // Afterwards the file is known, and the library need not ask the daemon for it.
        // SAFETY: the stream is never destroyed, and the memory is this test's.
        assert_eq!(unsafe { transfers.read_on_stream(&file, &first, stream) }.unwrap().wait().unwrap().bytes(), 4096);
        kill_process(volume.daemon(), Signal::STOP).unwrap();
        let error = thread::scope(|scope| {
            // SAFETY: as above.
            let call = scope.spawn(|| unsafe { transfers.read_on_stream(&file, &whole, stream) }.unwrap_err());
            thread::sleep(Duration::from_millis(500));
            let early = call.is_finished();
            kill_process(volume.daemon(), Signal::CONT).unwrap();
            assert!(!early, "the daemon still transfers what was asked for");
            call.join().unwrap()
        });
        assert!(matches!(&error, Error::Cuda { error, .. } if error.name == "CUDA_ERROR_NOT_SUPPORTED"), "{error}");
        memory.bytes().fill(0xee);
        thread::sleep(Duration::from_millis(100));
        assert!(memory.bytes().iter().all(|byte| *byte == 0xee), "the memory is the application's again");
        // The window of the one that was refused is the stream's as long as the process, and keeps
        // the mount busy.
        drop((file, transfers, volume.signal(Signal::KILL)));
    });
}

/// While the request waits for its stream the library asks CUDA now and then whether the context
/// lives still.
#[test]
fn a_context_whose_health_cuda_does_not_tell_is_asked_for_again() {
    needs_mount!();
    with_software_cuda("query-fails=1", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 1);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        let (stream, word) = (own_stream(gpu()), Pinned::new(gpu(), 4096));
        // SAFETY: the stream is never destroyed, the word stays until it has passed, and the memory
        // is this test's.
        let pending = unsafe {
            Cuda::load().unwrap().application_stream(stream).unwrap().wait_value(word.address(), 1).unwrap();
            transfers.read_on_stream(&file, &whole(&memory), stream).unwrap()
        };
        thread::sleep(Duration::from_millis(500));
        assert!(!pending.is_done(), "the stream has not come to it");
        word.word(0).store(1, Ordering::Release);
        assert_eq!(pending.wait().unwrap().bytes(), MIB);
        assert!(look(&memory) == bytes);
    });
}

#[test]
fn memory_that_a_gpu_may_not_access_costs_only_its_request() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 1);
        let mapped = mapped(gpu(), &[2 << 20]);
        take_access(gpu(), &mapped);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        // So many that a kernel would move them, and crash.
        let small: Vec<Segment> =
            (0..8).map(|n| Segment { file_offset: n * 8192, address: mapped.address() + n * 8192, len: 4096 }).collect();
        // SAFETY: the memory is this test's.
        let error = unsafe { transfers.write(&file, &small) }.unwrap_err();
        assert!(matches!(error, Error::Copy { error: Some(_), .. }), "{error}");
        // SAFETY: as above.
        assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), MIB);
        assert!(look(&memory) == bytes);
    });
}

#[test]
fn transfers_that_end_in_a_callback_wait_for_nothing() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 1);
        let other = gpu().alloc(MIB as usize).unwrap();
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        let (stream, word) = (own_stream(gpu()), Pinned::new(gpu(), 4096));
        // SAFETY: the stream is never destroyed, the word stays until it has passed, and the memory
        // is this test's.
        let pending = unsafe {
            Cuda::load().unwrap().application_stream(stream).unwrap().wait_value(word.address(), 1).unwrap();
            transfers.read_on_stream(&file, &whole(&memory), stream).unwrap()
        };
        let (last, mine) = mpsc::channel::<Transfers>();
        let (tell, took) = mpsc::channel();
        let done = move |_| {
            let transfers = mine.recv().unwrap();
            let begun = Instant::now();
            drop(transfers);
            tell.send(begun.elapsed()).unwrap();
        };
        // SAFETY: as above.
        unsafe { transfers.read_then(&file, &whole(&other), done) }.unwrap();
        last.send(transfers).unwrap();
        let took = took.recv().unwrap();
        assert!(took < Duration::from_millis(500), "it took {took:?}");
        word.word(0).store(1, Ordering::Release);
        assert_eq!(pending.wait().unwrap().bytes(), MIB);
        assert!(look(&memory) == bytes);
    });
}

/// The stream's thread must not wait for the other one either: that waits for the stream, to give
/// memory back.
#[test]
fn transfers_that_end_in_an_observer_wait_for_nothing() {
    /// Drops the last handle when the outcome is known, and tells how long that took.
    struct Last(mpsc::Receiver<Transfers>, mpsc::Sender<Duration>);

    impl Observer for Last {
        fn ends(&mut self, _: &gpunvme::Result<Transfer>) {
            let transfers = self.0.recv().unwrap();
            let begun = Instant::now();
            drop(transfers);
            self.1.send(begun.elapsed()).unwrap();
        }
    }

    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 1);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        // The other thread has memory to give back then.
        // SAFETY: the memory is this test's.
        unsafe { transfers.read(&file, &whole(&memory)) }.unwrap();
        let stream = own_stream(gpu());
        let ((last, mine), (tell, took)) = (mpsc::channel(), mpsc::channel());
        // SAFETY: the stream is never destroyed, and the memory is this test's.
        let pending = unsafe { transfers.read_on_stream_with(&file, &whole(&memory), stream, Last(mine, tell)) }.unwrap();
        last.send(transfers).unwrap();
        let took = took.recv_timeout(Duration::from_secs(20)).expect("it waits for itself");
        assert!(took < Duration::from_millis(500), "it took {took:?}");
        assert_eq!(pending.wait().unwrap().bytes(), MIB);
        assert!(look(&memory) == bytes);
    });
}

/// A block that lies in memory where it lies in the file.
fn segment_at(memory: &DeviceAllocation, at: u64) -> Segment {
    Segment { file_offset: at, address: memory.address() + at, len: 4096 }
}

/// Processor time of this process's thread that serves requests, in clock ticks.
fn worker_ticks() -> u64 {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let stat = tasks
        .map(|task| fs::read_to_string(task.unwrap().path().join("stat")).unwrap())
        .find(|stat| stat.contains("(gpunvme)"))
        .expect("a thread for requests");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn idle_transfers_cost_nothing_and_wake_up() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, _, memory) = sample(&volume, 1);
        let transfers = Transfers::new(&Mount::open(volume.root()).unwrap()).unwrap();
        for _ in 0..3 {
            // SAFETY: the memory is this test's.
            assert_eq!(unsafe { transfers.read(&file, &whole(&memory)) }.unwrap().bytes(), MIB);
            thread::sleep(Duration::from_millis(50));
            let before = worker_ticks();
            thread::sleep(Duration::from_millis(500));
            assert!(worker_ticks() - before <= 2, "the worker is spinning");
        }
    });
}

#[test]
fn a_c_program_moves_files_into_and_out_of_gpu_memory() {
    needs_mount!();
    let volume = Mounted::new();
    let bytes = tree::pattern(3, 16 << 20);
    fs::write(volume.path("from"), &bytes).unwrap();
    let program = volume.image().path().with_file_name("gpu");
    let (library, cuda) = (programs::folder(), software_cuda::folder());
    let output = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic", "-O1"])
        .args([concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/gpu.c"), "-I"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include"))
        .args([Path::new("-L"), library, Path::new("-L"), cuda])
        .args(["-lgpunvme", "-lcuda", "-o"])
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(output.status.success(), "{}", text(&output));
    let output = Command::new("timeout")
        .args([Path::new("60"), &program, &volume.path("from"), &volume.path("to")])
        .arg(bytes.len().to_string())
        .env("LD_LIBRARY_PATH", format!("{}:{}", cuda.display(), library.display()))
        .output()
        .expect("timeout runs");
    assert!(output.status.success(), "{}", text(&output));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}

/// Descriptors are short for a moment, in which the library's thread does what its caller cannot.
#[test]
fn callers_that_had_no_descriptors_do_their_own_requests_later() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes, memory) = sample(&volume, 1);
        let mount = Mount::open(volume.root()).unwrap();
        let made = || mount.stats().unwrap().calls.iter().find(|(name, _)| *name == "ring").unwrap().1;
        let transfers = Transfers::new(&mount).unwrap();
        let (tell, told) = mpsc::channel();
        // SAFETY: the memory is this test's.
        unsafe { transfers.read_then(&file, &whole(&memory), move |result| tell.send(result).unwrap()) }.unwrap();
        assert_eq!(told.recv().unwrap().unwrap().bytes(), MIB);
        for (what, more) in [("in the moment", 0), ("soon after", 1)] {
            // SAFETY: as above.
            let read = || unsafe { transfers.read(&file, &whole(&memory)) };
            let read = if more == 0 { with_descriptors(0, read) } else { read() };
            assert_eq!((read.unwrap().bytes(), made()), (MIB, 1 + more), "{what}");
            assert!(look(&memory) == bytes);
            thread::sleep(Duration::from_millis(1100));
        }
    });
}

/// One of the descriptors is that by which it learns of the daemon's end.
#[test]
fn a_ring_has_all_its_descriptors_or_is_refused() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let mount = Mount::open(volume.root()).unwrap();
        let count = || fs::read_dir("/proc/self/fd").unwrap().count();
        let (before, mut refusals) = (count(), 0);
        let _ring = loop {
            match with_descriptors(refusals, || Ring::new(&mount, 8)) {
                Ok(ring) => break ring,
                Err(error) => assert!(matches!(error, Error::Memory { errno: Errno::MFILE, .. }), "{refusals}: {error}"),
            }
            refusals += 1;
        };
        assert_eq!(count() - before, 3, "two signals, and the daemon's process");
    });
}
