//! The io_uring backend on a kernel block device: a loop device, which root can make anywhere.
//! Other users get a message that these tests did not run.
use std::fs::File;
use std::process::Command;
use std::sync::Arc;

use gpunvme_blockdev::{BlockDevice, Error, Io, OpenMode, Region, Request, open};

const LEN: u64 = 32 << 20;

struct LoopDevice {
    name: String,
    _directory: tempfile::TempDir,
}

impl LoopDevice {
    fn new() -> Option<Self> {
        Self::with_options(env!("CARGO_TARGET_TMPDIR"), &[])
    }

    fn with_options(place: &str, options: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: making a loop device needs root");
            return None;
        }
        let directory = tempfile::tempdir_in(place).expect("a temporary directory");
        let image = directory.path().join("image");
        File::create(&image).expect("an image").set_len(LEN).expect("its length");
        let output = Command::new("losetup").args(["--find", "--show"]).args(options).arg(&image).output().expect("losetup runs");
        if !output.status.success() {
            eprintln!("SKIPPED: no loop device to be had here: {}", String::from_utf8_lossy(&output.stderr).trim());
            return None;
        }
        let name = String::from_utf8(output.stdout).expect("a path").trim().to_owned();
        Some(Self { name, _directory: directory })
    }

    fn open(&self, mode: OpenMode) -> Arc<dyn BlockDevice> {
        open(&self.name, mode).expect("the loop device opens")
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let status = Command::new("losetup").args(["--detach", &self.name]).status();
        assert!(status.is_ok_and(|status| status.success()) || std::thread::panicking(), "{} stays attached", self.name);
    }
}

fn region_with(byte: u8, len: usize) -> Arc<Region> {
    let region = Region::allocate(len).expect("memory");
    region.write_at(0, &vec![byte; len]).expect("inside");
    region
}

fn read(io: &Io, offset: u64, len: usize) -> Vec<u8> {
    let region = Region::allocate(len).expect("memory");
    io.run(vec![Request::read(offset, vec![region.span(0..len)])]).expect("read");
    let mut bytes = vec![0; len];
    region.read_at(0, &mut bytes).expect("inside");
    bytes
}

fn every_command_works(place: &str, logical_block: u32) {
    let options = ["--sector-size", &logical_block.to_string()];
    let Some(device) = LoopDevice::with_options(place, &options) else { return };
    let device = device.open(OpenMode::ReadWrite);
    let geometry = device.geometry().clone();
    assert_eq!((geometry.len.get(), geometry.logical_block), (LEN, logical_block));
    let io = Io::threaded(device, 2).expect("io");
    let block = logical_block as usize;
    let write = |n: u64| Request::write(n * block as u64, vec![region_with(n as u8, block).span(0..block)], n.is_multiple_of(2));
    io.run((0..64).map(write).collect::<Vec<_>>()).expect("written");
    io.run(vec![Request::flush()]).expect("flushed");
    let expected: Vec<u8> = (0..64).flat_map(|n| vec![n; block]).collect();
    assert!(read(&io, 0, 64 * block) == expected);
    let misaligned = io.run(vec![Request::read(u64::from(logical_block) / 2, vec![region_with(0, block).span(0..block)])]);
    assert!(matches!(misaligned, Err(Error::Alignment { required, .. }) if required == logical_block));
    assert!(geometry.write_zeroes && geometry.discard, "loop devices have both");
    io.run(vec![Request::write_zeroes(0, 8 * block as u64)]).expect("zeroed");
    io.run(vec![Request::discard(8 * block as u64, 8 * block as u64)]).expect("discarded");
    assert!(read(&io, 0, 8 * block) == vec![0; 8 * block]);
    assert!(read(&io, 16 * block as u64, 48 * block) == expected[16 * block..], "what lies behind is as it was");
}

#[test]
fn every_command_works_in_blocks_of_both_sizes() {
    for logical_block in [512, 4096] {
        every_command_works(env!("CARGO_TARGET_TMPDIR"), logical_block);
        // Over a tmpfs, zeroing a range fails inside, whereupon the kernel takes the command back
        // from the device.
        every_command_works("/dev/shm", logical_block);
    }
}

