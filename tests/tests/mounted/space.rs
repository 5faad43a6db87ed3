//! A full volume: the write that does not fit fails, existing data stays, deleting makes room, and
//! writes succeed again.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::sys::Mapping;
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::FallocateFlags;

fn small_volume() -> Mounted {
    Image::formatted_with(96 << 20).mount()
}

fn free(volume: &Mounted) -> u64 {
    let statfs = rustix::fs::statvfs(volume.root()).unwrap();
    statfs.f_bavail * statfs.f_frsize
}

/// Writes until nothing more fits; how many bytes of each file were accepted and synced.
fn fill(volume: &Mounted, prefix: &str, step: usize) -> Vec<usize> {
    let mut lens = Vec::new();
    loop {
        let data = tree::pattern(lens.len() as u64, 7 << 20);
        let path = volume.path(format!("{prefix}{}", lens.len()));
        let mut file = match File::create(&path) {
            Ok(file) => file,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull);
                return lens;
            }
        };
        let mut len = 0;
        while len < data.len() {
            match file.write(&data[len..data.len().min(len + step)]) {
                Ok(n) => len += n,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
                    file.sync_all().expect("what was accepted has its place");
                    lens.push(len);
                    return lens;
                }
            }
        }
        file.sync_all().expect("what was accepted has its place");
        lens.push(len);
    }
}

fn assert_kept(volume: &Mounted, prefix: &str, lens: &[usize]) {
    for (number, &len) in lens.iter().enumerate() {
        let read = fs::read(volume.path(format!("{prefix}{number}"))).unwrap();
        assert!(read == tree::pattern(number as u64, 7 << 20)[..len], "file {number}");
    }
}

#[test]
fn enospc_in_the_middle_of_a_write_loses_nothing_and_deletes_make_room() {
    needs_mount!();
    let mut volume = small_volume();
    let empty = free(&volume);
    for (round, step) in [1 << 20, 4096, 100_000].into_iter().enumerate() {
        let lens = fill(&volume, "file", step);
        let written: usize = lens.iter().sum();
        assert!(written as u64 > empty * 8 / 10, "round {round}: {written} of {empty} bytes fitted");
        assert_kept(&volume, "file", &lens);
        // On a full volume everything that needs no room works.
        fs::metadata(volume.path("file0")).unwrap();
        fs::rename(volume.path("file0"), volume.path("renamed")).unwrap();
        fs::rename(volume.path("renamed"), volume.path("file0")).unwrap();
        volume = volume.remount();
        assert_kept(&volume, "file", &lens);
        for number in 0..lens.len() {
            fs::remove_file(volume.path(format!("file{number}"))).unwrap();
        }
        volume = volume.remount();
        assert!(free(&volume) + (1 << 20) >= empty, "round {round}: {} of {empty} bytes came back", free(&volume));
    }
}

#[test]
fn room_made_by_truncation_is_usable_at_once() {
    needs_mount!();
    let volume = small_volume();
    let lens = fill(&volume, "file", 1 << 20);
    for round in 0..20_u64 {
        File::options().write(true).open(volume.path("file1")).unwrap().set_len(0).unwrap();
        let data = tree::pattern(round, 5 << 20);
        let mut file = File::create(volume.path("file1")).unwrap();
        file.write_all(&data).unwrap_or_else(|error| panic!("round {round}: {error}"));
        file.sync_all().unwrap();
        drop(file);
        assert!(fs::read(volume.path("file1")).unwrap() == data);
    }
    assert!(lens.len() > 2);
}

