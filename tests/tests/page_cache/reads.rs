//! What a read says of the page cache, and reads into host memory.

use super::{MIB, Reader, only, resident, transfers};
use gpunvme::gpu::{Caching, Segment};
use gpunvme::{Buffer, Error, File, Mount, Reason, Require, Route, Transfer};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::needs_mount;
use gpunvme_tests::software_cuda::with_software_cuda;
use rustix::fs::{Advice, fadvise};
use std::fs;
use std::os::unix::fs::OpenOptionsExt;

/// What is told of a read of which nothing comes from the page cache, and of one of which a part
/// does.
#[test]
fn a_read_says_why_it_did_not_come_from_the_page_cache() {
    needs_mount!();
    with_software_cuda("", || {
        let volume = Mounted::new();
        let (file, bytes) = resident(&volume, 4 * MIB);
        let mut reader = Reader::new(4 * MIB);
        let all = transfers(&volume, Caching::Resident, None);
        // Another test may just have had the kernel drop what it has.
        let found = |told: &mut dyn FnMut() -> Transfer, reason| {
            (0..20).any(|_| {
                assert!(fs::read(file.path()).unwrap() == bytes);
                told().cache_reason == Some(reason)
            })
        };
        assert!(found(&mut || reader.read(&all, &file, 0, 4 * MIB).unwrap().0, Reason::None));
        for (transfers, route) in [(transfers(&volume, Caching::Never, None), None), (all.clone(), Some(Route::Bounce))] {
            let transfers = transfers.requiring(Require { route, direct: false });
            let (done, _) = reader.read(&transfers, &file, 0, 4 * MIB).unwrap();
            assert_eq!((done.reason == Some(Reason::NoVfio), done.cache_reason), (route.is_none(), Some(Reason::CachingOff)));
        }
        for (offset, len) in [(0, 4 * MIB), (MIB, 4096), (MIB, 100)] {
            fadvise(fs::File::open(file.path()).unwrap(), 0, None, Advice::DontNeed).unwrap();
            let (done, _) = reader.read(&all, &file, offset, len).unwrap();
            assert_eq!(done.cache_reason, Some(Reason::NotResident), "{:?}", done.moved);
        }
        let segment = Segment { file_offset: 0, address: reader.memory.address(), len: 4096 };
        // SAFETY: the memory is this test's.
        let written = unsafe { all.write(&File::create(file.path()).unwrap(), &[segment]) }.unwrap();
        assert_eq!(written.cache_reason, None);
        // In the order of a stream.
        // SAFETY: as above.
        let pending = unsafe { all.read_on_stream(&file, &[segment], 0) }.unwrap();
        assert_eq!(pending.wait().unwrap().cache_reason, Some(Reason::NotResident));
    });
}

