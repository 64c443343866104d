//! When to stop waiting.

use std::time::{Duration, Instant};

/// A point in time by which a waiting call returns.
///
/// Every call of the seam that can wait takes one, so that nothing waits for ever. Passing the same
/// deadline down a chain of waits keeps their sum bounded, which passing a timeout does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

impl Deadline {
    /// The longest any wait is allowed to be; longer timeouts are cut to it.
    ///
    /// It keeps `Instant` arithmetic from overflowing on a timeout such as `Duration::MAX`.
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

    /// The time `timeout` from now.
    pub fn within(timeout: Duration) -> Self {
        Self(Instant::now() + timeout.min(Self::LONGEST))
    }

    /// Exactly `instant`.
    pub const fn at(instant: Instant) -> Self {
        Self(instant)
    }

    /// Now: only look, do not wait.
    pub fn now() -> Self {
        Self(Instant::now())
    }

    /// The instant meant.
    pub const fn instant(self) -> Instant {
        self.0
    }

    /// Time left; zero once past.
    pub fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether the deadline lies in the past.
    pub fn is_past(self) -> bool {
        self.remaining().is_zero()
    }
}

impl From<Duration> for Deadline {
    fn from(timeout: Duration) -> Self {
        Self::within(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_timeout_does_not_overflow() {
        assert!(!Deadline::within(Duration::MAX).is_past());
    }

    #[test]
    fn now_is_past_at_once() {
        assert!(Deadline::now().is_past());
    }
}