#[test]
fn a_volume_full_of_small_files_can_be_emptied() {
    needs_mount!();
    let volume = small_volume();
    let mut made = 0;
    let refusal = loop {
        let folder = volume.path(format!("{}", made / 500));
        let result =
            fs::create_dir_all(&folder).and_then(|()| fs::write(folder.join(format!("{made}")), tree::pattern(made, 6000)));
        match result {
            Ok(()) => made += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refusal.kind(), ErrorKind::StorageFull);
    assert!(made > 5000, "only {made} files fitted");
    let volume = volume.remount();
    for number in (0..made).step_by(97) {
        let path = volume.path(format!("{}/{number}", number / 500));
        assert!(fs::read(path).unwrap() == tree::pattern(number, 6000));
    }
    for entry in fs::read_dir(volume.root()).unwrap() {
        fs::remove_dir_all(entry.unwrap().path()).unwrap();
    }
    fs::write(volume.path("after"), tree::pattern(1, 40 << 20)).unwrap();
}

#[test]
fn fallocate_that_does_not_fit_is_refused_and_reserves_nothing() {
    needs_mount!();
    let volume = small_volume();
    let before = free(&volume);
    let file = File::create(volume.path("file")).unwrap();
    let result = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 1 << 30);
    assert_eq!(result, Err(rustix::io::Errno::NOSPC));
    drop(file);
    fs::remove_file(volume.path("file")).unwrap();
    let volume = volume.remount();
    assert!(free(&volume) + (1 << 20) >= before);
    fs::write(volume.path("file"), tree::pattern(1, 50 << 20)).unwrap();
}

#[test]
fn what_many_remove_at_once_is_gone_soon() {
    needs_mount!();
    // With so many loops some stand aside; what the kernel forgets comes to one of them in lots.
    let volume = Image::formatted_with(256 << 20).mount_with("threads=16");
    let inodes = || rustix::fs::statvfs(volume.root()).map(|statfs| statfs.f_files - statfs.f_ffree).unwrap();
    let before = inodes();
    let in_each = |work: fn(&std::path::Path)| {
        std::thread::scope(|scope| {
            for client in 0..8 {
                let folder = volume.path(format!("{client}"));
                scope.spawn(move || work(&folder));
            }
        });
    };
    in_each(|folder| {
        fs::create_dir(folder).unwrap();
        (0..400).for_each(|number| drop(File::create(folder.join(format!("{number}"))).unwrap()));
    });
    assert_eq!(inodes() - before, 8 * 401);
    in_each(|folder| fs::remove_dir_all(folder).unwrap());
    let start = Instant::now();
    while inodes() != before {
        assert!(start.elapsed() < Duration::from_secs(20), "{} inodes are still there", inodes() - before);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_names_took_comes_back_to_a_mount_that_is_idle() {
    needs_mount!();
    let volume = Image::formatted_with(32 << 20).mount_with("commit=1");
    let before = free(&volume);
    // More than one chunk of 2 MiB for their entries and inodes, and no data.
    let name = |number: u32| volume.path(format!("{number:0>250}"));
    (0..10_000).for_each(|number| drop(File::create(name(number)).unwrap()));
    assert!(free(&volume) + (2 << 20) <= before);
    (0..10_000).for_each(|number| fs::remove_file(name(number)).unwrap());
    let start = Instant::now();
    while free(&volume) < before {
        assert!(start.elapsed() < Duration::from_secs(30), "{} bytes are not free", before - free(&volume));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The kernel copies the bytes of a write into its pages before it asks; where the answer is an
/// error they are no file's, but would be seen through mappings, and by GPUs that read those pages.
#[test]
fn a_write_that_does_not_fit_is_not_seen_through_mappings() {
    needs_mount!();
    let volume = small_volume();
    let sparse = File::options().read(true).write(true).create_new(true).open(volume.path("sparse")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    sparse.sync_all().unwrap();
    fill(&volume, "full", 1 << 20);
    let mapped = Mapping::shared(&sparse, 1 << 20).unwrap();
    let page = || {
        let mut bytes = [1; 4096];
        mapped.read(8192, &mut bytes);
        bytes
    };
    assert!(page() == [0; 4096]);
    // Small ones may still fit where larger ones did not.
    let refused = (0..2000).any(|_| {
        let written = sparse.write_at(&[0x77; 4096], 8192);
        if written.is_ok() {
            sparse.sync_all().unwrap();
            let more = tree::pattern(9, 1 << 20);
            let _ = OpenOptions::new().append(true).create(true).open(volume.path("more")).unwrap().write(&more);
            rustix::fs::fallocate(&sparse, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 8192, 4096).unwrap();
        }
        written.is_err_and(|error| error.kind() == ErrorKind::StorageFull)
    });
    assert!(refused, "the volume never was full");
    let end = Instant::now() + Duration::from_secs(10);
    while page() != [0; 4096] {
        assert!(Instant::now() < end, "what was refused is still seen");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(sparse.read_at(&mut [0; 4096], 8192).unwrap(), 4096);
    drop(mapped);
}
