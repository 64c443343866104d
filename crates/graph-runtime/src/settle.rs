//! What becomes of work when some of it fails.
//!
//! A queue that meets a failure takes everything behind it along, and a wait for such a queue fails in turn, whether
//! the work behind it needs what failed or not. Here the two are told apart: what failed by itself is the culprit, and
//! poisons what it may have written; what reads such bytes is skipped and poisons what it was to write; all else is
//! handed over again, in the order it had.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};
use warpweft_core_types::{ErrorClass, Failure, WorkId};

use crate::{
    domain::{Domain, Line, LineKind, State},
    error::{CompletionError, NodeFailure},
    graph::NodePlace,
    memory::Point,
    plan::SegmentWork,
    run::{Run, Status},
    submit::{Points, add_point, is_lane_failure},
    sync::Ordering,
};

/// A segment that has not ended well: its run, its number, and the point it had.
struct Open {
    run: Arc<Run>,
    number: usize,
    old: Point,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It failed by itself.
    Culprit,
    /// It failed for another's sake.
    Bystander,
    /// It may still end well, or has not heard yet that it does not.
    UnderWay,
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
        let mut open = Vec::new();
        let runs: Vec<Arc<Run>> = state.in_flight.iter().cloned().collect();
        for run in &runs {
            self.judge(state, run, &failures, &mut open);
        }
        for (line, failure) in (0..).zip(&failures) {
            if failure.is_some() {
                self.replace(state, line);
            }
        }
        let mut moved = FxHashMap::default();
        // In the order of submission, so that whoever writes bytes last decides whether they are poisoned.
        for open in &open {
            match open.kind {
                Kind::UnderWay => repeat(state, open),
                Kind::Culprit | Kind::Bystander => self.retry(state, open, &mut moved),
            }
        }
        for memory in state.memories.all() {
            memory.users.rename(|point| moved.get(&point).copied().unwrap_or(point));
        }
        for run in &runs {
            conclude(run);
        }
        state.forget_lost(&runs);
        self.changed.notify_all();
    }

    /// Sorts a run's segments into those that are done, those that failed by themselves, and bystanders.
    fn judge(
        &self,
        state: &mut State,
        run: &Arc<Run>,
        failures: &[Option<(u64, Arc<Failure>)>],
        open: &mut Vec<Open>,
    ) {
        let count = run.state().segments.len();
        for number in 0..count {
            let own = run.state().segments[number].clone();
            if !matches!(own.status, Status::UnderWay) {
                continue;
            }
            let mut add = |kind| open.push(Open { run: Arc::clone(run), number, old: own.point, kind });
            let Some((value, failure)) = &failures[own.point.line as usize] else {
                // What has ended decides no more: others may have poisoned the bytes since.
                match own.semaphore.poll(own.point.value) {
                    Ok(true) => run.state().segments[number].pass(),
                    _ => add(Kind::UnderWay),
                }
                continue;
            };
            if own.point.value <= *value {
                run.state().segments[number].pass();
                continue;
            }
            let waited_in_vain =
                own.after.iter().any(|point| point.line != own.point.line && state.is_lost(*point));
            // The first on its line that did not fail for what it waited for is what the line failed of.
            let first = state.failed_lines.insert(own.point.line);
            state.lost.insert(own.point);
            if waited_in_vain || !first || own.skipped.is_some() {
                add(Kind::Bystander);
            } else {
                add(Kind::Culprit);
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
        state.poison(run, number, first.unwrap_or(0).., &cause);
        if failure.class() == ErrorClass::DeviceLost {
            self.poison_device(state, segment.place, &cause);
        }
        run.state().segments[number].skipped = Some(cause);
    }

    /// Nobody can tell what a lost device has left in its memory.
    fn poison_device(&self, state: &mut State, place: NodePlace, cause: &Arc<NodeFailure>) {
        let NodePlace::Device { device, .. } = place else { return };
        let id = self.devices[device as usize].id;
        // Nothing that was submitted by now can heal it.
        let turn = (state.next_run, 0);
        state.counts.quarantined_bytes += state.memories.quarantine(id, cause, turn);
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
            LineKind::Task => self.new_task_line(line.assigned),
        };
        line.reached = line.assigned;
        state.failed_lines.remove(&number);
        match fresh {
            Ok(fresh) => state.lines[number as usize] = fresh,
            Err(error) => tracing::debug!(%error, "a line stays failed"),
        }
    }

    /// Hands a bystander over again, or skips it if it needs what failed.
    fn retry(&self, state: &mut State, open: &Open, moved: &mut FxHashMap<Point, Point>) {
        let Open { run, number, old, .. } = open;
        let known = run.state().segments[*number].skipped.clone();
        let cause = known.or_else(|| self.reason_to_skip(state, run, *number));
        let points = self.points_again(state, open);
        if let Some(cause) = cause {
            if open.kind == Kind::Bystander {
                state.poison(run, *number, .., &cause);
            }
            self.skip(state, open, &points, cause, moved);
            return;
        }
        match self.enqueue_in(state, run, *number, &points, Some(old.line), None) {
            Ok(point) => {
                state.counts.resubmissions += 1;
                moved.insert(*old, point);
                state.heal(run, *number);
            }
            Err(error) if is_lane_failure(&error) && state.fails_with_its_line(open, &points) => {
                moved.insert(*old, run.state().segments[*number].point);
                state.heal(run, *number);
            }
            Err(error) => {
                let failure = Arc::new(error.into_failure(&run.plan.name_of(*number)));
                let cause = self.failure_of(state, &run.plan, *number, .., failure);
                state.poison(run, *number, .., &cause);
                run.state().segments[*number].status = Status::Failed(cause);
            }
        }
    }

    /// Why a bystander is not handed over again, if it is not.
    fn reason_to_skip(&self, state: &mut State, run: &Run, number: usize) -> Option<Arc<NodeFailure>> {
        if let Some(poison) = state.first_poison(&run.plan, number..=number, (run.id, number)) {
            return Some(poison.cause);
        }
        let failure = if run.cancelled.load(Ordering::Acquire) {
            Failure::Cancelled
        } else if matches!(run.work[number], SegmentWork::Mark) {
            // What another library enqueued went with its queue.
            Failure::TaskFailed {
                task: run.plan.name_of(number).into(),
                reason: "its queue failed, and work of another library cannot be handed over again"
                    .to_owned(),
            }
        } else {
            return None;
        };
        Some(self.failure_of(state, &run.plan, number, .., Arc::new(failure)))
    }

    /// What a bystander comes after, where that is now.
    fn points_again(&self, state: &mut State, open: &Open) -> Points {
        let after = open.run.state().segments[open.number].after.clone();
        let mut points = Points::new();
        for point in after {
            // What was on a line that was replaced is behind whatever was handed over again there.
            let value = if state.lost.contains(&point) { state.line(point).assigned } else { point.value };
            add_point(&mut points, Point { value, ..point });
        }
        points
    }

    /// Takes a segment as failed, once all that it comes after has ended: whoever uses the bytes next waits for it alone,
    /// and not for those.
    fn skip(
        &self,
        state: &mut State,
        open: &Open,
        points: &Points,
        cause: Arc<NodeFailure>,
        moved: &mut FxHashMap<Point, Point>,
    ) {
        let Open { run, number, old, .. } = open;
        let last = state.line(*old).assigned;
        let line = std::iter::once(Point { line: old.line, value: last });
        let waits = line.chain(points.iter().copied()).any(|point| !state.line(point).is_past(point.value));
        let place = |state: &mut State, line| {
            self.enqueue_in(state, run, *number, points, Some(line), Some(&cause)).is_ok()
        };
        // A line of tasks where the device is lost.
        let is_placed =
            waits && (place(state, old.line) || self.task_line(state).is_ok_and(|line| place(state, line)));
        if is_placed {
            moved.insert(*old, run.state().segments[*number].point);
        } else {
            run.state().segments[*number].status = Status::Failed(cause);
        }
    }
}

