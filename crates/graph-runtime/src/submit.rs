//! Handing work over.

use std::{sync::Arc, task::Waker};

use smallvec::SmallVec;
use warpweft_core_types::{
    GraphOp, Op, OwnedOp, PreparedGraph, Queue, SemaphorePoint, Submission, SubmissionId, SubmitError,
};

use crate::{
    domain::{Domain, LineKind, State},
    error::{BusyReason, NodeFailure, RunError},
    graph::{Node, NodePlace},
    later::drop_later,
    memory::{Point, Unordered},
    node::{OwnedTask, Work},
    plan::{Plan, PlannedSegment, SegmentWork, SlotWork},
    run::{Look, Run, RunSegment, Status},
    trace::Moments,
    workers::Job,
};

/// Submissions that go by before a run that had not ended is looked at again.
const LOOK_AGAIN_AFTER: usize = 32;
/// Runs that are taken off the list for one submission: more than come, so that it gets shorter.
const FORGOTTEN_AT_ONCE: usize = 2;
/// How often failures are settled for the sake of one segment. A lane that fails again each time is that of a lost device,
/// or has as many failures in it.
const SETTLED_AT_MOST: usize = 64;

/// Points to wait for, each line once.
pub(crate) type Points = SmallVec<[Point; 8]>;

impl Domain {
    /// Hands over all segments of a plan, behind everything that uses the same bytes. `spare` is a run that has ended.
    pub(crate) fn submit(
        &self,
        state: &mut State,
        plan: &Arc<Plan>,
        work: &SlotWork,
        spare: Option<Arc<Run>>,
    ) -> Result<Arc<Run>, RunError> {
        state.forget_spare(spare.as_ref());
        self.admit_counted(state, plan)?;
        let mut run = Run::reused(spare, plan, work);
        self.hand_over_all(state, &mut run)?;
        Ok(run)
    }

    /// Hands over all segments of a run that was admitted, and that nobody else has.
    ///
    /// The lock is held all the while: the order in which runs are handed to devices is the order in which they were
    /// noted at their memories.
    pub(crate) fn hand_over_all(&self, state: &mut State, run: &mut Arc<Run>) -> Result<(), RunError> {
        if let Some(own) = Arc::get_mut(run) {
            own.id = state.next_run;
            own.submitted = self.tracer.now();
        }
        let run = &*run;
        // Whether something was found to have failed since the plan was admitted.
        let mut failing = false;
        for number in 0..run.plan.segments.len() {
            let mut handed = self.hand_over(state, run, number, failing);
            for _ in 0..SETTLED_AT_MOST {
                // Something else in its lane failed and has not been settled. The lane gets another queue then, in which
                // the next may fail.
                if !handed.as_ref().is_err_and(is_lane_failure) {
                    break;
                }
                failing = true;
                self.settle_among(state, run);
                handed = self.hand_over(state, run, number, failing);
            }
            match handed {
                Ok((point, is_skipped)) => state.note(run, number, point, is_skipped),
                // Nothing has begun, so nothing is left behind.
                Err(error) if number == 0 => return Err(error),
                Err(error) => {
                    self.break_off(state, run, number, error);
                    break;
                }
            }
        }
        state.next_run += 1;
        state.counts.submissions += 1;
        state.in_flight.push_back(Arc::clone(run));
        Ok(())
    }

    /// The same, where a refusal counts.
    pub(crate) fn admit_counted(&self, state: &mut State, plan: &Plan) -> Result<(), RunError> {
        let admitted = self.admit(state, plan);
        state.counts.refusals += u64::from(matches!(admitted, Err(RunError::Busy { .. })));
        admitted
    }

    /// Whether there is room for a plan, and nothing in its way.
    pub(crate) fn admit(&self, state: &mut State, plan: &Plan) -> Result<(), RunError> {
        self.make_room(state);
        if state.in_flight.len() >= self.config.max_submissions {
            let reason = BusyReason::Capacity { limit: self.config.max_submissions };
            return Err(RunError::Busy { reason });
        }
        if let Some(reason) = state.holder(plan) {
            return Err(RunError::Busy { reason });
        }
        match state.first_poison(plan, .., (u64::MAX, 0)) {
            Some(poison) => Err(RunError::Poisoned { poison }),
            None => Ok(()),
        }
    }

