//! A case in a process of its own, for devices that a fault loses to the process that caused it.

use std::{
    io::Write as _,
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use libtest_mimic::{Completion, Failed};

/// Far longer than a case waits for anything.
const LONGEST: Duration = Duration::from_secs(120);

/// The exit code of a process whose case was not run; the reason is on its standard output.
const NOT_RUN: u8 = 3;

/// Runs this program again with these arguments, for one case, and waits for its answer.
pub(crate) fn ask(arguments: &[String]) -> Result<Completion, Failed> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        let reason = scope.spawn(|| read(stdout));
        let error = scope.spawn(|| read(stderr));
        let status = wait(&mut child)?;
        let [reason, error] = [reason, error].map(|thread| thread.join().unwrap_or_default());
        match status.and_then(|status| status.code()) {
            Some(0) => Ok(Completion::Completed),
            Some(code) if code == i32::from(NOT_RUN) => Ok(Completion::ignored_with(reason.trim())),
            Some(_) => Err(error.into()),
            None if status.is_none() => Err(format!("it took longer than {LONGEST:?}: {error}").into()),
            None => Err(format!("its process was ended by a signal: {error}").into()),
        }
    })
}

/// Tells the process that asked how its case went.
pub(crate) fn answer(verdict: Result<Completion, Failed>) -> ExitCode {
    // Where nobody listens any more, the exit code has to do.
    match verdict {
        Ok(Completion::Completed) => ExitCode::SUCCESS,
        Ok(Completion::Ignored { reason }) => {
            let _closed = writeln!(std::io::stdout(), "{}", reason.unwrap_or_default());
            ExitCode::from(NOT_RUN)
        }
        Err(failed) => {
            let _closed = writeln!(std::io::stderr(), "{}", failed.message().unwrap_or("it failed"));
            ExitCode::FAILURE
        }
    }
}

/// How the process ended; `None` if it had to be ended.
fn wait(child: &mut Child) -> std::io::Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() > LONGEST {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn read(stream: Option<impl std::io::Read>) -> String {
    let mut bytes = Vec::new();
    // What was read before an error counts.
    let _error = stream.map(|mut stream| stream.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}
