//! Volumes on a controller that the daemon drives itself. It is the software controller; the
//! laboratory tests what differs on hardware.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use gpunvme::gpu::Segment;
use gpunvme::{Mount, Operation, Ring};
use gpunvme_abi::{Reason, Route, get_text};
use gpunvme_cuda::{Cuda, Which};
use gpunvme_tests::cuda::from_the_device;
use gpunvme_tests::direct::{Buffer, info};
use gpunvme_tests::mounted::{is_mounted, text, unmount_unless_busy};
use gpunvme_tests::rings::{attach, bytes_of, shared, wait_for};
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::sys::without_io_uring;
use gpunvme_tests::{needs_mount, programs, scratch_dir, tree};
use tempfile::TempDir;

/// A file that a software controller keeps its data in, and a place to mount it. Unmounts when it
/// goes.
struct Controller {
    scratch: TempDir,
}

impl Controller {
    fn new() -> Self {
        let new = Self { scratch: scratch_dir() };
        File::create(new.file()).unwrap().set_len(256 << 20).unwrap();
        fs::create_dir(new.dir()).unwrap();
        new
    }

    fn file(&self) -> PathBuf {
        self.scratch.path().join("image")
    }

    fn dir(&self) -> PathBuf {
        self.scratch.path().join("mnt")
    }

    /// The DEVICE, with options.
    fn device(&self, options: &str) -> String {
        format!("sim:{}{options}", self.file().display())
    }

    fn mount(&self, device: &str) {
        succeeds(run("mount.gpunvme", &[device, self.dir().to_str().unwrap()]));
    }

    fn unmount(&self) {
        succeeds(unmount_unless_busy(&self.dir()));
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if is_mounted(&self.dir()) {
            let _ = Command::new("umount").arg("-l").arg(self.dir()).status();
        }
    }
}

fn run(program: &str, arguments: &[&str]) -> Output {
    programs::command(program).args(arguments).output().unwrap()
}

fn succeeds(output: Output) -> String {
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn refused(output: &Output, words: &str) {
    assert!(!output.status.success() && text(output).contains(words), "{}", text(output));
}

fn storm(file: &Path, seed: u64) {
    let arguments = ["storm", "--rounds", "150", "--seed", &seed.to_string()];
    let said = succeeds(Command::new(env!("CARGO_BIN_EXE_device-memory")).arg(file).args(arguments).output().unwrap());
    assert!(said.starts_with("150 rounds, host:"), "{said}");
}

#[test]
fn a_volume_lives_on_a_controller_and_on_its_file_alike() {
    needs_mount!();
    let controller = Controller::new();
    let device = controller.device(",mdts=5,queues=2");
    succeeds(run("mkfs.gpunvme", &["--quiet", &device]));
    controller.mount(&device);
    let data = tree::pattern(1, 10 << 20);
    fs::write(controller.dir().join("data"), &data).unwrap();
    storm(&controller.dir().join("storm"), 1);
    let kept = fs::read(controller.dir().join("storm")).unwrap();
    controller.unmount();
    succeeds(run("fsck.gpunvme", &["-n", &controller.device("")]));
    // By the kernel.
    controller.mount(controller.file().to_str().unwrap());
    assert!(fs::read(controller.dir().join("data")).unwrap() == data);
    assert!(fs::read(controller.dir().join("storm")).unwrap() == kept);
    fs::write(controller.dir().join("more"), &data).unwrap();
    controller.unmount();
    controller.mount(&controller.device(",sgls=none"));
    assert!(fs::read(controller.dir().join("more")).unwrap() == data);
    storm(&controller.dir().join("storm"), 2);
    controller.unmount();
    succeeds(run("fsck.gpunvme", &["-n", controller.file().to_str().unwrap()]));
}

#[test]
fn data_that_a_device_does_not_take_is_told_and_the_kernel_forgets_it() {
    needs_mount!();
    let controller = Controller::new();
    succeeds(run("mkfs.gpunvme", &["--quiet", &controller.device("")]));
    controller.mount(&controller.device(""));
    let path = controller.dir().join("data");
    fs::write(&path, [b'k'; 64 << 10]).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let extents: Vec<_> = gpunvme::File::open(&path).unwrap().resolve(0, 64 << 10).map(Result::unwrap).collect();
    let (first, last) = (extents[0].device_offset / 512, (extents[0].device_offset + extents[0].len) / 512 - 1);
    controller.unmount();
    controller.mount(&controller.device(&format!(",fault=status=0x280:on=write:lba={first}-{last}:times=2")));
    let overwrite = || {
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&[b'n'; 4096], 0).unwrap();
        file
    };
    let is_as_before = || {
        let until = Instant::now() + Duration::from_secs(10);
        while fs::read(&path).unwrap() != [b'k'; 64 << 10] {
            assert!(Instant::now() < until, "what was lost can be read");
            thread::sleep(Duration::from_millis(50));
        }
    };
    let dir = controller.dir();
    let sync = || run("gpunvme", &["sync", dir.to_str().unwrap()]);
    drop(overwrite());
    refused(&sync(), "input/output error");
    succeeds(sync());
    is_as_before();
    assert_eq!(overwrite().sync_all().unwrap_err().raw_os_error(), Some(libc::EIO));
    is_as_before();
    overwrite().sync_all().unwrap();
    assert_eq!(fs::read(&path).unwrap()[..4097], [&[b'n'; 4096][..], b"k"].concat());
    controller.unmount();
}

