//! Workflows run our verbs and nothing else, and texts name verbs that exist.

use super::Problem;
use super::source::Source;

/// How a workflow brings the pinned toolchain, and what it compiles for besides.
const TOOLCHAIN: &str = "rustup toolchain install";
const TARGETS: &str = "rustup target add ";

pub(super) fn check(source: &Source, verbs: &[String]) -> Vec<Problem> {
    let mut problems = unknown_verbs(source, verbs);
    if source.path.starts_with(".github/workflows/") {
        problems.extend(foreign_steps(source));
    }
    problems
}

/// What CI does, anyone can do: each step is a verb, after the checkout and the toolchain.
fn foreign_steps(source: &Source) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in source.lines() {
        let step = line.trim_start().trim_start_matches("- ");
        let ours = match step.split_once(':') {
            Some(("run", command)) => is_verb(command.trim()),
            Some(("uses", action)) => action.trim().starts_with("actions/"),
            _ => true,
        };
        if !ours {
            problems.push(source.problem(number, "make this step a verb: one line `run: cargo xtask ..`"));
        }
    }
    problems
}

fn is_verb(command: &str) -> bool {
    let several = command.contains([';', '|', '&', '>']);
    let known = [TARGETS, "cargo xtask "].iter().any(|start| command.starts_with(start));
    command == TOOLCHAIN || (known && !several)
}

fn unknown_verbs(source: &Source, verbs: &[String]) -> Vec<Problem> {
    let mut problems = Vec::new();
    if source.path.ends_with(".rs") {
        return problems;
    }
    for (number, line) in source.lines() {
        let named = line
            .split("cargo xtask ")
            .skip(1)
            .map(|rest| rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap_or_default());
        let unknown = named
            .filter(|verb| verb.starts_with(|c: char| c != '-') && !verbs.iter().any(|known| known == verb));
        problems.extend(
            unknown.map(|verb| {
                source.problem(number, format!("there is no verb `{verb}`: see cargo xtask help"))
            }),
        );
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;

    #[test]
    fn steps_are_verbs() {
        let check_step = |step: &str, ours: bool| {
            let source = Source::of(".github/workflows/ci.yml", &format!("steps:\n  - {step}\n"));
            assert_eq!(foreign_steps(&source).is_empty(), ours, "{step}");
        };
        check_step("uses: actions/checkout@v4", true);
        check_step("run: rustup toolchain install", true);
        check_step("run: rustup target add x86_64-pc-windows-gnu", true);
        check_step("run: cargo xtask check --require-tools", true);
        check_step("name: Check", true);
        check_step("run: cargo test", false);
        check_step("run: |", false);
        check_step("run: cargo xtask check && make", false);
        check_step("run: rustup target add x && make", false);
        check_step("uses: someone/builds-things@v1", false);
    }

    #[test]
    fn texts_name_verbs_that_exist() {
        let verbs = ["test".into(), "check".into()];
        let check_text = |path: &str, text: &str, expected: &[(usize, &str)]| {
            assert_problems(&unknown_verbs(&Source::of(path, text), &verbs), expected);
        };
        check_text("docs/a.md", "Run `cargo xtask test` or\n`cargo xtask --help`.", &[]);
        check_text("docs/a.md", "Run\n`cargo xtask tset`.", &[(2, "tset")]);
        check_text("docs/a.md", "Each verb of `cargo xtask` prints.", &[]);
        check_text("src/a.rs", "// cargo xtask tset", &[]);
    }
}
