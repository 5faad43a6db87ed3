//! The route `cache` with the software CUDA driver: when it is taken, and what it may take.

mod pool;
mod reads;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use gpunvme::gpu::{Caching, Segment, Settings, Transfers};
use gpunvme::{Error, File, Mount, OperationKind, Reason, Require, Route, Transfer};
use gpunvme_cuda::{Cuda, DeviceAllocation, Gpu, Which};
use gpunvme_tests::control_group::ControlGroup;
use gpunvme_tests::cuda::{PAGE_CACHE_CHECKS, Pinned, Site};
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::software_cuda::{self, with_software_cuda};
use gpunvme_tests::{needs_mount, programs, report_skipped, tree};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};

const MIB: u64 = 1 << 20;
/// Bytes of a cached range (client/src/gpu/page_cache/cached_range.rs).
const RANGE: u64 = 16 * MIB;

fn gpu() -> Gpu {
    Cuda::load().unwrap().gpu(Which::Index(0)).unwrap()
}

fn transfers(volume: &Mounted, caching: Caching, cached: Option<u64>) -> Transfers {
    let mut settings = Settings::default();
    (settings.caching, settings.cached) = (caching, cached);
    Transfers::with(&Mount::open(volume.root()).unwrap(), settings).unwrap()
}

fn only(route: Route) -> Require {
    Require { route: Some(route), direct: false }
}

/// Memory of the GPU, and what reads of a file bring into it.
struct Reader {
    memory: DeviceAllocation,
    pinned: Pinned,
}

impl Reader {
    fn new(len: u64) -> Reader {
        Reader { memory: gpu().alloc(len as usize).unwrap(), pinned: Pinned::new(gpu(), len as usize) }
    }

    fn read(&mut self, transfers: &Transfers, file: &File, offset: u64, len: u64) -> gpunvme::Result<(Transfer, &[u8])> {
        let segment = Segment { file_offset: offset, address: self.memory.address(), len };
        // SAFETY: the memory is this reader's.
        let done = unsafe { transfers.read(file, &[segment]) }?;
        let bytes = self.pinned.get(&gpu().stream().unwrap(), self.memory.address(), done.bytes() as usize);
        Ok((done, bytes))
    }
}

/// A file of that many bytes, which the page cache has.
fn resident(volume: &Mounted, len: u64) -> (File, Vec<u8>) {
    let bytes = tree::pattern(len, len as usize);
    fs::write(volume.path("file"), &bytes).unwrap();
    assert!(fs::read(volume.path("file")).unwrap() == bytes);
    (File::open(volume.path("file")).unwrap(), bytes)
}

#[test]
fn what_is_read_again_comes_from_the_page_cache() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let len = 2 * RANGE + 5 * MIB + 77;
        let (file, bytes) = resident(&volume, len);
        for caching in [Caching::Resident, Caching::ReadAgain] {
            let transfers = transfers(&volume, caching, Some(3 * RANGE));
            let file = File::open(file.path()).unwrap();
            let mut reader = Reader::new(len);
            // The first read copies what the kernel has; only what is read again is registered.
            let until = Instant::now() + Duration::from_secs(30);
            let required = transfers.requiring(only(Route::Cache));
            let mut copied = 0;
            for round in 0.. {
                let is_registered = reader.read(&required, &file, 0, len).is_ok();
                assert!(!is_registered || round > 1, "in round {round}");
                // Another test may just have had the kernel drop what it has.
                assert!(fs::read(file.path()).unwrap() == bytes);
                let (done, read) = reader.read(&transfers, &file, 0, len).unwrap();
                assert!(read == bytes);
                if done.moved.cache == len {
                    assert_eq!(done.reason, Some(Reason::None));
                    copied += u32::from(!is_registered);
                    if is_registered {
                        break;
                    }
                }
                assert!(Instant::now() < until, "{:?}", done.moved);
            }
            assert!(copied > 0, "what nothing was registered of was copied");
            // Any range, aligned to nothing, by any route.
            for (offset, len) in [(1, 1), (RANGE - 3, 7), (RANGE - 5000, RANGE + 9000), (len - 1, 1), (12345, 4 * MIB)] {
                for require in [None, Some(Route::Cache), Some(Route::Bounce)] {
                    let transfers = transfers.requiring(Require { route: require, direct: false });
                    let (done, read) = reader.read(&transfers, &file, offset, len).unwrap();
                    assert!(read == &bytes[offset as usize..(offset + len) as usize]);
                    assert_eq!(done.moved.cache, if require == Some(Route::Bounce) { 0 } else { len });
                }
            }
            let (done, read) = reader.read(&transfers, &file, len - 10, 4096).unwrap();
            assert_eq!((done.bytes(), read), (10, &bytes[len as usize - 10..]), "the file ends");
        }
    });
}

