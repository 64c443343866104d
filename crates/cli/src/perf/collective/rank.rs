//! What one rank does: makes communicators, calls, looks at the clock and at the results.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use warpweft::{
    BufferDesc, BufferView, GraphNode, PreparedGraph, Queue, QueueDesc,
    bootstrap::Rank,
    comm::{Calls, CommConfig, CommError, Communicator, EngineKind, Enqueued, Measured, TuningConfig, Way},
    transfer::{Transfer, TransferConfig},
};

use super::{
    Kind, PerfCollective, Row, args::Memory, print_head, print_row, print_table, too_large, unserved, values,
    world::Place,
};
use crate::{
    measure::Summary,
    output::{self, WrongCall},
};

/// One engine's communicator, and the queue that it is measured on.
struct Contender {
    kind: EngineKind,
    comm: Communicator,
    queue: Arc<dyn Queue>,
}

/// The operands of a rank.
struct Operands {
    src: Option<BufferView>,
    dst: Option<BufferView>,
}

pub(super) fn measure(kind: Kind, args: &PerfCollective, place: &Place) -> anyhow::Result<Vec<Row>> {
    let size = place.control.size();
    if args.root >= size {
        let last = size - 1;
        return Err(
            WrongCall(format!("-r {} is no rank: there are {size} ranks, 0 to {last}", args.root)).into()
        );
    }
    if args.in_place && matches!(kind, Kind::AllToAll | Kind::SendRecv) {
        return Err(WrongCall(format!("{} is never in place", kind.name())).into());
    }
    // First, and gone before others are made: each takes of the devices what is left.
    let tuned = Tuned::of(kind, args, place)?;
    let contenders = contenders(kind, args, place)?;
    if let Some(tuned) = tuned.as_ref().filter(|_| place.is_first() && !args.json) {
        print_table(&tuned.measured);
    }
    if let Some(first) = contenders.first().filter(|_| place.is_first() && !args.json) {
        let engines: Vec<_> = contenders.iter().map(|contender| contender.kind).collect();
        print_head(kind, args, &first.comm, &engines);
    }
    let sizes: Vec<u64> = std::iter::successors(Some(args.min), |size| size.checked_mul(args.factor))
        .take_while(|&size| size <= args.max)
        .collect();
    let bar = if place.is_first() { Some(output::progress(sizes.len() as u64, kind.name())) } else { None };
    let mut rows = Vec::new();
    for wanted in sizes {
        let new = Bench { kind, args, place, contenders: &contenders, tuned: tuned.as_ref() }.size(wanted)?;
        if let Some(bar) = &bar {
            new.iter().try_for_each(|row| bar.suspend(|| print_row(row, args.json)))?;
            bar.inc(1);
        }
        rows.extend(new);
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    Ok(rows)
}

/// A communicator for each engine that serves and does this.
fn contenders(kind: Kind, args: &PerfCollective, place: &Place) -> anyhow::Result<Vec<Contender>> {
    let wanted = if args.engine.is_empty() { EngineKind::ALL.to_vec() } else { args.engine.clone() };
    let mut contenders = Vec::new();
    for engine in wanted {
        let made = communicator(Some(engine), place)?;
        let served = made.and_then(|comm| comm.engine_for(kind.op(args), args.dtype).map(|_| comm));
        let contender = match served {
            Ok(comm) => {
                let queue = place.device.create_queue(&QueueDesc::default())?;
                let bench = Bench { kind, args, place, contenders: &[], tuned: None };
                let contender = Contender { kind: engine, comm, queue };
                let replays = bench.replays_calls_of(&contender)?;
                // Who drops a communicator has left it, which others would be told in place of what they ask.
                place.control.barrier("engines of a measurement", place.timeout)?;
                replays.map(|()| contender)
            }
            Err(error) => Err(error),
        };
        match contender {
            Ok(contender) => contenders.push(contender),
            Err(error @ (CommError::NoEngine { .. } | CommError::Unsupported { .. })) => {
                if place.is_first() && !args.engine.is_empty() {
                    output::note(&unserved(engine, &error));
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    if contenders.is_empty() {
        let graphs = if args.graph > 0 { " in graphs" } else { "" };
        anyhow::bail!("no engine does {} of {}{graphs} with these ranks", kind.op(args), args.dtype);
    }
    Ok(contenders)
}

fn communicator(
    engine: Option<EngineKind>,
    place: &Place,
) -> anyhow::Result<Result<Communicator, CommError>> {
    let config = CommConfig { engine, timeout: place.timeout, ..CommConfig::default() };
    Ok(Communicator::create(place.group()?, &place.device, &config, place.timeout))
}

/// What a communicator has measured, and would take if no engine were named.
struct Tuned {
    measured: Vec<Measured>,
    /// For calls that nothing was measured of.
    usual: EngineKind,
}

impl Tuned {
    fn of(kind: Kind, args: &PerfCollective, place: &Place) -> anyhow::Result<Option<Self>> {
        if !args.explain {
            return Ok(None);
        }
        let comm = tuned(args, place)?;
        let usual = comm.engine_for(kind.op(args), args.dtype)?;
        let tuned = Self { measured: comm.measured().to_vec(), usual };
        // Who drops a communicator has left it, which others would be told in place of what they ask.
        place.control.barrier("what a communicator has measured", place.timeout)?;
        Ok(Some(tuned))
    }
}

fn tuned(args: &PerfCollective, place: &Place) -> anyhow::Result<Communicator> {
    let tuning = TuningConfig { cache: args.tuning_cache.clone(), ..TuningConfig::default() };
    let config = CommConfig { timeout: place.timeout, tuning: Some(tuning), ..CommConfig::default() };
    Ok(Communicator::create(place.group()?, &place.device, &config, place.timeout)?)
}

/// The measurement of one size.
struct Bench<'a> {
    kind: Kind,
    args: &'a PerfCollective,
    place: &'a Place,
    contenders: &'a [Contender],
    tuned: Option<&'a Tuned>,
}

impl Bench<'_> {
    /// What would be taken for calls of this size if no engine were named.
    fn chosen(&self, size: u64) -> Option<Way> {
        let tuned = self.tuned?;
        let (op, dtype) = (self.kind.op(self.args), self.args.dtype);
        let (gives, gets) = self.kind.parts(u64::from(self.place.control.size()));
        let bytes = size / gives.max(gets);
        let measured = Measured::find(&tuned.measured, op, dtype, bytes, self.args.graph > 0);
        let fastest = measured.and_then(|measured| measured.ways.first()).map(|(way, _)| *way);
        fastest.or(Some(Way { engine: tuned.usual, shape: None }))
    }

    /// Why it cannot replay an engine's calls, if that is asked for.
    fn replays_calls_of(&self, contender: &Contender) -> anyhow::Result<Result<(), CommError>> {
        if self.args.graph == 0 {
            return Ok(Ok(()));
        }
        let operands = self.operands(self.unit())?;
        Ok(self.calls(contender, &operands)?.nodes().map(drop))
    }

    /// The smallest size, of which every rank has an element.
    fn unit(&self) -> u64 {
        self.args.dtype.size_bytes() * u64::from(self.place.control.size())
    }

    /// Measures all engines; rank 0 has rows.
    fn size(&self, wanted: u64) -> anyhow::Result<Vec<Row>> {
        let size = (wanted / self.unit()).max(1) * self.unit();
        let operands = self.operands(size)?;
        let mut times = vec![Vec::with_capacity(self.args.rounds as usize); self.contenders.len()];
        for round in 0..self.args.warmup.saturating_add(self.args.rounds) {
            for (contender, times) in self.contenders.iter().zip(&mut times) {
                let took = self.round(contender, &operands)?;
                if round >= self.args.warmup {
                    times.push(took);
                }
            }
        }
        let mut rows = Vec::new();
        for (contender, times) in self.contenders.iter().zip(times) {
            let wrong = if self.args.check == 1 { Some(self.wrong(contender, &operands)?) } else { None };
            rows.extend(self.row(contender, size, &times, wrong)?);
        }
        Ok(rows)
    }

    /// One call's time of calls that are made together.
    fn round(&self, contender: &Contender, operands: &Operands) -> anyhow::Result<Duration> {
        let within = self.place.timeout;
        let calls = self.args.iterations;
        // The ranks begin together: none leaves this before all have come to it.
        self.calls(contender, operands)?.wait(within)?;
        if self.args.blocking {
            let started = Instant::now();
            for _ in 0..calls {
                self.calls(contender, operands)?.wait(within)?;
            }
            return Ok(started.elapsed() / calls);
        }
        if self.args.graph > 0 {
            return self.replays(contender, operands);
        }
        let started = Instant::now();
        let mut last = None;
        for _ in 0..calls {
            last = Some(self.enqueue(contender, operands)?);
        }
        last.map_or(Ok(()), |last| last.wait(within))?;
        Ok(started.elapsed() / calls)
    }

    fn enqueue(&self, contender: &Contender, operands: &Operands) -> anyhow::Result<Enqueued> {
        Ok(self.calls(contender, operands)?.on(&contender.queue)?)
    }

    fn replays(&self, contender: &Contender, operands: &Operands) -> anyhow::Result<Duration> {
        let mut nodes: Vec<GraphNode> = Vec::new();
        for _ in 0..self.args.graph {
            for op in self.calls(contender, operands)?.nodes()? {
                let before: Vec<usize> = nodes.len().checked_sub(1).into_iter().collect();
                nodes.push(GraphNode::new(op, &before));
            }
        }
        let graph = PreparedGraph::new(self.place.device.as_ref(), &nodes)?;
        contender.comm.replay(&graph, &contender.queue)?.wait(self.place.timeout)?;
        let replays = self.args.iterations.div_ceil(self.args.graph);
        let started = Instant::now();
        let mut last = None;
        for _ in 0..replays {
            last = Some(contender.comm.replay(&graph, &contender.queue)?);
        }
        last.map_or(Ok(()), |last| last.wait(self.place.timeout))?;
        Ok(started.elapsed() / (replays * self.args.graph))
    }

    fn calls<'a>(&self, contender: &'a Contender, operands: &'a Operands) -> anyhow::Result<Calls<'a>> {
        let (comm, dtype) = (&contender.comm, self.args.dtype);
        let (src, dst) = (operands.src.as_ref(), operands.dst.as_ref());
        let (rank, ranks) = (comm.rank(), comm.world_size());
        if let (Kind::SendRecv, Some(src), Some(dst)) = (self.kind, src, dst) {
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            return Ok(comm.send_recv(dtype, (next, src), (before, dst))?);
        }
        Ok(comm.call(self.kind.op(self.args), dtype, src, dst)?.into())
    }

    fn operands(&self, size: u64) -> anyhow::Result<Operands> {
        let (rank, ranks) = (u64::from(self.place.control.rank().0), u64::from(self.place.control.size()));
        let (gives, gets) = self.kind.parts(ranks);
        let (has_src, has_dst) = self.kind.has(rank == u64::from(self.args.root));
        let bytes = |parts: u64| size / gives.max(gets) * parts;
        let allocate = |bytes: u64| -> anyhow::Result<BufferView> {
            let desc = match self.args.memory {
                Memory::Device => BufferDesc::device(bytes),
                Memory::HostVisible => BufferDesc::host_visible(bytes),
            };
            let buffer = self.place.device.allocate(&desc).map_err(|error| too_large(size, &error))?;
            Ok(BufferView::whole(buffer))
        };
        if !(self.args.in_place && has_src && has_dst) {
            let operand = |has: bool, parts: u64| has.then(|| allocate(bytes(parts))).transpose();
            return Ok(Operands { src: operand(has_src, gives)?, dst: operand(has_dst, gets)? });
        }
        let whole = allocate(size)?;
        let part = size / gives.max(gets);
        let own = || whole.slice(rank * part..(rank + 1) * part);
        let (src, dst) = match gives.cmp(&gets) {
            std::cmp::Ordering::Equal => (whole.clone(), whole.clone()),
            std::cmp::Ordering::Less => (own()?, whole.clone()),
            std::cmp::Ordering::Greater => (whole.clone(), own()?),
        };
        Ok(Operands { src: Some(src), dst: Some(dst) })
    }

    /// Elements that are wrong after one call, on all ranks.
    fn wrong(&self, contender: &Contender, operands: &Operands) -> anyhow::Result<u64> {
        let (dtype, op) = (self.args.dtype, self.kind.op(self.args));
        let (rank, ranks) = (self.place.control.rank().0, self.place.control.size());
        let (device, within) = (Arc::clone(&self.place.device), self.place.timeout);
        let transfer = Transfer::new([device], TransferConfig::default())?;
        let bytes_of = |count: u64, value: &dyn Fn(u64) -> u64| {
            let mut bytes = Vec::new();
            (0..count).for_each(|place| values::encode(dtype, value(place), &mut bytes));
            bytes
        };
        if let Some(dst) = &operands.dst {
            transfer.write(&vec![0xff; usize::try_from(dst.size())?], dst, within)?;
        }
        if let Some(src) = &operands.src {
            let input = |place| values::input(op.reduction(), dtype, ranks, rank, place);
            transfer.write(&bytes_of(src.size() / dtype.size_bytes(), &input), src, within)?;
        }
        self.calls(contender, operands)?.wait(within)?;
        let mut wrong = 0_u64;
        if let Some(dst) = &operands.dst {
            let count = dst.size() / dtype.size_bytes();
            let expected = |place| values::expected(op, dtype, (rank, ranks), count, place);
            let expected = bytes_of(count, &expected);
            let mut found = vec![0; expected.len()];
            transfer.read(dst, &mut found, within)?;
            let element = usize::try_from(dtype.size_bytes())?;
            let pairs = found.chunks(element).zip(expected.chunks(element));
            wrong = pairs.filter(|(found, expected)| found != expected).count() as u64;
        }
        let all = self.place.control.all_gather("wrong elements", &wrong.to_le_bytes(), within)?;
        let read = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_le_bytes);
        Ok(all.iter().map(read).sum())
    }

    /// What rank 0 tells of an engine: of each round, the slowest rank's time.
    fn row(
        &self,
        contender: &Contender,
        size: u64,
        times: &[Duration],
        wrong: Option<u64>,
    ) -> anyhow::Result<Option<Row>> {
        let nanos = |time: &Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).to_le_bytes();
        let own: Vec<u8> = times.iter().flat_map(nanos).collect();
        let all = self.place.control.all_gather("times", &own, self.place.timeout)?;
        if self.place.control.rank() != Rank(0) {
            return Ok(None);
        }
        let of_round = |round: usize| {
            let of_rank =
                |bytes: &Vec<u8>| bytes.as_chunks::<8>().0.get(round).copied().map(u64::from_le_bytes);
            Duration::from_nanos(all.iter().filter_map(of_rank).max().unwrap_or(0))
        };
        let slowest: Vec<Duration> = (0..times.len()).map(of_round).collect();
        let (time, ranks) = (Summary::of(&slowest), self.place.control.size());
        let algbw = size as f64 / time.p50_ns.max(1) as f64;
        let op = self.kind.op(self.args);
        Ok(Some(Row {
            collective: self.kind,
            engine: contender.kind,
            ranks,
            dtype: self.args.dtype,
            op: op.reduction(),
            root: if self.kind == Kind::SendRecv { None } else { op.peer() },
            in_place: self.args.in_place,
            graph: (self.args.graph > 0).then_some(self.args.graph),
            blocking: self.args.blocking,
            size,
            count: size / self.args.dtype.size_bytes(),
            algbw,
            busbw: algbw * self.kind.bus_factor(ranks),
            time,
            wrong,
            chosen: self.chosen(size),
        }))
    }
}
