//! `cuFileReadv` and `cuFileWritev`: one range of a file, many of memory.

use std::fs::{self, OpenOptions};
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, scratch_dir, tree};

use crate::files::{errno, open};
use crate::library::{Device, OK, in_use, refused};

/// Pieces of memory that are of no block's length and begin nowhere in particular.
const LENS: [usize; 6] = [4096, 1, 100_003, 0, 8192, 5000];
const LEN: usize = 4096 + 1 + 100_003 + 8192 + 5000;

/// So many ranges of a buffer, with gaps between them.
fn ranges(at: u64) -> Vec<(u64, usize)> {
    let mut next = at + 3;
    let place = |len: &usize| {
        let range = (next, *len);
        next += *len as u64 + 777;
        range
    };
    LENS.iter().map(place).collect()
}

#[test]
fn ranges_of_every_kind_of_memory_are_read_and_written_in_one_call() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, elsewhere, cufile) = (Mounted::new(), scratch_dir(), in_use());
        let data = tree::pattern(1, LEN + 1000);
        let room = LEN + 10_000;
        let (registered, device, host) = (Device::zeroed(room), Device::zeroed(room), vec![0u8; room]);
        assert_eq!(cufile.add_buffer(registered.address(), room), OK);
        let (of_registered, of_device, of_host) =
            (ranges(registered.address()), ranges(device.address()), ranges(host.as_ptr() as u64));
        // Each kind alone, and all in turns: ordinary memory first, last and between.
        let mixed = |order: [&[(u64, usize)]; 6]| order.iter().enumerate().map(|(at, of)| of[at]).collect::<Vec<_>>();
        let lists = [
            of_registered.clone(),
            of_device.clone(),
            of_host.clone(),
            mixed([&of_host, &of_device, &of_device, &of_device, &of_registered, &of_host]),
            mixed([&of_device, &of_registered, &of_host, &of_host, &of_host, &of_device]),
        ];
        let paths = [volume.path("file"), elsewhere.path().join("file")];
        for path in &paths {
            fs::write(path, &data).unwrap();
            let file = open(path);
            let handle = cufile.register(&file).unwrap();
            let get = |(address, len): (u64, usize)| {
                let inside = [&registered, &device].map(|of| (address.wrapping_sub(of.address()) as usize, of));
                let inside = inside.into_iter().find(|(at, _)| *at < room);
                match inside {
                    Some((at, of)) => of.get(at, len),
                    None => host[(address - host.as_ptr() as u64) as usize..][..len].to_vec(),
                }
            };
            for (number, list) in lists.iter().enumerate() {
                let offset = 100 + number;
                assert_eq!(cufile.readv(handle, list, offset as i64), LEN as isize, "list {number}");
                let found: Vec<u8> = list.iter().flat_map(|&range| get(range)).collect();
                assert!(found == data[offset..offset + LEN], "list {number} of {}", path.display());
                // It goes back elsewhere in the file, and makes it longer.
                assert_eq!(cufile.writev(handle, list, 3333 * number as i64 + 1), LEN as isize, "list {number}");
                let written = fs::read(path).unwrap();
                assert!(written[3333 * number + 1..][..LEN] == data[offset..offset + LEN], "list {number}");
                fs::write(path, &data).unwrap();
            }
        }
    });
}

