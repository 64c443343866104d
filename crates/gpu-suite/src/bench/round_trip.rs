//! A record of 48 bytes from the host to a kernel that stays, and its answer: as a resident in slices, and as
//! a kernel that never returns.

use std::{
    hint,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_cli::measure::Bar;
use warpweft_core_types::{Arg, BufferDesc, Deadline, Launch, ResidentDesc};

use super::{
    raw::{Lines, Raw},
    samples::{Samples, judge},
};
use crate::rig::{Rig, report, say};

/// Round trips of one turn. The two take turns, since only one of them can be measured at a time.
const TRIPS: u32 = 2_000;
const TURNS: u32 = 10;

/// An answer takes microseconds.
const LONGEST: Duration = Duration::from_secs(1);

pub(crate) fn run(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let raw = Raw::open(0)?;
    let (mut ours, mut by_hand) = (Samples::default(), Samples::default());

    let kernel = bench.kernel("sliced_answer")?;
    let request = bench.allocate(BufferDesc::upload(64))?;
    let reply = bench.allocate(BufferDesc::host_visible(16))?;
    let served = bench.allocate(BufferDesc::device(4))?;
    let args = [Arg::Buffer(&request), Arg::Buffer(&reply), Arg::Buffer(&served)];
    let desc = ResidentDesc::new(Launch::new(&kernel, [1, 1, 1], &args)?);
    let mut lines = Lines::of(&request, &reply)?;
    let within = || Deadline::within(LONGEST);
    let resident = bench.device.residents().context("residents")?.launch(&desc)?;
    for turn in 0..TURNS {
        trips(&mut lines, (turn > 0).then_some(&mut ours))?;
        resident.park(within())?;
        let mut lines = raw.answer(TRIPS)?;
        trips(&mut lines, (turn > 0).then_some(&mut by_hand))?;
        raw.synchronise()?;
        resident.resume()?;
    }
    resident.stop(within())?;
    report(&json!({"round trip": "48 bytes, acknowledged", "resident": ours.json(), "raw": by_hand.json()}));
    say(&format!("48 bytes there and back: resident {}; raw {}", ours.words(), by_hand.words()));
    let more =
        Bar::at_most("48 bytes there and back: more than raw", ours.median() - by_hand.median(), 0.3, "us");
    judge(&more.with_p99(ours.p99() - by_hand.p99()));
    Ok(())
}

/// Puts records and checks their answers.
fn trips(lines: &mut Lines, mut samples: Option<&mut Samples>) -> Result<()> {
    for _ in 0..TRIPS {
        let began = Instant::now();
        let expected = lines.ask();
        let answer = loop {
            if let Some(answer) = lines.answer() {
                break answer;
            }
            ensure!(began.elapsed() < LONGEST, "no answer to record {}", lines.number());
            hint::spin_loop();
        };
        let took = began.elapsed();
        ensure!(answer == expected, "record {}: {answer:?} and not {expected:?}", lines.number());
        if let Some(samples) = samples.as_deref_mut() {
            samples.add(took);
        }
    }
    Ok(())
}
