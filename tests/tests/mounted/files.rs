//! File contents: every way to write, cut, extend, punch, map and find them, each read back by
//! another way.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::process::Command;

use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

fn open(path: &std::path::Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

#[test]
fn contents_of_any_length_and_offset_read_back_cold() {
    needs_mount!();
    let volume = Mounted::new();
    let lens = [1, 511, 512, 4095, 4096, 4097, 65536, 131_073, 1 << 20, (5 << 20) + 3, 40 << 20];
    for (seed, len) in lens.into_iter().enumerate() {
        fs::write(volume.path(format!("f{len}")), tree::pattern(seed as u64, len)).unwrap();
    }
    let volume = volume.remount();
    for (seed, len) in lens.into_iter().enumerate() {
        let data = tree::pattern(seed as u64, len);
        let file = File::open(volume.path(format!("f{len}"))).unwrap();
        assert_eq!(file.metadata().unwrap().len(), len as u64);
        assert!(fs::read(volume.path(format!("f{len}"))).unwrap() == data, "{len} bytes differ");
        let mut middle = vec![0; len.min(9000)];
        let offset = (len - middle.len()) / 2;
        file.read_exact_at(&mut middle, offset as u64).unwrap();
        assert!(middle == data[offset..offset + middle.len()], "the middle of {len} bytes differs");
        assert_eq!(file.read_at(&mut middle, len as u64).unwrap(), 0, "nothing behind the end");
    }
}

#[test]
fn overwrites_in_random_places_leave_the_rest_alone() {
    needs_mount!();
    let volume = Mounted::new();
    let mut model = tree::pattern(1, 6 << 20);
    fs::write(volume.path("file"), &model).unwrap();
    let file = open(&volume.path("file"));
    for round in 0..300 {
        let random = u64::from_le_bytes(tree::pattern(1000 + round, 8).try_into().unwrap());
        let offset = (random % (6 << 20)) as usize;
        let len = ((random >> 32) % 70_000) as usize;
        let data = tree::pattern(random, len.min(model.len() - offset));
        file.write_all_at(&data, offset as u64).unwrap();
        model[offset..offset + data.len()].copy_from_slice(&data);
        if round % 50 == 0 {
            file.sync_data().unwrap();
        }
    }
    assert!(fs::read(volume.path("file")).unwrap() == model);
    drop(file);
    let volume = volume.remount();
    assert!(fs::read(volume.path("file")).unwrap() == model);
}

#[test]
fn append_goes_to_the_end_whatever_the_offset_and_whoever_else_appends() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("log");
    let append = || OpenOptions::new().append(true).create(true).open(&path).unwrap();
    let mut first = append();
    first.write_all(b"one ").unwrap();
    append().write_all(b"two ").unwrap();
    first.seek(SeekFrom::Start(0)).unwrap();
    first.write_all(b"three").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "one two three");

    std::thread::scope(|scope| {
        for writer in 0..4_u8 {
            scope.spawn(move || {
                let mut file = append();
                for _ in 0..200 {
                    file.write_all(&[b'A' + writer; 37]).unwrap();
                }
            });
        }
    });
    let all = fs::read(&path).unwrap();
    assert_eq!(all.len(), 13 + 4 * 200 * 37);
    for line in all[13..].chunks(37) {
        assert!(line.iter().all(|byte| byte == &line[0]), "two appends were mixed");
    }
}

#[test]
fn truncation_cuts_extends_with_zeros_and_never_brings_bytes_back() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(3, 100_000)).unwrap();
    let file = open(&path);
    file.set_len(10_001).unwrap();
    file.set_len(200_000).unwrap();
    let read = fs::read(&path).unwrap();
    assert_eq!(read.len(), 200_000);
    assert!(read[..10_001] == tree::pattern(3, 100_000)[..10_001]);
    assert!(read[10_001..].iter().all(|&byte| byte == 0), "old bytes came back");

    drop(OpenOptions::new().write(true).truncate(true).open(&path).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 0);
    file.write_all_at(b"x", 4099).unwrap();
    assert!(fs::read(&path).unwrap()[..4099].iter().all(|&byte| byte == 0));
    drop(file);
    let volume = volume.remount();
    assert_eq!(fs::metadata(volume.path("file")).unwrap().len(), 4100);
}

