//! Calls that wait for residents, made beside one: how long each takes to its end, and how long the resident
//! pauses meanwhile. By us, and by hand without a word to anybody.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use warpweft_core_types::{
    Arg, Backend as _, Buffer, BufferDesc, BufferView, CodeFormat, Device, Features, FillRegion, ForeignCode,
    HostMemory, Kernel, Launch, Op, Queue, SemaphorePoint, Submission,
};
use warpweft_host::HostBackend;

use super::{
    raw::Raw,
    resident::{Beat, THROUGH},
    samples::{Samples, judge, timed},
};
use crate::{
    kernels,
    rig::{Bench, LIMIT, report, say},
};

/// Rounds of calls beside one resident.
const ROUNDS: usize = 21;

/// Longer than residents remember a call that nobody announced.
const BETWEEN: Duration = Duration::from_millis(8);

/// Of pinned memory.
const PINNED: u64 = 1 << 20;

/// What a call may take, and how long the resident may pause meanwhile, in microseconds.
const MOST_US: f64 = 2000.0;
const MOST_PAUSE_US: f64 = 400.0;

/// Machine code that this process has not seen before, for one run of calls. Made before a resident runs, since
/// making it holds residents up too.
pub(super) struct Unseen(Vec<(Vec<u8>, u32)>);

impl Unseen {
    pub(super) fn prepare(raw: &Raw) -> Result<Self> {
        let codes = (0..ROUNDS).map(|_| {
            let (code, number) = kernels::unseen();
            Ok((raw.assemble(&code)?, number))
        });
        Ok(Self(codes.collect::<Result<_>>()?))
    }
}

/// Our calls, judged.
pub(super) fn our_calls(bench: &Bench, beat: &Beat, unseen: Unseen, shape: &str) -> Result<()> {
    let (ours, mut table) = (Ours::new(bench)?, Table::new(bench, beat));
    for (cubin, number) in unseen.0 {
        let kernel =
            table.time("load and first launch", ours.calling(move |ours| ours.load(cubin, number)))?;
        table.time("device memory: allocate, fill and free", ours.calling(Ours::device_memory))?;
        table.time("host memory: unregister", ours.calling(|ours| ours.unregister(())))?;
        // The service thread does one after the other, and only the latter's end can be seen.
        table
            .time("unload, and an unregister behind it", ours.calling(move |ours| ours.unregister(kernel)))?;
    }
    table.tell("ours", shape);
    table.judge(shape);
    Ok(())
}

/// The same by hand.
pub(super) fn raw_calls(bench: &Bench, raw: &Raw, beat: &Beat, unseen: Unseen, shape: &str) -> Result<()> {
    let (out, host) = (raw.pin(256)?, host_memory(&host_device()?)?);
    let mut table = Table::new(bench, beat);
    for (cubin, _) in unseen.0 {
        let module = table.time("load and first launch", || {
            let mut module = None;
            let took = timed(|| {
                module = Some(raw.load_and_launch(&cubin, out)?);
                Ok(())
            })?;
            Ok((took, module.context("it was loaded")?))
        })?;
        table.time("pinned memory: free", || Ok((raw.time_pinned_free(usize::try_from(PINNED)?)?, ())))?;
        table.time("host memory: unregister", || Ok((raw.time_unregister(&host)?, ())))?;
        table.time("unload", || Ok((timed(|| raw.unload(module))?, ())))?;
    }
    table.tell("raw calls", shape);
    Ok(())
}

/// What our calls are made with, on a thread of their own.
#[derive(Clone)]
struct Ours {
    device: Arc<dyn Device>,
    queue: Arc<dyn Queue>,
    /// Whose memory is pinned.
    host: Arc<dyn Device>,
}

impl Ours {
    fn new(bench: &Bench) -> Result<Self> {
        Ok(Self { device: Arc::clone(&bench.device), queue: bench.new_queue()?, host: host_device()? })
    }

