//! Starting processes, telling them what to do and hearing what came of it.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

pub(crate) struct Actor {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Actor {
    fn start(words: &[String]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("rank").args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    pub(crate) fn tell(&mut self, words: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{words}").unwrap();
    }

    /// The next line; empty once it has ended.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// As `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        self.stdin = None;
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// Processes, each with some ranks of one communicator.
pub(crate) struct Cast {
    pub(crate) actors: Vec<Actor>,
    _folder: tempfile::TempDir,
}

impl Cast {
    /// As many ranks in each process as are said, in order; with settings as [`crate::rank::config`] reads them.
    pub(crate) fn met(ranks: &[u32], config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rendezvous").display().to_string();
        let size: u32 = ranks.iter().sum();
        let mut first = 0;
        let mut actors = Vec::new();
        for count in ranks {
            let words = [first, *count, size].map(|number| number.to_string());
            actors.push(Actor::start(&[words.as_slice(), &[path.clone(), config.to_owned()]].concat()));
            first += count;
        }
        let mut cast = Self { actors, _folder: folder };
        assert_eq!(cast.hear_all(), vec!["joined"; ranks.len()]);
        cast
    }

    pub(crate) fn ask_all(&mut self, words: &str) -> Vec<String> {
        self.actors.iter_mut().for_each(|actor| actor.tell(words));
        self.hear_all()
    }

    pub(crate) fn hear_all(&mut self) -> Vec<String> {
        self.actors.iter_mut().map(Actor::hear).collect()
    }
}
