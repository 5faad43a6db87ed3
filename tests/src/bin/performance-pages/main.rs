//! Makes a page with tables and plots of each run in `docs/performance/results`, and the list of
//! runs in `docs/performance/README.md`. The same results give the same bytes.

#![forbid(unsafe_code)]

mod page;
mod plot;

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;
use gpunvme_tests::results::Run;

/// Makes the pages and plots of docs/performance/results.
#[derive(Parser)]
#[command(name = "performance-pages")]
struct Arguments {
    /// Change nothing; fail where a file is not what would be made
    #[arg(long)]
    check: bool,
}

/// A run whose file says its date, its machine and which bench it is of:
/// `2026-11-22-A-bench.json`.
pub struct Named {
    /// The file's name without its ending.
    stem: String,
    date: String,
    machine: String,
    run: Run,
}

impl Named {
    fn read(path: &Path) -> Result<Named, Box<dyn Error>> {
        let wrong = || format!("{}: not named DATE-MACHINE-BENCH.json", path.display());
        let stem = path.file_stem().and_then(OsStr::to_str).ok_or_else(wrong)?;
        let (date, rest) = stem.split_at_checked("2026-11-22".len()).ok_or_else(wrong)?;
        let (machine, bench) = rest.strip_prefix('-').and_then(|rest| rest.split_once('-')).ok_or_else(wrong)?;
        let run = Run::read(path)?;
        if !bench.starts_with(&run.about.bench) || !run.about.machine.date.starts_with(date) {
            return Err(wrong().into());
        }
        Ok(Named { stem: stem.into(), date: date.into(), machine: machine.into(), run })
    }
}

/// Where the list of runs stands in the index.
const BEGIN: &str = "<!-- The list is made by scripts/performance-pages. -->\n";
const END: &str = "<!-- The end of the list. -->\n";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let performance = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/performance");
    let (results, index) = (performance.join("results"), performance.join("README.md"));
    let mut there = fs::read_dir(&results)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, std::io::Error>>()?;
    there.sort();

    let mut made: BTreeMap<PathBuf, String> = BTreeMap::new();
    let mut list = String::from("\n| run | bench | commit |\n| --- | --- | --- |\n");
    for path in there.iter().filter(|path| path.extension() == Some(OsStr::new("json"))) {
        let named = Named::read(path)?;
        let plots = plot::of(&named.run)?;
        list += &page::line(&named);
        made.insert(results.join(format!("{}.md", named.stem)), page::of(&named, &plots));
        made.extend(plots.into_iter().map(|plot| (results.join(format!("{}-{}.svg", named.stem, plot.slug)), plot.svg)));
    }
    let text = fs::read_to_string(&index)?;
    let parts = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = parts.ok_or_else(|| format!("{}: no place for the list of runs", index.display()))?;
    made.insert(index, format!("{before}{BEGIN}{list}\n{END}{after}"));

    let mut stale: Vec<_> =
        made.iter().filter(|(path, text)| fs::read_to_string(path).ok().as_ref() != Some(text)).map(|(path, _)| path).collect();
    let of_results = |path: &&PathBuf| path.extension() != Some(OsStr::new("json"));
    let orphans: Vec<_> = there.iter().filter(of_results).filter(|path| !made.contains_key(*path)).collect();
    if arguments.check {
        stale.extend(orphans);
        return if stale.is_empty() { Ok(()) } else { Err(format!("run scripts/performance-pages for {stale:#?}").into()) };
    }
    stale.iter().try_for_each(|path| fs::write(path, &made[*path]))?;
    orphans.iter().try_for_each(fs::remove_file)?;
    Ok(())
}
