//! Kernels that read and write files themselves: `gpunvme_device.h`, compiled for the CPU, on a
//! real mount. `cuda-checks --kernels` does the same on a GPU.

mod ring;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use gpunvme::gpu::{GpuArraySettings, GpuRing, GpuRingSettings};
use gpunvme::{Error, File, Mount};
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::rings::Bystander;
use gpunvme_tests::software_cuda;
use gpunvme_tests::{needs_mount, programs, tree};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Signal, kill_process};
use zerocopy::IntoBytes;

const LEN: usize = (1 << 20) + 1234;

/// A volume with a file, and a program that has kernels use it.
struct Site {
    volume: Mounted,
    program: PathBuf,
    bytes: Vec<u8>,
    /// Threads that play kernels use all processors while they wait, and how long they do is part
    /// of most tests: one program at a time.
    _alone: MutexGuard<'static, ()>,
}

impl Site {
    fn new() -> Site {
        static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| compiled("kernels", &[]));
        Site::with(PROGRAM.clone())
    }

    fn with(program: PathBuf) -> Site {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let volume = Mounted::new();
        let bytes = tree::pattern(20, LEN);
        fs::write(volume.path("file"), &bytes).unwrap();
        Site { volume, program, bytes, _alone }
    }

    /// Leaves as much of the file as takes some seconds where each element is a turn of all threads
    /// of a block, and returns its length.
    fn shorten(&self) -> usize {
        let len = LEN / 16 + 1;
        fs::write(self.volume.path("file"), &self.bytes[..len]).unwrap();
        len
    }

    fn scenario(&self, name: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", "200"]).arg(&self.program).arg(name);
        command.arg(self.volume.root()).arg(self.volume.path("file")).env("LD_LIBRARY_PATH", programs::folder());
        command
    }

    /// Runs it to its end, which has to be a good one.
    fn run(&self, name: &str) {
        let output = self.scenario(name).output().unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output));
    }

    /// Runs it until its kernels are reading.
    fn begin(&self, name: &str) -> (Child, BufReader<ChildStdout>) {
        let mut child = self.scenario(name).stdout(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "reading\n");
        (child, said)
    }
}

/// The program, compiled with further options.
fn compiled(name: &str, options: &[&str]) -> PathBuf {
    compiled_of("kernels.cc", name, options)
}

