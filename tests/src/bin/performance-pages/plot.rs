//! The plots of a run, as SVG: bandwidth or operations a second, and the time of an operation,
//! against the size of an operation or the number of threads.

use std::error::Error;

use gpunvme_tests::results::{Row, Run, bytes};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Pixels of a panel, and of the lines of text above and below.
const PANEL: (u32, u32) = (480, 290);
const TITLE: u32 = 30;
const LEGEND: u32 = 34;
/// Pixels that a character of the legend is wide, about.
const CHARACTER: i32 = 7;

/// Colours that are told apart with any sight, on white: the picture brings its own background.
const COLOURS: [(&str, RGBColor); 14] = [
    ("gpunvme", RGBColor(0xd5, 0x5e, 0x00)),
    ("ioctl", RGBColor(0xe6, 0x9f, 0x00)),
    ("ring", RGBColor(0xcc, 0x79, 0xa7)),
    ("device", RGBColor(0x55, 0x55, 0x55)),
    ("our cuFile", RGBColor(0xd5, 0x5e, 0x00)),
    ("our batch", RGBColor(0xe6, 0x9f, 0x00)),
    ("cuFile", RGBColor(0x00, 0x72, 0xb2)),
    ("batch", RGBColor(0x56, 0xb4, 0xe9)),
    ("pinned", RGBColor(0x00, 0x9e, 0x73)),
    ("hot", RGBColor(0xcc, 0x79, 0xa7)),
    ("hot, first", RGBColor(0xe6, 0x9f, 0x00)),
    ("pinned, hot", RGBColor(0x00, 0x9e, 0x73)),
    ("ext4", RGBColor(0x00, 0x72, 0xb2)),
    ("both", RGBColor(0x00, 0x9e, 0x73)),
];

/// A picture.
pub struct Plot {
    /// What sets its file apart from the run's others.
    pub slug: &'static str,
    pub title: &'static str,
    pub svg: String,
}

/// What the horizontal axis shows.
#[derive(Clone, Copy, PartialEq)]
enum Against {
    /// The size of an operation, done by one thread.
    Size,
    /// The threads that do operations of this size.
    Threads(u64),
}

/// How many operations a thread has in flight.
#[derive(Clone, Copy, PartialEq)]
enum Depth {
    One,
    /// More than one, where the subject can.
    Many,
}

/// A picture that each run of a bench gets, if it measured the rows.
struct Kind {
    bench: &'static str,
    slug: &'static str,
    title: &'static str,
    /// The first words of the section, and the last of the work.
    section: &'static str,
    work: &'static str,
    against: Against,
    depth: Depth,
    /// Whether the time of an operation is shown as well: where each call waits for the device.
    time: bool,
}

const GPU: Kind = Kind {
    bench: "bench-gpu",
    slug: "",
    title: "",
    section: "",
    work: "read",
    against: Against::Size,
    depth: Depth::One,
    time: true,
};
const DIRECT: Kind = Kind { bench: "bench", section: "O_DIRECT", ..GPU };
const CACHED: Kind = Kind { bench: "bench", section: "through the page cache", time: false, ..GPU };

#[rustfmt::skip]
const KINDS: [Kind; 14] = [
    Kind { slug: "read-many", title: "Reads into GPU memory, many in flight, 1 thread", depth: Depth::Many, time: false, ..GPU },
    Kind { slug: "read-one", title: "Reads into GPU memory, one at a time, 1 thread", ..GPU },
    Kind { slug: "write-many", title: "Writes from GPU memory, many in flight, 1 thread", work: "write", depth: Depth::Many, time: false, ..GPU },
    Kind { slug: "write-one", title: "Writes from GPU memory, one at a time, 1 thread", work: "write", ..GPU },
    Kind { slug: "read-4k-many", title: "Reads of 4 KiB into GPU memory, 128 in flight together", against: Against::Threads(4096), depth: Depth::Many, time: false, ..GPU },
    Kind { slug: "read-4k-one", title: "Reads of 4 KiB into GPU memory, one at a time in each thread", against: Against::Threads(4096), ..GPU },
    Kind { slug: "sequential-read", title: "Sequential reads, O_DIRECT, 1 thread", work: "sequential read", ..DIRECT },
    Kind { slug: "sequential-write", title: "Sequential writes, O_DIRECT, 1 thread", work: "sequential write", ..DIRECT },
    Kind { slug: "random-read", title: "Random reads, O_DIRECT, 1 thread", work: "random read", ..DIRECT },
    Kind { slug: "random-write", title: "Random writes, O_DIRECT, 1 thread", work: "random write", ..DIRECT },
    Kind { slug: "random-read-4k", title: "Random reads of 4 KiB, O_DIRECT", work: "random read", against: Against::Threads(4096), ..DIRECT },
    Kind { slug: "random-write-4k", title: "Random writes of 4 KiB, O_DIRECT", work: "random write", against: Against::Threads(4096), ..DIRECT },
    Kind { slug: "cached-read", title: "Sequential reads through the page cache, cold, 1 thread", work: "sequential read", ..CACHED },
    Kind { slug: "cached-write", title: "Sequential writes through the page cache, with fsync, 1 thread", work: "sequential write", ..CACHED },
];

