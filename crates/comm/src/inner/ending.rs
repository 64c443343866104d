//! How a communicator finds out that it has ended, and ends what is under way.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use warpweft_bootstrap::{GroupError, Health, Loss};
use warpweft_core_types::{CollectiveFailure, Deadline, ErrorClass, Failure};

use super::Inner;
use crate::{CommError, EngineKind, lines::Lost};

/// Who leaves has nothing more to do with calls that it has ended, and others may still be at them for so long; as long
/// as its own, which nobody waits for any more.
pub(crate) const GRACE: Duration = Duration::from_millis(500);

/// An engine may notice that a rank is dead before the group has told so, which takes less than this on one host.
const NEWS: Duration = Duration::from_millis(200);

/// How long an engine may take to end what is under way.
const PARTING: Duration = Duration::from_secs(2);

impl Inner {
    /// What an error of the group means for the communicator.
    pub(crate) fn judge(&self, error: GroupError) -> CommError {
        self.check_group();
        self.told(CommError::from(error))
    }

    /// What is told of an error: where the communicator has failed, that is why.
    pub(crate) fn told(&self, error: CommError) -> CommError {
        let is_effect = match &error {
            CommError::Failed(failure) if self.goes_on_after(failure) => return error,
            CommError::Failed(failure) => may_be_a_death(failure),
            CommError::Native(_) => true,
            CommError::Submit(error) => error.class() == ErrorClass::Internal,
            _ => false,
        };
        if is_effect {
            self.wait_for_news();
        }
        self.check_group();
        // A queue that failed by something else takes this call from the others all the same, and so does a device that
        // is lost before there is anything in a queue.
        if let Some(failure) = error.failure() {
            self.fail(failure, true);
        }
        match (&error, self.failure.get()) {
            (CommError::Failed(_) | CommError::Group(_), Some(failure)) => {
                CommError::Failed(Arc::clone(failure))
            }
            (_, Some(failure)) if is_effect => CommError::Failed(Arc::clone(failure)),
            _ => error,
        }
    }

    /// The same as soon as it is known, which the keeper finds out.
    pub(crate) fn judged(&self, error: &CommError) -> Option<CommError> {
        match error {
            CommError::Failed(failure) if !self.goes_on_after(failure) => {
                self.failure.get().map(|failure| CommError::Failed(Arc::clone(failure)))
            }
            error => Some(error.clone()),
        }
    }

    /// Gives the group time to tell of a death that something else was the first to notice.
    fn wait_for_news(&self) {
        if self.failure.get().is_none() && self.group.check().is_ok() {
            let is_lost = |health: &[Health]| health.iter().any(|health| !health.is_present());
            // That there are no news is an answer too.
            let _health = self.group.wait_health(NEWS, is_lost);
        }
    }

    /// Whether no rank is lost or has aborted.
    pub(crate) fn is_healthy(&self) -> bool {
        let is_whole = self.group.check().is_ok();
        self.check_group();
        is_whole && self.failure.get().is_none()
    }

    /// Looks whether the group can go on.
    pub(crate) fn check_group(&self) {
        if self.failure.get().is_some() {
            return;
        }
        let failure = match self.group.check() {
            // What a fork does with its copy is nothing to the group, and every call there says what is wrong.
            Ok(()) | Err(GroupError::Forked { .. }) => return,
            Err(GroupError::PeerLost { rank, how }) => {
                let lost = CollectiveFailure::PeerLost { rank: rank.0, how: how.to_string() };
                let (since, _) = self.left.get_or_init(|| (Instant::now(), lost.clone()));
                if how == Loss::Left && (since.elapsed() < GRACE || !self.is_busy()) {
                    return;
                }
                lost
            }
            Err(GroupError::Aborted { by, reason }) => CollectiveFailure::Aborted { rank: by.0, reason },
            Err(error) => CollectiveFailure::Aborted { rank: self.rank(), reason: error.to_string() },
        };
        self.fail(&failed(failure), false);
    }

    /// Looks how far queues have come, unless a call is being put in one.
    pub(crate) fn look(&self) {
        let Some(mut state) = self.try_lock() else { return };
        let lost = state.lines.look(|news| self.flight.end(Some(news.queue), news.ticket));
        drop(state);
        for Lost { calls, failure } in lost {
            if self.goes_on_after(&failure) {
                self.flight.doubt(calls.queue);
                self.flight.end(Some(calls.queue), calls.ticket);
            } else {
                if may_be_a_death(&failure) {
                    self.wait_for_news();
                }
                self.check_group();
                // The calls behind it will not be made here, and the others would wait for them.
                self.fail(&failure, true);
            }
        }
    }