#[test]
fn without_caching_or_resident_pages_nothing_is_registered() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes) = resident(&volume, 4 * MIB);
        let mut reader = Reader::new(4 * MIB);
        let maps = || fs::read_to_string("/proc/self/maps").unwrap().matches(file.path().to_str().unwrap()).count();
        let mut read_often = |transfers: &Transfers, cached: u64| {
            let mut as_expected = 0;
            for _ in 0..20 {
                // A part is not there: the file is not read in for its sake. Another test may just
                // have had the kernel drop the rest.
                assert!(fs::read(file.path()).unwrap() == bytes);
                let part = Some(std::num::NonZero::new(MIB).unwrap());
                fadvise(fs::File::open(file.path()).unwrap(), MIB, part, Advice::DontNeed).unwrap();
                let (done, read) = reader.read(transfers, &file, 0, 4 * MIB).unwrap();
                assert!(read == bytes && done.moved.cache <= cached, "{:?}", done.moved);
                as_expected += u32::from(done.moved.cache == cached);
                thread::sleep(Duration::from_millis(5));
            }
            assert!(as_expected > 0);
        };
        read_often(&transfers(&volume, Caching::Never, None), 0);
        assert_eq!(maps(), 0);
        read_often(&transfers(&volume, Caching::Resident, None), 3 * MIB);
        assert_eq!(maps(), 0);
    });
}

/// Bytes that the device of a mount has read.
fn read_by_the_device(volume: &Mounted) -> u64 {
    let metrics = Mount::open(volume.root()).unwrap().metrics().unwrap();
    let reads =
        metrics.operations.iter().filter(|operations| operations.kind == OperationKind::Device && operations.name == "read");
    reads.map(|operations| operations.bytes).sum()
}

#[test]
fn what_two_processes_read_at_once_comes_from_the_device_once() {
    needs_mount!();
    let volume = Mounted::new();
    let bytes = tree::pattern(9, 96 << 20);
    let path = volume.path("file");
    fs::write(&path, &bytes).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    let read_by_two = |caching: &str| {
        let before = read_by_the_device(&volume);
        let process = || mover(&path, caching).stdout(Stdio::null()).spawn().unwrap();
        fadvise(fs::File::open(&path).unwrap(), 0, None, Advice::DontNeed).unwrap();
        let processes = [process(), process()];
        assert!(processes.into_iter().all(|mut process| process.wait().unwrap().success()));
        (read_by_the_device(&volume) - before) as f64 / bytes.len() as f64
    };
    assert!(read_by_two("never") > 1.95, "each has it read");
    // They do not begin at the same moment, and what the first reads alone is read twice.
    let mut times = (0..5).map(|_| read_by_two("resident"));
    assert!(times.any(|times| times < 1.3));
}

/// A process that reads a whole file into the GPU's memory, 8 MiB at once.
fn mover(path: &Path, caching: &str) -> Command {
    let mut command = Command::new(programs::path("gpu-mover"));
    command.args([Path::new("--file"), path]).args(["--size", "1048576", "--depth", "8", "--passes", "1"]);
    command.args(["--caching", caching]).env("LD_LIBRARY_PATH", software_cuda::folder());
    command
}

