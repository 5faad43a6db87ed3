//! Programs that use cuFile and know nothing of gpunvme: linked, loading by name, in Python; by
//! `gpunvme run`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, scratch_dir, software_cuda, tree};

use crate::elsewhere::{compile, stand_in};
use crate::library::path;

const LEN: usize = 123_456;

/// `gpunvme run` with a report in a file.
fn run(report: &Path) -> Command {
    let mut command = programs::command("gpunvme");
    command.args(["run", "--"]).env("GPUNVME_CUFILE_REPORT", report);
    command
}

/// Python that finds the library as cuda-pathfinder does: the one that is loaded under its name, or
/// else that of the wheel, `sys.argv[1]`, and that by its absolute path.
const PATHFINDER: &str = r#"
import ctypes, os, sys
wheel, from_path, to_path, memory_kind = sys.argv[1:5]
class Address(ctypes.Structure): _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
try:
    found = ctypes.CDLL("libcufile.so.0", mode=os.RTLD_NOLOAD)
    about = Address()
    assert ctypes.CDLL(None).dladdr(ctypes.cast(found.cuFileRead, ctypes.c_void_p), ctypes.byref(about))
    path = os.fsdecode(about.file)
except OSError:
    path = wheel
assert os.path.isabs(path), path
cufile = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
assert wheel not in open("/proc/self/maps").read(), "NVIDIA's library is loaded"
"#;

/// What follows: a file is copied by the functions of `cufile`.
const COPY: &str = r#"
class Status(ctypes.Structure): _fields_ = [("code", ctypes.c_int), ("cuda", ctypes.c_int)]
class Descriptor(ctypes.Structure): _fields_ = [("kind", ctypes.c_int), ("fd", ctypes.c_long), ("operations", ctypes.c_void_p)]
cufile.cuFileHandleRegister.restype = Status
handles = []
for path, flags in (from_path, os.O_RDONLY), (to_path, os.O_RDWR | os.O_CREAT):
    handle = ctypes.c_void_p()
    assert cufile.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(Descriptor(1, os.open(path, flags), None))).code == 0
    handles.append(handle)
size = os.path.getsize(from_path)
if memory_kind == "device":
    cuda, context, memory = ctypes.CDLL("libcuda.so"), ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0 and cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)) == 0
else:
    memory = ctypes.create_string_buffer(size)
offset = ctypes.c_long(0)
for call, handle in (cufile.cuFileRead, handles[0]), (cufile.cuFileWrite, handles[1]):
    call.restype = ctypes.c_ssize_t
    assert call(handle, memory, ctypes.c_size_t(size), offset, offset) == size
print("cuFile 1150, closed with 0")
"#;

/// The bytes of a report's reads, or writes, by way. It has one request of each.
fn ways(report: &str, direction: &str) -> BTreeMap<String, usize> {
    let part = report.split("; ").find(|part| part.starts_with(direction)).unwrap_or_else(|| panic!("{direction}: {report}"));
    let (counts, ways) = part.split_once("bytes ").unwrap();
    assert_eq!(counts, format!("{direction}: 1 requests, 0 failed, "), "{report}");
    let words: Vec<_> = ways.split(", reason").next().unwrap().split_whitespace().collect();
    words.chunks(2).map(|pair| (pair[0].to_owned(), pair[1].parse().unwrap())).collect()
}

