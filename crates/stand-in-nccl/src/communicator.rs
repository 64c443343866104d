//! Communicators: handles, what is in progress, and what is put in streams.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
};

use crate::{
    Code, control,
    driver::{Driver, Job},
    memory::Place,
    number::{DataType, Op, reduce},
    stream::Stream,
    world::{Key, Matter, Part, World},
};

pub(crate) struct Communicator {
    pub(crate) world: Arc<World>,
    pub(crate) rank: usize,
    pub(crate) blocking: bool,
    /// Its device's ordinal.
    pub(crate) device: i32,
    aborted: AtomicBool,
    /// Looks that still find a call in progress.
    pending: AtomicU64,
    leaving: AtomicBool,
    collectives: AtomicU64,
    captures: AtomicU64,
    pub(crate) derived: AtomicU64,
    pub(crate) windows: AtomicU64,
    outstanding: AtomicU64,
    factors: Mutex<BTreeMap<i32, Vec<u8>>>,
}

/// By their handles.
static COMMUNICATORS: Mutex<BTreeMap<usize, Arc<Communicator>>> = Mutex::new(BTreeMap::new());

static HANDLES: AtomicUsize = AtomicUsize::new(0x10_0000);

fn communicators() -> MutexGuard<'static, BTreeMap<usize, Arc<Communicator>>> {
    COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a stream does when it comes to it.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    Collective { call: Call, src: Place, dst: Place, count: usize, dtype: DataType, op: Option<(i32, Op)> },
    Send { src: Place, bytes: usize, to: usize },
    Recv { dst: Place, bytes: usize, from: usize },
    Put { src: Place, bytes: usize, to: usize, window: u64, offset: usize },
    Signal { to: usize },
    WaitSignals(Vec<(usize, u64)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    AllReduce,
    Reduce { root: usize },
    Broadcast { root: usize },
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather { root: usize },
    Scatter { root: usize },
}

impl Communicator {
    /// A rank of the world of a key, and its handle. One that blocks waits for the others.
    pub(crate) fn join(key: Key, rank: usize, size: usize, blocking: bool) -> Result<usize, Code> {
        let world = World::join(key, rank, size)?;
        let this = Arc::new(Self {
            world,
            rank,
            blocking,
            device: device_of_rank(),
            aborted: AtomicBool::new(false),
            pending: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            collectives: AtomicU64::new(0),
            captures: AtomicU64::new(0),
            derived: AtomicU64::new(0),
            windows: AtomicU64::new(0),
            outstanding: AtomicU64::new(0),
            factors: Mutex::default(),
        });
        // Never one that was given back, so that whoever still uses that is found.
        let handle = HANDLES.fetch_add(16, SeqCst);
        communicators().insert(handle, Arc::clone(&this));
        if blocking {
            this.world.wait_complete(|| this.is_aborted()).ok_or(Code::INTERNAL)?;
        }
        Ok(handle)
    }

    /// The communicator of a handle.
    pub(crate) fn of(handle: usize) -> Result<Arc<Self>, Code> {
        communicators().get(&handle).cloned().ok_or_else(|| {
            control::say("the communicator is none, or was given back");
            Code::INVALID_ARGUMENT
        })
    }

    /// Gives a handle back.
    pub(crate) fn forget(handle: usize) {
        communicators().remove(&handle);
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(SeqCst)
    }

    pub(crate) fn abort(&self) {
        self.aborted.store(true, SeqCst);
        self.world.stir();
    }

    /// The answer of a call that was begun: in progress for a while, if a test wants that and the call does not block.
    pub(crate) fn begun(&self, name: &str) -> Result<(), Code> {
        if self.blocking {
            return Ok(());
        }
        let looks = if control::setting("stuck").as_deref() == Some(name) {
            u64::MAX
        } else {
            control::number("pending").unwrap_or_default()
        };
        self.pending.store(looks, SeqCst);
        if looks > 0 { Err(Code::IN_PROGRESS) } else { Ok(()) }
    }

