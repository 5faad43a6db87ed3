//! The direct path on a real mount: bytes go between files and registered memory, whole or in
//! pieces, and are always accounted for.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind};

use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use gpunvme_abi::{Command, ExtentFlags, INFO_MAGIC, Route, VERSION, get_text};
use gpunvme_tests::direct::{Buffer, extents, info, stats};
use gpunvme_tests::mounted::{Image, Mounted};
use gpunvme_tests::{needs_mount, tree};
use rustix::fs::FallocateFlags;

const MIB: u64 = 1 << 20;

fn open(path: impl AsRef<std::path::Path>) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn random(seed: u64, below: u64) -> u64 {
    u64::from_le_bytes(tree::pattern(seed, 8).try_into().unwrap()) % below
}

fn client() -> std::process::Command {
    std::process::Command::new(env!("CARGO_BIN_EXE_direct-client"))
}

#[test]
fn info_describes_the_mount_on_files_and_folders() {
    needs_mount!();
    let volume = Mounted::new();
    let of_folder = info(File::open(volume.root()).unwrap());
    let of_file = info(open(volume.path("file")));
    for info in [&of_folder, &of_file] {
        assert_eq!((info.version, info.magic), (VERSION, INFO_MAGIC));
        assert_eq!(info.uuid, of_folder.uuid);
        assert_eq!(info.block_size, 4096);
        assert!(info.logical_block.is_power_of_two() && info.memory_alignment.is_power_of_two());
        assert!(info.free <= info.capacity && info.capacity <= 1 << 30);
        assert_eq!(get_text(&info.device), volume.image().path().to_str().unwrap());
    }
}

#[test]
fn one_read_brings_a_whole_file() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(1, 24 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, 24 * MIB);
    let done = buffer.read(&file, 0, 24 * MIB).unwrap();
    assert_eq!((done.bytes, done.status), (24 * MIB, 0));
    assert_eq!(done.host, 24 * MIB, "an aligned transfer needs no copy");
    assert!(buffer.get(0, 24 << 20) == data);
}

#[test]
fn reads_take_any_offsets_and_lengths_and_many_pieces() {
    needs_mount!();
    let volume = Mounted::new();
    let len = 9 * MIB + 1234;
    let data = tree::pattern(2, len as usize);
    fs::write(volume.path("file"), &data).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, 16 * MIB);
    for round in 0..60 {
        // Pieces lie one after the other in the buffer, with gaps that must stay as they were.
        let mut segments = Vec::new();
        let mut at = random(round, 5000);
        for piece in 0..1 + random(round + 1000, 40) {
            let seed = round * 100 + piece;
            let offset = random(seed, len);
            let piece = random(seed + 7, 200_000).min(len - offset);
            segments.push((offset, at, piece));
            at += piece + random(seed + 9, 3) * 511;
        }
        buffer.put(0, &vec![0xee; 16 << 20]);
        let done = buffer.transfer(Command::Read, &file, &segments).unwrap();
        assert_eq!(done.bytes, segments.iter().map(|segment| segment.2).sum::<u64>());
        let mut expected = vec![0xee; 16 << 20];
        for (offset, at, piece) in segments {
            let (offset, at, piece) = (offset as usize, at as usize, piece as usize);
            expected[at..at + piece].copy_from_slice(&data[offset..offset + piece]);
        }
        assert!(buffer.get(0, 16 << 20) == expected, "round {round}");
    }
}

#[test]
fn reads_end_at_the_end_of_the_file() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(3, 10_000)).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, 65536);
    assert_eq!(buffer.read(&file, 0, 65536).unwrap().bytes, 10_000);
    assert_eq!(buffer.read(&file, 9_999, 100).unwrap().bytes, 1);
    assert_eq!(buffer.read(&file, 10_000, 100).unwrap().bytes, 0);
    assert_eq!(buffer.read(&file, 1 << 50, 100).unwrap().bytes, 0);
    // What follows a piece that ended early does not count.
    let done = buffer.transfer(Command::Read, &file, &[(0, 0, 100), (9_000, 100, 5_000), (0, 6000, 100)]).unwrap();
    assert_eq!((done.bytes, done.status), (1_100, 0));
    assert_eq!(buffer.transfer(Command::Read, &file, &[]).unwrap().bytes, 0);
    let empty = open(volume.path("empty"));
    assert_eq!(buffer.read(&empty, 0, 4096).unwrap().bytes, 0);
}