/// As eight processes load a model, each on its GPU.
#[test]
fn what_eight_processes_read_comes_from_the_device_once() {
    needs_mount!();
    const LEN: u64 = 64 * MIB;
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(9, LEN as usize)).unwrap();
    fs::File::open(&path).unwrap().sync_all().unwrap();
    let read_by_eight = |caching: &str| {
        fadvise(fs::File::open(&path).unwrap(), 0, None, Advice::DontNeed).unwrap();
        let mut processes: Vec<_> = (0..8)
            .map(|_| {
                let mut command = mover(&path, caching);
                let mut process = command.arg("--together").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
                let mut said = BufReader::new(process.stdout.take().unwrap());
                let mut line = String::new();
                said.read_line(&mut line).unwrap();
                assert_eq!(line, "prepared\n");
                (process, said)
            })
            .collect();
        // What each read to be prepared does not count, nor what it brought into the page cache.
        fadvise(fs::File::open(&path).unwrap(), 0, None, Advice::DontNeed).unwrap();
        let before = read_by_the_device(&volume);
        processes.iter_mut().for_each(|(process, _)| drop(process.stdin.take()));
        for (mut process, said) in processes {
            let line = said.lines().next().unwrap().unwrap();
            let reached: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(reached["bytes"], LEN);
            assert!(process.wait().unwrap().success());
        }
        (read_by_the_device(&volume) - before) as f64 / LEN as f64
    };
    assert!(read_by_eight("never") > 7.95, "each has it read");
    // The first of them learns by an answer that others read the same, when it has 8 MiB in flight.
    // Another test may just have had the kernel drop what it has.
    let times: Vec<_> = (0..3).map(|_| read_by_eight("resident")).collect();
    assert!(times.iter().any(|times| (0.99..1.2).contains(times)), "{times:?}");
}

#[test]
fn the_page_cache_can_be_required() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let len = RANGE + 3 * MIB + 5;
        let (file, bytes) = resident(&volume, len);
        let transfers = transfers(&volume, Caching::Never, None);
        let required = transfers.requiring(only(Route::Cache));
        let mut reader = Reader::new(len + MIB);
        let mut refused = |offset, len, why| match reader.read(&required, &file, offset, len) {
            Err(Error::Transfer { errno: rustix::io::Errno::OPNOTSUPP, reason, done, .. }) => {
                assert_eq!((reason, done), (why, Transfer::default()));
            }
            other => panic!("{other:?}"),
        };
        refused(0, 1, Reason::NotCached);
        assert_eq!(transfers.prepare(&file, 0, RANGE).unwrap(), RANGE);
        refused(RANGE - 1, 2, Reason::NotCached);
        assert_eq!(transfers.prepare(&file, RANGE, u64::MAX - RANGE).unwrap(), 3 * MIB + 5);
        assert_eq!(transfers.prepare(&file, 1, 2 * RANGE).unwrap(), len - 1, "what is there counts");
        refused(0, len + 1, Reason::NotCached);
        let (done, read) = reader.read(&required, &file, 0, len).unwrap();
        assert!(done.moved.cache == len && read == bytes);
        let segment = Segment { file_offset: 0, address: reader.memory.address(), len };
        // SAFETY: the memory is this test's.
        let written = unsafe { required.write(&File::create(file.path()).unwrap(), &[segment]) };
        assert!(matches!(written, Err(Error::Transfer { reason: Reason::RouteNotAvailable, .. })), "{written:?}");
    });
}

#[test]
fn no_more_is_registered_than_may_be_and_nothing_after_a_file_is_closed() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes) = resident(&volume, 4 * RANGE);
        let transfers = transfers(&volume, Caching::Never, Some(2 * RANGE));
        let mut reader = Reader::new(RANGE);
        let mut cached = |number: u64| {
            let (done, read) = reader.read(&transfers, &file, number * RANGE, RANGE).unwrap();
            assert!(read == &bytes[(number * RANGE) as usize..((number + 1) * RANGE) as usize]);
            done.moved.cache == RANGE
        };
        assert_eq!(transfers.prepare(&file, 0, 2 * RANGE).unwrap(), 2 * RANGE);
        transfers.prepare(&file, 0, 2 * RANGE).unwrap();
        assert_eq!(transfers.prepare(&file, 2 * RANGE, RANGE).unwrap(), RANGE);
        assert!(!cached(0) && cached(1) && cached(2), "the one that was not used for longest");
        assert_eq!(transfers.prepare(&file, 3 * RANGE, RANGE).unwrap(), RANGE);
        assert_eq!((0..4).map(&mut cached).collect::<Vec<_>>(), [false, false, true, true]);
        let maps = || fs::read_to_string("/proc/self/maps").unwrap().matches(volume.path("file").to_str().unwrap()).count();
        assert_eq!(maps(), 4, "two a window");
        drop(file);
        assert_eq!(maps(), 0);
    });
}

