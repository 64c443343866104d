//! Packages of a Debian or an Ubuntu, downloaded and unpacked into a folder, with nothing installed.
//!
//! apt gets a state of its own, so that the system's is neither written nor has to be fresh, and no one has to
//! be root. It knows what is installed, and so which libraries are missing.

mod sources;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::cmd::Cmd;
use sources::Source;

/// What any one call of apt may take: a mirror that hangs must not hold a whole test run.
const LIMIT: &str = "timeout 180";

/// Where the system says which packages it takes from where, and which release it is.
const ETC: &str = "/etc/apt";
const RELEASE: &str = "/etc/os-release";

/// apt, with a state of its own.
#[derive(Debug)]
pub(crate) struct Apt {
    /// Absolute, as apt wants it.
    folder: PathBuf,
    sources: Vec<Source>,
    codenames: Vec<String>,
}

impl Apt {
    /// Whether this system's packages are apt's.
    pub(crate) fn is_here() -> Result<bool> {
        Ok(Path::new(ETC).is_dir() && Cmd::new("apt-get --version").succeeds()?)
    }

    /// Looks up what the machine's own sources have now.
    pub(crate) fn open(folder: &Path) -> Result<Self> {
        let codenames = sources::codenames(&fs::read_to_string(RELEASE).context(RELEASE)?);
        let sources = sources::of_release(&sources::read(Path::new(ETC))?, &codenames);
        if sources.is_empty() {
            bail!("{ETC} names no source of packages: add the distribution's own");
        }
        let this = Self { folder: std::path::absolute(folder)?, sources, codenames };
        for part in ["sources", "state/lists/partial", "cache/archives/partial", "alone"] {
            fs::create_dir_all(this.folder.join(part))?;
        }
        fs::write(this.configuration(), this.settings()?)?;
        this.write_sources("release.sources", &this.sources)?;
        this.update()?;
        Ok(this)
    }

    /// The version that would be installed.
    pub(crate) fn candidate(&self, package: &str) -> Result<Option<String>> {
        let policy = self.own(Cmd::new("apt-cache policy").arg(package)).output()?;
        Ok(candidate(&policy).map(String::from))
    }

    /// Adds newer packages for this release, and says by which name to ask for them.
    pub(crate) fn add_backports(&self) -> Result<String> {
        let backports = sources::backports(&self.sources, &self.codenames);
        let (suite, source) = backports.context("no source of this release is known to have backports")?;
        self.write_sources("backports.sources", &[source])?;
        self.update()?;
        Ok(suite)
    }

    /// Unpacks a package, and all that it needs and the system lacks.
    pub(crate) fn unpack(&self, package: &str, into: &Path) -> Result<()> {
        // The package itself comes even if it is installed: whoever asks did not find what is in it.
        let install = "apt-get install --download-only --reinstall --yes --no-install-recommends --quiet";
        self.own(Cmd::new(LIMIT).args(install.split(' ')).arg(package)).run()?;
        unpack_all(&self.folder.join("cache/archives"), into)
    }

    /// Unpacks one package without what it needs.
    pub(crate) fn unpack_alone(&self, package: &str, into: &Path) -> Result<()> {
        let downloads = self.folder.join("alone");
        let there = Cmd::new(LIMIT).arg("env").arg(format!("--chdir={}", downloads.display()));
        self.own(there.args(["apt-get", "download", "--quiet"]).arg(package)).run()?;
        unpack_all(&downloads, into)
    }

    fn update(&self) -> Result<()> {
        self.own(Cmd::new(LIMIT).args(["apt-get", "update", "--quiet"])).run()
    }

    fn own(&self, command: Cmd) -> Cmd {
        command.variable("APT_CONFIG", &self.configuration().display().to_string()).variable("LC_ALL", "C")
    }

    fn configuration(&self) -> PathBuf {
        self.folder.join("apt.conf")
    }

    fn write_sources(&self, file: &str, sources: &[Source]) -> Result<()> {
        let stanzas: Vec<_> = sources.iter().map(ToString::to_string).collect();
        Ok(fs::write(self.folder.join("sources").join(file), stanzas.join("\n"))?)
    }

    fn settings(&self) -> Result<String> {
        let of_machine = Cmd::new("apt-config dump").output()?;
        let folder = self.folder.display();
        let mut settings = String::new();
        // The machine's own settings run hooks and name folders of the system, so they are not read.
        for (name, value) in [
            ("Dir::Etc::parts", "/dev/null".into()),
            ("Dir::Etc::main", "/dev/null".into()),
            ("Dir::Etc::sourcelist", "/dev/null".into()),
            ("Dir::Etc::sourceparts", format!("{folder}/sources")),
            ("Dir::State", format!("{folder}/state")),
            ("Dir::State::status", "/var/lib/dpkg/status".into()),
            ("Dir::Cache", format!("{folder}/cache")),
            // Root's downloads would be another user's, who need not reach this folder.
            ("APT::Sandbox::User", "root".into()),
            // Nothing is installed, and the locks are the system's.
            ("Debug::NoLocking", "true".into()),
            ("Acquire::Languages", "none".into()),
            ("Acquire::Retries", "2".into()),
        ] {
            writeln!(settings, "{name} \"{value}\";")?;
        }
        for line in of_machine.lines().filter(|line| reaches_mirrors(line)) {
            writeln!(settings, "{line}")?;
        }
        Ok(settings)
    }
}

/// Whether a line of `apt-config dump` tells how to reach mirrors: proxies, time limits, dates.
fn reaches_mirrors(line: &str) -> bool {
    let elsewhere = ["IndexTargets", "Changelogs", "Languages", "CompressionTypes"];
    line.strip_prefix("Acquire::").is_some_and(|rest| !elsewhere.iter().any(|name| rest.starts_with(name)))
}

/// Reads what `apt-cache policy` prints.
fn candidate(policy: &str) -> Option<&str> {
    let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    (version != "(none)").then_some(version)
}

/// Unpacks the packages of a folder and empties it.
fn unpack_all(packages: &Path, into: &Path) -> Result<()> {
    fs::create_dir_all(into)?;
    for entry in fs::read_dir(packages)? {
        let package = entry?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            Cmd::new("dpkg -x").path(&package).path(into).run()?;
            fs::remove_file(package)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_candidate_is_read() {
        let policy =
            "mesa-vulkan-drivers:\n  Installed: (none)\n  Candidate: 22.3.6-1+deb12u2\n  Version table:\n";
        assert_eq!(candidate(policy), Some("22.3.6-1+deb12u2"));
        assert_eq!(candidate("none:\n  Installed: (none)\n  Candidate: (none)\n"), None);
        assert_eq!(candidate(""), None);
    }

    #[test]
    fn only_settings_of_the_network_are_taken_over() {
        let check = |line: &str, expected| assert_eq!(reaches_mirrors(line), expected, "{line}");
        check(r#"Acquire::http::Proxy "http://proxy:3128";"#, true);
        check(r#"Acquire::Check-Date "false";"#, true);
        check(r#"Acquire::Languages:: "none";"#, false);
        check(r#"Acquire::IndexTargets::deb::DEP-11 "";"#, false);
        check(r#"APT::Update::Post-Invoke:: "refresh";"#, false);
        check(r#"Dir::Cache "var/cache/apt";"#, false);
    }
}
