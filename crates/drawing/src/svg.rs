//! Scalable Vector Graphics.

use quick_xml::escape::escape;

/// A standalone document on white, `width` by `height` pixels: `defs` are definitions such as markers, or nothing, and
/// `body` its elements.
pub fn document(width: f64, height: f64, defs: &str, body: &str) -> String {
    let defs = if defs.is_empty() { String::new() } else { format!("<defs>\n{defs}</defs>\n") };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"Inter, 'DejaVu Sans', Helvetica, Arial, sans-serif\">\n{defs}<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

/// One line of text, escaped.
pub fn line(text: &str) -> String {
    escape(one_line(text)).into_owned()
}

/// Lines of text, such as a tooltip's, escaped.
pub fn lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(line).collect();
    lines.join("\n")
}

/// A text without what takes no part in a line, or what XML cannot hold.
pub fn one_line(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() && !matches!(c, '\u{fffe}' | '\u{ffff}')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_its_element() {
        assert_eq!(line("</text>&\"'\n\u{ffff}x"), "&lt;/text&gt;&amp;&quot;&apos;x");
        assert_eq!(lines("<a>\n\u{1}b"), "&lt;a&gt;\nb");
    }
}
