//! The texts that rules judge, and Rust as a flat list of tokens.

use std::path::Path;

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

use super::Problem;

/// A text file of the repository; Rust comes with its tokens.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) path: String,
    pub(super) text: String,
    pub(super) tokens: Vec<Token>,
}

/// A word, literal, punctuation character or bracket of Rust.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) text: String,
    pub(super) line: usize,
    /// Inside an item that only exists in tests.
    pub(super) test: bool,
}

/// Whether people write and read this kind of file; samples and recorded output are none of ours.
pub(super) fn is_text(path: &str) -> bool {
    const EXTENSIONS: [&str; 13] =
        ["rs", "md", "toml", "yml", "yaml", "sh", "py", "cu", "cuh", "h", "hpp", "cpp", "wgsl"];
    let extension = Path::new(path).extension().and_then(|extension| extension.to_str());
    path.starts_with(".ci/") || extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
}

impl Source {
    pub(super) fn new(path: &str, text: String) -> Result<Self, Problem> {
        let mut tokens = Vec::new();
        if path.ends_with(".rs") {
            let stream = text.parse::<TokenStream>().map_err(|error| {
                Problem::new(
                    path,
                    error.span().start().line,
                    "this is not Rust: mend the brackets and literals",
                )
            })?;
            flatten(stream, is_test_file(path), &mut tokens);
        }
        Ok(Self { path: path.into(), text, tokens })
    }

    pub(super) fn problem(&self, line: usize, text: impl Into<String>) -> Problem {
        Problem::new(&self.path, line, text)
    }

    /// The lines with their numbers, counted from one.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }

    /// Where the tokens read exactly like `words`.
    pub(super) fn find<'a>(&'a self, words: &'a [&'a str]) -> impl Iterator<Item = usize> + 'a {
        let same = move |window: &[Token]| window.iter().zip(words).all(|(token, word)| token.text == *word);
        self.tokens
            .windows(words.len())
            .enumerate()
            .filter(move |(_, window)| same(window))
            .map(|(index, _)| index)
    }

    /// The number of the line that declares `key` in TOML; zero if none does.
    pub(super) fn line_of_key(&self, key: &str) -> usize {
        let declares = |line: &str| {
            let rest = line.trim_start().trim_start_matches('"').strip_prefix(key);
            rest.is_some_and(|rest| rest.starts_with(['.', ' ', '=', '"', ']']))
        };
        self.lines().find(|(_, line)| declares(line)).map_or(0, |(number, _)| number)
    }
}

/// Whether everything in the file is built for tests, benchmarks or examples only.
fn is_test_file(path: &str) -> bool {
    let path = Path::new(path);
    let folders = ["tests", "benches", "examples", "fuzz_targets"];
    path.file_stem().is_some_and(|stem| stem == "tests")
        || path.components().any(|part| folders.iter().any(|folder| part.as_os_str() == *folder))
}

fn flatten(stream: TokenStream, in_test: bool, tokens: &mut Vec<Token>) {
    // Set by a test attribute until the item it stands on has ended.
    let mut test_item = false;
    for tree in stream {
        let test = in_test || test_item;
        let line = tree.span().start().line;
        let mut push = |text: String, line| tokens.push(Token { text, line, test });
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = brackets(&group);
                push(open.into(), line);
                flatten(group.stream(), test, tokens);
                tokens.push(Token { text: close.into(), line: group.span_close().start().line, test });
                match group.delimiter() {
                    Delimiter::Brace => test_item = false,
                    Delimiter::Bracket => test_item |= is_test_attribute(&group.stream()),
                    _ => {}
                }
            }
            TokenTree::Punct(punct) => {
                test_item &= punct.as_char() != ';';
                push(punct.to_string(), line);
            }
            other => push(other.to_string(), line),
        }
    }
}

fn brackets(group: &Group) -> (&'static str, &'static str) {
    match group.delimiter() {
        Delimiter::Parenthesis => ("(", ")"),
        Delimiter::Brace => ("{", "}"),
        Delimiter::Bracket => ("[", "]"),
        Delimiter::None => ("", ""),
    }
}

/// `test` and `cfg(..test..)` without `not(test)`.
fn is_test_attribute(attribute: &TokenStream) -> bool {
    let text = attribute.to_string().replace(' ', "");
    let names_test = text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "test");
    text == "test" || (text.starts_with("cfg(") && names_test && !text.contains("not(test)"))
}

#[cfg(test)]
impl Source {
    /// A source that is known to be well formed.
    pub(super) fn of(path: &str, text: &str) -> Self {
        Self::new(path, text.into()).expect("the text of a test is well formed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_test_words(path: &str, text: &str, expected: &[&str]) {
        let source = Source::of(path, text);
        let is_word = |token: &&Token| token.text.starts_with(char::is_alphabetic);
        let words: Vec<_> = source.tokens.iter().filter(|token| token.test).filter(is_word).collect();
        assert_eq!(words.iter().map(|token| token.text.as_str()).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn test_items_are_marked_and_end() {
        check_test_words("src/a.rs", "#[cfg(test)] mod t { a } b", &["mod", "t", "a"]);
        check_test_words("src/a.rs", "#[test] fn t() { a } fn b() {}", &["fn", "t", "a"]);
        check_test_words("src/a.rs", "#[cfg(all(loom, test))] use a; use b;", &["use", "a"]);
        check_test_words("src/a.rs", "#[cfg(not(test))] mod a { b }", &[]);
        check_test_words("src/a.rs", "#[cfg(feature = \"test\")] mod a { b }", &["mod", "a", "b"]);
        check_test_words("tests/a.rs", "fn a() {}", &["fn", "a"]);
        check_test_words("src/ring/tests.rs", "fn a() {}", &["fn", "a"]);
    }

    #[test]
    fn comments_and_literals_hide_their_words() {
        let source =
            Source::of("src/a.rs", "// unsafe\nlet a = \"unsafe\"; /* unsafe */ 'x'; r#\"unsafe\"#;");
        assert_eq!(source.find(&["unsafe"]).count(), 0);
        assert_eq!(source.tokens[0], Token { text: "let".into(), line: 2, test: false });
    }

    #[test]
    fn broken_rust_is_a_problem() {
        let problem = Source::new("src/a.rs", "fn a() {\n".into()).unwrap_err();
        assert!(problem.text.contains("not Rust"), "{problem}");
    }

    #[test]
    fn keys_are_found_whole() {
        let source = Source::of("Cargo.toml", "[dependencies]\nserde_json = \"1\"\nserde.workspace = true\n");
        assert_eq!(source.line_of_key("serde"), 3);
        assert_eq!(source.line_of_key("serde_json"), 2);
        assert_eq!(source.line_of_key("toml"), 0);
    }
}
