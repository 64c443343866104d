//! What `cargo metadata` says about the workspace, with every path relative to its root.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Deserialize;

use crate::cmd::Cmd;

/// The members of the workspace and where their builds go.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    #[serde(rename = "target_directory")]
    pub(crate) target: PathBuf,
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) description: Option<String>,
    pub(crate) readme: Option<PathBuf>,
    /// `None`: anywhere, an empty list: nowhere.
    pub(crate) publish: Option<Vec<String>>,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) features: BTreeMap<String, Vec<String>>,
    pub(crate) targets: Vec<Target>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None` for a normal one, else `dev` or `build`.
    pub(crate) kind: Option<String>,
    pub(crate) path: Option<PathBuf>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<TargetKind>,
    pub(crate) src_path: PathBuf,
}

/// The kinds of target that some verb or rule asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TargetKind {
    Lib,
    ProcMacro,
    Bin,
    Test,
    Bench,
    #[serde(other)]
    Other,
}

impl Workspace {
    /// Asks cargo, after making the workspace's root the current folder.
    pub(crate) fn load() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the workspace")?;
        std::env::set_current_dir(root).with_context(|| format!("cannot enter {}", root.display()))?;
        let metadata = Cmd::new("cargo metadata --no-deps --format-version 1 --locked").output()?;
        Self::from_metadata(&metadata)
    }

    fn from_metadata(metadata: &str) -> Result<Self> {
        let mut this: Self = serde_json::from_str(metadata).context("cargo metadata is not as expected")?;
        make_relative(&this.root, &mut this.target);
        for package in &mut this.packages {
            make_relative(&this.root, &mut package.manifest_path);
            for path in package.dependencies.iter_mut().filter_map(|used| used.path.as_mut()) {
                make_relative(&this.root, path);
            }
            for target in &mut package.targets {
                make_relative(&this.root, &mut target.src_path);
            }
        }
        Ok(this)
    }

    /// The targets of one kind in all packages, each with its package.
    pub(crate) fn targets(&self, kind: TargetKind) -> impl Iterator<Item = (&Package, &Target)> {
        let packages = self.packages.iter();
        packages.flat_map(move |package| package.targets(kind).map(move |target| (package, target)))
    }

    /// The package whose folder holds `path`; the innermost, if several do.
    pub(crate) fn package_of(&self, path: &Path) -> Option<&Package> {
        let around = self.packages.iter().filter(|package| path.starts_with(package.folder()));
        around.max_by_key(|package| package.folder().components().count())
    }

    pub(crate) fn has_target(&self, kind: TargetKind, name: &str) -> bool {
        self.targets(kind).any(|(_, target)| target.name == name)
    }
}

impl Package {
    /// The folder of the package, such as `crates/backends/host`.
    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new(""))
    }

    /// The name `layers.toml` knows the package by: its folder, without a leading `crates/`.
    pub(crate) fn id(&self) -> String {
        crate_id(self.folder())
    }

    pub(crate) fn targets(&self, kind: TargetKind) -> impl Iterator<Item = &Target> {
        self.targets.iter().filter(move |target| target.kind.contains(&kind))
    }

    /// The files that the compiler starts from to build what others use.
    pub(crate) fn roots(&self) -> impl Iterator<Item = &Path> {
        let used = [TargetKind::Lib, TargetKind::ProcMacro, TargetKind::Bin];
        used.into_iter().flat_map(|kind| self.targets(kind)).map(|target| target.src_path.as_path())
    }

    pub(crate) fn depends_on(&self, name: &str) -> bool {
        self.dependencies.iter().any(|dependency| dependency.name == name)
    }
}

/// The name `layers.toml` knows the package in `folder` by.
pub(crate) fn crate_id(folder: &Path) -> String {
    folder.strip_prefix("crates").unwrap_or(folder).display().to_string()
}

fn make_relative(root: &Path, path: &mut PathBuf) {
    if let Ok(relative) = path.strip_prefix(root) {
        *path = relative.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_relative_to_the_root() {
        let workspace = Workspace::from_metadata(
            r#"{
                "workspace_root": "/w", "target_directory": "/elsewhere/target",
                "packages": [{
                    "name": "warpweft-host", "manifest_path": "/w/crates/backends/host/Cargo.toml",
                    "dependencies": [{ "name": "warpweft-core-types", "path": "/w/crates/core-types" }],
                    "targets": [{ "name": "warpweft_host", "kind": ["lib"], "src_path": "/w/crates/backends/host/src/lib.rs" }]
                }]
            }"#,
        )
        .unwrap();
        let package = &workspace.packages[0];
        assert_eq!(package.id(), "backends/host");
        assert_eq!(package.dependencies[0].path.as_deref(), Some(Path::new("crates/core-types")));
        assert_eq!(package.targets[0].src_path, Path::new("crates/backends/host/src/lib.rs"));
        assert_eq!(workspace.target, Path::new("/elsewhere/target"));
        assert!(workspace.has_target(TargetKind::Lib, "warpweft_host"));
        assert!(!workspace.has_target(TargetKind::Bin, "warpweft_host"));
        let owner = |path: &str| workspace.package_of(Path::new(path)).map(|package| package.name.as_str());
        assert_eq!(owner("crates/backends/host/src/arena.rs"), Some("warpweft-host"));
        assert_eq!(owner("docs/style.md"), None);
    }
}
