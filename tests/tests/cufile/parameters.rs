//! What is set and read back: properties of the driver, parameters; and what is told of the
//! machine.

use std::ffi::{CStr, CString};
use std::fs;
use std::ptr;

use gpunvme_tests::scratch_dir;
use gpunvme_tests::software_cuda::{self, with_libcuda, with_software_cuda};

use crate::library::{Library, OK, Status, gpu, in_use, refused};

/// Numbers by default, and their limits. Those of sizes of GPU memory are the library's own.
const SIZES: [(usize, Option<(usize, usize)>); 12] = [
    (0, None),
    (128, Some((1, 256))),
    (0, Some((0, 32))),
    (1024, Some((4, 4_294_967_295))),
    (0, Some((0, 8))),
    (16_384, Some((64, 16_384))),
    (131_072, Some((0, 4_294_967_295))),
    (1024, Some((64, 16_384))),
    (33_554_432, Some((64, usize::MAX))),
    (128, Some((1, 256))),
    (4, Some((4, usize::MAX >> 10))),
    (5, Some((1, 1000))),
];

fn size(cufile: &Library, which: u32) -> Result<usize, Status> {
    let mut value = 0;
    // SAFETY: there is room for the number.
    let status = unsafe { (cufile.cuFileGetParameterSizeT)(which, &mut value) };
    if status == OK { Ok(value) } else { Err(status) }
}

fn switch(cufile: &Library, which: u32) -> Result<bool, Status> {
    let mut value = false;
    // SAFETY: there is room for it.
    let status = unsafe { (cufile.cuFileGetParameterBool)(which, &mut value) };
    if status == OK { Ok(value) } else { Err(status) }
}

fn string(cufile: &Library, which: u32, room: usize) -> Result<String, Status> {
    let mut bytes = vec![b'?'; room + 1];
    // SAFETY: there is as much room as is said.
    let status = unsafe { (cufile.cuFileGetParameterString)(which, bytes.as_mut_ptr().cast(), room as i32) };
    assert_eq!(bytes[room], b'?', "more was written than there is room for");
    let text = || CStr::from_bytes_until_nul(&bytes).unwrap().to_str().unwrap().to_owned();
    if status == OK { Ok(text()) } else { Err(status) }
}

