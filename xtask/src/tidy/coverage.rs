//! `docs/coverage.md`: it is there, and the tests it names are too.

use super::Problem;
use super::source::Source;

const FILE: &str = "docs/coverage.md";

pub(super) fn check(sources: &[Source]) -> Vec<Problem> {
    match sources.iter().find(|source| source.path == FILE) {
        Some(table) => invented(table, |name| sources.iter().any(|source| has_test(source, name))),
        None => vec![Problem::new(FILE, 0, "write this table: item, our name, test")],
    }
}

/// Names in backticks in the last column that no test has.
fn invented(table: &Source, exists: impl Fn(&str) -> bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in table.lines() {
        let Some(cell) = line.strip_suffix('|').and_then(|row| row.rsplit('|').next()) else {
            continue;
        };
        let names = cell.split('`').skip(1).step_by(2).filter(|name| !exists(name));
        problems.extend(
            names.map(|name| {
                table.problem(number, format!("no test is called {name}: name one, or say open"))
            }),
        );
    }
    problems
}

/// A conformance case goes by its full name in quotes, any other test by its function.
fn has_test(source: &Source, name: &str) -> bool {
    let function = name.rsplit("::").next().unwrap_or(name);
    let case = format!("\"{name}\"");
    source.find(&["fn", function]).next().is_some() || source.tokens.iter().any(|token| token.text == case)
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;

    const TESTS: &str = "fn parses_both_cases() {} case(\"copy::all_pairs\")";

    #[test]
    fn named_tests_exist() {
        let check_row = |cell: &str, expected: &[(usize, &str)]| {
            let table = Source::of(
                FILE,
                &format!("| item | our name | test |\n|---|---|---|\n| a | `A` | {cell} |\n"),
            );
            assert_problems(&check(&[table, Source::of("src/a.rs", TESTS)]), expected);
        };
        check_row("open", &[]);
        check_row("`core_types::id::parses_both_cases`", &[]);
        check_row("`copy::all_pairs`", &[]);
        check_row("`copy::some_pairs`", &[(3, "copy::some_pairs")]);
    }

    #[test]
    fn the_table_exists() {
        assert_problems(&check(&[]), &[(0, "write this table")]);
    }
}
