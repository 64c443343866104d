//! Bytes in the hands of another library's code, in order with everything else.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use warpweft_core_types::{
    BufferView, Deadline, Device, DeviceExt as _, DeviceId, Failure, Interop, InteropError, NativeHandle,
    Queue, SemaphorePoint, Submission, SubmitError, WaitError,
};

use crate::{
    completion::Completion,
    domain::{Domain, LineKind, State},
    error::{BusyReason, RecordError, RunError},
    graph::{Node, NodePlace, Recorded},
    infer::Use,
    memory::{Bytes, LeaseKind},
    node::{OwnedTask, Work},
    plan::{Plan, PlannedSegment, SegmentWork},
    run::{Look, Run, RunSegment, Status},
    submit::Points,
    task::HostTask,
    usage::Usage,
};

/// What the other library's code is given: a device's queue, and addresses.
#[derive(Debug)]
pub struct HandOff<'a> {
    interop: &'a dyn Interop,
    queue: &'a dyn Queue,
    operands: &'a [(BufferView, Usage)],
}

impl HandOff<'_> {
    /// The queue to enqueue work in: a CUDA stream. Work that the runtime ordered before is before it in there.
    ///
    /// # Errors
    ///
    /// See [`Interop::queue_handle`].
    pub fn queue(&self) -> Result<NativeHandle, InteropError> {
        self.interop.queue_handle(self.queue)
    }

    /// The device's context.
    pub fn device(&self) -> NativeHandle {
        self.interop.device_handle()
    }

    /// Where the device sees the first byte of an operand.
    ///
    /// # Errors
    ///
    /// [`InteropError::Refused`] where there is no such operand; see [`Interop::buffer_handle`].
    pub fn address(&self, operand: usize) -> Result<NativeHandle, InteropError> {
        let (view, _) = self.operands.get(operand).ok_or_else(|| InteropError::Refused {
            device: self.queue.id().device,
            what: format!("operand {operand}"),
            reason: format!("there are {}", self.operands.len()),
        })?;
        let handle = self.interop.buffer_handle(view.buffer().as_ref())?;
        Ok(NativeHandle { value: handle.value + view.offset(), ..handle })
    }
}