    /// What `ncclCommGetAsyncError` finds.
    pub(crate) fn state(&self) -> Result<(), Code> {
        let injected = control::setting("async").unwrap_or_default();
        if let Some((rank, code)) = injected.split_once(':')
            && rank.parse() == Ok(self.rank)
        {
            control::say("a test wants this rank to fail");
            return Err(Code(code.parse().unwrap_or_default()));
        }
        if !self.world.is_complete() {
            return Err(Code::IN_PROGRESS);
        }
        if self.leaving.load(SeqCst) && (self.outstanding.load(SeqCst) > 0 || !self.world.is_left()) {
            return Err(Code::IN_PROGRESS);
        }
        let looks = self.pending.load(SeqCst);
        if looks > 0 {
            if looks != u64::MAX {
                self.pending.fetch_sub(1, SeqCst);
            }
            return Err(Code::IN_PROGRESS);
        }
        Ok(())
    }

    /// Says that this rank is done; one that blocks waits for the others to say it too.
    pub(crate) fn finalize(&self) -> Result<(), Code> {
        if !self.leaving.swap(true, SeqCst) {
            self.world.leave();
        }
        if self.blocking {
            self.world.wait_left(|| self.is_aborted()).ok_or(Code::INTERNAL)?;
            return Ok(());
        }
        self.state()
    }

    pub(crate) fn add_factor(&self, factor: Vec<u8>) -> i32 {
        let mut factors = self.factors.lock().unwrap_or_else(PoisonError::into_inner);
        let code = factors.last_key_value().map_or(5, |(last, _)| last + 1);
        factors.insert(code, factor);
        code
    }

    pub(crate) fn remove_factor(&self, code: i32) -> Result<(), Code> {
        let mut factors = self.factors.lock().unwrap_or_else(PoisonError::into_inner);
        factors.remove(&code).map(drop).ok_or(Code::INVALID_ARGUMENT)
    }

    pub(crate) fn op(&self, code: i32) -> Result<Op, Code> {
        let factors = self.factors.lock().unwrap_or_else(PoisonError::into_inner);
        let factor = || factors.get(&code).cloned().map(Op::Premul);
        Op::built_in(code).or_else(factor).ok_or(Code::INVALID_ARGUMENT)
    }

    /// Puts work in a stream, now or at the end of the group.
    pub(crate) fn enqueue(self: &Arc<Self>, name: &str, stream: usize, work: Work) -> Result<(), Code> {
        let stream = Target::of(stream)?;
        let work = (Arc::clone(self), stream, vec![work]);
        let is_put_off = GROUP.with_borrow_mut(|group| match group {
            Some((_, all)) => {
                join(all, work.clone());
                true
            }
            None => false,
        });
        if is_put_off {
            return Ok(());
        }
        launch(work)?;
        self.begun(name)
    }

    fn run(&self, work: &[((Matter, u64), Work)]) {
        let given_up = || self.is_aborted();
        let mut sent = Vec::new();
        for (_, work) in work {
            if let Work::Send { src, bytes, to } = work {
                sent.push((*to, self.world.post(self.rank, *to, src.read(*bytes))));
            }
        }
        for (place, work) in work {
            if self.run_one(*place, work.clone()).is_none() {
                break;
            }
        }
        for (to, number) in sent {
            let _aborted = self.world.wait_taken(self.rank, to, number, given_up);
        }
    }

    /// Nothing if it was aborted.
    fn run_one(&self, place: (Matter, u64), work: Work) -> Option<()> {
        let (world, rank, given_up) = (&self.world, self.rank, || self.is_aborted());
        match work {
            Work::Collective { call, src, dst, count, dtype, op } => {
                self.collective(place, call, (src, dst), count, dtype, op)
            }
            Work::Send { .. } => Some(()),
            Work::Recv { dst, bytes, from } => {
                dst.write(&world.take(from, rank, bytes, given_up)?);
                Some(())
            }
            Work::Put { src, bytes, to, window, offset } => {
                world.window(window, to)?.at(offset).write(&src.read(bytes));
                world.signal(rank, to);
                Some(())
            }
            Work::Signal { to } => {
                world.signal(rank, to);
                Some(())
            }
            Work::WaitSignals(waits) => waits
                .into_iter()
                .try_for_each(|(from, count)| world.take_signals(from, rank, count, given_up)),
        }
    }

