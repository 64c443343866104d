//! `features`: every crate builds without its features, with each alone and with all.

use anyhow::Result;

use crate::cmd::Cmd;
use crate::report::Report;
use crate::workspace::{Package, Workspace};

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut report = Report::default();
    for package in &workspace.packages {
        let choices = choices(package);
        if choices.is_empty() {
            continue;
        }
        let check = Cmd::new("cargo check --locked --no-default-features --package").arg(&package.name);
        report
            .step(&package.name, |_| choices.iter().try_for_each(|choice| check.clone().args(choice).run()));
    }
    report.finish()
}

/// The arguments of each build: none when the package has no features of its own.
fn choices(package: &Package) -> Vec<Vec<String>> {
    let public: Vec<_> =
        package.features.keys().filter(|name| *name != "default" && !name.starts_with("__")).collect();
    if public.is_empty() {
        return Vec::new();
    }
    let alone = public.iter().map(|&name| vec!["--features".into(), name.clone()]);
    let mut choices: Vec<_> = [Vec::new()].into_iter().chain(alone).collect();
    if public.len() > 1 {
        choices.push(vec!["--all-features".into()]);
    }
    choices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(features: &[&str], expected: &[&str]) {
        let features = features.iter().map(|&name| (name.into(), Vec::new())).collect();
        let package = Package { features, ..Package::default() };
        let found: Vec<_> = choices(&package).iter().map(|choice| choice.join(" ")).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn none_each_alone_and_all() {
        check(&["default"], &[]);
        check(&["__private", "default", "host"], &["", "--features host"]);
        check(&["cuda", "host"], &["", "--features cuda", "--features host", "--all-features"]);
    }
}
