//! What becomes of work when some of it fails.
//!
//! A queue that meets a failure takes everything behind it along, and a wait for such a queue fails in turn, whether
//! the work behind it needs what failed or not. Here the two are told apart: what failed by itself is the culprit, and
//! poisons what it may have written; what reads such bytes is skipped and poisons what it was to write; all else is
//! handed over again, in the order it had.

use std::sync::Arc;

use rustc_hash::FxHashMap;
use warpweft_core_types::{ErrorClass, Failure, WorkId};

use crate::{
    domain::{Domain, Line, LineKind, State},
    error::{CompletionError, NodeFailure},
    graph::NodePlace,
    memory::Point,
    plan::SegmentWork,
    run::{Run, Status},
    submit::{Points, add},
    sync::Ordering,
};

/// A segment that failed for another's sake: its run, its number, and the point it had.
struct Bystander {
    run: Arc<Run>,
    number: usize,
    old: Point,
}

impl Domain {
    /// Finds out whom failures concern, and hands over again whom they do not.
    pub(crate) fn settle(&self, state: &mut State) {
        // Failure first: a value that was reached before it is found after it.
        let failures: Vec<Option<(u64, Arc<Failure>)>> = state
            .lines
            .iter()
            .map(|line| line.semaphore.failure().map(|failure| (line.semaphore.value(), failure)))
            .collect();
        let mut bystanders = Vec::new();
        let runs: Vec<Arc<Run>> = state.in_flight.iter().cloned().collect();
        for run in &runs {
            self.judge(state, run, &failures, &mut bystanders);
        }
        for (line, failure) in (0..).zip(&failures) {
            if failure.is_some() {
                self.replace(state, line);
            }
        }
        let mut moved = FxHashMap::default();
        for bystander in bystanders {
            self.retry(state, &bystander, &mut moved);
        }
        for memory in state.memories.all() {
            memory.users.rename(|point| moved.get(&point).copied().unwrap_or(point));
        }
        for run in &runs {
            conclude(run);
        }
        self.changed.notify_all();
    }

    /// Sorts a run's segments into those that are done, those that failed by themselves, and bystanders.
    fn judge(
        &self,
        state: &mut State,
        run: &Arc<Run>,
        failures: &[Option<(u64, Arc<Failure>)>],
        bystanders: &mut Vec<Bystander>,
    ) {
        let count = run.state().segments.len();
        for number in 0..count {
            let own = run.state().segments[number].clone();
            let Some((value, failure)) = &failures[own.point.line as usize] else { continue };
            if !matches!(own.status, Status::UnderWay) {
                continue;
            }
            if own.point.value <= *value {
                run.state().segments[number].status = Status::Done;
                continue;
            }
            let waited_in_vain =
                own.after.iter().any(|point| point.line != own.point.line && state.is_lost(*point));
            // The first on its line that did not fail for what it waited for is what the line failed of.
            let first = state.failed_lines.insert(own.point.line);
            state.lost.insert(own.point);
            if waited_in_vain || !first {
                bystanders.push(Bystander { run: Arc::clone(run), number, old: own.point });
            } else {
                self.condemn(state, run, number, failure);
            }
        }
    }

    /// A segment failed by itself.
    fn condemn(&self, state: &mut State, run: &Run, number: usize, failure: &Arc<Failure>) {
        let segment = &run.plan.segments[number];
        // Devices that run nodes one by one tell which it was; the ones before it have ended, the ones behind it never
        // began.
        let first = match failure.as_ref() {
            Failure::KernelPanicked { work: WorkId::Operation { position, .. }, .. }
            | Failure::KernelFailed { work: WorkId::Operation { position, .. }, .. } => {
                Some(*position as usize)
            }
            _ => None,
        };
        // Where times are noted, an operation stands between two others.
        let stamped = matches!(&run.work[number], SegmentWork::Graph { stamps: Some(_), .. });
        let first = first.map(|position| if stamped { position / 3 } else { position });
        let first = first.filter(|&position| position < segment.nodes.len());
        let cause = match first {
            Some(position) => {
                self.failure_of(state, &run.plan, number, position..=position, Arc::clone(failure))
            }
            None => self.failure_of(state, &run.plan, number, .., Arc::clone(failure)),
        };
        state.poison(&run.plan, number, first.unwrap_or(0).., &cause);
        if failure.class() == ErrorClass::DeviceLost {
            self.poison_device(state, segment.place, &cause);
        }
        run.state().segments[number].status = Status::Failed(cause);
    }

