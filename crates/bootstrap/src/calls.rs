//! Calls that all members make together.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use crate::{
    Loss, Rank,
    frame::MEMBER_LIMIT,
    gather::before_end,
    hub::Moment,
    message::{CallFailure, CallKind, CallRequest},
};

/// Calls that may be under way: one, and those that ended early, until everybody has made them.
const UNDER_WAY: usize = 1 << 16;

/// An answer holds the values and this much for each at most.
const VALUE_HEADER: usize = 8;

type Outcome = Result<Vec<Vec<u8>>, CallFailure>;

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) to: Rank,
    pub(crate) sequence: u64,
    pub(crate) outcome: Outcome,
}

/// What is under way, by the position at which each member made it.
#[derive(Debug)]
pub(crate) struct Calls {
    size: usize,
    calls: BTreeMap<u64, Call>,
    /// Why no call can succeed any more.
    broken: Option<CallFailure>,
    /// Which call each member makes next.
    next: Vec<u64>,
    answers: VecDeque<Answer>,
}

#[derive(Debug)]
struct Call {
    requests: BTreeMap<Rank, CallRequest>,
    /// When the least patient of those who wait stops waiting.
    give_up: Moment,
    /// What those who come later are told at once.
    failure: Option<CallFailure>,
}

/// A member made its calls in another order than it can have.
#[derive(Debug)]
pub(crate) struct OutOfOrder;

impl Calls {
    pub(crate) fn new(size: usize) -> Self {
        Self { size, calls: BTreeMap::new(), broken: None, next: vec![0; size], answers: VecDeque::new() }
    }

    pub(crate) fn take(
        &mut self,
        now: Moment,
        rank: Rank,
        mut request: CallRequest,
    ) -> Result<(), OutOfOrder> {
        let sequence = request.sequence;
        let next = &mut self.next[rank.index()];
        if sequence < *next {
            // Arrived twice.
            return Ok(());
        }
        let is_next = sequence == *next;
        *next = sequence + 1;
        if !is_next || self.calls.len() >= UNDER_WAY {
            return Err(OutOfOrder);
        }
        if let Some(failure) = self.broken.clone() {
            self.answers.push_back(Answer { to: rank, sequence, outcome: Err(failure) });
            return Ok(());
        }
        let give_up = now + before_end(Duration::from_millis(request.within_ms));
        let call = self.calls.entry(sequence).or_insert_with(|| Call {
            requests: BTreeMap::new(),
            give_up,
            failure: None,
        });
        call.give_up = call.give_up.min(give_up);
        let mismatch = call.mismatch(rank, &request);
        if call.failure.is_some() {
            // Nobody gets it any more, and the call can stay for as long as one member does not come.
            request.value = Vec::new();
        }
        call.requests.insert(rank, request);
        match (call.failure.clone(), mismatch) {
            // The others were told when it failed.
            (Some(failure), _) => {
                self.answers.push_back(Answer { to: rank, sequence, outcome: Err(failure) })
            }
            (None, Some(mismatch)) => self.fail(sequence, &mismatch),
            (None, None) => {}
        }
        let Some(call) = self.calls.get(&sequence) else { return Ok(()) };
        if call.requests.len() == self.size {
            self.finish(sequence);
        }
        Ok(())
    }

    /// Everybody has come: the call is answered, if it was not already, and forgotten.
    fn finish(&mut self, sequence: u64) {
        let Some(call) = self.calls.remove(&sequence) else { return };
        if call.failure.is_some() {
            return;
        }
        let ranks: Vec<Rank> = call.requests.keys().copied().collect();
        let outcome = call.outcome();
        let answers = ranks.into_iter().map(|to| Answer { to, sequence, outcome: outcome.clone() });
        self.answers.extend(answers);
    }

    pub(crate) fn poll_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    pub(crate) fn next_give_up(&self) -> Option<Moment> {
        self.calls.values().filter(|call| call.failure.is_none()).map(|call| call.give_up).min()
    }

