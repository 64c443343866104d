//! Copies between all pairs of devices, and between devices and their pinned host memory.

use std::{fmt, process::ExitCode, time::Duration};

use serde::Serialize;
use warpweft::{BufferDesc, BufferView, Bytes, DeviceId, DeviceKind, Features, Runtime, transfer::RouteKind};

use crate::{
    args::PerfCopy,
    floor::FloorCopies,
    measure::{Bar, Summary, interleave},
    output::{self, WrongCall},
    select,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Where bytes come from or go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Device(DeviceId),
    /// Host memory that this device reads and writes without help.
    Pinned(DeviceId),
}

/// One direction to measure.
type Lane = (End, End);

#[derive(Debug, Serialize)]
struct Row {
    from: End,
    to: End,
    route: RouteKind,
    /// Bytes of one copy; both ways at once move twice as many.
    size: u64,
    both_ways: bool,
    /// Copies of each way that were started before the first was waited for.
    queued: u32,
    copy: Summary,
    /// GB/s of 10^9 bytes: all bytes moved over the median time.
    algbw: f64,
    /// The raw call that moves as many bytes, in the same rounds.
    raw: Summary,
    /// Which call that is: the driver's, or `memcpy` by one thread where no driver is involved.
    raw_call: &'static str,
    /// Median of the raw call over the median of the copy: 1 is as fast as the raw call.
    ratio: f64,
    /// Bytes that arrived wrong.
    wrong: u64,
    /// The ratio beside the one that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    bar: Option<Bar>,
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
    let lanes = lanes(&runtime, args.both);
    let sizes: Vec<u64> = std::iter::successors(Some(args.min), |size| size.checked_mul(args.factor))
        .take_while(|&size| size <= args.max)
        .collect();
    check_room(&runtime, &lanes, sizes.last().copied().unwrap_or_default())?;
    if !args.json {
        print_head(args, &runtime);
    }
    let bar = output::progress((lanes.len() * sizes.len()) as u64, "measuring");
    let mut wrong = 0;
    for lane in lanes {
        for &size in &sizes {
            let row = measure(&runtime, lane, size, args)?;
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

/// Says before anything is measured that the largest copy is too large.
fn check_room(runtime: &Runtime, lanes: &[Lane], size: u64) -> anyhow::Result<()> {
    for &(from, to) in lanes {
        for end in [from, to] {
            let id = end.device();
            let ends = [from, to].into_iter().filter(|end| end.device() == id).count() as u64;
            let memory = runtime.device(id).map_or(Bytes(0), |device| device.info().memory);
            if size.saturating_mul(ends) > memory.0 {
                let needed = Bytes(size.saturating_mul(ends));
                let text = format!(
                    "a copy of {} takes {needed} of {id}, which has {memory}; choose a smaller -e",
                    Bytes(size)
                );
                return Err(WrongCall(text).into());
            }
        }
    }
    Ok(())
}

impl End {
    const fn device(self) -> DeviceId {
        match self {
            Self::Device(id) | Self::Pinned(id) => id,
        }
    }

    fn memory(self, runtime: &Runtime, size: u64) -> anyhow::Result<BufferView> {
        let id = self.device();
        let device = runtime.device(id).ok_or_else(|| anyhow::anyhow!("{id} is not open"))?;
        let desc = match self {
            Self::Device(_) => BufferDesc::device(size),
            Self::Pinned(_) => BufferDesc::host_visible(size),
        };
        let buffer = device.allocate(&desc).map_err(|error| {
            anyhow::anyhow!("{} are too many for the devices; choose a smaller -e: {error}", Bytes(size))
        })?;
        Ok(BufferView::whole(buffer))
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(id) => id.fmt(f),
            Self::Pinned(_) => f.write_str("pinned"),
        }
    }
}

/// A device as the library writes it; pinned memory by its name.
impl Serialize for End {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Device(id) => id.serialize(serializer),
            Self::Pinned(_) => serializer.serialize_str("pinned"),
        }
    }
}

/// Pinned memory with each device that is not the host itself, then every ordered pair of devices, local copies
/// included; each pair once where both ways are copied at once.
fn lanes(runtime: &Runtime, both: bool) -> Vec<Lane> {
    let mut lanes = Vec::new();
    for device in runtime.devices() {
        let info = device.info();
        if info.kind != DeviceKind::Cpu && device.features().contains(Features::HOST_VISIBLE_MEMORY) {
            let (host, device) = (End::Pinned(info.id), End::Device(info.id));
            lanes.push((host, device));
            lanes.extend((!both).then_some((device, host)));
        }
    }
    let ids: Vec<DeviceId> = runtime.devices().iter().map(|device| device.info().id).collect();
    let pairs = ids.iter().flat_map(|&from| ids.iter().map(move |&to| (from, to)));
    let pairs = pairs.filter(|(from, to)| !both || from < to);
    lanes.extend(pairs.map(|(from, to)| (End::Device(from), End::Device(to))));
    lanes
}

fn print_head(args: &PerfCopy, runtime: &Runtime) {
    output::title("Copies between devices");
    let ways = if args.both { "both ways at once" } else { "one way" };
    output::note(&format!(
        "# {} devices, {ways}, {} queued, {} rounds after {} to warm up, every byte checked",
        runtime.devices().len(),
        args.queued,
        args.iterations,
        args.warmup
    ));
    let columns = ["from", "to", "route", "size", "p50", "p99", "algbw", "raw", "ratio", "wrong"];
    output::line(aligned('#', columns));
    output::line(aligned('#', ["", "", "", "B", "us", "us", "GB/s", "us", "", "B"]));
}