/// One of a source in `tests/c`.
fn compiled_of(source: &str, name: &str, options: &[&str]) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let built = Command::new("c++")
        .args(["-std=c++14", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(options)
        .arg(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c")).join(source))
        .args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include"), "-L"])
        .arg(programs::folder())
        .args(["-lgpunvme", "-o"])
        .arg(&program)
        .output()
        .expect("a C++ compiler is needed for this test");
    assert!(built.status.success(), "{}", text(&built));
    program
}

/// The status that each block of kernels ended with.
fn statuses((mut child, mut said): (Child, BufReader<ChildStdout>)) -> Vec<i32> {
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    rest.lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn groups_read_ranges_of_any_offset_and_length() {
    needs_mount!();
    Site::new().run("reads");
}

#[test]
fn groups_write_files_that_become_longer() {
    needs_mount!();
    let site = Site::new();
    site.run("writes");
    let written = fs::read(site.volume.path("file")).unwrap();
    let parts = (0..8).flat_map(|block| (0..50021).map(move |at| (at * 7 + block) as u8));
    let expected: Vec<u8> = parts.chain(site.bytes[8 * 50021..].iter().copied()).collect();
    assert!(written == expected);
}

#[test]
fn requests_are_waited_for_in_any_order_and_refused_where_no_slot_is_free() {
    needs_mount!();
    let site = Site::new();
    site.run("requests");
    assert_eq!(&fs::read(site.volume.path("file")).unwrap()[..16], [&site.bytes[..5], b"written", &site.bytes[12..16]].concat());
}

#[test]
fn no_slot_is_lost_where_many_threads_take_and_free_them() {
    needs_mount!();
    Site::new().run("slots");
}

#[test]
fn what_is_read_can_be_used_where_it_lies_until_it_is_given_back() {
    needs_mount!();
    Site::new().run("lends");
}

/// The kernels of the guide as they stand there, on the processor.
#[test]
fn the_kernels_of_the_guide_do_what_it_says() {
    needs_mount!();
    let guide = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/kernels.md")).unwrap();
    let volume = Mounted::new();
    let folder = volume.image().path().parent().unwrap().join("guide");
    fs::create_dir(&folder).unwrap();
    for (name, part) in
        [("sum", "gpunvme::ring ring, gpunvme::file"), ("array", "gpunvme::array<float> weights, "), ("lent", "ring.lend")]
    {
        let mut blocks = guide.split("```cpp\n").skip(1).map(|block| block.split("```").next().unwrap());
        let block = blocks.find(|block| block.contains(part)).unwrap();
        let lines = block.lines().filter(|line| !line.is_empty()).count();
        assert!(lines <= 15, "{name} has {lines} lines");
        fs::write(folder.join(format!("guide-{name}.h")), block).unwrap();
    }
    let program = folder.join("guide");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++14", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    compiler.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/guide.cc")).arg("-I").arg(&folder);
    compiler.args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include"), "-L"]).arg(programs::folder());
    let built = compiler.args(["-lgpunvme", "-o"]).arg(&program).output().expect("a C++ compiler is needed for this test");
    assert!(built.status.success(), "{}", text(&built));
    // 2 MiB of floats, of which a block adds up those of its threads; 4 of its 1024 are played.
    let float = |n: usize| (n % 61) as f32;
    fs::write(volume.path("floats"), (0..1 << 19).flat_map(|n| float(n).to_le_bytes()).collect::<Vec<_>>()).unwrap();
    let mut run = Command::new(program);
    run.arg(volume.root()).arg(volume.path("floats")).env("LD_LIBRARY_PATH", programs::folder());
    let output = run.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let of_block = |block: usize| -> f32 {
        let pages = block * 256..(block + 1) * 256;
        pages.flat_map(|page| (0..1024).step_by(341).map(move |thread| float(page * 1024 + thread))).sum()
    };
    let expected = format!("{} {} {}\n", of_block(0), of_block(1), float(1024 + 5));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
}

/// What a kernel reads was written before, by what its header orders and not by luck: as far as the
/// compiler's detector of races sees it, in one process.
#[test]
fn submitters_have_no_races() {
    needs_mount!();
    let site = Site::with(compiled("kernels-races", &["-fsanitize=thread", "-Wno-tsan"]));
    for name in ["reads", "writes", "requests", "lends", "array_gets", "array_sets", "array_holds"] {
        if name == "array_sets" {
            site.shorten();
        }
        // The detector needs addresses where it expects them.
        let mut command = Command::new("setarch");
        command.arg("-R").arg(&site.program).arg(name).arg(site.volume.root()).arg(site.volume.path("file"));
        let output = command.env("LD_LIBRARY_PATH", programs::folder()).output().unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output));
    }
}

#[test]
fn kernels_end_when_the_daemon_dies() {
    needs_mount!();
    let site = Site::new();
    let running = site.begin("until_closed");
    drop(site.volume.signal(Signal::KILL));
    assert_eq!(statuses(running), [libc::ENODEV; 8]);
}

#[test]
fn kernels_end_when_the_daemon_ends() {
    needs_mount!();
    let site = Site::new();
    let running = site.begin("until_closed");
    drop(site.volume.signal(Signal::TERM));
    assert_eq!(statuses(running), [libc::ENODEV; 8]);
}

/// A GPU ring keeps its volume busy, as an open file does; who forces it ends the kernels.
#[test]
fn a_volume_that_kernels_use_is_busy_and_kernels_end_when_it_is_unmounted_by_force() {
    needs_mount!();
    for scenario in ["until_closed", "array_until_closed"] {
        let site = Site::new();
        let (mut child, said) = site.begin(scenario);
        let root = site.volume.root();
        assert_eq!(unmount(&root, UnmountFlags::empty()), Err(Errno::BUSY));
        thread::sleep(Duration::from_millis(100));
        assert!(child.try_wait().unwrap().is_none(), "{scenario}: kernels ended with a volume that is still there");
        // It ends the connection, though descriptors keep the mount.
        let _ = unmount(&root, UnmountFlags::FORCE);
        assert_eq!(statuses((child, said)), [libc::ENODEV; 8], "{scenario}");
        site.volume.abandon();
    }
}