#[test]
fn programs_are_served_however_they_find_the_library() {
    needs_mount!();
    let (volume, scratch) = (Mounted::new(), scratch_dir());
    let data = tree::pattern(1, LEN);
    fs::write(volume.path("from"), &data).unwrap();
    let theirs = stand_in(scratch.path()).to_str().unwrap().to_owned();
    let (folder, at) = (scratch.path().to_str().unwrap(), |name: &str| scratch.path().join(name));
    let name = |name: &str| at(name).to_str().unwrap().to_owned();
    // Linked with NVIDIA's library, whose folder is in the program: as wheels have it (DT_RPATH),
    // and in a plug-in, as NIXL has it (DT_RUNPATH).
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{folder}");
    compile("cufile_user.c", &at("linked"), &[&theirs, &rpath, "-ldl"]);
    compile("cufile_user.c", &at("loading"), &["-DLOADED", "-ldl"]);
    compile("cufile_host.c", &at("host"), &["-ldl"]);
    fs::create_dir(at("plugins")).unwrap();
    let runpath = "-Wl,--enable-new-dtags,-rpath,$ORIGIN/..";
    let plugin = at("plugins/libplugin.so");
    compile("cufile_user.c", &plugin, &["-shared", "-fPIC", "-Dmain=copy_file", &theirs, runpath, "-ldl"]);
    for (built, tag) in [(at("linked"), "(RPATH)"), (plugin.clone(), "(RUNPATH)")] {
        let dynamic = Command::new("readelf").arg("-dW").arg(&built).output().unwrap();
        assert!(text(&dynamic).contains(tag), "{}", text(&dynamic));
    }
    let python = |find: &str| vec!["python3".to_owned(), "-c".into(), format!("{find}{COPY}")];
    let by_name =
        "import ctypes, sys, os\ncufile = ctypes.CDLL('libcufile.so')\nfrom_path, to_path, memory_kind = sys.argv[1:4]\n";
    let users: [(&str, Vec<String>); 5] = [
        ("linked", vec![name("linked")]),
        ("loading", vec![name("loading")]),
        ("plugin", vec![name("host"), plugin.to_str().unwrap().to_owned()]),
        ("python", python(by_name)),
        ("pathfinder", [python(PATHFINDER), vec![theirs.clone()]].concat()),
    ];
    for (name, command) in users {
        for memory in ["host", "device"] {
            let (report, copy) = (at(&format!("{name}.{memory}")), volume.path(format!("{name}.{memory}")));
            let mut program = run(&report);
            program.args(&command).arg(volume.path("from")).arg(&copy).arg(memory);
            // NVIDIA's library would say what it is asked for there.
            program.env("LD_LIBRARY_PATH", software_cuda::folder()).env("FAKE_LOG", at("log"));
            program.env("GPUNVME_CUFILE_CACHING", "never");
            let output = program.output().unwrap();
            assert!(output.status.success(), "{name}, {memory}: {}", text(&output));
            assert_eq!(String::from_utf8_lossy(&output.stdout), "cuFile 1150, closed with 0\n", "{name}, {memory}");
            assert!(fs::read(&copy).unwrap() == data, "{name}, {memory}");
            let told = fs::read_to_string(&report).unwrap();
            for direction in ["read", "write"] {
                let ways = ways(&told, direction);
                assert_eq!(ways.values().sum::<usize>(), LEN, "{name}, {memory}: {told}");
                // Ordinary memory on our mount is told as what it is; a GPU's goes by routes, here
                // with an end that no block has. Each says why not by the fastest.
                let (called, reason) = if memory == "host" { (LEN, "not-gpu-memory") } else { (0, "unaligned") };
                assert_eq!(told.matches(&format!(", reason {reason} 1")).count(), 2, "{name}, {memory}: {told}");
                assert_eq!(told.matches(", reason").count(), 2, "{name}, {memory}: {told}");
                assert_eq!((ways["call"], ways["real"], ways["plain"]), (called, 0, 0), "{name}, {memory}: {told}");
            }
        }
    }
    assert!(!at("log").exists(), "NVIDIA's library was asked for something");
}

/// Before the program, and so before NVIDIA's library, whose own calls by name are not caught.
#[test]
fn files_elsewhere_go_to_nvidias_library_from_a_program_that_is_preloaded() {
    let scratch = scratch_dir();
    let data = tree::pattern(2, LEN);
    let at = |name: &str| scratch.path().join(name);
    fs::write(at("from"), &data).unwrap();
    let theirs = stand_in(scratch.path());
    compile("cufile_user.c", &at("loading"), &["-DLOADED", "-ldl"]);
    let mut program = run(&at("report"));
    program.arg(at("loading")).arg(at("from")).arg(at("to")).env("GPUNVME_CUFILE_REAL", &theirs).env("FAKE_LOG", at("log"));
    let output = program.output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(fs::read(at("to")).unwrap() == data);
    let told = fs::read_to_string(at("report")).unwrap();
    assert_eq!((ways(&told, "read")["real"], ways(&told, "write")["real"]), (LEN, LEN), "{told}");
    assert!(!told.contains("reason"), "another library has its own: {told}");
    let calls = fs::read_to_string(at("log")).unwrap();
    let expected = "register open register open read write deregister deregister close";
    assert_eq!(calls.lines().collect::<Vec<_>>().join(" "), expected);
}

