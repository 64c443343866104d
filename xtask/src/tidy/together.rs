//! Calls that have to stay in one module: some functions may only be called in a certain way, and the module is
//! where that way is kept to.

use std::path::Path;

use super::Problem;
use super::layers::{FILE, Map};
use super::source::Source;
use crate::workspace::Package;

/// Judges one source of `package`.
pub(super) fn check(source: &Source, package: Option<&Package>, map: &Map) -> Vec<Problem> {
    let Some(package) = package else { return Vec::new() };
    let inside = Path::new(&source.path).strip_prefix(package.folder()).unwrap_or(Path::new(""));
    let homes = map.kept_together.get(&package.id()).into_iter().flatten();
    homes
        .filter(|(home, _)| Path::new(home) != inside)
        .flat_map(|(home, names)| names.iter().flat_map(move |name| strays(source, home, name)))
        .collect()
}

/// Calls of a method outside its home.
fn strays(source: &Source, home: &str, name: &str) -> Vec<Problem> {
    let calls = source.find(&[".", name, "("]).map(|index| source.tokens[index].line).collect::<Vec<_>>();
    let text = format!("`{name}` is called in {home} alone, as {FILE} says: call it through that module");
    calls.into_iter().map(|line| source.problem(line, text.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;

    #[test]
    fn calls_stay_at_home() {
        let map = Map::parse(
            r#"
            layers = [["core-types"]]
            never-published = []
            [beside]
            [also]
            [unsafe-modules]
            [kept-together."core-types"]
            "src/cold.rs" = ["module_unload"]
            "#,
        )
        .unwrap();
        let package = Package {
            name: "warpweft-core-types".into(),
            manifest_path: "crates/core-types/Cargo.toml".into(),
            ..Package::default()
        };
        let judge = |path: &str, text: &str| {
            let source = Source::new(path, text.into()).unwrap();
            check(&source, Some(&package), &map)
        };
        let call = "fn f(driver: &Driver) { driver.module_unload(7) }";
        assert_problems(&judge("crates/core-types/src/cold.rs", call), &[]);
        assert_problems(&judge("crates/core-types/src/other.rs", call), &[(1, "src/cold.rs alone")]);
        assert_problems(&judge("crates/core-types/src/other.rs", "fn module_unload() {}"), &[]);
    }
}