#[test]
fn kernels_end_when_the_daemon_is_silent() {
    needs_mount!();
    let site = Site::new();
    let running = site.begin("until_late");
    kill_process(site.volume.daemon(), Signal::STOP).unwrap();
    let ended = statuses_while_stopped(running);
    kill_process(site.volume.daemon(), Signal::CONT).unwrap();
    assert_eq!(ended, [libc::ETIMEDOUT; 8]);
}

/// As [`statuses`], without the end of the process: to give back its ring it needs the daemon.
fn statuses_while_stopped((mut child, said): (Child, BufReader<ChildStdout>)) -> Vec<i32> {
    let ended = said.lines().take(8).map(|line| line.unwrap().parse().unwrap()).collect();
    child.kill().unwrap();
    ended
}

#[test]
fn arrays_are_what_their_file_is_and_each_page_is_read_once_where_all_have_room() {
    needs_mount!();
    Site::new().run("array_gets");
}

#[test]
fn a_page_of_an_array_that_many_wait_for_is_read_for_all_of_them() {
    needs_mount!();
    Site::new().run("array_crowded");
}

#[test]
fn what_kernels_change_in_an_array_is_in_its_file() {
    needs_mount!();
    let site = Site::new();
    let len = site.shorten();
    site.run("array_sets");
    let count = len / 4 + 2000;
    let changed = |n: usize| [0, 5000, count - 1].contains(&n).then(|| 0xABCD_0000 + (n % 1000) as u32);
    let word = |n: usize| changed(n).unwrap_or(3 * n as u32 + 1);
    let expected: Vec<u8> = (0..count).flat_map(|n| word(n).to_le_bytes()).collect();
    assert!(fs::read(site.volume.path("file")).unwrap() == expected);
}

#[test]
fn held_pages_of_an_array_stay_and_who_waits_for_them_in_vain_is_told() {
    needs_mount!();
    Site::new().run("array_holds");
}

#[test]
fn kernels_that_use_arrays_end_when_the_daemon_dies_ends_or_is_silent() {
    needs_mount!();
    for signal in [Signal::KILL, Signal::TERM] {
        let site = Site::new();
        let running = site.begin("array_until_closed");
        drop(site.volume.signal(signal));
        assert_eq!(statuses(running), [libc::ENODEV; 8]);
    }
    let site = Site::new();
    let running = site.begin("array_until_late");
    kill_process(site.volume.daemon(), Signal::STOP).unwrap();
    let ended = statuses_while_stopped(running);
    kill_process(site.volume.daemon(), Signal::CONT).unwrap();
    assert_eq!(ended, [libc::ETIMEDOUT; 8]);
}

/// Runs a scenario on a controller with faults, in which RANGE stands for the logical blocks of its
/// file: the volume's own writes are not to fail. Returns what it said, and the volume, mounted
/// from the image itself.
fn on_a_device_with(faults: &str, scenario: &str) -> (String, Mounted, Vec<u8>) {
    let site = Site::new();
    let (volume, bytes) = (site.volume, site.bytes);
    Mount::open(volume.root()).unwrap().sync().unwrap();
    let extents: Vec<_> = File::open(volume.path("file")).unwrap().resolve(0, LEN as u64).map(Result::unwrap).collect();
    let (first, last) = (extents[0].device_offset / 512, (extents[0].device_offset + extents[0].len) / 512 - 1);
    let image = volume.unmount();
    let dir = image.mount_point();
    let faults = faults.replace("RANGE", &format!("lba={first}-{last}"));
    let device = format!("sim:{},timeout=300ms,{faults}", image.path().display());
    let mounted = programs::command("mount.gpunvme").arg(&device).arg(&dir).output().unwrap();
    assert!(mounted.status.success(), "{}", text(&mounted));
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", "200"]).arg(&site.program).arg(scenario).arg(&dir).arg(dir.join("file"));
    let output = command.env("LD_LIBRARY_PATH", programs::folder()).output().unwrap();
    let unmounted = Command::new("umount").arg(&dir).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(unmounted.status.success(), "{}", text(&unmounted));
    (String::from_utf8(output.stdout).unwrap(), image.mount(), bytes)
}

