//! Ranks of one process that do what it is told, a line at a time. It says one line for all of them.

use std::{
    io::{BufRead as _, Write as _},
    sync::Arc,
    thread,
    time::Duration,
};

use warpweft_bootstrap::{Group, JoinConfig, Rank, Rendezvous, RunId};
use warpweft_core_types::{CollectiveOp, DType, ReduceOp};
use warpweft_host_collectives::{HostCommunicator, HostConfig, HostFailure, SliceCall, Slices};

const WITHIN: Duration = Duration::from_secs(60);

fn say(words: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{words}").unwrap();
    out.flush().unwrap();
}

pub(crate) fn config(words: &str) -> HostConfig {
    let small = HostConfig { slot_bytes: 1024, one_shot_bytes: 0, fragment_bytes: 64, ..Default::default() };
    match words {
        "small" => small,
        "once" => HostConfig { one_shot_bytes: 1 << 16, ..small },
        _ => HostConfig::default(),
    }
}

/// `first count size path config`, then lines of what to do.
pub(crate) fn run(words: &[String]) {
    let [first, count, size, path, settings] = words else { panic!("{words:?}") };
    let (first, count): (u32, u32) = (first.parse().unwrap(), count.parse().unwrap());
    let size = size.parse().unwrap();
    let communicators = each((first..first + count).collect(), |rank| {
        let rendezvous = Rendezvous::file(path, RunId::from("run"));
        let group = Group::join(rendezvous, JoinConfig::new(Rank(rank), size), WITHIN).unwrap();
        Arc::new(HostCommunicator::join(Arc::new(group), &config(settings), WITHIN).unwrap())
    });
    say("joined");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        if line == "leave" {
            break;
        }
        let words: Vec<&str> = line.split(' ').collect();
        if line == "fork" {
            fork(&communicators[0]);
            continue;
        }
        let said = each(communicators.clone(), |communicator| perform(&communicator, &words));
        say(&said.join("; "));
    }
}

/// The new process tries everything, and leaves without telling anybody.
fn fork(communicator: &HostCommunicator) {
    if crate::fork::fork_process() != 0 {
        return;
    }
    let refused = [communicator.barrier(WITHIN), sum(communicator, 3, 0)];
    let reason = warpweft_core_types::CollectiveFailure::Aborted { rank: 0, reason: "a fork".into() };
    communicator.abort(reason);
    let is_forked = |outcome: &Result<(), HostFailure>| matches!(outcome, Err(HostFailure::Forked { .. }));
    say(if refused.iter().all(is_forked) { "refused" } else { "taken" });
    std::process::exit(0);
}

fn each<T: Send, R: Send>(of: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = of.into_iter().map(|item| scope.spawn(move || work(item))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn perform(communicator: &HostCommunicator, words: &[&str]) -> String {
    let number = |index: usize| words[index].parse::<usize>().unwrap();
    let outcome = match words[0] {
        "barrier" => communicator.barrier(Duration::from_millis(number(1) as u64)),
        "sum" => (0..number(2)).try_for_each(|round| sum(communicator, number(1), round)),
        "sums" => forever(communicator, number(1)),
        "gather" => gather(communicator, number(1)),
        "exchange" => exchange(communicator, number(1)),
        "differ" => differ(communicator),
        other => panic!("{other}"),
    };
    match outcome {
        Ok(()) => "ok".into(),
        Err(failure) => failure.to_string(),
    }
}

/// What a rank has in a round: every element is another.
fn values(rank: u32, count: usize, round: usize) -> Vec<u8> {
    let value = |index: usize| (index as u32).wrapping_mul(7) ^ rank.wrapping_mul(1000) ^ round as u32;
    (0..count).flat_map(|index| value(index).to_ne_bytes()).collect()
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes(bytes.try_into().unwrap())
}

fn sum(communicator: &HostCommunicator, count: usize, round: usize) -> Result<(), HostFailure> {
    let size = communicator.size();
    let mut own = values(communicator.rank(), count, round);
    let op = CollectiveOp::AllReduce(ReduceOp::Sum);
    let call = SliceCall { op, dtype: DType::U32, operands: Slices::InPlace(&mut own), custom: None };
    communicator.run_slices(&mut [call], WITHIN)?;
    let all: Vec<Vec<u8>> = (0..size).map(|rank| values(rank, count, round)).collect();
    for (index, got) in own.chunks(4).enumerate() {
        let at = |values: &Vec<u8>| number(&values[index * 4..][..4]);
        let want = all.iter().map(at).fold(0, u32::wrapping_add);
        assert_eq!(number(got), want, "element {index} of round {round}");
    }
    Ok(())
}

/// Sums until something happens.
fn forever(communicator: &HostCommunicator, count: usize) -> Result<(), HostFailure> {
    (0..).try_for_each(|round| {
        if round == 20 && communicator.rank() == 0 {
            say("sums");
        }
        sum(communicator, count, round)
    })
}

fn gather(communicator: &HostCommunicator, count: usize) -> Result<(), HostFailure> {
    let own = values(communicator.rank(), count, 0);
    let mut all = vec![0; own.len() * communicator.size() as usize];
    let operands = Slices::Both(&own, &mut all);
    let call = SliceCall { op: CollectiveOp::AllGather, dtype: DType::U32, operands, custom: None };
    communicator.run_slices(&mut [call], WITHIN)?;
    let expected: Vec<u8> = (0..communicator.size()).flat_map(|rank| values(rank, count, 0)).collect();
    assert!(all == expected);
    Ok(())
}

fn exchange(communicator: &HostCommunicator, count: usize) -> Result<(), HostFailure> {
    let size = communicator.size();
    let own = values(communicator.rank(), count, 0);
    let mut got = vec![vec![0; own.len()]; size as usize];
    let mut calls = Vec::new();
    for (peer, got) in (0..size).zip(&mut got) {
        let (to, from) = (CollectiveOp::Send { to: peer }, CollectiveOp::Recv { from: peer });
        calls.push(SliceCall { op: to, dtype: DType::U32, operands: Slices::Src(&own), custom: None });
        calls.push(SliceCall { op: from, dtype: DType::U32, operands: Slices::Dst(got), custom: None });
    }
    communicator.run_slices(&mut calls, WITHIN)?;
    for (peer, got) in (0..size).zip(got) {
        assert!(got == values(peer, count, 0));
    }
    Ok(())
}

/// Rank 1 has a longer operand.
fn differ(communicator: &HostCommunicator) -> Result<(), HostFailure> {
    let mut own = vec![0; if communicator.rank() == 1 { 8 } else { 4 }];
    let op = CollectiveOp::AllReduce(ReduceOp::Sum);
    let call = SliceCall { op, dtype: DType::U32, operands: Slices::InPlace(&mut own), custom: None };
    communicator.run_slices(&mut [call], WITHIN)
}
