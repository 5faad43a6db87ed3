//! Compares the documents with the repository: tests, campaigns and lab cases that
//! `docs/promises.md` names exist, paths and links lead to files and headings that are there, the
//! book lists every page, and no line of prose or of a comment is too long.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use gpunvme_abi::{Reason, Route};
use gpunvme_tests::results::Run;
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// Characters that a line of prose may have: of Markdown, and of a man page.
const LINE: usize = 120;
/// Characters that a line of a comment may have.
const COMMENT: usize = 100;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are a folder of the repository").to_owned()
}

/// The repository's files whose names end in `ending`, by their paths from its root. What is built
/// and what is hidden is left out.
fn files(ending: &str) -> Vec<PathBuf> {
    fn collect(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder of the repository").map(|entry| entry.expect("an entry")) {
            let name = entry.file_name().into_string().expect("a name in UTF-8");
            let kind = entry.file_type().expect("a type");
            if kind.is_dir() && name != "target" && !name.starts_with('.') {
                collect(&entry.path(), ending, found);
            } else if kind.is_file() && name.ends_with(ending) {
                found.push(entry.path().strip_prefix(root()).expect("below the root").to_owned());
            }
        }
    }
    let mut found = Vec::new();
    collect(&root(), ending, &mut found);
    found.sort();
    assert!(!found.is_empty(), "the repository has files that end in {ending}");
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What a document says: where its links lead, the anchors of its headings, and its pieces of code
/// within sentences.
#[derive(Default)]
struct Document {
    links: Vec<String>,
    anchors: BTreeSet<String>,
    code: Vec<String>,
}

impl Document {
    fn parse(text: &str) -> Document {
        let mut document = Document::default();
        let (mut heading, mut seen) = (None::<String>, BTreeMap::<String, usize>::new());
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    document.links.push(dest_url.into_string())
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let anchor = anchor(&heading.take().expect("a heading began"));
                    // A second heading of the same words gets a number.
                    let before = seen.entry(anchor.clone()).or_default();
                    document.anchors.insert(if *before == 0 { anchor } else { format!("{anchor}-{before}") });
                    *before += 1;
                }
                Event::Code(code) => {
                    heading.iter_mut().for_each(|heading| heading.push_str(&code));
                    document.code.push(code.into_string());
                }
                Event::Text(text) => heading.iter_mut().for_each(|heading| heading.push_str(&text)),
                _ => {}
            }
        }
        document
    }
}

/// The anchor that renderers give a heading: lower case, without punctuation, with hyphens for
/// spaces.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase().chars().filter(|&c| c.is_alphanumeric() || " -_".contains(c)).collect::<String>();
    kept.trim().replace(' ', "-")
}

/// A path without `.` and `..`.
fn resolve(path: &Path) -> PathBuf {
    let mut resolved = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => assert!(resolved.pop(), "{} leaves the repository", path.display()),
            Component::CurDir => {}
            other => resolved.push(other),
        }
    }
    resolved
}

/// The names of all functions that are tests.
fn tests() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for path in files(".rs") {
        let text = read(&path);
        let mut marked = false;
        for line in text.lines().map(str::trim) {
            if line == "#[test]" {
                marked = true;
            } else if let Some(rest) = line.strip_prefix("fn ").filter(|_| marked) {
                names.insert(rest.split(['(', '<']).next().unwrap_or_default().to_owned());
                marked = false;
            }
        }
    }
    for path in files(".py") {
        let text = read(&path);
        let functions = text.lines().filter_map(|line| line.trim_start_matches("async ").strip_prefix("def test_"));
        names.extend(functions.map(|rest| format!("test_{}", rest.split('(').next().unwrap_or_default())));
    }
    names
}

#[test]
fn the_promises_name_tests_that_exist() {
    let (tests, campaigns) = (tests(), read(Path::new("scripts/campaign")));
    let promises = read(Path::new("docs/promises.md"));
    let (mut named, mut wrong) = (0, Vec::new());
    // An item of a list may go on in further lines, which are indented.
    for item in promises.split("\n- ").skip(1).map(|item| item.split("\n\n").next().unwrap_or_default()) {
        let Some((kind, rest)) = item.split_once(':') else { panic!("what does the item {item:?} name?") };
        for name in Document::parse(rest).code {
            named += 1;
            let exists = match kind {
                "Tests" => tests.contains(&name),
                "Campaign" => name
                    .strip_prefix("scripts/campaign ")
                    .is_some_and(|campaign| campaigns.contains(&format!("campaign_{campaign}()"))),
                "Lab" => root().join("lab/cases").join(format!("{name}.sh")).exists(),
                _ => panic!("{kind} is neither Tests nor Campaign nor Lab"),
            };
            if !exists {
                wrong.push(format!("{kind}: {name}"));
            }
        }
    }
    assert!(named > 50, "only {named} names were found in docs/promises.md");
    assert!(wrong.is_empty(), "docs/promises.md names what is not there: {wrong:#?}");
}

