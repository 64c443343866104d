//! `flight`: who is to blame for a communicator that failed.

use std::process::ExitCode;

use anyhow::Context as _;
use serde::Serialize;
use warpweft::comm::{CallRecord, CommunicatorId, FlightRecord, Verdict};

use crate::{args::Flight, output};

/// What is told to programs.
#[derive(Debug, Serialize)]
struct Report<'a> {
    communicators: Vec<Judged<'a>>,
}

/// One communicator.
#[derive(Debug, Serialize)]
struct Judged<'a> {
    communicator: &'a CommunicatorId,
    #[serde(flatten)]
    verdict: Verdict,
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
    let judged = FlightRecord::by_communicator(&records).filter_map(|records| {
        Some(Judged { communicator: &records.first()?.communicator, verdict: Verdict::of(records), records })
    });
    let communicators: Vec<_> = judged.collect();
    let is_clean = communicators.iter().all(|judged| judged.verdict == Verdict::Clean);
    if args.json {
        output::json(&Report { communicators })?;
    } else {
        communicators.iter().for_each(|judged| print(judged, args.last));
    }
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn print(judged: &Judged<'_>, last: usize) {
    output::title(&format!("communicator {}", judged.communicator));
    for record in judged.records {
        output::title(&format!("rank {} of {}, {}", record.rank, record.size, record.device));
        output::note(&format!("  {}", record.origin));
        if let Some(failure) = &record.failure {
            output::note(&format!("  failed: {failure}"));
        }
        let from = record.calls.len().saturating_sub(last);
        record.calls[from..].iter().for_each(|call| output::line(line(call)));
        if let Some(number) = record.numbers_agree_until {
            output::note(&format!(
                "  behind #{number} numbers may not be those of other ranks: calls differed and failed a queue"
            ));
        }
    }
    let (name, verdict) = (judged.communicator, &judged.verdict);
    match verdict {
        Verdict::Clean => {
            output::good(&format!("{name}: everything that is remembered was over on all ranks"))
        }
        blame => output::wrong(&format!("{name}: {}", sentence(blame))),
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
        Verdict::Unmet { rank, call, exchange } => {
            let (peer, number) = (exchange.peer, exchange.number);
            let (of_rank, of_peer) = if exchange.sends { ("to", "receive") } else { ("from", "send") };
            let own = if exchange.sends { "send" } else { "receive" };
            format!(
                "rank {rank} waits in {call}: it is {own} {number} {of_rank} rank {peer}, which never made its \
                 {of_peer} {number} with rank {rank}"
            )
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
    use warpweft::comm::Exchange;

    use super::*;

    #[test]
    fn the_culprit_is_named_in_a_sentence() {
        let exchange = Exchange { peer: 1, sends: true, number: 4 };
        let unmet = Verdict::Unmet { rank: 0, call: "send to rank 1 of u8, 3 bytes".to_owned(), exchange };
        assert_eq!(
            sentence(&unmet),
            "rank 0 waits in send to rank 1 of u8, 3 bytes: it is send 4 to rank 1, which never made its receive 4 \
             with rank 0"
        );
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
