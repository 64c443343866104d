//! Copies between all pairs of devices.

use std::{process::ExitCode, time::Duration};

use serde::Serialize;
use warpweft::{BufferDesc, BufferView, Bytes, DeviceId, Runtime, transfer::RouteKind};

use crate::{
    args::PerfCopy,
    measure::{Summary, interleave},
    output::{self, WrongCall},
    select,
};

const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Serialize)]
struct Row {
    from: DeviceId,
    to: DeviceId,
    route: RouteKind,
    /// Bytes of one copy; both ways at once move twice as many.
    size: u64,
    both_ways: bool,
    copy: Summary,
    /// GB/s of 10^9 bytes: all bytes moved over the median time.
    algbw: f64,
    /// One thread copying as many bytes, in the same rounds.
    memcpy: Summary,
    /// Median of memcpy over the median of the copy: 1 is as fast as the raw call.
    ratio: f64,
    /// Bytes that arrived wrong.
    wrong: u64,
}

pub(crate) fn run(args: &PerfCopy) -> anyhow::Result<ExitCode> {
    if args.min > args.max {
        return Err(WrongCall(format!("-b {} is above -e {}", args.min, args.max)).into());
    }
    let mut builder = Runtime::builder();
    for backend in select::backends(&args.selection)? {
        builder = builder.shared_backend(backend);
    }
    let runtime = builder.build()?;
    let pairs = pairs(&runtime, args.both);
    let sizes: Vec<u64> = std::iter::successors(Some(args.min), |size| size.checked_mul(args.factor))
        .take_while(|&size| size <= args.max)
        .collect();
    if !args.json {
        print_head(args, &runtime);
    }
    let bar = output::progress((pairs.len() * sizes.len()) as u64, "measuring");
    let mut wrong = 0;
    for (from, to) in pairs {
        for &size in &sizes {
            let row = measure(&runtime, from, to, size, args)?;
            wrong += row.wrong;
            bar.suspend(|| print_row(&row, args.json))?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    if !args.json {
        output::line(format!("# Wrong bytes: {wrong}{}", if wrong == 0 { " OK" } else { " FAILED" }));
    }
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Every ordered pair, local copies included; unordered ones where both ways are copied at once.
fn pairs(runtime: &Runtime, both: bool) -> Vec<(DeviceId, DeviceId)> {
    let ids: Vec<DeviceId> = runtime.devices().iter().map(|device| device.info().id).collect();
    let all = ids.iter().flat_map(|&from| ids.iter().map(move |&to| (from, to)));
    all.filter(|(from, to)| !both || from < to).collect()
}

fn print_head(args: &PerfCopy, runtime: &Runtime) {
    output::title("Copies between devices");
    let ways = if args.both { "both ways at once" } else { "one way" };
    output::note(&format!(
        "# {} devices, {ways}, {} rounds after {} to warm up, every byte checked",
        runtime.devices().len(),
        args.iterations,
        args.warmup
    ));
    let columns = ["from", "to", "route", "size", "p50", "p99", "algbw", "memcpy", "ratio", "wrong"];
    output::line(aligned('#', columns));
    output::line(aligned('#', ["", "", "", "B", "us", "us", "GB/s", "us", "", "B"]));
}

/// The columns of the table, heads and rows alike.
fn aligned<T: std::fmt::Display>(mark: char, cells: [T; 10]) -> String {
    let [from, to, route, size, p50, p99, algbw, memcpy, ratio, wrong] = cells.map(|cell| cell.to_string());
    format!(
        "{mark} {from:<8} {to:<8} {route:>9} {size:>11} {p50:>9} {p99:>9} {algbw:>8} {memcpy:>9} {ratio:>6} {wrong:>6}"
    )
}

fn print_row(row: &Row, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(row);
    }
    let us = |nanos: u64| format!("{:.1}", nanos as f64 / 1e3);
    output::line(aligned(
        ' ',
        [
            row.from.to_string(),
            row.to.to_string(),
            row.route.to_string(),
            row.size.to_string(),
            us(row.copy.p50_ns),
            us(row.copy.p99_ns),
            format!("{:.2}", row.algbw),
            us(row.memcpy.p50_ns),
            format!("{:.2}", row.ratio),
            row.wrong.to_string(),
        ],
    ));
    Ok(())
}

fn measure(
    runtime: &Runtime,
    from: DeviceId,
    to: DeviceId,
    size: u64,
    args: &PerfCopy,
) -> anyhow::Result<Row> {
    let transfer = runtime.transfer();
    // Devices first: they say what is too much, where the host would just end.
    let forth = (memory(runtime, from, size)?, memory(runtime, to, size)?);
    let pattern = pattern(usize::try_from(size)?);
    transfer.write(&pattern, &forth.0, TIMEOUT)?;
    let back =
        args.both.then(|| Ok::<_, anyhow::Error>((memory(runtime, to, size)?, memory(runtime, from, size)?)));
    let back = back.transpose()?;
    if let Some((source, _)) = &back {
        transfer.write(&pattern, source, TIMEOUT)?;
    }
    let mut target = vec![0; pattern.len()];
    let mut copy = || -> anyhow::Result<()> {
        let there = transfer.copy(&forth.0, &forth.1)?;
        let here = back.as_ref().map(|(source, target)| transfer.copy(source, target)).transpose()?;
        there.wait(TIMEOUT)?;
        here.map_or(Ok(()), |copy| copy.wait(TIMEOUT))?;
        Ok(())
    };
    let mut memcpy = || -> anyhow::Result<()> {
        std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&pattern));
        Ok(())
    };
    let summaries = interleave(args.warmup, args.iterations, &mut [&mut copy, &mut memcpy])?;
    let [copy, memcpy]: [Summary; 2] =
        summaries.try_into().map_err(|_| anyhow::anyhow!("two were measured"))?;
    let mut wrong = count_wrong(runtime, &forth.1, &pattern)?;
    if let Some((_, target)) = &back {
        wrong += count_wrong(runtime, target, &pattern)?;
    }
    let moved = if args.both { 2 * size } else { size };
    Ok(Row {
        from,
        to,
        route: transfer.route(from, to)?.kind,
        size,
        both_ways: args.both,
        algbw: moved as f64 / copy.p50_ns.max(1) as f64,
        ratio: memcpy.p50_ns as f64 / copy.p50_ns.max(1) as f64,
        copy,
        memcpy,
        wrong,
    })
}

fn memory(runtime: &Runtime, device: DeviceId, size: u64) -> anyhow::Result<BufferView> {
    let device = runtime.device(device).ok_or_else(|| anyhow::anyhow!("{device} is not open"))?;
    let buffer = device.allocate(&BufferDesc::device(size)).map_err(|error| {
        anyhow::anyhow!("{} are too many for the devices; choose a smaller -e: {error}", Bytes(size))
    })?;
    Ok(BufferView::whole(buffer))
}

fn pattern(len: usize) -> Vec<u8> {
    let byte = |index: usize| (index ^ (index >> 8) ^ (index >> 16)).to_le_bytes()[0];
    (0..len).map(byte).collect()
}

fn count_wrong(runtime: &Runtime, view: &BufferView, expected: &[u8]) -> anyhow::Result<u64> {
    let mut got = vec![0; expected.len()];
    runtime.transfer().read(view, &mut got, TIMEOUT)?;
    Ok(got.iter().zip(expected).filter(|(got, expected)| got != expected).count() as u64)
}
