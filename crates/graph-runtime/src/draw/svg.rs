//! A picture that any browser shows.

use std::fmt::Write as _;

use warpweft_drawing::svg;

use super::{
    CRITICAL, EDGE, colours,
    layout::{Area, JOIN_SIZE, Layout, MARGIN, Point},
    picture::{Edge, Node, Picture, abbreviation},
};
use crate::graph::{Graph, Hazard};

impl Graph {
    /// The graph as a picture: standalone SVG with a light background, in columns by level.
    ///
    /// Each node has its name, what it does, and where, coloured by device; edges say in short what both ends share,
    /// and in full as their tooltip. The critical path, each node counted alike, is thick. All names are escaped.
    /// Graphs of more than 600 nodes are drawn in part, and the picture says so.
    pub fn to_svg(&self) -> String {
        let picture = Picture::of(self);
        let summary = picture.summary();
        let layout = Layout::of(&picture);
        let summary_width = text_width(&summary, TITLE_SIZE) + 2.0 * MARGIN;
        let width = layout.width.max(summary_width).max(LEAST_WIDTH);
        let mut canvas = Canvas::default();
        canvas.text(MARGIN, 32.0, "start", TITLE_SIZE, INK, &summary);
        let top = canvas.legend(&legend(&picture), width) + 18.0;
        let layout = layout.below(top);
        for (edge, route) in picture.edges.iter().zip(&layout.routes) {
            canvas.edge(edge, route);
        }
        for (step, area) in picture.steps.iter().zip(&layout.areas) {
            match &step.node {
                Some(node) => canvas.node(node, *area),
                None => canvas.join(*area),
            }
        }
        // Labels come last, so that no line crosses one, and those that matter most choose their places first.
        for is_critical in [true, false] {
            let ways = picture.edges.iter().zip(&layout.routes);
            for (edge, route) in ways.filter(|(edge, _)| edge.is_critical == is_critical) {
                canvas.pill(edge, route);
            }
        }
        canvas.finish(width, layout.height)
    }
}

/// An entry of the legend.
enum Entry {
    /// What nodes of a place look like.
    Place {
        device: Option<usize>,
        text: String,
    },
    Critical,
    Words(String),
}

fn legend(picture: &Picture) -> Vec<Entry> {
    let mut entries: Vec<Entry> = picture
        .devices
        .iter()
        .enumerate()
        .map(|(device, id)| Entry::Place { device: Some(device), text: id.to_string() })
        .collect();
    if picture.has_tasks {
        entries.push(Entry::Place { device: None, text: "task of the host".to_owned() });
    }
    if picture.critical_count > 1 {
        entries.push(Entry::Critical);
    }
    for hazard in [Hazard::ReadAfterWrite, Hazard::WriteAfterRead, Hazard::WriteAfterWrite] {
        let short = abbreviation(hazard);
        let occurs = |edge: &Edge| edge.label.as_ref().is_some_and(|label| label.starts_with(short));
        if picture.edges.iter().any(occurs) {
            entries.push(Entry::Words(format!("{short}: {hazard}")));
        }
    }
    entries
}

/// Elements written so far, and where labels stand.
#[derive(Default)]
struct Canvas {
    body: String,
    pills: Vec<Area>,
}

