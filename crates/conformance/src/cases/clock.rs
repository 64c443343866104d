//! The device's clock.

use std::time::{Duration, Instant};

use libtest_mimic::Failed;
use warpweft_core_types::{
    BufferView, ClockModel, Deadline, DeviceClock, Features, FillRegion, Op, RangeError, TimestampRegion,
};

use crate::{
    context::{Context, PATIENCE, refusal},
    harness::{Case, Verdict},
};

const NEEDS: Features = Features::TIMESTAMPS.union(Features::HOST_VISIBLE_MEMORY);

pub(super) const CASES: &[Case] = &[
    Case::new("clock::timestamps_rise_along_a_queue", timestamps_rise_along_a_queue).needs(NEEDS),
    Case::new("clock::a_model_finds_when_work_ran", a_model_finds_when_work_ran)
        .needs(NEEDS)
        .covers(&["DeviceClock::sample", "Device::clock"]),
    Case::new("clock::other_views_are_refused", other_views_are_refused).needs(NEEDS),
];

fn clock(cx: &Context) -> Result<&dyn DeviceClock, Failed> {
    Ok(cx.device(0).clock().ok_or("the family is absent")?)
}

fn time(view: &BufferView) -> Result<u64, Failed> {
    let mut bytes = [0; 8];
    view.read(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn timestamps_rise_along_a_queue(cx: &Context) -> Verdict {
    let clock = clock(cx)?;
    let (stamps, work) = (cx.window(0, 80)?, cx.memory(0, 1 << 20)?);
    let views: Vec<BufferView> =
        (0..10).map(|position| stamps.slice(position * 8..position * 8 + 8)).collect::<Result<_, _>>()?;
    let mut ops = Vec::new();
    for view in &views {
        ops.push(Op::Timestamp(TimestampRegion::new(clock, view)?));
        ops.push(Op::Fill(FillRegion::bytes(&work, 1)));
    }
    cx.lane(0)?.run(&ops)?;
    let times = views.iter().map(time).collect::<Result<Vec<_>, _>>()?;
    assert!(times.is_sorted(), "{times:?}");
    assert!(times[0] > 0 && times[9] > times[0], "{times:?}");
    assert!(times[9] - times[0] < 30_000_000_000, "nanoseconds: {times:?}");
    Ok(())
}

/// Samples around a stamp bound when it was made; a stamp also lies between its submission and its end.
fn a_model_finds_when_work_ran(cx: &Context) -> Verdict {
    let (clock, lane, stamp) = (clock(cx)?, cx.lane(0)?, cx.window(0, 8)?);
    let sample = || clock.sample(Deadline::within(PATIENCE));
    let mut samples = vec![sample()?, sample()?];
    let mut runs = Vec::new();
    for _ in 0..20 {
        let before = Instant::now();
        lane.run(&[Op::Timestamp(TimestampRegion::new(clock, &stamp)?)])?;
        runs.push((before, time(&stamp)?, Instant::now()));
        samples.push(sample()?);
    }
    let model = ClockModel::fit(&samples).ok_or("the device's clock stands still")?;
    for (before, device_ns, after) in runs {
        let host = model.to_host(device_ns);
        // A device may count in steps; none here counts in coarser ones than this.
        let slack = host.error + Duration::from_micros(2);
        assert!(host.at + slack >= before && host.at <= after + slack, "{model:?} {host:?}");
        assert!(host.error < Duration::from_secs(1), "{host:?}");
    }
    Ok(())
}

fn other_views_are_refused(cx: &Context) -> Verdict {
    let (clock, view) = (clock(cx)?, cx.window(0, 32)?);
    for range in [0..4, 0..16, 4..12] {
        let wrong = view.slice(range.clone())?;
        let error = refusal(TimestampRegion::new(clock, &wrong))?;
        assert!(matches!(error, RangeError::NoTimestamp { .. }), "{range:?}: {error}");
    }
    Ok(())
}
