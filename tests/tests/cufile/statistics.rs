//! Statistics at every level, as versions have them; and the line at exit.

use std::fs;
use std::fs::File;

use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::{self, with_libcuda, with_software_cuda};
use gpunvme_tests::{needs_mount, tree};

use crate::batches::{self, Batch};
use crate::files::{MIB, open};
use crate::library::{BatchRequest, Device, InUse, OK, Status, in_use, refused};

/// Words of the first level of 1.15, of what 1.19 added, and of the levels above.
const BASIC: usize = 64;
const VECTORED: usize = 14;
const SIZES: usize = 64;
const PER_GPU: usize = 1 + 16 * 31;
/// What is not written to.
const UNTOUCHED: u64 = 0xabcd_ef01_2345_6789;

/// What a level tells, with what it must not write to behind it.
fn told(cufile: &InUse, level: usize) -> Result<Vec<u64>, Status> {
    let mut words = vec![UNTOUCHED; 700];
    let get = [cufile.cuFileGetStatsL1, cufile.cuFileGetStatsL2, cufile.cuFileGetStatsL3][level - 1];
    // SAFETY: there is more room than any needs.
    match unsafe { get(words.as_mut_ptr()) } {
        OK => {
            let len = words.iter().rposition(|&word| word != UNTOUCHED).map_or(0, |last| last + 1);
            words.truncate(len);
            Ok(words)
        }
        error => Err(error),
    }
}

fn set_level(cufile: &InUse, level: i32) {
    // SAFETY: it takes a number.
    assert_eq!(unsafe { (cufile.cuFileSetStatsLevel)(level) }, OK);
}

/// A file of a mount, registered, and memory of a GPU.
fn in_place(volume: &Mounted, cufile: &InUse) -> (File, usize, Device) {
    fs::write(volume.path("file"), tree::pattern(1, MIB)).unwrap();
    let file = open(&volume.path("file"));
    let handle = cufile.register(&file).unwrap();
    (file, handle, Device::zeroed(MIB))
}

#[test]
fn statistics_are_true() {
    needs_mount!();
    with_software_cuda("gpus=2", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        set_level(&cufile, 3);
        let (_file, handle, device) = in_place(&volume, &cufile);
        assert_eq!((cufile.add_buffer(device.address(), MIB), cufile.add_buffer(device.address(), 1)), (OK, refused(5023)));
        assert_eq!(cufile.write(handle, device.address(), MIB, 0, 0), MIB as isize);
        assert_eq!(cufile.read(handle, device.address(), 4096, 0, 0), 4096);
        assert_eq!(cufile.read(handle, device.address(), 100, 1, 0), 100);
        assert_eq!(cufile.read(handle, 0x1000, 1, 0, 0), -1);
        assert_eq!(cufile.remove_buffer(device.address()), OK);
        // 1.15 counts these among its reads and writes.
        let halves = [(device.address(), 3000), (device.address() + 3000, 1000)];
        assert_eq!((cufile.readv(handle, &halves, 0), cufile.writev(handle, &halves, 0)), (4000, 4000));

        let basic = told(&cufile, 1).unwrap();
        assert_eq!(basic.len(), BASIC);
        // Reads and writes, good and bad; files; memory; bytes.
        assert_eq!(basic[..12], [3, 1, 2, 0, 1, 0, 0, 0, 1, 1, 1, 0]);
        assert_eq!(basic[12..14], [8196, MIB as u64 + 4000]);
        // Sums of times, averages, and what there is in a second.
        let (average, sum) = (basic[16], basic[20]);
        assert!(average == sum / 3 && basic[14] > 0, "{basic:?}");

        // How many requests had up to 2^n KiB.
        let detailed = told(&cufile, 2).unwrap();
        assert_eq!(detailed.len(), BASIC + SIZES);
        let mut sizes = [0; SIZES];
        (sizes[0], sizes[2], sizes[32 + 2], sizes[32 + 10]) = (2, 2, 1, 1);
        assert_eq!(detailed[BASIC..], sizes);

        let all = told(&cufile, 3).unwrap();
        assert_eq!((all.len(), all[128] as u32), (BASIC + SIZES + PER_GPU, 2), "2 GPUs, in 5000 bytes");
        let first = &all[129 + 2..][..29];
        // Bytes and reads; by which way; how many without alignment.
        assert_eq!((first[0], first[4..8].to_vec(), first[8]), (8196, vec![3, 0, 0, 3], 2));
        assert_eq!((first[13], first[17..21].to_vec(), first[21]), (MIB as u64 + 4000, vec![2, 0, 0, 2], 1));
        // Memory: registered, of which it was, was not; taken back; bytes.
        assert_eq!(first[24..], [2, 1, 1, 1, MIB as u64]);
        assert!(all[129 + 31 + 2..].iter().all(|&word| word == 0), "the other GPU did something");
    });
}