    /// Takes old runs off the list, a few for each submission that comes. Asking a device whether one has ended is a call
    /// of its driver, so it is not done for every submission: after one that had not ended, the next few go by without.
    fn make_room(&self, state: &mut State) {
        let is_full = state.in_flight.len() >= self.config.max_submissions;
        for _ in 0..FORGOTTEN_AT_ONCE {
            let Some(oldest) = state.in_flight.front() else { break };
            if !self.is_known_to_have_ended(state, oldest) {
                let is_time = is_full || state.in_flight.len() >= state.look_from;
                if !is_time || !self.ask_oldest(state) {
                    break;
                }
            }
            state.forget_front();
        }
        if state.in_flight.len() >= self.config.max_submissions {
            self.forget_ended(state);
        }
        if state.in_flight.is_empty() {
            // Nobody is left who waits for points that were lost.
            state.lost.clear();
        }
    }

    /// Whether the oldest run turns out to have ended.
    fn ask_oldest(&self, state: &mut State) -> bool {
        let Some(oldest) = state.in_flight.front().cloned() else { return false };
        let look = self.look_in(state, &oldest);
        // The list has it too, so that nothing is dropped here.
        drop(oldest);
        state.look_from = match look {
            Look::UnderWay => state.in_flight.len() + LOOK_AGAIN_AFTER,
            Look::Failing | Look::Ended => 0,
        };
        if look == Look::Failing {
            self.settle(state);
        }
        look == Look::Ended
    }

    /// Takes all runs that have ended off the list; settles those that fail.
    pub(crate) fn forget_ended(&self, state: &mut State) {
        let mut failing = false;
        let mut kept = std::mem::take(&mut state.in_flight);
        kept.retain(|run| match self.look_in(state, run) {
            Look::UnderWay => true,
            Look::Failing => {
                failing = true;
                true
            }
            Look::Ended => {
                state.end(run);
                drop_later(Arc::clone(run));
                false
            }
        });
        state.in_flight = kept;
        if failing {
            self.settle(state);
        }
    }

    /// Hands over one segment of a run, or skips it, where it is to be `checked` whether it reads poisoned bytes.
    fn hand_over(
        &self,
        state: &mut State,
        run: &Arc<Run>,
        number: usize,
        checked: bool,
    ) -> Result<(Point, bool), RunError> {
        let segment = &run.plan.segments[number];
        let poison =
            if checked { state.first_poison(&run.plan, number..=number, (run.id, number)) } else { None };
        if let Some(poison) = poison.as_ref().filter(|_| number == 0) {
            return Err(RunError::Poisoned { poison: poison.clone() });
        }
        let points = self.points_before(state, run, segment);
        let skipped = poison.map(|poison| poison.cause);
        let point = self.enqueue_in(state, run, number, &points, None, skipped.as_ref())?;
        if let Some(cause) = &skipped {
            state.poison(run, number, .., cause);
        }
        Ok((point, skipped.is_some()))
    }

    /// Settles failures while a run is being handed over.
    fn settle_among(&self, state: &mut State, run: &Arc<Run>) {
        state.in_flight.push_back(Arc::clone(run));
        self.settle(state);
        state.in_flight.pop_back();
    }

    /// Everything that a segment comes after: earlier segments of its run, and others that use its bytes.
    pub(crate) fn points_before(&self, state: &mut State, run: &Run, segment: &PlannedSegment) -> Points {
        let mut points = Points::new();
        if !segment.after.is_empty() {
            let own = run.state();
            for &before in &segment.after {
                add_point(&mut points, own.segments[before as usize].point);
            }
        }
        for (bytes, usage) in &segment.uses {
            let memory = state.memories.at(bytes.memory);
            memory.users.conflicts(bytes.range.clone(), *usage, |point| add_point(&mut points, point));
        }
        points
    }