/// What the controller could do with a GPU's memory is no route where the machine has no GPU.
#[test]
fn info_gives_the_route_that_doctor_gives() {
    needs_mount!();
    let controller = Controller::new();
    let device = controller.device("");
    succeeds(run("mkfs.gpunvme", &["--quiet", &device]));
    controller.mount(&device);
    let json = |output: Output| serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap();
    let info = json(run("gpunvme", &["--json", "info", controller.dir().to_str().unwrap()]));
    assert_eq!(info["mount_route"], "p2p", "{info}");
    let doctor = json(run("gpunvme", &["--json", "doctor", &device]));
    if doctor["route"] == "host" {
        assert_eq!((&info["gpu_route"], &info["gpu_reason"]), (&doctor["route"], &doctor["reason"]), "{info}");
        let told = succeeds(run("gpunvme", &["info", controller.dir().to_str().unwrap()]));
        assert!(told.contains("gpu route   host\n") && told.contains("the mount itself can do p2p"), "{told}");
    }
    controller.unmount();
}

/// Blocks of 4 KiB, so that reads have edges inside them; and a buffer that lies as a driver needs
/// it and no better goes direct.
#[test]
fn large_blocks_and_fine_alignment() {
    needs_mount!();
    let controller = Controller::new();
    let device = controller.device(",lba=4096");
    succeeds(run("mkfs.gpunvme", &["--quiet", &device]));
    controller.mount(&device);
    let data = tree::pattern(2, 1 << 20);
    fs::write(controller.dir().join("data"), &data).unwrap();
    let file = File::open(controller.dir().join("data")).unwrap();
    let info = info(&file);
    assert_eq!((info.logical_block, info.memory_alignment), (4096, 4));
    assert_eq!((Route::from_code(info.route), Reason::from_code(info.reason)), (Some(Route::P2p), Some(Reason::None)));
    assert_eq!(get_text(&info.device), device);
    let buffer = Buffer::new(&file, 2 << 20);
    let segments = [(0, 1004, 65536), (100_000, 200_000, 100_000)];
    let done = buffer.transfer(gpunvme_abi::Command::Read, &file, &segments).unwrap();
    let edges = (102_400 - 100_000) + (200_000 - 196_608);
    assert_eq!((done.bytes, done.host, done.edge), (165_536, 165_536 - edges, edges));
    assert!(buffer.get(1004, 65536) == data[..65536] && buffer.get(200_000, 100_000) == data[100_000..200_000]);
    storm(&controller.dir().join("storm"), 3);
    drop(file);
    controller.unmount();
    succeeds(run("fsck.gpunvme", &["-n", &device]));
}

#[test]
fn a_controller_has_one_user_by_whatever_name() {
    needs_mount!();
    let controller = Controller::new();
    let (device, file) = (controller.device(",ns=1"), controller.file());
    succeeds(run("mkfs.gpunvme", &["--quiet", &device]));
    let label: serde_json::Value = serde_json::from_str(&succeeds(run("mkfs.gpunvme", &["-fn", "--json", &device]))).unwrap();
    assert_eq!(label["device"], device.as_str());
    controller.mount(&device);
    let other = controller.scratch.path().join("other");
    fs::create_dir(&other).unwrap();
    for name in [device.as_str(), &controller.device(",queues=1"), file.to_str().unwrap()] {
        let words = format!("already mounted on {}", controller.dir().display());
        refused(&run("mount.gpunvme", &[name, other.to_str().unwrap()]), &words);
        refused(&run("mkfs.gpunvme", &["--force", name]), &words);
        refused(&run("fsck.gpunvme", &["-n", name]), &words);
    }
    refused(&run("gpunvme", &["nvme", &device, "smart"]), "in use");
    controller.unmount();
    // The daemon may end a moment later; a new mount waits for it.
    controller.mount(&controller.device(",queues=1"));
    controller.unmount();
    refused(&run("mkfs.gpunvme", &[&device]), "carries a gpunvme volume");
    refused(&run("mkfs.gpunvme", &[&controller.device(",colour=red")]), "colour");
}