#[test]
fn holes_and_unwritten_space_are_zeros_without_io() {
    needs_mount!();
    let volume = Mounted::new();
    let file = open(volume.path("file"));
    file.set_len(4 * MIB).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 4 * MIB, 4 * MIB).unwrap();
    let data = tree::pattern(4, MIB as usize);
    file.write_all_at(&data, 2 * MIB).unwrap();
    file.sync_all().unwrap();
    let buffer = Buffer::new(&file, 8 * MIB);
    buffer.put(0, &vec![0xaa; 8 << 20]);
    let done = buffer.read(&file, 0, 8 * MIB).unwrap();
    assert_eq!((done.bytes, done.hole, done.host, done.edge), (8 * MIB, 7 * MIB, MIB, 0));
    let mut expected = vec![0; 8 << 20];
    expected[2 << 20..3 << 20].copy_from_slice(&data);
    assert!(buffer.get(0, 8 << 20) == expected);
    // Unaligned pieces of holes, too.
    buffer.put(0, &[0xaa; 4096]);
    assert_eq!(buffer.read(&file, 5 * MIB + 13, 1001).unwrap().hole, 1001);
    assert!(buffer.get(0, 1001).iter().all(|&byte| byte == 0) && buffer.get(1001, 1) == [0xaa]);
}

#[test]
fn writes_take_any_offsets_and_lengths_and_extend_the_file() {
    needs_mount!();
    let volume = Mounted::new();
    let file = open(volume.path("file"));
    let buffer = Buffer::new(&file, 4 * MIB);
    let source = tree::pattern(5, 4 << 20);
    buffer.put(0, &source);
    let mut model: Vec<u8> = Vec::new();
    for round in 0..60 {
        let mut segments: Vec<(u64, u64, u64)> = Vec::new();
        for piece in 0..1 + random(round + 2000, 12) {
            let seed = 50_000 + round * 100 + piece;
            let aligned = random(seed, 3) == 0;
            let mask = if aligned { !4095 } else { !0 };
            let offset = random(seed + 1, 6 * MIB) & mask;
            let at = random(seed + 2, 3 * MIB) & mask;
            let len = random(seed + 3, 300_000) & mask;
            // Which of two that overlap comes last is not promised.
            if segments.iter().any(|&(start, _, other)| offset < start + other && start < offset + len) {
                continue;
            }
            segments.push((offset, at, len));
            let (offset, at, len) = (offset as usize, at as usize, len as usize);
            if len > 0 {
                model.resize(model.len().max(offset + len), 0);
                model[offset..offset + len].copy_from_slice(&source[at..at + len]);
            }
        }
        let done = buffer.transfer(Command::Write, &file, &segments).unwrap();
        assert_eq!(done.bytes, segments.iter().map(|segment| segment.2).sum::<u64>());
        if round % 10 == 0 {
            assert!(fs::read(volume.path("file")).unwrap() == model, "round {round}");
        }
    }
    assert!(buffer.get(0, 4 << 20) == source, "writing leaves the buffer alone");
    drop(file);
    let volume = volume.remount();
    assert!(fs::read(volume.path("file")).unwrap() == model);
}

#[test]
fn an_aligned_write_goes_straight_from_the_buffer_and_moves_the_times() {
    needs_mount!();
    let volume = Mounted::new();
    let file = open(volume.path("file"));
    let before = file.metadata().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let buffer = Buffer::new(&file, 8 * MIB);
    buffer.put(0, &tree::pattern(6, 8 << 20));
    let done = buffer.write(&file, 4 * MIB, 8 * MIB).unwrap();
    assert_eq!((done.bytes, done.host, done.edge), (8 * MIB, 8 * MIB, 0));
    let after = file.metadata().unwrap();
    assert_eq!(after.len(), 12 * MIB);
    assert!(after.modified().unwrap() > before.modified().unwrap());
    assert_eq!(after.blocks() * 512, 8 * MIB, "the hole before it stays one");
}

