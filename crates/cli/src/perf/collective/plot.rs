//! A picture: bandwidth and time over size, a line for each engine.

use std::{collections::BTreeMap, path::Path};

use anyhow::Context as _;
use plotters::prelude::*;

use super::Row;

const WIDTH: u32 = 960;
const HEIGHT: u32 = 760;
const COLOURS: [RGBColor; 4] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xd6, 0x61, 0x0a),
    RGBColor(0x2c, 0x8a, 0x3d),
    RGBColor(0x8a, 0x4b, 0xb5),
];

/// Points of a line: sizes in bytes with what was measured.
type Lines = BTreeMap<String, Vec<(f64, f64)>>;

pub(super) fn draw(path: &Path, rows: &[Row]) -> anyhow::Result<()> {
    let Some(first) = rows.first() else { return Ok(()) };
    let failed = || format!("{} cannot be drawn", path.display());
    let root = SVGBackend::new(path, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE).with_context(failed)?;
    let title = format!("{} of {}, {} ranks", first.collective.name(), first.dtype, first.ranks);
    let root = root.titled(&title, ("sans-serif", 22)).with_context(failed)?;
    let (upper, lower) = root.split_vertically(HEIGHT / 2 - 10);
    chart(&upper, "bus bandwidth, GB/s", &lines(rows, |row| row.busbw)).with_context(failed)?;
    chart(&lower, "time, us", &lines(rows, |row| row.time.p50_ns as f64 / 1e3)).with_context(failed)?;
    root.present().with_context(failed)
}

fn lines(rows: &[Row], of: impl Fn(&Row) -> f64) -> Lines {
    let mut lines = Lines::new();
    for row in rows {
        lines.entry(row.engine.to_string()).or_default().push((row.size as f64, of(row)));
    }
    lines
}

fn chart<B: DrawingBackend<ErrorType: 'static>>(
    area: &DrawingArea<B, plotters::coord::Shift>,
    what: &str,
    lines: &Lines,
) -> anyhow::Result<()> {
    let points = || lines.values().flatten();
    let range = |of: &dyn Fn(&(f64, f64)) -> f64| {
        let (least, most) = points()
            .map(of)
            .filter(|value| *value > 0.0)
            .fold((f64::MAX, 0.0_f64), |(least, most), value| (least.min(value), most.max(value)));
        // A single point is in the middle of something.
        (least * 0.8)..(most * 1.25).max(least)
    };
    let mut chart =
        ChartBuilder::on(area).margin(12).x_label_area_size(36).y_label_area_size(64).build_cartesian_2d(
            range(&|point| point.0).log_scale().base(2.0),
            range(&|point| point.1).log_scale(),
        )?;
    chart
        .configure_mesh()
        .x_desc("bytes")
        .y_desc(what)
        .x_label_formatter(&|bytes| size_text(*bytes))
        .light_line_style(RGBColor(0xee, 0xee, 0xee))
        .draw()?;
    for ((name, points), colour) in lines.iter().zip(COLOURS.into_iter().cycle()) {
        let style = colour.stroke_width(2);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), style).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK.mix(0.3)).draw()?;
    Ok(())
}

/// A size in the unit that fits.
fn size_text(bytes: f64) -> String {
    let (mut value, mut unit) = (bytes, "B");
    for larger in ["KiB", "MiB", "GiB"] {
        if value >= 1024.0 {
            (value, unit) = (value / 1024.0, larger);
        }
    }
    format!("{value:.0} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_told_in_the_unit_that_fits() {
        for (bytes, text) in [(8.0, "8 B"), (1024.0, "1 KiB"), (65536.0, "64 KiB"), (3e9, "3 GiB")] {
            assert_eq!(size_text(bytes), text);
        }
    }
}
