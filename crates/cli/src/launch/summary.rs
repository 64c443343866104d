//! Who ended how.

use std::{fmt, io::Write as _, process::ExitCode, time::Duration};

use serde_json::json;
use signal_hook::low_level::signal_name;

use crate::output;

/// How a rank ended.
#[derive(Debug)]
pub(crate) struct RankEnd {
    pub(crate) rank: usize,
    pub(crate) pid: u32,
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    /// It was asked to end because another had failed.
    pub(crate) is_stopped: bool,
    pub(crate) time: Duration,
}

impl RankEnd {
    /// As a shell says it.
    fn exit_code(&self) -> i32 {
        self.code.unwrap_or_else(|| 128 + self.signal.unwrap_or_default())
    }
}

impl fmt::Display for RankEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        match (self.code, self.signal) {
            (Some(0), _) => write!(f, " ended well")?,
            (Some(code), _) => write!(f, " exited with {code}")?,
            (None, signal) => {
                let signal = signal.unwrap_or_default();
                let name = signal_name(signal).map_or_else(|| format!("signal {signal}"), String::from);
                write!(f, " was ended by {name}")?;
            }
        }
        write!(f, " after {:.2} s", self.time.as_secs_f64())?;
        if self.is_stopped { f.write_str(", stopped") } else { Ok(()) }
    }
}

/// How all of them ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) ranks: Vec<RankEnd>,
    pub(crate) first_failure: Option<usize>,
    pub(crate) time: Duration,
}

impl Ended {
    /// Prints it, and gives the exit code of the rank that failed first.
    pub(crate) fn report(&self, as_json: bool) -> anyhow::Result<ExitCode> {
        let code = self.first_failure.map_or(0, |rank| self.ranks[rank].exit_code());
        if as_json {
            output::json(&self.json(code))?;
        } else {
            // Where standard error is closed, the exit code has to do.
            let _closed = write!(anstream::stderr(), "{self}");
        }
        Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
    }

    fn json(&self, code: i32) -> serde_json::Value {
        let rank = |end: &RankEnd| {
            json!({
                "rank": end.rank,
                "pid": end.pid,
                "code": end.code,
                "signal": end.signal,
                "signal_name": end.signal.and_then(signal_name),
                "stopped": end.is_stopped,
                "seconds": end.time.as_secs_f64(),
            })
        };
        json!({
            "ok": self.first_failure.is_none(),
            "code": code,
            "first_failure": self.first_failure,
            "seconds": self.time.as_secs_f64(),
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, seconds) = (self.ranks.len(), self.time.as_secs_f64());
        let Some(first) = self.first_failure else {
            return writeln!(f, "launch: all {count} ranks ended well after {seconds:.2} s");
        };
        writeln!(f, "launch: {} and was the first to fail", self.ranks[first])?;
        let others = self.ranks.iter().filter(|end| end.rank != first);
        others.into_iter().try_for_each(|end| writeln!(f, "launch: {end}"))
    }
}