#[test]
fn the_access_mode_of_the_open_file_decides() {
    needs_mount!();
    let volume = Mounted::new();
    fs::write(volume.path("file"), tree::pattern(7, 8192)).unwrap();
    let read_only = File::open(volume.path("file")).unwrap();
    let write_only = OpenOptions::new().write(true).open(volume.path("file")).unwrap();
    let folder = File::open(volume.root()).unwrap();
    let path_only = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&folder, 8192);
    let errno = |result: std::io::Result<_>| result.map(|_| ()).unwrap_err().raw_os_error();
    assert_eq!(errno(buffer.write(&read_only, 0, 4096)), Some(libc::EBADF));
    assert_eq!(errno(buffer.read(&write_only, 0, 4096)), Some(libc::EBADF));
    assert_eq!(errno(buffer.read(&path_only, 0, 4096)), Some(libc::EBADF));
    assert!(errno(buffer.read(&folder, 0, 4096)).is_some());
    buffer.read(&read_only, 0, 4096).unwrap();
    buffer.write(&write_only, 0, 4096).unwrap();
}

#[test]
fn a_read_only_mount_reads_and_does_not_write() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(8, 100_000);
    fs::write(volume.path("file"), &data).unwrap();
    let volume = volume.unmount().mount_with("ro");
    let file = File::open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, 100_000);
    assert_eq!(buffer.read(&file, 0, 100_000).unwrap().bytes, 100_000);
    assert!(buffer.get(0, 100_000) == data);
    assert_eq!(buffer.write(&file, 0, 4096).unwrap_err().raw_os_error(), Some(libc::EBADF));
}

#[test]
fn resolve_names_the_blocks_that_hold_the_bytes() {
    needs_mount!();
    let volume = Mounted::new();
    let file = open(volume.path("file"));
    let mut model = vec![0; 20 << 20];
    for (seed, start, len) in [(1, 0, 3 << 20), (2, 5 << 20, 70_000), (3, 8 << 20, 12 << 20)] {
        let data = tree::pattern(seed, len);
        file.write_all_at(&data, start as u64).unwrap();
        model[start..start + len].copy_from_slice(&data);
    }
    rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 6 * MIB, MIB).unwrap();
    file.sync_all().unwrap();
    let all = extents(&file);
    assert!(all.windows(2).all(|pair| pair[0].file_offset + pair[0].len <= pair[1].file_offset));
    assert!(all.iter().any(|extent| extent.flags & ExtentFlags::UNWRITTEN.bits() != 0));
    // Read around the filesystem: what the extents name on the device is what the file says.
    drop(file);
    let image = volume.unmount();
    let device = File::open(image.path()).unwrap();
    let mut assembled = vec![0; 20 << 20];
    for extent in all.iter().filter(|extent| extent.flags & ExtentFlags::UNWRITTEN.bits() == 0) {
        let start = extent.file_offset as usize;
        let end = (start + extent.len as usize).min(assembled.len());
        device.read_exact_at(&mut assembled[start..end], extent.device_offset).unwrap();
    }
    assert!(assembled == model);
}

#[test]
fn a_large_file_lies_in_few_aligned_extents() {
    needs_mount!();
    let volume = Mounted::new();
    let data = tree::pattern(1, 64 << 20);
    fs::write(volume.path("file"), &data).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    file.sync_all().unwrap();
    let all = extents(&file);
    assert!(all.len() <= 4, "64 MiB on an empty volume lie in {} extents", all.len());
    assert_eq!(all[0].device_offset % (2 * MIB), 0);
}

#[test]
fn a_buffer_serves_many_threads_and_many_files() {
    needs_mount!();
    let volume = Mounted::new();
    for number in 0..8 {
        fs::write(volume.path(format!("{number}")), tree::pattern(number, 2 << 20)).unwrap();
    }
    let buffer = Buffer::new(File::open(volume.root()).unwrap(), 16 * MIB);
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (volume, buffer) = (&volume, &buffer);
            scope.spawn(move || {
                let file = File::open(volume.path(format!("{number}"))).unwrap();
                let at = number * 2 * MIB;
                for _ in 0..20 {
                    buffer.put(at, &vec![0; 2 << 20]);
                    assert_eq!(buffer.transfer(Command::Read, &file, &[(0, at, 2 * MIB)]).unwrap().bytes, 2 * MIB);
                    assert!(buffer.get(at, 2 << 20) == tree::pattern(number, 2 << 20));
                }
                // Registering works from a thread that is not the process's first, too.
                let own = Buffer::new(&file, 4096);
                own.read(&file, 0, 4096).unwrap();
                own.unregister(&file).unwrap();
            });
        }
    });
    assert_eq!(stats(File::open(volume.root()).unwrap()).buffers, 1);
}

