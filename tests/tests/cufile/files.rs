//! Files, buffers and requests that are waited for.

use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;

use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, tree};

use crate::library::{Device, OK, Status, in_use, refused};

pub const MIB: usize = 1 << 20;

/// Open for both, as programs open files for cuFile.
pub fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

/// What the daemon moved for reads: by routes of GPU memory, and all.
fn moved(volume: &Mounted) -> (u64, u64) {
    let stats = gpunvme::Mount::open(volume.root()).unwrap().stats().unwrap();
    (stats.read.total(), stats.write.total())
}

#[test]
fn bytes_arrive_whatever_their_size_and_place() {
    needs_mount!();
    with_software_cuda("", || {
        // SAFETY: no other thread of this process looks at its environment yet.
        unsafe { std::env::set_var("GPUNVME_CUFILE_CACHING", "never") };
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(1, 2 * MIB);
        fs::write(volume.path("file"), &data).unwrap();
        let (file, copy) = (open(&volume.path("file")), open(&volume.path("copy")));
        let (from, to) = (cufile.register(&file).unwrap(), cufile.register(&copy).unwrap());
        let device = Device::zeroed(MIB);
        for (at, len) in [1usize, 7, 511, 512, 4095, 4096, 4097, 40_960, 300_001, MIB - 64].into_iter().enumerate() {
            let (offset, inside) = ((at * 1237) as i64, at as i64);
            let expected = &data[offset as usize..offset as usize + len];
            // Registered every other time.
            let registers = at % 2 == 0;
            // SAFETY: the memory is the test's.
            let register = || unsafe { (cufile.cuFileBufRegister)(device.address(), MIB, 0) };
            assert!(!registers || register() == OK);
            assert_eq!(cufile.read(from, device.address(), len, offset, inside), len as isize);
            assert!(device.get(at, len) == expected, "{len} bytes");
            assert_eq!(cufile.write(to, device.address(), len, offset, inside), len as isize);
            assert!(fs::read(volume.path("copy")).unwrap()[offset as usize..] == *expected, "{len} bytes");
            copy.set_len(0).unwrap();
            // SAFETY: as above.
            assert!(!registers || unsafe { (cufile.cuFileBufDeregister)(device.address()) } == OK);
        }
        let (read, written) = moved(&volume);
        assert!(read > MIB as u64 && written > MIB as u64, "the direct path moved {read} and {written} bytes");
    });
}

#[test]
fn a_read_ends_with_the_file() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        fs::write(volume.path("file"), tree::pattern(2, 5000)).unwrap();
        let file = open(&volume.path("file"));
        let (handle, device) = (cufile.register(&file).unwrap(), Device::zeroed(8192));
        let short = [(0, 8192, 5000), (4990, 100, 10), (5000, 100, 0), (9000, 1, 0)];
        for (offset, len, arrives) in short {
            assert_eq!(cufile.read(handle, device.address(), len, offset, 0), arrives);
        }
    });
}

#[test]
fn ordinary_memory_is_served_as_well() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(3, 100_001);
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        assert_eq!(cufile.write(handle, data.as_ptr() as u64, data.len(), 0, 0), data.len() as isize);
        let back = vec![0u8; data.len()];
        // SAFETY: the memory is the test's.
        unsafe { assert_eq!((cufile.cuFileBufRegister)(back.as_ptr() as u64, back.len(), 0), OK) };
        assert_eq!(cufile.read(handle, back.as_ptr() as u64, back.len() - 5, 5, 5), data.len() as isize - 5);
        assert!(back[5..] == data[5..]);
    });
}