// Writing to a string does not fail, so the results below are dropped.
impl Canvas {
    fn text(&mut self, x: f64, y: f64, anchor: &str, size: f64, ink: &str, text: &str) {
        let weight = if size >= 13.0 { " font-weight=\"600\"" } else { "" };
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{ink}\"{weight}>{}</text>",
            svg::line(text)
        );
    }

    /// Writes a legend, in as many lines as it takes; returns where it ends.
    fn legend(&mut self, entries: &[Entry], width: f64) -> f64 {
        let (mut x, mut y) = (MARGIN, 60.0);
        for entry in entries {
            let text = match entry {
                Entry::Place { text, .. } | Entry::Words(text) => text,
                Entry::Critical => "critical path",
            };
            let sign = if matches!(entry, Entry::Words(_)) { 0.0 } else { 24.0 };
            let entry_width = sign + text_width(text, LEGEND_SIZE) + 22.0;
            if x > MARGIN && x + entry_width > width - MARGIN {
                (x, y) = (MARGIN, y + LEGEND_LINE);
            }
            match entry {
                Entry::Place { device, .. } => {
                    let (fill, border) = colours(*device);
                    self.rect(x, y - 10.0, [18.0, 12.0], [3.0, 1.4], fill, border);
                }
                Entry::Critical => {
                    let _ = writeln!(
                        self.body,
                        "<path d=\"M{x:.1} {0:.1}h18\" stroke=\"{CRITICAL}\" stroke-width=\"2.6\"/>",
                        y - 4.0
                    );
                }
                Entry::Words(_) => {}
            }
            self.text(x + sign, y, "start", LEGEND_SIZE, SOFT, text);
            x += entry_width;
        }
        y
    }

    fn rect(&mut self, x: f64, y: f64, size: [f64; 2], corner_and_line: [f64; 2], fill: &str, border: &str) {
        let ([width, height], [corner, line]) = (size, corner_and_line);
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"{corner}\" fill=\"{fill}\" stroke=\"{border}\" stroke-width=\"{line}\"/>"
        );
    }

    fn node(&mut self, node: &Node, area: Area) {
        let (fill, border) = colours(node.device);
        let (border, line) = if node.is_critical { (CRITICAL, 2.6) } else { (border, 1.4) };
        let what = format!("{} {}, {}", node.id, node.kind, node.place);
        let top = area.y - area.height / 2.0;
        let middle = area.x + area.width / 2.0;
        let _ = writeln!(self.body, "<g><title>{}</title>", svg::lines(&format!("{}\n{what}", node.name)));
        // Tasks of the host have square corners, so that they stand apart without colours too.
        let corner = if node.device.is_some() { 8.0 } else { 0.0 };
        self.rect(area.x, top, [area.width, area.height], [corner, line], fill, border);
        self.text(middle, top + 18.0, "middle", 13.0, INK, &fit(&node.name, area.width - 12.0, 13.0));
        self.text(middle, top + 33.0, "middle", 10.0, SOFT, &fit(&what, area.width - 12.0, 10.0));
        self.body.push_str("</g>\n");
    }

    fn join(&mut self, area: Area) {
        let _ = writeln!(
            self.body,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"{:.1}\" fill=\"{EDGE}\"><title>join</title></circle>",
            area.x + area.width / 2.0,
            area.y,
            JOIN_SIZE / 2.0
        );
    }

    fn edge(&mut self, edge: &Edge, route: &[Point]) {
        let Some((first, rest)) = route.split_first() else { return };
        let mut path = format!("M{:.1} {:.1}", first.x, first.y);
        let mut last = first;
        for (turn, point) in rest.iter().enumerate() {
            if turn % 2 == 0 {
                let middle = f64::midpoint(last.x, point.x);
                let _ = write!(
                    path,
                    "C{middle:.1} {:.1} {middle:.1} {:.1} {:.1} {:.1}",
                    last.y, point.y, point.x, point.y
                );
            } else {
                let _ = write!(path, "H{:.1}", point.x);
            }
            last = point;
        }
        let (colour, width, marker) =
            if edge.is_critical { (CRITICAL, 2.4, "critical") } else { (EDGE, 1.2, "edge") };
        let _ = writeln!(
            self.body,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" marker-end=\"url(#{marker})\"><title>{}</title></path>",
            svg::lines(&edge.title)
        );
    }

    /// The label of an edge, in the gap before its end, where there is room among other labels; the tooltip of the
    /// line says more in any case.
    fn pill(&mut self, edge: &Edge, route: &[Point]) {
        let (Some(label), [.., from, to]) = (&edge.label, route) else { return };
        let width = text_width(label, PILL_SIZE) + 10.0;
        let place = |way: f64| {
            let Point { x, y } = on_curve(*from, *to, way);
            let x = x.clamp(from.x + width / 2.0, (to.x - width / 2.0).max(from.x + width / 2.0));
            Area { x: x - width / 2.0, y, width, height: PILL_HEIGHT }
        };
        let mut places = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8].into_iter().map(place);
        let Some(area) = places.find(|area| !self.pills.iter().any(|other| touches(area, other))) else {
            return;
        };
        self.pills.push(area);
        let colour = if edge.is_critical { CRITICAL } else { EDGE };
        let _ = writeln!(self.body, "<g><title>{}</title>", svg::lines(&edge.title));
        let top = area.y - PILL_HEIGHT / 2.0;
        self.rect(area.x, top, [width, PILL_HEIGHT], [7.0, 1.0], "#ffffff", colour);
        self.text(area.x + width / 2.0, area.y + 3.5, "middle", PILL_SIZE, INK, label);
        self.body.push_str("</g>\n");
    }

    /// The whole document.
    fn finish(self, width: f64, height: f64) -> String {
        let marker = |name: &str, colour: &str| {
            format!(
                "<marker id=\"{name}\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0.5L8 4L0 7.5z\" fill=\"{colour}\"/></marker>\n"
            )
        };
        let defs = marker("edge", EDGE) + &marker("critical", CRITICAL);
        svg::document(width, height, &defs, &self.body)
    }
}

/// A point of the curve between two columns, `way` of it from its beginning.
fn on_curve(from: Point, to: Point, way: f64) -> Point {
    let back = 1.0 - way;
    let middle = f64::midpoint(from.x, to.x);
    let (ends, inner) = ([back.powi(3), way.powi(3)], [3.0 * back * back * way, 3.0 * back * way * way]);
    Point {
        x: ends[0] * from.x + (inner[0] + inner[1]) * middle + ends[1] * to.x,
        y: (ends[0] + inner[0]) * from.y + (inner[1] + ends[1]) * to.y,
    }
}

fn touches(one: &Area, other: &Area) -> bool {
    one.x < other.x + other.width
        && other.x < one.x + one.width
        && (one.y - other.y).abs() < f64::midpoint(one.height, other.height) + 1.0
}

/// About as wide as a text is at most; fonts differ.
fn text_width(text: &str, size: f64) -> f64 {
    text.chars().map(|c| if c.is_ascii() { 0.62 * size } else { 1.05 * size }).sum()
}

/// A text, cut where it would be wider.
fn fit(text: &str, width: f64, size: f64) -> String {
    let text = svg::one_line(text);
    if text_width(&text, size) <= width {
        return text;
    }
    let mut fitted = String::new();
    let mut left = width - 1.05 * size;
    for c in text.chars() {
        left -= text_width(c.encode_utf8(&mut [0; 4]), size);
        if left < 0.0 {
            break;
        }
        fitted.push(c);
    }
    fitted.push('\u{2026}');
    fitted
}

const INK: &str = "#1f2937";
const SOFT: &str = "#556070";
const TITLE_SIZE: f64 = 17.0;
const LEGEND_SIZE: f64 = 11.0;
const LEGEND_LINE: f64 = 20.0;
const PILL_SIZE: f64 = 9.5;
const PILL_HEIGHT: f64 = 15.0;
const LEAST_WIDTH: f64 = 420.0;