/// `gpunvme nvme` on the software controller; the laboratory has it on QEMU's.
#[test]
fn a_controller_is_looked_after() {
    needs_mount!();
    let controller = Controller::new();
    let device = controller.device("");
    let gpunvme = |arguments: &[&str]| run("gpunvme", &[&["--json", "nvme", &device], arguments].concat());
    let json = |arguments: &[&str]| -> serde_json::Value { serde_json::from_str(&succeeds(gpunvme(arguments))).unwrap() };
    assert_eq!(json(&["identify"])["namespaces"][0]["bytes"], 256 << 20);
    assert!(json(&["smart"])["temperature_celsius"].as_i64().unwrap() > 0);
    assert_eq!(json(&["errors"])["errors"], serde_json::json!([]));
    assert_eq!(json(&["regs"])["registers"][0]["name"], "CAP");
    assert_eq!(json(&["rescan"])["namespaces"][0]["id"], 1);
    json(&["reset"]);
    succeeds(run("mkfs.gpunvme", &["--quiet", &device]));
    refused(&gpunvme(&["format", "--yes"]), "carries a gpunvme volume");
    refused(&gpunvme(&["format", "--force"]), "Give --yes");
    refused(&gpunvme(&["subsystem-reset"]), "Give --yes");
    succeeds(run("fsck.gpunvme", &["-n", &device]));
    assert_eq!(json(&["format", "--force", "--yes"])["namespaces"][0]["logical_block"], 512);
    refused(&run("fsck.gpunvme", &["-n", &device]), "no gpunvme");
}

/// The controller would take GPU memory, but the software CUDA driver exports other memory: the
/// library learns that once, and reads by way of the staging pool.
#[test]
fn gpu_memory_that_is_refused_is_offered_once() {
    needs_mount!();
    programs::folder(); // they are built here, and not in the minute that the body has
    with_software_cuda("", || {
        let controller = Controller::new();
        succeeds(run("mkfs.gpunvme", &[&controller.device("")]));
        controller.mount(&controller.device(""));
        let path = controller.dir().join("file");
        let data = tree::pattern(3, 5 << 20);
        fs::write(&path, &data).unwrap();
        let (file, mount) = (gpunvme::File::open(&path).unwrap(), gpunvme::Mount::open(&path).unwrap());
        assert_eq!(mount.info().unwrap().route, Route::P2p);
        let registered = || mount.stats().unwrap().calls.iter().find(|(name, _)| *name == "register").unwrap().1;
        let transfers = from_the_device(&mount);
        let gpu = Cuda::load().unwrap().gpu(Which::Index(0)).unwrap();
        let [one, other] = [0, 1].map(|_| gpu.alloc(data.len()).unwrap());
        let refused = transfers.route(one.address()).unwrap();
        assert_eq!(refused.0, Route::Bounce);
        assert_ne!(refused.1, Reason::None);
        assert_eq!(registered(), 1, "the memory");
        for memory in [&one, &other, &one] {
            let segment = Segment { file_offset: 0, address: memory.address(), len: data.len() as u64 };
            // SAFETY: the memory is this test's.
            let done = unsafe { transfers.read(&file, &[segment]) }.unwrap();
            assert_eq!((done.moved.bounce, done.reason), (data.len() as u64, Some(refused.1)));
        }
        assert_eq!(registered(), 2, "the staging pool in its place, and nothing was offered again");
        drop((transfers, file, mount));
        controller.unmount();
    });
}

/// The driver needs none of it, and neither do rings.
#[test]
fn rings_work_where_io_uring_is_switched_off() {
    needs_mount!();
    let controller = Controller::new();
    let device = controller.device("");
    succeeds(run("mkfs.gpunvme", &[&device]));
    let mut mount = programs::command("mount.gpunvme");
    succeeds(without_io_uring(mount.args([&device, controller.dir().to_str().unwrap()])).output().unwrap());
    let mount = Mount::open(controller.dir()).unwrap();
    let memory = shared(&mount, 4 << 20);
    let data = tree::pattern(31, 4 << 20);
    memory.copy_in(0, &data);
    let mut ring = Ring::new(&mount, 64).expect("a ring");
    let file = attach(&ring, controller.dir().join("file"));
    for piece in 0..64u64 {
        ring.push(&Operation::write(&file, piece << 16, &memory, piece << 16, 1 << 16)).unwrap();
    }
    wait_for(&mut ring, 64).into_iter().for_each(|completed| assert_eq!(completed.result.unwrap().bytes(), 1 << 16));
    // One at a time, so that each has to wake this end.
    memory.copy_in(0, &vec![0; 4 << 20]);
    for piece in 0..64u64 {
        ring.push(&Operation::read(&file, piece << 16, &memory, piece << 16, 1 << 16)).unwrap();
        wait_for(&mut ring, 1).remove(0).result.unwrap();
    }
    assert!(bytes_of(&memory, 0, 4 << 20) == data);
    drop((ring, file, memory, mount));
    controller.unmount();
}
