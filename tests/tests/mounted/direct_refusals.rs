//! What the direct path refuses: every field wrong in turn, descriptors that are not memory,
//! buffers that are gone. Each refusal is a clear errno, moves nothing, and leaves the daemon as it
//! was.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use gpunvme_abi::{
    Command, MAX_SEGMENTS, MAX_TRANSFER, Message, Reason, Register, Resolve, Segment, Transfer, TransferFlags, Unregister,
    get_text,
};
use gpunvme_tests::direct::{Buffer, call, call_plain, info, memfd, stats};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::{needs_mount, sys, tree};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SocketAddrUnix, SocketType};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// A mount with one file of 64 KiB, open for reading and writing.
fn volume_with_file() -> (Mounted, File, Vec<u8>) {
    let volume = Mounted::new();
    let data = tree::pattern(77, 65536);
    fs::write(volume.path("file"), &data).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(volume.path("file")).unwrap();
    (volume, file, data)
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.expect_err("a refusal").raw_os_error().expect("an errno")
}

/// The daemon still does what it should, and the file holds what it did.
fn assert_alive(file: &File, data: &[u8]) {
    let buffer = Buffer::new(file, 65536);
    assert_eq!(buffer.read(file, 0, 65536).unwrap().bytes, 65536);
    assert!(buffer.get(0, 65536) == data);
    buffer.unregister(file).unwrap();
    assert_eq!(stats(file).buffers, 0, "nothing is left registered");
}

#[test]
fn every_field_of_a_transfer_wrong_in_turn() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let buffer = Buffer::new(&file, 65536);
    let base = || Transfer { buffer: buffer.id, descriptor: file.as_raw_fd(), segments: 1, ..Transfer::default() };
    let segment = |file_offset, buffer_offset, len| Segment { file_offset, buffer_offset, len };
    let good = segment(0, 0, 4096);
    let both = TransferFlags::REQUIRE_HOST | TransferFlags::REQUIRE_BOUNCE;
    let cases: Vec<(&str, Transfer, Segment, i32)> = vec![
        ("version 0", Transfer { version: 0, ..base() }, good, libc::EPROTONOSUPPORT),
        ("version 1", Transfer { version: 1, ..base() }, good, libc::EPROTONOSUPPORT),
        ("unknown flag", Transfer { flags: 1 << 31, ..base() }, good, libc::EINVAL),
        ("two routes", Transfer { flags: both.bits(), ..base() }, good, libc::EINVAL),
        ("no descriptor", Transfer { descriptor: -1, ..base() }, good, libc::EBADF),
        ("a grant never given", Transfer { descriptor: -1, grant: u64::MAX, ..base() }, good, libc::EBADF),
        ("no segment but one", Transfer { segments: 0, ..base() }, good, libc::EINVAL),
        ("two segments but one", Transfer { segments: 2, ..base() }, good, libc::EINVAL),
        ("all the segments there could be", Transfer { segments: u32::MAX, ..base() }, good, libc::EINVAL),
        ("buffer 0", Transfer { buffer: 0, ..base() }, good, libc::ENOENT),
        ("another buffer", Transfer { buffer: buffer.id + 1, ..base() }, good, libc::ENOENT),
        ("buffer -1", Transfer { buffer: u64::MAX, ..base() }, good, libc::ENOENT),
        ("file offset that overflows", base(), segment(u64::MAX, 0, 4096), libc::EINVAL),
        ("file offset past loff_t", base(), segment(1 << 63, 0, 4096), libc::EINVAL),
        ("buffer offset that overflows", base(), segment(0, u64::MAX, 4096), libc::EINVAL),
        ("buffer offset past the end", base(), segment(0, 65536, 1), libc::EINVAL),
        ("length past the buffer's end", base(), segment(0, 4096, 65536), libc::EINVAL),
        ("length that overflows", base(), segment(0, 0, u64::MAX), libc::EINVAL),
        ("length above the limit", base(), segment(0, 0, MAX_TRANSFER + 1), libc::EINVAL),
        ("p2p demanded", Transfer { flags: TransferFlags::REQUIRE_P2P.bits(), ..base() }, good, libc::EOPNOTSUPP),
        ("bounce demanded", Transfer { flags: TransferFlags::REQUIRE_BOUNCE.bits(), ..base() }, good, libc::EOPNOTSUPP),
        (
            "no copying demanded",
            Transfer { flags: TransferFlags::REQUIRE_DIRECT.bits(), ..base() },
            segment(1, 0, 100),
            libc::EOPNOTSUPP,
        ),
    ];
    buffer.put(0, &[0x55; 65536]);
    for command in [Command::Read, Command::Write] {
        for (what, transfer, segment, expected) in &cases {
            let mut transfer = transfer.clone();
            let found = errno(call(&file, command, &mut transfer, &mut [*segment]));
            assert_eq!(found, *expected, "{command:?} with {what}");
            assert_eq!(transfer.bytes, 0, "{command:?} with {what}");
        }
    }
    assert!(buffer.get(0, 65536).iter().all(|&byte| byte == 0x55), "no refused READ wrote to the buffer");
    let mut demanding = Transfer { flags: TransferFlags::REQUIRE_HOST.bits(), ..base() };
    call(&file, Command::Read, &mut demanding, &mut [good]).unwrap();
    assert_eq!(demanding.host, 4096, "a route that the buffer has may be demanded");
    buffer.unregister(&file).unwrap();
    assert_alive(&file, &data);
}

