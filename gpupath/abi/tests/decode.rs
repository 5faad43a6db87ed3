//! The ABI against whatever bytes a process may send.

use gpunvme_abi::*;
use proptest::prelude::*;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

fn bytes<T: IntoBytes + zerocopy::Immutable>(header: &T, segments: &[Segment]) -> Vec<u8> {
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(segments.as_bytes());
    bytes
}

fn segment(file_offset: u64, buffer_offset: u64, len: u64) -> Segment {
    Segment { file_offset, buffer_offset, len }
}

fn read(header: Transfer, segments: &[Segment]) -> Result<Request, DecodeError> {
    decode(Command::Read.request(segments.len()), &bytes(&header, segments))
}

#[test]
fn what_is_right_comes_through() {
    let segments = [segment(0, 4096, 512), segment(1 << 40, 0, 0)];
    let header = Transfer {
        buffer: 7,
        descriptor: 3,
        grant: 9,
        segments: 2,
        flags: (TransferFlags::REQUIRE_P2P | TransferFlags::REQUIRE_DIRECT).bits(),
        ..Transfer::default()
    };
    let Ok(Request::Read(request, claim)) = read(header, &segments) else { panic!("a good READ was refused") };
    assert_eq!((request.buffer, request.required_route()), (7, Some(Route::P2p)));
    assert_eq!((&request.segments[..], claim), (&segments[..], Claim { descriptor: 3, grant: 9 }));

    let register = Register { fd: 5, len: 4096, flags: RegisterFlags::STAGING.bits(), ..Register::default() };
    assert_eq!(decode(Command::Register.request(0), register.as_bytes()), Ok(Request::Register(register.clone())));
    let resolve = Resolve { len: u64::MAX, capacity: 3, ..Resolve::default() };
    let mut argument = resolve.as_bytes().to_vec();
    argument.resize(argument.len() + 3 * size_of::<Extent>(), 0xff);
    assert_eq!(decode(Command::Resolve.request(3), &argument), Ok(Request::Resolve(resolve)));
    assert_eq!(decode(Command::Info.request(0), Info::default().as_bytes()), Ok(Request::Info));
    assert_eq!(decode(Command::Stats.request(0), Stats::default().as_bytes()), Ok(Request::Stats));
    let metrics = Metrics { capacity: 2, ..Metrics::default() };
    let mut argument = metrics.as_bytes().to_vec();
    argument.resize(argument.len() + 2 * size_of::<Metric>(), 0xff);
    assert_eq!(decode(Command::Metrics.request(2), &argument), Ok(Request::Metrics(metrics)));
    let top = TopList { capacity: 3, ..TopList::default() };
    let mut argument = top.as_bytes().to_vec();
    argument.resize(argument.len() + 3 * size_of::<Top>(), 0xff);
    assert_eq!(decode(Command::Top.request(3), &argument), Ok(Request::Top(top)));
    assert_eq!(decode(Command::Sync.request(0), Sync::default().as_bytes()), Ok(Request::Sync(Sync::default())));
    let trim = Trim { start: 1, len: u64::MAX, minimum: 3, ..Trim::default() };
    assert_eq!(decode(Command::Trim.request(0), trim.as_bytes()), Ok(Request::Trim(trim)));
    assert_eq!(decode(Command::Grow.request(0), Grow::default().as_bytes()), Ok(Request::Grow(Grow::default(), vec![])));
    let mut argument = Grow { flags: GrowFlags::CHECK.bits(), ..Grow::default() }.as_bytes().to_vec();
    for name in ["/dev/nvme1n1", "vfio:0000:03:00.0"] {
        let mut device = NewDevice { name: [0; 256] };
        put_text(&mut device.name, name);
        argument.extend_from_slice(device.as_bytes());
    }
    let Ok(Request::Grow(_, names)) = decode(Command::Grow.request(2), &argument) else { panic!("it is one") };
    assert_eq!(names, ["/dev/nvme1n1", "vfio:0000:03:00.0"]);
    let mut log = Log::default();
    put_text(&mut log.filter, "debug");
    assert_eq!(decode(Command::Log.request(0), log.as_bytes()), Ok(Request::Log(log)));
}

