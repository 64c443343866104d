//! The device's own errands: zeroing memory, warming pipelines, asking the clock, trying the driver.

use std::{
    any::Any,
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use warpweft_core_types::DriverError;

use crate::{
    gpu::Gpu,
    record::Recording,
    timeline::{Line, Ticket},
};

/// A wait for the last errand when the device goes away, after which the wait is made again.
const ROUND: Duration = Duration::from_secs(1);

/// Short work beside the queues of the program, in order.
#[derive(Debug)]
pub(crate) struct Service {
    gpu: Arc<Gpu>,
    queue: usize,
    line: Arc<Line>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    submitted: u64,
    spare: Vec<Recording>,
    in_flight: VecDeque<Errand>,
}

#[derive(Debug)]
struct Errand {
    ticket: Ticket,
    recording: Recording,
    _keep: Option<Arc<dyn Any + Send + Sync>>,
}

impl Service {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Arc<Self>, DriverError> {
        let (line, queue) = (Line::create(gpu)?, gpu.pick_queue());
        Ok(Arc::new(Self { gpu: Arc::clone(gpu), queue, line, state: Mutex::default() }))
    }

    /// Has the device do what `record` records, and holds `keep` until it is done.
    ///
    /// # Safety
    ///
    /// - All that the commands touch lives as long as `keep`.
    #[expect(unsafe_code, reason = "submits work on memory that the errand keeps")]
    pub(crate) unsafe fn submit(
        &self,
        keep: Option<Arc<dyn Any + Send + Sync>>,
        record: impl FnOnce(&mut Recording) -> Result<(), DriverError>,
    ) -> Result<Ticket, DriverError> {
        // Nothing but the driver runs under the lock.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.reap()?;
        let mut recording = match state.spare.pop() {
            Some(recording) => recording,
            None => Recording::primary(&self.gpu)?,
        };
        // SAFETY: it is new, or `reap` took it from an errand that is over.
        unsafe { recording.begin() }?;
        recording.barrier();
        record(&mut recording)?;
        recording.show_host();
        recording.end()?;
        let ticket = Ticket::new(&self.line, state.submitted + 1);
        // SAFETY: recorded just now to its end. The errand holds it and what it touches until its ticket is reached,
        // which is the next value of the service's own line, under the lock.
        unsafe { self.gpu.submit(self.queue, Some(recording.commands()), &[], &ticket) }?;
        state.submitted += 1;
        state.in_flight.push_back(Errand { ticket: ticket.clone(), recording, _keep: keep });
        Ok(ticket)
    }
}

impl State {
    fn reap(&mut self) -> Result<(), DriverError> {
        while let Some(first) = self.in_flight.front() {
            if !first.ticket.is_done()? {
                break;
            }
            self.spare.extend(self.in_flight.pop_front().map(|errand| errand.recording));
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let errands = std::mem::take(&mut state.in_flight);
        let Some(last) = errands.back().map(|errand| errand.ticket.clone()) else { return };
        let gpu = Arc::clone(&self.gpu);
        // The device may read what they hold until the last one is over, and that may have to wait for other work.
        self.gpu.chores.give(move || {
            while gpu.failure().is_none() {
                match last.wait(ROUND) {
                    Ok(true) => break,
                    Ok(false) => {}
                    // Nothing tells when they are over, so they are never let go.
                    Err(error) if gpu.is_lost_by(&error) => {}
                    Err(_) => return std::mem::forget(errands),
                }
            }
            drop(errands);
        });
    }
}
