//! How the kernel's requests come: through io_uring where it is wished for and can be had, else by
//! `/dev/fuse`, with a warning that says why. That clients, the mount and the daemon end well
//! through io_uring, whoever ends first.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::front::waits_for_no_fragments;
use gpunvme_tests::direct::Buffer;
use gpunvme_tests::mounted::{Image, Mounted, is_mounted};
use gpunvme_tests::sys::{Mapping, without_io_uring};
use gpunvme_tests::{needs_mount, programs, report_skipped, tree};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";
/// The parameter is one for all mounts of the machine. Others of these tests ask for no io_uring.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
/// What must not hang ends within this.
const LIMIT: Duration = Duration::from_secs(30);

/// The parameter has a value, until this is dropped.
pub struct Parameter {
    before: String,
    _one: MutexGuard<'static, ()>,
}

impl Parameter {
    /// None, said aloud, where the kernel has none.
    pub fn set(test: &str, value: &str) -> Option<Parameter> {
        let one = ONE_AT_A_TIME.lock();
        let Ok(before) = fs::read_to_string(PARAMETER) else {
            report_skipped(test, "the kernel has no FUSE over io_uring (Linux 6.14)");
            return None;
        };
        if fs::write(PARAMETER, value).is_err() {
            report_skipped(test, "the module's parameters cannot be changed here");
            return None;
        }
        Some(Parameter { before, _one: one })
    }
}

impl Drop for Parameter {
    fn drop(&mut self) {
        let _ = fs::write(PARAMETER, &self.before);
    }
}

/// What `gpunvme info` says of the transport: its name, and why it is not io_uring.
fn transport(root: &Path) -> (String, Option<String>) {
    let told = programs::command("gpunvme").args(["info", "--json"]).arg(root).output().unwrap();
    let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    (told["transport"].as_str().unwrap().to_owned(), told["transport_refusal"].as_str().map(str::to_owned))
}

fn by_io_uring(image: Image) -> Mounted {
    let volume = image.mount_with("transport=io_uring");
    assert_eq!(transport(&volume.root()), ("io_uring".to_owned(), None));
    volume
}

/// Files, names, large and small content, and what is answered later from another thread.
fn use_it(root: &Path) {
    let content: Vec<u8> = (0..3 << 20).map(|at| (at / 7) as u8).collect();
    thread::scope(|scope| {
        for number in 0..8 {
            let content = &content;
            scope.spawn(move || {
                let folder = root.join(format!("{number}"));
                fs::create_dir(&folder).unwrap();
                for at in 0..50 {
                    let mut file = File::create(folder.join(format!("{at}"))).unwrap();
                    file.write_all(&content[..at * 4001]).unwrap();
                    if at % 10 == 0 {
                        file.sync_all().unwrap();
                    }
                }
                let file = File::create_new(folder.join("large")).unwrap();
                file.write_all_at(content, 12_345).unwrap();
                for at in 0..50 {
                    assert!(fs::read(folder.join(format!("{at}"))).unwrap() == content[..at * 4001]);
                    fs::rename(folder.join(format!("{at}")), folder.join("moved")).unwrap();
                }
                assert!(fs::read(folder.join("large")).unwrap()[12_345..] == content[..]);
                assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
                fs::remove_dir_all(&folder).unwrap();
            });
        }
    });
}

#[test]
fn requests_come_through_io_uring_where_it_is_wished_for() {
    needs_mount!();
    let Some(_offered) = Parameter::set("requests_come_through_io_uring_where_it_is_wished_for", "Y") else { return };
    let volume = by_io_uring(Image::formatted());
    use_it(&volume.root());
    let mut image = volume.unmount();
    for classic in ["transport=auto", "transport=classic"] {
        let volume = image.mount_with(classic);
        assert_eq!(transport(&volume.root()), ("classic".to_owned(), None), "{classic}");
        image = volume.unmount();
    }
}