    /// Whether a failure ends one call and not the communicator. Ranks that meet at a board may have put different
    /// numbers of calls on it by then, so that later ones would meet the wrong calls.
    fn goes_on_after(&self, failure: &Failure) -> bool {
        is_of_one(failure) && self.engines.iter().all(|engine| engine.kind() != EngineKind::Planned)
    }

    /// Ends everything if a call has been under way for too long.
    pub(crate) fn check_age(&self) {
        let Some(oldest) = self.flight.oldest().filter(|oldest| oldest.age > self.config.timeout) else {
            return;
        };
        let failure = CollectiveFailure::TimedOut {
            number: oldest.number,
            op: oldest.op,
            after: oldest.age,
            waiting: "the flight records tell which ranks had come to it".to_owned(),
        };
        self.fail(&failed(failure), true);
    }

    pub(crate) fn check_engines(&self) {
        if self.failure.get().is_some() {
            return;
        }
        if let Some(failure) = self.given_up() {
            self.wait_for_news();
            self.check_group();
            self.fail(&failure, true);
            return;
        }
        if let Some(error) = self.engines.iter().find_map(|engine| engine.check().err()) {
            self.wait_for_news();
            self.check_group();
            let (rank, reason) = (self.rank(), error.to_string());
            self.fail(&failed(CollectiveFailure::Aborted { rank, reason }), true);
        }
    }

    /// What has become of calls that queues say are over. Those that were over before a device gave up are told the
    /// same, since nobody knows which they are.
    pub(crate) fn outcome(&self) -> Result<(), CommError> {
        match self.given_up() {
            None => Ok(()),
            Some(failure) => Err(self.told(CommError::Failed(failure))),
        }
    }

    /// Why a device gave up, if one did.
    pub(crate) fn given_up(&self) -> Option<Arc<Failure>> {
        self.engines.iter().find_map(|engine| engine.given_up())
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.failure.get().is_none() && self.try_lock().is_none_or(|state| !state.lines.is_idle())
    }

    /// Ends every call here, and on the other ranks if they do not know yet. The first failure is the one that counts.
    pub(crate) fn fail(&self, failure: &Arc<Failure>, tell: bool) {
        if self.failure.set(Arc::clone(failure)).is_err() {
            return;
        }
        tracing::warn!(rank = self.rank(), %failure, "a communicator failed");
        // The group tells of a death, and whoever aborts tells of that; an abort that overtakes them would name this rank.
        let is_known = matches!(self.group.check(), Err(GroupError::PeerLost { .. }))
            || matches!(**failure, Failure::Collective(CollectiveFailure::Aborted { rank, .. }) if rank != self.rank());
        if tell
            && !is_known
            && let Err(error) = self.group.abort(&failure.to_string())
        {
            tracing::warn!(%error, "the other ranks were not told");
        }
        self.engines.iter().for_each(|engine| engine.abort(failure, Deadline::within(PARTING)));
        if let Err(error) = self.flight.write(&self.record()) {
            tracing::warn!(%error, "the flight record was not written");
        }
    }

    /// Ends what is under way of a communicator that was dropped some time ago. The others are told that it left.
    pub(crate) fn give_up(&self) {
        self.fail(&failed(self.dropped()), false);
    }

    /// Leaves the group. What was under way has ended.
    pub(crate) fn leave(&self) {
        let failure = self.failure.get_or_init(|| failed(self.dropped()));
        self.engines.iter().for_each(|engine| engine.leave(failure));
        if let Err(error) = self.group.leave() {
            tracing::debug!(%error, "a communicator of another process was dropped");
        }
    }

    pub(super) fn dropped(&self) -> CollectiveFailure {
        let reason = "its communicator was dropped".to_owned();
        CollectiveFailure::Aborted { rank: self.rank(), reason }
    }
}

/// Whether all ranks were told that they called different things, which ends that call.
pub(crate) const fn is_of_one(failure: &Failure) -> bool {
    matches!(failure, Failure::Collective(CollectiveFailure::Mismatch { .. }))
}

/// Whether the group may have something to say about it: an engine hears of a death from other ranks too, and drivers
/// have words of their own for it.
const fn may_be_a_death(failure: &Failure) -> bool {
    !matches!(failure, Failure::Collective(other) if !matches!(other, CollectiveFailure::PeerLost { .. }))
}

pub(crate) fn failed(failure: CollectiveFailure) -> Arc<Failure> {
    Arc::new(failure.into())
}
