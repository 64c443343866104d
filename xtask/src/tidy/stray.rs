//! Code that was meant to go before it was shown: unfinished, ignored, printed, unwrapped.

use std::path::Path;

use super::Problem;
use super::source::{Source, Token};
use crate::workspace::{Package, TargetKind};

pub(super) fn check(source: &Source, package: Option<&Package>) -> Vec<Problem> {
    let mut problems = unfinished(source);
    problems.extend(ignored(source));
    problems.extend(unwrapped(source));
    if package.is_some_and(|package| is_library(package, &source.path)) {
        problems.extend(printed(source));
    }
    problems
}

fn unfinished(source: &Source) -> Vec<Problem> {
    const MACROS: [&str; 3] = ["todo", "unimplemented", "dbg"];
    uses(source, &MACROS)
        .map(|token| source.problem(token.line, format!("finish this and remove `{}!`", token.text)))
        .collect()
}

fn ignored(source: &Source) -> Vec<Problem> {
    let attributes = source.find(&["#", "[", "ignore"]);
    attributes
        .map(|index| {
            let text = "a test runs or does not exist: let it say what it needs, or remove it";
            source.problem(source.tokens[index].line, text)
        })
        .collect()
}

fn unwrapped(source: &Source) -> Vec<Problem> {
    let calls = source.find(&[".", "unwrap", "(", ")"]).map(|index| &source.tokens[index + 1]);
    calls
        .filter(|token| !token.test)
        .map(|token| {
            source.problem(token.line, "return the error, or `expect` with the reason why it cannot fail")
        })
        .collect()
}

/// Whether the source is part of what others link with.
fn is_library(package: &Package, path: &str) -> bool {
    let path = Path::new(path);
    let of_program = package.targets(TargetKind::Bin).any(|program| program.src_path == path);
    let mut folders = package.targets(TargetKind::Lib).filter_map(|library| library.src_path.parent());
    !of_program && folders.any(|folder| path.starts_with(folder) && !path.starts_with(folder.join("bin")))
}

fn printed(source: &Source) -> Vec<Problem> {
    const MACROS: [&str; 4] = ["println", "print", "eprintln", "eprint"];
    let talks = uses(source, &MACROS).filter(|token| !token.test);
    talks.map(|token| source.problem(token.line, "a library does not talk: use `tracing`")).collect()
}

/// Where one of the macros is used.
fn uses<'a>(source: &'a Source, macros: &[&str]) -> impl Iterator<Item = &'a Token> {
    let used = source.tokens.windows(2).filter(|pair| pair[1].text == "!").map(|pair| &pair[0]);
    used.filter(|token| macros.contains(&token.text.as_str()))
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;
    use crate::workspace::Target;

    fn package() -> Package {
        let target = |kind: TargetKind, src_path: &str| Target {
            kind: vec![kind],
            src_path: src_path.into(),
            ..Target::default()
        };
        Package {
            targets: vec![
                target(TargetKind::Lib, "crates/a/src/lib.rs"),
                target(TargetKind::Bin, "crates/a/src/main.rs"),
            ],
            ..Package::default()
        }
    }

    fn check_at(path: &str, text: &str, expected: &[(usize, &str)]) {
        assert_problems(&check(&Source::of(path, text), Some(&package())), expected);
    }

    #[test]
    fn unfinished_code_is_found() {
        for name in ["todo", "unimplemented", "dbg"] {
            check_at("crates/a/src/lib.rs", &format!("fn f() {{\n{name}!()\n}}"), &[(2, name)]);
        }
        check_at("crates/a/src/lib.rs", "// todo!\nlet todo = !true;", &[]);
    }

    #[test]
    fn no_test_is_ignored() {
        let attribute = ["#[", "ignore = \"slow\"]"].concat();
        check_at("crates/a/tests/a.rs", &format!("#[test]\n{attribute}\nfn a() {{}}"), &[(2, "let it say")]);
    }

    #[test]
    fn unwrap_is_for_tests() {
        check_at("crates/a/src/main.rs", "fn f() {\n    g().unwrap();\n}", &[(2, "expect")]);
        check_at("crates/a/src/main.rs", "#[test]\nfn f() {\n    g().unwrap();\n}", &[]);
        check_at("crates/a/tests/a.rs", "fn f() { g().unwrap(); }", &[]);
        check_at("crates/a/src/lib.rs", "fn f() { g().unwrap_or(1); }", &[]);
    }

    #[test]
    fn libraries_do_not_print() {
        let text = "fn f() { println!(); }";
        check_at("crates/a/src/lib.rs", text, &[(1, "tracing")]);
        check_at("crates/a/src/ring.rs", text, &[(1, "tracing")]);
        for program in
            ["crates/a/src/main.rs", "crates/a/src/bin/b.rs", "crates/a/examples/c.rs", "crates/a/build.rs"]
        {
            check_at(program, text, &[]);
        }
    }
}