#[test]
fn links_of_documents_lead_somewhere() {
    let documents: BTreeMap<_, _> = files(".md").into_iter().map(|path| (path.clone(), Document::parse(&read(&path)))).collect();
    let (mut followed, mut broken) = (0, Vec::new());
    for (path, document) in &documents {
        for link in document.links.iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            followed += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() {
                path.clone()
            } else {
                resolve(&path.parent().expect("a document is in a folder").join(file))
            };
            let there = root().join(&target).exists()
                && (anchor.is_empty() || documents.get(&target).is_some_and(|target| target.anchors.contains(anchor)));
            if !there {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(followed > 50, "only {followed} links were found");
    assert!(broken.is_empty(), "links that lead nowhere: {broken:#?}");
}

#[test]
fn paths_in_documents_exist() {
    let folders: BTreeSet<_> = fs::read_dir(root())
        .expect("the repository")
        .map(|entry| entry.expect("an entry"))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.file_name().into_string().expect("a name in UTF-8"))
        .collect();
    let (mut looked_at, mut missing) = (0, Vec::new());
    for path in files(".md") {
        for code in Document::parse(&read(&path)).code {
            // What has no slash, or blanks and patterns in it, is no path but a name, a command or
            // several files.
            let begins_in = code.split_once('/').map_or("", |(folder, _)| folder);
            let plain = code.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
            if begins_in != "target" && folders.contains(begins_in) && plain {
                looked_at += 1;
                if !root().join(&code).exists() {
                    missing.push(format!("{}: {code}", path.display()));
                }
            }
        }
    }
    assert!(looked_at > 50, "only {looked_at} paths were found");
    assert!(missing.is_empty(), "documents name files that are not there: {missing:#?}");
}

#[test]
fn the_map_of_folders_has_every_crate() {
    let map = Document::parse(&read(Path::new("docs/internals/architecture.md"))).code;
    let crates = files("Cargo.toml").into_iter().filter_map(|path| Some(path.parent()?.to_owned()));
    let missing: Vec<_> = crates
        .filter(|folder| !folder.as_os_str().is_empty() && !map.iter().any(|code| Path::new(code).starts_with(folder)))
        .collect();
    assert!(missing.is_empty(), "docs/internals/architecture.md lacks {missing:?}");
}

/// The first two cells of the rows of a document's tables.
fn rows(path: &str) -> BTreeSet<(String, String)> {
    let text = read(Path::new(path));
    let cells = |line: &str| line.split('|').skip(1).map(|cell| cell.trim().replace('`', "")).collect::<Vec<_>>();
    let rows = text.lines().filter(|line| line.starts_with('|')).map(cells);
    rows.filter(|cells| cells.len() >= 2).map(|cells| (cells[0].clone(), cells[1].clone())).collect()
}

#[test]
fn the_reference_lists_each_reason_and_route_with_its_number() {
    let rows = rows("docs/reference/ioctl.md");
    let reasons = Reason::ALL.iter().filter(|reason| **reason != Reason::Unknown);
    let named = reasons.map(|reason| (reason.code().to_string(), reason.name()));
    let routes = Route::ALL.iter().filter(|route| **route != Route::None);
    let named = named.chain(routes.map(|route| (route.code().to_string(), route.name())));
    let missing: Vec<_> = named.filter(|(code, name)| !rows.contains(&(code.clone(), (*name).to_owned()))).collect();
    assert!(missing.is_empty(), "docs/reference/ioctl.md lacks {missing:?}");
}

#[test]
fn the_reference_lists_each_finding_of_fsck_and_whether_it_is_safe_to_mend() {
    // "Kind::Superblock => "superblock"," in one function, and the safe ones by their names in
    // another.
    let source = read(Path::new("fs/engine/src/check/finding.rs"));
    let (_, safe) = source.split_once("fn is_safe").expect("what is safe to mend");
    let safe = safe.split_once("\n    }").expect("the end of that").0;
    let safe: BTreeSet<_> = safe.split(|c: char| !c.is_alphanumeric()).collect();
    let kinds = source.lines().filter_map(|line| line.trim().strip_prefix("Kind::")?.split_once(" => \""));
    let kinds: BTreeSet<_> = kinds
        .map(|(kind, name)| {
            let mended = if safe.contains(kind) { "yes" } else { "" };
            (name.trim_end_matches(['"', ',']).to_owned(), mended.to_owned())
        })
        .collect();
    assert!(kinds.len() > 30, "only {} kinds of findings were found", kinds.len());
    let mut listed = rows("docs/reference/fsck.md");
    listed.retain(|(name, _)| name != "kind" && !name.starts_with('-'));
    assert_eq!(listed, kinds, "docs/reference/fsck.md, and fs/engine/src/check/finding.rs");
}

#[test]
fn troubleshooting_explains_each_errno_of_the_filesystem_and_its_devices() {
    let page = read(Path::new("docs/guide/troubleshooting.md"));
    let items = page.lines().filter(|line| line.starts_with("- `E"));
    let explained: BTreeSet<_> = items.flat_map(|item| Document::parse(item).code).collect();
    let mut given = BTreeSet::new();
    for path in ["fs/engine/src/error.rs", "blockdev/src/error.rs"] {
        let source = read(Path::new(path));
        let (_, errno) = source.split_once("pub fn errno").expect("where errors become errnos");
        let errno = errno.split_once("\n    }").expect("the end of that").0;
        given.extend(errno.split("libc::").skip(1).map(|rest| rest.split([',', '\n']).next().unwrap_or_default().to_owned()));
    }
    assert!(given.len() > 25, "only {given:?} were found");
    // Errors in opening a device, of which a program on a mount hears nothing.
    given.remove("ENOTBLK");
    let missing: Vec<_> = given.difference(&explained).collect();
    assert!(missing.is_empty(), "docs/guide/troubleshooting.md lacks {missing:?}");
}

#[test]
fn the_book_has_every_page() {
    let summary = Document::parse(&read(Path::new("docs/SUMMARY.md")));
    let listed: BTreeSet<_> = summary.links.iter().map(|link| resolve(&Path::new("docs").join(link))).collect();
    let pages = files(".md").into_iter().filter(|path| path.starts_with("docs") && !path.ends_with("SUMMARY.md"));
    let missing: Vec<_> = pages.filter(|page| !listed.contains(page)).collect();
    assert!(missing.is_empty(), "docs/SUMMARY.md lacks {missing:#?}");
}

/// The words of a text, in lower case: `ReadyQueue` and `ready_queue` are the same two. An empty
/// word stands where punctuation parts them.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut before) = (vec![String::new()], ' ');
    for c in text.chars() {
        let begins = !before.is_alphanumeric() || c.is_uppercase() && before.is_lowercase();
        if c.is_alphanumeric() && begins {
            words.push(String::new());
        }
        if c.is_alphanumeric() {
            words.last_mut().expect("the first is there").extend(c.to_lowercase());
        } else if !c.is_whitespace() && !"_-/!*".contains(c) {
            words.push(String::new());
        }
        before = c;
    }
    words
}

