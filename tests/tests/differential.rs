//! Compares gpunvme with ext4: see `gpunvme_tests::differential`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use gpunvme_tests::differential::call::Step;
use gpunvme_tests::differential::differences::{DIFFERENCES, documented};
use gpunvme_tests::differential::generate::sequence;
use gpunvme_tests::differential::pair::{Pair, read_docs, say};
use gpunvme_tests::differential::process::Side;
use gpunvme_tests::differential::run::{Disagreement, Runner};
use gpunvme_tests::differential::shrink::shrink;
use gpunvme_tests::{needs_mount, report_skipped};
use rustix::fs::{CWD, FileType, Mode};

/// Calls in a sequence.
const LEN: usize = 300;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} has to be a number")))
}

/// Keeps a line in `differential/NAME` of the folder for temporary files of the tests, which
/// outlives a campaign that is cut off.
fn keep(name: &str, text: &str, append: bool) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("differential");
    let written = fs::create_dir_all(&folder).and_then(|()| {
        let mut file = File::options().create(true).write(true).truncate(!append).append(append).open(folder.join(name))?;
        writeln!(file, "{text}")
    });
    written.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
}

/// Says what was found, and keeps it.
fn report(text: &str) {
    say(text);
    keep("found", text, true);
}

fn program(steps: &[Step], found: &Disagreement) -> String {
    let lines: Vec<_> = steps.iter().map(|step| format!("  {step}")).collect();
    format!("{}\n{found}", lines.join("\n"))
}

/// `DIFFERENTIAL_SEED` repeats one sequence; `DIFFERENTIAL_SECONDS` goes on for as long, from a
/// seed of its own, and past what it finds. `target/tmp/differential` keeps what was `found`, and
/// the seed that was `running` at last.
#[test]
fn programs_get_from_gpunvme_what_they_get_from_ext4() {
    needs_mount!();
    let mut runner = Runner { known: BTreeSet::new(), program: env!("CARGO_BIN_EXE_differential-process").into() };
    let mut pair = match Pair::new() {
        Ok(pair) => pair,
        Err(why) => return report_skipped("programs_get_from_gpunvme_what_they_get_from_ext4", &format!("needs ext4: {why}")),
    };
    let (only, seconds) = (number("DIFFERENTIAL_SEED"), number("DIFFERENTIAL_SECONDS"));
    let begun = Instant::now();
    let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let first = only.unwrap_or(if seconds.is_some() { since_1970.as_millis() as u64 } else { 1 });
    let end = begun + Duration::from_secs(seconds.unwrap_or(20));
    let mut calls = 0;
    say(&format!("differential: from seed {first} on"));
    for seed in first.. {
        keep("running", &format!("DIFFERENTIAL_SEED={seed}"), false);
        let steps = sequence(seed, LEN);
        calls += steps.len();
        if let Err(found) = runner.run(&mut pair, &steps, true) {
            report(&format!("seed {seed}, after {:.1?}, step {}: {found}", begun.elapsed(), found.step));
            let (steps, found) = shrink(&runner, &mut pair, steps, found);
            report(&format!("DIFFERENTIAL_SEED={seed} disagrees; in short:\n{}", program(&steps, &found)));
            runner.known.insert(found.kind);
            if seconds.is_none() {
                break;
            }
        }
        if only.is_some() || Instant::now() > end {
            break;
        }
    }
    say(&format!("differential: {calls} calls on each side in {:.1?}", begun.elapsed()));
    assert!(runner.known.is_empty(), "{} kinds of disagreement: {:#?}", runner.known.len(), runner.known);
}

/// Sequences make device nodes, and open and write them as root.
#[test]
fn no_call_of_a_sequence_reaches_a_device_of_the_machine() {
    needs_mount!();
    let name = "no_call_of_a_sequence_reaches_a_device_of_the_machine";
    let mut pair = match Pair::new() {
        Ok(pair) => pair,
        Err(why) => return report_skipped(name, &format!("needs ext4: {why}")),
    };
    // The kernel's null device: no harm is done if it can be opened.
    let null = rustix::fs::makedev(1, 3);
    for remounted in [false, true] {
        pair.start_afresh();
        for side in [Side::Ext4, Side::Gpunvme] {
            let node = pair.folder(side).join("node");
            rustix::fs::mknodat(CWD, &node, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, null).unwrap();
            let opened = File::open(&node).map_err(|error| error.kind());
            assert_eq!(opened.err(), Some(ErrorKind::PermissionDenied), "{side:?}, remounted: {remounted}");
        }
        pair.remount().unwrap();
    }
}

#[test]
fn the_docs_name_the_differences_that_the_fuzzer_leaves_out() {
    let named: Vec<_> = DIFFERENCES.iter().map(|&(name, how)| (name.to_owned(), how.words().to_owned())).collect();
    assert_eq!(
        documented(&read_docs("docs/reference/posix.md")),
        named,
        "the table in docs/reference/posix.md, and the one in tests/src/differential/differences.rs"
    );
}