#[test]
fn counting_ends_with_a_call_and_goes_on_with_another() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        // SAFETY: they take nothing.
        let call = |which: unsafe extern "C" fn() -> Status| unsafe { which() };
        for which in [cufile.cuFileStatsStart, cufile.cuFileStatsStop, cufile.cuFileStatsReset] {
            assert_eq!(call(which), refused(5001));
        }
        let (_file, handle, device) = in_place(&volume, &cufile);
        let read = || assert_eq!(cufile.read(handle, device.address(), 4096, 0, 0), 4096);
        let reads = || {
            let words = told(&cufile, 1).unwrap();
            (words[0], words[12])
        };
        // Of nothing nothing is told, and of a level that is not counted.
        read();
        assert_eq!((told(&cufile, 1), told(&cufile, 3)), (Err(refused(5022)), Err(refused(5022))));
        set_level(&cufile, 2);
        assert_eq!((told(&cufile, 2).unwrap()[0], told(&cufile, 3)), (0, Err(refused(5022))));
        let mut level = 0;
        // SAFETY: it takes numbers, or room that is there, or that it refuses.
        unsafe {
            assert_eq!(((cufile.cuFileGetStatsLevel)(&mut level), level), (OK, 2));
            assert_eq!(((cufile.cuFileSetStatsLevel)(4), (cufile.cuFileSetStatsLevel)(-1)), (refused(5022), refused(5022)));
            assert_eq!((cufile.cuFileGetStatsL1)(std::ptr::null_mut()), refused(5022));
        }

        read();
        assert_eq!(reads(), (1, 4096));
        assert_eq!(call(cufile.cuFileStatsStop), OK);
        read();
        assert_eq!(cufile.add_buffer(device.address(), MIB), OK);
        let batch = Batch::new(4);
        assert_eq!(batch.submit(&[batches::read(handle, device.address(), 0, 0, 1)]), OK);
        assert_eq!(batch.take(1, 4, None).len(), 1);
        let words = told(&cufile, 2).unwrap();
        let counted = [&words[..1], &words[8..9], &words[22..52], &words[BASIC..]].concat();
        assert_eq!((counted[0], counted.iter().sum::<u64>()), (1, 2), "one read and its size: {words:?}");
        // Time does not go on either: as many a second.
        let a_second = (words[14], words[18]);
        std::thread::sleep(std::time::Duration::from_millis(50));
        let words = told(&cufile, 2).unwrap();
        assert_eq!((words[14], words[18]), a_second);

        assert_eq!(call(cufile.cuFileStatsStart), OK);
        read();
        assert_eq!(reads(), (2, 8192));
        assert_eq!(call(cufile.cuFileStatsReset), OK);
        assert_eq!(reads(), (0, 0));
        read();
        assert_eq!(reads(), (1, 4096));
    });
}

