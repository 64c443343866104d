//! Commands of other programs: each is printed before it runs.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, bail};

/// A program with its arguments and the variables set for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cmd {
    words: Vec<String>,
    variables: Vec<(String, String)>,
}

impl Cmd {
    /// A command from a line whose words hold no spaces; [`arg`](Self::arg) adds those that may.
    pub(crate) fn new(line: &str) -> Self {
        Self { words: line.split_whitespace().map(String::from).collect(), variables: Vec::new() }
    }

    pub(crate) fn program(path: &Path) -> Self {
        Self::new("").path(path)
    }

    pub(crate) fn arg(mut self, arg: impl Into<String>) -> Self {
        self.words.push(arg.into());
        self
    }

    pub(crate) fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.words.extend(args.into_iter().map(Into::into));
        self
    }

    pub(crate) fn path(self, path: &Path) -> Self {
        self.arg(path.display().to_string())
    }

    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.into(), value.into()));
        self
    }

    pub(crate) fn variables(mut self, variables: impl IntoIterator<Item = (String, String)>) -> Self {
        self.variables.extend(variables);
        self
    }

    /// Runs the command on our own terminal.
    pub(crate) fn run(&self) -> Result<()> {
        let status = self.start()?.status();
        self.judge(status.with_context(|| self.cannot_start())?)
    }

    /// Runs the command, shows what it prints and hands every line of it to `read`.
    pub(crate) fn run_reading(&self, mut read: impl FnMut(&str)) -> Result<()> {
        let mut child = self.start()?.stdout(Stdio::piped()).spawn().with_context(|| self.cannot_start())?;
        let output = child.stdout.take().context("the output was asked for as a pipe")?;
        for line in BufReader::new(output).split(b'\n') {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            read(&line);
        }
        self.judge(child.wait()?)
    }

    /// Runs the command and returns what it prints instead of showing it.
    pub(crate) fn output(&self) -> Result<String> {
        let output = self.start()?.stderr(Stdio::inherit()).output().with_context(|| self.cannot_start())?;
        self.judge(output.status)?;
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs the command and returns what it prints, errors too, instead of showing it; shows it on failure.
    pub(crate) fn all_output(&self) -> Result<String> {
        let output = self.start()?.output().with_context(|| self.cannot_start())?;
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let text = text.concat();
        if !output.status.success() {
            println!("{text}");
        }
        self.judge(output.status)?;
        Ok(text)
    }

    /// Whether the command can be started and succeeds; what it prints is dropped.
    pub(crate) fn succeeds(&self) -> Result<bool> {
        let status = self.start()?.stdout(Stdio::null()).stderr(Stdio::null()).status();
        Ok(status.is_ok_and(|status| status.success()))
    }

    fn start(&self) -> Result<Command> {
        println!("$ {self}");
        let (program, args) = self.words.split_first().context("a command has at least a program")?;
        let mut command = Command::new(program);
        command.args(args).envs(self.variables.iter().cloned());
        Ok(command)
    }

    fn cannot_start(&self) -> String {
        format!("`{}` cannot be started", self.words[0])
    }

    fn judge(&self, status: ExitStatus) -> Result<()> {
        if !status.success() {
            bail!("`{self}` failed ({status})");
        }
        Ok(())
    }
}

/// Shows the command as one would type it into a shell.
impl fmt::Display for Cmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let variables = self.variables.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
        let words = self.words.iter().map(|word| quoted(word));
        f.write_str(&variables.chain(words).collect::<Vec<_>>().join(" "))
    }
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_=./,:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_what_one_would_type() {
        let cmd = Cmd::new("cargo test --release").variable("RUSTFLAGS", "--cfg loom").arg("it's");
        assert_eq!(cmd.to_string(), r"RUSTFLAGS='--cfg loom' cargo test --release 'it'\''s'");
    }

    #[test]
    fn reads_lines_and_reports_failure() {
        let mut lines = Vec::new();
        let script = Cmd::new("sh -c").arg("echo one; echo two; exit 3");
        let error = script.run_reading(|line| lines.push(line.to_owned())).unwrap_err();
        assert_eq!(lines, ["one", "two"]);
        assert!(error.to_string().contains("exit status: 3"), "{error}");
    }

    #[test]
    fn names_a_program_that_is_not_there() {
        let error = Cmd::new("warpweft-no-such-program").run().unwrap_err();
        assert_eq!(error.to_string(), "`warpweft-no-such-program` cannot be started");
    }
}
