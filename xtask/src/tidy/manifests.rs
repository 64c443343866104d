//! What every `Cargo.toml` of the workspace says.

use toml::{Table, Value};

use super::Problem;
use super::source::Source;
use crate::workspace::Package;

const DEPENDENCIES: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];

/// Judges one member by its manifest and the roots of its targets.
pub(super) fn check(package: &Package, manifest: &Source, roots: &[&Source]) -> Vec<Problem> {
    let mut problems = Vec::new();
    problems.extend(introduced(package, manifest, roots));
    match manifest.text.parse::<Table>() {
        Ok(table) => {
            problems.extend(shares_lints(manifest, &table));
            problems.extend(shares_versions(manifest, &table));
        }
        Err(error) => problems.push(manifest.problem(0, error.message())),
    }
    problems
}

/// A crate says what it is for, in its description and in a README or on its crate page.
fn introduced(package: &Package, manifest: &Source, roots: &[&Source]) -> Vec<Problem> {
    let mut problems = Vec::new();
    if package.description.as_deref().is_none_or(str::is_empty) {
        problems.push(manifest.problem(1, "add a `description` of one line"));
    }
    let has_page = package.readme.is_some() || roots.iter().any(|root| root.text.starts_with("//!"));
    if !has_page {
        problems
            .push(manifest.problem(1, "begin the crate's root with `//!` and its purpose, or add a README"));
    }
    problems
}

fn shares_lints(manifest: &Source, table: &Table) -> Option<Problem> {
    let shared = table.get("lints").and_then(|lints| lints.get("workspace")) == Some(&Value::Boolean(true));
    (!shared).then(|| {
        manifest.problem(manifest.line_of_key("[lints"), "take the lints of all: `[lints] workspace = true`")
    })
}

/// Versions stand in the workspace's table, once.
fn shares_versions(manifest: &Source, table: &Table) -> Vec<Problem> {
    let targets = table.get("target").and_then(Value::as_table);
    let by_target = targets.into_iter().flat_map(Table::values).filter_map(Value::as_table);
    let tables = [table].into_iter().chain(by_target);
    let kinds = tables.flat_map(|table| DEPENDENCIES.iter().filter_map(|kind| table.get(*kind)?.as_table()));
    kinds
        .flatten()
        .filter(|(_, dependency)| !is_shared(dependency))
        .map(|(name, _)| {
            let text =
                format!("put the version of {name} into the workspace's table: `{name}.workspace = true`");
            manifest.problem(manifest.line_of_key(name), text)
        })
        .collect()
}

/// Crates of ours in the workspace's table that lack the version a published crate needs to name.
pub(super) fn bare_paths(root: &Source) -> Vec<Problem> {
    let Ok(table) = root.text.parse::<Table>() else {
        return Vec::new();
    };
    let dependencies = table.get("workspace").and_then(|workspace| workspace.get("dependencies")?.as_table());
    let is_bare =
        |dependency: &Value| dependency.get("path").is_some() && dependency.get("version").is_none();
    let bare = dependencies.into_iter().flatten().filter(|(_, dependency)| is_bare(dependency));
    bare.map(|(name, _)| {
        root.problem(root.line_of_key(name), format!("give {name} a `version` beside its `path`"))
    })
    .collect()
}

/// Taken from the workspace, or a crate beside this one that needs no version.
fn is_shared(dependency: &Value) -> bool {
    let Some(table) = dependency.as_table() else {
        return false;
    };
    let own = table.contains_key("path") && !table.contains_key("version");
    own || table.get("workspace") == Some(&Value::Boolean(true))
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;

    fn check_versions(manifest: &str, expected: &[(usize, &str)]) {
        let manifest = Source::of("Cargo.toml", manifest);
        assert_problems(&shares_versions(&manifest, &manifest.text.parse().unwrap()), expected);
    }

    #[test]
    fn versions_stand_in_the_workspace() {
        check_versions("[dependencies]\nserde.workspace = true\nours = { path = \"../ours\" }\n", &[]);
        check_versions("[dependencies]\nserde = { workspace = true, features = [\"rc\"] }\n", &[]);
        check_versions("[dev-dependencies]\nserde = \"1\"\n", &[(2, "serde.workspace")]);
        check_versions("[dependencies.serde]\nversion = \"1\"\n", &[(0, "serde.workspace")]);
        check_versions("[target.'cfg(loom)'.dependencies]\nloom = \"1\"\n", &[(2, "loom.workspace")]);
    }

    #[test]
    fn our_own_crates_have_versions_too() {
        let root = "[workspace.dependencies]\na = { path = \"a\", version = \"0.1.0\" }\nb = { path = \"b\" }\nc = \"1\"\n";
        assert_problems(&bare_paths(&Source::of("Cargo.toml", root)), &[(3, "give b a")]);
    }

    #[test]
    fn lints_are_shared() {
        let check_lints = |text: &str, shared: bool| {
            let manifest = Source::of("Cargo.toml", text);
            let problem = shares_lints(&manifest, &manifest.text.parse().unwrap());
            assert_eq!(problem.is_none(), shared, "{text}");
        };
        check_lints("[lints]\nworkspace = true\n", true);
        check_lints("[lints.rust]\nunsafe_code = \"warn\"\n", false);
        check_lints("", false);
    }

    #[test]
    fn crates_introduce_themselves() {
        let manifest = Source::of("Cargo.toml", "");
        let check_package = |description: Option<&str>,
                             readme: Option<&str>,
                             root: &str,
                             expected: &[(usize, &str)]| {
            let package = Package {
                description: description.map(String::from),
                readme: readme.map(Into::into),
                ..Package::default()
            };
            assert_problems(&introduced(&package, &manifest, &[&Source::of("src/lib.rs", root)]), expected);
        };
        check_package(Some("Rings"), None, "//! Rings.", &[]);
        check_package(Some("Rings"), Some("README.md"), "", &[]);
        check_package(Some("Rings"), None, "", &[(1, "README")]);
        check_package(None, None, "//! Rings.", &[(1, "description")]);
    }
}
