use zerocopy::IntoBytes;

use super::*;
use crate::wire::{CreateIn, ExtHeader, SetattrIn, SetxattrIn, WriteIn};

const DECODER: Decoder = Decoder { setxattr_ext: true };

/// A message as the kernel sends it.
fn message(opcode: u32, extensions: u16, parts: &[&[u8]]) -> Vec<u8> {
    let arguments = parts.concat();
    let len = (size_of::<InHeader>() + arguments.len()) as u32;
    let header =
        InHeader { len, opcode, unique: 2, nodeid: 77, uid: 1000, gid: 100, pid: 4, total_extlen: extensions, padding: 0 };
    [header.as_bytes(), &arguments].concat()
}

fn decode(bytes: &[u8]) -> Result<Message<'_>, Malformed> {
    DECODER.message(bytes)
}

fn operation(bytes: &[u8]) -> Result<Operation<'_>, Malformed> {
    match decode(bytes)? {
        Message::Request(request) => Ok(request.operation),
        _ => Err(Malformed),
    }
}

#[test]
fn a_request_has_its_caller_and_its_names() {
    let bytes = message(opcode::RENAME2, 0, &[&9_u64.to_ne_bytes(), &2_u64.to_ne_bytes(), b"old\0new\0"]);
    let Ok(Message::Request(request)) = decode(&bytes) else { panic!("no request") };
    assert_eq!((request.ino, request.uid, request.gid, request.pid), (77, 1000, 100, 4));
    assert_eq!(request.operation, Operation::Rename { name: b"old", new_parent: 9, new_name: b"new", flags: 2 });
    let bytes = message(opcode::SYMLINK, 0, &[b"name\0/a/target\0"]);
    assert_eq!(operation(&bytes), Ok(Operation::Symlink { name: b"name", target: b"/a/target" }));
}

#[test]
fn a_write_has_its_bytes_and_what_its_flags_say() {
    let write = WriteIn {
        fh: 5,
        offset: 4096,
        size: 3,
        write_flags: wire::WRITE_CACHE | wire::WRITE_KILL_SUIDGID,
        lock_owner: 0,
        flags: 0x400,
        padding: 0,
    };
    let bytes = message(opcode::WRITE, 0, &[write.as_bytes(), b"abc"]);
    let expected =
        Operation::Write { handle: 5, offset: 4096, data: b"abc", flags: 0x400, from_cache: true, direct: false, strip: true };
    assert_eq!(operation(&bytes), Ok(expected));
    let bytes = message(opcode::WRITE, 0, &[write.as_bytes(), b"ab"]);
    assert_eq!(operation(&bytes), Err(Malformed), "a byte is missing");
}

#[test]
fn attributes_are_set_as_the_valid_bits_say() {
    let mut set = SetattrIn::read_from_bytes(&[0xff; 88]).unwrap();
    set.valid = wire::FATTR_SIZE | wire::FATTR_ATIME | wire::FATTR_ATIME_NOW | wire::FATTR_MTIME | wire::FATTR_KILL_SUIDGID;
    (set.size, set.mtime, set.mtimensec) = (10, -2, 500_000_000);
    let bytes = message(opcode::SETATTR, 0, &[set.as_bytes()]);
    let mtime = Some(SetTime::At(Time { seconds: -2, nanoseconds: 500_000_000 }));
    let expected = SetAttr { size: Some(10), atime: Some(SetTime::Now), mtime, strip: true, ..SetAttr::default() };
    assert_eq!(operation(&bytes), Ok(Operation::SetAttr(expected)));
}

