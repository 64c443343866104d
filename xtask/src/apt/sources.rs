//! Where a machine's packages come from, in both notations that apt knows.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// One or more releases at one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Source {
    uris: String,
    suites: Vec<String>,
    components: String,
    /// Everything else that is said about them, such as the keys that sign them.
    options: Vec<(String, String)>,
}

/// The sources below a folder like `/etc/apt`.
pub(super) fn read(etc: &Path) -> Result<Vec<Source>> {
    let mut files: Vec<PathBuf> = fs::read_dir(etc.join("sources.list.d"))
        .into_iter()
        .flatten()
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.push(etc.join("sources.list"));
    files.sort();
    let mut sources = Vec::new();
    for file in files.iter().filter(|file| file.is_file()) {
        let text = || fs::read_to_string(file).with_context(|| file.display().to_string());
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(parse_lines(&text()?)),
            Some("sources") => sources.extend(parse_stanzas(&text()?)),
            // apt passes over other endings too.
            _ => {}
        }
    }
    Ok(sources)
}

/// The names of the release that `/etc/os-release` gives: the system's own and that of what it derives from.
pub(super) fn codenames(os_release: &str) -> Vec<String> {
    let pairs = os_release.lines().filter_map(|line| line.split_once('='));
    let names = pairs.filter(|(key, _)| key.ends_with("_CODENAME"));
    names.map(|(_, name)| name.trim_matches(['"', '\'']).to_owned()).collect()
}

/// Only what belongs to the distribution, so that nobody waits for other sources or fails with them.
///
/// A machine whose sources say `testing` where its release has a name keeps them all.
pub(super) fn of_release(sources: &[Source], codenames: &[String]) -> Vec<Source> {
    let belongs = |suite: &String| {
        let mut rests = codenames.iter().filter_map(|name| suite.strip_prefix(name.as_str()));
        rests.any(|rest| rest.is_empty() || rest.starts_with(['-', '/']))
    };
    let kept = sources.iter().map(|source| source.with_suites(source.suites.iter().filter(|s| belongs(s))));
    let kept: Vec<Source> = kept.filter(|source| !source.suites.is_empty()).collect();
    if kept.is_empty() { sources.to_vec() } else { kept }
}

/// Newer packages for the release from the places that its own come from, and the name of their suite.
pub(super) fn backports(sources: &[Source], codenames: &[String]) -> Option<(String, Source)> {
    codenames.iter().find_map(|codename| {
        let suite = format!("{codename}-backports");
        let base = sources.iter().find(|source| {
            source.suites.contains(codename) && source.components.split_whitespace().any(|c| c == "main")
        })?;
        Some((suite.clone(), base.with_suites([&suite])))
    })
}

impl Source {
    fn with_suites<'a>(&self, suites: impl IntoIterator<Item = &'a String>) -> Self {
        Self { suites: suites.into_iter().cloned().collect(), ..self.clone() }
    }
}

/// Shows the source as a stanza.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Types: deb\nURIs: {}\nSuites: {}", self.uris, self.suites.join(" "))?;
        writeln!(f, "Components: {}", self.components)?;
        self.options.iter().try_for_each(|(name, value)| writeln!(f, "{name}: {value}"))
    }
}

/// Lines such as `deb [signed-by=/a/key] http://mirror/debian bookworm main`.
fn parse_lines(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_line).collect()
}

fn parse_line(line: &str) -> Option<Source> {
    let rest = line.split('#').next()?.trim().strip_prefix("deb")?;
    let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(bracketed) => bracketed.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace();
    Some(Source {
        uris: words.next()?.into(),
        suites: vec![words.next()?.into()],
        components: words.collect::<Vec<_>>().join(" "),
        options: options.split_whitespace().filter_map(|option| option.split_once('=')).map(field).collect(),
    })
}

/// A stanza's word for an option of a line.
fn field((name, value): (&str, &str)) -> (String, String) {
    let name = match name {
        "arch" => "Architectures",
        "lang" => "Languages",
        "target" => "Targets",
        same => same,
    };
    (name.into(), value.replace(',', " "))
}

/// Stanzas such as those of `debian.sources`.
fn parse_stanzas(text: &str) -> Vec<Source> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).filter_map(parse_stanza).collect()
}