/// What a segment that goes on makes of the bytes that it writes: others before it may have poisoned them just now. One
/// that reads such bytes waits for what failed, and has not heard of it yet.
fn repeat(state: &mut State, Open { run, number, .. }: &Open) {
    let known = run.state().segments[*number].skipped.clone();
    let cause = known.or_else(|| {
        state.first_poison(&run.plan, *number..=*number, (run.id, *number)).map(|poison| poison.cause)
    });
    match cause {
        Some(cause) => {
            state.poison(run, *number, .., &cause);
            run.state().segments[*number].skipped = Some(cause);
        }
        None => state.heal(run, *number),
    }
}

impl State {
    /// Has a segment be one that failed with its line, of something that was handed over before it, and whether the line
    /// is a new one that failed again. It is looked at again with the others.
    fn fails_with_its_line(&mut self, open: &Open, points: &Points) -> bool {
        let line = &mut self.lines[open.old.line as usize];
        if line.assigned == line.reached {
            return false;
        }
        line.assigned += 1;
        let mut own = open.run.state();
        let own = &mut own.segments[open.number];
        own.point = Point { line: open.old.line, value: line.assigned };
        own.semaphore = Arc::clone(&line.semaphore);
        own.after = points.iter().copied().collect();
        true
    }

    /// Forgets points that nothing under way comes after.
    fn forget_lost(&mut self, runs: &[Arc<Run>]) {
        let after = |run: &Arc<Run>| -> Vec<Point> {
            run.state().segments.iter().flat_map(|segment| segment.after.iter().copied()).collect()
        };
        let awaited: FxHashSet<Point> = runs.iter().flat_map(after).collect();
        self.lost.retain(|point| awaited.contains(point));
    }

    /// Whether a point will never be reached, or was not before its line was replaced.
    fn is_lost(&mut self, point: Point) -> bool {
        self.lost.contains(&point) || self.line(point).semaphore.poll(point.value).is_err()
    }
}

/// Notes how a run has ended, if all of it has and some of it failed.
fn conclude(run: &Run) {
    let mut state = run.state();
    // It may be being handed over just now.
    let is_whole = state.segments.len() == run.plan.segments.len() || state.broken.is_some();
    let is_under_way = state.segments.iter().any(|segment| matches!(segment.status, Status::UnderWay));
    if state.outcome.is_some() || !is_whole || is_under_way {
        return;
    }
    let failed = state.segments.iter().find_map(|segment| match &segment.status {
        Status::Failed(cause) => Some(Arc::clone(cause)),
        _ => None,
    });
    if let Some(cause) = failed {
        // It may be another's cancelling that this one needed.
        let cancelled = matches!(*cause.reason, Failure::Cancelled) && run.cancelled.load(Ordering::Acquire);
        let error = if cancelled { CompletionError::Cancelled } else { CompletionError::Failed(cause) };
        state.outcome = Some(Err(error));
    }
}
