//! How communicators come to be and end on real devices.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use cudarc::driver::CudaContext;
use nccl_rs::{Communicator, CommunicatorConfig, CommunicatorDesc, Error, ReduceOp, Shrink, cudarc::writing};

use super::{Rank, Ranks};
use crate::{forked, rig::LIMIT};

fn sum_of_ones(rank: &Rank) -> Result<u32> {
    let (comm, stream) = (&rank.comm, rank.stream());
    Ok(rank.run_in_place(&[1_u32], |buffer| comm.all_reduce_in_place(buffer, ReduceOp::Sum, &stream))?[0])
}

pub(crate) fn right_device(ranks: &Ranks) -> Result<()> {
    let places = ranks.each(&CommunicatorConfig::new(), |rank| {
        ensure!(sum_of_ones(&rank)? == ranks.size, "a wrong sum");
        Ok((rank.comm.rank(), rank.comm.device()))
    })?;
    ensure!(places.iter().all(|(rank, device)| rank == device), "{places:?}");
    // Without a device named, it is the calling thread's current one, whether the call blocks or not.
    for config in Ranks::ways() {
        let id = ranks.nccl.unique_id()?;
        ranks.threads(|number| {
            let _current = CudaContext::new(number as usize)?;
            let desc = CommunicatorDesc::new(id, number, ranks.size).config(config.clone());
            let comm = Communicator::init(&ranks.nccl, &desc)?;
            ensure!(comm.device() == number, "{comm:?}");
            Ok(comm.finalize(LIMIT)?)
        })?;
    }
    Ok(())
}

pub(crate) fn one_device_twice(ranks: &Ranks) -> Result<()> {
    let id = ranks.nccl.unique_id()?;
    let config = CommunicatorConfig::new().patience(LIMIT);
    let made: Vec<_> = std::thread::scope(|scope| {
        let make = |rank| {
            let desc = CommunicatorDesc::new(id, rank, 2).device(0).config(config.clone());
            scope.spawn(move || Communicator::init(&ranks.nccl, &desc).map(drop))
        };
        [make(0), make(1)].map(|thread| thread.join()).into_iter().flatten().collect()
    });
    let said = made.iter().filter(|made| matches!(made, Err(Error::Nccl(error)) if error.code == 5)).count();
    ensure!(said > 0, "{made:?}");
    Ok(())
}

pub(crate) fn missing_rank(ranks: &Ranks) -> Result<()> {
    let patience = Duration::from_secs(2);
    for blocking in [false, true] {
        let config = CommunicatorConfig::new().patience(patience).blocking(blocking);
        let desc = CommunicatorDesc::new(ranks.nccl.unique_id()?, 0, 2).device(0).config(config);
        let start = Instant::now();
        match Communicator::init(&ranks.nccl, &desc) {
            Err(Error::TimedOut { .. }) => {}
            other => bail!("{other:?}"),
        }
        ensure!(start.elapsed() < patience + LIMIT / 2, "it took {:?}", start.elapsed());
    }
    Ok(())
}

pub(crate) fn derived(ranks: &Ranks) -> Result<()> {
    ranks.need_two()?;
    for config in Ranks::ways() {
        ranks.each(&config, |rank| {
            let own = rank.comm.rank();
            let key = -i32::try_from(own)?;
            let split = rank.comm.split(Some(3), key, &config)?;
            let Some(comm) = split else { bail!("no communicator") };
            ensure!(comm.rank() == ranks.size - 1 - own, "rank {} became {}", own, comm.rank());
            let child = Rank { comm, stream: rank.stream.clone() };
            ensure!(sum_of_ones(&child)? == ranks.size, "a wrong sum after a split");
            let none = rank.comm.split((own > 0).then_some(1), 0, &config)?;
            ensure!(none.is_some() == (own > 0), "a rank without a colour");
            Ok(())
        })?;
        if ranks.nccl.version() < nccl_rs::Version::new(2, 27, 0) {
            continue;
        }
        ranks.each(&config, |rank| {
            ensure!(sum_of_ones(&rank)? == ranks.size, "a wrong sum before a shrink");
            if rank.comm.rank() + 1 == ranks.size {
                return Ok(());
            }
            let comm = rank.comm.shrink(&[ranks.size - 1], Shrink::Idle, &config)?;
            let child = Rank { comm, stream: rank.stream.clone() };
            ensure!(sum_of_ones(&child)? == ranks.size - 1, "a wrong sum after a shrink");
            Ok(())
        })?;
    }
    Ok(())
}

