//! A device that fails under a mounted volume: the operation that met the failure gets an error,
//! nothing else is lost, and the daemon lives on.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::process::Command;

use gpunvme::{Mount, Operation, Ring};
use gpunvme_tests::direct::{Buffer, extents, info};
use gpunvme_tests::mounted::{Image, Mounted, is_mounted};
use gpunvme_tests::rings::{bytes_of, shared, wait_for};
use gpunvme_tests::{needs_mount, tree};
use rustix::process::Signal;

#[test]
fn a_device_that_cannot_read_gives_eio_and_recovers() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(41, 8 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    let volume = volume.remount();
    // Mounted again, so that nothing of the file is cached. Then the device ends before it.
    let file = File::open(volume.path("file")).unwrap();
    let lost = extents(&file).iter().map(|extent| extent.device_offset).min().unwrap();
    let image = volume.image().path();
    let whole = image.with_file_name("whole");
    let status = Command::new("cp").args(["--sparse=always"]).args([&image, &whole]).status().unwrap();
    assert!(status.success());
    let len = fs::metadata(&image).unwrap().len();
    let device = OpenOptions::new().write(true).open(&image).unwrap();
    device.set_len(lost).unwrap();

    let mount = Mount::open(volume.root()).unwrap();
    let (memory, mut ring) = (shared(&mount, 4096), Ring::new(&mount, 8).unwrap());
    let attached = ring.attach(&gpunvme::File::open(volume.path("file")).unwrap()).unwrap();
    let mut read_by_ring = || {
        ring.push(&Operation::read(&attached, 1 << 20, &memory, 0, 4096)).unwrap();
        wait_for(&mut ring, 1).remove(0).result
    };
    // The ring does not yet know where the file lies, and then does.
    for _ in 0..40 {
        let error = read_by_ring().unwrap_err();
        assert_eq!(error.errno().raw_os_error(), libc::EIO, "a read that the device fails is told as any other");
    }
    let buffer = Buffer::new(&file, 8 << 20);
    let error = fs::read(volume.path("file")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    match buffer.read(&file, 0, 8 << 20) {
        Ok(done) => assert_eq!((done.bytes < 8 << 20, done.status), (true, libc::EIO)),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO)),
    }
    info(&file);

    // The device is whole again: so is the file.
    device.set_len(len).unwrap();
    let status = Command::new("cp").args(["--no-target-directory"]).args([&whole, &image]).status().unwrap();
    assert!(status.success());
    assert!(fs::read(volume.path("file")).unwrap() == data);
    assert_eq!(buffer.read(&file, 0, 8 << 20).unwrap().bytes, 8 << 20);
    assert!(buffer.get(0, 8 << 20) == data);
    assert_eq!(read_by_ring().unwrap().bytes(), 4096);
    assert!(bytes_of(&memory, 0, 4096) == data[1 << 20..(1 << 20) + 4096]);
}

/// A small tmpfs. A sparse image on it is a device that says that it is larger than what can be
/// written to it.
pub struct Small(pub tempfile::TempDir);

impl Small {
    pub fn new(options: &str) -> Small {
        let small = Small(gpunvme_tests::scratch_dir());
        small.mount(options);
        small
    }

    fn mount(&self, options: &str) {
        let mut mount = Command::new("mount");
        assert!(mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(self.0.path()).status().unwrap().success());
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_device_that_cannot_write_costs_nothing_that_was_synced() {
    needs_mount!();
    let outer = Small::new("size=128m");
    let image = Image::blank_in(outer.0.path(), 1 << 30);
    assert!(image.mkfs(&[]).status.success());
    let volume = image.mount();
    let kept = tree::pattern(42, 10 << 20);
    fs::write(volume.path("kept"), &kept).unwrap();
    File::open(volume.path("kept")).unwrap().sync_all().unwrap();
    File::open(volume.root()).unwrap().sync_all().unwrap();

    let mut file = File::create(volume.path("too much")).unwrap();
    let chunk = tree::pattern(43, 1 << 20);
    let result = (0..300).try_for_each(|_| file.write_all(&chunk)).and_then(|()| file.sync_all());
    let error = result.expect_err("300 MiB do not fit 128");
    assert!([libc::EIO, libc::ENOSPC].contains(&error.raw_os_error().unwrap()), "{error}");
    assert!(fs::read(volume.path("kept")).unwrap() == kept);
    assert!(is_mounted(&volume.root()));
    drop(file);

    let (_, image) = volume.signal(Signal::TERM);
    outer.mount("remount,size=2g");
    let volume = image.mount();
    assert!(fs::read(volume.path("kept")).unwrap() == kept);
    fs::write(volume.path("new"), &kept).unwrap();
    assert!(fs::read(volume.path("new")).unwrap() == kept);
    drop(volume.unmount());
}
