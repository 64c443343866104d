//! Other processes, which are ended when they take too long.

use std::{
    io::{self, Read},
    os::unix::process::CommandExt as _,
    process::{Child, Command, ExitStatus, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

/// Time for a process to end by itself once it was asked to.
const GRACE: Duration = Duration::from_secs(10);

/// How often a process is looked at.
const BETWEEN: Duration = Duration::from_millis(5);

/// This program with other arguments, whose words are kept.
pub(crate) fn this_program(args: &[&str]) -> Command {
    let program = std::env::current_exe().unwrap_or_else(|_| "gpu-suite".into());
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs the command to its end and gives what it wrote; an error if it takes longer.
pub(crate) fn output_within(command: &mut Command, limit: Duration) -> Result<Output> {
    let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let stdout = scope.spawn(|| read(stdout));
        let stderr = scope.spawn(|| read(stderr));
        let status = end_within(&mut child, limit);
        let [stdout, stderr] = [stdout, stderr].map(|thread| thread.join().unwrap_or_default());
        let said = String::from_utf8_lossy(&stderr);
        match status? {
            Some(status) => Ok(Output { status, stdout, stderr }),
            None => bail!("it took longer than {limit:?}: {}", said.trim()),
        }
    })
}

/// How the process ends; `None` if it takes longer, and then it is ended.
pub(crate) fn end_within(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    if let Some(status) = wait(child, limit)? {
        return Ok(Some(status));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// Runs the command in a group of its own, so that those it starts end with it: how it ends; `None` if it takes
/// longer, and then all of them are asked to end, and ended if they do not.
pub(crate) fn run_group(command: &mut Command, limit: Duration) -> Result<Option<ExitStatus>> {
    let mut child = command.process_group(0).spawn().with_context(|| format!("{command:?}"))?;
    let group = Pid::from_child(&child);
    let ended = wait(&mut child, limit)?;
    if ended.is_none() {
        // One that has ended meanwhile needs no signal.
        let _gone = kill_process_group(group, Signal::TERM);
        if wait(&mut child, GRACE)?.is_none() {
            let _gone = kill_process_group(group, Signal::KILL);
            child.wait()?;
        }
    }
    // Whatever it left behind would hold the devices.
    let _gone = kill_process_group(group, Signal::KILL);
    Ok(ended)
}

fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if began.elapsed() > limit {
            return Ok(None);
        }
        thread::sleep(BETWEEN);
    }
}

fn read(stream: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // What was read before an error counts.
    let _error = stream.map(|mut stream| stream.read_to_end(&mut bytes));
    bytes
}

/// What a process said went wrong.
pub(crate) fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        shell
    }

    #[test]
    fn what_a_process_wrote_comes_with_its_code() {
        let output = output_within(&mut shell("echo out; echo err >&2; exit 7"), GRACE).unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(7), &b"out\n"[..]));
        assert_eq!(words(&output), "err");
    }

    #[test]
    fn a_process_that_takes_too_long_is_ended() {
        let (brief, began) = (Duration::from_millis(50), Instant::now());
        let error = output_within(&mut shell("exec sleep 60"), brief).unwrap_err();
        assert!(error.to_string().contains("longer than 50ms"), "{error}");
        // The shell ends, and the one it started with it.
        assert_eq!(run_group(&mut shell("sleep 60 & sleep 60"), brief).unwrap(), None);
        assert!(began.elapsed() < GRACE, "nobody waited for sixty seconds");
        let ended = run_group(&mut shell("exit 3"), GRACE).unwrap();
        assert_eq!(ended.and_then(|status| status.code()), Some(3));
    }
}
