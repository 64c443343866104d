//! Output of all ranks, passed on by one thread: whole lines with their rank, nothing lost, both streams apart.

use std::{
    io::{self, ErrorKind, IsTerminal as _, PipeReader, PipeWriter, Read as _, Write},
    os::fd::{AsFd as _, OwnedFd},
    process::{ChildStderr, ChildStdout},
    sync::OnceLock,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anstyle::{AnsiColor, Color, Style};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How long the beginning of a line waits for its end, such as a question that wants an answer.
const PATIENCE: Duration = Duration::from_millis(100);

/// A line longer than this is passed on in pieces.
const LONGEST: usize = 64 << 10;

const COLOURS: [AnsiColor; 6] = [
    AnsiColor::Cyan,
    AnsiColor::Yellow,
    AnsiColor::Green,
    AnsiColor::Magenta,
    AnsiColor::Blue,
    AnsiColor::Red,
];

/// Where a rank's output goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Out,
    Err,
}

/// The thread that passes output on.
#[derive(Debug)]
pub(crate) struct Printer {
    thread: JoinHandle<()>,
    /// Closed when every rank has ended, since their children may hold the other pipes for ever.
    end: PipeWriter,
}

impl Printer {
    pub(crate) fn start(outputs: Vec<(ChildStdout, ChildStderr)>, has_prefix: bool) -> io::Result<Self> {
        let (ended, end) = io::pipe()?;
        let mut sources = Vec::new();
        for ((out, err), rank) in outputs.into_iter().zip(0..) {
            sources.push(Source::new(rank, Stream::Out, out.into()));
            sources.push(Source::new(rank, Stream::Err, err.into()));
        }
        let is_terminal = [io::stdout().is_terminal(), io::stderr().is_terminal()];
        let prefixes = is_terminal.map(|is_terminal| match (has_prefix, is_terminal && wants_colour()) {
            (false, _) => Prefix::None,
            (true, false) => Prefix::Plain,
            (true, true) => Prefix::Coloured,
        });
        let merge = Merge { sources, targets: prefixes.map(Target::new) };
        let thread = thread::Builder::new().name("output".into()).spawn(move || merge.run(&ended))?;
        Ok(Self { thread, end })
    }

    /// Waits until everything is passed on that the ranks have written.
    pub(crate) fn finish(self) {
        drop(self.end);
        // It has nothing to say but what it has printed.
        let _panicked = self.thread.join();
    }
}

/// As <https://no-color.org> wants it.
fn wants_colour() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefix {
    None,
    Plain,
    Coloured,
}

/// What one rank writes to one of its streams.
#[derive(Debug)]
struct Source {
    rank: u32,
    stream: Stream,
    /// None once it has ended.
    pipe: Option<std::fs::File>,
    /// The beginning of a line.
    pending: Vec<u8>,
    since: Instant,
}

impl Source {
    fn new(rank: u32, stream: Stream, pipe: OwnedFd) -> Self {
        Self { rank, stream, pipe: Some(pipe.into()), pending: Vec::new(), since: Instant::now() }
    }
}

/// One of our own streams.
#[derive(Debug)]
struct Target {
    prefix: Prefix,
    /// Whose line is not finished.
    open: Option<u32>,
}

impl Target {
    fn new(prefix: Prefix) -> Self {
        Self { prefix, open: None }
    }

    /// What to write for a piece of a rank's output.
    fn format(&mut self, rank: u32, bytes: &[u8], text: &mut Vec<u8>) {
        if self.prefix == Prefix::None {
            text.extend_from_slice(bytes);
            return;
        }
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.open.is_some_and(|open| open != rank) {
                // Somebody else's line was not finished; it goes on later, on a line of its own.
                text.push(b'\n');
                self.open = None;
            }
            if self.open.is_none() {
                text.extend_from_slice(mark(rank, self.prefix).as_bytes());
            }
            text.extend_from_slice(line);
            self.open = (!line.ends_with(b"\n")).then_some(rank);
        }
    }
}

fn mark(rank: u32, prefix: Prefix) -> String {
    if prefix == Prefix::Plain {
        return format!("[{rank}] ");
    }
    let style = Style::new().fg_color(Some(Color::Ansi(COLOURS[rank as usize % COLOURS.len()])));
    format!("{style}[{rank}]{style:#} ")
}

#[derive(Debug)]
struct Merge {
    sources: Vec<Source>,
    targets: [Target; 2],
}

impl Merge {
    fn run(mut self, ended: &PipeReader) {
        let mut is_ending = false;
        while self.sources.iter().any(|source| source.pipe.is_some()) {
            let timeout = if is_ending { Some(Duration::ZERO) } else { self.patience() };
            let (ready, has_ended) = self.wait(ended, timeout);
            // What the ranks wrote before their end is in the pipes by now.
            if is_ending && ready.is_empty() {
                break;
            }
            is_ending |= has_ended;
            for index in ready {
                self.read(index);
            }
            self.pass_on_beginnings(Instant::now());
        }
        for index in 0..self.sources.len() {
            self.pass_on(index);
        }
    }

