//! The plot of a run as SVG: bandwidth by the size of a request, with a line for each number of
//! threads; reads on the left, writes on the right. A run that it is compared with is paler.

use super::figures::Run;
use super::load::Operation;
use crate::report;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::error::Error;

const SIZE: (u32, u32) = (960, 380);
/// Colours that are told apart with any sight, on white; further lines begin again.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x56, 0xb4, 0xe9),
];

pub fn draw(run: &Run, before: Option<&Run>) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let title = format!("{}, {}", run.device, run.memory);
        let area = area.titled(&title, ("sans-serif", 20))?;
        for (area, operation) in area.split_evenly((1, 2)).iter().zip([Operation::Read, Operation::Write]) {
            draw_panel(area, operation, run, before)?;
        }
        area.present()?;
    }
    Ok(svg)
}

fn draw_panel(
    area: &DrawingArea<SVGBackend, Shift>,
    operation: Operation,
    run: &Run,
    before: Option<&Run>,
) -> Result<(), Box<dyn Error>> {
    let points = |run: &Run, threads: u16| {
        let rows = run.rows.iter().filter(|row| row.operation == operation && row.threads == threads);
        let mut points: Vec<_> = rows.map(|row| (row.size as f64, row.gb_per_s())).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let mut threads: Vec<u16> = run.rows.iter().map(|row| row.threads).collect();
    threads.sort_unstable();
    threads.dedup();
    let rows = || run.rows.iter().chain(before.into_iter().flat_map(|run| &run.rows));
    let highest = rows().map(|row| row.gb_per_s()).fold(0.0, f64::max);
    let sizes = || rows().map(|row| row.size as f64);
    let (smallest, largest) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(0.0, f64::max));
    let mut chart = ChartBuilder::on(area)
        .caption(operation.name(), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d((smallest / 1.5..largest * 1.5).log_scale().base(2.0), 0.0..highest * 1.1)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(6)
        .label_style(("sans-serif", 12))
        .axis_desc_style(("sans-serif", 13))
        .x_desc("size of a request")
        .y_desc("GB/s")
        .x_label_formatter(&|size| report::size(*size as u64))
        .draw()?;
    for (threads, colour) in threads.into_iter().zip(COLOURS.into_iter().cycle()) {
        if let Some(before) = before {
            chart.draw_series(LineSeries::new(points(before, threads), colour.mix(0.35).stroke_width(2)))?;
        }
        let name = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
        chart
            .draw_series(LineSeries::new(points(run, threads), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        chart.draw_series(points(run, threads).into_iter().map(|at| Circle::new(at, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(("sans-serif", 13))
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}
