//! All programs have one grammar. What programs and commands there are is asked of the programs
//! themselves, so that a new one that breaks the grammar, or is documented nowhere, fails here.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use gpunvme_tests::mounted::text;
use gpunvme_tests::programs;

/// Programs: the column of the table of exit codes, the pages that tell of their commands, and
/// whether they report something.
const PROGRAMS: [(&str, &str, &[&str], bool); 5] = [
    ("mkfs.gpunvme", "mkfs", &["mkfs/man/mkfs.gpunvme.8"], true),
    ("mount.gpunvme", "mount", &["fs/mount/man/mount.gpunvme.8"], false),
    ("fsck.gpunvme", "fsck", &["mkfs/man/fsck.gpunvme.8"], true),
    ("gpunvme", "gpunvme", &["client/man/gpunvme.1", "client/man/gpunvme-nvme.1"], true),
    ("gpunvme-stage", "gpunvme", &["stage/man/gpunvme-stage.1"], true),
];

fn repository(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn run(program: &str, command: &[String], option: &str) -> Output {
    programs::command(program).args(command).arg(option).output().unwrap()
}

/// The help of a command, which says nothing else and succeeds.
fn help(program: &str, command: &[String]) -> String {
    let output = run(program, command, "--help");
    assert!(output.status.success() && output.stderr.is_empty(), "{program} {command:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// All commands below one, itself first, each as its words.
fn commands(program: &str, command: Vec<String>) -> Vec<Vec<String>> {
    let help = help(program, &command);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let is_name = |line: &&str| line.starts_with("  ") && !line[2..].starts_with(' ');
    let names: Vec<&str> = listed.filter(is_name).filter_map(|line| line.split_whitespace().next()).collect();
    let mut all = vec![command.clone()];
    for name in names.into_iter().filter(|name| *name != "help") {
        all.extend(commands(program, [&command[..], &[name.to_owned()]].concat()));
    }
    all
}

/// The code of a wrong command line, as the table of the reference has it.
fn usage_code(column: &str) -> i32 {
    let page = repository("docs/reference/commands.md");
    let table: Vec<Vec<&str>> = page
        .lines()
        .skip_while(|line| !line.starts_with("| code |"))
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.split('|').map(|cell| cell.trim().trim_matches('`')).collect())
        .collect();
    let column = table[0].iter().position(|cell| *cell == column).expect("a column of the table");
    let row = table.iter().find(|row| ["wrong usage", "wrong arguments"].contains(&row[column])).expect("it has a code");
    row[1].parse().expect("a number")
}

#[test]
fn every_command_has_the_grammar_of_all() {
    for (program, column, _, reports) in PROGRAMS {
        let usage = usage_code(column);
        let all = commands(program, Vec::new());
        assert!(program != "gpunvme" || all.len() > 20, "{all:?}");
        for command in all {
            let name = format!("{program} {}", command.join(" "));
            let version = run(program, &command, "--version");
            assert!(version.status.success(), "{name} --version: {}", text(&version));
            assert!(text(&version).contains(env!("CARGO_PKG_VERSION")), "{name} --version: {}", text(&version));
            let wrong = run(program, &command, "--no-such-option");
            assert_eq!(wrong.status.code(), Some(usage), "{name}: {}", text(&wrong));
            assert!(wrong.stdout.is_empty() && text(&wrong).contains("--no-such-option"), "{name}: {}", text(&wrong));
            assert!(!reports || help(program, &command).contains("--json"), "{name} reports as JSON, too");
        }
    }
}

/// What bash offers for the last of `words`, the words of a command line.
fn completed(program: &str, words: &[&str]) -> String {
    let script = String::from_utf8(run(program, &[], "--completions=bash").stdout).unwrap();
    let ask = r#"
        function=$(complete -p "$1" | sed 's/.* -F \([^ ]*\) .*/\1/')
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); $function "$1" "${@: -1}" "${@: -2:1}"; echo "${COMPREPLY[@]}""#;
    let output = Command::new("bash").args(["-c", &format!("{script}{ask}"), "bash", program]).args(words).output().unwrap();
    assert!(output.status.success(), "{program} {words:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[test]
fn bash_completes_options_of_every_program_also_behind_commands() {
    for (program, words, offered) in [
        ("mkfs.gpunvme", &["--la"][..], "--label"),
        ("fsck.gpunvme", &["--no"], "--no-change"),
        ("mount.gpunvme", &["--fore"], "--foreground"),
        ("gpunvme", &["metadata-dump", "--na"], "--names"),
        ("gpunvme", &["nvme", "vfio:x", "form"], "format"),
        ("gpunvme", &["hydrate", "--quo"], "--quota"),
        ("gpunvme", &["stage", "status", "--ev"], "--evicted"),
        ("gpunvme-stage", &["hyd"], "hydrate"),
        ("gpunvme-stage", &["hydrate", "--inc"], "--include"),
        ("gpunvme-stage", &["hydrate", "a", "b", "--verify", ""], "checksum none"),
        ("gpunvme-stage", &["stage", "status", "--ev"], "--evicted"),
    ] {
        assert_eq!(completed(program, words), offered, "{program} {words:?}");
    }
}

/// The same of the program that is a script.
#[test]
fn the_script_for_controllers_has_it_too() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/vfio");
    let run = |arguments: &[&str]| Command::new("sh").arg(&script).args(arguments).output().unwrap();
    let (reference, page) = (repository("docs/reference/commands.md"), repository("client/man/gpunvme-vfio.8"));
    let usage = usage_code("gpunvme-vfio");
    for command in ["bind", "unbind", "status"] {
        for option in ["--help", "--version"] {
            let told = run(&[command, option]);
            assert!(told.status.success() && text(&told).contains("gpunvme-vfio"), "{command} {option}: {}", text(&told));
        }
        let wrong = run(&[command, "--no-such-option"]);
        assert_eq!(wrong.status.code(), Some(usage), "{command}: {}", text(&wrong));
        assert!(wrong.stdout.is_empty() && text(&wrong).contains("--no-such-option"), "{command}: {}", text(&wrong));
        assert!(reference.contains(&format!("`{command}`")) && page.contains(&format!(".B {command}\n")), "{command}");
    }
    for (shell, begins) in [("bash", "_gpunvme_vfio()"), ("zsh", "#compdef gpunvme-vfio"), ("fish", "complete -c gpunvme-vfio")] {
        let script = run(&["--completions", shell]);
        assert!(String::from_utf8_lossy(&script.stdout).starts_with(begins), "{shell}: {}", text(&script));
    }
    // Any PCI device will do.
    let Some(device) = fs::read_dir("/sys/bus/pci/devices").ok().and_then(|mut all| all.next()) else { return };
    let name = device.unwrap().file_name().into_string().unwrap();
    let told = run(&["status", "--json", &name]);
    let status: serde_json::Value =
        serde_json::from_slice(&told.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&told)));
    assert_eq!(status[0]["address"], name, "{status}");
    assert!(status[0]["driver"].is_string() && status[0]["uses"].is_array(), "{status}");
}

#[test]
fn every_command_is_in_the_reference_and_in_a_manual_page() {
    let reference = repository("docs/reference/commands.md");
    for (program, _, pages, _) in PROGRAMS {
        let pages: String = pages.iter().map(|page| repository(page)).collect();
        // As people read it: without the marks of fonts.
        let words: Vec<&str> = pages.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '.').collect();
        assert!(reference.contains(&format!("`{program}")), "{program}");
        for command in commands(program, Vec::new()) {
            let Some(last) = command.last() else { continue };
            let is_known = [&command.join(" "), last].iter().any(|name| reference.contains(&format!("`{name}")));
            assert!(is_known, "{program} {command:?} is in docs/reference/commands.md");
            let is_told = words.contains(&last.as_str()) || pages.contains(&last.replace('-', "\\-"));
            assert!(is_told, "{program} {command:?} is in a manual page");
        }
    }
}
