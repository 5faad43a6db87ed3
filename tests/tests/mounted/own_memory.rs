//! Memory that the application has: registered by its memfd, and copied where it is none.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};

use gpunvme::{Copier, Error, File, HostMemory, Mount, Operation, Reason, Ring, Segment, Wait};
use gpunvme_tests::direct::memfd;
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::random::Random;
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{needs_mount, tree};
use rustix::io::Errno;
use rustix::process::Signal;

const LEN: usize = (11 << 20) + 700;

#[test]
fn copies_are_right_at_any_offset_and_length() {
    needs_mount!();
    let volume = Mounted::new();
    let mut expected = tree::pattern(71, LEN);
    fs::write(volume.path("file"), &expected).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let file = File::create(volume.path("file")).unwrap();
    let mut copier = Copier::new(&mount).unwrap();
    let mut random = Random(71);
    for round in 0..80 {
        // Short ones, and such as take several pieces.
        let offset = random.below(LEN as u64 + 5000) as usize;
        let len = random.below(if round % 2 == 0 { 9000 } else { LEN as u64 }) as usize;
        if round % 4 < 2 {
            let mut read = vec![0x5a; len];
            let done = copier.read(&file, offset as u64, &mut read).unwrap();
            let there = &expected[offset.min(expected.len())..(offset + len).min(expected.len())];
            assert_eq!(done.bytes(), there.len() as u64, "{len} bytes at {offset}");
            assert!(read[..there.len()] == *there && read[there.len()..].iter().all(|&byte| byte == 0x5a));
            assert!(len == 0 || done.reason == Some(Reason::NotRegistered), "{done:?}");
        } else {
            let data = tree::pattern(round, len);
            let done = copier.write(&file, offset as u64, &data).unwrap();
            assert_eq!(done.bytes(), len as u64);
            if len > 0 {
                expected.resize(expected.len().max(offset + len), 0);
                expected[offset..offset + len].copy_from_slice(&data);
            }
        }
    }
    assert!(fs::read(volume.path("file")).unwrap() == expected);
}

#[test]
fn copies_that_fail_say_how_far_they_came() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(72, LEN);
    fs::write(volume.path("file"), &data).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let mut copier = Copier::new(&mount).unwrap();
    // A file that is open for reading only, and one of another volume.
    let read_only = File::open(volume.path("file")).unwrap();
    for len in [100, LEN] {
        let error = copier.write(&read_only, 0, &data[..len]).unwrap_err();
        assert_eq!(error.errno(), Errno::BADF, "{error}");
    }
    let other = Mounted::new();
    fs::write(other.path("file"), &data).unwrap();
    let elsewhere = File::open(other.path("file")).unwrap();
    let mut memory = vec![0; LEN];
    for len in [100, LEN] {
        assert!(copier.read(&elsewhere, 0, &mut memory[..len]).is_err(), "{len} bytes of a file of another mount");
    }
    // It is as good as before.
    assert_eq!(copier.read(&read_only, 0, &mut memory).unwrap().bytes(), LEN as u64);
    assert!(memory == data);
    drop((elsewhere, other));
    let (_, dead) = volume.signal(Signal::KILL);
    for len in [100, LEN, 100] {
        assert!(copier.read(&read_only, 0, &mut memory[..len]).is_err(), "{len} bytes of a dead mount");
    }
    drop(dead);
}

#[test]
fn a_memfd_of_the_application_takes_transfers_of_calls_and_rings() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(73, LEN);
    fs::write(volume.path("file"), &data).unwrap();
    let mount = Mount::open(volume.root()).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    let memory = memfd(LEN as u64);
    let mapped = Mapping::shared(memory.as_fd(), LEN).unwrap();
    let own = |len| HostMemory::memfd(OwnedFd::from(memory.try_clone().unwrap()), len);
    let bytes = || {
        let mut bytes = vec![0; LEN];
        mapped.read(0, &mut bytes);
        bytes
    };

    let mut buffer = mount.register(own(LEN)).unwrap();
    let whole = Segment { file_offset: 0, buffer_offset: 0, len: LEN as u64 };
    assert_eq!(file.read(&mut buffer, &[whole]).unwrap().bytes(), LEN as u64);
    assert!(bytes() == data);
    mapped.write(0, &vec![0; LEN]);
    let buffer = buffer.share();
    let mut ring = Ring::new(&mount, 8).unwrap();
    let attached = ring.attach(&file).unwrap();
    let mut done = Vec::new();
    for at in (0..LEN as u64).step_by(2 << 20) {
        let len = (LEN as u64 - at).min(2 << 20);
        ring.push(&Operation::read(&attached, at, &buffer, at, len).tagged(at)).unwrap();
    }
    let in_flight = ring.in_flight();
    assert_eq!(ring.complete_at_least(usize::MAX, Wait::Forever, &mut done).unwrap(), in_flight);
    assert!(done.iter().all(|done| done.result.is_ok()) && bytes() == data);

    // More than the memfd has is refused, with the reason.
    let refused = mount.register(own(LEN + (1 << 20))).unwrap_err();
    assert!(matches!(refused, Error::Refused { reason: Reason::TooSmall, .. } | Error::Memory { .. }), "{refused}");
}