/// Source without the comments that have lines of their own.
fn code(text: &str) -> String {
    text.lines().filter(|line| !line.trim_start().starts_with("//")).flat_map(|line| [line, "\n"]).collect()
}

#[test]
fn retired_names_are_gone() {
    let glossary = read(Path::new("docs/glossary.md"));
    let (_, retired) = glossary.split_once("## Retired names").expect("the section");
    let sources: Vec<_> = [".rs", ".md", ".sh", ".h", ".c"].into_iter().flat_map(files).collect();
    let spoken_of = ["CHANGELOG.md", "docs/glossary.md"].map(Path::new);
    let (mut looked_for, mut found) = (0, Vec::new());
    for row in retired.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| old") && !line.starts_with("| -")) {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        // A name that has a place means something else elsewhere, and in sentences.
        let place = cells[3].trim_matches('`');
        let of_place = sources.iter().filter(|path| path.starts_with(place) && !spoken_of.contains(&path.as_path()));
        let texts: Vec<_> = of_place.map(|path| (path, read(path))).collect();
        assert!(!texts.is_empty(), "the glossary names {place}, which is not there");
        // "hold, hold back (direct writes)": two names, and what they were of.
        for old in cells[1].split('(').next().unwrap_or_default().split(',') {
            looked_for += 1;
            let name: Vec<_> = words(old).into_iter().filter(|word| !word.is_empty()).collect();
            let has = |text: &str| words(text).windows(name.len()).any(|words| words == name);
            let with = texts.iter().filter(|(_, text)| if place.is_empty() { has(text) } else { has(&code(text)) });
            found.extend(with.map(|(path, _)| format!("{}: {}", path.display(), old.trim())));
        }
    }
    assert!(looked_for > 15, "only {looked_for} retired names were found");
    assert!(found.is_empty(), "names that docs/glossary.md retired: {found:#?}");
}

