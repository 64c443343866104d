//! Starting members, telling them what to do and hearing what came of it.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};

pub(crate) struct Actor {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Actor {
    pub(crate) fn start(words: &[&str]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("member").args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
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

    pub(crate) fn ask(&mut self, words: &str) -> String {
        self.tell(words);
        self.hear()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
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

/// A job that meets at a file in a folder of its own.
pub(crate) struct Cast {
    pub(crate) actors: Vec<Actor>,
    folder: tempfile::TempDir,
}

impl Cast {
    /// Starts the members, and does not wait until they have met.
    pub(crate) fn start(size: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = format!("file:{}", folder.path().join("rendezvous").display());
        let member = |rank: u32| {
            let (rank, size) = (rank.to_string(), size.to_string());
            Actor::start(&[&rank, &size, &address, "-", "run", "30000"])
        };
        Self { actors: (0..size).map(member).collect(), folder }
    }

    pub(crate) fn met(size: u32) -> Self {
        let mut cast = Self::start(size);
        for (actor, rank) in cast.actors.iter_mut().zip(0..) {
            assert_eq!(actor.hear(), format!("joined {rank} {size} 0"));
        }
        cast
    }

    pub(crate) fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("rendezvous")
    }

    /// Tells all of them, then hears all of them.
    pub(crate) fn ask_all(&mut self, words: &str) -> Vec<String> {
        self.actors.iter_mut().for_each(|actor| actor.tell(words));
        self.actors.iter_mut().map(Actor::hear).collect()
    }
}
