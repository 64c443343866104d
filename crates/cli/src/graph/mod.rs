//! Graphs for people without code: described in a file, inferred, explained, drawn, and run.

mod args;
mod check;
mod file;
mod record;
mod report;
mod serial;

use std::{
    fs::{self, File},
    io::Read as _,
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use serde::Serialize;
use warpweft::{
    Bytes, Deadline, Device, Runtime,
    graph_runtime::{Buffer, ExecutableGraph, Graph, NodeId},
};

pub(crate) use self::args::GraphArgs;
use self::{check::Description, record::Recorded, report::Report, serial::Serial};
use crate::{
    measure::Summary,
    output::{self, WrongCall},
    select,
};

pub(crate) fn run(args: &GraphArgs) -> anyhow::Result<ExitCode> {
    let description = read(&args.file)?;
    let mut builder = Runtime::builder();
    for backend in select::backends(&args.selection(description.devices))? {
        builder = builder.shared_backend(backend);
    }
    let runtime = builder.build()?;
    let Recorded { buffers, graph } = record::record(&description, runtime.devices())?;
    let pictures = [(&args.dot, Graph::to_dot as fn(&Graph) -> String), (&args.svg, Graph::to_svg)];
    let mut written = false;
    for (path, render) in pictures {
        if let Some(path) = path {
            fs::write(path, render(&graph))
                .with_context(|| format!("{} cannot be written", path.display()))?;
            written = true;
        }
    }
    let why = why(&graph, &args.why)?;
    let report = Report::new(&description, &graph, runtime.devices(), why.as_ref());
    let ran = if args.run { Some(execute(args, &description, &runtime, buffers, graph)?) } else { None };
    if args.json {
        report.print_json(ran.as_ref())?;
    } else {
        if args.why.is_empty() && !written && !args.run {
            report.print(&args.file);
        }
        report.print_why();
        if let Some(ran) = &ran {
            report.print_notes();
            ran.print();
        }
    }
    let failed = ran.is_some_and(|ran| ran.wrong_bytes > 0);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Reads a description. One that is not right is a wrong call, with code 2.
fn read(path: &Path) -> anyhow::Result<Description> {
    /// A hundred thousand nodes take less; a device that never ends is no description.
    const LONGEST: u64 = 32 << 20;
    let wrong = |problem: &dyn std::fmt::Display| WrongCall(format!("{}: {problem}", path.display()));
    let mut text = String::new();
    let file = File::open(path).map_err(|error| wrong(&error))?;
    file.take(LONGEST + 1).read_to_string(&mut text).map_err(|error| wrong(&error))?;
    if text.len() as u64 > LONGEST {
        return Err(wrong(&format!("is longer than {}, the most that is read", Bytes(LONGEST))).into());
    }
    let file = serde_json::from_str(&text).map_err(|error| wrong(&error))?;
    Ok(Description::new(file).map_err(|fault| wrong(&fault))?)
}

/// The two nodes that `--why` is about, with what lies between them.
fn why(graph: &Graph, names: &[String]) -> anyhow::Result<Option<report::Why>> {
    let [earlier, later] = match names {
        [] => return Ok(None),
        [earlier, later] => [earlier, later],
        _ => return Err(WrongCall("--why takes two nodes, such as --why 0,3".to_owned()).into()),
    };
    let (earlier, later) = (node(graph, earlier)?, node(graph, later)?);
    let reasons = graph.why(earlier, later);
    Ok(Some(report::Why { earlier, later, reasons }))
}

/// A node by its number, or the first of its name.
fn node(graph: &Graph, wanted: &str) -> anyhow::Result<NodeId> {
    let number: Option<usize> = wanted.parse().ok();
    let by_number = graph.ids().find(|id| Some(id.index()) == number);
    let found = by_number.or_else(|| graph.ids().find(|id| graph.name(*id) == Some(wanted)));
    let last = graph.len().saturating_sub(1);
    found.ok_or_else(|| {
        let text =
            format!("there is no node {wanted:?}; give a number from 0 to {last}, or a name from the file");
        WrongCall(text).into()
    })
}

/// What came of running a graph.
#[derive(Debug, Serialize)]
struct Ran {
    replays: u32,
    /// From each submission to its end, several of them under way at once.
    replay: Summary,
    compared_bytes: u64,
    wrong_bytes: u64,
    /// Where the first of them is.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_wrong: Option<String>,
}

impl Ran {
    fn print(&self) {
        let Self { replays, compared_bytes, wrong_bytes, .. } = self;
        let runs = if *replays == 1 { "1 run".to_owned() } else { format!("{replays} runs") };
        let text = format!(
            "{runs}, {:.1} us each in the middle: {} compared with a serial run",
            self.replay.p50_ns as f64 / 1e3,
            Bytes(*compared_bytes)
        );
        match &self.first_wrong {
            None => output::good(&text),
            Some(first) => {
                output::wrong(&format!("{text}; {wrong_bytes} bytes differ, the first at {first}"))
            }
        }
    }
}

fn execute(
    args: &GraphArgs,
    description: &Description,
    runtime: &Runtime,
    buffers: Vec<Buffer>,
    graph: Graph,
) -> anyhow::Result<Ran> {
    let mut serial = Serial::new(description);
    for (buffer, bytes) in buffers.iter().zip(&serial.buffers) {
        runtime.transfer().write(bytes, buffer.view(), args.timeout)?;
    }
    let times = replay(&graph.prepare()?, args.replays, args.timeout)?;
    (0..args.replays).for_each(|_| serial.run(description));
    let mut ran = Ran {
        replays: args.replays,
        replay: Summary::of(&times),
        compared_bytes: 0,
        wrong_bytes: 0,
        first_wrong: None,
    };
    for ((buffer, expected), spec) in buffers.iter().zip(&serial.buffers).zip(&description.buffers) {
        let mut bytes = vec![0; expected.len()];
        runtime.transfer().read(buffer.view(), &mut bytes, args.timeout)?;
        let wrong = || bytes.iter().zip(expected).enumerate().filter(|(_, (got, wanted))| got != wanted);
        if let (None, Some((at, (got, wanted)))) = (&ran.first_wrong, wrong().next()) {
            ran.first_wrong = Some(format!("byte {at} of {:?}: {got} for {wanted}", spec.name));
        }
        ran.wrong_bytes += wrong().count() as u64;
        ran.compared_bytes += bytes.len() as u64;
    }
    Ok(ran)
}

/// Submits a graph so many times, as fast as it takes submissions, and waits for all.
fn replay(graph: &ExecutableGraph, replays: u32, timeout: Duration) -> anyhow::Result<Vec<Duration>> {
    let mut times = Vec::new();
    let mut under_way = std::collections::VecDeque::new();
    for _ in 0..replays {
        let started = Instant::now();
        under_way.push_back((started, graph.submit_by(Deadline::within(timeout))?));
        while under_way.front().is_some_and(|(_, completion)| completion.is_complete())
            && let Some((started, completion)) = under_way.pop_front()
        {
            completion.wait(timeout)?;
            times.push(started.elapsed());
        }
    }
    for (started, completion) in under_way {
        completion.wait(timeout)?;
        times.push(started.elapsed());
    }
    Ok(times)
}

/// The device of a number in a file. Numbers count on from the first device again where there are fewer of them.
fn numbered(devices: &[Arc<dyn Device>], number: u32) -> &Arc<dyn Device> {
    &devices[number as usize % devices.len()]
}