#[test]
fn errors_are_those_of_cufile() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let path = volume.path("file");
        fs::write(&path, tree::pattern(4, 5000)).unwrap();
        let device = Device::zeroed(4096);
        let at = device.address();
        // SAFETY: what is no memory of the test's is to be refused.
        let buffer = |address, len| unsafe { (cufile.cuFileBufRegister)(address, len, 0) };
        // SAFETY: as above.
        let no_buffer = |address| unsafe { (cufile.cuFileBufDeregister)(address) };

        assert_eq!(cufile.close(), refused(5001));
        assert_eq!(cufile.read(0x1234, at, 1, 0, 0), -5001);
        let file = open(&path);
        let handle = cufile.register(&file).unwrap();
        assert_eq!(cufile.register(&file), Err(refused(5028)));
        // Also by many threads at once.
        let other = open(&path);
        let taken = thread::scope(|scope| {
            let threads: Vec<_> = (0..32).map(|_| scope.spawn(|| cufile.register(&other))).collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap().ok()).collect::<Vec<_>>()
        });
        assert_eq!(taken.len(), 1);
        cufile.deregister(taken[0]);
        assert_eq!(cufile.register_number(-1), Err(refused(5022)));
        assert_eq!(cufile.register_number(9999), Err(refused(5022)));
        assert_eq!(cufile.register(&File::open(volume.root()).unwrap()), Err(refused(5018)));
        for unknown in [0, 0x1234, handle + 16] {
            assert_eq!(cufile.read(unknown, at, 1, 0, 0), -5027);
        }
        for wrong in [cufile.read(handle, at, 1, -1, 0), cufile.read(handle, at, 1, 0, -1), cufile.read(handle, 0, 1, 0, 0)] {
            assert_eq!(wrong, -5022);
        }
        // Memory that reaches beyond what was allocated, and none at all.
        assert_eq!(cufile.read(handle, at, 1 << 20, 0, 0), -5014);
        assert_eq!((cufile.read(handle, 0x1000, 1, 0, 0), errno()), (-1, libc::EFAULT));

        assert_eq!((buffer(0, 1), buffer(at, 0), buffer(0x1000, 1)), (refused(5022), refused(5022), refused(5012)));
        assert_eq!((buffer(at, 4096), buffer(at, 4096), buffer(at + 4095, 1)), (OK, refused(5023), refused(5023)));
        assert_eq!(
            (no_buffer(0), no_buffer(at + 1), no_buffer(at), no_buffer(at)),
            (refused(5022), refused(5024), OK, refused(5024))
        );

        let writable = OpenOptions::new().write(true).open(&path).unwrap();
        let only = cufile.register(&writable).unwrap();
        assert_eq!((cufile.read(only, at, 1, 0, 0), errno()), (-1, libc::EBADF));
        cufile.deregister(only);
        assert_eq!(cufile.read(only, at, 1, 0, 0), -5027);
        cufile.deregister(only); // and nothing happens

        // A number that was closed and is another file's now.
        let number = file.as_raw_fd();
        let other = open(&volume.path("other"));
        // SAFETY: both numbers are the test's.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        let second = cufile.register(&file).unwrap();
        assert_eq!(cufile.write(second, at, 100, 0, 0), 100);
        assert_eq!(fs::metadata(volume.path("other")).unwrap().len(), 100);
        assert_eq!(cufile.read(handle, at, 4096, 4096, 0), 904, "the first is what it was");
    });
}

pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn the_driver_opens_by_itself_and_counts() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let file = open(&volume.path("file"));
        // SAFETY: they take nothing, numbers, or room that is there.
        unsafe {
            let mut value = 0;
            assert_eq!((cufile.cuFileGetParameterSizeT)(9, &mut value), OK);
            assert_eq!((value, (cufile.cuFileSetParameterSizeT)(9, 64)), (128, OK));
            assert_eq!((cufile.cuFileSetParameterSizeT)(99, 64), refused(5022));
            assert_eq!((cufile.cuFileUseCount)(), 0);
            cufile.register(&file).unwrap();
            assert_eq!((cufile.cuFileUseCount)(), 1);
            assert_eq!((cufile.cuFileSetParameterSizeT)(9, 64), refused(5026));
            assert_eq!((cufile.cuFileSetParameterBool)(0, true), refused(5026));
            assert_eq!(((cufile.cuFileDriverOpen)(), (cufile.cuFileDriverOpen)()), (OK, OK));
            assert_eq!((cufile.cuFileUseCount)(), 3);
            let mut properties = [0; 14];
            assert_eq!((cufile.cuFileDriverSetPollMode)(true, 1024), OK);
            assert_eq!((cufile.cuFileDriverSetMaxDirectIOSize)(0), refused(5003));
            assert_eq!((cufile.cuFileDriverSetMaxDirectIOSize)(1024), OK);
            assert_eq!((cufile.cuFileDriverGetProperties)(&mut properties), OK);
            // Threshold, longest request, flags, and the batch that was set before.
            assert_eq!([properties[2], properties[4], properties[7] & 1, properties[12]], [1024, 1024, 1, 64]);
            assert_eq!(((cufile.cuFileDriverClose_v2)(), (cufile.cuFileUseCount)()), (OK, 2));
            assert_eq!(((cufile.cuFileDriverClose)(), (cufile.cuFileUseCount)()), (OK, 0));
            assert_eq!((cufile.cuFileDriverClose_v2)(), refused(5001));
        }
    });
}

#[test]
fn many_threads_share_files_and_buffers() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(5, 4 * MIB);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        thread::scope(|scope| {
            for thread in 0..64 {
                let (data, volume, cufile) = (&data, &volume, &cufile);
                scope.spawn(move || {
                    let device = Device::zeroed(8192);
                    let own = open(&volume.path(format!("file{thread}")));
                    for turn in 0..8 {
                        let offset = (thread * 61_003 + turn * 777) % (4 * MIB - 8192);
                        assert_eq!(cufile.read(handle, device.address(), 8192, offset as i64, 0), 8192);
                        let own_handle = cufile.register(&own).unwrap();
                        assert_eq!(cufile.write(own_handle, device.address(), 8000, 100, 100), 8000);
                        cufile.deregister(own_handle);
                        assert!(
                            fs::read(volume.path(format!("file{thread}"))).unwrap()[100..] == data[offset + 100..offset + 8100]
                        );
                    }
                });
            }
        });
    });
}

#[test]
fn closing_waits_for_what_is_in_flight() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(6, 16 * MIB);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let device = Device::zeroed(16 * MIB);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut rounds = 0;
                loop {
                    match cufile.read(handle, device.address(), 16 * MIB, 0, 0) {
                        done if done == 16 * MIB as isize => rounds += 1,
                        // Closed before the next one began: it never ends halfway.
                        error => return (rounds, error),
                    }
                }
            });
            thread::sleep(std::time::Duration::from_millis(100));
            assert_eq!(cufile.close(), OK);
            let (_, error) = reader.join().unwrap();
            assert_eq!(error, -5001);
        });
        assert!(device.get(0, MIB) == data[..MIB]);
        // And it opens again.
        let again = cufile.register(&file).unwrap();
        assert_eq!(cufile.read(again, device.address(), 4096, 0, 0), 4096);
    });
}

#[test]
fn a_process_that_was_forked_is_told_that_the_driver_is_closed() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let device = Device::with(&[7; 4096]);
        assert_eq!(cufile.write(handle, device.address(), 4096, 0, 0), 4096);
        // SAFETY: the child calls what is tested, and ends without unwinding.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: they take nothing.
            let (count, open) = unsafe { ((cufile.cuFileUseCount)(), (cufile.cuFileDriverOpen)()) };
            let read = cufile.read(handle, device.address(), 4096, 0, 0);
            let good = count == 0 && open == refused(5001) && read == -5001 && cufile.close() == Status(5001, 0);
            // SAFETY: it ends the process.
            unsafe { libc::_exit(i32::from(!good)) }
        }
        let mut status = 0;
        // SAFETY: it writes a number.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child was told otherwise");
        assert_eq!(cufile.read(handle, device.address(), 4096, 0, 0), 4096);
    });
}