#[test]
fn a_wrong_segment_among_good_ones_is_named_and_nothing_moves() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let buffer = Buffer::new(&file, 65536);
    let mut segments = [Segment { file_offset: 0, buffer_offset: 0, len: 4096 }; 10];
    segments[7].buffer_offset = 62_000;
    let mut transfer = Transfer { buffer: buffer.id, descriptor: file.as_raw_fd(), segments: 10, ..Transfer::default() };
    assert_eq!(errno(call(&file, Command::Write, &mut transfer, &mut segments)), libc::EINVAL);
    assert_eq!((transfer.failed_segment, transfer.reason), (7, Reason::OutsideBuffer.code()));
    buffer.unregister(&file).unwrap();
    assert_alive(&file, &data);
}

#[test]
fn as_many_segments_as_fit_in_one_call_all_count() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let buffer = Buffer::new(&file, 65536);
    let segments: Vec<_> = (0..MAX_SEGMENTS as u64).map(|i| (i * 90, i * 90, 90)).collect();
    assert_eq!(buffer.transfer(Command::Read, &file, &segments).unwrap().bytes, MAX_SEGMENTS as u64 * 90);
    assert!(buffer.get(0, MAX_SEGMENTS * 90) == data[..MAX_SEGMENTS * 90]);
}

#[test]
fn every_field_of_register_wrong_in_turn() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let memory = memfd(65536);
    let base = || Register { fd: memory.as_raw_fd(), len: 65536, ..Register::default() };
    let cases: Vec<(&str, Register, i32)> = vec![
        ("version 7", Register { version: 7, ..base() }, libc::EPROTONOSUPPORT),
        ("unknown flag", Register { flags: 1 << 20, ..base() }, libc::EINVAL),
        ("reserved", Register { reserved: 1, ..base() }, libc::EINVAL),
        ("reserved2", Register { reserved2: [0, 1], ..base() }, libc::EINVAL),
        ("no length", Register { len: 0, ..base() }, libc::EINVAL),
        ("more than there is", Register { len: 65537, ..base() }, libc::EINVAL),
        ("all there could be", Register { len: u64::MAX, ..base() }, libc::EINVAL),
        ("fd -1", Register { fd: -1, ..base() }, libc::EBADF),
        ("a closed fd", Register { fd: 1_000_000, ..base() }, libc::EBADF),
    ];
    for (what, mut register, expected) in cases {
        let found = errno(call_plain(&file, Command::Register, &mut register));
        assert_eq!(found, expected, "{what}");
        assert_eq!(register.buffer, if expected == libc::EPROTONOSUPPORT { 0 } else { register.buffer });
    }
    assert_alive(&file, &data);
}