#[test]
fn parameters_are_kept_until_the_driver_opens_and_given_back() {
    with_software_cuda("", || {
        let cufile = in_use();
        for (which, &(usual, limits)) in (0..).zip(&SIZES) {
            assert_eq!(size(&cufile, which), Ok(usual), "number {which}");
            let (mut min, mut max) = (77, 77);
            // SAFETY: there is room for both.
            let status = unsafe { (cufile.cuFileGetParameterMinMaxValue)(which, &mut min, &mut max) };
            match limits {
                Some(limits) => assert_eq!((status, min, max), (OK, limits.0, limits.1), "number {which}"),
                None => assert_eq!((status, min, max), (refused(5022), 77, 77)),
            }
            // SAFETY: it takes numbers.
            assert_eq!(unsafe { (cufile.cuFileSetParameterSizeT)(which, 100 + which as usize) }, OK);
            assert_eq!(size(&cufile, which), Ok(100 + which as usize));
        }
        assert_eq!(size(&cufile, 12), Err(refused(5022)));
        // SAFETY: what is NULL is refused.
        unsafe {
            assert_eq!((cufile.cuFileGetParameterSizeT)(1, ptr::null_mut()), refused(5022));
            assert_eq!((cufile.cuFileGetParameterMinMaxValue)(1, ptr::null_mut(), &mut 0), refused(5022));
            assert_eq!((cufile.cuFileGetParameterMinMaxValue)(1, &mut 0, ptr::null_mut()), refused(5022));
        }

        // Switches: compatible mode and system memory are on. 1.15 has none of the last two.
        for which in 0..12 {
            assert_eq!(switch(&cufile, which), Ok(which == 1 || which == 6), "switch {which}");
            // SAFETY: it takes a number.
            assert_eq!(unsafe { (cufile.cuFileSetParameterBool)(which, which % 2 == 0) }, OK);
            assert_eq!(switch(&cufile, which), Ok(which % 2 == 0));
        }
        assert_eq!((switch(&cufile, 12), switch(&cufile, 13)), (Err(refused(5022)), Err(refused(5022))));

        // Texts: the log's path is none while it is not set.
        assert_eq!(string(&cufile, 1, 64), Err(refused(5022)));
        let set = |which, text: &str| {
            let text = CString::new(text).unwrap();
            // SAFETY: the text ends in a zero byte.
            unsafe { (cufile.cuFileSetParameterString)(which, text.as_ptr()) }
        };
        for (which, text) in ["DEBUG", "/tmp/cufile.log", "/tmp"].into_iter().enumerate() {
            assert_eq!(set(which as u32, text), OK);
            assert_eq!(string(&cufile, which as u32, text.len() + 1).as_deref(), Ok(text));
            assert_eq!(string(&cufile, which as u32, text.len()), Err(refused(5022)), "there is no room for its end");
        }
        assert_eq!((set(0, ""), set(3, "DC_V1")), (refused(5022), refused(5022)));
        // SAFETY: what is NULL is refused.
        assert_eq!(unsafe { (cufile.cuFileSetParameterString)(0, ptr::null()) }, refused(5022));

        // Sizes of buffers, and how many of each.
        type Set = unsafe extern "C" fn(*const usize, *const usize, i32) -> Status;
        type Get = unsafe extern "C" fn(*mut usize, *mut usize, i32) -> Status;
        let slabs: [(Set, Get, [usize; 3]); 2] = [
            (cufile.cuFileSetParameterPosixPoolSlabArray, cufile.cuFileGetParameterPosixPoolSlabArray, [4, 1024, 16384]),
            (
                cufile.cuFileSetParameterGpuBounceBufferSlabArray,
                cufile.cuFileGetParameterGpuBounceBufferSlabArray,
                [64, 128, 256],
            ),
        ];
        let counts = [128, 64, 32];
        let get = |get: Get| {
            let (mut sizes, mut counts) = ([0; 3], [0; 3]);
            // SAFETY: there is room for three.
            (unsafe { get(sizes.as_mut_ptr(), counts.as_mut_ptr(), 3) }, sizes, counts)
        };
        // SAFETY: there are three, or none, of each.
        unsafe {
            for (put, take, sizes) in slabs {
                assert_eq!(get(take).0, refused(5022), "none were set");
                assert_eq!(put(sizes.as_ptr(), counts.as_ptr(), 3), OK);
                assert_eq!(put(sizes.as_ptr(), counts.as_ptr(), 0), refused(5022));
                assert_eq!(put(ptr::null(), counts.as_ptr(), 3), refused(5022));
                assert_eq!(take(&mut 0, &mut 0, 1), refused(5022), "there are more");
            }
            for (_, take, sizes) in slabs {
                assert_eq!(get(take), (OK, sizes, counts));
            }
        }

        // Open, it takes no more, and keeps what there is; numbers have become properties.
        let mut properties = [0; 14];
        // SAFETY: they take nothing, or room that is there.
        unsafe {
            assert_eq!((cufile.cuFileDriverOpen)(), OK);
            assert_eq!((cufile.cuFileDriverGetProperties)(&mut properties), OK);
            for (put, take, sizes) in slabs {
                assert_eq!(put(counts.as_ptr(), counts.as_ptr(), 3), refused(5026));
                assert_eq!(get(take), (OK, sizes, counts));
            }
        }
        // Poll threshold (two words), longest request (two), flags, and the rest by order.
        assert_eq!((properties[2], properties[4], properties[7] & 3), (110, 105, 1), "polling on, compatible mode off");
        assert_eq!(properties[9..], [106, 107, 108, 109, 111]);
        assert_eq!((set(2, "/var"), string(&cufile, 2, 64).as_deref()), (refused(5026), Ok("/tmp")));
        // SAFETY: it takes numbers.
        assert_eq!(unsafe { (cufile.cuFileSetParameterSizeT)(1, 9) }, refused(5026));
        assert_eq!(size(&cufile, 1), Ok(101));
    });
}

#[test]
fn later_versions_have_more_parameters() {
    with_libcuda(software_cuda::folder(), &[("GPUNVME_CUFILE_VERSION", "1200")], || {
        let cufile = in_use();
        assert_eq!((switch(&cufile, 13), switch(&cufile, 14)), (Ok(false), Err(refused(5022))));
        assert_eq!(string(&cufile, 3, 64).as_deref(), Ok("DC_V1"));
        assert_eq!(string(&cufile, 4, 64), Err(refused(5022)));
    });
}