/// Whatever other threads hold when the process is forked.
#[test]
fn a_child_that_was_forked_in_the_middle_of_calls_waits_for_nothing() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        // SAFETY: it takes a number.
        assert_eq!(unsafe { (cufile.cuFileSetStatsLevel)(3) }, OK);
        let over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            for number in 0..4 {
                let (over, cufile) = (&over, &cufile);
                scope.spawn(move || {
                    let memory = [0u8; 64];
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        cufile.read(handle, memory.as_ptr() as u64, 64, 0, 0);
                        // SAFETY: they take nothing; the count stays above zero.
                        let _ =
                            unsafe { ((cufile.cuFileDriverOpen)(), (cufile.cuFileDriverClose_v2)(), (cufile.cuFileUseCount)()) };
                        let mut value = 0;
                        // SAFETY: there is room for the number.
                        let _ = unsafe { (cufile.cuFileGetParameterSizeT)(number, &mut value) };
                    }
                });
            }
            for _ in 0..200 {
                // SAFETY: the child calls what is tested, and ends without unwinding.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    let mut value = 0;
                    // SAFETY: there is room for the number; the signal ends a child that hangs.
                    let (open, parameter) = unsafe {
                        libc::alarm(20);
                        ((cufile.cuFileDriverOpen)(), (cufile.cuFileGetParameterSizeT)(0, &mut value))
                    };
                    let read = cufile.read(handle, (&raw const value) as u64, 8, 0, 0);
                    let good = open == refused(5001) && parameter == refused(5001) && read == -5001;
                    // SAFETY: it ends the process.
                    unsafe { libc::_exit(i32::from(!good)) }
                }
                let mut status = 0;
                // SAFETY: it writes a number.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                if status != 0 {
                    over.store(true, std::sync::atomic::Ordering::Relaxed);
                    panic!("a child ended with {status:#x}");
                }
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    });
}

#[test]
fn offsets_count_in_files_that_are_open_for_appending() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, elsewhere, cufile) = (Mounted::new(), gpunvme_tests::scratch_dir(), in_use());
        for path in [volume.path("file"), elsewhere.path().join("file")] {
            fs::write(&path, [1; 8192]).unwrap();
            let file = OpenOptions::new().append(true).open(&path).unwrap();
            let handle = cufile.register(&file).unwrap();
            let (device, ordinary) = (Device::with(&[2; 4096]), vec![3u8; 100]);
            assert_eq!(cufile.write(handle, device.address(), 4096, 0, 0), 4096);
            assert_eq!(cufile.write(handle, ordinary.as_ptr() as u64, 100, 4096, 0), 100);
            let expected = [vec![2; 4096], vec![3; 100], vec![1; 3996]].concat();
            assert!(fs::read(&path).unwrap() == expected, "{}", path.display());
            cufile.deregister(handle);
        }
    });
}

/// Programs close files and forget to deregister them.
#[test]
fn a_number_that_is_another_open_file_now_is_registered_anew() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let device = Device::with(&[7; 4096]);
        let first = File::create(volume.path("file")).unwrap();
        let number = first.as_raw_fd();
        cufile.register(&first).unwrap();
        assert_eq!(cufile.register(&first), Err(refused(5028)));
        // Closed and given to another open file at once: another thread of the test cannot take it.
        let other = open(&volume.path("file"));
        let mut second = OwnedFd::from(first);
        rustix::io::dup2(&other, &mut second).unwrap();
        let second = File::from(second);
        assert_eq!(second.as_raw_fd(), number);
        let handle = cufile.register(&second).unwrap();
        assert_eq!(cufile.write(handle, device.address(), 4096, 0, 0), 4096);
        assert_eq!(cufile.read(handle, device.address(), 4096, 0, 0), 4096, "it is open for both");
    });
}
