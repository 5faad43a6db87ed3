//! The C headers and the C ABI, by compiling C.

use gpunvme::{Extent, ExtentFlags, Reason, Route, Segment};
use gpunvme_abi::ring::{self, Word};
use gpunvme_abi::{self as abi, Command};
use std::fmt::Write;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Output;

const INCLUDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include");

/// Compiles a C program, with every warning an error.
fn compile(source: &Path, program: &Path, libraries: &[&str]) -> Result<(), String> {
    let output = std::process::Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-D_GNU_SOURCE", "-I", INCLUDE, "-o"])
        .arg(program)
        .arg(source)
        .args(libraries)
        .output()
        .expect("a C compiler is needed for this test");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

macro_rules! layout {
    ($program:ident, $($rust:ty as $c:literal { $($field:ident),* })*) => { $(
        let c = $c;
        assert_that($program, &format!("sizeof(struct {c})"), size_of::<$rust>() as u64);
        $( assert_that($program, &format!("offsetof(struct {c}, {})", stringify!($field)), offset_of!($rust, $field) as u64); )*
        // Every byte belongs to a field that both name: what is not listed here would show as a
        // gap.
        let sizes = [$( format!("sizeof(((struct {c} *)0)->{})", stringify!($field)) ),*].join(" + ");
        assert_that($program, &sizes, size_of::<$rust>() as u64);
    )* };
}

fn assert_that(program: &mut String, expression: &str, value: u64) {
    writeln!(program, "_Static_assert(({expression}) == {value}ull, \"{expression} is not {value}\");").unwrap();
}

/// The header says the same as the Rust structures, by assertions that the C compiler checks.
#[test]
fn the_header_is_the_abi() {
    let mut source = String::from("#include \"gpunvme.h\"\n");
    let program = &mut source;
    layout! { program,
        abi::Info as "gpunvme_info" { version, flags, magic, features, uuid, capacity, free, max_transfer, max_buffer_bytes, max_buffers,
            max_segments, block_size, logical_block, memory_alignment, devices, route, reason, stripe_unit, sets, commit, cache, write_buffer, threads, reserved2, reserved, label, socket, device, daemon }
        abi::Register as "gpunvme_register" { version, flags, fd, reserved, len, buffer, route, reason, reserved2 }
        abi::Unregister as "gpunvme_unregister" { version, flags, buffer }
        abi::Resolve as "gpunvme_resolve" { version, flags, offset, len, next, file_size, capacity, count }
        Extent as "gpunvme_extent" { file_offset, device_offset, len, device, flags }
        abi::Transfer as "gpunvme_transfer" { version, flags, buffer, segments, descriptor, grant, bytes, p2p, bounce, host, hole, edge,
            reason, status, failed_segment, reserved2 }
        Segment as "gpunvme_segment" { file_offset, buffer_offset, len }
        gpunvme::gpu::Segment as "gpunvme_gpu_segment" { file_offset, address, len }
        abi::Moved as "gpunvme_moved" { p2p, bounce, host, hole, edge }
        abi::Stats as "gpunvme_stats" { version, flags, calls, failed, read, write, buffers, buffer_bytes, processes, reasons, more_calls }
        abi::Grant as "gpunvme_grant" { version, flags, grant, reserved }
        abi::Trim as "gpunvme_trim" { version, flags, start, len, minimum, next, trimmed, reserved, why }
        abi::Grow as "gpunvme_grow" { version, flags, before, capacity, reserved, why }
        abi::NewDevice as "gpunvme_new_device" { name }
        abi::Sync as "gpunvme_sync" { version, flags, reserved }
        abi::Log as "gpunvme_log" { version, flags, filter, reserved }
        abi::Metrics as "gpunvme_metrics" { version, flags, capacity, count, uptime, volume_bytes, free, dirty, cache_lookups,
            cache_misses, cache_bytes, rings, reserved }
        abi::Metric as "gpunvme_metric" { kind, reserved, name, begun, failed, bytes, nanoseconds, buckets }
        abi::TopList as "gpunvme_top_list" { version, flags, capacity, count, left_out, others, reserved }
        abi::Top as "gpunvme_top" { user, thread, ino, requests, transfers, read, written, nanoseconds, reserved }
        abi::Message as "gpunvme_message" { request, status }
        ring::Ring as "gpunvme_ring_setup" { version, flags, memory, submitted, completed, entries, ring, reserved }
        ring::Attach as "gpunvme_attach" { version, flags, ring, file, grant, descriptor, reserved }
        ring::Detach as "gpunvme_detach" { version, flags, ring, file, reserved }
        ring::Submission as "gpunvme_submission" { command, flags, file, buffer, file_offset, buffer_offset, len, user_data, reserved }
        ring::Completion as "gpunvme_completion" { user_data, status, reason, p2p, bounce, host, hole, edge, flags }
    }
    for (name, value) in [
        ("GPUNVME_VERSION", abi::VERSION.into()),
        ("GPUNVME_MAX_SIZE", abi::MAX_SIZE as u64),
        ("GPUNVME_MAX_SEGMENTS", abi::MAX_SEGMENTS as u64),
        ("GPUNVME_MAX_EXTENTS", abi::MAX_EXTENTS as u64),
        ("GPUNVME_MAX_TRANSFER", abi::MAX_TRANSFER),
        ("GPUNVME_FEATURE_READ_ONLY", abi::Features::READ_ONLY.bits()),
        ("GPUNVME_FEATURE_IO_URING", abi::Features::IO_URING.bits()),
        ("GPUNVME_FEATURE_IO_URING_REFUSED", abi::Features::IO_URING_REFUSED.bits()),
        ("GPUNVME_FEATURE_IO_URING_NOT_OFFERED", abi::Features::IO_URING_NOT_OFFERED.bits()),
        ("GPUNVME_FEATURE_IO_URING_NOT_REGISTERED", abi::Features::IO_URING_NOT_REGISTERED.bits()),
        ("GPUNVME_REGISTER_STAGING", abi::RegisterFlags::STAGING.bits().into()),
        ("GPUNVME_EXTENT_UNWRITTEN", ExtentFlags::UNWRITTEN.bits().into()),
        ("GPUNVME_EXTENT_LAST", ExtentFlags::LAST.bits().into()),
        ("GPUNVME_REQUIRE_P2P", abi::TransferFlags::REQUIRE_P2P.bits().into()),
        ("GPUNVME_REQUIRE_BOUNCE", abi::TransferFlags::REQUIRE_BOUNCE.bits().into()),
        ("GPUNVME_REQUIRE_HOST", abi::TransferFlags::REQUIRE_HOST.bits().into()),
        ("GPUNVME_REQUIRE_DIRECT", abi::TransferFlags::REQUIRE_DIRECT.bits().into()),
        ("GPUNVME_WRITTEN_BACK", abi::TransferFlags::WRITTEN_BACK.bits().into()),
        ("GPUNVME_WRITTEN_BACK", abi::ResolveFlags::WRITTEN_BACK.bits().into()),
        ("GPUNVME_INFO", Command::Info.request(0).into()),
        ("GPUNVME_REGISTER", Command::Register.request(0).into()),
        ("GPUNVME_UNREGISTER", Command::Unregister.request(0).into()),
        ("GPUNVME_RESOLVE(3)", Command::Resolve.request(3).into()),
        ("GPUNVME_READ(3)", Command::Read.request(3).into()),
        ("GPUNVME_WRITE(GPUNVME_MAX_SEGMENTS)", Command::Write.request(abi::MAX_SEGMENTS).into()),
        ("GPUNVME_STATS", Command::Stats.request(0).into()),
        ("GPUNVME_RING", Command::Ring.request(0).into()),
        ("GPUNVME_ATTACH", Command::Attach.request(0).into()),
        ("GPUNVME_DETACH", Command::Detach.request(0).into()),
        ("GPUNVME_GRANT", Command::Grant.request(0).into()),
        ("GPUNVME_TRIM", Command::Trim.request(0).into()),
        ("GPUNVME_GROW(3)", Command::Grow.request(3).into()),
        ("GPUNVME_GROW_CHECK", abi::GrowFlags::CHECK.bits().into()),
        ("GPUNVME_MAX_NEW_DEVICES", abi::MAX_NEW_DEVICES as u64),
        ("GPUNVME_SYNC", Command::Sync.request(0).into()),
        ("GPUNVME_LOG", Command::Log.request(0).into()),
        ("GPUNVME_METRICS(3)", Command::Metrics.request(3).into()),
        ("GPUNVME_METRIC_REQUEST", abi::MetricKind::Request as u64),
        ("GPUNVME_METRIC_TRANSFER", abi::MetricKind::Transfer as u64),
        ("GPUNVME_METRIC_DEVICE", abi::MetricKind::Device as u64),
        ("GPUNVME_MAX_RING_TRANSFER", ring::MAX_RING_TRANSFER),
        ("GPUNVME_COMPLETION_COMMON", ring::CompletionFlags::COMMON.bits()),
        ("GPUNVME_COMPLETION_ALL", ring::CompletionFlags::ALL.bits()),
        ("GPUNVME_RING_SUBMISSION_TAIL", Word::SubmissionTail.offset() as u64),
        ("GPUNVME_RING_SUBMISSION_HEAD", Word::SubmissionHead.offset() as u64),
        ("GPUNVME_RING_COMPLETION_TAIL", Word::CompletionTail.offset() as u64),
        ("GPUNVME_RING_COMPLETION_HEAD", Word::CompletionHead.offset() as u64),
        ("GPUNVME_RING_DAEMON", Word::Daemon.offset() as u64),
        ("GPUNVME_RING_APPLICATION", Word::Application.offset() as u64),
        ("GPUNVME_RING_OVER", Word::Over.offset() as u64),
        ("GPUNVME_RING_AWAKE", ring::AWAKE.into()),
        ("GPUNVME_RING_ASLEEP", ring::ASLEEP.into()),
        ("GPUNVME_RING_CLOSED", ring::CLOSED.into()),
        ("GPUNVME_RING_ENTRIES", ring::submission_offset(64, 0) as u64),
        ("GPUNVME_RING_BYTES(64)", ring::ring_bytes(64) as u64),
    ] {
        assert_that(program, name, value);
    }
    let in_c = |name: &str| name.replace('-', "_").to_uppercase();
    for route in Route::ALL {
        assert_that(program, &format!("GPUNVME_ROUTE_{}", in_c(route.name())), route.code().into());
    }
    for reason in Reason::ALL {
        assert_that(program, &format!("GPUNVME_REASON_{}", in_c(reason.name())), reason.code().into());
    }
    source += "int main(void) { return 0; }\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("layout.c");
    std::fs::write(&path, source).unwrap();
    if let Err(errors) = compile(&path, &directory.path().join("layout"), &[]) {
        panic!("{errors}");
    }
}

/// The library that cargo built beside this test.
fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libgpunvme.so")
}

