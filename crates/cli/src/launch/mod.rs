//! `launch`: the processes of one job, started, watched and ended together.

mod args;
#[cfg(unix)]
mod job;
#[cfg(unix)]
mod print;
#[cfg(unix)]
mod program;
#[cfg(unix)]
mod summary;

pub(crate) use args::{Launch, Rank};

use std::process::ExitCode;

#[cfg(unix)]
pub(crate) fn run(args: &Launch) -> anyhow::Result<ExitCode> {
    let program = match program::find(&args.program[0]) {
        Ok(program) => program,
        Err(missing) => return Ok(missing.report()),
    };
    let ended = job::Job::start(args, &program)?.watch()?;
    ended.report(args.json)
}

/// Takes the place of this process, so that it ends when the launcher does.
#[cfg(unix)]
pub(crate) fn become_rank(args: &Rank) -> anyhow::Result<ExitCode> {
    use std::os::unix::process::CommandExt as _;

    #[cfg(target_os = "linux")]
    {
        use rustix::process::{
            Resource, Rlimit, Signal, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
        };

        set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have died before the system was asked to tell.
        if getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != args.launcher) {
            return Ok(ExitCode::FAILURE);
        }
        if args.files.is_some() {
            let limit = Rlimit { current: args.files, ..getrlimit(Resource::Nofile) };
            setrlimit(Resource::Nofile, limit)?;
        }
    }
    let error = std::process::Command::new(&args.program[0]).args(&args.program[1..]).exec();
    Ok(program::Missing::new(&args.program[0], &error).report())
}

#[cfg(not(unix))]
pub(crate) fn run(_: &Launch) -> anyhow::Result<ExitCode> {
    anyhow::bail!("launch needs Unix's signals and process groups")
}

#[cfg(not(unix))]
pub(crate) fn become_rank(_: &Rank) -> anyhow::Result<ExitCode> {
    anyhow::bail!("launch needs Unix's signals and process groups")
}
