//! The library's examples (`client/examples`), each built and run on a real mount; the software
//! CUDA driver plays the part of a GPU.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use gpunvme_tests::mounted::{Mounted, text};
use gpunvme_tests::{needs_mount, programs, software_cuda, tree};

/// Several parts of a copy, and not whole blocks.
const LEN: u64 = (33 << 20) + 1234;

/// A volume with the file `from`, and what is in it.
fn volume() -> (Mounted, Vec<u8>) {
    let volume = Mounted::new();
    let bytes = tree::pattern(11, LEN as usize);
    fs::write(volume.path("from"), &bytes).unwrap();
    // A file that is replaced, and was longer.
    fs::write(volume.path("to"), tree::pattern(12, LEN as usize + 5000)).unwrap();
    (volume, bytes)
}

fn run(mut program: Command, files: &[PathBuf]) -> String {
    let output: Output = program.args(files).output().expect("the example runs");
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).expect("it prints text")
}

#[test]
fn copy() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(Command::new(programs::example("copy")), &[volume.path("from"), volume.path("to")]);
    assert_eq!(said, format!("{LEN} bytes by way of host memory\n"));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}

/// Compiles an example in C.
fn in_c(volume: &Mounted, name: &str) -> Command {
    let program = volume.image().path().with_file_name(name);
    let built = Command::new("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic"])
        .arg(format!("{}/../client/examples/{name}.c", env!("CARGO_MANIFEST_DIR")))
        .args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/../client/include"), "-L"])
        .arg(programs::folder())
        .args(["-lgpunvme", "-o"])
        .arg(&program)
        .output()
        .expect("cc runs");
    assert!(built.status.success(), "{}", text(&built));
    let mut program = Command::new(program);
    program.env("LD_LIBRARY_PATH", programs::folder());
    program
}

#[test]
fn copy_in_c() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(in_c(&volume, "copy"), &[volume.path("from"), volume.path("to")]);
    assert_eq!(said, format!("{LEN} bytes by way of host memory\n"));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}

#[test]
fn ring_in_c() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(in_c(&volume, "ring"), &[volume.path("from")]);
    let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(said, format!("{LEN} bytes, sum {sum}\n"));
}

#[test]
fn ring() {
    needs_mount!();
    let (volume, bytes) = volume();
    let said = run(Command::new(programs::example("ring")), &[volume.path("from")]);
    let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!(said, format!("{LEN} bytes, sum {sum}\n"));
}

#[test]
fn gpu() {
    needs_mount!();
    let (volume, bytes) = volume();
    // What the page cache has would come from there.
    let from = fs::File::open(volume.path("from")).unwrap();
    from.sync_all().unwrap();
    rustix::fs::fadvise(&from, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    let mut program = Command::new(programs::example("gpu"));
    program.env("LD_LIBRARY_PATH", software_cuda::folder());
    let said = run(program, &[volume.path("from"), volume.path("to")]);
    // The file ends within a block, of which the processor copies what there is.
    let edge = LEN % 512;
    let moved = format!("Moved {{ p2p: 0, bounce: {}, cache: 0, host: 0, hole: 0, edge: {edge} }}", LEN - edge);
    assert_eq!(said, format!("{LEN} bytes by way of {moved}\n"));
    assert!(fs::read(volume.path("to")).unwrap() == bytes);
}
