//! Starting copies.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use warpweft_core_types::{
    BufferDesc, BufferView, CopyRegion, Deadline, Device, DeviceId, MemoryKind, OpenError, RangeError,
    SemaphorePoint,
};

use crate::{
    CopyHandle, CopyOptions, Route, RouteKind, TransferConfig, TransferError,
    devices::Devices,
    driver::{Canceller, Driver, Job, Permit},
    lanes::{Lane, SharedLanes, dedicated, submit_chunk},
    plan::{Plan, StagePool},
    route::{Network, Stop},
};

/// Copies bytes between any two of the devices it was made for.
///
/// It may be used from many threads. Copies between one pair of devices run in the order they were started;
/// copies between different pairs, or the two directions of one pair, run side by side.
#[derive(Debug)]
pub struct Transfer {
    devices: Devices,
    network: Network,
    config: TransferConfig,
    routes: RwLock<HashMap<(DeviceId, DeviceId), Arc<Planned>>>,
    lanes: Mutex<SharedLanes>,
    driver: OnceLock<Driver>,
    next_job: AtomicU64,
}

/// A route with the memory it needs.
#[derive(Debug)]
struct Planned {
    route: Arc<Route>,
    pool: StagePool,
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
            lanes: Mutex::default(),
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
        Ok(Arc::clone(&self.planned(from, to)?.route))
    }

    /// Starts to copy all of `src` to all of `dst`, after the copies between the same devices before it.
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
        CopyRegion::new(src, dst)?;
        let planned = self.planned(src.device(), dst.device())?;
        let stages = planned.pool.lease(&self.devices, &planned.route, &self.config)?;
        let plan = Plan::new(&self.devices, &planned.route, &stages, (src, dst), &self.config);
        let span = tracing::debug_span!("copy", from = %src.device(), to = %dst.device(), bytes = src.size());
        let _entered = span.enter();
        let started = Started {
            route: actual_route(&planned.route, &plan),
            chunks: plan.chunk_count(),
            chunk_bytes: plan.chunk_bytes,
            total: src.size(),
        };
        let alone = options.time_limit.is_some()
            || plan.needs_processor()
            || started.chunks > u64::from(self.config.ahead)
            || options.after.iter().any(|point| !matches!(point.poll(), Ok(true)));
        let handle =
            if alone { self.follow(plan, options, started) } else { self.hand_over(&plan, started) }?;
        planned.pool.give_back(stages, handle.done());
        Ok(handle)
    }

    /// Hands a whole copy to the devices.
    fn hand_over(&self, plan: &Plan, started: Started) -> Result<CopyHandle, TransferError> {
        let stops = &started.route.stops;
        let mut shared = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let lanes = shared.of(&self.devices, stops, plan)?;
        for chunk in 0..started.chunks {
            if let Err(error) = submit_chunk(plan, &lanes, chunk, &[]) {
                shared.forget(stops);
                return Err(error);
            }
        }
        shared.advance(stops, started.chunks);
        drop(shared);
        started.handle(&lanes, None)
    }

    /// Leaves a copy to the driver.
    fn follow(
        &self,
        plan: Plan,
        options: CopyOptions,
        started: Started,
    ) -> Result<CopyHandle, TransferError> {
        let lanes = dedicated(&self.devices, &plan)?;
        let CopyOptions { after, time_limit } = options;
        let (after, permit) = match time_limit {
            Some(_) if !after.is_empty() => {
                let device = self.devices.get(plan.src.device())?;
                let point = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
                (vec![point.clone()], Some(Permit { point, after }))
            }
            _ => (after, None),
        };
        let driver = self.driver()?;
        let id = self.next_job.fetch_add(1, Ordering::Relaxed);
        let handle = started.handle(&lanes, Some(driver.canceller(id)))?;
        let ahead = u64::from(self.config.ahead);
        driver.follow(id, Job { plan, lanes, after, permit, ahead, time_limit });
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
        check_len(from.len(), dst)?;
        if dst.buffer().kind() == MemoryKind::HostVisible {
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
        check_len(into.len(), src)?;
        if src.buffer().kind() == MemoryKind::HostVisible {
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

    fn planned(&self, from: DeviceId, to: DeviceId) -> Result<Arc<Planned>, TransferError> {
        let known = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(planned) = known.get(&(from, to)) {
            return Ok(Arc::clone(planned));
        }
        drop(known);
        let route = Arc::new(self.find_route(from, to)?);
        tracing::debug!(%route, "planned a route");
        let planned = Arc::new(Planned { route, pool: StagePool::default() });
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

fn check_len(len: usize, view: &BufferView) -> Result<(), RangeError> {
    let size = len as u64;
    if size == view.size() {
        return Ok(());
    }
    Err(RangeError::LengthMismatch { source_bytes: size, destination_bytes: view.size() })
}

/// The route as it came out: memory that the reader could not import after all is bridged by a processor.
fn actual_route(route: &Arc<Route>, plan: &Plan) -> Arc<Route> {
    if route.kind == RouteKind::Shared && plan.needs_processor() {
        tracing::warn!(%route, "host memory is not shared although both devices can");
        return Arc::new(Route { kind: RouteKind::Staged, ..Route::clone(route) });
    }
    Arc::clone(route)
}

/// What a handle needs to know of its copy.
struct Started {
    route: Arc<Route>,
    chunks: u64,
    chunk_bytes: u64,
    total: u64,
}

impl Started {
    fn handle(self, lanes: &[Lane], canceller: Option<Canceller>) -> Result<CopyHandle, TransferError> {
        let without_hops = TransferError::Internal { reason: "a route has no hops" };
        let lane = lanes.last().cloned().ok_or(without_hops)?;
        Ok(CopyHandle {
            route: self.route,
            lane,
            chunks: self.chunks,
            chunk_bytes: self.chunk_bytes,
            total: self.total,
            canceller,
        })
    }
}
