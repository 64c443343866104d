//! Starting copies.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use warpweft_core_types::{
    BufferDesc, BufferView, CopyRegion, Deadline, Device, DeviceId, OpenError, RangeError, SemaphorePoint,
};

use crate::{
    CopyHandle, CopyOptions, Route, RouteKind, TransferConfig, TransferError,
    devices::Devices,
    driver::{Canceller, Driver, Job, Permit},
    lanes::{self, Lane, submit_chunk},
    plan::{Plan, Stages},
    route::{Network, Stop},
};

/// Copies bytes between any two of the devices it was made for.
///
/// It may be used from many threads. Copies from one device's memory to another's run in the order they were
/// started; copies between other pairs, or the other way, run side by side with them. A device's own memory and
/// its host-visible memory are two, so that what goes up does not wait for what comes down.
#[derive(Debug)]
pub struct Transfer {
    devices: Devices,
    network: Network,
    config: TransferConfig,
    routes: RwLock<HashMap<(Memory, Memory), Arc<Planned>>>,
    driver: OnceLock<Driver>,
    next_job: AtomicU64,
}

/// One of the memories that a device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Memory {
    device: DeviceId,
    is_host_visible: bool,
}

impl Memory {
    fn of(view: &BufferView) -> Self {
        Self { device: view.device(), is_host_visible: view.buffer().kind().is_host_visible() }
    }

    fn own(device: DeviceId) -> Self {
        Self { device, is_host_visible: false }
    }
}

/// A route, and what copies over it share.
#[derive(Debug)]
struct Planned {
    route: Arc<Route>,
    pair: Mutex<Pair>,
}

/// What the copies between two memories share. It belongs to this pair alone, so that no copy waits for
/// devices that are none of its business.
#[derive(Debug, Default)]
struct Pair {
    line: Option<Line>,
    /// The end of the last copy that keeps the order.
    tail: Option<Tail>,
}

/// Lanes that stay open, with the memory between their hops.
#[derive(Debug)]
struct Line {
    lanes: Vec<Lane>,
    stages: Stages,
    /// Chunks that went through the stages.
    passed: u64,
}

#[derive(Debug)]
struct Tail {
    point: SemaphorePoint,
    /// It runs on the pair's line, whose queues keep the order by themselves.
    in_line: bool,
}

impl Tail {
    /// The point, as long as something still has to come behind it.
    fn pending(&self) -> Option<&SemaphorePoint> {
        matches!(self.point.poll(), Ok(false)).then_some(&self.point)
    }
}

impl Transfer {
    /// Looks at the links of `devices` and sets up copies between them.
    ///
    /// # Errors
    ///
    /// [`TransferError::InvalidConfig`], [`TransferError::DuplicateDevice`], or [`TransferError::Links`].
    pub fn new(
        devices: impl IntoIterator<Item = Arc<dyn Device>>,
        config: TransferConfig,
    ) -> Result<Self, TransferError> {
        config.check()?;
        let devices = Devices::new(devices.into_iter().collect())?;
        Ok(Self {
            network: Network::new(&devices)?,
            devices,
            config,
            routes: RwLock::default(),
            driver: OnceLock::new(),
            next_job: AtomicU64::new(0),
        })
    }

    /// The way bytes take from one device to another.
    ///
    /// # Errors
    ///
    /// [`TransferError::UnknownDevice`] or [`TransferError::Unreachable`].
    pub fn route(&self, from: DeviceId, to: DeviceId) -> Result<Arc<Route>, TransferError> {
        Ok(Arc::clone(&self.planned(Memory::own(from), Memory::own(to))?.route))
    }

    /// Starts to copy all of `src` to all of `dst`, after the copies between the same memories before it.
    ///
    /// # Errors
    ///
    /// A [`TransferError`] if it cannot start; what happens later is the handle's to tell. Too many copies at
    /// once are refused with [`SubmitError::QueueFull`](warpweft_core_types::SubmitError::QueueFull): wait for
    /// one and try again. If a device fails just now, part of the bytes may have been written.
    pub fn copy(&self, src: &BufferView, dst: &BufferView) -> Result<CopyHandle, TransferError> {
        self.copy_with(src, dst, CopyOptions::default())
    }

