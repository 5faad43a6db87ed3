//! What is over: files that were given up, streams that were destroyed, contexts that died.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gpunvme_cuda::Move;
use gpunvme_tests::cuda::{Pinned, own_stream};
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, scratch_dir, tree};
use rustix::mm::{MapFlags, ProtFlags};
use zerocopy::IntoBytes;

use crate::files::{MIB, open};
use crate::library::{Device, OK, gpu, in_use};
use crate::streams::{Gate, Numbers, read, wait};

/// Descriptors of this process that are open files at a path, removed or not.
fn descriptors_of(path: &Path) -> Vec<PathBuf> {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let opened = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    opened.filter(|opened| opened.to_str().is_some_and(|opened| opened.starts_with(path.to_str().unwrap()))).collect()
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}: not after 20 s");
        thread::sleep(Duration::from_millis(10));
    }
}

fn free(volume: &Mounted) -> u64 {
    gpunvme::Mount::open(volume.root()).unwrap().info().unwrap().free
}

#[test]
fn a_file_that_was_given_up_is_not_kept_open() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let (first, other) = (volume.path("first"), volume.path("other"));
        let data = tree::pattern(1, 64 * MIB);
        fs::write(&first, &data).unwrap();
        fs::write(&other, &data[..MIB]).unwrap();
        let (file, stays) = (open(&first), open(&other));
        let (handle, stays) = (cufile.register(&file).unwrap(), cufile.register(&stays).unwrap());
        let (device, stream) = (Device::zeroed(MIB), own_stream(gpu()));
        assert_eq!(cufile.read(handle, device.address(), MIB, 0, 0), MIB as isize);
        let mut numbers = Numbers::new(MIB, 0, 0);
        assert_eq!(read(handle, device.address(), &mut numbers, stream), OK);
        wait(stream);
        cufile.deregister(handle);
        drop(file);
        // The thread that served the stream sees a moment later that the stream has passed.
        until("it is closed", || descriptors_of(&first).is_empty());

        let before = free(&volume);
        fs::remove_file(&first).unwrap();
        until("its space is free", || free(&volume) >= before + 60 * MIB as u64);
        // And the mount is served as before.
        assert_eq!(cufile.read(stays, device.address(), MIB, 0, 0), MIB as isize);
        assert!(device.get(0, MIB) == data[..MIB]);
    });
}

/// Where no directory of the mount can be opened, or not its root.
#[test]
fn files_are_served_whatever_else_of_the_mount_is_within_reach() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, elsewhere) = (Mounted::new(), scratch_dir());
        let data = tree::pattern(2, MIB);
        fs::create_dir_all(volume.path("searched/readable")).unwrap();
        let (deep, alone) = (volume.path("searched/readable/file"), elsewhere.path().join("file"));
        fs::write(&deep, &data).unwrap();
        fs::write(&alone, "").unwrap();
        let _bound = Bound::new(&deep, &alone);
        let as_user = |path: &Path, keeps: usize| {
            let cufile = in_use();
            let memory = vec![0u8; MIB];
            let file = fs::File::open(path).unwrap();
            let handle = cufile.register(&file).unwrap();
            assert_eq!(cufile.read(handle, memory.as_ptr() as u64, MIB, 0, 0), MIB as isize);
            assert!(memory == data);
            cufile.deregister(handle);
            drop(file);
            assert_eq!(descriptors_of(path).len(), keeps, "{}", path.display());
        };
        let folders = [volume.root(), volume.path("searched")];
        let allow = |mode: &str| {
            assert!(Command::new("chmod").arg(mode).args(&folders).status().unwrap().success());
        };
        allow("711");
        // SAFETY: it changes who this process acts as, and nothing of memory.
        unsafe { assert_eq!(libc::seteuid(65534), 0) };
        as_user(&deep, 0);
        // The file is the root of its mount.
        as_user(&alone, 1);
    });
}

/// A file that is mounted on another, until the end of a test that may act as another user then.
struct Bound(PathBuf);

impl Bound {
    fn new(file: &Path, on: &Path) -> Bound {
        let bind = Command::new("mount").arg("--bind").arg(file).arg(on).output().unwrap();
        assert!(bind.status.success(), "{}", text(&bind));
        Bound(on.to_owned())
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // SAFETY: it changes who this process acts as, and nothing of memory.
        unsafe { libc::seteuid(0) };
        // Lazily: where the test failed files may be open.
        let unbind = Command::new("umount").arg("-l").arg(&self.0).output().unwrap();
        assert!(unbind.status.success() || thread::panicking(), "{}", text(&unbind));
    }
}

/// Has a kernel crash, which ends the context of the GPU.
fn crash() {
    let (stream, scatter) = (gpu().stream().unwrap(), gpu().scatter().unwrap());
    let mut table = Pinned::new(gpu(), 4096);
    let nowhere = Move { to: 0, from: table.address() + 2048, len: 16 };
    table.bytes()[..size_of::<Move>()].copy_from_slice(nowhere.as_bytes());
    // SAFETY: what it does wrong is the point.
    unsafe { stream.scatter(&scatter, table.address(), 1) }.unwrap();
    stream.synchronize().unwrap_err();
    std::mem::forget(table); // nothing can be taken back from CUDA any more
}

/// The application learns of it by the next call for the stream, and may free all that belonged to
/// the request.
#[test]
fn nothing_is_stored_after_the_context_of_a_stream_died() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        fs::write(volume.path("file"), tree::pattern(3, MIB)).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(MIB);
        let stream = own_stream(gpu());
        let len = size_of::<Numbers>().next_multiple_of(4096);
        let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: it is new memory.
        let page = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, flags.0, flags.1) }.unwrap();
        let gate = Gate::before(stream);
        // SAFETY: the page has room for it, is aligned, and stays until the context has died.
        let numbers = unsafe {
            page.cast::<Numbers>().write(*Numbers::new(MIB, 0, 0));
            &mut *page.cast::<Numbers>()
        };
        assert_eq!(read(handle, device.address(), numbers, stream), OK);
        crash();
        // SAFETY: this test uses it no more. If another thread does, this process dies.
        unsafe { rustix::mm::munmap(page, len) }.unwrap();
        // The request is over when this returns.
        assert_eq!(cufile.close(), OK);
        std::mem::forget((gate, device));
    });
}

/// CUDA gives the number of a stream that was destroyed to another.
#[test]
fn a_stream_has_the_flags_of_no_other_that_had_its_number() {
    needs_mount!();
    with_software_cuda("streams-reused=1", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(4, MIB);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(MIB);
        let first = own_stream(gpu());
        // SAFETY: it is a stream of the test's, which is not used afterwards.
        unsafe {
            assert_eq!((cufile.cuFileStreamRegister)(first, 7), OK);
            let _entered = gpu().enter().unwrap();
            sys::cuStreamDestroy_v2(first as sys::CUstream).result().unwrap();
        }
        let second = own_stream(gpu());
        assert_eq!(first, second, "the number is given again");
        // Where nothing is fixed the offset that counts is that when the stream comes to it.
        let gate = Gate::before(second);
        let mut numbers = Numbers::new(4096, 0, 0);
        assert_eq!(read(handle, device.address(), &mut numbers, second), OK);
        numbers.file_offset = 8192;
        gate.open();
        wait(second);
        assert_eq!(numbers.done, 4096);
        assert!(device.get(0, 4096) == data[8192..][..4096]);
        // SAFETY: it may be given up whatever became of it.
        assert_eq!(unsafe { (cufile.cuFileStreamDeregister)(first) }, OK);
    });
}