/// A mount whose daemon runs in the foreground and says in its log, as `gpunvme info` does, why it
/// has no io_uring. It works all the same, and ends well.
fn falls_back(image: &Image, device: &str, daemon: impl FnOnce(&mut Command) -> &mut Command, log_says: &str, info_says: &str) {
    let log = image.path().with_file_name("log");
    fs::create_dir_all(image.mount_point()).unwrap();
    let mut command = programs::command("mount.gpunvme");
    command.arg(device).arg(image.mount_point()).args(["-o", "foreground,transport=io_uring"]);
    let mut daemon = daemon(command.stdin(Stdio::null()).stderr(File::create(&log).unwrap())).spawn().unwrap();
    let start = Instant::now();
    while !is_mounted(&image.mount_point()) {
        assert!(start.elapsed() < LIMIT, "{}", fs::read_to_string(&log).unwrap());
        thread::sleep(Duration::from_millis(10));
    }
    let (name, refusal) = transport(&image.mount_point());
    assert!(name == "classic" && refusal.as_ref().is_some_and(|refusal| refusal.contains(info_says)), "{name}: {refusal:?}");
    use_it(&image.mount_point());
    let log = fs::read_to_string(&log).unwrap();
    assert!(log.contains(log_says), "{log}");
    assert!(Command::new("umount").arg(image.mount_point()).status().unwrap().success());
    assert!(daemon.wait().unwrap().success());
    image.check();
}

#[test]
fn where_the_kernel_offers_none_the_mount_is_classic_and_says_so() {
    needs_mount!();
    let Some(_offered) = Parameter::set("where_the_kernel_offers_none_the_mount_is_classic_and_says_so", "N") else { return };
    let image = Image::formatted();
    let log_says = "not through io_uring: the kernel does not offer it";
    falls_back(&image, image.path().to_str().unwrap(), |daemon| daemon, log_says, PARAMETER);
}

/// A controller of its own: the daemon reads image files through io_uring, too.
#[test]
fn where_the_system_refuses_io_uring_the_mount_is_classic_and_says_so() {
    needs_mount!();
    let Some(_offered) = Parameter::set("where_the_system_refuses_io_uring_the_mount_is_classic_and_says_so", "Y") else {
        return;
    };
    let image = Image::formatted();
    let device = format!("sim:{}", image.path().display());
    falls_back(
        &image,
        &device,
        without_io_uring,
        "not through io_uring: the system refuses io_uring",
        "the system refuses io_uring",
    );
}

/// Clients that create, write, sync and read, until something fails or they are to end.
struct Clients {
    threads: Vec<JoinHandle<()>>,
    end: Arc<AtomicBool>,
}

impl Clients {
    /// By the descriptor of the root: by its name a client would reach the folder below, once a
    /// dead mount is released, and go on there.
    fn new(count: usize, root: &Path) -> Clients {
        let (held, end) = (Arc::new(File::open(root).unwrap()), Arc::new(AtomicBool::new(false)));
        let client = |client: usize| {
            let (held, end) = (held.clone(), end.clone());
            let folder = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
            let work = move || {
                let _held = held;
                for at in 0.. {
                    let path = folder.join(format!("{client}-{}", at % 20));
                    let done = File::create(&path).and_then(|mut file| {
                        file.write_all(&[client as u8; 9000])?;
                        if at % 5 == 0 { file.sync_data() } else { fs::read(&path).map(drop) }
                    });
                    if done.is_err() || end.load(Ordering::Relaxed) {
                        return;
                    }
                }
            };
            thread::spawn(work)
        };
        Clients { threads: (0..count).map(client).collect(), end }
    }

    fn are_working(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }

    /// Insists that none hangs in the kernel.
    fn end(self) {
        let start = Instant::now();
        while !self.threads.iter().all(JoinHandle::is_finished) {
            assert!(start.elapsed() < LIMIT, "clients hang");
            thread::sleep(Duration::from_millis(20));
        }
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// Runs a test of an image file and of a block device (`fuseblk`), by each transport that can be
/// had. `mount` mounts by that one.
fn by_each_transport(test: &str, run: impl Fn(Image, &dyn Fn(Image) -> Mounted)) {
    let image = |is_block_device| match is_block_device {
        true => Image::on_block_device(test, 256 << 20),
        false => Some(Image::formatted()),
    };
    for is_block_device in [false, true] {
        let Some(classic) = image(is_block_device) else { return };
        run(classic, &|image| image.mount_with("transport=classic"));
        let Some(_offered) = Parameter::set(test, "Y") else { continue };
        run(image(is_block_device).expect("it was there before"), &by_io_uring);
    }
}

#[test]
fn clients_survive_the_daemon() {
    needs_mount!();
    by_each_transport("clients_survive_the_daemon", |mut image, mount| {
        for round in 0..2 {
            let volume = mount(image);
            let clients = Clients::new(64, &volume.root());
            thread::sleep(Duration::from_millis(400 + 200 * round));
            assert!(clients.are_working());
            let (status, dead) = volume.signal(Signal::KILL);
            assert_eq!(status.terminating_signal(), Some(libc::SIGKILL));
            clients.end();
            dead.check();
            image = dead;
        }
    });
}

/// The file that aborts a mount's connection, in the kernel's filesystem of connections.
fn abort_of(root: &Path) -> Option<PathBuf> {
    let connections = Path::new("/sys/fs/fuse/connections");
    let device = fs::metadata(root).unwrap().dev();
    // As the kernel writes the number of a device (linux/kdev_t.h): 20 bits are the minor number's.
    let number = rustix::fs::major(device) << 20 | rustix::fs::minor(device);
    let abort = connections.join(number.to_string()).join("abort");
    if !abort.exists() {
        let _ = Command::new("mount").args(["-t", "fusectl", "fusectl"]).arg(connections).status();
    }
    abort.exists().then_some(abort)
}

#[test]
fn clients_and_daemon_survive_an_abort_of_the_connection() {
    needs_mount!();
    let test = "clients_and_daemon_survive_an_abort_of_the_connection";
    by_each_transport(test, |mut image, mount| {
        for round in 0..2 {
            let volume = mount(image);
            let Some(abort) = abort_of(&volume.root()) else {
                return report_skipped(test, "fusectl cannot be mounted");
            };
            let clients = Clients::new(64, &volume.root());
            thread::sleep(Duration::from_millis(300 + 200 * round));
            assert!(clients.are_working());
            fs::write(abort, "1").unwrap();
            clients.end();
            // The daemon commits what it has, removes the mount, and ends as after umount(8).
            let start = Instant::now();
            while is_mounted(&volume.root()) {
                assert!(start.elapsed() < LIMIT, "a mount without a connection stays");
                thread::sleep(Duration::from_millis(10));
            }
            image = volume.unmount();
        }
    });
}

#[test]
fn a_mount_is_unmounted_under_load() {
    needs_mount!();
    by_each_transport("a_mount_is_unmounted_under_load", |image, mount| {
        let volume = mount(image);
        let clients = Clients::new(64, &volume.root());
        thread::sleep(Duration::from_millis(300));
        for _ in 0..10 {
            let refused = Command::new("umount").arg(volume.root()).output().unwrap();
            assert!(String::from_utf8_lossy(&refused.stderr).contains("busy") && clients.are_working());
        }
        // They go on until they end by themselves, and with them the mount.
        assert!(Command::new("umount").arg("-l").arg(volume.root()).status().unwrap().success());
        thread::sleep(Duration::from_millis(300));
        assert!(clients.are_working());
        clients.end.store(true, Ordering::Relaxed);
        clients.end();
        volume.unmount();
    });
}

/// dd(1), which is told to say how far it is all the time, and copies all the same; and others that
/// are killed while they wait for a request.
#[test]
fn signals_interrupt_requests_and_lose_nothing() {
    needs_mount!();
    let Some(_offered) = Parameter::set("signals_interrupt_requests_and_lose_nothing", "Y") else { return };
    let volume = by_io_uring(Image::formatted());
    let (from, to) = (volume.path("from"), volume.path("to"));
    let data = tree::pattern(7, 64 << 20);
    fs::write(&from, &data).unwrap();
    let dd = |to: &Path| -> Child {
        let (from, to) = (format!("if={}", from.display()), format!("of={}", to.display()));
        let flags = ["bs=64k", "iflag=direct", "oflag=direct,sync", "status=none"];
        Command::new("dd").args([from, to]).args(flags).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut copying = dd(&to);
    // Until it has its handler, the signal would end it.
    while !to.exists() {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(Duration::from_millis(20));
    let pid = Pid::from_child(&copying);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = copying.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < 4 * LIMIT, "dd hangs");
        let _ = kill_process(pid, Signal::USR1);
        thread::sleep(Duration::from_micros(300));
    };
    assert!(status.success(), "{status}");
    assert!(fs::read(&to).unwrap() == data);
    for round in 0..40 {
        let mut killed = dd(&volume.path(format!("killed{}", round % 4)));
        thread::sleep(Duration::from_millis(5 + round));
        killed.kill().unwrap();
        let start = Instant::now();
        while killed.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < LIMIT, "a killed process hangs in the kernel");
            thread::sleep(Duration::from_millis(1));
        }
    }
    use_it(&volume.root());
}

