//! Queues of the program's own, in order with everything else.

use std::sync::Arc;

use smallvec::SmallVec;
use warpweft_core_types::{BufferView, Queue, SemaphorePoint, Submission};

use crate::{
    completion::Completion,
    domain::{Domain, Line, State},
    error::{RecordError, RunError},
    memory::Point,
    plan::{Plan, SegmentWork},
    run::{Run, RunSegment, Status},
    usage::Usage,
};

impl Domain {
    /// Puts a queue of the program's own behind everything that uses the operands.
    pub(crate) fn order_queue(
        &self,
        queue: &Arc<dyn Queue>,
        operands: &[(BufferView, Usage)],
    ) -> Result<(), RunError> {
        let (_, plan) = self.guest_plan(queue, operands)?;
        let mut state = self.state();
        self.admit(&mut state, &plan)?;
        let run = Run::new(state.next_run, plan, Arc::from([SegmentWork::Mark]));
        let points = self.points_before(&mut state, &run, &run.plan.segments[0]);
        let waits = state.semaphores(&points, u32::MAX);
        queue.submit(&Submission { waits: &waits, ops: &[], signals: &[] })?;
        Ok(())
    }

    /// Takes what is in a queue of the program's own by now for something that uses the operands.
    pub(crate) fn note_queue(
        self: &Arc<Self>,
        queue: &Arc<dyn Queue>,
        operands: &[(BufferView, Usage)],
    ) -> Result<Completion, RunError> {
        let (device, plan) = self.guest_plan(queue, operands)?;
        let mut state = self.state();
        self.admit(&mut state, &plan)?;
        let line = self.guest_line(&mut state, device)?;
        let mut run = Run::new(state.next_run, plan, Arc::from([SegmentWork::Mark]));
        run.submitted = self.tracer.now();
        let run = Arc::new(run);
        let target = &mut state.lines[line as usize];
        let point = Point { line, value: target.assigned + 1 };
        let semaphore = Arc::clone(&target.semaphore);
        let signals = [SemaphorePoint::new(&semaphore, point.value)];
        if let Err(error) = queue.submit(&Submission { waits: &[], ops: &[], signals: &signals }) {
            state.free_guests.entry(device).or_default().push(line);
            return Err(error.into());
        }
        target.assigned = point.value;
        let placed = RunSegment {
            point,
            semaphore,
            after: SmallVec::new(),
            status: Status::UnderWay,
            skipped: None,
            moments: None,
        };
        run.state().segments.push(placed);
        state.note(&run, 0, point, false);
        state.next_run += 1;
        state.counts.submissions += 1;
        state.in_flight.push_back(Arc::clone(&run));
        drop(state);
        Ok(Completion::new(self, run))
    }

    fn guest_plan(
        &self,
        queue: &Arc<dyn Queue>,
        operands: &[(BufferView, Usage)],
    ) -> Result<(u32, Arc<Plan>), RunError> {
        let device = queue.id().device;
        let unknown = || RecordError::UnknownDevice { node: "queue".to_owned(), device };
        let position = self.position(device).ok_or_else(unknown)?;
        Ok((position, Arc::new(self.hand_off_plan(position, operands)?)))
    }

    /// A line for one mark: an old one whose mark has been passed, or a new one.
    fn guest_line(&self, state: &mut State, device: u32) -> Result<u32, RunError> {
        if let Some(line) = state.free_guests.get_mut(&device).and_then(Vec::pop) {
            return Ok(line);
        }
        let line = Line::guest(device, self.devices[device as usize].device.as_ref(), 0)?;
        state.lines.push(line);
        Ok(u32::try_from(state.lines.len() - 1).unwrap_or(u32::MAX))
    }
}
