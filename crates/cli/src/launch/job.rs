//! Ranks as processes: their environment, their signals, their ends.

use std::{
    net::TcpListener,
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process_group, setrlimit, waitid,
};
use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use warpweft::bootstrap::{RunId, Token, role_variables};

use super::{
    Launch,
    print::Printer,
    summary::{Ended, RankEnd},
};

/// How often ends are looked for besides, should the news of one get lost.
const LOOK: Duration = Duration::from_secs(1);

/// The ranks of a launch that is under way.
#[derive(Debug)]
pub(crate) struct Job {
    ranks: Vec<Running>,
    signals: Receiver<i32>,
    printer: Printer,
    grace: Duration,
    started: Instant,
    /// Who failed first.
    first_failure: Option<usize>,
    /// When the others are killed.
    kill_at: Option<Instant>,
    /// How many signals were passed on.
    passed_on: u32,
    /// Holds the file by which the ranks meet.
    _folder: tempfile::TempDir,
}

#[derive(Debug)]
struct Running {
    child: Child,
    end: Option<RankEnd>,
    /// We have asked it to end.
    is_stopped: bool,
}

impl Job {
    pub(crate) fn start(args: &Launch, program: &Path) -> anyhow::Result<Self> {
        // Before the first rank, so that no end is missed.
        let signals = signals()?;
        let folder = tempfile::Builder::new().prefix("warpweft-").tempdir()?;
        let shared = shared_environment(args, folder.path())?;
        let started = Instant::now();
        let files = allow_files(args.ranks);
        let mut ranks: Vec<Running> = Vec::new();
        let mut outputs = Vec::new();
        for rank in 0..args.ranks {
            let child = command(args, program, rank, files).envs(shared.iter().map(|(k, v)| (k, v))).spawn();
            let mut child = match child.with_context(|| format!("rank {rank} could not be started")) {
                Ok(child) => child,
                Err(error) => {
                    ranks.iter_mut().for_each(|running| running.signal(Signal::KILL));
                    return Err(error);
                }
            };
            outputs.extend(child.stdout.take().zip(child.stderr.take()));
            ranks.push(Running { child, end: None, is_stopped: false });
        }
        let printer = Printer::start(outputs, !args.no_prefix, args.json)?;
        Ok(Self {
            ranks,
            signals,
            printer,
            grace: args.grace,
            started,
            first_failure: None,
            kill_at: None,
            passed_on: 0,
            _folder: folder,
        })
    }

    /// Waits until all ranks have ended, and sees to it that they do once one has failed.
    pub(crate) fn watch(mut self) -> anyhow::Result<Ended> {
        loop {
            self.look()?;
            if self.ranks.iter().all(|running| running.end.is_some()) {
                break;
            }
            let now = Instant::now();
            if self.kill_at.is_some_and(|at| at <= now) {
                self.kill_at = None;
                self.signal_all(Signal::KILL);
            }
            let wait = self.kill_at.map_or(LOOK, |at| at.saturating_duration_since(now).min(LOOK));
            match self.signals.recv_timeout(wait) {
                Ok(SIGCHLD) | Err(RecvTimeoutError::Timeout) => {}
                Ok(signal) => self.pass_on(signal),
                Err(RecvTimeoutError::Disconnected) => thread::sleep(wait),
            }
        }
        anyhow::ensure!(self.printer.finish(&self.signals), "ended before all output could be passed on");
        let ranks = self.ranks.into_iter().filter_map(|running| running.end).collect();
        Ok(Ended { ranks, first_failure: self.first_failure, time: self.started.elapsed() })
    }

    /// Notes who has ended since the last look.
    fn look(&mut self) -> anyhow::Result<()> {
        for rank in 0..self.ranks.len() {
            let running = &mut self.ranks[rank];
            if running.end.is_some() {
                continue;
            }
            if running.has_failed_by_itself() && self.passed_on == 0 {
                // Its children would go on without it, with what they hold of the devices.
                running.signal(Signal::TERM);
            }
            let Some(status) = running.child.try_wait()? else { continue };
            let end = running.ended(rank, status, self.started.elapsed());
            let has_failed = !status.success();
            running.end = Some(end);
            if has_failed && self.first_failure.is_none() {
                self.first_failure = Some(rank);
                self.stop();
            }
        }
        Ok(())
    }

    /// One has failed, and the others cannot go on without it.
    fn stop(&mut self) {
        self.kill_at = Some(Instant::now() + self.grace);
        for running in self.ranks.iter_mut().filter(|running| running.end.is_none()) {
            running.is_stopped = true;
            running.signal(Signal::TERM);
            // One that was stopped could not act on it.
            running.signal(Signal::CONT);
        }
    }

