//! Rules for every text: words, paths, links and length.

use std::path::Path;

use super::Problem;
use super::source::Source;

/// Wordings of work that is not done, one a line. No rule reads that file, so it may hold them.
const WORDINGS: &str = include_str!("words.txt");

/// First folders of paths that exist on somebody's machine only.
const MACHINE_FOLDERS: [&str; 7] = ["home", "root", "tmp", "work", "mnt", "Users", "private"];

/// A file longer than this usually holds two things.
const LONG: usize = 800;

pub(super) fn check(source: &Source, exists: impl Fn(&str) -> bool) -> Vec<Problem> {
    let mut problems = wordings(source, WORDINGS);
    problems.extend(open_todos(source));
    problems.extend(machine_paths(source));
    problems.extend(long(source));
    if source.path.ends_with(".md") {
        problems.extend(dead_links(source, exists));
    }
    problems
}

fn wordings(source: &Source, wordings: &str) -> Vec<Problem> {
    let wordings: Vec<_> = wordings.lines().map(|wording| (wording, wording.to_lowercase())).collect();
    let mut problems = Vec::new();
    for (number, line) in source.lines() {
        let line = line.to_lowercase();
        let found = wordings.iter().filter(|(_, lower)| line.contains(lower));
        problems.extend(found.map(|(wording, _)| {
            source
                .problem(number, format!("\"{wording}\" reads like work left undone: do it, or say what is"))
        }));
    }
    problems
}

/// A `TODO` carries the number of its issue: `TODO(#12)`.
fn open_todos(source: &Source) -> Vec<Problem> {
    let is_open = |line: &str| {
        let comment = line.split_once("//").map_or("", |(_, comment)| comment.trim_start());
        comment.starts_with("TODO") && !comment.starts_with("TODO(#")
    };
    let open = source.lines().filter(|(_, line)| is_open(line));
    open.map(|(number, _)| source.problem(number, "do it now, or give its issue: `TODO(#12)`")).collect()
}

fn machine_paths(source: &Source) -> Vec<Problem> {
    let lines =
        source.lines().filter(|(_, line)| MACHINE_FOLDERS.iter().any(|folder| names_folder(line, folder)));
    lines
        .map(|(number, _)| {
            source.problem(number, "a path of one machine: make it relative, or ask the system for it")
        })
        .collect()
}

/// Whether the line holds `/folder` as the beginning of a path.
fn names_folder(line: &str, folder: &str) -> bool {
    let part_of_path = |c: char| c.is_alphanumeric() || "_-.*}>)$/".contains(c);
    let needle = format!("/{folder}");
    line.match_indices(&needle).any(|(at, _)| {
        let after = line[at + needle.len()..].chars().next();
        !line[..at].ends_with(part_of_path)
            && !after.is_some_and(|c| c.is_alphanumeric() || "_-.".contains(c))
    })
}

fn long(source: &Source) -> Option<Problem> {
    let count = source.text.lines().count();
    let is_code = !source.tokens.is_empty();
    (is_code && count > LONG).then(|| {
        let mut problem = source.problem(0, format!("{count} lines: does it hold two things?"));
        problem.note = true;
        problem
    })
}

fn dead_links(source: &Source, exists: impl Fn(&str) -> bool) -> Vec<Problem> {
    let folder = Path::new(&source.path).parent().unwrap_or(Path::new(""));
    let mut fenced = false;
    let mut problems = Vec::new();
    for (number, line) in source.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let targets = if fenced { Vec::new() } else { link_targets(line) };
        let dead = targets.into_iter().filter(|target| !exists(&folder.join(target).display().to_string()));
        problems.extend(
            dead.map(|target| source.problem(number, format!("{target} is not there: mend the link"))),
        );
    }
    problems
}

/// The files that a line of Markdown links to; other sites and places in the same file are left out.
fn link_targets(line: &str) -> Vec<String> {
    let prose: String = line.split('`').step_by(2).collect();
    let inline = prose.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let reference = prose.strip_prefix('[').and_then(|rest| rest.split_once("]: ")).map(|(_, target)| target);
    inline
        .chain(reference)
        .filter_map(|target| target.split_whitespace().next())
        .map(|target| target.trim_matches(['<', '>']))
        .filter(|target| !target.contains("://") && !target.starts_with("mailto:"))
        .filter_map(|target| target.split('#').next())
        .filter(|file| !file.is_empty())
        .map(String::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;

    #[test]
    fn wordings_are_found_in_any_case() {
        let source = Source::of("docs/a.md", "All real.\nThis is Left For Later.\n");
        assert_problems(&wordings(&source, "left for later\nto be written"), &[(2, "left for later")]);
        assert!(WORDINGS.lines().all(|line| line.len() > 3), "an empty wording would be found everywhere");
    }

    #[test]
    fn a_todo_has_an_issue() {
        let source = Source::of("src/a.rs", "// TODO(#12): once measured\n// TODO: some day\n");
        assert_problems(&open_todos(&source), &[(2, "TODO(#12)")]);
    }

    #[test]
    fn machine_paths_are_found() {
        let check = |path: &str, found: bool| {
            let source = Source::of("docs/a.md", &format!("see \"{path}\""));
            assert_eq!(!machine_paths(&source).is_empty(), found, "{path}");
        };
        for folder in MACHINE_FOLDERS {
            check(&format!("/{folder}/me/a"), true);
            check(&format!("/{folder}"), true);
            check(&format!("target/{folder}/a"), false);
            check(&format!("/{folder}s-and-more"), false);
        }
        check("/usr/lib/a.so", false);
        check("/sys/class/drm", false);
    }

    #[test]
    fn long_files_are_noted() {
        let check = |lines: usize, noted: bool| {
            let problem = long(&Source::of("src/a.rs", &"const A: u8 = 1;\n".repeat(lines)));
            assert_eq!(problem.is_some_and(|problem| problem.note), noted, "{lines}");
        };
        check(LONG, false);
        check(LONG + 1, true);
    }

    #[test]
    fn links_lead_to_files() {
        let text = "[a](a.md#part) and [b](../b.md \"title\")\n[c](#here) [d](https://d.example)\n\
                    `[e](e.md)`\n```\n[f](f.md)\n```\n[g]: g.md\n![h](<h.png>)\n";
        let source = Source::of("docs/x.md", text);
        assert_problems(&dead_links(&source, |_| true), &[]);
        let dead = dead_links(&source, |path| path == "docs/a.md");
        assert_problems(&dead, &[(1, "../b.md"), (7, "g.md"), (8, "h.png")]);
    }
}