impl Domain {
    /// Lets `call` enqueue work of another library on a device, which uses `operands` so and nothing else.
    ///
    /// The bytes are taken back when `call` returns, also by a panic: what it has enqueued by then is in order with
    /// everything behind it.
    pub(crate) fn hand_off<R>(
        self: &Arc<Self>,
        device: DeviceId,
        operands: &[(BufferView, Usage)],
        deadline: Deadline,
        call: impl FnOnce(&HandOff<'_>) -> R,
    ) -> Result<(R, Completion), RunError> {
        let position = self
            .position(device)
            .ok_or_else(|| RecordError::UnknownDevice { node: NAME.to_owned(), device })?;
        let entry: &dyn Device = self.devices[position as usize].device.as_ref();
        let interop = entry.interop().ok_or(SubmitError::Unsupported { device, what: NAME })?;
        let plan = Arc::new(self.hand_off_plan(position, operands)?);
        let begun = self.begin(&plan, deadline)?;
        let given = HandOff { interop, queue: begun.queue.as_ref(), operands };
        let outcome = catch_unwind(AssertUnwindSafe(|| entry.foreign(|| call(&given))));
        let completion = self.take_back(begun);
        match outcome {
            Ok(value) => Ok((value, completion?)),
            Err(panic) => resume_unwind(panic),
        }
    }

    /// The plan of one mark, which uses `operands`.
    pub(crate) fn hand_off_plan(
        &self,
        device: u32,
        operands: &[(BufferView, Usage)],
    ) -> Result<Plan, RecordError> {
        let mut recorded = Recorded::default();
        for (view, usage) in operands {
            let bytes = self.bytes_of(view, NAME)?;
            let memory = u32::try_from(recorded.global.len()).unwrap_or(u32::MAX);
            recorded.global.push(bytes.memory);
            recorded.uses.push(Use { memory, range: bytes.range, usage: *usage });
        }
        let place = NodePlace::Device { device, lane: 0 };
        // The work is the other library's: there is nothing to hand over but a mark behind it. The views keep their
        // buffers.
        let work = Work::Task(OwnedTask { task: HostTask::new(|_| {}), operands: operands.into() });
        let uses = 0..u32::try_from(recorded.uses.len()).unwrap_or(u32::MAX);
        let beside = Box::default();
        recorded.nodes.push(Node {
            work,
            name: Some(NAME.into()),
            place,
            uses,
            beside,
            said: Box::default(),
        });
        let uses = recorded.bytes_of(0).collect();
        let segment = PlannedSegment { place, after: Vec::new(), uses, nodes: [0].into_iter().collect() };
        Ok(Plan {
            recorded: Arc::new(recorded),
            segments: vec![segment],
            has_collective: false,
            after: Vec::new(),
        })
    }

    /// Puts a lane behind everything that uses the bytes, and keeps others away from them.
    ///
    /// What waits for something that no device of the backend does, such as a task of the host, is held back by its
    /// queue, and another library's work would get into the stream before it. Then the host waits.
    fn begin(&self, plan: &Arc<Plan>, deadline: Deadline) -> Result<Begun, RunError> {
        let mut state = self.state();
        // A failure of somebody else's that has not been settled is no reason to refuse.
        self.forget_ended(&mut state);
        self.admit(&mut state, plan)?;
        let mut run = Run::new(state.next_run, Arc::clone(plan), Arc::from([SegmentWork::Mark]));
        run.submitted = self.tracer.now();
        let run = Arc::new(run);
        let mut points = self.points_before(&mut state, &run, &plan.segments[0]);
        let NodePlace::Device { device, lane } = plan.segments[0].place else {
            return Err(RunError::from(SubmitError::Invalid { reason: "a hand-off to the host".to_owned() }));
        };
        let line = self.lane_for(&mut state, (device, lane), None, &mut points);
        let waits = state.semaphores(&points, line);
        let LineKind::Lane { queue, .. } = &state.lines[line as usize].kind else {
            return Err(RunError::from(SubmitError::Invalid { reason: "a lane that is none".to_owned() }));
        };
        let queue = Arc::clone(queue);
        let passed = if state.waits_outside(self, device) { Some(self.own_point(device)?) } else { None };
        queue.submit(&Submission { waits: &waits, ops: &[], signals: passed.as_slice() })?;
        let leases = plan.segments[0].uses.iter().map(|(bytes, _)| {
            let id = state.memories.lease(bytes, LeaseKind::HandOff);
            (bytes.clone(), id)
        });
        let leases = leases.collect();
        state.next_run += 1;
        drop(state);
        let begun = Begun { run, line, queue, leases };
        // A failure is found when the bytes are taken back.
        if let Some(Err(WaitError::Timeout { .. })) = passed.map(|passed| passed.wait(deadline)) {
            self.end_leases(&mut self.state(), &begun.leases);
            let device = self.devices[device as usize].id;
            return Err(RunError::Busy { reason: BusyReason::Before { device } });
        }
        Ok(begun)
    }

    /// A point that nobody else waits for or signals: it is let go when a wait for it is given up.
    fn own_point(&self, device: u32) -> Result<SemaphorePoint, RunError> {
        let semaphore = self.devices[device as usize].device.create_semaphore(0)?;
        Ok(SemaphorePoint::new(&semaphore, 1))
    }

    fn end_leases(&self, state: &mut State, leases: &[(Bytes, u64)]) {
        for (bytes, id) in leases {
            state.memories.end_lease(bytes.memory, *id);
        }
        self.changed.notify_all();
    }

    /// Marks the end of what was enqueued, and lets others at the bytes again.
    fn take_back(self: &Arc<Self>, begun: Begun) -> Result<Completion, RunError> {
        let Begun { run, line, leases, .. } = begun;
        let mut state = self.state();
        self.end_leases(&mut state, &leases);
        let marked = self.enqueue_in(&mut state, &run, 0, &Points::new(), Some(line), None);
        match marked {
            Ok(point) => state.note(&run, 0, point, false),
            Err(error) => {
                // The lane failed meanwhile, and with it what was enqueued.
                let failure =
                    Arc::new(Failure::TaskFailed { task: NAME.to_owned(), reason: error.to_string() });
                let cause = self.failure_of(&mut state, &run.plan, 0, .., failure);
                state.poison(&run, 0, .., &cause);
                return Err(error);
            }
        }
        state.counts.submissions += 1;
        state.in_flight.push_back(Arc::clone(&run));
        drop(state);
        Ok(Completion::new(self, run))
    }
}

impl State {
    /// Whether anything is under way that no queue of a device's backend does, and that its queues may be held up by.
    fn waits_outside(&mut self, domain: &Domain, device: u32) -> bool {
        let backend = domain.devices[device as usize].id.backend;
        let lines = &self.lines;
        let is_outside = |segment: &RunSegment| {
            let under_way = matches!(segment.status, Status::UnderWay);
            under_way
                && match lines[segment.point.line as usize].kind {
                    LineKind::Lane { device, .. } => domain.devices[device as usize].id.backend != backend,
                    LineKind::Task | LineKind::Guest { .. } => true,
                }
        };
        self.in_flight
            .iter()
            .any(|run| run.look() != Look::Ended && run.state().segments.iter().any(is_outside))
    }
}

/// What errors call it.
const NAME: &str = "hand-off";

/// A hand-off under way.
struct Begun {
    run: Arc<Run>,
    line: u32,
    queue: Arc<dyn Queue>,
    leases: Vec<(Bytes, u64)>,
}
