//! Where `unsafe` may be opened, and that whoever opens it argues why.

use std::path::Path;

use super::Problem;
use super::layers::{FILE, Map, matches_any};
use super::source::{Source, Token};
use crate::workspace::{Package, Workspace};

/// Judges one source of `package`; a source of no package may open nothing.
pub(super) fn check(source: &Source, package: Option<&Package>, map: &Map) -> Vec<Problem> {
    let allowed = package.is_some_and(|package| {
        let inside = Path::new(&source.path).strip_prefix(package.folder()).unwrap_or(Path::new(""));
        let modules = map.unsafe_modules.get(&package.id());
        modules.is_some_and(|modules| matches_any(modules, &inside.display().to_string()))
    });
    let mut problems = Vec::new();
    if !allowed {
        problems.extend(opened(source));
    }
    problems.extend(unargued(source));
    problems
}

/// A crate without unsafe modules says so where the compiler holds it to it.
pub(super) fn forbids(map: &Map, package: &Package, roots: &[&Source]) -> Vec<Problem> {
    if map.unsafe_modules.contains_key(&package.id()) {
        return Vec::new();
    }
    let words = ["#", "!", "[", "forbid", "(", "unsafe_code", ")", "]"];
    let open = roots.iter().filter(|root| root.find(&words).next().is_none());
    open.map(|root| {
        let text = format!("say `#![forbid(unsafe_code)]`, or name the crate under unsafe-modules in {FILE}");
        root.problem(1, text)
    })
    .collect()
}

/// Modules that `layers.toml` names in crates that are there, but which are not.
pub(super) fn stale(map: &Map, workspace: &Workspace, exists: impl Fn(&str) -> bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    for package in &workspace.packages {
        let modules = map.unsafe_modules.get(&package.id()).into_iter().flatten();
        for module in modules {
            let file = package.folder().join(module.trim_end_matches('*')).display().to_string();
            if !exists(&file) {
                let text = format!("unsafe-modules names {file}, which is not there: remove it");
                problems.push(Problem::new(FILE, 0, text));
            }
        }
    }
    problems
}

/// The first `unsafe` of a source that may have none.
fn opened(source: &Source) -> Option<Problem> {
    let index = source.find(&["unsafe"]).next()?;
    let text = format!("`unsafe` outside the modules that {FILE} names: move it there, or name this one");
    Some(source.problem(source.tokens[index].line, text))
}

fn unargued(source: &Source) -> Vec<Problem> {
    let lines: Vec<_> = source.text.lines().collect();
    source.find(&["unsafe"]).filter_map(|index| unargued_at(source, &lines, index)).collect()
}

fn unargued_at(source: &Source, lines: &[&str], index: usize) -> Option<Problem> {
    let start = statement_start(&source.tokens, index);
    let line = source.tokens[index].line;
    match opening(&source.tokens[index + 1..]) {
        Opening::PointerType => None,
        Opening::Duty => {
            let documented = source.tokens[start..index].iter().any(|token| token.text.contains("# Safety"));
            (!documented).then(|| source.problem(line, "callers have duties: list them under `# Safety`"))
        }
        Opening::Claim => {
            let argued = has_safety_comment(lines, source.tokens[start].line, line);
            (!argued).then(|| source.problem(line, "argue in a `// SAFETY:` comment above why this holds"))
        }
    }
}

/// What the word `unsafe` opens.
enum Opening {
    /// `unsafe fn`, `unsafe trait`: somebody else has to keep a promise.
    Duty,
    /// A block, an `impl`, an `extern` block, an attribute: a promise is said to be kept.
    Claim,
    /// The type `unsafe fn(..)`.
    PointerType,
}

fn opening(after: &[Token]) -> Opening {
    let mut words = after
        .iter()
        .map(|token| token.text.as_str())
        .skip_while(|word| *word == "extern" || word.starts_with('"'));
    match words.next() {
        Some("fn") if words.next() == Some("(") => Opening::PointerType,
        Some("fn" | "trait") => Opening::Duty,
        _ => Opening::Claim,
    }
}