/// Compiles a program with the library, in a directory that then has the library under its SONAME.
fn program(source: &Path, directory: &Path) -> PathBuf {
    let program = directory.join("program");
    for name in ["libgpunvme.so.0", "libgpunvme.so"] {
        std::os::unix::fs::symlink(library(), directory.join(name)).unwrap();
    }
    let libraries = [&format!("-L{}", directory.display()), &format!("-Wl,-rpath,{}", directory.display()), "-lgpunvme"];
    if let Err(errors) = compile(source, &program, &libraries) {
        panic!("{errors}");
    }
    program
}

/// Runs the example.
fn example(argument: &Path) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let source = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/copy.c"));
    std::process::Command::new(program(&source, directory.path())).arg(argument).arg("unused").output().unwrap()
}

/// What a program of binutils prints about the library.
fn inspect(tool: &str, arguments: &[&str]) -> String {
    let output =
        std::process::Command::new(tool).args(arguments).arg(library()).output().expect("binutils are needed for this test");
    assert!(output.status.success(), "{tool}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A function that goes, or comes without a line that says since when, is noticed before programs
/// notice it.
#[test]
fn the_library_has_the_symbols_that_its_packages_promise() {
    let mut promised = include_str!("../../contrib/debian/libgpunvme0.symbols").lines();
    let soname = promised.next().and_then(|line| line.split(' ').next()).unwrap();
    assert!(inspect("readelf", &["-d"]).contains(&format!("Library soname: [{soname}]")), "the SONAME is not {soname}");
    let promised: Vec<_> = promised.map(|line| line.trim_start().split('@').next().unwrap()).collect();
    let symbols = inspect("nm", &["-D", "--defined-only"]);
    let mut symbols: Vec<_> = symbols.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    symbols.sort_unstable();
    assert_eq!(symbols, promised, "contrib/debian/libgpunvme0.symbols (right) is not what the library has (left)");
}

#[test]
fn the_library_tells_its_version() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("version.c");
    let text = "#include <stdio.h>\n#include <gpunvme.h>\nint main(void) { return puts(gpunvme_version()) < 0; }\n";
    std::fs::write(&source, text).unwrap();
    let said = std::process::Command::new(program(&source, directory.path())).output().unwrap();
    assert_eq!(String::from_utf8(said.stdout).unwrap(), concat!(env!("CARGO_PKG_VERSION"), "\n"));
}

/// A C program links, runs, and is told in words what is wrong.
#[test]
fn a_c_program_uses_the_library() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "not on a gpunvme mount").unwrap();
    let output = example(&file);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains(&format!("{}: not on a gpunvme mount", file.display())), "{message}");
    let output = example(Path::new("/nonexistent"));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("/nonexistent: cannot open it: no such file or directory"), "{message}");
}