#[test]
fn run_says_which_library_a_program_would_load() {
    let scratch = scratch_dir();
    let check = |program: &Path| programs::command("gpunvme").args(["--json", "run", "--check"]).arg(program).output().unwrap();
    let dynamic = check(Path::new("python3"));
    assert!(dynamic.status.success(), "{}", text(&dynamic));
    let told: serde_json::Value = serde_json::from_slice(&dynamic.stdout).unwrap();
    assert_eq!(told["gpunvme"], true);
    let named = fs::canonicalize(told["libcufile"].as_str().unwrap()).unwrap();
    assert_eq!(named, fs::canonicalize(path()).unwrap());

    fs::write(scratch.path().join("empty.c"), "int main(void) { return 0; }").unwrap();
    let fixed = scratch.path().join("static");
    let built = Command::new("cc").args(["-static", "-o"]).arg(&fixed).arg(scratch.path().join("empty.c")).output().unwrap();
    assert!(built.status.success(), "{}", text(&built));
    let told = check(&fixed);
    assert_eq!(told.status.code(), Some(1), "{}", text(&told));
    assert!(String::from_utf8_lossy(&told.stdout).contains("\"gpunvme\": false"), "{}", text(&told));

    let none = check(Path::new("/nowhere"));
    assert_eq!(none.status.code(), Some(127));
    assert!(String::from_utf8_lossy(&none.stderr).contains("/nowhere: there is no such program"), "{}", text(&none));
}

#[test]
fn run_ends_as_env_does_where_it_cannot_run() {
    let scratch = scratch_dir();
    let (first, second) = (scratch.path().join("first"), scratch.path().join("second"));
    for (folder, mode) in [(&first, 0o644), (&second, 0o755)] {
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("program"), "#!/bin/sh\necho ran\n").unwrap();
        fs::set_permissions(folder.join("program"), fs::Permissions::from_mode(mode)).unwrap();
    }
    let report = scratch.path().join("report");
    let none = run(&report).arg("/nowhere").output().unwrap();
    assert_eq!(none.status.code(), Some(127), "{}", text(&none));
    let not_executable = run(&report).arg(first.join("program")).output().unwrap();
    assert_eq!(not_executable.status.code(), Some(126), "{}", text(&not_executable));
    let path = format!("{}:{}", first.display(), second.display());
    let next = run(&report).arg("program").env("PATH", path).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&next.stdout), "ran\n", "{}", text(&next));
}

#[test]
fn run_checks_what_is_no_program_and_python_environments() {
    let scratch = scratch_dir();
    let fifo = scratch.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for path in [Path::new("/dev/zero"), &fifo] {
        let mut check = Command::new("timeout");
        check.arg("10").arg(programs::path("gpunvme")).args(["run", "--check"]).arg(path);
        let told = check.output().unwrap();
        assert_eq!(told.status.code(), Some(1), "{}", text(&told));
    }

    // An environment, in which NVIDIA's library is.
    let environment = scratch.path().join("environment");
    let made = Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(&environment).output().unwrap();
    assert!(made.status.success(), "{}", text(&made));
    let python = fs::read_dir(environment.join("lib")).unwrap().next().unwrap().unwrap().path();
    let folder = python.join("site-packages/nvidia/cu13/lib");
    fs::create_dir_all(&folder).unwrap();
    let theirs = stand_in(&folder);
    let told = programs::command("gpunvme").args(["--json", "run", "--check"]).arg(&environment).output().unwrap();
    assert!(told.status.success(), "{}", text(&told));
    let told: serde_json::Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&told["gpunvme"], &told["elsewhere"]), (&true.into(), &theirs.to_str().unwrap().into()));
}

/// Runs Python that registers a file which is not on a gpunvme mount, after this code.
fn registers_elsewhere(scratch: &Path, code: &str) -> (Command, PathBuf) {
    let (file, log) = (scratch.join("elsewhere"), scratch.join("log"));
    fs::write(&file, "bytes").unwrap();
    let python = format!(
        "import ctypes, mmap, os\n{code}\nd = (ctypes.c_long * 3)(1, os.open({file:?}, os.O_RDONLY), 0)\n\
         ctypes.CDLL('libcufile.so.0').cuFileHandleRegister(ctypes.byref(ctypes.c_void_p()), d)"
    );
    let mut command = run(&scratch.join("report"));
    command.args(["python3", "-c", &python]).env("FAKE_LOG", &log).env("GPUNVME_CUFILE_LOG", "debug");
    command.env_remove("VIRTUAL_ENV").env_remove("GPUNVME_CUFILE_REAL");
    (command, log)
}