/// The lines of a file that are longer than they may be; a tab reaches to the next eighth column.
fn long_lines(path: &Path, limit: usize, counts: impl Fn(&str) -> bool) -> Vec<String> {
    let text = read(path);
    let width = |line: &str| line.chars().fold(0, |column, c| if c == '\t' { (column / 8 + 1) * 8 } else { column + 1 });
    let lines = (1..).zip(text.lines()).filter(|(_, line)| counts(line) && width(line) > limit);
    lines.map(|(number, line)| format!("{}:{number}: {} characters", path.display(), width(line))).collect()
}

#[test]
fn links_of_the_book_stay_in_it() {
    let mut outside = Vec::new();
    for page in files(".md").into_iter().filter(|path| path.starts_with("docs")) {
        let folder = page.parent().expect("a page is in a folder").to_owned();
        let links = Document::parse(&read(&page)).links.into_iter().filter(|link| !link.contains("://"));
        let leads = |link: &String| !resolve(&folder.join(link.split('#').next().unwrap_or_default())).starts_with("docs");
        outside.extend(links.filter(leads).map(|link| format!("{}: {link}", page.display())));
    }
    assert!(outside.is_empty(), "links that lead out of docs/, and nowhere in the book: {outside:#?}");
}

#[test]
fn lines_of_documents_fit_a_screen() {
    let pages = [".md", ".1", ".8"].into_iter().flat_map(files);
    let long: Vec<_> = pages.flat_map(|path| long_lines(&path, LINE, |_| true)).collect();
    assert!(long.is_empty(), "lines of more than {LINE} characters: {long:#?}");
}

#[test]
fn comments_fit_a_screen() {
    let mut long = Vec::new();
    // What stands over the functions of the Python package is Python's: docstrings.
    for path in files(".rs").into_iter().filter(|path| !path.starts_with("python")) {
        // Examples and tables of documentation are as wide as what they show.
        let in_example = std::cell::Cell::new(false);
        let is_comment = |line: &str| {
            let Some(text) = line.trim_start().strip_prefix("//") else { return false };
            let text = text.trim_start_matches(['/', '!']).trim_start();
            in_example.set(in_example.get() != text.starts_with("```"));
            !in_example.get() && !text.starts_with('|')
        };
        long.extend(long_lines(&path, COMMENT, is_comment));
    }
    let is_c = |line: &str| line.contains("/*") || line.starts_with(" *");
    long.extend(files(".h").iter().flat_map(|path| long_lines(path, COMMENT, is_c)));
    let scripts = files("").into_iter().filter(|path| path.starts_with("scripts") || path.starts_with("lab"));
    let is_script = |path: &PathBuf| path.extension().is_none_or(|ending| ending == "sh" || ending == "exclude");
    let scripts: Vec<_> = scripts.filter(is_script).collect();
    assert!(scripts.len() > 20, "only {} scripts were found", scripts.len());
    long.extend(scripts.iter().flat_map(|path| long_lines(path, COMMENT, |line| line.trim_start().starts_with('#'))));
    assert!(long.is_empty(), "comments of more than {COMMENT} characters: {long:#?}");
}

#[test]
fn the_pages_of_results_are_what_is_made_of_them() {
    let output = Command::new(env!("CARGO_BIN_EXE_performance-pages")).arg("--check").output().expect("a program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The number in README.md that people quote, and its picture, are those of a run that is kept.
#[test]
fn the_number_of_the_readme_was_measured() {
    let stem = "docs/performance/results/2026-11-22-C-bench-gpu";
    let run = Run::read(&root().join(format!("{stem}.json"))).expect("a run");
    let thousands = |subject: &str, depth| {
        let row = run.rows.iter().find(|row| {
            let work = &row.work;
            (row.subject.as_str(), work.work.as_str()) == (subject, "random read")
                && (work.size, work.threads, work.depth) == (Some(4096), Some(1), Some(depth))
        });
        format!("{:.0},000", row.expect("a row").median)
    };
    let readme = read(Path::new("README.md")).split_whitespace().collect::<Vec<_>>().join(" ");
    let says = format!(
        "128 reads of 4 KiB in flight brings {} of them a second into GPU memory; NVIDIA's cuFile brings {} one at a time \
         and {} with its batches.",
        thousands("gpunvme", 128),
        thousands("cuFile", 128),
        thousands("batch", 128)
    );
    assert!(readme.contains(&says), "README.md does not say: {says}");
    assert!(readme.contains(&format!("({stem}-read-many.svg)")), "README.md does not show the picture of {stem}");
}