pub(crate) fn many(ranks: &Ranks) -> Result<()> {
    for _ in 0..64 {
        ranks.each(&CommunicatorConfig::new(), |rank| {
            ensure!(sum_of_ones(&rank)? == ranks.size, "a wrong sum");
            Ok(rank.comm.finalize(LIMIT)?)
        })?;
    }
    Ok(())
}

pub(crate) fn dropped_crosswise(ranks: &Ranks) -> Result<()> {
    for config in Ranks::ways() {
        let (one, other) = (ranks.nccl.unique_id()?, ranks.nccl.unique_id()?);
        let start = Instant::now();
        ranks.threads(|number| {
            let stream = CudaContext::new(number as usize)?.new_stream()?;
            let make = |id| {
                let desc =
                    CommunicatorDesc::new(id, number, ranks.size).device(number).config(config.clone());
                let comm = Communicator::init(&ranks.nccl, &desc)?;
                Ok::<_, anyhow::Error>(Rank { comm, stream: stream.clone() })
            };
            let (one, other) = (make(one)?, make(other)?);
            ensure!(sum_of_ones(&one)? == ranks.size && sum_of_ones(&other)? == ranks.size, "a wrong sum");
            if number.is_multiple_of(2) {
                drop(one);
                drop(other);
            } else {
                drop(other);
                drop(one);
            }
            Ok(())
        })?;
        ensure!(start.elapsed() < LIMIT * 3, "it took {:?}", start.elapsed());
    }
    Ok(())
}

pub(crate) fn aborted(ranks: &Ranks) -> Result<()> {
    ranks.need_two()?;
    for round in 0..5 {
        ranks.each(&CommunicatorConfig::new(), |rank| {
            // Connected, so that what never ends is the work and not the call.
            ensure!(sum_of_ones(&rank)? == ranks.size, "a wrong sum");
            let handle = rank.comm.abort_handle();
            if rank.comm.rank() != round % ranks.size {
                let comm = &rank.comm;
                let mut buffer = rank.stream.clone_htod(&[1_u32])?;
                writing(&mut buffer, &rank.stream, |buffer, stream| {
                    comm.all_reduce_in_place(buffer, ReduceOp::Sum, stream)
                })?;
                ensure!(!rank.is_idle_within(Duration::from_millis(50))?, "it ended without a rank");
            }
            let start = Instant::now();
            handle.abort(LIMIT)?;
            ensure!(rank.is_idle_within(LIMIT)?, "the stream did not end after the abort");
            ensure!(start.elapsed() < LIMIT, "it took {:?}", start.elapsed());
            ensure!(matches!(rank.comm.check(), Err(Error::Gone { .. })), "{:?}", rank.comm.check());
            Ok(())
        })?;
    }
    Ok(())
}

pub(crate) fn forked(ranks: &Ranks) -> Result<()> {
    ranks.each(&CommunicatorConfig::new(), |rank| {
        if rank.comm.rank() > 0 {
            return Ok(());
        }
        let is_told =
            || rank.comm.check() == Err(Error::Forked) && ranks.nccl.unique_id() == Err(Error::Forked);
        ensure!(forked::run(LIMIT, || is_told().into())? == 1, "the child was told something else");
        Ok(())
    })?;
    Ok(())
}