#[test]
fn sparse_files_cost_what_is_written_and_say_where_that_is() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("sparse");
    let file = open(&path);
    let far = 1_u64 << 40;
    file.write_all_at(b"start", 0).unwrap();
    file.write_all_at(b"middle", 8 << 20).unwrap();
    file.write_all_at(b"end", far).unwrap();
    file.sync_all().unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), far + 3);
    assert!(metadata.blocks() * 512 <= 256 << 10, "{} bytes used", metadata.blocks() * 512);

    let seek = |whence| rustix::fs::seek(&file, whence);
    assert_eq!(seek(rustix::fs::SeekFrom::Data(0)), Ok(0));
    let hole = seek(rustix::fs::SeekFrom::Hole(0)).unwrap();
    assert!((5..8 << 20).contains(&hole), "hole at {hole}");
    let data = seek(rustix::fs::SeekFrom::Data(hole)).unwrap();
    assert!(data > hole && data <= 8 << 20, "data at {data}");
    let hole = seek(rustix::fs::SeekFrom::Hole(8 << 20)).unwrap();
    let data = seek(rustix::fs::SeekFrom::Data(hole)).unwrap();
    assert!(data > 9 << 20 && data <= far, "data at {data}");
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(far)), Ok(far + 3));
    assert_eq!(seek(rustix::fs::SeekFrom::Data(far + 3)), Err(Errno::NXIO));
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(far + 3)), Err(Errno::NXIO));
    let mut zeros = [1; 100];
    file.read_exact_at(&mut zeros, 4 << 20).unwrap();
    assert_eq!(zeros, [0; 100]);
}

#[test]
fn fallocate_reserves_keeps_size_punches_and_zeroes() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    let file = open(&path);
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    assert!(file.metadata().unwrap().blocks() * 512 >= 1 << 20);
    assert!(fs::read(&path).unwrap().iter().all(|&byte| byte == 0), "unwritten space reads as zeros");

    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 1 << 20, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    assert!(file.metadata().unwrap().blocks() * 512 >= 2 << 20);

    let mut model = tree::pattern(4, 1 << 20);
    file.write_all_at(&model, 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for (offset, len) in [(8192, 40_960), (100_001, 30_000), (300_000, 17), ((1 << 20) - 5, 100)] {
        rustix::fs::fallocate(&file, punch, offset as u64, len as u64).unwrap();
        let end = (offset + len).min(model.len());
        model[offset..end].fill(0);
    }
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, 500_000, 50_003).unwrap();
    model[500_000..550_003].fill(0);
    assert!(fs::read(&path).unwrap() == model);
    rustix::fs::fallocate(&file, FallocateFlags::ZERO_RANGE, (1 << 20) - 100, 300).unwrap();
    model[(1 << 20) - 100..].fill(0);
    model.resize((1 << 20) + 200, 0);
    assert!(fs::read(&path).unwrap() == model);
    drop(file);
    let volume = volume.remount();
    assert!(fs::read(volume.path("file")).unwrap() == model);
}

#[test]
fn copy_file_range_copies_within_and_between_files() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(5, 3 << 20);
    fs::write(volume.path("from"), &data).unwrap();
    let from = open(&volume.path("from"));
    let to = open(&volume.path("to"));
    let (mut offset_from, mut offset_to) = (12_345, 777);
    let mut left = 2_000_000;
    while left > 0 {
        let n = rustix::fs::copy_file_range(&from, Some(&mut offset_from), &to, Some(&mut offset_to), left).unwrap();
        assert_ne!(n, 0);
        left -= n;
    }
    let copied = fs::read(volume.path("to")).unwrap();
    assert!(copied[..777].iter().all(|&byte| byte == 0));
    assert!(copied[777..] == data[12_345..12_345 + 2_000_000]);
    let (mut a, mut b) = (0, 2 << 20);
    let n = rustix::fs::copy_file_range(&from, Some(&mut a), &from, Some(&mut b), 100_000).unwrap();
    let read = fs::read(volume.path("from")).unwrap();
    assert!(read[2 << 20..(2 << 20) + n] == data[..n]);
}

#[test]
fn a_shared_mapping_and_ordinary_io_see_each_other() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(6, 300_000)).unwrap();
    let file = open(&path);
    let mapping = Mapping::shared(&file, 300_000).unwrap();
    mapping.write(100_000, b"through the mapping");
    let mut read = [0; 19];
    file.read_exact_at(&mut read, 100_000).unwrap();
    assert_eq!(&read, b"through the mapping");
    file.write_all_at(b"through write", 200_000).unwrap();
    let mut read = [0; 13];
    mapping.read(200_000, &mut read);
    assert_eq!(&read, b"through write");
    mapping.sync().unwrap();
    drop((mapping, file));

    let volume = volume.remount();
    let contents = fs::read(volume.path("file")).unwrap();
    assert_eq!(&contents[100_000..100_019], b"through the mapping");
    assert_eq!(&contents[200_000..200_013], b"through write");
    assert!(contents[..100_000] == tree::pattern(6, 300_000)[..100_000]);
}