/// Where a file is mapped in this process.
fn mappings_of(path: &Path) -> Vec<(usize, usize)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let of_file = maps.lines().filter(|line| line.ends_with(path.to_str().unwrap()));
    let range = |line: &str| {
        let (start, rest) = line.split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start), number(rest.split_once(' ').unwrap().0))
    };
    of_file.map(range).collect()
}

/// What is registered stays the parent's: a child has none of it mapped, and the parent's reads are
/// of the file while the child lives and when it has ended, also of what was changed meanwhile.
#[test]
fn a_process_that_forks_keeps_what_is_registered_and_its_child_has_none_of_it() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, mut bytes) = resident(&volume, 2 * RANGE);
        let transfers = transfers(&volume, Caching::Never, None);
        assert_eq!(transfers.prepare(&file, 0, 2 * RANGE).unwrap(), 2 * RANGE);
        let mut reader = Reader::new(2 * RANGE);
        let mut check = |bytes: &[u8], cached: u64, when: &str| {
            let (done, read) = reader.read(&transfers, &file, 0, 2 * RANGE).unwrap();
            assert!(read == bytes, "{when}");
            assert_eq!(done.moved.cache, cached, "{when}");
        };
        let mapped = mappings_of(file.path());
        assert_eq!(mapped.len(), 4, "two for each cached range");
        let (told, tell) = rustix::pipe::pipe().unwrap();
        let (goes_on, end) = rustix::pipe::pipe().unwrap();
        let say = |what: &[u8]| rustix::io::write(&tell, what).is_ok_and(|len| len == what.len());
        // SAFETY: the child calls nothing but the kernel, and ends without what this process has
        // for its end.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: write(2) refuses addresses that are not mapped; _exit(2) takes a number.
            unsafe {
                for &(start, end) in &mapped {
                    for at in (start..end).step_by(1 << 20) {
                        let seen = libc::write(tell.as_raw_fd(), at as *const libc::c_void, 1);
                        if seen >= 0 || *libc::__errno_location() != libc::EFAULT {
                            libc::_exit(1);
                        }
                    }
                }
                say(b"none");
                drop(end);
                libc::_exit(i32::from(rustix::io::read(&goes_on, &mut [0; 1]) != Ok(0)));
            }
        }
        drop(tell);
        let mut said = [0; 5];
        assert_eq!(rustix::io::read(&told, &mut said), Ok(4), "a child saw what is mapped, or had no errors");
        check(&bytes, 2 * RANGE, "beside the child");
        // The pages stay where they are, and what is in them is another matter.
        let written = tree::pattern(77, MIB as usize);
        let plain = fs::OpenOptions::new().write(true).open(file.path()).unwrap();
        plain.write_all_at(&written, 3 * MIB).unwrap();
        bytes[3 * MIB as usize..4 * MIB as usize].copy_from_slice(&written);
        check(&bytes, 2 * RANGE, "written beside the child");
        drop(end);
        let mut status = 0;
        // SAFETY: it writes a number.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "of the child");
        assert_eq!(mappings_of(file.path()), mapped);
        check(&bytes, 2 * RANGE, "after the child");
        // And pages that leave are noticed as before.
        fallocate(&plain, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 5 * MIB, MIB).unwrap();
        bytes[5 * MIB as usize..6 * MIB as usize].fill(0);
        let (done, read) = reader.read(&transfers, &file, 0, 2 * RANGE).unwrap();
        assert!(read == bytes && done.moved.cache < 2 * RANGE, "{:?}", done.moved);
    });
}

