//! Files that lie elsewhere: NVIDIA's library, for which another stands in, or pread and pwrite.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::software_cuda::{self, with_libcuda, with_software_cuda};
use gpunvme_tests::{needs_mount, scratch_dir, tree};

use crate::files::open;
use crate::library::{Device, in_use};

/// Compiles a C file of the tests.
pub fn compile(source: &str, output: &Path, options: &[&str]) {
    let built = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(output)
        .arg(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c")).join(source))
        .args(options)
        .output()
        .expect("cc runs");
    assert!(built.status.success(), "{}", text(&built));
}

/// A library that stands in for NVIDIA's, under its name.
pub fn stand_in(folder: &Path) -> PathBuf {
    let path = folder.join("libcufile.so.0");
    compile("cufile_fake.c", &path, &["-shared", "-fPIC", "-Wl,-soname,libcufile.so.0"]);
    path
}

#[test]
fn nvidias_library_is_given_what_is_not_ours_and_nothing_else() {
    needs_mount!();
    let folder = scratch_dir();
    let (log, fake) = (folder.path().join("log"), folder.path().join("libcufile.so.0"));
    if std::env::var_os("FAKE_LOG").is_none() {
        stand_in(folder.path());
    }
    let environment = [("GPUNVME_CUFILE_REAL", fake.to_str().unwrap()), ("FAKE_LOG", log.to_str().unwrap())];
    with_libcuda(software_cuda::folder(), &environment, || {
        let log = PathBuf::from(std::env::var_os("FAKE_LOG").unwrap());
        let (volume, elsewhere, cufile) = (Mounted::new(), scratch_dir(), in_use());
        let data = tree::pattern(1, 50_000);
        let (ours, theirs) = (volume.path("file"), elsewhere.path().join("file"));
        fs::write(&ours, &data).unwrap();
        fs::write(&theirs, &data).unwrap();
        let memory = vec![0u8; 50_000];
        let at = memory.as_ptr() as u64;
        // SAFETY: the memory is the test's.
        unsafe { assert_eq!((cufile.cuFileBufRegister)(at, 50_000, 0), crate::library::OK) };

        let ours_open = open(&ours);
        let handle = cufile.register(&ours_open).unwrap();
        assert_eq!(cufile.read(handle, at, 50_000, 0, 0), 50_000);
        assert!(!log.exists(), "it was not even loaded for a file of ours");

        let theirs_open = fs::File::open(&theirs).unwrap();
        let other = cufile.register(&theirs_open).unwrap();
        assert_eq!(cufile.read(other, at, 100, 7, 3), 100);
        assert!(memory[3..103] == data[7..107]);
        cufile.deregister(other);
        assert_eq!(cufile.close(), crate::library::OK);
        // It called its own cuFileDriverOpen, and was told of the memory that there was.
        let calls = fs::read_to_string(&log).unwrap();
        assert_eq!(calls.lines().collect::<Vec<_>>(), ["buffer", "register", "open", "read", "deregister", "close"]);
    });
}

#[test]
fn without_nvidias_library_files_elsewhere_are_read_by_the_processor() {
    needs_mount!();
    with_software_cuda("", || {
        // SAFETY: no other thread of this process runs yet that reads the environment.
        unsafe { std::env::set_var("GPUNVME_CUFILE_REAL", "off") };
        let (elsewhere, cufile) = (scratch_dir(), in_use());
        let data = tree::pattern(2, 3_000_001);
        let path = elsewhere.path().join("file");
        fs::write(&path, &data).unwrap();
        let file = open(&path);
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(data.len());
        // Of no alignment, though the file was opened with O_DIRECT.
        assert_eq!(cufile.read(handle, device.address(), data.len(), 0, 0), data.len() as isize);
        assert!(device.get(0, data.len()) == data);
        assert_eq!(cufile.write(handle, device.address(), 1001, 17, 5), 1001);
        assert!(fs::read(&path).unwrap()[17..1018] == data[5..1006]);
        assert_eq!(cufile.read(handle, device.address(), 100, 3_000_000, 0), 1);
    });
}