    /// Puts a segment in `line`, or in one of its place, behind `points`, and notes it in its run. One that is skipped
    /// takes its place and does nothing there.
    pub(crate) fn enqueue_in(
        &self,
        state: &mut State,
        run: &Arc<Run>,
        number: usize,
        points: &Points,
        line: Option<u32>,
        skipped: Option<&Arc<NodeFailure>>,
    ) -> Result<Point, RunError> {
        let segment = &run.plan.segments[number];
        let mut after = Points::from_slice(points);
        after.retain(|point| !state.line(*point).is_known_past(point.value));
        let line = match (line, segment.place) {
            (Some(line), _) => line,
            (None, NodePlace::Device { device, lane }) => {
                let before = run.lines_before.get(number).copied();
                self.lane_for(state, (device, lane), before, &mut after)
            }
            (None, NodePlace::Host) => {
                after.retain(|point| !state.line(*point).is_past(point.value));
                self.task_line(state)?
            }
        };
        let waits = state.semaphores(&after, line);
        let moments = self.tracer.is_active().then(Arc::<Moments>::default);
        let target = &mut state.lines[line as usize];
        let point = Point { line, value: target.assigned + 1 };
        let signals = [SemaphorePoint::new(&target.semaphore, point.value)];
        let work = if skipped.is_some() { &SegmentWork::Mark } else { &run.work[number] };
        match (&target.kind, work) {
            (LineKind::Lane { queue, device }, work) => {
                let device = self.devices[*device as usize].id;
                let is_late = moments.is_none() && run.is_in_no_hurry(segment.place, work);
                let taken = give(queue.as_ref(), given(run, work), &waits, &signals, is_late);
                taken.map_err(|error| match error {
                    SubmitError::QueueFull { .. } => RunError::Busy { reason: BusyReason::Queue { device } },
                    error => error.into(),
                })?;
                state.counts.segments += 1;
            }
            (LineKind::Task, SegmentWork::Task(task)) => {
                let name = run.plan.name_of(number);
                let work = (task.clone(), name, moments.clone());
                Job::start(&self.workers, work, waits, signals[0].clone(), Some(run));
                state.counts.tasks += 1;
            }
            (LineKind::Task, SegmentWork::Mark) => {
                let work = (OwnedTask::nothing(), run.plan.name_of(number), None);
                Job::start(&self.workers, work, waits, signals[0].clone(), None);
            }
            (LineKind::Task | LineKind::Guest { .. }, _) => {
                return Err(RunError::from(SubmitError::Invalid {
                    reason: "work of a device among tasks".to_owned(),
                }));
            }
        }
        state.lines[line as usize].assigned = point.value;
        state.counts.nodes += segment.nodes.len() as u64;
        let after = SmallVec::from_slice(&after);
        let [SemaphorePoint { semaphore, .. }] = signals;
        if let Some(moments) = moments.as_ref().filter(|_| segment.place != NodePlace::Host) {
            semaphore.wake_when(point.value, Waker::from(Arc::clone(moments)));
        }
        let skipped = skipped.map(Arc::clone);
        let placed = RunSegment { point, semaphore, after, status: Status::UnderWay, skipped, moments };
        let mut own = run.state();
        match own.segments.get_mut(number) {
            Some(known) => *known = placed,
            None => own.segments.push(placed),
        }
        Ok(point)
    }

    /// The lane to go on in: one of its device that it waits for, if there is one, since a queue is in order by itself;
    /// else the one it was in `before`, if nothing is there, since a device begins a graph sooner where it was; else the
    /// next in turn. Points that turn out to be past are taken out.
    pub(crate) fn lane_for(
        &self,
        state: &mut State,
        (device, lane): (u32, u32),
        before: Option<u32>,
        after: &mut Points,
    ) -> u32 {
        let lanes = u32::try_from(self.config.lanes).unwrap_or(u32::MAX);
        let first = device * lanes;
        let own = first..first + lanes;
        if lane > 0 {
            return first + (lane - 1) % lanes;
        }
        if after.len() > 1 {
            after.retain(|point| !state.line(*point).is_past(point.value));
        }
        let behind = after.iter().rev().find(|point| own.contains(&point.line));
        let is_idle = |line: &u32| {
            let line = &state.lines[*line as usize];
            line.is_known_past(line.assigned)
        };
        match behind
            .map(|point| point.line)
            .or_else(|| before.filter(|line| own.contains(line) && is_idle(line)))
        {
            Some(line) => line,
            None => {
                state.turn = state.turn.wrapping_add(1);
                first + u32::try_from(state.turn % self.config.lanes).unwrap_or(0)
            }
        }
    }

    /// A line for one task: an old one whose task has ended, or a new one.
    pub(crate) fn task_line(&self, state: &mut State) -> Result<u32, RunError> {
        if let Some(line) = state.free_tasks.pop() {
            return Ok(line);
        }
        state.lines.push(self.new_task_line(0)?);
        Ok(u32::try_from(state.lines.len() - 1).unwrap_or(u32::MAX))
    }
}

impl State {
    /// Takes a run off the list that is to be used again, if it is the oldest and known to have ended. Whoever asks holds
    /// it, so that nothing is dropped here.
    fn forget_spare(&mut self, spare: Option<&Arc<Run>>) {
        let oldest = self.in_flight.front().zip(spare);
        if oldest.is_some_and(|(oldest, spare)| Arc::ptr_eq(oldest, spare) && oldest.has_outcome())
            && let Some(run) = self.in_flight.pop_front()
        {
            self.end(&run);
        }
    }

    fn forget_front(&mut self) {
        if let Some(run) = self.in_flight.pop_front() {
            self.end(&run);
            // What programs own goes with it.
            drop_later(run);
        }
    }