/// The columns of the table, heads and rows alike.
fn aligned<T: std::fmt::Display>(mark: char, cells: [T; 10]) -> String {
    let [from, to, route, size, p50, p99, algbw, raw, ratio, wrong] = cells.map(|cell| cell.to_string());
    format!(
        "{mark} {from:<8} {to:<8} {route:>9} {size:>11} {p50:>9} {p99:>9} {algbw:>8} {raw:>9} {ratio:>6} {wrong:>6}"
    )
}

fn print_row(row: &Row, json: bool) -> anyhow::Result<()> {
    if json {
        return output::json(row);
    }
    let us = |nanos: u64| format!("{:.1}", nanos as f64 / 1e3);
    let cells = aligned(
        ' ',
        [
            row.from.to_string(),
            row.to.to_string(),
            row.route.to_string(),
            row.size.to_string(),
            us(row.copy.p50_ns),
            us(row.copy.p99_ns),
            format!("{:.2}", row.algbw),
            us(row.raw.p50_ns),
            format!("{:.2}", row.ratio),
            row.wrong.to_string(),
        ],
    );
    let bar = row.bar.as_ref().map_or("", |bar| if bar.met { "  met" } else { "  MISSED" });
    output::line(cells + bar);
    Ok(())
}

fn measure(runtime: &Runtime, (from, to): Lane, size: u64, args: &PerfCopy) -> anyhow::Result<Row> {
    let transfer = runtime.transfer();
    // Devices first: they say what is too much, where the host would just end.
    let mut ways = vec![Way::new(runtime, from, to, size, args.queued)?];
    if args.both {
        ways.push(Way::new(runtime, to, from, size, args.queued)?);
    }
    let pattern = pattern(usize::try_from(size)?);
    for way in &ways {
        transfer.write(&pattern, way.source(), TIMEOUT)?;
    }
    let floors = ways.iter().map(|way| FloorCopies::new(runtime, &way.copies));
    let floors = floors.collect::<anyhow::Result<Option<Vec<_>>>>()?;
    let copy_count = ways.iter().map(|way| way.copies.len()).sum::<usize>();
    let mut copy = || copy_together(runtime, &ways);
    let mut target = vec![0; if floors.is_some() { 0 } else { pattern.len() }];
    let mut raw = || match &floors {
        Some(floors) => FloorCopies::run_together(floors),
        None => {
            for _ in 0..copy_count {
                std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&pattern));
            }
            Ok(())
        }
    };
    let summaries = interleave(args.warmup, args.iterations, &mut [&mut copy, &mut raw])?;
    let [copy, raw]: [Summary; 2] = summaries.try_into().map_err(|_| anyhow::anyhow!("two were measured"))?;
    let moved = size * copy_count as u64;
    let ratio = raw.p50_ns as f64 / copy.p50_ns.max(1) as f64;
    let name = || {
        let ways = if args.both { ", both ways" } else { "" };
        format!("{from} to {to}, {}, {} queued{ways}: part of raw", Bytes(size), args.queued)
    };
    Ok(Row {
        from,
        to,
        route: transfer.route(from.device(), to.device())?.kind,
        size,
        both_ways: args.both,
        queued: args.queued,
        algbw: moved as f64 / copy.p50_ns.max(1) as f64,
        ratio,
        copy,
        raw,
        raw_call: if floors.is_some() { "driver" } else { "memcpy" },
        wrong: verify(runtime, &ways, &pattern)?,
        bar: args.bar.map(|least| Bar::at_least(name(), ratio, least, "")),
    })
}

/// Copies from one place to several of one device: each has its own, so that a lost copy is found.
struct Way {
    copies: Vec<(BufferView, BufferView)>,
}

impl Way {
    fn new(runtime: &Runtime, from: End, to: End, size: u64, count: u32) -> anyhow::Result<Self> {
        let source = from.memory(runtime, size)?;
        let copies = (0..count).map(|_| Ok((source.clone(), to.memory(runtime, size)?)));
        Ok(Self { copies: copies.collect::<anyhow::Result<_>>()? })
    }

    fn source(&self) -> &BufferView {
        // There is one copy at least, by the range of `--queued`.
        &self.copies[0].0
    }
}

/// Starts the copies of all ways by turns, then waits for all of them.
fn copy_together(runtime: &Runtime, ways: &[Way]) -> anyhow::Result<()> {
    let longest = ways.iter().map(|way| way.copies.len()).max().unwrap_or(0);
    let turns = (0..longest).flat_map(|turn| ways.iter().filter_map(move |way| way.copies.get(turn)));
    let started: Vec<_> =
        turns.map(|(source, target)| runtime.transfer().copy(source, target)).collect::<Result<_, _>>()?;
    Ok(started.iter().try_for_each(|copy| copy.wait(TIMEOUT))?)
}

/// Bytes that arrive wrong. The raw calls moved the same bytes to the same places, so these are cleared and copied
/// to once more.
fn verify(runtime: &Runtime, ways: &[Way], pattern: &[u8]) -> anyhow::Result<u64> {
    let targets = || ways.iter().flat_map(|way| way.copies.iter().map(|(_, target)| target));
    let zeros = vec![0; pattern.len()];
    for target in targets() {
        runtime.transfer().write(&zeros, target, TIMEOUT)?;
    }
    copy_together(runtime, ways)?;
    targets().try_fold(0, |wrong, target| Ok(wrong + count_wrong(runtime, target, pattern)?))
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