    fn collective(
        &self,
        place: (Matter, u64),
        call: Call,
        (src, dst): (Place, Place),
        count: usize,
        dtype: DataType,
        op: Option<(i32, Op)>,
    ) -> Option<()> {
        let (size, rank) = (self.world.size, self.rank);
        let bytes = count * dtype.size()?;
        let sent = match call {
            Call::ReduceScatter | Call::AllToAll => bytes * size,
            Call::Broadcast { root } if root != rank => 0,
            Call::Scatter { root } => {
                if root == rank {
                    bytes * size
                } else {
                    0
                }
            }
            _ => bytes,
        };
        let (code, op) = op.unwrap_or((0, Op::Sum));
        let (kind, root) = call.numbers();
        // Factors differ, and so do the codes that ranks have them by.
        let code = if matches!(op, Op::Premul(_)) { -1 } else { code };
        let same = [kind, root, i64::try_from(count).ok()?, dtype.0.into(), code.into()];
        let own = if let Op::Premul(factor) = &op { factor.clone() } else { Vec::new() };
        let part = Part { call: same.to_vec(), bytes: src.read(sent), own };
        let parts = self.world.meet(place, rank, part, || self.is_aborted())?;
        let of_rank = |all: &[u8]| all[rank * bytes..(rank + 1) * bytes].to_vec();
        let op_of = |part: &Part| match &op {
            Op::Premul(_) => Op::Premul(part.own.clone()),
            other => other.clone(),
        };
        let reduced = |parts: Vec<(Vec<u8>, Op)>| reduce(dtype, &parts).ok();
        let whole = || parts.iter().map(|part| (part.bytes.clone(), op_of(part))).collect();
        match call {
            Call::AllReduce => dst.write(&reduced(whole())?),
            Call::Reduce { root } if root == rank => dst.write(&reduced(whole())?),
            Call::ReduceScatter => {
                dst.write(&reduced(parts.iter().map(|part| (of_rank(&part.bytes), op_of(part))).collect())?);
            }
            Call::Broadcast { root } => dst.write(&parts.get(root)?.bytes),
            Call::Scatter { root } => dst.write(&of_rank(&parts.get(root)?.bytes)),
            Call::AllToAll => {
                dst.write(&parts.iter().flat_map(|part| of_rank(&part.bytes)).collect::<Vec<_>>());
            }
            Call::Gather { root } if root != rank => {}
            Call::AllGather | Call::Gather { .. } => {
                dst.write(&parts.iter().flat_map(|part| part.bytes.clone()).collect::<Vec<_>>());
            }
            Call::Reduce { .. } => {}
        }
        Some(())
    }
}

impl Call {
    /// Which call it is, and its root.
    const fn numbers(self) -> (i64, i64) {
        #[expect(clippy::cast_possible_wrap, reason = "a rank came as an int")]
        match self {
            Self::AllReduce => (0, 0),
            Self::Reduce { root } => (1, root as i64),
            Self::Broadcast { root } => (2, root as i64),
            Self::AllGather => (3, 0),
            Self::ReduceScatter => (4, 0),
            Self::AllToAll => (5, 0),
            Self::Gather { root } => (6, root as i64),
            Self::Scatter { root } => (7, root as i64),
        }
    }
}

/// The ordinal of the device on which this thread makes a rank.
fn device_of_rank() -> i32 {
    let set = || control::number("device").and_then(|device| i32::try_from(device).ok());
    Driver::named().and_then(Driver::current_device).or_else(set).unwrap_or_default()
}

type Entry = (Arc<Communicator>, Target, Vec<Work>);

/// Where work is put.
#[derive(Clone)]
enum Target {
    Own(Arc<Stream>),
    /// A stream of the driver's.
    Foreign(Driver, usize),
}

