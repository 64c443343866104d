//! The processes: starting them, telling them what to do, hearing what came of it.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Instant,
};

use anyhow::{Context as _, bail, ensure};

/// A line, and when it came.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) words: String,
    pub(super) at: Instant,
}

/// One process.
pub(super) struct Actor {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Said>,
    device: u32,
}

impl Actor {
    pub(super) fn start(words: &[String], device: u32) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words).arg(device.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("a rank could not be started")?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().context("it was piped")?);
        let (sender, lines) = mpsc::channel();
        // It ends with the process.
        thread::spawn(move || {
            for words in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(Said { words, at: Instant::now() }).is_err() {
                    break;
                }
            }
        });
        Ok(Self { child, stdin, lines, device })
    }

    /// The number of its device, which whoever comes in its place gets too.
    pub(super) const fn device(&self) -> u32 {
        self.device
    }

    pub(super) fn tell(&mut self, line: &str) -> anyhow::Result<()> {
        writeln!(self.stdin.as_mut().context("it listens")?, "{line}").context("a rank has ended")
    }

    /// The next line.
    pub(super) fn hear(&mut self, end: Instant) -> anyhow::Result<Said> {
        match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(said) => Ok(said),
            Err(RecvTimeoutError::Timeout) => bail!("it said nothing in time"),
            Err(RecvTimeoutError::Disconnected) => bail!("it has ended"),
        }
    }

    /// Hears these words, and nothing else.
    pub(super) fn expect(&mut self, words: &str, end: Instant) -> anyhow::Result<Instant> {
        let said = self.hear(end).with_context(|| format!("{words:?} was expected"))?;
        ensure!(said.words == words, "{words:?} was expected, and it said {:?}", said.words);
        Ok(said.at)
    }

    /// As `kill -9` does.
    pub(super) fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.stdin = None;
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}
