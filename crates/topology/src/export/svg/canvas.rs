//! Writes SVG elements. Everything that comes from outside is escaped here and nowhere else.

use std::fmt::Write as _;

use quick_xml::escape::escape;

use super::layout::{PILL_HEIGHT, text_width};

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
        Self {
            colour,
            width,
            is_dashed: false,
        }
    }

    pub(super) const fn dashed(mut self) -> Self {
        self.is_dashed = true;
        self
    }

    fn attributes(&self) -> String {
        let dashes = if self.is_dashed {
            " stroke-dasharray=\"6 4\""
        } else {
            ""
        };
        format!(
            "stroke=\"{}\" stroke-width=\"{:.1}\" stroke-linecap=\"round\" fill=\"none\"{dashes}",
            self.colour, self.width
        )
    }
}

/// Which part of a text stands at its point.
#[derive(Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
}

// Writing to a string does not fail, so the results below are dropped.
impl Canvas {
    pub(super) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64, stroke: &Stroke) {
        let _ = writeln!(
            self.body,
            "<path d=\"M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}\" {}/>",
            stroke.attributes()
        );
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
    pub(super) fn panel(
        &mut self,
        x: f64,
        y: f64,
        width: f64,
        height: f64,
        fill: &str,
        border: &str,
    ) {
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
        self.text(x, y + 4.0, Anchor::Middle, 11, "#0f172a", word);
    }

    pub(super) fn text(
        &mut self,
        x: f64,
        y: f64,
        anchor: Anchor,
        size: u32,
        ink: &str,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
        };
        let weight = if size >= 14 {
            " font-weight=\"600\""
        } else {
            ""
        };
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{ink}\"{weight}>{}</text>",
            printable(text)
        );
    }

    /// Text that reads downwards.
    pub(super) fn vertical_text(&mut self, x: f64, y: f64, size: u32, ink: &str, text: &str) {
        let _ = writeln!(
            self.body,
            "<text transform=\"translate({x:.1} {y:.1}) rotate(90)\" text-anchor=\"middle\" font-size=\"{size}\" fill=\"{ink}\">{}</text>",
            printable(text)
        );
    }

    /// The whole document.
    pub(super) fn finish(self, width: f64, height: f64) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"Inter, 'DejaVu Sans', Helvetica, Arial, sans-serif\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{}</svg>\n",
            self.body
        )
    }
}

/// Escaped for XML, without characters that XML cannot hold.
fn printable(text: &str) -> String {
    let is_allowed = |c: &char| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}');
    let text: String = text.chars().filter(is_allowed).collect();
    escape(text).into_owned()
}