/// A folder that others may write to, such as /dev/shm, is no place to take code from.
#[test]
fn a_library_that_another_user_may_have_put_there_is_not_loaded() {
    let scratch = scratch_dir();
    let shared = scratch.path().join("shared");
    fs::create_dir(&shared).unwrap();
    stand_in(&shared);
    fs::write(shared.join("data"), [0; 4096]).unwrap();
    let data = shared.join("data");
    let maps = format!("f = open({data:?}, 'r+b'); m = mmap.mmap(f.fileno(), 0)");
    let (mut command, log) = registers_elsewhere(scratch.path(), &maps);
    let output = command.output().unwrap();
    assert!(output.status.success() && !log.exists(), "beside data: {}", text(&output));
    assert!(!text(&output).contains('\x1b'), "no colours where there is no terminal: {}", text(&output));

    let loads = |what: &str, library: &Path, expected: bool| {
        let (mut command, log) = registers_elsewhere(scratch.path(), "");
        let output = command.env("LD_LIBRARY_PATH", library).output().unwrap();
        assert!(output.status.success() && log.exists() == expected, "{what}: {}", text(&output));
        let _ = fs::remove_file(log);
    };
    let mode = |folder: &Path, mode| fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
    mode(&shared, 0o777);
    loads("in a folder of all", &shared, false);
    mode(&shared, 0o1777);
    loads("in one where others cannot rename what is there", &shared, true);
    std::os::unix::fs::chown(&shared, None, Some(12345)).unwrap();
    mode(&shared, 0o775);
    loads("in a folder of a group", &shared, false);
    mode(&shared, 0o755);
    loads("in a folder of this user's", &shared, true);
    let within = shared.join("within");
    fs::create_dir(&within).unwrap();
    stand_in(&within);
    loads("deeper", &within, true);
    mode(&shared, 0o777);
    loads("below a folder of all", &within, false);
}

#[test]
fn a_set_user_id_program_believes_nothing_of_its_callers() {
    needs_mount!();
    let scratch = scratch_dir();
    let at = |name: &str| scratch.path().join(name);
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o777)).unwrap();
    fs::copy(path(), at("libcufile.so.0")).unwrap();
    fs::write(at("from"), "bytes").unwrap();
    let rpath = format!("-Wl,-rpath,{}", scratch.path().display());
    compile("cufile_user.c", &at("program"), &[at("libcufile.so.0").to_str().unwrap(), &rpath]);
    let run = |mode: u32| {
        fs::set_permissions(at("program"), fs::Permissions::from_mode(mode)).unwrap();
        let mut program = Command::new(at("program"));
        program.arg(at("from")).arg(at("to")).env("GPUNVME_CUFILE_REPORT", at("report"));
        let output = program.env("GPUNVME_CUFILE_REAL", "off").env("GPUNVME_CUFILE_VERSION", "1200").output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let _ = fs::remove_file(at("to"));
        (String::from_utf8_lossy(&output.stdout).into_owned(), at("report").exists())
    };
    std::os::unix::fs::chown(at("program"), Some(65534), Some(65534)).unwrap();
    assert_eq!(run(0o4755), ("cuFile 1150, closed with 0\n".into(), false));
    assert_eq!(run(0o755), ("cuFile 1200, closed with 0\n".into(), true), "and its own user is believed");
}

#[test]
fn the_version_is_what_the_user_says() {
    let report = scratch_dir();
    let python =
        "import ctypes; v = ctypes.c_int(); ctypes.CDLL('libcufile.so.0').cuFileGetVersion(ctypes.byref(v)); print(v.value)";
    for (told, expected) in [(None, "1150\n"), (Some("1200"), "1200\n"), (Some("new"), "1150\n")] {
        let mut command = run(&report.path().join("report"));
        command.env_remove("GPUNVME_CUFILE_VERSION").args(["python3", "-c", python]);
        if let Some(told) = told {
            command.env("GPUNVME_CUFILE_VERSION", told);
        }
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{}", text(&output));
    }
}
