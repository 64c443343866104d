//! When to hand the next chunk of a long copy to the devices: decisions only, no device and no clock.

use std::{sync::Arc, time::Duration};

use warpweft_core_types::Failure;

/// Follows one copy from its first chunk to its end.
#[derive(Debug)]
pub(crate) struct CopyMachine {
    chunks: u64,
    ahead: u64,
    slots: u64,
    /// Hops that a processor carries out.
    processors: Vec<usize>,
    /// Chunks done by each hop.
    done: Vec<u64>,
    submitted: u64,
    phase: Phase,
    /// What must not start any more has been told so.
    aborted: bool,
}

#[derive(Debug)]
enum Phase {
    Running,
    /// It will end like this once nothing of it can touch memory any more.
    Draining(Arc<Failure>),
    /// It has to end like this, which nobody was told yet.
    Ending(Outcome),
    Ended,
}

/// How a copy ended.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    Done,
    Failed(Arc<Failure>),
}

/// What happened.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// A hop has done this many chunks.
    Reached { hop: usize, chunks: u64 },
    /// A hop failed.
    Failed(Arc<Failure>),
    /// The last hop failed, so that none of its chunks will run any more.
    Settled,
    /// The copy's time is over.
    TimeUp { limit: Duration },
    /// Its owner wants it to end.
    Cancel,
}

/// What to do now.
#[derive(Debug, Clone)]
pub(crate) enum Action {
    /// Hand this chunk to the queues of all hops.
    Submit { chunk: u64 },
    /// Copy this chunk by a processor.
    Bridge { hop: usize, chunk: u64 },
    /// Keep what was handed over but has not started from starting, where that can be done.
    Abort(Arc<Failure>),
    /// Tell whoever waits. Nothing follows.
    Finish(Outcome),
}

impl CopyMachine {
    pub(crate) fn new(chunks: u64, ahead: u64, slots: u64, hops: usize, processors: Vec<usize>) -> Self {
        Self {
            chunks,
            ahead,
            slots,
            processors,
            done: vec![0; hops],
            submitted: 0,
            phase: Phase::Running,
            aborted: false,
        }
    }

    pub(crate) fn handle(&mut self, event: Event) {
        match event {
            Event::Reached { hop, chunks } => self.done[hop] = self.done[hop].max(chunks),
            Event::Failed(failure) => self.fail(failure),
            Event::TimeUp { limit } => self.fail(Arc::new(Failure::DeadlineExceeded { after: limit })),
            Event::Cancel => self.fail(Arc::new(Failure::Cancelled)),
            Event::Settled => self.submitted = self.completed(),
        }
        self.advance();
    }

    pub(crate) fn poll_action(&mut self) -> Option<Action> {
        match &self.phase {
            Phase::Ended => None,
            Phase::Running => self.next_bridge().or_else(|| self.next_submit()),
            Phase::Draining(failure) if !self.aborted => {
                self.aborted = true;
                Some(Action::Abort(Arc::clone(failure)))
            }
            Phase::Draining(_) => None,
            Phase::Ending(outcome) => {
                let outcome = outcome.clone();
                self.phase = Phase::Ended;
                Some(Action::Finish(outcome))
            }
        }
    }

    /// Goes to the next phase if it is time: a copy that failed ends when everything that was handed over has
    /// ended too, so that nobody finds its bytes arriving later.
    fn advance(&mut self) {
        let drained = self.completed() == self.submitted;
        match &self.phase {
            // A copy that was handed over whole before it failed has arrived all the same.
            Phase::Running | Phase::Draining(_) if self.completed() == self.chunks => {
                self.phase = Phase::Ending(Outcome::Done);
            }
            Phase::Draining(failure) if drained => {
                self.phase = Phase::Ending(Outcome::Failed(Arc::clone(failure)));
            }
            _ => {}
        }
    }

    fn fail(&mut self, failure: Arc<Failure>) {
        if let Phase::Running = self.phase {
            self.phase = Phase::Draining(failure);
        }
    }

    /// Chunks that a hop has done, as far as the machine was told.
    pub(crate) fn done(&self, hop: usize) -> u64 {
        self.done[hop]
    }

    /// Chunks that the last hop has done.
    fn completed(&self) -> u64 {
        self.done.last().copied().unwrap_or(0)
    }

    fn next_submit(&mut self) -> Option<Action> {
        let chunk = self.submitted;
        if chunk >= self.chunks || chunk >= self.completed() + self.ahead {
            return None;
        }
        self.submitted += 1;
        Some(Action::Submit { chunk })
    }