/// What one subject did: its points, by the horizontal axis.
struct Line {
    subject: &'static str,
    colour: RGBColor,
    points: Vec<(f64, f64)>,
}

/// A pair of axes and the lines in it.
struct Panel {
    label: &'static str,
    lines: Vec<Line>,
}

/// The plots that a run has rows for.
pub fn of(run: &Run) -> Result<Vec<Plot>, Box<dyn Error>> {
    let mut plots = Vec::new();
    for kind in KINDS.iter().filter(|kind| kind.bench == run.about.bench) {
        let rate = match kind.against {
            Against::Size => Panel { label: "GB/s", lines: kind.lines(run, |rate, row| rate * size(row) / 1e9) },
            Against::Threads(_) => Panel { label: "thousand a second", lines: kind.lines(run, |rate, _| rate / 1e3) },
        };
        // Two points are no curve.
        if rate.lines.iter().all(|line| line.points.len() < 3) {
            continue;
        }
        let mut panels = vec![rate];
        if kind.time {
            // As each thread has one operation at a time.
            let time = |rate: f64, row: &Row| row.work.threads.unwrap_or(1) as f64 / rate * 1e6;
            panels.push(Panel { label: "mean time of an operation, µs", lines: kind.lines(run, time) });
        }
        plots.push(Plot { slug: kind.slug, title: kind.title, svg: draw(kind, &panels)? });
    }
    Ok(plots)
}

fn size(row: &Row) -> f64 {
    row.work.size.unwrap_or(0) as f64
}

impl Kind {
    fn has(&self, row: &Row) -> bool {
        let work = &row.work;
        row.section.starts_with(self.section)
            && work.work.ends_with(self.work)
            && (work.depth.unwrap_or(1) == 1) == (self.depth == Depth::One)
            && match self.against {
                Against::Size => work.size.is_some() && work.threads == Some(1),
                Against::Threads(size) => work.size == Some(size) && work.threads.is_some(),
            }
    }

    /// The lines of all subjects, with `value` of operations a second as height.
    fn lines(&self, run: &Run, value: impl Fn(f64, &Row) -> f64) -> Vec<Line> {
        let mut lines = Vec::new();
        for (subject, colour) in COLOURS {
            let mut points = Vec::new();
            for row in run.rows.iter().filter(|row| row.subject == subject && self.has(row)) {
                let rate = match row.unit.as_str() {
                    "GB/s" => row.median * 1e9 / size(row),
                    "MB/s" => row.median * 1e6 / size(row),
                    "thousand/s" => row.median * 1e3,
                    _ => continue,
                };
                let x = match self.against {
                    Against::Size => size(row),
                    Against::Threads(_) => row.work.threads.unwrap_or(1) as f64,
                };
                points.push((x, value(rate, row)));
            }
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            if !points.is_empty() {
                lines.push(Line { subject, colour, points });
            }
        }
        lines
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn draw(kind: &Kind, panels: &[Panel]) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let width = PANEL.0 * panels.len() as u32;
        let area = SVGBackend::with_string(&mut svg, (width, TITLE + PANEL.1 + LEGEND)).into_drawing_area();
        area.fill(&WHITE)?;
        let (title, rest) = area.split_vertically(TITLE);
        let middle = Pos::new(HPos::Center, VPos::Center);
        let style = ("sans-serif", 16).into_font().color(&BLACK).pos(middle);
        title.draw_text(kind.title, &style, (width as i32 / 2, TITLE as i32 / 2 + 2))?;
        let (plots, below) = rest.split_vertically(PANEL.1);
        for (area, panel) in plots.split_evenly((1, panels.len())).iter().zip(panels) {
            draw_panel(area, kind, panel)?;
        }
        draw_legend(&below, &panels[0].lines, width as i32)?;
        area.present()?;
    }
    svg.push('\n');
    Ok(svg)
}