    /// Until the oldest beginning of a line has waited long enough.
    fn patience(&self) -> Option<Duration> {
        let waiting = self.sources.iter().filter(|source| !source.pending.is_empty());
        waiting.map(|source| PATIENCE.saturating_sub(source.since.elapsed())).min()
    }

    /// Which sources have something to read, and whether every rank has ended.
    fn wait(&self, ended: &PipeReader, timeout: Option<Duration>) -> (Vec<usize>, bool) {
        let open = self.sources.iter().enumerate();
        let open = open.filter_map(|(index, source)| Some((index, source.pipe.as_ref()?)));
        let (indices, mut descriptors): (Vec<usize>, Vec<PollFd<'_>>) =
            open.map(|(index, pipe)| (index, PollFd::new(pipe, PollFlags::IN))).unzip();
        descriptors.push(PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if let Err(error) = poll(&mut descriptors, timeout.as_ref())
            && error != rustix::io::Errno::INTR
        {
            // Nothing can be waited for any more: what is there is passed on, then it ends.
            return (Vec::new(), true);
        }
        let has_ended = descriptors.pop().is_some_and(|ended| !ended.revents().is_empty());
        let ready = indices.into_iter().zip(&descriptors);
        (ready.filter(|(_, it)| !it.revents().is_empty()).map(|(index, _)| index).collect(), has_ended)
    }

    fn read(&mut self, index: usize) {
        let source = &mut self.sources[index];
        let Some(pipe) = &mut source.pipe else { return };
        let mut piece = [0; 16 << 10];
        let count = match pipe.read(&mut piece) {
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => return,
            Err(_) => 0,
        };
        if count == 0 {
            source.pipe = None;
            self.pass_on(index);
            return;
        }
        if source.pending.is_empty() {
            source.since = Instant::now();
        }
        source.pending.extend_from_slice(&piece[..count]);
        let is_raw = self.targets[source.stream as usize].prefix == Prefix::None;
        let whole = source.pending.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let whole =
            if is_raw || source.pending.len() - whole > LONGEST { source.pending.len() } else { whole };
        self.write(index, whole);
    }

    fn pass_on_beginnings(&mut self, now: Instant) {
        for index in 0..self.sources.len() {
            if now.duration_since(self.sources[index].since) >= PATIENCE {
                self.pass_on(index);
            }
        }
    }

    fn pass_on(&mut self, index: usize) {
        self.write(index, self.sources[index].pending.len());
    }

    /// Writes the first `count` pending bytes of a source.
    fn write(&mut self, index: usize, count: usize) {
        if count == 0 {
            return;
        }
        let source = &mut self.sources[index];
        let (rank, stream) = (source.rank, source.stream);
        let bytes: Vec<u8> = source.pending.drain(..count).collect();
        source.since = Instant::now();
        let mut text = Vec::with_capacity(bytes.len() + 16);
        self.targets[stream as usize].format(rank, &bytes, &mut text);
        let written = match stream {
            Stream::Out => write_all(io::stdout().lock(), &text),
            Stream::Err => write_all(io::stderr().lock(), &text),
        };
        if written.is_err() {
            // Nobody reads it any more (`| head`): the ranks are told as if they wrote there themselves.
            let of_stream = self.sources.iter_mut().filter(|source| source.stream == stream);
            of_stream.for_each(|source| (source.pipe, source.pending) = (None, Vec::new()));
        }
    }
}

fn write_all(mut target: impl Write, text: &[u8]) -> io::Result<()> {
    target.write_all(text)?;
    target.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pieces: &[(u32, &str)], expected: &str) {
        let mut target = Target::new(Prefix::Plain);
        let mut text = Vec::new();
        for (rank, piece) in pieces {
            target.format(*rank, piece.as_bytes(), &mut text);
        }
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }

    #[test]
    fn lines_get_their_rank() {
        check(&[(0, "a\nb\n"), (1, "c\n")], "[0] a\n[0] b\n[1] c\n");
        check(&[(0, "\n")], "[0] \n");
    }

    #[test]
    fn a_line_goes_on_where_it_was() {
        check(&[(0, "Name: "), (0, "x\n"), (1, "y\n")], "[0] Name: x\n[1] y\n");
        check(&[(0, "half"), (1, "y\n"), (0, "rest\n")], "[0] half\n[1] y\n[0] rest\n");
        check(&[(0, "no end")], "[0] no end");
    }

    #[test]
    fn without_prefixes_bytes_stay_as_they_are() {
        let mut target = Target::new(Prefix::None);
        let mut text = Vec::new();
        target.format(0, b"\xff\0half", &mut text);
        target.format(1, b"rest\n", &mut text);
        assert_eq!(text, b"\xff\0halfrest\n");
    }
}
