//! Programs that use cuFile and know nothing of gpunvme: linked, loading by name, in Python; by
//! `gpunvme run`.

use std::fs;
use std::path::Path;
use std::process::Command;

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, scratch_dir, tree};

use crate::elsewhere::{compile, stand_in};
use crate::library::path;

const LEN: usize = 123_456;

/// `gpunvme run` with a report in a file.
fn run(report: &Path) -> Command {
    let mut command = programs::command("gpunvme");
    command.args(["run", "--"]).env("GPUNVME_CUFILE_REPORT", report);
    command
}

#[test]
fn programs_are_served_however_they_find_the_library() {
    needs_mount!();
    let (volume, scratch) = (Mounted::new(), scratch_dir());
    let data = tree::pattern(1, LEN);
    fs::write(volume.path("from"), &data).unwrap();
    let theirs = stand_in(scratch.path());
    let (folder, at) = (scratch.path().to_str().unwrap(), |name: &str| scratch.path().join(name));
    // Linked with NVIDIA's library, whose folder is in the program, as wheels have it (DT_RPATH).
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{folder}");
    compile("cufile_user.c", &at("linked"), &[theirs.to_str().unwrap(), &rpath]);
    compile("cufile_user.c", &at("loading"), &["-DLOADED", "-ldl"]);
    let python = r#"
import ctypes, os, sys
class Status(ctypes.Structure): _fields_ = [("code", ctypes.c_int), ("cuda", ctypes.c_int)]
class Descriptor(ctypes.Structure): _fields_ = [("kind", ctypes.c_int), ("fd", ctypes.c_long), ("operations", ctypes.c_void_p)]
cufile = ctypes.CDLL("libcufile.so")
cufile.cuFileHandleRegister.restype = Status
handles = []
for path, flags in (sys.argv[1], os.O_RDONLY), (sys.argv[2], os.O_RDWR | os.O_CREAT):
    handle = ctypes.c_void_p()
    assert cufile.cuFileHandleRegister(ctypes.byref(handle), ctypes.byref(Descriptor(1, os.open(path, flags), None))).code == 0
    handles.append(handle)
memory = ctypes.create_string_buffer(os.path.getsize(sys.argv[1]))
offset = ctypes.c_long(0)
for call, handle in (cufile.cuFileRead, handles[0]), (cufile.cuFileWrite, handles[1]):
    call.restype = ctypes.c_ssize_t
    assert call(handle, memory, ctypes.c_size_t(len(memory)), offset, offset) == len(memory)
print("cuFile 1150, closed with 0")
"#;
    let users: [(&str, Vec<String>); 3] = [
        ("linked", vec![at("linked").display().to_string()]),
        ("loading", vec![at("loading").display().to_string()]),
        ("python", vec!["python3".into(), "-c".into(), python.into()]),
    ];
    for (name, command) in users {
        let (report, copy) = (at(&format!("{name}.report")), volume.path(name));
        let output = run(&report).args(&command).arg(volume.path("from")).arg(&copy).output().unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout), "cuFile 1150, closed with 0\n", "{name}");
        assert!(fs::read(&copy).unwrap() == data, "{name}");
        // Ordinary memory on our mount: told as what it is.
        let told = fs::read_to_string(&report).unwrap();
        let ways = format!("0 failed, bytes p2p 0 bounce 0 host 0 hole 0 edge 0 call {LEN} real 0 plain 0");
        assert_eq!(told.matches(&ways).count(), 2, "{name}: {told}");
    }
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
    assert_eq!(none.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&none.stderr).contains("/nowhere: there is no such program"), "{}", text(&none));
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