#[test]
fn a_program_that_a_process_executes_has_nothing_of_what_is_registered() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes) = resident(&volume, RANGE);
        let transfers = transfers(&volume, Caching::Never, None);
        assert_eq!(transfers.prepare(&file, 0, RANGE).unwrap(), RANGE);
        let open = |folder: &str| {
            let descriptors = fs::read_dir(folder).unwrap().filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
            descriptors.filter(|path| path.starts_with(volume.root())).count()
        };
        assert!(open("/proc/self/fd") >= 2, "the file's, and that by which it was mapped");
        let mut program = Command::new("sleep").arg("100").spawn().unwrap();
        // Between fork and exec it is still this program.
        let name = format!("/proc/{}/comm", program.id());
        while fs::read_to_string(&name).unwrap() != "sleep\n" {
            thread::yield_now();
        }
        assert_eq!(open(&format!("/proc/{}/fd", program.id())), 0);
        let maps = fs::read_to_string(format!("/proc/{}/maps", program.id())).unwrap();
        assert!(!maps.contains(volume.root().to_str().unwrap()), "{maps}");
        let (done, read) =
            Reader::new(RANGE).read(&transfers, &file, 0, RANGE).map(|(done, read)| (done, read.to_vec())).unwrap();
        assert!(read == bytes && done.moved.cache == RANGE, "{:?}", done.moved);
        program.kill().unwrap();
        program.wait().unwrap();
    });
}

/// A process that allocates what its control group may have is not killed for what is registered.
#[test]
fn what_is_registered_makes_room_for_what_the_process_allocates() {
    needs_mount!();
    const LIMIT: u64 = 256 * MIB;
    let name = "what_is_registered_makes_room_for_what_the_process_allocates";
    let Some(group) = ControlGroup::with_memory("gpunvme-test", LIMIT) else {
        return report_skipped(name, "no control group with a limit of memory can be made here");
    };
    drop(group);
    with_software_cuda("", || {
        let volume = Mounted::new();
        let len = 192 * MIB;
        let mut bytes = tree::pattern(4, len as usize);
        fs::write(volume.path("file"), &bytes).unwrap();
        bytes.truncate(MIB as usize);
        bytes.shrink_to_fit();
        let plain = fs::File::open(volume.path("file")).unwrap();
        plain.sync_all().unwrap();
        fadvise(&plain, 0, None, Advice::DontNeed).unwrap();
        let group = ControlGroup::with_memory("gpunvme-test", LIMIT).unwrap();
        group.enter();
        let transfers = transfers(&volume, Caching::ReadAgain, None);
        let file = File::open(volume.path("file")).unwrap();
        let prepared = transfers.prepare(&file, 0, len).unwrap();
        assert!((2 * RANGE..=LIMIT / 4).contains(&prepared), "{prepared} of {LIMIT}");
        let mut reader = Reader::new(MIB);
        assert_eq!(reader.read(&transfers, &file, 0, MIB).unwrap().0.moved.cache, MIB);
        let maps = || fs::read_to_string("/proc/self/maps").unwrap().matches(volume.path("file").to_str().unwrap()).count();
        let before = maps();
        assert_eq!(before as u64, 2 * prepared / RANGE);
        let mut allocated: Vec<Vec<u8>> = Vec::new();
        while (allocated.len() as u64) < 220 {
            allocated.push(vec![1; MIB as usize]);
        }
        assert!(maps() < before, "nothing was given back");
        let (done, read) = reader.read(&transfers, &file, 0, MIB).unwrap();
        assert_eq!((done.bytes(), read), (MIB, &bytes[..]));
        drop(allocated);
        group.leave();
    });
}

/// `CACHE_SECONDS` makes it longer.
#[test]
fn what_is_read_out_of_the_page_cache_is_what_read_reads() {
    needs_mount!();
    with_software_cuda("", || {
        let site = Site::new(gpu());
        for (name, check) in PAGE_CACHE_CHECKS {
            println!("{name}");
            check(&site);
        }
    });
}

