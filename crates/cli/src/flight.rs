//! `flight`: who is to blame for a communicator that failed.

use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;
use warpweft::comm::{CallRecord, FlightRecord, Verdict};

use crate::{args::Flight, output};

/// What is told to programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    verdict: &'a Verdict,
    records: &'a [FlightRecord],
}

pub(crate) fn run(args: &Flight) -> anyhow::Result<ExitCode> {
    let folder = args.folder.display();
    let records = FlightRecord::read_all(&args.folder).with_context(|| format!("{folder} cannot be read"))?;
    anyhow::ensure!(
        !records.is_empty(),
        "{folder} has no flight records; a communicator writes them when it fails, if its configuration names a \
         folder"
    );
    let verdict = Verdict::of(&records);
    if args.json {
        output::json(&Report { verdict: &verdict, records: &records })?;
    } else {
        print(&records, &verdict, args.last);
    }
    Ok(if verdict == Verdict::Clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(records: &[FlightRecord], verdict: &Verdict, last: usize) {
    for record in records {
        output::title(&format!("rank {} of {}, {}", record.rank, record.size, record.device));
        if let Some(failure) = &record.failure {
            output::note(&format!("  failed: {failure}"));
        }
        let from = record.calls.len().saturating_sub(last);
        record.calls[from..].iter().for_each(|call| output::line(line(call)));
    }
    match verdict {
        Verdict::Clean => output::good("everything that is remembered was over on all ranks"),
        blame => output::wrong(&sentence(blame)),
    }
}

fn line(call: &CallRecord) -> String {
    let number = call.number.map_or_else(|| "-".to_owned(), |number| format!("#{number}"));
    let end = match call.over_us {
        Some(over) => format!("over after {:.1} ms", over.saturating_sub(call.called_us) as f64 / 1e3),
        None => "not over".to_owned(),
    };
    let place = call.queue.as_deref().unwrap_or("waited for");
    format!(
        "  {number:>6} {:>10.1} ms  {:<44} {:<8} {place:<14} {end}",
        call.called_us as f64 / 1e3,
        call.call,
        call.engine
    )
}

/// What is known, as one would say it.
fn sentence(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Lost { ranks, number, call } => {
            format!("{} left no record or died; the others had come to call #{number}, {call}", names(ranks))
        }
        Verdict::Differs { ranks, number, called, others } => {
            format!("{} called {called} as #{number}, where the others called {others}", names(ranks))
        }
        Verdict::Missing { ranks, number, call } => {
            format!("{} never made call #{number}, {call}, for which the others wait", names(ranks))
        }
        Verdict::Stuck { ranks, number, call } => {
            format!("all made call #{number}, {call}, and it was not over on {}", names(ranks))
        }
        other => format!("{other:?}"),
    }
}

fn names(ranks: &[u32]) -> String {
    let numbers: Vec<String> = ranks.iter().map(u32::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_culprit_is_named_in_a_sentence() {
        let call = || "all_reduce sum of f32, 8 bytes".to_owned();
        let check = |verdict: Verdict, text: &str| assert_eq!(sentence(&verdict), text);
        check(
            Verdict::Missing { ranks: vec![2], number: 7, call: call() },
            "rank 2 never made call #7, all_reduce sum of f32, 8 bytes, for which the others wait",
        );
        check(
            Verdict::Lost { ranks: vec![0, 3], number: 7, call: call() },
            "ranks 0, 3 left no record or died; the others had come to call #7, all_reduce sum of f32, 8 bytes",
        );
    }
}