#[test]
fn what_is_not_sealed_writable_memory_is_no_buffer() {
    needs_mount!();
    let (volume, file, data) = volume_with_file();
    let image = volume.image().path();
    let disk_file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(image.with_file_name("disk"));
    let disk_file = disk_file.unwrap();
    disk_file.set_len(65536).unwrap();
    let unsealed = File::from(rustix::fs::memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap());
    unsealed.set_len(65536).unwrap();
    let frozen = memfd(65536);
    rustix::fs::fcntl_add_seals(&frozen, SealFlags::WRITE).unwrap();
    let writable = memfd(65536);
    let read_only = File::open(format!("/proc/self/fd/{}", writable.as_raw_fd())).unwrap();
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let on_the_volume = file.try_clone().unwrap();
    let cases: Vec<(&str, OwnedFd, Reason)> = vec![
        ("a file on a disk", disk_file.into(), Reason::NotABuffer),
        ("a file on the volume itself", on_the_volume.into(), Reason::NotABuffer),
        ("a device", null.into(), Reason::NotABuffer),
        ("a pipe", pipe, Reason::NotABuffer),
        ("a folder", File::open(volume.root()).unwrap().into(), Reason::NotABuffer),
        ("a memfd that may shrink", unsealed.into(), Reason::NotSealed),
        ("a memfd sealed against writes", frozen.into(), Reason::NotWritable),
        ("a memfd open for reading", read_only.into(), Reason::NotWritable),
        ("a memfd that is too small", memfd(4096).into(), Reason::TooSmall),
    ];
    for (what, fd, reason) in cases {
        let mut register = Register { fd: fd.as_raw_fd(), len: 65536, ..Register::default() };
        errno(call_plain(&file, Command::Register, &mut register));
        assert_eq!(Reason::from_code(register.reason), Some(reason), "{what}");
        assert_eq!(register.buffer, 0, "{what}");
    }
    assert_alive(&file, &data);
}

#[test]
fn every_field_of_resolve_and_unregister_wrong_in_turn() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let base = || Resolve { len: u64::MAX, capacity: 1, ..Resolve::default() };
    let cases: Vec<(&str, Resolve, i32)> = vec![
        ("version 0", Resolve { version: 0, ..base() }, libc::EPROTONOSUPPORT),
        ("a flag", Resolve { flags: 1, ..base() }, libc::EINVAL),
        ("no capacity", Resolve { capacity: 0, ..base() }, libc::EINVAL),
        ("more capacity than room", Resolve { capacity: 2, ..base() }, libc::EINVAL),
        ("an offset past loff_t", Resolve { offset: u64::MAX, ..base() }, libc::EINVAL),
    ];
    for (what, mut resolve, expected) in cases {
        let mut room = [gpunvme_abi::Extent::new_zeroed()];
        assert_eq!(errno(call(&file, Command::Resolve, &mut resolve, &mut room)), expected, "{what}");
    }
    for unregister in [Unregister { flags: 1, ..Unregister::default() }, Unregister { buffer: 5, ..Unregister::default() }] {
        errno(call_plain(&file, Command::Unregister, &mut unregister.clone()));
    }
    assert_alive(&file, &data);
}

#[test]
fn random_commands_with_random_bytes_do_no_harm() {
    needs_mount!();
    let (volume, file, data) = volume_with_file();
    let folder = File::open(volume.root()).unwrap();
    for seed in 0..20_000_u64 {
        let random = u64::from_le_bytes(tree::pattern(seed, 8).try_into().unwrap());
        // Mostly our own commands of odd sizes, some of any driver. Never ones that the kernel
        // itself takes ('f', 'X', 0x12).
        let size = if random.is_multiple_of(3) { 88 + (random >> 8) % 4 * 24 } else { (random >> 8) % 16384 } as u32;
        let number = (random >> 32) as u32 % 10;
        let command = 3 << 30 | size << 16 | u32::from(b'G') << 8 | number;
        let mut argument = tree::pattern(seed + 1, size as usize + 8);
        if random.is_multiple_of(2) {
            // With the first fields right the random ones are reached.
            argument[..8].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
        }
        let target = if random.is_multiple_of(5) { &folder } else { &file };
        let _ = sys::ioctl(target.as_fd(), command, &mut argument);
    }
    assert!(errno(sys::ioctl(file.as_fd(), 0xc010_5a01, &mut [0; 16])) == libc::ENOTTY, "another driver's command");
    assert_alive(&file, &data);
}

