//! A process that may have no more descriptors.

use std::fs::{self, File};

use gpunvme_tests::cuda::{Pinned, own_stream};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, scratch_dir, tree, with_descriptors};

use crate::batches::{self, Batch};
use crate::files::{MIB, errno, open};
use crate::library::{BatchEvent, BatchRequest, COMPLETE, Device, OK, gpu, in_use, library, refused};
use crate::streams::{self, Numbers, wait};

#[test]
fn files_that_no_descriptor_is_left_for_are_refused_as_such() {
    needs_mount!();
    with_software_cuda("", || {
        // SAFETY: no other thread of this process reads the environment yet.
        unsafe { std::env::set_var("GPUNVME_CUFILE_REAL", "off") };
        let (volume, elsewhere) = (Mounted::new(), scratch_dir());
        library(); // which takes descriptors to be loaded
        for path in [volume.path("file"), elsewhere.path().join("file")] {
            fs::write(&path, tree::pattern(1, MIB)).unwrap();
            let file = open(&path);
            let appending = File::options().append(true).open(&path).unwrap();
            for file in [&file, &appending] {
                // What is too few is too few for another reason from number to number.
                let mut refusals = 0;
                loop {
                    let cufile = in_use();
                    match with_descriptors(refusals, || cufile.register(file)) {
                        Ok(_) => break,
                        Err(status) => assert_eq!(status, refused(5031), "with {refusals} descriptors: {}", path.display()),
                    }
                    refusals += 1;
                    assert!(refusals < 50, "it needs more than that: {}", path.display());
                }
                assert!(refusals > 1, "one descriptor is too few: {}", path.display());
            }
        }
    });
}

/// Without descriptors there are no rings, and what takes them cannot be done. Host memory needs
/// none.
#[test]
fn host_memory_is_served_where_no_transfers_can_be_made() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(2, MIB);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let handle = cufile.register(&file).unwrap();
        let (device, stream) = (Device::zeroed(MIB), own_stream(gpu()));
        let (pinned, ordinary) = (Pinned::new(gpu(), 2 * MIB), vec![0u8; MIB]);
        let address = pinned.address();
        for (at, registers) in [(address, false), (address, true), (ordinary.as_ptr() as u64, false)] {
            assert!(!registers || cufile.add_buffer(at, MIB) == OK);
            let clear = || {
                // SAFETY: it is memory of the test's, which nothing else uses now.
                unsafe { std::slice::from_raw_parts_mut(at as *mut u8, MIB) }.fill(0);
            };
            let check = |way: &str| {
                // SAFETY: as above.
                assert!(unsafe { std::slice::from_raw_parts(at as *const u8, MIB) } == data, "{way}");
                clear();
            };
            clear();
            with_descriptors(0, || {
                assert_eq!(cufile.read(handle, at, MIB, 0, 0), MIB as isize);
                check("waited for");
                let halves = [(at, MIB / 2), (at + MIB as u64 / 2, MIB / 2)];
                assert_eq!(cufile.readv(handle, &halves, 0), MIB as isize);
                check("in ranges");
                let mut numbers = Numbers::new(MIB, 0, 0);
                assert_eq!(streams::read(handle, at, &mut numbers, stream), OK);
                wait(stream);
                assert_eq!(numbers.done, MIB as isize);
                check("in a stream");
                let batch = Batch::new(1);
                let request = BatchRequest { size: MIB, ..batches::read(handle, at, 0, 0, 7) };
                assert_eq!(batch.submit(&[request]), OK);
                let event = BatchEvent { cookie: 7, status: COMPLETE, result: MIB as isize };
                assert_eq!(batch.take(1, 1, None), [event]);
                check("in a batch");
                // A GPU's memory is not, and nothing hides it.
                let gpus = cufile.read(handle, device.address(), MIB, 0, 0);
                assert_eq!((gpus, errno()), (-1, libc::EMFILE));
                let mut numbers = Numbers::new(MIB, 0, 0);
                assert_eq!(streams::read(handle, device.address(), &mut numbers, stream), refused(5031));
                let both = [(at, MIB / 2), (device.address(), MIB / 2)];
                assert_eq!(cufile.readv(handle, &both, 0), MIB as isize / 2, "as far as it can be done");
            });
            assert!(!registers || cufile.remove_buffer(at) == OK);
        }
        assert_eq!(cufile.read(handle, device.address(), MIB, 0, 0), MIB as isize);
        assert!(device.get(0, MIB) == data);
    });
}