/// The index where the statement or item around `index` begins, its attributes and doc comments included.
fn statement_start(tokens: &[Token], index: usize) -> usize {
    let mut depth = 0_usize;
    for before in (0..index).rev() {
        match tokens[before].text.as_str() {
            "}" | ";" | "{" if depth == 0 => return before + 1,
            ")" | "]" | "}" => depth += 1,
            "(" | "[" | "{" => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    0
}

/// Looks in the lines from `first` to `last` and in the comment right above them.
fn has_safety_comment(lines: &[&str], first: usize, last: usize) -> bool {
    let (above, rest) = lines.split_at(first - 1);
    let comment = above.iter().rev().take_while(|line| line.trim_start().starts_with("//"));
    comment.chain(&rest[..=last - first]).any(|line| line.contains("// SAFETY: "))
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;

    fn map(unsafe_modules: &str) -> Map {
        let text = format!(
            "layers = []\nnever-published = []\n[beside]\n[also]\n[unsafe-modules]\n{unsafe_modules}"
        );
        Map::parse(&text).unwrap()
    }

    fn ring() -> Package {
        Package { manifest_path: "crates/ring/Cargo.toml".into(), ..Package::default() }
    }

    fn check_argued(text: &str, expected: &[(usize, &str)]) {
        assert_problems(&unargued(&Source::of("src/a.rs", text)), expected);
    }

    #[test]
    fn only_named_modules_open_unsafe() {
        let text = "// SAFETY: in view.\nunsafe impl Send for A {}";
        let check_in = |path: &str, modules: &str, expected: &[(usize, &str)]| {
            let source = Source::of(path, text);
            assert_problems(&check(&source, Some(&ring()), &map(modules)), expected);
        };
        let outside = [(2, "outside the modules")];
        check_in("crates/ring/src/slot.rs", "ring = [\"src/slot.rs\"]", &[]);
        check_in("crates/ring/src/raw/slot.rs", "ring = [\"src/raw/*\"]", &[]);
        check_in("crates/ring/src/other.rs", "ring = [\"src/slot.rs\"]", &outside);
        check_in("crates/ring/src/slot.rs", "", &outside);
        assert_problems(&check(&Source::of("docs/a.rs", text), None, &map("")), &outside);
    }

    #[test]
    fn other_crates_forbid_it() {
        let check_root = |text: &str, modules: &str, expected: &[(usize, &str)]| {
            let root = Source::of("crates/ring/src/lib.rs", text);
            assert_problems(&forbids(&map(modules), &ring(), &[&root]), expected);
        };
        check_root("#![forbid(unsafe_code)]", "", &[]);
        check_root("// #![forbid(unsafe_code)]\n", "", &[(1, "forbid(unsafe_code)")]);
        check_root("", "ring = []", &[]);
    }

    #[test]
    fn the_map_names_modules_that_exist() {
        let workspace = Workspace { packages: vec![ring()], ..Workspace::default() };
        let check_map = |modules: &str, expected: &[(usize, &str)]| {
            let exists = |file: &str| file == "crates/ring/src/slot.rs" || file == "crates/ring/src/raw/";
            assert_problems(&stale(&map(modules), &workspace, exists), expected);
        };
        check_map("ring = [\"src/slot.rs\", \"src/raw/*\"]", &[]);
        check_map("ring = [\"src/gone.rs\"]", &[(0, "crates/ring/src/gone.rs")]);
        check_map("crate-to-come = [\"src/slot.rs\"]", &[]);
    }

    #[test]
    fn claims_are_argued_above() {
        check_argued("fn f() {\n    // SAFETY: in view.\n    unsafe { g() }\n}", &[]);
        check_argued(
            "fn f() {\n    // SAFETY: in view,\n    // over two lines.\n    let a =\n        h(1, unsafe { g() });\n}",
            &[],
        );
        check_argued(
            "// SAFETY: in view.\n#[expect(unsafe_code, reason = \"r\")]\nunsafe impl Send for A {}",
            &[],
        );
        check_argued(
            "#[expect(\n    unsafe_code,\n    reason = \"r\"\n)]\n// SAFETY: in view.\nunsafe impl Send for A {}",
            &[],
        );
        check_argued("// SAFETY: as the header says.\nunsafe extern \"C\" { fn g(); }", &[]);
        check_argued("// Safe, surely.\nunsafe impl Send for A {}", &[(2, "SAFETY")]);
        check_argued("// SAFETY: of another.\nfn h() {}\nfn f() { unsafe { g() } }", &[(3, "SAFETY")]);
        check_argued("#[unsafe(no_mangle)]\nfn f() {}", &[(1, "SAFETY")]);
    }

    #[test]
    fn duties_are_documented() {
        check_argued("/// Frees.\n///\n/// # Safety\n/// - once\npub const unsafe fn free() {}", &[]);
        check_argued(
            "/// # Safety\n/// - once\n#[expect(unsafe_code, reason = \"r\")]\nunsafe extern \"C\" fn free() {}",
            &[],
        );
        check_argued("/// Frees.\npub unsafe fn free() {}", &[(2, "# Safety")]);
        check_argued("/// # Safety\nfn other() {}\nunsafe trait Pod {}", &[(3, "# Safety")]);
        check_argued("type Free = unsafe extern \"C\" fn(*mut u8);", &[]);
    }
}