#[test]
fn a_read_of_many_ranges_ends_with_the_file_and_errors_are_those_of_cufile() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(2, 5000);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let (handle, device, host) = (cufile.register(&file).unwrap(), Device::zeroed(16384), vec![0u8; 4096]);
        let at = device.address();
        // The second is too long, and of the third nothing is left.
        assert_eq!(cufile.readv(handle, &[(at, 4000), (at + 4096, 4000), (at + 8192, 100)], 0), 5000);
        assert!(device.get(0, 4000) == data[..4000] && device.get(4096, 1000) == data[4000..]);
        assert!(device.get(8192, 100) == [0; 100]);
        // The end lies in ordinary memory, with more of the GPU's behind it.
        let pieces = [(at + 8192, 4000), (host.as_ptr() as u64, 4096), (at + 12_288, 100)];
        assert_eq!(cufile.readv(handle, &pieces, 500), 4500);
        assert!(device.get(8192, 4000) == data[500..4500] && host[..500] == data[4500..]);
        assert_eq!(cufile.readv(handle, &pieces, 5000), 0);
        assert_eq!((cufile.readv(handle, &[], 0), cufile.writev(handle, &[(0, 0)], 0)), (0, 0));

        // Where nothing of it can be done, why; else what comes before.
        let beyond = 1 << 20;
        assert_eq!(cufile.readv(handle, &[(at, beyond)], 0), -5014);
        assert_eq!(cufile.readv(handle, &[(at, 100), (0, 10)], 0), -5022);
        assert_eq!(cufile.readv(handle, &[(at, 100)], -1), -5022);
        let list = [(at, 100usize)];
        // SAFETY: nothing of a list is read that no memory is long enough for.
        assert_eq!(unsafe { (cufile.cuFileReadv)(handle, list.as_ptr(), usize::MAX, 0, 0) }, -5022);
        assert_eq!(cufile.readv(handle + 16, &[(at, 100)], 0), -5027);
        assert_eq!((cufile.readv(handle, &[(0x1000, 10), (at, 100)], 0), errno()), (-1, libc::EFAULT));
        assert_eq!(cufile.readv(handle, &[(at, 100), (0x1000, 10)], 0), 100);
        assert_eq!(cufile.writev(handle, &[(host.as_ptr() as u64, 300), (at, beyond)], 0), 300);
        // SAFETY: what is wrong is refused.
        let null = unsafe { (cufile.cuFileWritev)(handle, std::ptr::null(), 2, 0, 0) };
        // SAFETY: as above.
        let flags = unsafe { (cufile.cuFileReadv)(handle, [(at, 100)].as_ptr(), 1, 0, 1) };
        assert_eq!((null, flags), (-5022, -5022));
        let only = OpenOptions::new().read(true).open(volume.path("file")).unwrap();
        let only = cufile.register(&only).unwrap();
        assert_eq!((cufile.writev(only, &[(at, 100)], 0), errno()), (-1, libc::EBADF));
        assert_eq!(cufile.close(), OK);
        assert_eq!((cufile.writev(handle, &[(at, 100)], 0), cufile.close()), (-5001, refused(5001)));
    });
}

/// A copy to or from the software GPU takes 40 ms at least: one range after the other would take
/// that as often as there are ranges.
#[test]
fn all_ranges_are_in_flight_at_once() {
    needs_mount!();
    with_software_cuda("copy-takes=40000", || {
        const COUNT: usize = 32;
        let (volume, cufile) = (Mounted::new(), in_use());
        let data = tree::pattern(3, COUNT * 4096);
        fs::write(volume.path("file"), &data).unwrap();
        let file = open(&volume.path("file"));
        let (handle, device, host) = (cufile.register(&file).unwrap(), Device::zeroed(COUNT * 4096), vec![0u8; 4096]);
        let one_by_one = Duration::from_millis(40) * COUNT as u32;
        let mut list: Vec<_> = (0..COUNT).map(|at| (device.address() + (COUNT - 1 - at) as u64 * 4096, 4096)).collect();
        // All of a kind, and with ordinary memory in the middle.
        for turn in 0..2 {
            let began = Instant::now();
            assert_eq!(cufile.readv(handle, &list, 0), data.len() as isize);
            assert_eq!(cufile.writev(handle, &list, 0), data.len() as isize);
            assert!(began.elapsed() < one_by_one, "turn {turn}: both took {:?}", began.elapsed());
            list[COUNT / 2].0 = host.as_ptr() as u64;
        }
        assert!(fs::read(volume.path("file")).unwrap() == data);
    });
}
