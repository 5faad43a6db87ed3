//! What the kernel's switches for the whole machine change: tests that no other one may run beside.

use std::fs;
use std::process::{Command, Stdio};

use gpunvme_tests::mounted::{Image, text};
use gpunvme_tests::{needs_mount, programs, report_skipped};

/// A file of the kernel's with a value, until this is dropped.
struct Switch {
    file: &'static str,
    before: String,
}

impl Switch {
    /// None where there is no such file, or it cannot be written here.
    fn set(file: &'static str, value: &str) -> Option<Switch> {
        let before = fs::read_to_string(file).ok()?;
        fs::write(file, value).ok()?;
        Some(Switch { file, before })
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        let _ = fs::write(self.file, &self.before);
    }
}

/// An image file cannot be used then, which the error says; a volume on a controller of our own
/// driver can, by `/dev/fuse`.
#[test]
fn where_the_administrator_forbids_io_uring_the_mount_is_classic_and_says_so() {
    needs_mount!();
    let image = Image::formatted();
    let offered = Switch::set("/sys/module/fuse/parameters/enable_uring", "Y");
    let forbidden = Switch::set("/proc/sys/kernel/io_uring_disabled", "2");
    let (Some(_offered), Some(_forbidden)) = (offered, forbidden) else {
        let test = "where_the_administrator_forbids_io_uring_the_mount_is_classic_and_says_so";
        return report_skipped(test, "FUSE over io_uring or kernel.io_uring_disabled cannot be switched here");
    };
    let dir = image.mount_point();
    fs::create_dir_all(&dir).unwrap();
    let mount = |device: &str| {
        let mut mount = programs::command("mount.gpunvme");
        mount.arg(device).arg(&dir).args(["-o", "transport=io_uring"]).stdin(Stdio::null()).output().unwrap()
    };
    let path = image.path();
    let refused = mount(path.to_str().unwrap());
    assert!(!refused.status.success() && text(&refused).contains("kernel.io_uring_disabled"), "{}", text(&refused));
    let mounted = mount(&format!("sim:{}", path.display()));
    assert!(mounted.status.success(), "{}", text(&mounted));
    let told = programs::command("gpunvme").args(["info", "--json"]).arg(&dir).output().unwrap();
    let info: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    fs::write(dir.join("file"), [7; 100_000]).unwrap();
    let read = fs::read(dir.join("file")).unwrap();
    assert!(Command::new("umount").arg(&dir).status().unwrap().success());
    assert_eq!((&info["transport"], read), (&"classic".into(), vec![7; 100_000]));
    let why = info["transport_refusal"].as_str().unwrap();
    assert!(why.contains("the system refuses io_uring"), "{why}");
}