#[test]
fn flushes_and_durable_writes_reach_the_device_and_plain_writes_cause_none() {
    let Some(device) = LoopDevice::new() else { return };
    let flushes = || -> u64 {
        // Documentation/block/stat.rst: the 16th number counts the flushes that completed.
        let path = device.name.replace("/dev", "/sys/block") + "/stat";
        let stat = std::fs::read_to_string(path).expect("the device has statistics");
        stat.split_whitespace().nth(15).expect("16 numbers").parse().expect("a number")
    };
    let io = Io::inline(device.open(OpenMode::ReadWrite)).expect("io");
    let caused = |request: Request| {
        let before = flushes();
        io.run(vec![request]).expect("done");
        flushes() - before
    };
    let write = |fua| Request::write(0, vec![region_with(1, 4096).span(0..4096)], fua);
    assert_eq!(caused(write(false)), 0);
    assert_eq!(caused(Request::flush()), 1);
    assert_eq!(caused(write(true)), 1, "a loop device has no FUA: the kernel flushes behind the write");
}

/// What is beyond them would each have a thread of the kernel that sleeps until one is free.
#[test]
fn a_queue_gives_the_kernel_as_many_commands_as_it_has_requests() {
    let Some(device) = LoopDevice::new() else { return };
    let requests = device.name.replace("/dev", "/sys/block") + "/queue/nr_requests";
    let had: u32 = std::fs::read_to_string(&requests).expect("the device has requests").trim().parse().expect("a number");
    assert_eq!(device.open(OpenMode::ReadOnly).geometry().queue_depth, had.min(256));
    std::fs::write(&requests, "16").expect("fewer are possible");
    let device = device.open(OpenMode::ReadWrite);
    assert_eq!(device.geometry().queue_depth, 16);
    let io = Io::threaded(device, 1).expect("io");
    let region = region_with(7, 64 * 4096);
    let block = |n: usize| region.span(n * 4096..(n + 1) * 4096);
    io.run((0..64).map(|n| Request::write(n as u64 * 4096, vec![block(n)], false)).collect::<Vec<_>>()).expect("written");
    assert!(read(&io, 0, 64 * 4096) == vec![7; 64 * 4096]);
}

#[test]
fn a_block_device_has_one_user() {
    let Some(device) = LoopDevice::new() else { return };
    let busy = |mode| matches!(open(&device.name, mode), Err(Error::Busy { .. }));
    for mode in [OpenMode::ReadWrite, OpenMode::ReadOnly] {
        let user = device.open(mode);
        let queue = user.open_queue().expect("a queue");
        assert!(busy(OpenMode::ReadWrite) && busy(OpenMode::ReadOnly));
        drop(user);
        assert!(busy(OpenMode::ReadWrite), "the queue still holds it");
        drop(queue);
    }
    assert!(!device.open(OpenMode::ReadWrite).geometry().read_only);
}

#[test]
fn a_mounted_block_device_is_in_use() {
    let Some(device) = LoopDevice::new() else { return };
    let made = Command::new("mkfs.ext4").args(["-q", &device.name]).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: no mkfs.ext4 here");
        return;
    }
    let directory = tempfile::tempdir().expect("a mount point");
    let mounted = Command::new("mount").arg(&device.name).arg(directory.path()).status().expect("mount runs");
    if !mounted.success() {
        eprintln!("SKIPPED: mounting is not allowed here");
        return;
    }
    let result = open(&device.name, OpenMode::ReadWrite).err();
    let unmounted = Command::new("umount").arg(directory.path()).status().expect("umount runs");
    assert!(unmounted.success());
    assert!(matches!(result, Some(Error::Busy { .. })), "{result:?}");
}

#[test]
fn a_write_protected_device_says_so() {
    let Some(device) = LoopDevice::with_options(env!("CARGO_TARGET_TMPDIR"), &["--read-only"]) else { return };
    let result = open(&device.name, OpenMode::ReadWrite).err();
    assert!(matches!(result, Some(Error::ReadOnly { .. })), "{result:?}");
    assert!(device.open(OpenMode::ReadOnly).geometry().read_only);
}
