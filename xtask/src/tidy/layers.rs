//! Which crate may use which: the order of `layers.toml`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::Problem;
use super::source::Source;
use crate::workspace::{Package, Workspace, crate_id};

pub(super) const FILE: &str = "layers.toml";

/// No crate uses it, not even in tests.
const XTASK: &str = "xtask";

/// What `layers.toml` says. Crates go by their folder without `crates/`; some of them are yet to be written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Map {
    /// Lowest first: a crate may use those of every earlier layer.
    layers: Vec<Vec<String>>,
    /// Crates outside the order, and all that each of them may use.
    beside: BTreeMap<String, Vec<String>>,
    /// What a crate of the order may use besides the layers below it.
    also: BTreeMap<String, Vec<String>>,
    never_published: Vec<String>,
    /// The modules that may open `unsafe`; a crate that is not named here forbids it.
    pub(super) unsafe_modules: BTreeMap<String, Vec<String>>,
    /// By crate and module: methods that are called there and nowhere else in the crate.
    #[serde(default)]
    pub(super) kept_together: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

impl Map {
    pub(super) fn parse(text: &str) -> Result<Self> {
        toml::from_str(text).context(FILE)
    }

    fn knows(&self, id: &str) -> bool {
        self.layer(id).is_some() || self.beside(id).is_some()
    }

    fn allows(&self, user: &str, used: &str) -> bool {
        if let Some(uses) = self.beside(user) {
            return matches_any(uses, used);
        }
        let below = self.layer(used) < self.layer(user) && self.layer(used).is_some();
        below || self.also.get(user).is_some_and(|uses| matches_any(uses, used))
    }

    fn layer(&self, id: &str) -> Option<usize> {
        self.layers.iter().position(|layer| matches_any(layer, id))
    }

    fn beside(&self, id: &str) -> Option<&Vec<String>> {
        self.beside.iter().find(|(pattern, _)| matches(pattern, id)).map(|(_, uses)| uses)
    }
}

/// Whether a name is the pattern, or lies in the folder that a pattern such as `backends/*` names.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(folder) => name.starts_with(folder),
        None => pattern == name,
    }
}

pub(super) fn matches_any(patterns: &[String], name: &str) -> bool {
    patterns.iter().any(|pattern| matches(pattern, name))
}

/// Judges one package: its place, what it uses and whether it may be published.
pub(super) fn check(map: &Map, workspace: &Workspace, package: &Package, manifest: &Source) -> Vec<Problem> {
    let id = package.id();
    if !map.knows(&id) {
        return vec![manifest.problem(1, format!("{FILE} does not know {id}: give it a place there"))];
    }
    let mut problems = Vec::new();
    for dependency in &package.dependencies {
        let used = dependency.path.as_deref().map(crate_id);
        let Some(used) = used.filter(|used| workspace.packages.iter().any(|package| package.id() == *used))
        else {
            continue;
        };
        let is_dev = dependency.kind.as_deref() == Some("dev");
        if used == XTASK || (!is_dev && !map.allows(&id, &used)) {
            let text = format!("{id} may not use {used}: {FILE} has the order; move the code or the line");
            problems.push(manifest.problem(manifest.line_of_key(&dependency.name), text));
        }
    }
    let published = package.publish.as_ref().is_none_or(|registries| !registries.is_empty());
    if published && matches_any(&map.never_published, &id) {
        problems.push(manifest.problem(1, format!("{id} is never published: say `publish = false`")));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::super::assert_problems;
    use super::*;
    use crate::workspace::Dependency;

    const MAP: &str = r#"
        layers = [["core-types"], ["topology", "bootstrap"], ["transfer"], ["warpweft"]]
        never-published = ["conformance"]
        [beside]
        "backends/*" = ["core-types"]
        conformance = ["*"]
        xtask = []
        [also]
        warpweft = ["backends/*"]
        [unsafe-modules]
    "#;

    fn package(id: &str, uses: &[(&str, &str)]) -> Package {
        let dependency = |&(used, kind): &(&str, &str)| Dependency {
            name: format!("warpweft-{used}"),
            kind: (kind != "normal").then(|| kind.into()),
            path: Some(format!("crates/{used}").into()),
        };
        Package {
            manifest_path: format!("crates/{id}/Cargo.toml").into(),
            dependencies: uses.iter().map(dependency).collect(),
            ..Package::default()
        }
    }

    fn check_uses(id: &str, uses: &[(&str, &str)], expected: &[(usize, &str)]) {
        let mut packages: Vec<_> =
            ["core-types", "topology", "bootstrap", "transfer", "backends/host", "warpweft", "conformance"]
                .map(|id| package(id, &[]))
                .into();
        packages.push(Package { manifest_path: "xtask/Cargo.toml".into(), ..Package::default() });
        let workspace = Workspace { packages, ..Workspace::default() };
        let mut package = package(id, uses);
        package.dependencies.iter_mut().filter(|used| used.name == "warpweft-xtask").for_each(|used| {
            used.path = Some("xtask".into());
        });
        let lines: String =
            uses.iter().map(|(used, _)| format!("warpweft-{used}.workspace = true\n")).collect();
        let manifest = Source::of("Cargo.toml", &lines);
        assert_problems(&check(&Map::parse(MAP).unwrap(), &workspace, &package, &manifest), expected);
    }

    #[test]
    fn lower_layers_may_be_used_and_others_not() {
        check_uses("transfer", &[("core-types", "normal"), ("topology", "build")], &[]);
        check_uses(
            "topology",
            &[("core-types", "normal"), ("transfer", "normal")],
            &[(2, "may not use transfer")],
        );
        check_uses("topology", &[("bootstrap", "build")], &[(1, "may not use bootstrap")]);
        check_uses("transfer", &[("backends/host", "normal")], &[(1, "may not use backends/host")]);
        check_uses("warpweft", &[("backends/host", "normal"), ("transfer", "normal")], &[]);
    }

    #[test]
    fn crates_beside_the_order_use_what_they_name() {
        check_uses("backends/host", &[("core-types", "normal")], &[]);
        check_uses("backends/cuda", &[("topology", "normal")], &[(1, "may not use topology")]);
    }

    #[test]
    fn tests_may_use_all_but_xtask() {
        check_uses("topology", &[("transfer", "dev"), ("backends/host", "dev")], &[]);
        check_uses("topology", &[("xtask", "dev")], &[(1, "may not use xtask")]);
    }

    #[test]
    fn every_crate_has_a_place() {
        check_uses("gossip", &[], &[(1, "does not know gossip")]);
    }

    #[test]
    fn conformance_stays_at_home() {
        check_uses("conformance", &[("warpweft", "normal")], &[(1, "publish = false")]);
    }
}