#[test]
fn direct_io_and_buffered_io_see_each_other() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    let data = tree::pattern(7, 4 << 20);
    let direct =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
    // An anonymous shared mapping would do for alignment as well; a Vec cut at a page boundary is
    // simpler.
    let mut memory = vec![0_u8; (4 << 20) + 4096];
    let start = memory.as_ptr().align_offset(4096);
    let aligned = &mut memory[start..start + (4 << 20)];
    aligned.copy_from_slice(&data);
    direct.write_all_at(aligned, 0).unwrap();
    assert!(fs::read(&path).unwrap() == data);
    open(&path).write_all_at(b"buffered", 1 << 20).unwrap();
    direct.read_exact_at(aligned, 0).unwrap();
    assert_eq!(&aligned[1 << 20..(1 << 20) + 8], b"buffered");
    aligned[..4096].fill(9);
    direct.write_all_at(&aligned[..4096], 8192).unwrap();
    assert_eq!(fs::read(&path).unwrap()[8192..12288], [9; 4096]);
}

#[test]
fn a_program_that_runs_cannot_be_cut_or_opened_for_writing() {
    needs_mount!();
    let volume = Mounted::new();
    let program = volume.path("sleep");
    fs::copy("/bin/sleep", &program).unwrap();
    let len = fs::metadata(&program).unwrap().len();
    let mut running = Command::new(&program).arg("60").spawn().unwrap();
    // Each once more: the first must not have done any of it, and the program must live.
    for _ in 0..2 {
        for flags in [OFlags::WRONLY, OFlags::RDWR, OFlags::RDONLY | OFlags::TRUNC, OFlags::WRONLY | OFlags::TRUNC] {
            assert_eq!(rustix::fs::open(&program, flags, Mode::empty()).unwrap_err(), Errno::TXTBSY, "{flags:?}");
            assert_eq!(fs::metadata(&program).unwrap().len(), len, "after {flags:?}");
        }
    }
    assert!(running.try_wait().unwrap().is_none());
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(fs::read(&program).unwrap() == fs::read("/bin/sleep").unwrap());
}

#[test]
fn an_unlinked_file_lives_while_it_is_open_and_its_space_comes_back() {
    needs_mount!();
    let volume = Mounted::new();
    let free = |volume: &Mounted| rustix::fs::statvfs(volume.root()).unwrap().f_bfree;
    let before = free(&volume);
    let path = volume.path("file");
    let mut file = open(&path);
    file.write_all(&tree::pattern(8, 50 << 20)).unwrap();
    file.sync_all().unwrap();
    assert!(free(&volume) + (40 << 20) / 4096 < before);
    fs::remove_file(&path).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 0);
    file.write_all_at(b"still here", 10).unwrap();
    let mut read = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut read).unwrap();
    assert_eq!((&read[10..20], read.len()), (&b"still here"[..], 50 << 20));
    fs::write(&path, "another").unwrap();
    drop(file);
    assert_eq!(fs::read_to_string(&path).unwrap(), "another");
    let volume = volume.remount();
    assert!(free(&volume) + 64 >= before, "{} of {before} blocks came back", free(&volume));
}

#[test]
fn threads_that_write_and_read_different_files_do_not_disturb_each_other() {
    needs_mount!();
    let volume = Mounted::new();
    std::thread::scope(|scope| {
        for worker in 0..6_u64 {
            let folder = volume.path(format!("worker {worker}"));
            scope.spawn(move || {
                fs::create_dir(&folder).unwrap();
                for round in 0..30 {
                    let data =
                        tree::pattern(worker * 100 + round, (worker as usize * 31_337 + round as usize * 20_011) % 900_000);
                    let path = folder.join(format!("{}", round % 7));
                    fs::write(&path, &data).unwrap();
                    assert!(fs::read(&path).unwrap() == data, "worker {worker}, round {round}");
                    if round % 3 == 0 {
                        fs::remove_file(&path).unwrap();
                    }
                }
            });
        }
    });
}

#[test]
fn one_file_written_by_many_threads_at_once_holds_all_they_wrote() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    let file = open(&path);
    const PART: usize = 3_000_001;
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let file = &file;
            scope.spawn(move || {
                for (number, chunk) in tree::pattern(worker as u64, PART).chunks(65_000).enumerate() {
                    file.write_all_at(chunk, (worker * PART + number * 65_000) as u64).unwrap();
                }
            });
        }
    });
    let read = fs::read(&path).unwrap();
    for worker in 0..4 {
        assert!(read[worker * PART..(worker + 1) * PART] == tree::pattern(worker as u64, PART));
    }
}