#[test]
fn one_process_cannot_register_without_end() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let limit = info(&file).max_buffers;
    let memory = memfd(4096);
    let mut ids = Vec::new();
    let refusal = loop {
        let mut register = Register { fd: memory.as_raw_fd(), len: 4096, ..Register::default() };
        match call_plain(&file, Command::Register, &mut register) {
            Ok(()) => ids.push(register.buffer),
            Err(error) => break (error.raw_os_error(), Reason::from_code(register.reason)),
        }
        assert!(ids.len() <= limit as usize, "INFO says that {limit} are the limit");
    };
    assert_eq!(refusal, (Some(libc::ENOSPC), Some(Reason::ProcessLimit)));
    assert_eq!(ids.len(), limit as usize);
    for buffer in ids {
        call_plain(&file, Command::Unregister, &mut Unregister { buffer, ..Unregister::default() }).unwrap();
    }
    assert_alive(&file, &data);
}

/// One message to the registration socket and its answer.
fn exchange(socket: impl AsFd, request: u32, argument: &[u8], fds: &[&File]) -> (Message, Vec<u8>) {
    let mut bytes = Message { request, status: 0 }.as_bytes().to_vec();
    bytes.extend_from_slice(argument);
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let flags = rustix::net::SendFlags::empty();
    rustix::net::sendmsg(&socket, &[io::IoSlice::new(&bytes)], &mut ancillary, flags).unwrap();
    let mut answer = [0_u8; 256];
    let (_, len) = rustix::net::recv(&socket, &mut answer[..], rustix::net::RecvFlags::empty()).unwrap();
    let (message, rest) = Message::read_from_prefix(&answer[..len]).unwrap();
    (message, rest.to_vec())
}

#[test]
fn the_socket_registers_what_the_ioctl_would() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    let path = get_text(&info(&file).socket);
    assert!(!path.is_empty(), "INFO names a socket");
    let connect = || {
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        socket
    };
    let socket = connect();
    let memory = memfd(65536);
    let request = Command::Register.request(0);
    let register = Register { fd: -1, len: 65536, ..Register::default() };

    let (answer, rest) = exchange(&socket, request, register.as_bytes(), &[&memory]);
    assert_eq!(answer.status, 0);
    let registered = Register::read_from_bytes(&rest).unwrap();
    let buffer = Buffer { memory, id: registered.buffer };
    assert_eq!(buffer.read(&file, 0, 65536).unwrap().bytes, 65536);
    assert!(buffer.get(0, 65536) == data);

    // No descriptor, two descriptors, a descriptor of something else, a command that only the ioctl
    // takes.
    let none = exchange(&socket, request, register.as_bytes(), &[]);
    assert_eq!(none.0.status, libc::EBADF);
    let two = exchange(connect(), request, register.as_bytes(), &[&buffer.memory, &file]);
    assert_ne!(two.0.status, 0);
    let other = exchange(connect(), request, register.as_bytes(), &[&file]);
    assert_ne!(other.0.status, 0);
    let stats = exchange(connect(), Command::Stats.request(0), gpunvme_abi::Stats::default().as_bytes(), &[]);
    assert_eq!(stats.0.status, libc::ENOTTY);

    let unregister = Unregister { buffer: buffer.id, ..Unregister::default() };
    assert_eq!(exchange(&socket, Command::Unregister.request(0), unregister.as_bytes(), &[]).0.status, 0);
    assert_eq!(errno(buffer.read(&file, 0, 4096)), libc::ENOENT);
    // A malformed message ends the connection and nothing else.
    rustix::net::send(&socket, b"hi", rustix::net::SendFlags::NOSIGNAL).unwrap();
    let mut nothing = [0_u8; 8];
    assert_eq!(rustix::net::recv(&socket, &mut nothing[..], rustix::net::RecvFlags::empty()).unwrap().1, 0);
    assert_alive(&file, &data);
}

#[test]
fn memory_that_cannot_be_reached_is_an_error_and_no_crash() {
    needs_mount!();
    let (_volume, file, data) = volume_with_file();
    // Punched out of the memfd after registering: the pages are new ones, and nothing faults.
    let buffer = Buffer::new(&file, 65536);
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&buffer.memory, punch, 0, 65536).unwrap();
    assert_eq!(buffer.read(&file, 0, 65536).unwrap().bytes, 65536);
    file.read_exact_at(&mut [0; 10], 0).unwrap();
    buffer.unregister(&file).unwrap();
    assert_alive(&file, &data);
}
