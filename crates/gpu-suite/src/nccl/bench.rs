//! What a call costs the host beside the library's own, on the same communicators, in rounds that alternate.

use std::{
    ffi::{c_int, c_void},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use libloading::Library;
use nccl_rs::{CommunicatorConfig, Nccl, ReduceOp, cudarc::writing};
use serde_json::json;

use super::{Rank, Ranks};
use crate::{
    bench::{
        alloc,
        samples::{Samples, judge, timed},
    },
    rig::{LIMIT, report, say},
};

/// Calls of a round: fewer than a stream takes before it makes its caller wait.
const CALLS: u32 = 50;

const ROUNDS: usize = 301;
const WARM_UP: usize = 20;

/// `ncclAllReduce`.
type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;

/// `ncclCommGetAsyncError`.
type AsyncError = unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int;

/// The library's functions, without this project's types.
#[derive(Clone, Copy)]
struct Raw {
    all_reduce: AllReduce,
    async_error: AsyncError,
}

/// What the rounds came to.
struct Found {
    ours: Samples,
    raw: Samples,
    allocations: u64,
}

pub(crate) fn run() -> Result<()> {
    let ranks = Ranks::open()?;
    for config in Ranks::ways() {
        one_way(&ranks, &config)?;
    }
    Ok(())
}

fn one_way(ranks: &Ranks, config: &CommunicatorConfig) -> Result<()> {
    let found = ranks.each(config, |rank| {
        let is_blocking = rank.comm.is_blocking();
        let found = rounds(&rank, Raw::load(&ranks.nccl)?)?;
        rank.comm.finalize(LIMIT)?;
        Ok((is_blocking, found))
    })?;
    let (is_blocking, Found { ours, raw, allocations }) =
        found.into_iter().next().context("there is a rank")?;
    let title = format!(
        "all_reduce of 8 bytes, {} ranks, {}",
        ranks.size,
        if is_blocking { "blocking" } else { "not blocking" }
    );
    for (what, samples) in [("ours", &ours), ("raw", &raw)] {
        report(&json!({"timing": title, "what": what, "time": samples.json()}));
        say(&format!("{title:<50} {what:<6} {}", samples.words()));
    }
    let beyond = ours.beyond(&raw);
    if is_blocking {
        judge(&beyond.at_most(format!("{title}: more than the raw call"), 0.2));
    } else {
        // The library starts a thread for each call, whose times are too uneven for such a bar.
        report(&json!({"more than the raw call": title, "time": beyond.json()}));
        say(&format!("{title:<50} beyond {}", beyond.words()));
    }
    report(&json!({"allocations": title, "in all": allocations, "calls": ROUNDS * CALLS as usize}));
    let bar = warpweft_cli::measure::Bar::at_most(
        format!("{title}: allocations of {} calls", ROUNDS * CALLS as usize),
        f64::from(u32::try_from(allocations).unwrap_or(u32::MAX)),
        0.0,
        "",
    );
    judge(&bar);
    Ok(())
}

impl Raw {
    #[expect(unsafe_code, reason = "gives functions their types")]
    fn load(nccl: &Nccl) -> Result<Self> {
        // SAFETY: the library is loaded already.
        let library = unsafe { Library::new(nccl.path()) }?;
        // SAFETY: `nccl.h` declares it so.
        let all_reduce = *unsafe { library.get::<AllReduce>("ncclAllReduce") }?;
        // SAFETY: the same.
        let async_error = *unsafe { library.get::<AsyncError>("ncclCommGetAsyncError") }?;
        // The functions are used as long as the process lives.
        std::mem::forget(library);
        Ok(Self { all_reduce, async_error })
    }

    /// What a program does that calls the library itself: asks until a call is no longer in progress.
    #[expect(unsafe_code, reason = "calls the library")]
    fn settle(&self, handle: *mut c_void, mut code: c_int) -> Result<()> {
        const IN_PROGRESS: c_int = 7;
        let end = Instant::now() + LIMIT;
        while code == IN_PROGRESS && Instant::now() < end {
            // SAFETY: the communicator is this thread's; the result is written to this stack frame.
            let asked = unsafe { (self.async_error)(handle, &raw mut code) };
            ensure!(asked == 0, "asking returned {asked}");
        }
        ensure!(code == 0, "the raw call returned {code}");
        Ok(())
    }
}

#[expect(unsafe_code, reason = "calls the library")]
fn rounds(rank: &Rank, raw: Raw) -> Result<Found> {
    /// `ncclFloat32` and `ncclSum`.
    const F32_SUM: (c_int, c_int) = (7, 0);
    let comm = &rank.comm;
    let mut buffer = rank.stream.alloc_zeros::<f32>(2)?;
    let address = {
        use cudarc::driver::DevicePtr as _;
        let (address, _in_use) = buffer.device_ptr(&rank.stream);
        std::ptr::without_provenance_mut::<c_void>(usize::try_from(address)?)
    };
    let (handle, queue) = (comm.as_raw(), rank.stream.cu_stream().cast());
    let mut found = Found { ours: Samples::default(), raw: Samples::default(), allocations: 0 };
    let each = |time: Duration| time / CALLS;
    writing(&mut buffer, &rank.stream, |view, stream| {
        for round in 0..ROUNDS + WARM_UP {
            let before = alloc::count_here();
            let ours = timed(|| {
                for _ in 0..CALLS {
                    comm.all_reduce_in_place(view, ReduceOp::Sum, stream)?;
                }
                Ok(())
            })?;
            let allocations = alloc::count_here() - before;
            wait(rank)?;
            let theirs = timed(|| {
                for _ in 0..CALLS {
                    // SAFETY: the buffer holds two numbers, and lives until the stream was waited for; the communicator is
                    // this thread's.
                    let code =
                        unsafe { (raw.all_reduce)(address, address, 2, F32_SUM.0, F32_SUM.1, handle, queue) };
                    raw.settle(handle, code)?;
                }
                Ok(())
            })?;
            wait(rank)?;
            if round >= WARM_UP {
                found.ours.add(each(ours));
                found.raw.add(each(theirs));
                found.allocations += allocations;
            }
        }
        anyhow::Ok(())
    })?;
    Ok(found)
}

fn wait(rank: &Rank) -> Result<()> {
    ensure!(rank.is_idle_within(LIMIT)?, "the stream did not end");
    Ok(())
}
