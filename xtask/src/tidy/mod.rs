//! `tidy`: rules of this workspace that no other tool knows.
//!
//! Each rule is a function from the text it judges to the problems it finds.

mod coverage;
mod layers;
mod manifests;
mod source;
mod stray;
mod texts;
mod together;
mod unsafe_map;
mod workflows;

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use crate::cmd::Cmd;
use crate::workspace::{Package, Workspace};
use layers::Map;
use source::Source;

/// Something to mend, and where.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Problem {
    file: String,
    line: usize,
    text: String,
    /// Worth knowing, but nothing that has to be mended.
    note: bool,
}

/// Prints what breaks a rule; an error if anything does.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let map = Map::parse(&fs::read_to_string(layers::FILE).context(layers::FILE)?)?;
    let (sources, mut problems) = sources()?;

    problems.extend(sources.iter().flat_map(|source| of_source(workspace, &map, source)));
    problems
        .extend(workspace.packages.iter().flat_map(|package| of_package(workspace, &map, package, &sources)));
    problems.extend(unsafe_map::stale(&map, workspace, |file| Path::new(file).exists()));
    problems.extend(coverage::check(&sources));
    let root = sources.iter().find(|source| source.path == "Cargo.toml");
    problems.extend(root.map(manifests::bare_paths).unwrap_or_default());

    problems.sort();
    problems.iter().for_each(|problem| println!("{problem}"));
    let broken = problems.iter().filter(|problem| !problem.note).count();
    if broken > 0 {
        bail!("{broken} problems");
    }
    println!("tidy: {} files are in order", sources.len());
    Ok(())
}

fn of_source(workspace: &Workspace, map: &Map, source: &Source) -> Vec<Problem> {
    let package = workspace.package_of(Path::new(&source.path));
    let mut problems = texts::check(source, |path| Path::new(path).exists());
    problems.extend(workflows::check(source, &crate::verbs()));
    problems.extend(stray::check(source, package));
    problems.extend(unsafe_map::check(source, package, map));
    problems.extend(together::check(source, package, map));
    problems
}

fn of_package(workspace: &Workspace, map: &Map, package: &Package, sources: &[Source]) -> Vec<Problem> {
    let text_of = |path: &Path| sources.iter().find(|source| Path::new(&source.path) == path);
    let Some(manifest) = text_of(&package.manifest_path) else {
        return vec![Problem::new(package.manifest_path.display(), 0, "git does not know this file: add it")];
    };
    let roots: Vec<_> = package.roots().filter_map(text_of).collect();
    let mut problems = layers::check(map, workspace, package, manifest);
    problems.extend(manifests::check(package, manifest, &roots));
    problems.extend(unsafe_map::forbids(map, package, &roots));
    problems
}

/// The texts of the repository, and the problems of those that cannot be read as Rust.
fn sources() -> Result<(Vec<Source>, Vec<Problem>)> {
    let files = Cmd::new("git ls-files --cached --others --exclude-standard").output()?;
    let mut sources = Vec::new();
    let mut problems = Vec::new();
    for path in files.lines().filter(|path| source::is_text(path) && Path::new(path).exists()) {
        let text = fs::read_to_string(path).with_context(|| String::from(path))?;
        match Source::new(path, text) {
            Ok(source) => sources.push(source),
            Err(problem) => problems.push(problem),
        }
    }
    Ok((sources, problems))
}

impl Problem {
    fn new(file: impl fmt::Display, line: usize, text: impl Into<String>) -> Self {
        Self { file: file.to_string(), line, text: text.into(), note: false }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, text, note } = self;
        write!(f, "{}{file}", if *note { "note: " } else { "" })?;
        if *line > 0 {
            write!(f, ":{line}")?;
        }
        write!(f, ": {text}")
    }
}

/// Fails unless `problems` are on these lines with these parts of their text.
#[cfg(test)]
fn assert_problems(problems: &[Problem], expected: &[(usize, &str)]) {
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
    for (problem, (line, part)) in problems.iter().zip(expected) {
        assert_eq!(problem.line, *line, "{problem}");
        assert!(problem.text.contains(part), "{problem} lacks {part:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_say_where_they_are() {
        let mut problem = Problem::new("src/ring.rs", 7, "mend it");
        assert_eq!(problem.to_string(), "src/ring.rs:7: mend it");
        problem.note = true;
        problem.line = 0;
        assert_eq!(problem.to_string(), "note: src/ring.rs: mend it");
    }
}