/// Commands that fail or are lost, and answers in another order.
const FAULTS: &str = "fault=status=0x281:on=read:RANGE:one-in=30:times=40,fault=lose:on=read:RANGE:one-in=150:times=2,\
    fault=reorder:on=read:one-in=10,fault=status=0x280:on=write:RANGE:one-in=40:times=20";

#[test]
fn kernels_on_a_device_with_faults_get_errors_or_the_bytes_and_lose_nothing() {
    needs_mount!();
    let (_, volume, bytes) = on_a_device_with(FAULTS, "array_faults");
    let read = fs::read(volume.path("file")).unwrap();
    let whole = bytes.len() / 4;
    let expected: Vec<u8> =
        (0..whole as u32).flat_map(|n| (3 * n + 1).to_le_bytes()).chain(bytes[whole * 4..].iter().copied()).collect();
    assert!(read == expected, "other words are in the file");
}

/// What the scenario `faults` leaves in the file, which it changes in whole blocks.
fn check_written_in_parts(volume: &Mounted, bytes: &[u8]) {
    let part = bytes.len() / 6 / 4096 * 4096;
    let parts = (0..6).flat_map(|block| (0..part).map(move |at| (at * 7 + block) as u8));
    let expected: Vec<u8> = parts.chain(bytes[6 * part..].iter().copied()).collect();
    assert!(fs::read(volume.path("file")).unwrap() == expected, "other bytes are in the file");
}

#[test]
fn reads_and_writes_of_kernels_on_a_device_with_faults_are_errors_or_done() {
    needs_mount!();
    let (said, volume, bytes) = on_a_device_with(FAULTS, "faults");
    assert_ne!(said, "0 failed\n", "the device did not fail");
    check_written_in_parts(&volume, &bytes);
}

/// The driver sends what was in flight again, so that kernels see nothing of it but the time.
#[test]
fn kernels_go_on_when_the_controller_is_reset_under_them() {
    needs_mount!();
    let at = |read: &str, write: &str| {
        let faults = format!("fault={read}:on=read:RANGE:skip=30:times=1,fault={write}:on=write:RANGE:skip=20:times=1");
        let (said, volume, bytes) = on_a_device_with(&faults, "faults");
        check_written_in_parts(&volume, &bytes);
        said
    };
    assert_ne!(at("status=0x281", "status=0x280"), "0 failed\n", "kernels would see a command there fail");
    assert_eq!(at("reset", "fatal"), "0 failed\n");
}

/// A device that loses what it had not flushed, with kernels that write: they get errors, and what
/// their host made durable is there afterwards.
#[test]
fn a_power_cut_under_kernels_ends_their_writes_and_loses_nothing_durable() {
    needs_mount!();
    let (said, volume, bytes) = on_a_device_with("fault=power-cut:on=write:RANGE:skip=300:times=1", "power_cut");
    let read = fs::read(volume.path("file")).unwrap();
    assert_eq!(read.len(), bytes.len());
    let part = bytes.len() / 6 / 4096 * 4096;
    for (block, line) in said.lines().enumerate() {
        let (durable, begun) = line.split_once(' ').unwrap();
        let numbers = durable.parse::<u8>().unwrap()..=begun.parse::<u8>().unwrap();
        assert!(*numbers.start() > 0, "{said}");
        for (sector, found) in read[block * part..(block + 1) * part].chunks(512).enumerate() {
            let whole = found.iter().all(|byte| byte == &found[0]);
            assert!(whole && numbers.contains(&found[0]), "sector {sector} of {block} has {}, not {numbers:?}", found[0]);
        }
    }
    assert!(read[6 * part..] == bytes[6 * part..]);
}

