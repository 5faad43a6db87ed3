//! The command `bench`: what reads and writes of a mount take, by size and number of threads, on a
//! file of its own that has no name.

mod figures;
mod load;
mod plot;

use crate::args::Bench;
use crate::output::Output;
use crate::report::{self, Failure, Report};
use crate::scratch;
use figures::{Figures, Row, Run};
use gpunvme::gpu::Caching;
use gpunvme::{File, Mount};
use indicatif::{ProgressBar, ProgressStyle};
use load::{Load, Operation};
use serde_json::json;
use std::io::{IsTerminal, Write};

pub fn run(args: &Bench) -> Result<Report, Failure> {
    let before = args.compare.as_deref().map(Run::load).transpose()?;
    let mount = Mount::open(&args.dir)?;
    let info = mount.info()?;
    if let Some(size) = args.sizes.iter().find(|&&size| size == 0 || size > args.length) {
        return Err(Failure(format!("a request of {size} bytes does not fit a file of {}", args.length)));
    }
    if args.length > info.free / 2 {
        return Err(Failure(format!(
            "{}: a file of {} would take more than half of the {} that are free; --length makes it shorter",
            args.dir.display(),
            report::size(args.length),
            report::size(info.free)
        )));
    }
    let file = File::of(scratch::file(&args.dir)?, &args.dir)?;
    file.set_caching(Some(Caching::Never)); // the device is measured
    // What cannot be written is known before anything was measured.
    let mut save = args.save.as_deref().map(|path| Output::open(path, &file)).transpose()?;
    let mut plot = args.plot.as_deref().map(|path| Output::open(path, &file)).transpose()?;

    let bar = bar(args);
    let mut load = Load::new(&mount, &file, args)?;
    load.fill()?;
    let mut rows = Vec::new();
    for operation in [Operation::Read, Operation::Write] {
        for &size in &args.sizes {
            for &threads in &args.threads {
                bar.set_message(format!("{} {} by {threads}", operation.name(), report::size(size)));
                let figures = load.measure(operation, size, threads.into(), args.time)?;
                rows.push(Row { operation, size, threads, figures });
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();

    let run = Run {
        device: info.device,
        daemon: info.daemon,
        memory: load.memory_name(),
        length: args.length,
        written: load.written(),
        rows,
    };
    if let Some(mut output) = save.take() {
        writeln!(output, "{:#}", run.json())?;
        output.finish()?;
    }
    if let Some(mut output) = plot.take() {
        let svg = plot::draw(&run, before.as_ref()).map_err(|error| Failure(format!("the plot cannot be drawn: {error}")))?;
        output.write_all(svg.as_bytes())?;
        output.finish()?;
    }
    Ok(tell(args, &run, before.as_ref()))
}

/// Shows where the command is, on a terminal.
fn bar(args: &Bench) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len}  {msg}  {eta}");
    let bar = ProgressBar::new(2 * (args.sizes.len() * args.threads.len()) as u64);
    bar.set_message(format!("writes a file of {}", report::size(args.length)));
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn tell(args: &Bench, run: &Run, before: Option<&Run>) -> Report {
    let mut report = Report::new(run.json());
    report.line("device", &run.device);
    report.line("memory", &run.memory);
    report.line("file", format!("{} without a name in {}, gone now", report::size(run.length), args.dir.display()));
    report.line("written", format!("{} in all", report::size(run.written)));
    if let Some(before) = before {
        report.line("compared", format!("with {}, {}, a file of {}", before.device, before.memory, report::size(before.length)));
    }
    report.text += &format!(
        "\n{:<6}{:>10}{:>8}{:>8}{:>9}{:>12}{:>10}{:>10}{:>10}",
        "", "size", "threads", "route", "GB/s", "requests/s", "p50", "p99", "max"
    );
    report.text += if before.is_some() { "   GB/s before    change\n" } else { "\n" };
    let mut changes = Vec::new();
    for row in &run.rows {
        let Figures { seconds, p50, p99, max, .. } = &row.figures;
        report.text += &format!(
            "{:<6}{:>10}{:>8}{:>8}{:>9.3}{:>12.0}{:>10}{:>10}{:>10}",
            row.operation.name(),
            report::size(row.size),
            row.threads,
            row.figures.route().name(),
            row.gb_per_s(),
            row.figures.requests as f64 / seconds,
            latency(*p50),
            latency(*p99),
            latency(*max),
        );
        if let Some(before) = before {
            match before.like(row).filter(|before| before.gb_per_s() > 0.0) {
                Some(before) => {
                    let change = row.gb_per_s() / before.gb_per_s() - 1.0;
                    report.text += &format!("{:>14.3}{:>+8.0} %", before.gb_per_s(), change * 100.0);
                    changes.push(json!({
                        "operation": row.operation.name(), "size": row.size, "threads": row.threads,
                        "gb_per_s_before": before.gb_per_s(), "change": change,
                    }));
                }
                None => report.text += &format!("{:>14}", "-"),
            }
        }
        report.text.push('\n');
    }
    if before.is_some() {
        report.json["compared"] = changes.into();
    }
    report
}

/// Seconds, as people read them.
fn latency(seconds: f64) -> String {
    match seconds {
        seconds if seconds < 1e-3 => format!("{:.1} µs", seconds * 1e6),
        seconds if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        seconds => format!("{seconds:.1} s"),
    }
}
