//! Sizes and offsets against the kernel's header: what a C compiler makes of it.

use std::mem::{offset_of, size_of};
use std::process::Command;

use super::*;

/// A structure of the header: its size, and the offset of a field, for most the last one, which the
/// fields before it move.
struct Pinned {
    name: &'static str,
    size: usize,
    field: &'static str,
    offset: usize,
    /// The version of the header that has it.
    minor: u32,
}

macro_rules! pinned {
    ($($minor:literal $c:literal $type:ident . $field:ident = $c_field:literal,)*) => {
        vec![$(Pinned { name: $c, size: size_of::<$type>(), field: $c_field, offset: offset_of!($type, $field), minor: $minor },)*]
    };
}

fn all() -> Vec<Pinned> {
    pinned![
        31 "fuse_attr" Attr.blksize = "blksize",
        31 "fuse_attr" Attr.atimensec = "atimensec",
        31 "fuse_kstatfs" Statfs.frsize = "frsize",
        38 "fuse_in_header" InHeader.total_extlen = "total_extlen",
        31 "fuse_out_header" OutHeader.unique = "unique",
        36 "fuse_init_in" InitIn.flags2 = "flags2",
        36 "fuse_init_out" InitOut.flags2 = "flags2",
        31 "fuse_init_out" InitOut.max_pages = "max_pages",
        40 "fuse_init_out" InitOut.max_stack_depth = "max_stack_depth",
        43 "fuse_init_out" InitOut.request_timeout = "request_timeout",
        31 "fuse_entry_out" EntryOut.attr = "attr",
        31 "fuse_attr_out" AttrOut.attr = "attr",
        31 "fuse_open_out" OpenOut.open_flags = "open_flags",
        31 "fuse_getxattr_out" SizeOut.size = "size",
        31 "fuse_ioctl_out" IoctlOut.result = "result",
        31 "fuse_forget_one" ForgetOne.nlookup = "nlookup",
        31 "fuse_batch_forget_in" BatchForgetIn.count = "count",
        31 "fuse_getattr_in" GetattrIn.fh = "fh",
        31 "fuse_setattr_in" SetattrIn.gid = "gid",
        31 "fuse_setattr_in" SetattrIn.ctimensec = "ctimensec",
        31 "fuse_mknod_in" MknodIn.umask = "umask",
        31 "fuse_mkdir_in" MkdirIn.umask = "umask",
        31 "fuse_rename2_in" Rename2In.flags = "flags",
        31 "fuse_open_in" OpenIn.flags = "flags",
        31 "fuse_create_in" CreateIn.umask = "umask",
        31 "fuse_release_in" ReleaseIn.lock_owner = "lock_owner",
        31 "fuse_flush_in" FlushIn.lock_owner = "lock_owner",
        31 "fuse_read_in" ReadIn.flags = "flags",
        31 "fuse_read_in" ReadIn.read_flags = "read_flags",
        31 "fuse_write_in" WriteIn.flags = "flags",
        31 "fuse_write_in" WriteIn.write_flags = "write_flags",
        31 "fuse_fsync_in" FsyncIn.fsync_flags = "fsync_flags",
        33 "fuse_setxattr_in" SetxattrIn.setxattr_flags = "setxattr_flags",
        31 "fuse_getxattr_in" GetxattrIn.size = "size",
        31 "fuse_ioctl_in" IoctlIn.in_size = "in_size",
        31 "fuse_fallocate_in" FallocateIn.mode = "mode",
        31 "fuse_lseek_in" LseekIn.whence = "whence",
        31 "fuse_copy_file_range_in" CopyFileRangeIn.len = "len",
        38 "fuse_ext_header" ExtHeader.r#type = "type",
        31 "fuse_dirent" Dirent.r#type = "type",
        31 "fuse_notify_inval_inode_out" NotifyInvalInodeOut.len = "len",
        31 "fuse_notify_store_out" NotifyStoreOut.size = "size",
        39 "fuse_statx_in" StatxIn.sx_mask = "sx_mask",
        39 "fuse_statx" Statx.rdev_major = "rdev_major",
        39 "fuse_statx_out" StatxOut.stat = "stat",
        39 "fuse_sx_time" SxTime.tv_nsec = "tv_nsec",
        42 "fuse_uring_req_header" RingHeader.op_in = "op_in",
        42 "fuse_uring_req_header" RingHeader.commit_id = "ring_ent_in_out.commit_id",
        42 "fuse_uring_req_header" RingHeader.payload_sz = "ring_ent_in_out.payload_sz",
        42 "fuse_uring_cmd_req" RingCommand.commit_id = "commit_id",
        42 "fuse_uring_cmd_req" RingCommand.qid = "qid",
    ]
}