/// Fragments that wait for others leave entries to requests of the same queue.
#[test]
fn requests_in_the_background_keep_no_queue_from_others() {
    needs_mount!();
    let Some(_offered) = Parameter::set("requests_in_the_background_keep_no_queue_from_others", "Y") else { return };
    waits_for_no_fragments(&by_io_uring(Image::formatted()));
}

/// Direct writes make the kernel forget pages, and it waits for those that are being read: their
/// READ is in the queue of the one processor that all of them use.
#[test]
fn pages_are_invalidated_while_their_reads_are_in_the_same_queue() {
    needs_mount!();
    let Some(_offered) = Parameter::set("pages_are_invalidated_while_their_reads_are_in_the_same_queue", "Y") else { return };
    const LEN: usize = 4 << 20;
    let volume = by_io_uring(Image::formatted());
    let path = volume.path("file");
    fs::write(&path, tree::pattern(3, LEN)).unwrap();
    let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path).unwrap();
    let end = AtomicBool::new(false);
    let stay = || {
        let mut one = CpuSet::new();
        one.set(0);
        sched_setaffinity(None, &one).unwrap();
    };
    let finished = thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|reader| {
                let (file, end, stay) = (open(0), &end, &stay);
                scope.spawn(move || {
                    stay();
                    let mut bytes = vec![0; 64 << 10];
                    for at in (0..).map(|at: usize| (at * 7 + reader) % (LEN >> 16)) {
                        if end.load(Ordering::Relaxed) {
                            return;
                        }
                        file.read_exact_at(&mut bytes, (at << 16) as u64).unwrap();
                    }
                })
            })
            .collect();
        let mapper = scope.spawn(|| {
            stay();
            let file = open(0);
            let mapping = Mapping::shared(&file, LEN).unwrap();
            let mut byte = [0];
            for at in (0..).map(|at: usize| at * 5003 % (LEN - 1)) {
                if end.load(Ordering::Relaxed) {
                    return;
                }
                mapping.read(at, &mut byte);
                if at.is_multiple_of(17) {
                    mapping.write(at, &byte);
                }
            }
        });
        let writer = scope.spawn(|| {
            stay();
            let file = open(libc::O_DIRECT);
            let buffer = Buffer::new(&file, 1 << 20);
            buffer.put(0, &tree::pattern(4, 1 << 20));
            for round in 0..300_usize {
                let offset = (round % 4) << 20;
                assert_eq!(buffer.write(&file, offset as u64, 1 << 20).unwrap().bytes, 1 << 20);
            }
        });
        let start = Instant::now();
        while !writer.is_finished() && start.elapsed() < 3 * LIMIT {
            thread::sleep(Duration::from_millis(10));
        }
        let finished = writer.is_finished();
        end.store(true, Ordering::Relaxed);
        if !finished {
            // The threads end with the connection.
            let _ = kill_process(volume.daemon(), Signal::KILL);
        }
        let ended = readers.into_iter().chain([mapper, writer]).all(|thread| thread.join().is_ok());
        finished && ended
    });
    assert!(finished, "an invalidation waits for ever");
    drop(volume);
}