/// `gpunvme warm`, `cool` and `map --resident`, on files and folders.
#[test]
fn commands_fill_the_page_cache_and_empty_it() {
    needs_mount!();
    let volume = Mounted::new();
    fs::create_dir_all(volume.path("set/deep")).unwrap();
    let len = 16 * MIB + 5000;
    fs::write(volume.path("set/deep/large"), tree::pattern(1, len as usize)).unwrap();
    fs::write(volume.path("set/small"), b"small").unwrap();
    std::os::unix::fs::symlink("/etc/hostname", volume.path("set/link")).unwrap();
    let told = |arguments: &[&str]| -> serde_json::Value {
        let output = programs::command("gpunvme").arg("--json").args(arguments).current_dir(volume.root()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let all = serde_json::json!({ "files": 2, "size": len + 5, "resident": len + 5, "unreadable": 0 });
    assert_eq!(told(&["cool", "set"])["resident"], 0);
    assert_eq!(told(&["warm", "set"]), all);
    let parts = serde_json::json!([
        { "file_offset": 0, "length": 16 * MIB, "resident": 16 * MIB },
        { "file_offset": 16 * MIB, "length": 5000, "resident": 5000 },
    ]);
    assert_eq!(told(&["map", "--resident", "set/deep/large"])["parts"], parts);
    assert_eq!(told(&["cool", "set/deep/large", "set/small"])["resident"], 0);
    // Of a hole nothing is read.
    let sparse = fs::File::create(volume.path("sparse")).unwrap();
    sparse.set_len(40 << 30).unwrap();
    sparse.write_all_at(b"data", 30 << 30).unwrap();
    sparse.sync_all().unwrap();
    assert_eq!(told(&["cool", "sparse"])["resident"], 0);
    let resident = told(&["warm", "sparse"])["resident"].as_u64().unwrap();
    assert!((1..=4 * MIB).contains(&resident), "{resident}");
    let refused = programs::command("gpunvme").args(["warm", "/etc/hostname"]).output().unwrap();
    assert!(!refused.status.success() && text(&refused).contains("not on a gpunvme mount"), "{}", text(&refused));
}

/// A driver that reads registered memory by the processor would end the process when a file becomes
/// shorter: the route is not taken then.
#[test]
fn a_driver_that_copies_by_the_processor_reads_nothing_of_the_page_cache() {
    needs_mount!();
    with_software_cuda("copies-by-processor=1000000", || {
        let volume = Mounted::new();
        let (file, bytes) = resident(&volume, 2 * MIB);
        let transfers = transfers(&volume, Caching::ReadAgain, None);
        let refused = transfers.prepare(&file, 0, 2 * MIB).unwrap_err();
        assert_eq!(refused.errno(), rustix::io::Errno::OPNOTSUPP, "{refused}");
        let mut reader = Reader::new(2 * MIB);
        let mut copied = 0;
        for _ in 0..20 {
            // What the kernel copies needs no registration.
            assert!(fs::read(file.path()).unwrap() == bytes);
            let (done, read) = reader.read(&transfers, &file, 0, 2 * MIB).unwrap();
            assert!(read == bytes);
            copied += done.moved.cache;
            thread::sleep(Duration::from_millis(20));
            let required = transfers.requiring(only(Route::Cache));
            assert_eq!(reader.read(&required, &file, 0, 2 * MIB).unwrap_err().errno(), rustix::io::Errno::OPNOTSUPP);
        }
        assert!(copied > 0);
    });
}

/// The first read of a file, which the device is asked for by a call, while the room of its range
/// is given to another.
#[test]
fn what_has_to_come_from_the_page_cache_comes_from_there_or_not_at_all() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (other, bytes) = resident(&volume, RANGE);
        let (path, mut reader) = (volume.path("small"), Reader::new(4096));
        fs::write(&path, &bytes[..4096]).unwrap();
        let mut refused = 0;
        for round in 0.. {
            let transfers = transfers(&volume, Caching::ReadAgain, Some(RANGE));
            let (file, other) = (File::open(&path).unwrap(), File::open(other.path()).unwrap());
            assert_eq!(transfers.prepare(&file, 0, 4096).unwrap(), 4096);
            let required = transfers.requiring(only(Route::Cache));
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_micros(round % 150 * 50));
                    transfers.prepare(&other, 0, RANGE).unwrap();
                });
                match reader.read(&required, &file, 0, 4096) {
                    Ok((done, read)) => assert!(done.moved.cache == 4096 && read == &bytes[..4096], "{:?}", done.moved),
                    Err(error) => {
                        assert_eq!(error.errno(), rustix::io::Errno::OPNOTSUPP, "{error}");
                        refused += 1;
                    }
                }
            });
            if round >= 150 && refused > 0 {
                break;
            }
            assert!(round < 3000, "the range was always there");
        }
    });
}