fn parse_stanza(lines: &[&str]) -> Option<Source> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in lines {
        match (line.starts_with([' ', '\t']), fields.last_mut()) {
            // A key may stand in the stanza itself, over many lines.
            (true, Some((_, value))) => *value += &format!("\n{line}"),
            _ => {
                let (name, value) = line.split_once(':')?;
                fields.push((name.trim().into(), value.trim().into()));
            }
        }
    }
    let mut take = |name: &str| {
        let index = fields.iter().position(|(field, _)| field.eq_ignore_ascii_case(name))?;
        Some(fields.remove(index).1)
    };
    let packages = take("Types")?.split_whitespace().any(|kind| kind == "deb");
    let enabled = take("Enabled").is_none_or(|value| !["no", "false", "off", "0"].contains(&value.as_str()));
    let source = Source {
        uris: take("URIs")?,
        suites: take("Suites")?.split_whitespace().map(String::from).collect(),
        components: take("Components").unwrap_or_default(),
        options: fields,
    };
    (packages && enabled).then_some(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(sources: &[Source]) -> String {
        sources.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    fn owned(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.into()).collect()
    }

    #[test]
    fn lines_become_stanzas() {
        let check = |line: &str, expected: &str| assert_eq!(shown(&parse_lines(line)), expected);
        check(
            "deb http://mirror/debian bookworm main contrib # ours",
            "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm\nComponents: main contrib\n",
        );
        check(
            "deb [ arch=amd64,arm64 signed-by=/a/key ] http://mirror/debian noble main",
            "Types: deb\nURIs: http://mirror/debian\nSuites: noble\nComponents: main\n\
             Architectures: amd64 arm64\nsigned-by: /a/key\n",
        );
        for nothing in
            ["", "# deb http://a b c", "deb-src http://a b c", "deb", "deb http://a", "deb [x http://a"]
        {
            check(nothing, "");
        }
    }

    #[test]
    fn stanzas_keep_what_is_said_of_them() {
        let text = "# a comment\nTypes: deb deb-src\nURIs: http://mirror/debian\n# another\n\
                    Suites: bookworm bookworm-updates\nComponents: main\nSigned-By:\n -----BEGIN\n .\n -----END\n\n\n\
                    Types: deb\nEnabled: no\nURIs: http://b\nSuites: bookworm\nComponents: main\n\n\
                    Types: deb-src\nURIs: http://c\nSuites: bookworm\nComponents: main\n\nno stanza\n";
        assert_eq!(
            shown(&parse_stanzas(text)),
            "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm bookworm-updates\nComponents: main\n\
             Signed-By: \n -----BEGIN\n .\n -----END\n"
        );
    }

    #[test]
    fn the_distributions_own_sources_are_kept() {
        let text = "deb http://a bookworm main\ndeb http://a bookworm-updates main\n\
                    deb http://b bookworm/updates main\ndeb http://c nodistro main\ndeb http://d bookwormish main\n";
        let check = |codenames: &[&str], expected: &[&str]| {
            let kept = of_release(&parse_lines(text), &owned(codenames));
            let suites: Vec<_> = kept.iter().flat_map(|source| &source.suites).collect();
            assert_eq!(suites, expected);
        };
        check(&["bookworm"], &["bookworm", "bookworm-updates", "bookworm/updates"]);
        check(&["other"], &["bookworm", "bookworm-updates", "bookworm/updates", "nodistro", "bookwormish"]);
    }

    #[test]
    fn backports_come_from_where_the_release_does() {
        let text = "deb [signed-by=/x] http://containers bookworm stable\n\
                    deb http://security bookworm-security main\n\
                    deb [signed-by=/k] http://mirror/debian bookworm main\n";
        let (suite, source) = backports(&parse_lines(text), &owned(&["bookworm"])).unwrap();
        assert_eq!(suite, "bookworm-backports");
        assert_eq!(
            source.to_string(),
            "Types: deb\nURIs: http://mirror/debian\nSuites: bookworm-backports\nComponents: main\nsigned-by: /k\n"
        );
        assert!(backports(&parse_lines(text), &owned(&["trixie"])).is_none());
    }

    #[test]
    fn a_release_may_have_two_names() {
        let text = "NAME=\"Some\"\nVERSION_CODENAME=wilma\nUBUNTU_CODENAME=\"noble\"\n";
        assert_eq!(codenames(text), ["wilma", "noble"]);
    }
}