#[test]
fn properties_are_set_within_their_limits_and_read_back() {
    with_software_cuda("", || {
        let cufile = in_use();
        let read = || {
            let mut properties = [0; 14];
            // SAFETY: there is room for them.
            assert_eq!(unsafe { (cufile.cuFileDriverGetProperties)(&mut properties) }, OK);
            properties
        };
        // SAFETY: what is NULL is refused.
        let null = unsafe { (cufile.cuFileDriverGetProperties)(ptr::null_mut()) };
        assert_eq!(null, refused(5022));
        // As they are by default: version 2, since 0.0 is for files that the processor reads; NVMe;
        // compatible mode; batches, streams and parallel requests.
        let usual = read();
        assert_eq!(usual[..2], [2, 0]);
        assert_eq!(usual[2..], [4, 0, 16_384, 0, 1 << 4, 1 << 1, 0b1110, 131_072, 1024, 33_554_432, 128, 5]);
        // SAFETY: they take numbers.
        unsafe {
            for (set, place, limits) in [
                (cufile.cuFileDriverSetMaxDirectIOSize, 4, (64, 16_384)),
                (cufile.cuFileDriverSetMaxCacheSize, 9, (0, u32::MAX as usize)),
                (cufile.cuFileDriverSetMaxPinnedMemSize, 11, (64, u32::MAX as usize)),
            ] {
                for value in [limits.0, 4096, limits.1] {
                    assert_eq!(set(value), OK, "{value} at {place}");
                    assert_eq!(read()[place] as usize, value);
                }
                let least: &[usize] = if limits.0 == 0 { &[] } else { &[limits.0 - 1] };
                let most: &[usize] = if place == 11 { &[] } else { &[limits.1 + 1] };
                for &value in least.iter().chain(most) {
                    assert_eq!(set(value), refused(5003), "{value} at {place}");
                }
                assert_eq!(read()[place] as usize, limits.1, "what was refused changed nothing");
            }
            assert_eq!(((cufile.cuFileDriverSetPollMode)(true, 64), read()[2], read()[7] & 1), (OK, 64, 1));
            assert_eq!((cufile.cuFileDriverSetPollMode)(true, 3), refused(5003));
            assert_eq!(((cufile.cuFileDriverSetPollMode)(false, 8), read()[2], read()[7] & 1), (OK, 8, 0));
        }
    });
}

#[test]
fn what_is_known_of_the_machine_is_told() {
    with_software_cuda("gpus=2,memory=1073741824", || {
        let (cufile, scratch) = (in_use(), scratch_dir());
        let bar = |gpu| {
            let mut kib = 77;
            // SAFETY: there is room for the number.
            (unsafe { (cufile.cuFileGetBARSizeInKB)(gpu, &mut kib) }, kib)
        };
        // The kernel shows no such device: all of its memory is what a BAR could show.
        assert_eq!((bar(0), bar(1)), ((OK, 1 << 20), (OK, 1 << 20)));
        assert_eq!((bar(2), bar(-1)), ((refused(5029), 77), (refused(5022), 77)));

        let path = scratch.path().join("topology");
        let export = |path: &CStr| {
            // SAFETY: the path ends in a zero byte.
            unsafe { (cufile.cuFileExportPCIeTopology)(path.as_ptr()) }
        };
        assert_eq!(export(&CString::new(path.to_str().unwrap()).unwrap()), OK);
        let text = fs::read_to_string(&path).unwrap();
        let gpus: Vec<_> = text.lines().filter(|line| line.starts_with("gpu ")).collect();
        assert_eq!(gpus.len(), 2, "{text}");
        assert!(gpus[0].split(' ').nth(1).unwrap().eq_ignore_ascii_case(gpu().pci_address()), "{text}");
        assert_eq!(export(c"/nowhere/at/all"), refused(5030));
        // SAFETY: what is NULL is refused.
        unsafe {
            assert_eq!((cufile.cuFileExportPCIeTopology)(ptr::null()), refused(5022));
            assert_eq!((cufile.cuFileGetBARSizeInKB)(0, ptr::null_mut()), refused(5022));
            // There are no such settings.
            assert_eq!((cufile.cuFileDriverSetP2PFlags)(4, 1), refused(5008));
            assert_eq!((cufile.cuFileDriverGetP2PFlags)(4, &mut 0), refused(5008));
        }
    });
}