/// Out fields may hold anything: programs use a structure again.
#[test]
fn out_fields_are_ignored() {
    let header = Transfer {
        segments: 0,
        bytes: 9,
        p2p: 9,
        bounce: 9,
        host: 9,
        hole: 9,
        edge: 9,
        reason: 9,
        status: 9,
        failed_segment: 9,
        reserved2: 9,
        ..Transfer::default()
    };
    assert!(read(header, &[]).is_ok());
    let register = Register { len: 1, buffer: 9, route: 9, reason: 9, ..Register::default() };
    assert!(decode(Command::Register.request(0), register.as_bytes()).is_ok());
}

/// Each field wrong in turn, and named.
#[test]
fn each_wrong_field_is_named() {
    let one = [segment(0, 0, 1)];
    let good = Transfer { segments: 1, ..Transfer::default() };
    let command = Command::Read;
    let cases = [
        (Transfer { version: 1, ..good.clone() }, DecodeError::Version { command, version: 1 }, 93),
        (Transfer { version: 0, ..good.clone() }, DecodeError::Version { command, version: 0 }, 93),
        (Transfer { flags: 1 << 31, ..good.clone() }, DecodeError::Flags { command, flags: 1 << 31 }, 22),
        (Transfer { flags: 3, ..good.clone() }, DecodeError::Flags { command, flags: 3 }, 22),
        (Transfer { segments: 2, ..good.clone() }, DecodeError::Field { command, field: "segments", value: 2 }, 22),
    ];
    for (header, error, errno) in cases {
        let got = read(header, &one).unwrap_err();
        assert_eq!((&got, got.errno()), (&error, errno));
    }
    let wrong = |segment| read(good.clone(), &[segment]).unwrap_err();
    assert_eq!(wrong(segment(MAX_OFFSET, 0, 1)), DecodeError::Segment { command, segment: 0, field: "file_offset" });
    assert_eq!(wrong(segment(u64::MAX, 0, 0)), DecodeError::Segment { command, segment: 0, field: "file_offset" });
    assert_eq!(wrong(segment(0, u64::MAX, 2)), DecodeError::Segment { command, segment: 0, field: "buffer_offset" });
    assert_eq!(wrong(segment(0, 0, MAX_TRANSFER + 1)), DecodeError::TooLong { command });
    let huge = [segment(0, 0, MAX_OFFSET), segment(0, 0, MAX_OFFSET), segment(0, 0, MAX_OFFSET)];
    assert_eq!(read(Transfer { segments: 3, ..good.clone() }, &huge).unwrap_err(), DecodeError::TooLong { command });

    let register = |register: Register| decode(Command::Register.request(0), register.as_bytes()).unwrap_err();
    let command = Command::Register;
    let good = Register { len: 1, ..Register::default() };
    assert_eq!(register(Register { len: 0, ..good.clone() }), DecodeError::Field { command, field: "len", value: 0 });
    assert_eq!(
        register(Register { len: u64::MAX, ..good.clone() }),
        DecodeError::Field { command, field: "len", value: u64::MAX }
    );
    assert_eq!(register(Register { flags: 2, ..good.clone() }), DecodeError::Flags { command, flags: 2 });
    assert_eq!(register(Register { reserved: 1, ..good.clone() }), DecodeError::Field { command, field: "reserved", value: 1 });
    assert_eq!(
        register(Register { reserved2: [0, 4], ..good.clone() }),
        DecodeError::Field { command, field: "reserved2", value: 4 }
    );

    let resolve = |resolve: Resolve, entries| {
        let mut argument = resolve.as_bytes().to_vec();
        argument.resize(argument.len() + entries * size_of::<Extent>(), 0);
        decode(Command::Resolve.request(entries), &argument).unwrap_err()
    };
    let command = Command::Resolve;
    assert_eq!(
        resolve(Resolve { capacity: 2, ..Resolve::default() }, 1),
        DecodeError::Field { command, field: "capacity", value: 2 }
    );
    assert_eq!(resolve(Resolve::default(), 0), DecodeError::Field { command, field: "capacity", value: 0 });
    assert_eq!(
        resolve(Resolve { capacity: 1, offset: 1 << 63, ..Resolve::default() }, 1),
        DecodeError::Field { command, field: "offset", value: 1 << 63 }
    );
    for entries in [0, 4, 12, 8192] {
        let ring = ring::Ring { entries, ..ring::Ring::default() };
        let wrong = DecodeError::Field { command: Command::Ring, field: "entries", value: entries.into() };
        assert_eq!(decode(Command::Ring.request(0), ring.as_bytes()), Err(wrong));
    }
    let attach = ring::Attach { reserved: 1, ..ring::Attach::default() };
    let wrong = DecodeError::Field { command: Command::Attach, field: "reserved", value: 1 };
    assert_eq!(decode(Command::Attach.request(0), attach.as_bytes()), Err(wrong));
    let detach = ring::Detach { reserved: [2, 0], ..ring::Detach::default() };
    let wrong = DecodeError::Field { command: Command::Detach, field: "reserved", value: 2 };
    assert_eq!(decode(Command::Detach.request(0), detach.as_bytes()), Err(wrong));
    let trim = Trim { reserved: [0, 1], ..Trim::default() };
    let wrong = DecodeError::Field { command: Command::Trim, field: "reserved", value: 1 };
    assert_eq!(decode(Command::Trim.request(0), trim.as_bytes()), Err(wrong));
    let grow = Grow { reserved: [0, 0, 4, 0, 0], ..Grow::default() };
    let wrong = DecodeError::Field { command: Command::Grow, field: "reserved", value: 4 };
    assert_eq!(decode(Command::Grow.request(0), grow.as_bytes()), Err(wrong));
    let sync = Sync { reserved: 3, ..Sync::default() };
    let wrong = DecodeError::Field { command: Command::Sync, field: "reserved", value: 3 };
    assert_eq!(decode(Command::Sync.request(0), sync.as_bytes()), Err(wrong));
    let plain = [
        Command::Info,
        Command::Unregister,
        Command::Stats,
        Command::Ring,
        Command::Attach,
        Command::Detach,
        Command::Sync,
        Command::Trim,
    ];
    for command in plain {
        let mut argument = vec![0; command.header_size()];
        argument[0] = VERSION as u8;
        argument[4] = 1;
        assert_eq!(decode(command.request(0), &argument), Err(DecodeError::Flags { command, flags: 1 }));
    }
}