    /// A processor's next chunk, if the hop before has brought it and the slot it goes to was read out.
    fn next_bridge(&mut self) -> Option<Action> {
        let ready = |&hop: &usize| {
            let chunk = self.done[hop];
            let brought = self.done[hop - 1] > chunk;
            let read_out = chunk < self.slots || self.done[hop + 1] > chunk - self.slots;
            brought && read_out
        };
        let hop = self.processors.iter().copied().find(|hop| ready(hop))?;
        let chunk = self.done[hop];
        self.done[hop] += 1;
        Some(Action::Bridge { hop, chunk })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Runs a machine against hops that do their chunks one at a time, picked by `choices`.
    fn run(chunks: u64, slots: u64, ahead: u64, hops: usize, processors: Vec<usize>, choices: &[u8]) {
        let is_processor: Vec<bool> = (0..hops).map(|hop| processors.contains(&hop)).collect();
        let mut machine = CopyMachine::new(chunks, ahead, slots, hops, processors);
        let (mut submitted, mut done) = (0, vec![0_u64; hops]);
        let mut choices = choices.iter().cycle();
        for _ in 0..10_000 {
            while let Some(action) = machine.poll_action() {
                match action {
                    Action::Submit { chunk } => {
                        assert_eq!(chunk, submitted, "chunks are submitted in order, once");
                        assert!(chunk < done[hops - 1] + ahead, "no more than `ahead` are under way");
                        submitted += 1;
                    }
                    Action::Bridge { hop, chunk } => {
                        assert_eq!(chunk, done[hop]);
                        assert!(done[hop - 1] > chunk, "the chunk has arrived");
                        assert!(chunk < slots || done[hop + 1] > chunk - slots, "the slot is free");
                        done[hop] += 1;
                    }
                    Action::Finish(Outcome::Done) => {
                        assert!(done.iter().all(|&done| done == chunks));
                        assert!(machine.poll_action().is_none(), "nothing follows the end");
                        return;
                    }
                    Action::Abort(failure) | Action::Finish(Outcome::Failed(failure)) => panic!("{failure}"),
                }
            }
            let able = |hop: usize| {
                let arrived = if hop == 0 { submitted } else { done[hop - 1].min(submitted) };
                let free = hop + 1 == hops || done[hop] < slots || done[hop + 1] > done[hop] - slots;
                !is_processor[hop] && done[hop] < arrived && free
            };
            let able: Vec<usize> = (0..hops).filter(|&hop| able(hop)).collect();
            assert!(!able.is_empty(), "the copy is stuck");
            let hop = able[usize::from(*choices.next().unwrap()) % able.len()];
            done[hop] += 1;
            machine.handle(Event::Reached { hop, chunks: done[hop] });
        }
        panic!("the copy did not end");
    }

    proptest! {
        #[test]
        fn every_order_of_completions_ends_with_every_chunk_moved_once(
            chunks in 1_u64..20, slots in 1_u64..4, more in 0_u64..4, hops in 1_usize..4, bridged: bool,
            choices in prop::collection::vec(any::<u8>(), 1..50),
        ) {
            let processors = if bridged && hops == 3 { vec![1] } else { vec![] };
            run(chunks, slots, slots + more, hops, processors, &choices);
        }
    }

    fn deadline_exceeded(action: Option<Action>) -> bool {
        matches!(
            action,
            Some(Action::Finish(Outcome::Failed(failure))) if matches!(*failure, Failure::DeadlineExceeded { .. })
        )
    }

    #[test]
    fn the_first_end_counts_and_waits_for_what_was_handed_over() {
        let mut machine = CopyMachine::new(10, 2, 2, 1, vec![]);
        for expected in 0..2 {
            assert!(matches!(machine.poll_action(), Some(Action::Submit { chunk }) if chunk == expected));
        }
        machine.handle(Event::TimeUp { limit: Duration::from_secs(1) });
        machine.handle(Event::Cancel);
        assert!(matches!(machine.poll_action(), Some(Action::Abort(_))));
        assert!(machine.poll_action().is_none(), "two chunks are under way");
        machine.handle(Event::Reached { hop: 0, chunks: 1 });
        assert!(machine.poll_action().is_none(), "one is");
        machine.handle(Event::Reached { hop: 0, chunks: 2 });
        assert!(deadline_exceeded(machine.poll_action()));
        assert!(machine.poll_action().is_none());
    }

    #[test]
    fn a_last_hop_that_failed_has_nothing_under_way() {
        let mut machine = CopyMachine::new(10, 2, 2, 2, vec![]);
        while machine.poll_action().is_some() {}
        machine.handle(Event::Failed(Arc::new(Failure::Cancelled)));
        assert!(matches!(machine.poll_action(), Some(Action::Abort(_))));
        assert!(machine.poll_action().is_none());
        machine.handle(Event::Settled);
        assert!(matches!(machine.poll_action(), Some(Action::Finish(Outcome::Failed(_)))));
    }

    #[test]
    fn what_was_not_handed_over_ends_at_once() {
        let mut machine = CopyMachine::new(10, 2, 2, 1, vec![]);
        machine.handle(Event::TimeUp { limit: Duration::from_secs(1) });
        assert!(deadline_exceeded(machine.poll_action()));
    }
}