    /// Notes that a run has ended: its tasks' lines are free, and those of its marks.
    fn end(&mut self, run: &Run) {
        let state = run.state();
        match state.outcome {
            Some(Ok(())) => self.counts.completions += 1,
            _ => self.counts.failures += 1,
        }
        for segment in &state.segments {
            let number = segment.point.line;
            let line = &mut self.lines[number as usize];
            line.reached = line.reached.max(segment.point.value);
            match line.kind {
                LineKind::Task => self.free_tasks.push(number),
                LineKind::Guest { device } => self.free_guests.entry(device).or_default().push(number),
                LineKind::Lane { .. } => {}
            }
        }
    }

    /// What holds bytes that a plan uses.
    pub(crate) fn holder(&mut self, plan: &Plan) -> Option<BusyReason> {
        if !self.memories.has_leases() {
            return None;
        }
        let mut uses = plan.segments.iter().flat_map(|segment| &segment.uses);
        uses.find_map(|(bytes, usage)| self.memories.at(bytes.memory).holder(&bytes.range, *usage))
    }

    /// Notes a segment at the memories it uses.
    pub(crate) fn note(&mut self, run: &Run, number: usize, point: Point, is_skipped: bool) {
        for (bytes, usage) in &run.plan.segments[number].uses {
            let memory = self.memories.at(bytes.memory);
            memory.users.add(bytes.range.clone(), *usage, point, &mut Unordered);
        }
        if !is_skipped {
            self.heal(run, number);
        }
    }

    /// The semaphores to wait for; those of the own line need no words.
    pub(crate) fn semaphores(&mut self, points: &Points, own: u32) -> SmallVec<[SemaphorePoint; 4]> {
        let others = points.iter().filter(|point| point.line != own);
        others
            .map(|point| SemaphorePoint::new(&self.lines[point.line as usize].semaphore, point.value))
            .collect()
    }
}

/// Whether a queue takes no more, because something in it failed.
pub(crate) fn is_lane_failure(error: &RunError) -> bool {
    matches!(error, RunError::Submit(error) if matches!(**error, SubmitError::Failed(_)))
}

/// Adds a point; of one line, the later one stays.
pub(crate) fn add_point(points: &mut Points, point: Point) {
    match points.iter_mut().find(|known| known.line == point.line) {
        Some(known) => known.value = known.value.max(point.value),
        None => points.push(point),
    }
}

/// What a queue is given.
enum Given<'a> {
    Graph(&'a PreparedGraph),
    Ops(&'a [Arc<GraphOp>]),
    Nothing,
    /// A task of the host, which no device does.
    Task,
}

fn given<'a>(run: &'a Run, work: &'a SegmentWork) -> Given<'a> {
    match (work, &run.plan.recorded.nodes[..]) {
        (SegmentWork::Graph { graph, .. }, _) => Given::Graph(graph),
        (SegmentWork::Ops(ops), _) => Given::Ops(ops),
        (SegmentWork::Single, [Node { work: Work::Device(op), .. }]) => Given::Ops(std::slice::from_ref(op)),
        (SegmentWork::Mark, _) => Given::Nothing,
        (SegmentWork::Task(_) | SegmentWork::Single, _) => Given::Task,
    }
}

/// Gives a queue the work of a segment, whose signal may be late.
fn give(
    queue: &dyn Queue,
    work: Given<'_>,
    waits: &[SemaphorePoint],
    signals: &[SemaphorePoint],
    is_late: bool,
) -> Result<SubmissionId, SubmitError> {
    match work {
        Given::Graph(graph) => queue.submit(&Submission { waits, ops: &[Op::Replay(graph)], signals }),
        Given::Ops(ops) => give_each(queue, ops, waits, signals, is_late),
        Given::Nothing => queue.submit(&Submission { waits, ops: &[], signals }),
        Given::Task => Err(SubmitError::Invalid { reason: "a task of the host for a device".to_owned() }),
    }
}

/// One after the other, which is an order that all edges allow.
fn give_each(
    queue: &dyn Queue,
    ops: &[Arc<GraphOp>],
    waits: &[SemaphorePoint],
    signals: &[SemaphorePoint],
    is_late: bool,
) -> Result<SubmissionId, SubmitError> {
    // Captured work only gets into graphs, and joins are left out.
    let ops = ops.iter().filter_map(|op| match op.as_ref() {
        GraphOp::Op(op) => Some(op),
        _ => None,
    });
    let ops: SmallVec<[&OwnedOp; 1]> = ops.collect();
    let Some((last, others)) = ops.split_last() else {
        return queue.submit(&Submission { waits, ops: &[], signals });
    };
    let mut waits = waits;
    for op in others {
        op.with(|op| queue.submit(&Submission { waits, ops: &[*op], signals: &[] }))?;
        waits = &[];
    }
    last.with(|op| {
        let last = Submission { waits, ops: &[*op], signals };
        if is_late { queue.submit_late(&last) } else { queue.submit(&last) }
    })
}