/// A filter is text that ends within its field.
#[test]
fn a_filter_that_is_no_text_is_refused() {
    let mut half = [0; 256];
    half[..2].copy_from_slice(&[0xc3, 0x28]);
    for filter in [[b'x'; 256], [0xff; 256], half] {
        let log = Log { filter, ..Log::default() };
        let wrong = DecodeError::Field { command: Command::Log, field: "filter", value: 256 };
        assert_eq!(decode(Command::Log.request(0), log.as_bytes()), Err(wrong));
    }
    let reserved = Log { reserved: 1, ..Log::default() };
    let wrong = DecodeError::Field { command: Command::Log, field: "reserved", value: 1 };
    assert_eq!(decode(Command::Log.request(0), reserved.as_bytes()), Err(wrong));
    let flags = Log { flags: 1, ..Log::default() };
    let wrong = DecodeError::Flags { command: Command::Log, flags: 1 };
    assert_eq!(decode(Command::Log.request(0), flags.as_bytes()), Err(wrong));
}

#[test]
fn wrong_sizes_and_foreign_commands_are_refused() {
    let info = Info::default();
    let request = Command::Info.request(0);
    let error = |request, bytes: &[u8]| decode(request, bytes).unwrap_err();
    assert_eq!(error(request, &info.as_bytes()[1..]), DecodeError::Length { command: Command::Info, expected: 640, got: 639 });
    assert_eq!(error(request - (1 << 16), &info.as_bytes()[..639]), DecodeError::Size { command: Command::Info, size: 639 });
    let transfer = [Transfer::default().as_bytes(), &[0; 25]].concat();
    assert_eq!(error(Command::Read.request(1) + (1 << 16), &transfer), DecodeError::Size { command: Command::Read, size: 121 });
    // Structures of version 1 had other sizes.
    let old = [&[1, 0, 0, 0], &[0; 108][..]].concat();
    let refused = DecodeError::Version { command: Command::Read, version: 1 };
    assert_eq!(error(Command::Read.request(1) - (8 << 16), &old), refused);
    // FS_IOC_GETFLAGS, a number without a meaning, another magic, one direction only.
    for foreign in [0x8008_6601, (request & !0xff) | Command::ALL.len() as u32, request ^ 0x100, request & !(1 << 31)] {
        let error = error(foreign, &[]);
        assert_eq!((error.errno(), error), (25, DecodeError::UnknownCommand { request: foreign }));
    }
}