#[test]
fn a_buffer_outlives_its_fd_and_ends_with_unregister() {
    needs_mount!();
    let volume = Mounted::new();
    let file = open(volume.path("file"));
    file.write_all_at(&tree::pattern(9, 8192), 0).unwrap();
    let buffer = Buffer::new(&file, 8192);
    let memory = buffer.memory.try_clone().unwrap();
    let id = buffer.id;
    drop(buffer.memory);
    let buffer = Buffer { memory, id };
    assert_eq!(buffer.read(&file, 0, 8192).unwrap().bytes, 8192);
    let memory = buffer.unregister(&file).unwrap();
    let gone = Buffer { memory, id };
    assert_eq!(gone.read(&file, 0, 4096).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    assert_eq!(gone.unregister(&file).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    assert_eq!(stats(&file).buffers, 0);
}

#[test]
fn nobody_can_use_the_buffer_of_another_process() {
    needs_mount!();
    let volume = Mounted::new();
    fs::set_permissions(volume.root().parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(10, 8192)).unwrap();
    let buffer = Buffer::new(File::open(&path).unwrap(), 8192);
    let borrow = |command: &mut std::process::Command| {
        let output = command.arg(&path).arg("borrow").arg(buffer.id.to_string()).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(borrow(&mut client()), libc::ENOENT.to_string());
    assert!(buffer.get(0, 8192).iter().all(|&byte| byte == 0), "the other process's READ went nowhere");
}

#[test]
fn another_user_reads_what_it_may_open() {
    needs_mount!();
    let volume = Mounted::new();
    fs::set_permissions(volume.root().parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    // The program has to lie where the other user can run it.
    let program = volume.image().path().with_file_name("direct-client");
    // By another process: a program that is open for writing here, or in what another test is
    // starting, cannot be run.
    let copied = std::process::Command::new("cp").arg(env!("CARGO_BIN_EXE_direct-client")).arg(&program).status().unwrap();
    assert!(copied.success());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(11, 100_000)).unwrap();
    let run = |mode| {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let mut child = std::process::Command::new(&program)
            .arg(&path)
            .args(["loop", "65536"])
            .uid(65534)
            .gid(65534)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        line
    };
    assert_eq!(run(0o644), "reading\n");
    assert_eq!(run(0o600), "");
}

#[test]
fn clients_killed_in_the_middle_leave_nothing_behind() {
    needs_mount!();
    let volume = Mounted::new();
    let path = volume.path("file");
    fs::write(&path, tree::pattern(12, 32 << 20)).unwrap();
    let file = File::open(&path).unwrap();
    for round in 0..3 {
        let mut children: Vec<_> = (0..4)
            .map(|_| {
                let mut child = client().arg(&path).args(["loop", "33554432"]).stdout(Stdio::piped()).spawn().unwrap();
                let mut line = String::new();
                BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
                assert_eq!(line, "reading\n");
                child
            })
            .collect();
        assert_eq!(stats(&file).processes, 4);
        std::thread::sleep(Duration::from_millis(30 * round));
        for child in &mut children {
            child.kill().unwrap();
        }
        for child in &mut children {
            child.wait().unwrap();
        }
        let start = Instant::now();
        while stats(&file).buffers != 0 {
            assert!(start.elapsed() < Duration::from_secs(10), "{} buffers are left", stats(&file).buffers);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let buffer = Buffer::new(&file, 32 * MIB);
    assert_eq!(buffer.read(&file, 0, 32 * MIB).unwrap().bytes, 32 * MIB);
    assert!(buffer.get(0, 32 << 20) == tree::pattern(12, 32 << 20));
}

#[test]
fn stats_add_up_what_was_moved() {
    needs_mount!();
    let volume = Mounted::new();
    let file = open(volume.path("file"));
    let before = stats(&file);
    let buffer = Buffer::new(&file, MIB);
    buffer.write(&file, 0, MIB).unwrap();
    file.set_len(2 * MIB).unwrap();
    buffer.read(&file, 0, MIB).unwrap();
    buffer.read(&file, MIB, MIB).unwrap();
    buffer.read(&file, 100, 200).unwrap();
    let after = stats(&file);
    assert_eq!(after.calls[Command::Read as usize] - before.calls[Command::Read as usize], 3);
    assert_eq!((after.write.host, after.read.host, after.read.hole, after.read.edge), (MIB, MIB, MIB, 200));
    assert_eq!((after.buffers, after.buffer_bytes, after.processes), (1, MIB, 1));
    assert_eq!(after.read.total(), 2 * MIB + 200);
    assert_eq!(info(&file).route, Route::Bounce.code());
}

#[test]
fn a_full_volume_refuses_the_write_and_says_how_much_was_done() {
    needs_mount!();
    let volume = Image::formatted_with(128 << 20).mount();
    let file = open(volume.path("file"));
    let buffer = Buffer::new(&file, 16 * MIB);
    buffer.put(0, &tree::pattern(13, 16 << 20));
    let mut written = 0;
    let end = loop {
        match buffer.write(&file, written, 16 * MIB) {
            Ok(done) if done.status == 0 => written += done.bytes,
            Ok(done) => {
                assert_eq!(done.status, libc::ENOSPC);
                break written + done.bytes;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull);
                break written;
            }
        }
        assert!(written <= 128 << 20);
    };
    assert!(end > 40 * MIB, "only {end} bytes fitted");
    assert_eq!(file.metadata().unwrap().len(), end);
    file.set_len(16 * MIB).unwrap();
    assert_eq!(buffer.write(&file, 16 * MIB, 16 * MIB).unwrap().bytes, 16 * MIB);
    let pattern = tree::pattern(13, 16 << 20);
    let read = fs::read(volume.path("file")).unwrap();
    assert!(read[..16 << 20] == pattern && read[16 << 20..] == pattern);
}

#[test]
fn an_unlinked_file_can_still_be_read_and_written() {
    needs_mount!();
    let volume = Mounted::new();
    let file = open(volume.path("file"));
    let buffer = Buffer::new(&file, MIB);
    fs::remove_file(volume.path("file")).unwrap();
    buffer.put(0, &tree::pattern(14, MIB as usize));
    assert_eq!(buffer.write(&file, 0, MIB).unwrap().bytes, MIB);
    buffer.put(0, &vec![0; MIB as usize]);
    assert_eq!(buffer.read(&file, 0, MIB).unwrap().bytes, MIB);
    assert!(buffer.get(0, MIB as usize) == tree::pattern(14, MIB as usize));
}

#[test]
fn a_direct_write_may_cover_the_unfinished_last_block() {
    needs_mount!();
    let volume = Mounted::new();
    let buffer = Buffer::new(File::open(volume.root()).unwrap(), MIB);
    let source = tree::pattern(15, MIB as usize);
    buffer.put(0, &source);
    // The file ends in the middle of the first, a middle or the last block of what is written;
    // cold, and just written.
    for (number, (len, offset)) in [(100, 0), (10_000, 0), (10_000, 8192), (10_000, 4096), (5000, 512)].into_iter().enumerate() {
        for shortened in [false, true] {
            let path = volume.path(format!("{number} {shortened}"));
            let mut model = tree::pattern(16, if shortened { 20_000 } else { len });
            fs::write(&path, &model).unwrap();
            let file = open(&path);
            file.sync_all().unwrap();
            file.set_len(len as u64).unwrap();
            model.truncate(len);
            assert_eq!(buffer.write(&file, offset, 65536).unwrap().bytes, 65536);
            model.resize(offset as usize + 65536, 0);
            model[offset as usize..].copy_from_slice(&source[..65536]);
            assert!(fs::read(&path).unwrap() == model, "{len} bytes, written at {offset}, shortened: {shortened}");
        }
    }
}
