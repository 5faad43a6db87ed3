//! `gpunvme log`: what the daemon logs changes while it serves, for administrators alone.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::{Image, is_mounted, text};
use gpunvme_tests::{needs_mount, programs};

/// A daemon in the foreground, and its log.
struct Foreground {
    image: Image,
    daemon: Child,
}

impl Foreground {
    fn new() -> Foreground {
        let image = Image::formatted();
        let mut mount = programs::command("mount.gpunvme");
        mount.arg(image.path()).arg(image.mount_point()).args(["-o", "foreground,log=warn"]).env_remove("RUST_LOG");
        let log = File::create(image.path().with_file_name("log")).unwrap();
        fs::create_dir_all(image.mount_point()).unwrap();
        let foreground = Foreground { daemon: mount.stderr(log).spawn().unwrap(), image };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_mounted(&foreground.image.mount_point()) {
            assert!(Instant::now() < deadline, "no mount: {}", foreground.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        foreground
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.image.path().with_file_name("log")).unwrap();
        assert!(!log.contains('\x1b'), "a file shows no colours: {log}");
        log
    }

    /// Waits for a line of the log that has all of these words.
    fn logs(&self, words: &[&str]) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.log().lines().any(|line| words.iter().all(|word| line.contains(word))) {
            assert!(Instant::now() < deadline, "{words:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.image.mount_point()).status();
        let _ = self.daemon.wait();
    }
}

fn log(dir: &Path, filter: &[&str]) -> Output {
    programs::command("gpunvme").arg("log").arg(dir).args(filter).output().unwrap()
}

#[test]
fn the_log_tells_each_request_and_transfer_while_it_is_asked_to() {
    needs_mount!();
    let mount = Foreground::new();
    let dir = mount.image.mount_point();
    assert_eq!(log(&dir, &[]).stdout, b"log         warn\n");
    fs::write(dir.join("quiet"), "not told").unwrap();
    let before = mount.log();
    assert!(!before.contains("a request was answered"), "{before}");

    let changed = log(&dir, &["info,gpunvme_fuse=trace,gpunvme_gpupath=trace"]);
    assert!(changed.status.success() && text(&changed).contains("warn"), "{}", text(&changed));
    fs::write(dir.join("told"), [7; 70_000]).unwrap();
    mount.logs(&["a request was answered", "operation=\"write\"", "bytes=70000", "error=0", "took="]);
    assert!(fs::symlink_metadata(dir.join("missing")).is_err());
    mount.logs(&["operation=\"lookup\"", "user=0"]);
    let read = programs::command("gpunvme").arg("read").arg(dir.join("told")).output().unwrap();
    assert!(read.status.success(), "{}", text(&read));
    mount.logs(&["a transfer ended", "command=Read", "ring=false", "bytes=70000", "host: "]);

    // Back again: the change is the last that is told.
    assert!(log(&dir, &["warn"]).status.success());
    mount.logs(&["the log's filter becomes \"warn\""]);
    let lines = || mount.log().lines().filter(|line| line.contains("operation=\"mkdir\"")).count();
    fs::create_dir(dir.join("a")).unwrap();
    fs::create_dir(dir.join("b")).unwrap();
    assert_eq!(lines(), 0);
}

#[test]
fn only_administrators_see_and_change_the_filter() {
    needs_mount!();
    let mount = Foreground::new();
    let dir = mount.image.mount_point();
    for filter in [&[][..], &["trace"]] {
        let mut user = programs::command("gpunvme");
        let user = user.arg("log").arg(&dir).args(filter).uid(65534).gid(65534).output().unwrap();
        let (code, told) = (user.status.code(), text(&user));
        assert!(code == Some(1) && user.stdout.is_empty() && told.contains("operation not permitted"), "{told}");
        // Root of a container without the right to mount.
        let mut bounded = Command::new("setpriv");
        bounded.arg("--bounding-set=-sys_admin").arg(programs::path("gpunvme")).arg("log").arg(&dir).args(filter);
        let bounded = bounded.output().unwrap();
        assert!(bounded.status.code() == Some(1) && text(&bounded).contains("operation not permitted"), "{}", text(&bounded));
    }
    let too_long = "x".repeat(256);
    for wrong in ["info,gpunvme_fuse=loud", "", &too_long, "\u{1}="] {
        let refused = log(&dir, &[wrong]);
        assert!(refused.status.code() == Some(1) && text(&refused).contains("syntax"), "{wrong}: {}", text(&refused));
    }
    let json = programs::command("gpunvme").args(["--json", "log"]).arg(&dir).output().unwrap();
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&json.stdout).unwrap(), serde_json::json!({ "filter": "warn" }));
}