#[test]
fn a_process_that_ends_under_its_kernels_leaves_nothing_behind() {
    needs_mount!();
    let site = Site::new();
    let (mut child, said) = site.begin("until_closed");
    // Of `timeout` and what it runs, the one that uses the ring.
    let task = format!("/proc/{0}/task/{0}/children", child.id());
    let kernels = fs::read_to_string(task).unwrap().trim().parse().unwrap();
    kill_process(rustix::process::Pid::from_raw(kernels).unwrap(), Signal::KILL).unwrap();
    assert!(!child.wait().unwrap().success());
    drop(said);
    site.run("reads");
    site.volume.unmount();
}

#[test]
fn a_kernel_that_submits_garbage_spoils_its_own_ring_alone() {
    needs_mount!();
    let site = Site::new();
    let mut bystander = Bystander::new(&site.volume);
    site.run("wild_entries");
    bystander.check();
    site.run("wild_completions");
    bystander.check();
}

#[test]
fn kernels_end_whatever_a_daemon_answers() {
    let program = compiled_of("kernels_hostile.cc", "kernels-hostile", &[]);
    for scenario in ["status", "status_of_ring", "late", "ahead", "late_writes", "full", "apart", "patience", "mistakes"] {
        let output = Command::new("timeout").args(["--kill-after=5", "30"]).arg(&program).arg(scenario).output().unwrap();
        assert!(output.status.success(), "{scenario}: {}", text(&output));
    }
}

/// The daemon may still answer such a write, and whoever takes the answer changes a word of the
/// array's memory.
#[test]
fn an_array_with_a_write_that_was_given_up_leaves_its_memory_to_the_ring() {
    /// A frame's word, as `gpunvme_array.h` has it: busy, and changed.
    const GIVEN_UP: u64 = 1 << 20 | 1 << 22;
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(1, 65536)).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let file = File::create(volume.path("file")).unwrap();
    let ring = GpuRing::on_cpu(&mount, GpuRingSettings::default()).unwrap();
    let memory = fs::OpenOptions::new().read(true).write(true).open("/proc/self/mem").unwrap();
    let word_at = |address: u64| {
        let mut word = [0; 8];
        memory.read_exact_at(&mut word, address).map(|()| u64::from_ne_bytes(word))
    };
    let array = |word: u64| {
        let array = ring.array(&file, GpuArraySettings { writable: true, ..GpuArraySettings::default() }).unwrap();
        let words = u64::from_ne_bytes(array.for_kernels().as_bytes()[80..88].try_into().unwrap());
        memory.write_all_at(&word.to_ne_bytes(), words).unwrap();
        (array, words)
    };
    let (settled, words) = array(0);
    drop(settled);
    assert!(word_at(words).is_err(), "its memory is given back");
    let (mut given_up, words) = array(GIVEN_UP);
    assert!(matches!(given_up.flush(&file), Err(Error::Path { errno: Errno::TIMEDOUT, .. })));
    drop(given_up);
    assert_eq!(word_at(words).unwrap(), GIVEN_UP, "the ring keeps it");
    drop(ring);
    assert!(word_at(words).is_err(), "it is given back with the ring");
}

#[test]
fn kernels_end_when_their_host_gives_the_ring_up() {
    needs_mount!();
    Site::new().run("host_ends");
}

/// What a machine without a GPU can run of it.
#[test]
fn the_bench_of_kernels_compares_what_it_reads() {
    needs_mount!();
    let mut bench = programs::command("kernels-bench");
    bench.args(["--quick", "--without-kernels"]).env("GPUNVME_BIN", programs::folder());
    let output = bench.env("LD_LIBRARY_PATH", software_cuda::folder()).output().unwrap();
    let said = text(&output);
    assert!(output.status.success() && said.contains("every word was compared, but those of layers"), "{said}");
    assert!(said.contains("Random reads of 4 KiB") && said.contains("A transformer of 6 layers"), "{said}");
}