    fn pass_on(&mut self, signal: i32) {
        self.passed_on += 1;
        if self.passed_on > 1 {
            return self.signal_all(Signal::KILL);
        }
        if let Some(signal) = Signal::from_named_raw(signal) {
            self.signal_all(signal);
            // One that is stopped could not act on it.
            self.signal_all(Signal::CONT);
        }
    }

    fn signal_all(&mut self, signal: Signal) {
        self.ranks
            .iter_mut()
            .filter(|running| running.end.is_none())
            .for_each(|running| running.signal(signal));
    }
}

impl Running {
    /// To the rank and to what it has started.
    fn signal(&mut self, signal: Signal) {
        if let Some(pid) = self.pid() {
            // It has not been waited for, so the number is its own; it may have ended just now.
            let _ended = kill_process_group(pid, signal);
        }
    }

    /// Asked before it is waited for, since its number names its group only until then.
    fn has_failed_by_itself(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = self.pid().and_then(|pid| waitid(WaitId::Pid(pid), options).ok().flatten());
        !self.is_stopped && status.is_some_and(|status| status.exit_status() != Some(0))
    }

    fn pid(&self) -> Option<Pid> {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw)
    }

    fn ended(&self, rank: usize, status: ExitStatus, time: Duration) -> RankEnd {
        RankEnd {
            rank,
            pid: self.child.id(),
            code: status.code(),
            signal: status.signal(),
            is_stopped: self.is_stopped,
            time,
        }
    }
}

/// Signals that are passed on, and the news that a child has ended.
fn signals() -> anyhow::Result<Receiver<i32>> {
    let passed_on = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| *signal != SIGHUP || !is_nohup());
    let mut signals = Signals::new(passed_on.chain([SIGCHLD]))?;
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if sender.send(signal).is_err() {
                break;
            }
        }
    })?;
    Ok(receiver)
}

/// Whether we were started to ignore the end of the terminal, as by `nohup`: then the ranks do so too.
fn is_nohup() -> bool {
    // The system's own word, since asking for a signal's action takes unsafe code. Elsewhere it is not known.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & (1 << (SIGHUP - 1)) != 0)
}

/// Makes room for the pipes of all ranks; what was allowed before, if it was less.
fn allow_files(ranks: u32) -> Option<u64> {
    const OTHERS: u64 = 64;

    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let before = current?;
    let needed = 2 * u64::from(ranks) + OTHERS;
    let allowed = maximum.map_or(needed, |maximum| needed.min(maximum));
    // Where it is refused, the rank that finds no room says so.
    let is_raised =
        before < allowed && setrlimit(Resource::Nofile, Rlimit { current: Some(allowed), maximum }).is_ok();
    is_raised.then_some(before)
}

fn command(args: &Launch, program: &Path, rank: u32, files: Option<u64>) -> Command {
    let mut command = Command::new(program);
    command.args(&args.program[1..]);
    if cfg!(target_os = "linux") {
        // By way of ourselves: only the process itself can ask to end with its parent.
        command = Command::new("/proc/self/exe");
        command.args(["rank", "--launcher", &std::process::id().to_string()]);
        command.args(files.map(|files| format!("--files={files}")));
        command.arg("--");
        command.arg(program).args(&args.program[1..]);
    }
    role_variables().for_each(|variable| {
        command.env_remove(variable);
    });
    let rank_text = rank.to_string();
    for name in ["WARPWEFT_RANK", "WARPWEFT_LOCAL_RANK", "RANK", "LOCAL_RANK"] {
        command.env(name, &rank_text);
    }
    let takes_input = rank == 0 && !std::io::IsTerminal::is_terminal(&std::io::stdin());
    command.stdin(if takes_input { Stdio::inherit() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own, so that what a rank has started gets the signals too.
    command.process_group(0);
    command
}

/// What is the same for all ranks.
fn shared_environment(args: &Launch, folder: &Path) -> anyhow::Result<Vec<(&'static str, String)>> {
    let size = args.ranks.to_string();
    let port = match args.master_port {
        Some(port) => port,
        // Another program can take it before a rank does. Our own meeting needs no port that was chosen before.
        None => TcpListener::bind("127.0.0.1:0")?.local_addr()?.port(),
    };
    Ok(vec![
        ("WARPWEFT_WORLD_SIZE", size.clone()),
        ("WARPWEFT_LOCAL_WORLD_SIZE", size.clone()),
        ("WARPWEFT_ADDRESS", format!("file:{}", folder.join("rendezvous").display())),
        ("WARPWEFT_TOKEN", Token::random()?.reveal().to_owned()),
        ("WARPWEFT_RUN", RunId::random()?.to_string()),
        ("WORLD_SIZE", size.clone()),
        ("LOCAL_WORLD_SIZE", size),
        ("GROUP_RANK", "0".into()),
        ("MASTER_ADDR", "127.0.0.1".into()),
        ("MASTER_PORT", port.to_string()),
    ])
}
