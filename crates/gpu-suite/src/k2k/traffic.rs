//! Messages by every way, counted and checked.

use anyhow::{Result, ensure};
use warpweft_core_types::DeviceId;
use warpweft_k2k_router::{Placement, System, SystemConfig, Way};

use super::{
    NO_STATE, Pair, TALLY, all_served, asked, config, is_small, run_pairs, spec, system, until, within,
};
use crate::rig::Rig;

pub(super) fn every_way(rig: &Rig) -> Result<()> {
    for executors in [1, 2] {
        let (system, devices) = system(rig, 1, &config(executors))?;
        let here = Placement::Device(devices[0]);
        let echo = system.spawn(&spec("echo", NO_STATE), here)?;
        for length in [0_usize, 1, 48, 64, 335, 336, 1020, 1021, 4096, 16 << 10] {
            let question: Vec<u8> = (0..length).map(|at| (at * 7 + length).to_le_bytes()[0]).collect();
            let answer = echo.call(0, &question, within())?.payload;
            ensure!(answer == question, "{length} bytes came back as {} others", answer.len());
        }
        // With one executor within it, with two between them.
        run_pairs(&Pair::all(&system, devices[0], devices[0], 2, 2000)?)?;
        all_served(&system)?;
        system.shut_down(within())?;
    }
    Ok(())
}

pub(super) fn many_actors(rig: &Rig) -> Result<()> {
    let (count, messages) = if is_small(rig) { (20, 20) } else { (500, 100) };
    let (system, devices) = system(rig, 1, &config(8))?;
    let spawn = |_| system.spawn(&spec("tally", TALLY), Placement::Device(devices[0]));
    let actors = (0..count).map(spawn).collect::<Result<Vec<_>, _>>()?;
    for number in 0..messages {
        for actor in &actors {
            actor.send(0, &u64::to_le_bytes(number), within())?;
        }
    }
    for actor in &actors {
        until("all messages of an actor", || Ok(asked(actor)?[0] == messages))?;
        ensure!(asked(actor)? == [messages, 0], "{:?}", asked(actor)?);
    }
    all_served(&system)?;
    Ok(system.shut_down(within())?)
}

/// Case K4 of a kind.
pub(super) fn million(rig: &Rig) -> Result<()> {
    let (executors, each) = if is_small(rig) { (4, 200) } else { (64, 15_625) };
    let (system, devices) = system(rig, 1, &lanes(executors))?;
    streams(&system, devices[0], devices[0], executors, each)?;
    Ok(system.shut_down(within())?)
}

pub(super) fn between(rig: &Rig) -> Result<()> {
    rig.pair()?;
    let (executors, each) = if is_small(rig) { (2, 200) } else { (16, 31_250) };
    let (system, devices) = system(rig, 2, &lanes(executors))?;
    ensure!(system.way(devices[0], devices[1])? == Way::Peer, "they write into each other's memory");
    streams(&system, devices[0], devices[1], executors, each)?;
    streams(&system, devices[1], devices[0], executors, each)?;
    Ok(system.shut_down(within())?)
}

/// Many lanes, of which each is short.
fn lanes(executors: u32) -> SystemConfig {
    SystemConfig { lane_lines: 512, ..config(executors) }
}

fn streams(system: &System, from: DeviceId, to: DeviceId, pairs: u32, each: u32) -> Result<()> {
    run_pairs(&Pair::all(system, from, to, pairs, each)?)?;
    all_served(system)
}