    /// As [`Transfer::copy`], with more to ask for.
    ///
    /// A copy that waits for other work or has a time limit has queues of its own and is not ordered with
    /// other copies.
    ///
    /// # Errors
    ///
    /// As [`Transfer::copy`].
    pub fn copy_with(
        &self,
        src: &BufferView,
        dst: &BufferView,
        options: CopyOptions,
    ) -> Result<CopyHandle, TransferError> {
        let due = options.time_limit.and_then(|limit| Instant::now().checked_add(limit));
        let region = CopyRegion::new(src, dst)?;
        let planned = self.planned(Memory::of(src), Memory::of(dst))?;
        let span = tracing::debug_span!("copy", from = %src.device(), to = %dst.device(), bytes = src.size());
        let _entered = span.enter();
        let unordered = due.is_some() || options.after.iter().any(|point| !matches!(point.poll(), Ok(true)));
        if unordered {
            return self.follow(&planned.route, region, options, due);
        }
        // Held while the copy is handed over: the next copy of the pair comes behind it.
        let mut pair = planned.pair.lock().unwrap_or_else(PoisonError::into_inner);
        let behind = pair.tail.as_ref().filter(|tail| tail.pending().is_some());
        let line_is_behind = behind.is_some_and(|tail| !tail.in_line);
        let handle = if line_is_behind || !self.fits_line(&planned.route, src.size()) {
            let after = behind.map(|tail| tail.point.clone()).into_iter().collect();
            self.follow(&planned.route, region, CopyOptions { after, time_limit: None }, None)?
        } else {
            self.hand_over(&planned.route, region, &mut pair)?
        };
        pair.tail = Some(Tail { point: handle.done(), in_line: handle.canceller.is_none() });
        Ok(handle)
    }

    /// Whether the devices can be handed a copy as a whole.
    fn fits_line(&self, route: &Route, size: u64) -> bool {
        let chunk = if route.stops.len() > 2 { self.config.chunk } else { self.config.direct_chunk };
        route.kind != RouteKind::Staged && size.div_ceil(chunk.0) <= u64::from(self.config.ahead)
    }

    /// Hands a whole copy to the devices.
    fn hand_over(
        &self,
        route: &Arc<Route>,
        region: CopyRegion<'_>,
        pair: &mut Pair,
    ) -> Result<CopyHandle, TransferError> {
        let line = self.line(route, region, pair)?;
        let hops = line.stages.hops(&self.devices, route);
        let plan = Plan::new(hops, &line.stages, (region.src(), region.dst()), line.passed, &self.config);
        let chunks = plan.chunk_count();
        if plan.needs_processor() {
            // The reader could not import the memory after all.
            return self.follow(route, region, CopyOptions::default(), None);
        }
        line.lanes.iter().try_for_each(|lane| lane.check_room(chunks))?;
        for chunk in 0..chunks {
            if let Err(error) = submit_chunk(&plan, &line.lanes, chunk, &[]) {
                // Counts may be wrong from here on, so the line is given up.
                pair.line = None;
                return Err(error);
            }
        }
        let handle = handle(route, &plan, &line.lanes, None)?;
        line.passed += chunks;
        line.lanes.iter_mut().for_each(|lane| lane.advance(chunks));
        Ok(handle)
    }

