//! What becomes of work that was taken: why it did not happen, and what whoever waits or signals is told.

use std::{sync::Arc, time::Duration};

use crate::{
    CollectiveFailure, DeviceId, DriverError, ErrorClass, RangeError, SubmissionId, SubmitError, WorkId,
};

/// Why submitted work did not happen. Shared by everyone who waits for it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// A kernel that is a Rust function panicked.
    #[error("kernel {kernel:?} panicked in {work}: {message}")]
    KernelPanicked {
        /// In which work.
        work: WorkId,
        /// Which kernel.
        kernel: String,
        /// The panic's message.
        message: String,
    },
    /// A kernel reported failure by its own code.
    #[error("kernel {kernel:?} failed in {work} with code {code}")]
    KernelFailed {
        /// In which work.
        work: WorkId,
        /// Which kernel.
        kernel: String,
        /// What it returned.
        code: i32,
    },
    /// A task of the host failed or panicked.
    #[error("task {task:?} failed: {reason}")]
    TaskFailed {
        /// Its name.
        task: String,
        /// Its own words, or the panic's.
        reason: String,
    },
    /// A copy or fill could not be carried out.
    #[error("{what} failed in {submission}: {reason}")]
    OperationFailed {
        /// In which submission.
        submission: SubmissionId,
        /// `copy`, `fill` or `launch`.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The device can no longer be used by this process.
    #[error("{device} is lost: {reason}")]
    DeviceLost {
        /// Which.
        device: DeviceId,
        /// Why.
        reason: String,
    },
    /// The driver had no memory for the work itself, such as its commands.
    #[error("{device} has no memory for the work")]
    OutOfMemory {
        /// Which.
        device: DeviceId,
        /// What the vendor said.
        #[source]
        source: DriverError,
    },
    /// The last handle of the device went away before the work could start.
    #[error("{device} was closed before the work could start")]
    Abandoned {
        /// Which.
        device: DeviceId,
    },
    /// The work was cancelled before it started.
    #[error("cancelled")]
    Cancelled,
    /// The operation's own deadline passed; its unstarted part was dropped.
    #[error("not finished after {after:?}")]
    DeadlineExceeded {
        /// The time it had.
        after: Duration,
    },
    /// A collective was not completed.
    #[error(transparent)]
    Collective(#[from] CollectiveFailure),
    /// A submission was refused while a longer operation was under way.
    #[error("a submission was refused: {0}")]
    Submit(#[source] SubmitError),
    /// A range was refused while a longer operation was under way.
    #[error("a range was refused: {0}")]
    Range(#[source] RangeError),
    /// A vendor call failed.
    #[error("driver call failed on {device}")]
    Driver {
        /// Where.
        device: DeviceId,
        /// What the vendor said.
        #[source]
        source: DriverError,
    },
}

/// Why a wait ended without the value being reached.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline passed. The work goes on.
    #[error("timed out before the semaphore reached {awaited}; it is at {reached}")]
    Timeout {
        /// The value waited for.
        awaited: u64,
        /// The value the semaphore had.
        reached: u64,
    },
    /// The work failed and the value will never be reached.
    #[error("{0}")]
    Failed(Arc<Failure>),
}

/// Why a host-side signal was refused.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SignalError {
    /// A semaphore only rises.
    #[error("a signal of {value} does not raise a semaphore at {current}")]
    NotIncreasing {
        /// The value to be signalled.
        value: u64,
        /// The value it has.
        current: u64,
    },
    /// The semaphore failed before.
    #[error("{0}")]
    Failed(Arc<Failure>),
}

impl From<SignalError> for SubmitError {
    fn from(error: SignalError) -> Self {
        match error {
            SignalError::NotIncreasing { value, current } => Self::NotIncreasing { value, current },
            SignalError::Failed(failure) => Self::Failed(failure),
        }
    }
}

impl Failure {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::KernelPanicked { .. }
            | Self::KernelFailed { .. }
            | Self::TaskFailed { .. }
            | Self::Abandoned { .. } => ErrorClass::Usage,
            Self::OperationFailed { .. } | Self::Cancelled | Self::DeadlineExceeded { .. } => {
                ErrorClass::Transient
            }
            Self::DeviceLost { .. } => ErrorClass::DeviceLost,
            Self::OutOfMemory { .. } => ErrorClass::Exhausted,
            Self::Submit(error) => error.class(),
            Self::Range(error) => error.class(),
            Self::Driver { .. } => ErrorClass::Internal,
            Self::Collective(failure) => failure.class(),
        }
    }
}

impl WaitError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Timeout { .. } => ErrorClass::Transient,
            Self::Failed(failure) => failure.class(),
        }
    }
}

impl SignalError {
    /// How to react.
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::NotIncreasing { .. } => ErrorClass::Usage,
            Self::Failed(failure) => failure.class(),
        }
    }
}