/// Numbers of the header, and the version of the header that has them.
fn numbers() -> Vec<(&'static str, u64, u32)> {
    let mut numbers = vec![
        ("FATTR_KILL_SUIDGID", FATTR_KILL_SUIDGID.into(), 33),
        ("FATTR_MTIME_NOW", FATTR_MTIME_NOW.into(), 31),
        ("FUSE_READ_LOCKOWNER", READ_LOCKOWNER.into(), 31),
        ("FUSE_WRITE_CACHE", WRITE_CACHE.into(), 31),
        ("FUSE_WRITE_LOCKOWNER", WRITE_LOCKOWNER.into(), 31),
        ("FUSE_WRITE_KILL_SUIDGID", WRITE_KILL_SUIDGID.into(), 33),
        ("FUSE_SETXATTR_ACL_KILL_SGID", SETXATTR_ACL_KILL_SGID.into(), 33),
        ("FUSE_NOTIFY_INVAL_INODE", NOTIFY_INVAL_INODE as u64, 31),
        ("FUSE_NOTIFY_STORE", NOTIFY_STORE as u64, 31),
        ("FOPEN_KEEP_CACHE", OpenFlags::KEEP_CACHE.bits().into(), 31),
        ("FOPEN_NOFLUSH", OpenFlags::NO_FLUSH.bits().into(), 35),
        ("FOPEN_PARALLEL_DIRECT_WRITES", OpenFlags::PARALLEL_DIRECT_WRITES.bits().into(), 38),
        ("FUSE_LOOKUP", opcode::LOOKUP.into(), 31),
        ("FUSE_BATCH_FORGET", opcode::BATCH_FORGET.into(), 31),
        ("FUSE_CREATE", opcode::CREATE.into(), 31),
        ("FUSE_IOCTL", opcode::IOCTL.into(), 31),
        ("FUSE_COPY_FILE_RANGE", opcode::COPY_FILE_RANGE.into(), 31),
        ("FUSE_SYNCFS", opcode::SYNCFS.into(), 34),
        ("FUSE_TMPFILE", opcode::TMPFILE.into(), 37),
        ("FUSE_STATX", opcode::STATX.into(), 39),
        ("FUSE_COPY_FILE_RANGE_64", opcode::COPY_FILE_RANGE_64.into(), 45),
        ("FUSE_IO_URING_CMD_REGISTER", REGISTER.into(), 42),
        ("FUSE_IO_URING_CMD_COMMIT_AND_FETCH", COMMIT_AND_FETCH.into(), 42),
    ];
    let since = |flag: InitFlags| match flag.bits().trailing_zeros() {
        0..=28 => 33,
        29..=33 => 38,
        34 => 39,
        35 => 38,
        36 => 39,
        37..=39 => 40,
        40 => 41,
        41 => 42,
        _ => 43,
    };
    // Their names are the header's, but for the beginning.
    let flags = InitFlags::all().iter_names().map(|(name, flag)| (name, flag.bits(), since(flag)));
    numbers.extend(flags);
    numbers
}

#[test]
fn structures_and_numbers_are_those_of_the_kernels_header() {
    let mut program = String::from("#include <stdio.h>\n#include <stddef.h>\n#include <linux/fuse.h>\nint main(void) {\n");
    let mut ask = |minor: u32, format: &str, values: &str| {
        program += &format!(
            "#if FUSE_KERNEL_MINOR_VERSION >= {minor}\nprintf(\"{format}\\n\", {values});\n#else\nputs(\"-\");\n#endif\n"
        );
    };
    let (pinned, numbers) = (all(), numbers());
    for Pinned { name, field, minor, .. } in &pinned {
        ask(*minor, "%zu %zu", &format!("sizeof(struct {name}), offsetof(struct {name}, {field})"));
    }
    for (name, _, minor) in &numbers {
        let prefix = if InitFlags::from_name(name).is_some() { "FUSE_" } else { "" };
        ask(*minor, "%llu", &format!("(unsigned long long){prefix}{name}"));
    }
    program += "return 0; }\n";
    let dir = tempfile::tempdir().unwrap();
    let (source, binary) = (dir.path().join("sizes.c"), dir.path().join("sizes"));
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new("cc").arg("-o").arg(&binary).arg(&source).status().expect("a C compiler");
    assert!(compiled.success());
    let output = String::from_utf8(Command::new(&binary).output().unwrap().stdout).unwrap();
    let mut lines = output.lines();
    let mut compared = 0;
    for Pinned { name, size, field, offset, .. } in &pinned {
        let line = lines.next().unwrap();
        assert!(line == "-" || line == format!("{size} {offset}"), "{name}.{field}: {size} {offset}, and {line} in C");
        compared += usize::from(line != "-");
    }
    for (name, value, _) in &numbers {
        let line = lines.next().unwrap();
        assert!(line == "-" || line == value.to_string(), "{name}: {value}, and {line} in C");
        compared += usize::from(line != "-");
    }
    assert!(compared > 60, "the header is older than 7.38: {compared}");
}

/// What a header of 7.38, which distributions have, does not say.
#[test]
fn newer_structures_have_their_sizes() {
    assert_eq!(size_of::<InitOut>(), 64);
    assert_eq!((offset_of!(InitOut, max_stack_depth), offset_of!(InitOut, request_timeout)), (36, 40));
    assert_eq!((size_of::<StatxIn>(), size_of::<Statx>(), size_of::<StatxOut>()), (24, 256, 288));
    assert_eq!((offset_of!(Statx, btime), offset_of!(Statx, rdev_major)), (80, 128));
    assert_eq!((size_of::<RingHeader>(), offset_of!(RingHeader, op_in), offset_of!(RingHeader, flags)), (288, 128, 256));
    assert_eq!((offset_of!(RingHeader, commit_id), offset_of!(RingHeader, payload_sz)), (264, 272));
    assert_eq!((size_of::<RingCommand>(), offset_of!(RingCommand, commit_id), offset_of!(RingCommand, qid)), (24, 8, 16));
    assert_eq!(size_of::<CreateOut>(), size_of::<EntryOut>() + size_of::<OpenOut>());
}