/// What the page cache has is copied from there into host memory, and what it has not, or is not to
/// be asked for, comes from the device.
#[test]
fn reads_into_host_memory_take_what_the_page_cache_has() {
    needs_mount!();
    let volume = Mounted::new();
    let len = 3 * MIB + 77;
    let (file, bytes) = resident(&volume, len);
    let mut buffer = Mount::open(volume.root()).unwrap().register(Buffer::memfd((4 << 20) + 4096).unwrap()).unwrap();
    let mut read = |file: &File, bytes: &[u8], (offset, len): (u64, u64), require| {
        buffer.fill(0xee);
        let segment = gpunvme::Segment { file_offset: offset, buffer_offset: 3, len };
        let done = file.read_requiring(&mut buffer, &[segment], require)?;
        let (from, count) = (offset as usize, done.bytes() as usize);
        assert!(buffer[3..3 + count] == bytes[from..from + count] && buffer[3 + count..].iter().all(|byte| *byte == 0xee));
        assert_eq!(count as u64, len.min(bytes.len() as u64 - offset));
        gpunvme::Result::Ok(done)
    };
    let any = Require::default();
    let direct = fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(file.path()).unwrap();
    let direct = File::of(direct, file.path()).unwrap();
    for range in [(0, len), (0, 4 << 20), (1, 1), (len - 1, 100), (MIB - 5, 4096), (len, 5)] {
        for file in [&file, &direct] {
            // Another test may just have had the kernel drop what it has.
            let from_cache = (0..20).any(|_| {
                assert!(fs::read(file.path()).unwrap() == bytes);
                let done = read(file, &bytes, range, any).unwrap();
                done.moved.cache == done.bytes() && (done.bytes() == 0 || done.cache_reason == Some(Reason::None))
            });
            assert!(from_cache, "{range:?}");
            let done = read(file, &bytes, range, only(Route::Host)).unwrap();
            assert_eq!(done.moved.cache, 0);
        }
    }
    let with_direct = Require { route: None, direct: true };
    let refused = read(&file, &bytes, (1, 1), with_direct);
    assert!(matches!(refused, Err(Error::Transfer { reason: Reason::Unaligned, .. })), "{refused:?}");
    // It can be demanded, and forbidden.
    fadvise(fs::File::open(file.path()).unwrap(), 0, None, Advice::DontNeed).unwrap();
    let refused = read(&file, &bytes, (0, len), only(Route::Cache));
    assert!(matches!(refused, Err(Error::Transfer { reason: Reason::NotResident, .. })), "{refused:?}");
    let done = read(&file, &bytes, (0, len), any).unwrap();
    assert_eq!((done.moved.cache, done.cache_reason), (0, Some(Reason::NotResident)));
    assert!(fs::read(file.path()).unwrap() == bytes);
    file.set_caching(Some(Caching::Never));
    let done = read(&file, &bytes, (0, len), any).unwrap();
    assert_eq!((done.moved.cache, done.cache_reason), (0, Some(Reason::CachingOff)));
    file.set_caching(None);
    // What is written past the page cache is read.
    let mut changed = bytes.clone();
    changed[MIB as usize..][..4096].fill(9);
    let mut other = Mount::open(volume.root()).unwrap().register(Buffer::memfd(4096).unwrap()).unwrap();
    other.fill(9);
    let segment = gpunvme::Segment { file_offset: MIB, buffer_offset: 0, len: 4096 };
    assert!(fs::read(file.path()).unwrap() == bytes);
    File::create(file.path()).unwrap().write(&other, &[segment]).unwrap();
    read(&file, &changed, (0, len), any).unwrap();
    // A file that is open for writing only is the daemon's to refuse.
    for flags in [0, libc::O_DIRECT] {
        assert!(fs::read(file.path()).unwrap() == changed);
        let written = fs::OpenOptions::new().write(true).custom_flags(flags).open(file.path()).unwrap();
        let refused = read(&File::of(written, file.path()).unwrap(), &changed, (0, 10), any);
        assert_eq!(refused.unwrap_err().errno(), rustix::io::Errno::BADF);
    }
    // Where it is demanded, the end of the file is no error, and what does not fit is one.
    let done = read(&file, &changed, (len, 5), only(Route::Cache)).unwrap();
    assert_eq!(done.bytes(), 0);
    let outside = gpunvme::Segment { file_offset: 0, buffer_offset: 8 << 20, len: 1 };
    let refused = file.read_requiring(&mut other, &[outside], only(Route::Cache));
    assert!(matches!(refused, Err(Error::OutsideBuffer { .. })), "{refused:?}");
    // A buffer of another mount is none, whatever the page cache has.
    let elsewhere = Mounted::new();
    let mut foreign = Mount::open(elsewhere.root()).unwrap().register(Buffer::memfd(4096).unwrap()).unwrap();
    let segment = gpunvme::Segment { file_offset: 0, buffer_offset: 0, len: 4096 };
    for route in [None, Some(Route::Cache)] {
        assert!(fs::read(file.path()).unwrap() == changed);
        file.read_requiring(&mut foreign, &[segment], Require { route, direct: false }).unwrap_err();
    }
}

/// After many short reads that the page cache had nothing of, what it has is still found where it
/// is demanded.
#[test]
fn what_the_page_cache_has_is_read_where_it_is_demanded_after_many_reads_that_it_had_not() {
    needs_mount!();
    let volume = Mounted::new();
    let (file, bytes) = resident(&volume, 4 * MIB);
    let mut buffer = Mount::open(volume.root()).unwrap().register(Buffer::memfd(4096).unwrap()).unwrap();
    fadvise(fs::File::open(file.path()).unwrap(), 0, None, Advice::DontNeed).unwrap();
    for n in 0..600 {
        let segment = gpunvme::Segment { file_offset: n * 4096, buffer_offset: 0, len: 4096 };
        file.read(&mut buffer, &[segment]).unwrap();
    }
    let found = (0..20).any(|_| {
        assert!(fs::read(file.path()).unwrap() == bytes);
        let segment = gpunvme::Segment { file_offset: 0, buffer_offset: 0, len: 4096 };
        file.read_requiring(&mut buffer, &[segment], only(Route::Cache)).is_ok()
    });
    assert!(found);
}