impl Target {
    fn of(handle: usize) -> Result<Self, Code> {
        if let Some(driver) = Driver::named() {
            return Ok(Self::Foreign(driver, handle));
        }
        Stream::of(handle).map(Self::Own).ok_or_else(|| {
            control::say("there is no such stream");
            Code::INVALID_ARGUMENT
        })
    }

    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Own(one), Self::Own(other)) => Arc::ptr_eq(one, other),
            (Self::Foreign(_, one), Self::Foreign(_, other)) => one == other,
            _ => false,
        }
    }
}

thread_local! {
    /// This thread's open group: how deep, and what it holds.
    static GROUP: RefCell<Option<(usize, Vec<Entry>)>> = const { RefCell::new(None) };
}

/// Adds work to that of the same communicator and stream.
fn join(all: &mut Vec<Entry>, (comm, stream, work): Entry) {
    let same = |entry: &&mut Entry| Arc::ptr_eq(&entry.0, &comm) && entry.1.is(&stream);
    match all.iter_mut().find(same) {
        Some(entry) => entry.2.extend(work),
        None => all.push((comm, stream, work)),
    }
}

fn launch((comm, target, work): Entry) -> Result<(), Code> {
    if let Target::Foreign(driver, stream) = target
        && driver.is_capturing(stream)?
    {
        return driver.enqueue(stream, Job::Again(captured(comm, work)));
    }
    // Ranks agree on the order of their calls, not on that of their streams.
    let numbered = work.into_iter().map(|work| {
        let counts = matches!(work, Work::Collective { .. });
        let number = if counts { comm.collectives.fetch_add(1, SeqCst) } else { 0 };
        ((Matter::Collective, number), work)
    });
    let numbered: Vec<_> = numbered.collect();
    comm.outstanding.fetch_add(1, SeqCst);
    let run = Box::new(move || {
        comm.run(&numbered);
        comm.outstanding.fetch_sub(1, SeqCst);
        comm.world.stir();
    });
    match target {
        Target::Own(stream) => {
            stream.push(run);
            Ok(())
        }
        Target::Foreign(driver, stream) => driver.enqueue(stream, Job::Once(run)),
    }
}

/// Work of a graph: ranks agree on the order in which they capture, and on how often each graph was replayed.
fn captured(comm: Arc<Communicator>, work: Vec<Work>) -> Box<dyn Fn() + Send + Sync> {
    let (capture, replays) = (comm.captures.fetch_add(1, SeqCst), AtomicU64::new(0));
    Box::new(move || {
        let replay = replays.fetch_add(1, SeqCst);
        let placed =
            |(index, work): (u64, &Work)| ((Matter::Replay { capture, index }, replay), work.clone());
        let placed: Vec<_> = (0..).zip(&work).map(placed).collect();
        comm.outstanding.fetch_add(1, SeqCst);
        comm.run(&placed);
        comm.outstanding.fetch_sub(1, SeqCst);
        comm.world.stir();
    })
}

pub(crate) fn start_group() {
    GROUP.with_borrow_mut(|group| group.get_or_insert_default().0 += 1);
}

pub(crate) fn end_group() -> Result<(), Code> {
    let all = GROUP.with_borrow_mut(|group| {
        let (depth, _) = group.as_mut().ok_or(Code::INVALID_USAGE)?;
        *depth -= 1;
        let is_over = *depth == 0;
        Ok(if is_over { group.take() } else { None })
    })?;
    let all = all.map(|(_, all)| all).unwrap_or_default();
    let comms: Vec<_> = all.iter().map(|(comm, ..)| Arc::clone(comm)).collect();
    if !comms.iter().all(|comm| communicators().values().any(|known| Arc::ptr_eq(known, comm))) {
        control::say("a communicator of the group was given back");
        return Err(Code::INVALID_ARGUMENT);
    }
    all.into_iter().try_for_each(launch)?;
    // All begin, whatever the first answers.
    let answers: Vec<_> = comms.iter().map(|comm| comm.begun("ncclGroupEnd")).collect();
    answers.into_iter().collect()
}