#[test]
fn batches_are_counted_by_the_way_that_they_went() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let (_file, handle, device) = in_place(&volume, &cufile);
        set_level(&cufile, 1);
        let host = vec![0u8; 8192];
        let batch = Batch::new(4);
        let read = |memory, cookie| batches::read(handle, memory, 0, 0, cookie);
        let gpus = [read(device.address(), 1), BatchRequest { opcode: 1, ..read(device.address(), 2) }];
        let mixed = [read(device.address(), 3), read(host.as_ptr() as u64, 4)];
        let beyond = [BatchRequest { size: 16 * MIB, ..read(device.address(), 5) }];
        for requests in [&gpus[..], &mixed[..], &beyond[..]] {
            assert_eq!(batch.submit(requests), OK);
            assert_eq!(batch.take(requests.len() as u32, 4, None).len(), requests.len());
        }
        assert_eq!(batch.submit(&[read(device.address(), 6); 5]), refused(5037));
        assert_eq!(batch.submit(&[]), refused(5022));
        // SAFETY: it is a batch.
        assert_eq!(unsafe { (cufile.cuFileBatchIOCancel)(77) }, refused(5022));
        drop(batch);
        let words = told(&cufile, 1).unwrap();
        let pairs: Vec<_> = words[22..52].chunks(2).map(|pair| (pair[0], pair[1])).collect();
        assert_eq!(pairs[..5], [(3, 2), (3, 0), (1, 0), (0, 1), (1, 0)], "submit, complete, set up, cancel, destroy");
        // Requests: begun, by system calls, done, by system calls.
        assert_eq!(pairs[5..9], [(5, 5), (1, 0), (4, 1), (1, 0)]);
        // Submissions: nvidia-fs, peer to peer, libaio, io_uring, of several kinds, all.
        assert_eq!(pairs[9..], [(0, 0), (0, 0), (0, 0), (0, 0), (1, 0), (3, 2)]);
        let len = batches::LEN as u64;
        assert_eq!(words[52..54], [3 * len, len]);
        assert_eq!(words[62..], [0, 0], "the last one moved nothing");
    });
}

#[test]
fn versions_from_1_19_on_count_vectors_by_themselves() {
    needs_mount!();
    with_libcuda(software_cuda::folder(), &[("GPUNVME_CUFILE_VERSION", "1190")], || {
        let (volume, cufile) = (Mounted::new(), in_use());
        let (_file, handle, device) = in_place(&volume, &cufile);
        set_level(&cufile, 3);
        let at = device.address();
        assert_eq!(cufile.readv(handle, &[(at, 5000), (at + 8192, 3000)], 0), 8000);
        assert_eq!(cufile.readv(handle, &[(at, 500), (at + 8192, 500)], 10), 1000);
        assert_eq!(cufile.readv(handle, &[(0x1000, 1)], 0), -1);
        assert_eq!(cufile.writev(handle, &[(at, 4096), (at + 8192, 100)], 0), 4196);
        assert_eq!(cufile.read(handle, at, 100, 0, 0), 100);

        let basic = told(&cufile, 1).unwrap();
        assert_eq!(basic.len() * 8, 624);
        assert_eq!((&basic[..4], &basic[12..14]), (&[1, 0, 0, 0][..], &[100, 0][..]));
        let vectored = &basic[BASIC..];
        assert_eq!(vectored[..6], [2, 1, 1, 0, 9000, 4196]);
        // Rates, averages of times, and their sums.
        assert!(vectored[6] > 0 && vectored[7] > 0, "{vectored:?}");
        assert_eq!((vectored[8], vectored[9]), (vectored[12] / 2, vectored[13]));
        assert!(vectored[13] > 0, "{vectored:?}");

        let detailed = told(&cufile, 2).unwrap();
        assert_eq!(detailed.len() * 8, 1136);
        let sizes = &detailed[BASIC + VECTORED..];
        // Of 100, 1 and 1000 bytes, and of 8000; of 4196.
        assert_eq!((sizes[0], sizes[3], sizes[32 + 3], sizes.iter().sum::<u64>()), (3, 1, 1, 5));
        let all = told(&cufile, 3).unwrap();
        assert_eq!((all.len() * 8, all[BASIC + VECTORED + SIZES] as u32), (5112, 1));
        assert_eq!(
            all[BASIC + VECTORED + SIZES + 3..][..5],
            [9100, all[BASIC + VECTORED + SIZES + 4], 0, all[BASIC + VECTORED + SIZES + 6], 3]
        );
    });
}
