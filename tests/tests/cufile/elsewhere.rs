//! Files that lie elsewhere: NVIDIA's library, for which another stands in, or pread and pwrite.

use std::ffi::CString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpunvme_tests::cuda::own_stream;
use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::software_cuda::{self, with_libcuda, with_software_cuda};
use gpunvme_tests::{needs_mount, scratch_dir, tree, with_descriptors};
use tempfile::TempDir;

use crate::batches::{self, Batch, LEN};
use crate::files::open;
use crate::library::{BatchEvent, BatchRequest, COMPLETE, Device, OK, gpu, in_use, library, path};
use crate::streams::{self, Numbers};

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

/// The folder of the stand-in, and of the file that it writes its calls to: made by the process
/// that is not the test's own yet.
fn with_stand_in() -> (TempDir, [(&'static str, String); 2]) {
    let folder = scratch_dir();
    if std::env::var_os("FAKE_LOG").is_none() {
        stand_in(folder.path());
    }
    let path = |name| folder.path().join(name).to_str().unwrap().to_owned();
    let environment = [("GPUNVME_CUFILE_REAL", path("libcufile.so.0")), ("FAKE_LOG", path("log"))];
    (folder, environment)
}

/// What the stand-in was asked for since this was asked last.
fn calls() -> Vec<String> {
    let log = PathBuf::from(std::env::var_os("FAKE_LOG").unwrap());
    let calls = fs::read_to_string(&log).unwrap_or_default();
    let _ = fs::remove_file(log); // nothing was asked for
    calls.lines().map(str::to_owned).collect()
}

/// Has the library's symbols come before those of what is loaded afterwards, as `LD_PRELOAD` does:
/// a call by name from within NVIDIA's library would reach this one instead of its own.
fn before_all() {
    let ours = CString::new(path().to_str().unwrap()).unwrap();
    // SAFETY: the library is loaded already; its symbols become global.
    let handle = unsafe { libc::dlopen(ours.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    // SAFETY: the name ends in a zero byte.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cuFileDriverOpen".as_ptr()) };
    assert_eq!(found as usize, in_use().cuFileDriverOpen as usize, "the first of its name, of {handle:?}");
}

#[test]
fn nvidias_library_is_given_what_is_not_ours_and_nothing_else() {
    needs_mount!();
    let (_folder, environment) = with_stand_in();
    with_libcuda(software_cuda::folder(), &environment.each_ref().map(|(name, value)| (*name, value.as_str())), || {
        let (volume, elsewhere, cufile) = (Mounted::new(), scratch_dir(), in_use());
        before_all();
        let data = tree::pattern(1, 50_000);
        let (ours, theirs) = (volume.path("file"), elsewhere.path().join("file"));
        fs::write(&ours, &data).unwrap();
        fs::write(&theirs, &data).unwrap();
        let memory = vec![0u8; 50_000];
        let at = memory.as_ptr() as u64;
        // SAFETY: the memory is the test's.
        unsafe { assert_eq!((cufile.cuFileBufRegister)(at, 50_000, 0), OK) };

        let ours_open = open(&ours);
        let handle = cufile.register(&ours_open).unwrap();
        assert_eq!(cufile.read(handle, at, 50_000, 0, 0), 50_000);
        assert_eq!(calls(), [""; 0], "it was not even loaded for a file of ours");

        let theirs_open = open(&theirs);
        let other = cufile.register(&theirs_open).unwrap();
        assert_eq!(cufile.read(other, at, 100, 7, 3), 100);
        assert!(memory[3..103] == data[7..107]);
        assert_eq!(cufile.write(other, at, 200, 40_000, 20_000), 200);
        assert!(fs::read(&theirs).unwrap()[40_000..40_200] == data[20_000..20_200]);
        // Memory that is registered from now on it is told of at once.
        let more = [0u8; 64];
        // SAFETY: the memory is the test's.
        unsafe {
            assert_eq!((cufile.cuFileBufRegister)(more.as_ptr() as u64, 64, 0), OK);
            assert_eq!((cufile.cuFileBufDeregister)(more.as_ptr() as u64), OK);
        }
        cufile.deregister(other);
        assert_eq!(cufile.close(), OK);
        // It called its own cuFileDriverOpen, and was told of the memory that there was.
        // What is read and written is named by the buffers that it lies in.
        let moved = ["read inside", "write inside"];
        let expected = [&["buffer", "register", "open"][..], &moved, &["buffer", "no buffer", "deregister", "close"]].concat();
        assert_eq!(calls(), expected);
    });
}

/// A process that had no descriptor left when the library was first looked for.
#[test]
fn nvidias_library_is_looked_for_again_where_descriptors_were_short() {
    let (_folder, environment) = with_stand_in();
    with_libcuda(software_cuda::folder(), &environment.each_ref().map(|(name, value)| (*name, value.as_str())), || {
        let (elsewhere, cufile) = (scratch_dir(), in_use());
        library(); // which is built and loaded while there are descriptors
        let files = ["first", "second"].map(|name| {
            fs::write(elsewhere.path().join(name), b"bytes").unwrap();
            fs::File::open(elsewhere.path().join(name)).unwrap()
        });
        // Two for the file, none for the library.
        with_descriptors(2, || cufile.register(&files[0])).unwrap();
        assert_eq!(calls(), [""; 0]);
        cufile.register(&files[1]).unwrap();
        assert_eq!(calls(), ["register", "open"]);
    });
}

#[test]
fn nvidias_library_does_its_part_of_batches_and_streams() {
    needs_mount!();
    let (_folder, environment) = with_stand_in();
    with_libcuda(software_cuda::folder(), &environment.each_ref().map(|(name, value)| (*name, value.as_str())), || {
        let (volume, elsewhere, cufile) = (Mounted::new(), scratch_dir(), in_use());
        before_all();
        let data = tree::pattern(3, 4 * LEN);
        let places = [volume.path("file"), elsewhere.path().join("file")];
        let files = places.each_ref().map(|path| {
            fs::write(path, &data).unwrap();
            open(path)
        });
        // It is told of a stream that it was not there for.
        let stream = own_stream(gpu());
        // SAFETY: it is a stream of the test's.
        unsafe { assert_eq!((cufile.cuFileStreamRegister)(stream, 7), OK) };
        let [ours, theirs] = files.each_ref().map(|file| cufile.register(file).unwrap());
        assert_eq!(calls(), ["stream 7", "register", "open"]);

        // One batch of both files: reads of each, and a write.
        let memory = vec![0u8; 4 * LEN];
        let at = memory.as_ptr() as u64;
        let requests = [
            batches::read(ours, at, 0, 0, 1),
            batches::read(theirs, at, LEN as i64, LEN as i64, 2),
            BatchRequest { opcode: 1, ..batches::read(theirs, data.as_ptr() as u64, 3 * LEN as i64, 0, 3) },
        ];
        let batch = Batch::new(8);
        assert_eq!(batch.submit(&requests), OK);
        let mut ended = batch.take(3, 8, None);
        ended.sort_by_key(|event| event.cookie);
        let event = |cookie| BatchEvent { cookie, status: COMPLETE, result: LEN as isize };
        assert_eq!(ended, [event(1), event(2), event(3)]);
        assert!(memory[..2 * LEN] == data[..2 * LEN] && fs::read(&places[1]).unwrap()[3 * LEN..] == data[..LEN]);
        let mut asked = calls();
        asked.sort();
        assert_eq!(asked, ["read inside", "write"]);

        // Its own asynchronous requests call its reads and writes by name.
        let (mut reads, mut writes) = (Numbers::new(100, 10, 5), Numbers::new(200, 20, 7));
        assert_eq!(streams::read(theirs, at, &mut reads, stream), OK);
        assert_eq!(streams::write(theirs, at, &mut writes, stream), OK);
        assert_eq!((reads.done, writes.done), (100, 200));
        assert!(memory[5..105] == data[10..110] && fs::read(&places[1]).unwrap()[20..220] == memory[7..207]);
        // SAFETY: as above.
        unsafe { assert_eq!((cufile.cuFileStreamDeregister)(stream), OK) };
        assert_eq!(calls(), ["read async", "read inside", "write async", "write inside", "no stream"]);
        drop(batch);
        assert_eq!(cufile.close(), OK);
        assert_eq!(calls(), ["deregister", "close"]);
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