    /// Fails the calls whose time is up; whether there were any.
    pub(crate) fn give_up(&mut self, now: Moment) -> bool {
        let late = self.calls.iter().filter(|(_, call)| call.failure.is_none() && call.give_up <= now);
        let late: Vec<u64> = late.map(|(sequence, _)| *sequence).collect();
        for sequence in &late {
            let Some(call) = self.calls.get(sequence) else { continue };
            let missing = (0..self.size).filter_map(|rank| u32::try_from(rank).ok()).map(Rank);
            let missing = missing.filter(|rank| !call.requests.contains_key(rank)).collect();
            self.fail(*sequence, &CallFailure::TimedOut { missing });
        }
        !late.is_empty()
    }

    pub(crate) fn lose(&mut self, rank: Rank, how: Loss) {
        self.break_down(CallFailure::PeerLost { rank, how });
    }

    /// Whether nobody aborted before.
    pub(crate) fn abort(&mut self, by: Rank, reason: &str) -> bool {
        let first = !matches!(self.broken, Some(CallFailure::Aborted { .. }));
        if first {
            // An abort is somebody's wish, so it stands above losses that followed from it.
            self.broken = None;
            self.break_down(CallFailure::Aborted { by, reason: reason.to_owned() });
        }
        first
    }

    fn break_down(&mut self, failure: CallFailure) {
        let failure = self.broken.get_or_insert(failure).clone();
        let sequences: Vec<u64> = self.calls.keys().copied().collect();
        for sequence in sequences {
            self.fail(sequence, &failure);
        }
        self.calls.clear();
    }

    fn fail(&mut self, sequence: u64, failure: &CallFailure) {
        let Some(call) = self.calls.get_mut(&sequence) else { return };
        if call.failure.is_some() {
            return;
        }
        call.failure = Some(failure.clone());
        for (&to, request) in &mut call.requests {
            request.value = Vec::new();
            self.answers.push_back(Answer { to, sequence, outcome: Err(failure.clone()) });
        }
    }
}

impl Call {
    fn mismatch(&self, rank: Rank, request: &CallRequest) -> Option<CallFailure> {
        let (&first, other) = self.requests.iter().next()?;
        (other.kind != request.kind || other.name != request.name)
            .then(|| CallFailure::Mismatch { ranks: [first, rank], calls: [other.text(), request.text()] })
    }

    fn outcome(mut self) -> Outcome {
        let Some(kind) = self.requests.values().next().map(|request| request.kind) else {
            return Ok(Vec::new());
        };
        let values: Vec<Vec<u8>> = match kind {
            CallKind::Barrier => Vec::new(),
            CallKind::Broadcast { root } => {
                self.requests.remove(&root).map(|request| request.value).into_iter().collect()
            }
            _ => self.requests.into_values().map(|request| request.value).collect(),
        };
        let size_bytes = values.iter().map(|value| value.len() + VALUE_HEADER).sum::<usize>() as u64;
        let limit_bytes = u64::from(MEMBER_LIMIT) - 64;
        if size_bytes > limit_bytes {
            return Err(CallFailure::TooLarge { size_bytes, limit_bytes });
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_call_that_failed_are_not_kept() {
        let mut calls = Calls::new(3);
        let request = |value: &[u8]| {
            let (kind, name, value) = (CallKind::AllGather, "name".to_owned(), value.to_vec());
            CallRequest { sequence: 0, kind, name, value, within_ms: 10 }
        };
        calls.take(Moment::ZERO, Rank(0), request(b"early")).unwrap();
        assert!(calls.give_up(Duration::from_millis(10)));
        calls.take(Duration::from_millis(20), Rank(1), request(b"late")).unwrap();
        let kept = calls.calls.values().flat_map(|call| call.requests.values());
        assert_eq!(kept.map(|request| request.value.len()).collect::<Vec<_>>(), [0, 0]);
    }
}