/// A logarithmic axis with ticks where the figures are, or where values are round.
#[derive(Clone)]
struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<f64>,
}

impl Axis {
    /// One whose ticks are these values.
    fn at(mut values: Vec<f64>) -> Axis {
        values.sort_by(f64::total_cmp);
        values.dedup();
        let (first, last) = (values[0], values[values.len() - 1]);
        let margin = (last / first).powf(0.05);
        Axis { low: first / margin, high: last * margin, ticks: values }
    }

    /// One that holds these values, with ticks at one, two and five times each power of ten.
    fn around(values: &[f64]) -> Axis {
        let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = values.iter().copied().fold(0.0, f64::max);
        let steps: Vec<f64> = (-4..8).flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10f64.powi(decade))).collect();
        let low = steps.iter().copied().rfind(|step| *step <= lowest).unwrap_or(lowest);
        let high = steps.iter().copied().find(|step| *step >= highest).unwrap_or(highest);
        Axis { low, high, ticks: steps.into_iter().filter(|step| (low..=high).contains(step)).collect() }
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        from + (f64::from(to - from) * (value / self.low).ln() / (self.high / self.low).ln()).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.low..self.high
    }
}

fn draw_panel(area: &Area, kind: &Kind, panel: &Panel) -> Result<(), Box<dyn Error>> {
    let (columns, heights): (Vec<_>, Vec<_>) = panel.lines.iter().flat_map(|line| line.points.iter().copied()).unzip();
    let (columns, heights) = (Axis::at(columns), Axis::around(&heights));
    let (x_labels, y_labels) = (columns.ticks.len(), heights.ticks.len());
    let builder = &mut ChartBuilder::on(area);
    let mut chart =
        builder.margin(12).margin_right(28).x_label_area_size(42).y_label_area_size(58).build_cartesian_2d(columns, heights)?;
    let of_column = |x: &f64| match kind.against {
        Against::Size => bytes(*x as u64),
        Against::Threads(_) => x.to_string(),
    };
    let grey = RGBColor(0xdd, 0xdd, 0xdd);
    chart
        .configure_mesh()
        .bold_line_style(grey)
        .light_line_style(TRANSPARENT)
        .x_desc(if kind.against == Against::Size { "size of an operation" } else { "threads" })
        .y_desc(panel.label)
        .x_label_formatter(&of_column)
        .y_label_formatter(&|y| tick(*y))
        .x_labels(x_labels)
        .y_labels(y_labels)
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .draw()?;
    // Ours last, on top of the others.
    for line in panel.lines.iter().rev() {
        let at = || line.points.iter().copied();
        let style = line.colour.stroke_width(if line.subject == "gpunvme" { 3 } else { 2 });
        chart.draw_series(LineSeries::new(at(), style))?;
        chart.draw_series(at().map(|at| Circle::new(at, 3, line.colour.filled())))?;
    }
    Ok(())
}

/// One, two or five times a power of ten, with no more digits than it has.
fn tick(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn draw_legend(area: &Area, lines: &[Line], width: i32) -> Result<(), Box<dyn Error>> {
    let wide = |line: &Line| 48 + line.subject.len() as i32 * CHARACTER;
    let mut x = (width - lines.iter().map(wide).sum::<i32>()) / 2;
    let y = LEGEND as i32 / 2 - 4;
    let style = ("sans-serif", 13).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    for line in lines {
        area.draw(&PathElement::new(vec![(x, y), (x + 22, y)], line.colour.stroke_width(3)))?;
        area.draw(&Circle::new((x + 11, y), 3, line.colour.filled()))?;
        area.draw_text(line.subject, &style, (x + 28, y))?;
        x += wide(line);
    }
    Ok(())
}
