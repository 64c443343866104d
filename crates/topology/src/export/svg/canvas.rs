//! Writes SVG elements. Everything that comes from outside is escaped on its way in.

use std::fmt::Write as _;

use warpweft_drawing::svg;

use super::{
    INK,
    layout::{PILL_HEIGHT, text_width},
};

/// Elements written so far.
#[derive(Default)]
pub(super) struct Canvas {
    body: String,
}

/// How a line looks.
pub(super) struct Stroke {
    pub(super) colour: &'static str,
    width: f64,
    is_dashed: bool,
}

impl Stroke {
    pub(super) const fn new(colour: &'static str, width: f64) -> Self {
        Self { colour, width, is_dashed: false }
    }

    pub(super) const fn dashed(mut self) -> Self {
        self.is_dashed = true;
        self
    }

    fn attributes(&self) -> String {
        let dashes = if self.is_dashed { " stroke-dasharray=\"6 4\"" } else { "" };
        format!(
            "stroke=\"{}\" stroke-width=\"{:.1}\" stroke-linecap=\"round\" fill=\"none\"{dashes}",
            self.colour, self.width
        )
    }
}

/// How a text looks, and which part of it stands at its point.
#[derive(Clone, Copy)]
pub(super) struct Type {
    pub(super) anchor: &'static str,
    pub(super) size: u32,
    pub(super) ink: &'static str,
}

impl Type {
    /// Text that starts at its point.
    pub(super) const fn from(size: u32, ink: &'static str) -> Self {
        Self { anchor: "start", size, ink }
    }

    /// Text around its point.
    pub(super) const fn around(size: u32, ink: &'static str) -> Self {
        Self { anchor: "middle", size, ink }
    }
}

/// A rectangle.
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl Area {
    pub(super) fn middle(&self) -> f64 {
        self.x + self.width / 2.0
    }
}

// Writing to a string does not fail, so the results below are dropped.
impl Canvas {
    pub(super) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, stroke: &Stroke) {
        let _ = writeln!(self.body, "<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" {}/>", stroke.attributes());
    }

    /// A curve that leaves and arrives vertically and rises towards `top`.
    pub(super) fn arc(&mut self, x1: f64, x2: f64, y: f64, top: f64, stroke: &Stroke) {
        let _ = writeln!(
            self.body,
            "<path d=\"M{x1:.1} {y:.1}C{x1:.1} {top:.1} {x2:.1} {top:.1} {x2:.1} {y:.1}\" {}/>",
            stroke.attributes()
        );
    }

    /// A rounded box.
    pub(super) fn panel(&mut self, area: Area, fill: &str, border: &str) {
        let Area { x, y, width, height } = area;
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" rx=\"8\" fill=\"{fill}\" stroke=\"{border}\" stroke-width=\"1.5\"/>"
        );
    }

    /// A short word on a rounded label around a point.
    pub(super) fn pill(&mut self, x: f64, y: f64, colour: &str, word: &str) {
        let (width, height) = (text_width(word, 11) + 10.0, PILL_HEIGHT);
        let _ = writeln!(
            self.body,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{height:.0}\" rx=\"8\" fill=\"#ffffff\" stroke=\"{colour}\" stroke-width=\"1.2\"/>",
            x - width / 2.0,
            y - height / 2.0
        );
        self.text(x, y + 4.0, Type::around(11, INK), word);
    }

    pub(super) fn text(&mut self, x: f64, y: f64, face: Type, text: &str) {
        self.text_at(&format!("x=\"{x:.1}\" y=\"{y:.1}\""), face, text);
    }

    /// Text that reads downwards.
    pub(super) fn vertical_text(&mut self, x: f64, y: f64, face: Type, text: &str) {
        let place = format!("transform=\"translate({x:.1} {y:.1}) rotate(90)\"");
        self.text_at(&place, face, text);
    }

    fn text_at(&mut self, place: &str, face: Type, text: &str) {
        let Type { anchor, size, ink } = face;
        let weight = if size >= 14 { " font-weight=\"600\"" } else { "" };
        let _ = writeln!(
            self.body,
            "<text {place} text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{ink}\"{weight}>{}</text>",
            svg::line(text)
        );
    }

    /// The whole document.
    pub(super) fn finish(self, width: f64, height: f64) -> String {
        svg::document(width, height, "", &self.body)
    }
}
