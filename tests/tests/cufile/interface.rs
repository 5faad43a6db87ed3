//! The library as the loader sees it, and its declarations beside NVIDIA's.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use gpunvme_tests::mounted::text;
use gpunvme_tests::{report_skipped, scratch_dir};

use crate::library::path;

const FUNCTIONS: &str = "BatchIOCancel BatchIODestroy BatchIOGetStatus BatchIOSetUp BatchIOSubmit BufDeregister BufRegister \
    DriverClose DriverClose_v2 DriverGetP2PFlags DriverGetProperties DriverOpen DriverSetMaxCacheSize DriverSetMaxDirectIOSize \
    DriverSetMaxPinnedMemSize DriverSetP2PFlags DriverSetPollMode ExportPCIeTopology GetBARSizeInKB GetParameterBool \
    GetParameterGpuBounceBufferSlabArray GetParameterMinMaxValue GetParameterPosixPoolSlabArray GetParameterSizeT \
    GetParameterString GetStatsL1 GetStatsL2 GetStatsL3 GetStatsLevel GetVersion HandleDeregister HandleRegister Read ReadAsync \
    Readv SetParameterBool SetParameterGpuBounceBufferSlabArray SetParameterPosixPoolSlabArray SetParameterSizeT \
    SetParameterString SetStatsLevel StatsReset StatsStart StatsStop StreamDeregister StreamRegister UseCount Write WriteAsync \
    Writev";

fn functions() -> BTreeSet<String> {
    FUNCTIONS.split_whitespace().map(|name| format!("cuFile{name}")).collect()
}

fn said(command: &mut Command) -> String {
    let output: Output = command.output().expect("it runs");
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).expect("it prints text")
}

#[test]
fn it_has_every_documented_function_and_no_other() {
    let symbols = said(Command::new("nm").args(["-D", "--defined-only", "--format=just-symbols"]).arg(path()));
    let exported: BTreeSet<String> = symbols.lines().map(str::to_owned).collect();
    assert_eq!(exported, functions());
    assert_eq!(exported.len(), 50);
}

#[test]
fn it_has_the_name_of_nvidias_no_versions_and_needs_no_cuda() {
    let dynamic = said(Command::new("readelf").args(["-dW"]).arg(path()));
    assert!(dynamic.contains("Library soname: [libcufile.so.0]"), "{dynamic}");
    assert!(!dynamic.contains("VERDEF") && !dynamic.contains("libcuda"), "{dynamic}");
}

/// The oldest and the newest version that the declarations stand for. A header has no
/// `cuFileDriverClose_v2`: it is what `cuFileDriverClose` is renamed to.
#[test]
fn its_declarations_are_those_of_nvidias_header() {
    for (version, level1) in [("1.15.0.42", 512), ("1.20.0.107", 624)] {
        let scratch = scratch_dir();
        let fetched = Command::new("timeout")
            .args(["60", "python3", "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest"])
            .arg(scratch.path())
            .arg(format!("nvidia-cufile=={version}"))
            .output();
        let wheel = fs::read_dir(scratch.path()).unwrap().flatten().map(|entry| entry.path()).next();
        let Some(wheel) = wheel else {
            report_skipped("its_declarations_are_those_of_nvidias_header", &format!("no wheel of {version}: {fetched:?}"));
            return;
        };
        said(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(scratch.path()));
        let include = scratch.path().join("nvidia/cu13/include");
        let c = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c"));
        said(
            Command::new("cc")
                .args(["-fsyntax-only", "-I"])
                .arg(c.join("cuda_stub"))
                .arg("-I")
                .arg(&include)
                .arg(format!("-DLEVEL1={level1}"))
                .arg(c.join("cufile_layout.c")),
        );
        let header = fs::read_to_string(include.join("cufile.h")).unwrap();
        let declared: BTreeSet<String> = header
            .match_indices("cuFile")
            .map(|(at, _)| &header[at..])
            .filter_map(|rest| {
                let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_')?;
                rest[len..].trim_start_matches(' ').starts_with('(').then(|| rest[..len].to_owned())
            })
            .collect();
        assert!(declared.is_subset(&functions()), "{:?}", declared.difference(&functions()));
        assert!(version < "1.20" || declared.len() == 49, "{:?}", functions().difference(&declared));
    }
}