/// Each field of a submission wrong in turn.
#[test]
fn a_submission_means_a_transfer_or_nothing() {
    let good = ring::Submission {
        command: Command::Write as u32,
        buffer: 5,
        len: ring::MAX_RING_TRANSFER,
        ..ring::Submission::new_zeroed()
    };
    let (command, request) = good.decode().unwrap();
    assert_eq!((command, request.buffer, request.segments[0].len), (Command::Write, 5, ring::MAX_RING_TRANSFER));
    for wrong in [
        ring::Submission { command: Command::Resolve as u32, ..good },
        ring::Submission { command: 99, ..good },
        ring::Submission { flags: 3, ..good },
        ring::Submission { flags: 1 << 31, ..good },
        ring::Submission { len: good.len + 1, ..good },
        ring::Submission { file_offset: MAX_OFFSET, ..good },
        ring::Submission { buffer_offset: u64::MAX, ..good },
        ring::Submission { reserved: 1, ..good },
    ] {
        assert_eq!(wrong.decode(), None, "{wrong:?}");
    }
}

#[test]
fn the_largest_arguments_fit_an_ioctl() {
    for (command, entries) in [(Command::Read, MAX_SEGMENTS), (Command::Write, MAX_SEGMENTS), (Command::Resolve, MAX_EXTENTS)] {
        let size = (command.request(entries) >> 16) as usize & MAX_SIZE;
        assert_eq!(size, command.header_size() + entries * command.entry_size());
        assert!(size + command.entry_size() > MAX_SIZE);
    }
}

/// Codes are for ever.
#[test]
fn codes_are_told_apart() {
    for reason in Reason::ALL {
        assert_eq!(Reason::from_code(reason.code()), Some(*reason));
        assert!((reason.code() as usize) < REASON_SLOTS);
        let sentence = reason.explain();
        assert!(sentence.ends_with('.') && sentence.len() > 20, "{reason}");
    }
    assert_eq!(Route::ALL.iter().map(|route| route.name()).collect::<Vec<_>>(), ["none", "p2p", "bounce", "host", "cache"]);
    assert_eq!(Reason::from_code(9999), None);
}

#[test]
fn text_is_cut_at_characters() {
    let mut field = [1u8; 6];
    put_text(&mut field, "abcdé");
    assert_eq!(field, *b"abcd\0\0");
    put_text(&mut field, "äöü");
    assert_eq!(get_text(&field), "äö");
    put_text(&mut field, "");
    assert_eq!(field, [0; 6]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

    #[test]
    fn any_bytes_are_decoded_or_refused(request: u32, bytes in proptest::collection::vec(any::<u8>(), 0..2048)) {
        let _ = decode(request, &bytes);
    }

    /// Bytes that come as far as possible: the right command and size, a right version, and
    /// anything behind it.
    #[test]
    fn any_fields_are_decoded_or_refused(at in 0..Command::ALL.len(), entries in 0usize..4, mut bytes in proptest::collection::vec(any::<u8>(), 1024), sane: bool) {
        let command = Command::ALL[at];
        let entries = if command.entry_size() == 0 { 0 } else { entries };
        bytes.truncate(command.header_size() + entries * command.entry_size());
        bytes[..4].copy_from_slice(&VERSION.to_le_bytes());
        if sane {
            bytes[4..8].fill(0);
        }
        if let Ok(Request::Read(transfer, _) | Request::Write(transfer, _)) = decode(command.request(entries), &bytes) {
            let total: u64 = transfer.segments.iter().map(|segment| segment.len).sum();
            prop_assert!(total <= MAX_TRANSFER);
            for segment in &transfer.segments {
                prop_assert!(segment.file_offset + segment.len <= MAX_OFFSET && segment.buffer_offset + segment.len <= MAX_OFFSET);
            }
        }
    }

    /// What a client encodes is what the daemon sees.
    #[test]
    fn transfers_survive_the_way(buffer: u64, raw in proptest::collection::vec((0u64..1 << 50, 0u64..1 << 50, 0u64..1 << 20), 0..MAX_SEGMENTS)) {
        let segments: Vec<_> = raw.into_iter().map(|(file, at, len)| segment(file, at, len)).collect();
        let header = Transfer { buffer, segments: segments.len() as u32, ..Transfer::default() };
        let bytes = bytes(&header, &segments);
        prop_assert_eq!(Transfer::read_from_prefix(&bytes).unwrap().0, header);
        match decode(Command::Write.request(segments.len()), &bytes) {
            Ok(Request::Write(request, _)) => prop_assert_eq!((request.buffer, request.segments.into_vec()), (buffer, segments)),
            other => prop_assert!(false, "{:?}", other),
        }
    }
}
