//! Output of all ranks, passed on by one thread: whole lines with their rank, nothing lost, both streams apart.

use std::{
    io::{self, ErrorKind, IsTerminal as _, PipeReader, PipeWriter, Read as _},
    os::fd::{AsFd, OwnedFd},
    process::{ChildStderr, ChildStdout},
    sync::{
        OnceLock,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use anstyle::{AnsiColor, Color, Style};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use signal_hook::consts::SIGCHLD;

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
    /// Disconnected once everything is passed on.
    finished: Receiver<()>,
    /// Closed when every rank has ended, since their children may hold the other pipes for ever.
    end: PipeWriter,
}

impl Printer {
    /// With prefixes the last line always gets its end; `ends_lines` does it without, for what is printed after.
    pub(crate) fn start(
        outputs: Vec<(ChildStdout, ChildStderr)>,
        has_prefix: bool,
        ends_lines: bool,
    ) -> io::Result<Self> {
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
        let ends_lines = ends_lines || has_prefix;
        let merge = Merge { sources, targets: prefixes.map(Target::new), ends_lines };
        let (is_running, finished) = mpsc::channel();
        thread::Builder::new().name("output".into()).spawn(move || {
            let _until_the_end = is_running;
            merge.run(&ended);
        })?;
        Ok(Self { finished, end })
    }

    /// Waits until everything is passed on that the ranks have written; false if a signal came before.
    ///
    /// A reader that does not read (a pager, a stopped program) would otherwise hold the launcher up for good.
    pub(crate) fn finish(self, signals: &Receiver<i32>) -> bool {
        drop(self.end);
        while self.finished.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            if signals.try_iter().any(|signal| signal != SIGCHLD) {
                return false;
            }
        }
        true
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
            self.open = (!bytes.ends_with(b"\n")).then_some(rank);
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
    /// Whether a line that was left open is ended at last.
    ends_lines: bool,
}

impl Merge {
    fn run(mut self, ended: &PipeReader) {
        while self.sources.iter().any(|source| source.pipe.is_some()) {
            let (ready, has_ended) = self.wait(ended, self.patience());
            if has_ended {
                self.drain();
                break;
            }
            for index in ready {
                self.read(index);
            }
            self.pass_on_beginnings(Instant::now());
        }
        for index in 0..self.sources.len() {
            self.pass_on(index);
        }
        for stream in [Stream::Out, Stream::Err] {
            if self.ends_lines && self.targets[stream as usize].open.is_some() {
                // Nobody reads it any more, and nothing follows.
                let _closed = stream.write_all(b"\n");
            }
        }
    }

    /// Reads what the ranks wrote before their end, which is in the pipes by now.
    ///
    /// No more than that: a child that a rank has left behind may write for ever.
    fn drain(&mut self) {
        let left = self.sources.iter().map(|source| source.pipe.as_ref().map(rustix::io::ioctl_fionread));
        let left: Vec<u64> = left.map(|left| left.and_then(Result::ok).unwrap_or(0)).collect();
        for (index, mut left) in left.into_iter().enumerate() {
            while left > 0 {
                let count = self.read(index);
                left = if count == 0 { 0 } else { left.saturating_sub(count as u64) };
            }
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

    /// How many bytes there were, none at the end.
    fn read(&mut self, index: usize) -> usize {
        let source = &mut self.sources[index];
        let Some(pipe) = &mut source.pipe else { return 0 };
        let mut piece = [0; 16 << 10];
        let count = loop {
            match pipe.read(&mut piece) {
                Ok(count) => break count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => break 0,
            }
        };
        if count == 0 {
            source.pipe = None;
            self.pass_on(index);
            return 0;
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
        count
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
        if stream.write_all(&text).is_err() {
            // Nobody reads it any more (`| head`): the ranks are told as if they wrote there themselves.
            let of_stream = self.sources.iter_mut().filter(|source| source.stream == stream);
            of_stream.for_each(|source| (source.pipe, source.pending) = (None, Vec::new()));
            self.targets[stream as usize].open = None;
        }
    }
}

impl Stream {
    fn write_all(self, text: &[u8]) -> rustix::io::Result<()> {
        match self {
            Self::Out => write_all(io::stdout(), text),
            Self::Err => write_all(io::stderr(), text),
        }
    }
}

/// Not through the standard library, which does not say how much went when a write would block.
fn write_all(target: impl AsFd, mut text: &[u8]) -> rustix::io::Result<()> {
    while !text.is_empty() {
        match rustix::io::write(&target, text) {
            Ok(count) => text = &text[count..],
            Err(Errno::INTR) => {}
            // Somebody who shares the terminal or the pipe has made it so that writes do not wait.
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(&target, PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            },
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
        assert!(target.open.is_some());
        target.format(1, b"rest\n", &mut text);
        assert_eq!(target.open, None);
        assert_eq!(text, b"\xff\0halfrest\n");
    }

    #[test]
    fn a_target_that_does_not_wait_gets_everything() {
        let (mut reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let text: Vec<u8> = (0..1_000_000_u32).flat_map(u32::to_le_bytes).collect();
        let sent = text.clone();
        let sender = thread::spawn(move || write_all(writer, &sent));
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        sender.join().unwrap().unwrap();
        assert!(got == text, "{} of {} bytes", got.len(), text.len());
    }
}
