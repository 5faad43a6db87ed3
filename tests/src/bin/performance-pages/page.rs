//! The page of a run: where and how it was taken, its plots, its tables.

use std::fmt::Write;

use gpunvme_tests::results::{Row, Work, significant};

use crate::Named;
use crate::plot::Plot;

/// Characters of a line of a page at the most.
const WIDTH: usize = 120;

/// Subjects of ours, and what each is shown as a ratio of; the head of that column.
const RATIOS: [(&str, &str, &str); 8] = [
    ("gpunvme", "cuFile", "/cuFile"),
    ("gpunvme", "device", "/device"),
    ("gpunvme", "both", "/both"),
    ("gpunvme", "ext4", "/ext4"),
    ("our cuFile", "cuFile", "our cuFile/cuFile"),
    ("our batch", "batch", "our batch/batch"),
    ("hot", "pinned, hot", "hot/pinned, hot"),
    ("hot, first", "pinned, hot", "hot, first/pinned, hot"),
];

/// The line of a run in the list of runs.
pub fn line(Named { stem, date, machine, run }: &Named) -> String {
    format!("| [{date}, machine {machine}](results/{stem}.md) | {} | {} |\n", run.about.bench, run.about.commit)
}

/// The page.
pub fn of(Named { stem, date, machine, run }: &Named, plots: &[Plot]) -> String {
    let about = &run.about;
    let place = &about.machine;
    let mut page = format!(
        "<!-- Made by scripts/performance-pages from {stem}.json. -->\n\n# {}: {date}, machine {machine}\n\n- Machine: {}",
        about.bench, place.processor
    );
    page += &format!(", {} cores", place.cores);
    place.memory_gib.iter().for_each(|memory| page += &format!(", {memory} GiB"));
    page += &format!(", Linux {}\n- Images on: {}\n", place.kernel, place.backing);
    place.gpu.iter().for_each(|gpu| page += &format!("- GPU: {gpu}\n"));
    place.load.iter().for_each(|load| page += &format!("- Load before: {load}\n"));
    page += &format!(
        "- Commit: {}\n{}\n- Figures: {}\n\n\
         [What the subjects are, and how it is measured](../README.md#how-it-is-measured).\n",
        about.commit,
        in_lines(&format!("- Command: `{}`", about.command)),
        about.method
    );
    for plot in plots {
        page += &format!("\n![{}]({stem}-{}.svg)\n", plot.title, plot.slug);
    }
    let mut tables: Vec<(&str, &str)> = Vec::new();
    for row in &run.rows {
        if !tables.contains(&(&row.section, &row.unit)) {
            tables.push((&row.section, &row.unit));
        }
    }
    for (section, unit) in tables {
        let rows: Vec<_> = run.rows.iter().filter(|row| row.section == section && row.unit == unit).collect();
        page += &format!("\n## {section} ({unit})\n\n");
        table(&mut page, &rows);
    }
    page
}

/// An item of a list, in lines that fit a page.
fn in_lines(item: &str) -> String {
    let mut lines = vec![String::new()];
    for word in item.split(' ') {
        let line = lines.last_mut().expect("there is one from the beginning");
        if line.len() + 1 + word.len() > WIDTH {
            lines.push(format!("  {word}"));
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines.join("\n")
}

fn table(page: &mut String, rows: &[&Row]) {
    let (mut subjects, mut works): (Vec<&str>, Vec<&Work>) = (Vec::new(), Vec::new());
    for row in rows {
        if !subjects.contains(&row.subject.as_str()) {
            subjects.push(&row.subject);
        }
        if !works.contains(&&row.work) {
            works.push(&row.work);
        }
    }
    let ratios: Vec<_> =
        RATIOS.into_iter().filter(|(ours, peer, _)| subjects.contains(ours) && subjects.contains(peer)).collect();
    let heads = subjects.iter().copied().chain(ratios.iter().map(|&(.., head)| head));
    *page += "| |";
    heads.for_each(|head| *page += &format!(" {head} |"));
    *page += &format!("\n|:--|{}\n", "--:|".repeat(subjects.len() + ratios.len()));
    for work in works {
        let median = |subject: &str| rows.iter().find(|row| row.subject == subject && row.work == *work).map(|row| row.median);
        let mut cells: Vec<_> = subjects.iter().map(|subject| median(subject).map(significant)).collect();
        cells.extend(ratios.iter().map(|(ours, peer, _)| Some(format!("{:.2}", median(ours)? / median(peer)?))));
        let _ = write!(page, "| {work} |");
        for cell in cells {
            *page += &cell.map_or_else(|| " |".into(), |cell| format!(" {cell} |"));
        }
        *page += "\n";
    }
}
