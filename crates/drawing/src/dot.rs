//! The DOT language of Graphviz.

/// A quoted identifier; line breaks become its escape, and other control characters are left out.
pub fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            c if c.is_control() => {}
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_ends_a_quoted_text_early() {
        assert_eq!(quoted("a \"b\" \\ c\nd\u{7}"), r#""a \"b\" \\ c\nd""#);
    }
}