#[test]
fn an_extension_names_the_parents_group() {
    let create = CreateIn { flags: 2, mode: 0o100_644, umask: 0o22, open_flags: 0 };
    let extension = |kind, words: [u32; 2]| {
        let header = ExtHeader { size: 16, r#type: kind };
        [header.as_bytes(), words.as_bytes()].concat()
    };
    let new = |group| New { name: b"file", mode: 0o100_644, umask: 0o22, group };
    for (extension, group) in [
        (extension(wire::EXT_GROUPS, [1, 4242]), Some(4242)),
        (extension(wire::EXT_GROUPS, [0, 4242]), None),
        (extension(1, [1, 4242]), None),
    ] {
        let bytes = message(opcode::CREATE, 2, &[create.as_bytes(), b"file\0", &extension]);
        assert_eq!(operation(&bytes), Ok(Operation::Create { new: new(group), flags: 2 }));
    }
    // An extension longer than the extensions, one shorter than its header, and more than there
    // is.
    let wrong = |size: u32| [&size.to_ne_bytes()[..], &[0; 12]].concat();
    for (len, extension) in [(2, wrong(24)), (2, wrong(4)), (2, wrong(0)), (9, wrong(16))] {
        let bytes = message(opcode::CREATE, len, &[create.as_bytes(), b"file\0", &extension]);
        assert_eq!(operation(&bytes), Err(Malformed));
    }
}

#[test]
fn the_length_of_setxattr_depends_on_what_was_agreed() {
    let set = SetxattrIn { size: 1, flags: 2, setxattr_flags: wire::SETXATTR_ACL_KILL_SGID, padding: 0 };
    let bytes = message(opcode::SETXATTR, 0, &[set.as_bytes(), b"user.a\0v"]);
    let long = Operation::SetXattr { name: b"user.a", value: b"v", flags: 2, drop_sgid: Some(true) };
    assert_eq!(operation(&bytes), Ok(long));
    let bytes = message(opcode::SETXATTR, 0, &[&set.as_bytes()[..8], b"user.a\0v"]);
    let Ok(Message::Request(request)) = (Decoder { setxattr_ext: false }).message(&bytes) else { panic!("no request") };
    assert_eq!(request.operation, Operation::SetXattr { name: b"user.a", value: b"v", flags: 2, drop_sgid: None });
}

#[test]
fn a_slash_may_be_in_the_name_of_an_attribute_and_of_nothing_else() {
    let get = [&8_u64.to_ne_bytes()[..], b"user.a/b\0"].concat();
    assert_eq!(operation(&message(opcode::GETXATTR, 0, &[&get])), Ok(Operation::GetXattr { name: b"user.a/b", size: 8 }));
    let remove = |name| message(opcode::REMOVEXATTR, 0, &[name]);
    assert_eq!(operation(&remove(b"user.a/b\0")), Ok(Operation::RemoveXattr { name: b"user.a/b" }));
    assert_eq!(operation(&remove(b"\0")), Err(Malformed));
    assert_eq!(operation(&message(opcode::UNLINK, 0, &[b"a/b\0"])), Err(Malformed));
}

#[test]
fn forgets_come_one_by_one_or_together() {
    let forgets = |bytes: &[u8]| match decode(bytes) {
        Ok(Message::Forgets(forgets)) => Ok(forgets.map(|forget| (forget.ino, forget.lookups)).collect::<Vec<_>>()),
        Ok(_) => panic!("another message"),
        Err(error) => Err(error),
    };
    assert_eq!(forgets(&message(opcode::FORGET, 0, &[&3_u64.to_ne_bytes()])), Ok(vec![(77, 3)]));
    let batch = |count: u32| message(opcode::BATCH_FORGET, 0, &[[count, 0].as_bytes(), [1_u64, 2, 3, 4].as_bytes()]);
    assert_eq!(forgets(&batch(2)), Ok(vec![(1, 2), (3, 4)]));
    assert_eq!(forgets(&batch(3)), Err(Malformed), "there are two");
    assert_eq!(forgets(&batch(u32::MAX)), Err(Malformed));
}

#[test]
fn what_is_no_request_is_refused_and_what_is_unknown_named() {
    assert_eq!(operation(&message(4711, 0, &[b"whatever"])), Ok(Operation::Unknown { opcode: 4711 }));
    for (opcode, arguments) in
        [(opcode::LOOKUP, &b"no end"[..]), (opcode::LOOKUP, b"\0"), (opcode::LOOKUP, b"a/b\0"), (opcode::GETATTR, b"short")]
    {
        assert_eq!(operation(&message(opcode, 0, &[arguments])), Err(Malformed));
    }
    let mut bytes = message(opcode::STATFS, 0, &[]);
    assert_eq!(operation(&bytes), Ok(Operation::StatFs));
    bytes.push(0);
    assert_eq!(operation(&bytes), Err(Malformed), "longer than it says");
    assert_eq!(operation(&bytes[..39]), Err(Malformed));
}

/// Random messages, most of them with an opcode that exists and a length that is right: none
/// panics, and what a request has of them lies within them.
/// One of the two parts of the header of an entry.
fn padded(bytes: &[u8]) -> [u8; 128] {
    let mut part = [0xa5; 128];
    let len = bytes.len().min(128);
    part[..len].copy_from_slice(&bytes[..len]);
    part
}

#[test]
fn an_entry_holds_the_same_request_in_three_parts() {
    let write = WriteIn { fh: 5, offset: 4096, size: 3, write_flags: 0, lock_owner: 0, flags: 0, padding: 0 };
    let bytes = message(opcode::WRITE, 0, &[write.as_bytes(), b"abc"]);
    let (header, rest) = bytes.split_at(size_of::<InHeader>());
    let (op_in, payload) = rest.split_at(size_of::<WriteIn>());
    let Ok(Message::Request(request)) = DECODER.entry(&padded(header), &padded(op_in), payload) else { panic!("no request") };
    assert_eq!(Ok(request.operation), operation(&bytes));
    // A name has no structure before it.
    let bytes = message(opcode::LOOKUP, 0, &[b"name\0"]);
    let Ok(Message::Request(request)) = DECODER.entry(&padded(&bytes), &[0; 128], b"name\0") else { panic!("no request") };
    assert_eq!(request.operation, Operation::Lookup { name: b"name" });
    let bytes = message(opcode::DESTROY, 0, &[]);
    assert!(matches!(DECODER.entry(&padded(&bytes), &[0; 128], &[]), Ok(Message::Destroy)));
}

#[test]
fn hostile_bytes_never_panic() {
    let mut state = 1_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let (mut requests, mut through_io_uring) = (0, 0);
    for _ in 0..400_000 {
        let len = random() as usize % 200;
        // Small values make counts and lengths that fit now and then.
        let arguments: Vec<u8> =
            (0..len).map(|_| if random() % 3 == 0 { random() as u8 } else { (random() % 4) as u8 }).collect();
        let bytes = message(random() % 60, (random() % 4) as u16, &[&arguments]);
        for decoder in [DECODER, Decoder { setxattr_ext: false }] {
            match decoder.message(&bytes) {
                Ok(Message::Forgets(forgets)) => assert!(forgets.count() <= len / 8),
                Ok(Message::Request(_)) => requests += 1,
                _ => {}
            }
            // The same in an entry of a queue, whose memory may hold anything besides.
            let (in_out, op_in) = (padded(&bytes[..size_of::<InHeader>()]), padded(&arguments));
            match decoder.entry(&in_out, &op_in, &arguments[len / 2..]) {
                Ok(Message::Request(_)) => through_io_uring += 1,
                Ok(Message::Destroy) => {}
                Ok(other) => panic!("{other:?} through io_uring"),
                Err(Malformed) => {}
            }
        }
    }
    assert!(requests > 100_000 && through_io_uring > 100_000, "{requests} {through_io_uring}");
}