    /// The pair's line, made anew if it broke, with memory that suits the copy.
    fn line<'p>(
        &self,
        route: &Route,
        region: CopyRegion<'_>,
        pair: &'p mut Pair,
    ) -> Result<&'p mut Line, TransferError> {
        let size = region.src().size();
        let stages = || Stages::allocate(&self.devices, route, size, &self.config);
        let usable = pair.line.take().filter(|line| !line.lanes.iter().any(Lane::is_broken));
        let usable = match usable {
            Some(line) if line.stages.suit(size, &self.config) => return Ok(pair.line.insert(line)),
            usable => usable,
        };
        // Earlier copies keep the memory they use; this one begins with fresh slots.
        let stages = stages()?;
        let hops = stages.hops(&self.devices, route);
        // Memory that could not be imported before may be now, and then there is a hop less.
        let lanes = match usable.filter(|line| line.lanes.len() == hops.len()) {
            Some(line) => line.lanes,
            None => lanes::open(&self.devices, &hops, region.dst().device(), &self.config)?,
        };
        Ok(pair.line.insert(Line { lanes, stages, passed: 0 }))
    }

    /// Leaves a copy to the driver, on lanes and memory of its own.
    fn follow(
        &self,
        route: &Arc<Route>,
        region: CopyRegion<'_>,
        options: CopyOptions,
        due: Option<Instant>,
    ) -> Result<CopyHandle, TransferError> {
        let (src, dst) = (region.src(), region.dst());
        let stages = Stages::allocate(&self.devices, route, src.size(), &self.config)?;
        let plan = Plan::new(stages.hops(&self.devices, route), &stages, (src, dst), 0, &self.config);
        let lanes = lanes::open(&self.devices, &plan.hops, dst.device(), &self.config)?;
        let CopyOptions { after, time_limit } = options;
        let (after, permit) = match time_limit {
            Some(_) if !after.is_empty() => {
                let device = self.devices.get(src.device())?;
                let point = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
                (vec![point.clone()], Some(Permit { point, after }))
            }
            _ => (after, None),
        };
        let driver = self.driver()?;
        let id = self.next_job.fetch_add(1, Ordering::Relaxed);
        let handle = handle(route, &plan, &lanes, Some(driver.canceller(id)))?;
        let ahead = u64::from(self.config.ahead);
        driver.follow(id, Job { plan, lanes, after, permit, ahead, time_limit, due });
        Ok(handle)
    }

    fn driver(&self) -> Result<&Driver, TransferError> {
        if let Some(driver) = self.driver.get() {
            return Ok(driver);
        }
        let driver = Driver::start().map_err(|error| OpenError::NoThread {
            what: "transfer".to_owned(),
            reason: error.to_string(),
        })?;
        // If another thread was faster, its driver is used and this one ends.
        Ok(self.driver.get_or_init(|| driver))
    }

    /// Copies bytes of the host to a device and waits for it.
    ///
    /// Memory that the host does not reach is written through two pieces of host-visible memory by turns.
    ///
    /// # Errors
    ///
    /// [`TransferError::Range`] unless both are of one length; else as [`Transfer::copy`] and
    /// [`CopyHandle::wait`].
    pub fn write(
        &self,
        from: &[u8],
        dst: &BufferView,
        deadline: impl Into<Deadline>,
    ) -> Result<(), TransferError> {
        let deadline = deadline.into();
        check_len(from.len() as u64, dst.size())?;
        if dst.buffer().kind().is_host_visible() {
            return Ok(dst.write(from)?);
        }
        let mut windows = self.windows(dst)?.map(|window| (window, None::<CopyHandle>));
        for ((part, target), turn) in
            from.chunks(self.window_bytes()).zip(self.parts(dst)).zip((0..2).cycle())
        {
            let (window, under_way) = &mut windows[turn];
            if let Some(copy) = under_way.take() {
                copy.wait(deadline)?;
            }
            let (target, window) = (target?, window.slice(0..part.len() as u64)?);
            window.write(part)?;
            *under_way = Some(self.copy(&window, &target)?);
        }
        windows.into_iter().filter_map(|(_, copy)| copy).try_for_each(|copy| copy.wait(deadline))
    }

    /// Copies bytes of a device to the host and waits for it.
    ///
    /// Memory that the host does not reach is read through two pieces of host-visible memory by turns.
    ///
    /// # Errors
    ///
    /// [`TransferError::Range`] unless both are of one length; else as [`Transfer::copy`] and
    /// [`CopyHandle::wait`].
    pub fn read(
        &self,
        src: &BufferView,
        into: &mut [u8],
        deadline: impl Into<Deadline>,
    ) -> Result<(), TransferError> {
        let deadline = deadline.into();
        check_len(src.size(), into.len() as u64)?;
        if src.buffer().kind().is_host_visible() {
            return Ok(src.read(into)?);
        }
        let windows = self.windows(src)?;
        let mut under_way: Option<(CopyHandle, BufferView, &mut [u8])> = None;
        for ((part, source), turn) in
            into.chunks_mut(self.window_bytes()).zip(self.parts(src)).zip((0..2).cycle())
        {
            let window = windows[turn].slice(0..part.len() as u64)?;
            let copy = self.copy(&source?, &window)?;
            if let Some((copy, window, part)) = under_way.replace((copy, window, part)) {
                copy.wait(deadline)?;
                window.read(part)?;
            }
        }
        let Some((copy, window, part)) = under_way else { return Ok(()) };
        copy.wait(deadline)?;
        Ok(window.read(part)?)
    }

    /// Two pieces of the view's device's memory that the host reaches too.
    fn windows(&self, view: &BufferView) -> Result<[BufferView; 2], TransferError> {
        let device = self.devices.get(view.device())?;
        let size = view.size().min(self.window_bytes() as u64);
        let window =
            || Ok::<_, TransferError>(BufferView::whole(device.allocate(&BufferDesc::host_visible(size))?));
        Ok([window()?, window()?])
    }

    fn window_bytes(&self) -> usize {
        usize::try_from(self.config.chunk.0).unwrap_or(usize::MAX)
    }

    /// The view in pieces as large as a window.
    fn parts(&self, view: &BufferView) -> impl Iterator<Item = Result<BufferView, RangeError>> {
        let (view, step) = (view.clone(), self.window_bytes() as u64);
        (0..view.size().div_ceil(step)).map(move |part| {
            let start = part * step;
            view.slice(start..view.size().min(start + step))
        })
    }

    fn planned(&self, from: Memory, to: Memory) -> Result<Arc<Planned>, TransferError> {
        let known = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(planned) = known.get(&(from, to)) {
            return Ok(Arc::clone(planned));
        }
        drop(known);
        let route = Arc::new(self.find_route(from.device, to.device)?);
        tracing::debug!(%route, "planned a route");
        let planned = Arc::new(Planned { route, pair: Mutex::default() });
        let mut known = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(known.entry((from, to)).or_insert(planned)))
    }

    fn find_route(&self, from: DeviceId, to: DeviceId) -> Result<Route, TransferError> {
        self.devices.get(from)?;
        if from == to {
            let (kind, stops) = (RouteKind::Local, vec![Stop::Device(from)]);
            return Ok(Route { kind, stops, expected: Duration::ZERO });
        }
        self.network.route(&self.devices, from, to)
    }
}

fn check_len(source_bytes: u64, destination_bytes: u64) -> Result<(), RangeError> {
    if source_bytes == destination_bytes {
        return Ok(());
    }
    Err(RangeError::LengthMismatch { source_bytes, destination_bytes })
}

/// The route as it came out: memory that the reader could not import after all is bridged by a processor.
fn actual_route(route: &Arc<Route>, plan: &Plan) -> Arc<Route> {
    if route.kind == RouteKind::Shared && plan.needs_processor() {
        tracing::warn!(%route, "host memory is not shared although both devices can");
        return Arc::new(Route { kind: RouteKind::Staged, ..Route::clone(route) });
    }
    Arc::clone(route)
}

fn handle(
    route: &Arc<Route>,
    plan: &Plan,
    lanes: &[Lane],
    canceller: Option<Canceller>,
) -> Result<CopyHandle, TransferError> {
    let without_hops = TransferError::Internal { reason: "a route has no hops" };
    Ok(CopyHandle {
        route: actual_route(route, plan),
        lane: lanes.last().cloned().ok_or(without_hops)?,
        chunks: plan.chunk_count(),
        chunk_bytes: plan.chunk_bytes,
        total: plan.src.size(),
        canceller,
    })
}
