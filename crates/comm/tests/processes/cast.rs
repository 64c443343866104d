//! Starting ranks, telling them what to do and hearing what came of it.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

pub(crate) struct Actor {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Actor {
    fn start(words: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("rank").args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    /// A process that was not there; `successor` is what a survivor answered to that word.
    pub(crate) fn start_again(successor: &str) -> Self {
        let words: Vec<&str> = ["again"].into_iter().chain(successor.split(' ')).collect();
        Self::start(&words)
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

    pub(crate) fn ask(&mut self, words: &str) -> String {
        self.tell(words);
        self.hear()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        // It ends by itself when there is nothing more to read; one that is stopped does not.
        self.stdin = None;
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// The ranks of one communicator, by rank.
pub(crate) struct Cast {
    pub(crate) actors: Vec<Actor>,
    folder: tempfile::TempDir,
}

impl Cast {
    pub(crate) fn met(size: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let start = |rank: u32| {
            let (rank, size) = (rank.to_string(), size.to_string());
            Actor::start(&["first", &rank, &size, folder.path().to_str().unwrap()])
        };
        let mut cast = Self { actors: (0..size).map(start).collect(), folder };
        cast.expect_places();
        cast
    }

    /// Where they write their records.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn kill(&mut self, victim: usize) {
        self.actors.remove(victim).kill();
    }

    pub(crate) fn tell_all(&mut self, words: &str) {
        self.actors.iter_mut().for_each(|actor| actor.tell(words));
    }

    pub(crate) fn hear_all(&mut self) -> Vec<String> {
        self.actors.iter_mut().map(Actor::hear).collect()
    }

    /// Tells all of them, then hears all of them.
    pub(crate) fn ask_all(&mut self, words: &str) -> Vec<String> {
        self.tell_all(words);
        self.hear_all()
    }

    /// Asks all of them, who have to answer the same.
    pub(crate) fn expect_all(&mut self, words: &str, answer: &str) {
        assert_eq!(self.ask_all(words), vec![answer; self.actors.len()], "{words}");
    }

    /// Hears from all of them that they have a communicator, in the order in which they stand here.
    pub(crate) fn expect_places(&mut self) {
        let size = self.actors.len();
        let engine = if size == 1 { "solo" } else { "host" };
        let places: Vec<_> = (0..size).map(|rank| format!("rank {rank} of {size} by {engine}")).collect();
        assert_eq!(self.hear_all(), places);
    }
}