    /// A call on a thread that is given up should it hang.
    fn calling<T: Send + 'static>(
        &self,
        call: impl FnOnce(Self) -> Result<(Duration, T)> + Send + 'static,
    ) -> impl FnOnce() -> Result<(Duration, T)> {
        let ours = self.clone();
        move || {
            let (sender, receiver) = mpsc::channel();
            thread::spawn(move || sender.send(call(ours)));
            receiver.recv_timeout(THROUGH).context("it did not get through")?
        }
    }

    fn run(&self, op: Op<'_>) -> Result<()> {
        let done = SemaphorePoint::new(&self.device.create_semaphore(0)?, 1);
        self.queue.submit(&Submission { waits: &[], ops: &[op], signals: std::slice::from_ref(&done) })?;
        Ok(done.wait(LIMIT)?)
    }

    fn load(self, cubin: Vec<u8>, number: u32) -> Result<(Duration, Arc<dyn Kernel>)> {
        let out = BufferView::whole(self.device.allocate(&BufferDesc::host_visible(4))?);
        let code = ForeignCode::Binary { format: CodeFormat::Cubin, bytes: cubin };
        let code = kernels::foreign(vec![kernels::second_contract()], code);
        let began = Instant::now();
        let kernel = self.device.load(&code)?.kernel("second")?;
        self.run(Op::Launch(Launch::new(&kernel, [1, 1, 1], &[Arg::Buffer(&out)])?))?;
        let took = began.elapsed();
        let mut word = [0; 4];
        out.read(&mut word)?;
        ensure!(u32::from_le_bytes(word) == number, "the second module stored {word:?}");
        Ok((took, kernel))
    }

    fn device_memory(self) -> Result<(Duration, ())> {
        let took = timed(|| {
            let view = BufferView::whole(self.device.allocate(&BufferDesc::device(64 << 20))?);
            self.run(Op::Fill(FillRegion::bytes(&view, 1)))
        })?;
        Ok((took, ()))
    }

    /// Drops `before`, then memory of the host that the device knows; the time until the memory is let go.
    fn unregister<T>(self, before: T) -> Result<(Duration, ())> {
        let own = self.host.allocate(&BufferDesc::host_visible(PINNED))?;
        let kept = Arc::downgrade(&own);
        let memory = HostMemory::of_buffer(own).context("memory of the host")?;
        let known = self.device.host_import().context("imports of host memory")?.import(memory)?;
        let began = Instant::now();
        drop(before);
        drop(known);
        while kept.strong_count() > 0 {
            ensure!(began.elapsed() < THROUGH, "host memory is not let go");
        }
        Ok((began.elapsed(), ()))
    }
}

fn host_device() -> Result<Arc<dyn Device>> {
    Ok(HostBackend::with_devices(1)?.open(0, Features::HOST_VISIBLE_MEMORY)?)
}

fn host_memory(host: &Arc<dyn Device>) -> Result<BufferView> {
    let buffer: Arc<dyn Buffer> = host.allocate(&BufferDesc::host_visible(PINNED))?;
    Ok(BufferView::whole(buffer))
}

/// Times of calls, and of the longest pause of the resident during each.
struct Table<'a> {
    bench: &'a Bench,
    beat: &'a Beat,
    rows: Vec<Row>,
}

struct Row {
    call: &'static str,
    took: Samples,
    pause: Samples,
}

impl<'a> Table<'a> {
    const fn new(bench: &'a Bench, beat: &'a Beat) -> Self {
        Self { bench, beat, rows: Vec::new() }
    }

    /// Makes a call, once what came before it is forgotten.
    fn time<T>(&mut self, call: &'static str, make: impl FnOnce() -> Result<(Duration, T)>) -> Result<T> {
        thread::sleep(BETWEEN);
        let gaps = self.beat.gap_count(self.bench)?;
        let (took, value) = make().context(call)?;
        let pause = self.beat.longest_gap_since(self.bench, gaps)?;
        let row = self.row(call);
        row.took.add(took);
        row.pause.add(pause);
        Ok(value)
    }

    fn row(&mut self, call: &'static str) -> &mut Row {
        let known = self.rows.iter().position(|row| row.call == call);
        let position = known.unwrap_or_else(|| {
            self.rows.push(Row { call, took: Samples::default(), pause: Samples::default() });
            self.rows.len() - 1
        });
        &mut self.rows[position]
    }

    fn tell(&self, who: &str, shape: &str) {
        for Row { call, took, pause } in &self.rows {
            report(&json!({"cold call": call, "who": who, "beside": shape, "time": took.json(),
                "longest pause": pause.json()}));
            say(&format!("{shape}, {who}: {call} {}; longest pause {}", took.words(), pause.words()));
        }
    }

    fn judge(&self, shape: &str) {
        for Row { call, took, pause } in &self.rows {
            judge(&took.at_most(format!("{call}, beside {shape}"), MOST_US));
            judge(&pause.at_most(format!("longest pause of {shape}, {call}"), MOST_PAUSE_US));
        }
    }
}