    /// Nobody can tell what a lost device has left in its memory.
    fn poison_device(&self, state: &mut State, place: NodePlace, cause: &Arc<NodeFailure>) {
        let NodePlace::Device { device, .. } = place else { return };
        let id = self.devices[device as usize].id;
        let mut quarantined = 0;
        for memory in state.memories.all().filter(|memory| memory.device == id) {
            quarantined += memory.size();
            memory.poison(0..u64::MAX, cause);
        }
        state.counts.quarantined_bytes += quarantined;
    }

    /// Gives a line another queue and semaphore, if its device makes them. Everything before counts as past.
    fn replace(&self, state: &mut State, number: u32) {
        let line = &mut state.lines[number as usize];
        let fresh = match &line.kind {
            LineKind::Lane { device, .. } => {
                Line::lane(*device, self.devices[*device as usize].device.as_ref(), line.assigned)
            }
            LineKind::Guest { device } => {
                Line::guest(*device, self.devices[*device as usize].device.as_ref(), line.assigned)
            }
            LineKind::Task => Line::task(self.devices[0].device.as_ref(), line.assigned),
        };
        line.reached = line.assigned;
        state.failed_lines.remove(&number);
        match fresh {
            Ok(fresh) => state.lines[number as usize] = fresh,
            Err(error) => tracing::debug!(%error, "a line stays failed"),
        }
    }

    /// Hands a bystander over again, unless it needs what failed.
    fn retry(&self, state: &mut State, bystander: &Bystander, moved: &mut FxHashMap<Point, Point>) {
        let Bystander { run, number, old } = bystander;
        let segment = &run.plan.segments[*number];
        let cause = state.first_poison(&run.plan, *number..=*number).map(|poison| poison.cause);
        let cause = cause.or_else(|| {
            let cancelled = run.cancelled.load(Ordering::Acquire);
            cancelled.then(|| self.failure_of(state, &run.plan, *number, .., Arc::new(Failure::Cancelled)))
        });
        let cause = cause.or_else(|| {
            // What another library enqueued went with its queue.
            let gone = matches!(run.work[*number], SegmentWork::Mark);
            let failure = || Failure::TaskFailed {
                task: run.plan.name_of(*number).into(),
                reason: "its queue failed, and work of another library cannot be handed over again"
                    .to_owned(),
            };
            gone.then(|| self.failure_of(state, &run.plan, *number, .., Arc::new(failure())))
        });
        if let Some(cause) = cause {
            state.poison(&run.plan, *number, .., &cause);
            run.state().segments[*number].status = Status::Failed(cause);
            return;
        }
        let after = run.state().segments[*number].after.clone();
        let mut points = Points::new();
        for point in after {
            // What was on a line that was replaced is behind whatever was handed over again there.
            let value = if state.lost.contains(&point) { state.line(point).assigned } else { point.value };
            add(&mut points, Point { value, ..point });
        }
        match self.enqueue_in(state, run, *number, &points, Some(old.line)) {
            Ok(()) => {
                state.counts.resubmissions += 1;
                moved.insert(*old, run.state().segments[*number].point);
                state.heal(segment);
            }
            Err(error) => {
                let failure =
                    Arc::new(Failure::TaskFailed { task: String::new(), reason: error.to_string() });
                let cause = self.failure_of(state, &run.plan, *number, .., failure);
                state.poison(&run.plan, *number, .., &cause);
                run.state().segments[*number].status = Status::Failed(cause);
            }
        }
    }
}

impl State {
    /// Whether a point will never be reached, or was not before its line was replaced.
    fn is_lost(&mut self, point: Point) -> bool {
        self.lost.contains(&point) || self.line(point).semaphore.poll(point.value).is_err()
    }
}

/// Notes how a run has ended, if all of it has and some of it failed.
fn conclude(run: &Run) {
    let mut state = run.state();
    if state.outcome.is_some()
        || state.segments.iter().any(|segment| matches!(segment.status, Status::UnderWay))
    {
        return;
    }
    let failed = state.segments.iter().find_map(|segment| match &segment.status {
        Status::Failed(cause) => Some(Arc::clone(cause)),
        _ => None,
    });
    if let Some(cause) = failed {
        let cancelled = matches!(*cause.source, Failure::Cancelled);
        let error = if cancelled { CompletionError::Cancelled } else { CompletionError::Failed(cause) };
        state.outcome = Some(Err(error));
    }
}
