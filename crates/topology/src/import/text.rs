//! Takes terminal and document decoration off text that people paste.

use std::borrow::Cow;

/// The text without byte order mark and terminal escape sequences.
pub(super) fn plain(text: &str) -> Cow<'_, str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if !text.contains('\u{1b}') {
        return Cow::Borrowed(text);
    }
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\u{1b}') {
        kept.push_str(before);
        rest = after_escape(after);
    }
    kept.push_str(rest);
    Cow::Owned(kept)
}

/// What follows an escape sequence: `[`, parameters, and one final byte from `@` to `~` (ECMA-48, section 5.4).
fn after_escape(text: &str) -> &str {
    let Some(sequence) = text.strip_prefix('[') else {
        return text;
    };
    let is_parameter = |c: char| (' '..='?').contains(&c);
    let tail = sequence.trim_start_matches(is_parameter);
    match tail.chars().next() {
        Some('@'..='~') => &tail[1..],
        _ => tail,
    }
}

/// The cells of one line of a table: runs of anything but blanks and rules, without Markdown emphasis.
///
/// A comment, quote or prompt mark before the first cell is dropped, and so is a line of rules only.
pub(super) fn cells(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| c.is_whitespace() || matches!(c, '|' | '│' | '┃' | '║'))
        .map(|cell| cell.trim_matches(['*', '`']))
        .filter(|cell| !cell.is_empty())
        .skip_while(|cell| cell.chars().all(is_decoration))
}

/// Lines with their numbers, from 1.
pub(super) fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> + Clone {
    text.lines().enumerate().map(|(index, line)| (index + 1, line))
}

fn is_decoration(c: char) -> bool {
    matches!(c, '#' | '>' | '$' | '/' | '-' | '=' | '+' | ':' | '─' | '━')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_and_byte_order_marks_vanish() {
        let check = |text: &str, expected: &str| assert_eq!(plain(text), expected);
        check("\u{feff}GPU0", "GPU0");
        check("\u{1b}[4mGPU0\u{1b}[0m X", "GPU0 X");
        check("a\u{1b}[38;5;1mb\u{1b}", "ab");
        check("a\u{1b}(b", "a(b");
        check("a\u{1b}[1é", "aé");
    }

    #[test]
    fn cells_are_what_stands_between_blanks_and_rules() {
        let check = |line: &str, expected: &[&str]| {
            assert_eq!(cells(line).collect::<Vec<_>>(), expected, "{line}");
        };
        check("GPU0\t X \tNV12\t0-3\t\tN/A", &["GPU0", "X", "NV12", "0-3", "N/A"]);
        check("| **GPU0** | X |", &["GPU0", "X"]);
        check("# GPU0  X", &["GPU0", "X"]);
        check("|---|:---:|", &[]);
        check("", &[]);
    }
}
