//! What can go wrong.

use std::{fmt, path::PathBuf, time::Duration};

use crate::{dtype::DataType, version::Version};

/// Why a call did not do what it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library was found that can be used.
    #[error(
        "no usable NCCL was found; install one (`pip install nvidia-nccl-cu12`, or your system's libnccl2), or name it in \
         NCCL_LIBRARY; tried {}",
        list(.tried)
    )]
    NotFound {
        /// Every place, in order.
        tried: Vec<Tried>,
    },
    /// The library is too old for what was asked.
    #[error("{what} needs NCCL {needs} or newer, and the one that was loaded is {has}")]
    TooOld {
        /// A function or a setting.
        what: &'static str,
        /// The first version that has it.
        needs: Version,
        /// The version that was loaded.
        has: Version,
    },
    /// The library or the CUDA driver refused a call, or a communicator broke.
    #[error(transparent)]
    Nccl(#[from] NcclError),
    /// A call of the CUDA driver's failed, which is asked to make a device current.
    #[error("the CUDA driver cannot make device {device} current: {reason}")]
    Device {
        /// Its ordinal.
        device: u32,
        /// The function and its code, or why there is no driver.
        reason: String,
    },
    /// Something did not end in time. The communicator cannot be relied on: abort it.
    #[error("{what} did not end within {} ms", .after.as_millis())]
    TimedOut {
        /// The call that was waited for.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// The communicator was aborted or finalized.
    #[error("the communicator was {state} and takes no more calls{}", because(.cause))]
    Gone {
        /// What was done with it.
        state: &'static str,
        /// What was wrong with it then, if anything.
        cause: Option<NcclError>,
    },
    /// Lengths do not fit together.
    #[error("{call}: {what} must hold {expected} elements and holds {found}")]
    Length {
        /// The call.
        call: &'static str,
        /// Which buffer.
        what: &'static str,
        /// As many as the other buffer and the number of ranks ask for.
        expected: usize,
        /// What it holds.
        found: usize,
    },
    /// Buffers of one call hold different types.
    #[error("{call}: one buffer holds {one} and the other {other}")]
    Types {
        /// The call.
        call: &'static str,
        /// The type in the source.
        one: DataType,
        /// The type in the destination.
        other: DataType,
    },
    /// A buffer or a stream is not on the communicator's device.
    #[error("{call}: {what} is on device {found}, the communicator on device {expected}")]
    WrongDevice {
        /// The call.
        call: &'static str,
        /// Which of the arguments.
        what: &'static str,
        /// The communicator's device.
        expected: u32,
        /// The argument's.
        found: u32,
    },
    /// A buffer may be used in one stream alone, and the call is for another.
    #[error("{call}: {what} is in use on another stream than the call's")]
    WrongStream {
        /// The call.
        call: &'static str,
        /// Which buffer.
        what: &'static str,
    },
    /// Source and destination overlap, and not in the way that the call works in place.
    #[error("{call}: source and destination overlap; in place, {rule}")]
    Overlap {
        /// The call.
        call: &'static str,
        /// Where the two must lie instead.
        rule: &'static str,
    },
    /// A rank that the communicator does not have.
    #[error("there is no rank {rank} among {size}")]
    Rank {
        /// What was named.
        rank: u32,
        /// How many there are.
        size: u32,
    },
    /// An argument that no version takes.
    #[error("{what}")]
    Invalid {
        /// What is wrong with it, and what to do.
        what: String,
    },
    /// The default stream of each thread, given to a communicator that does not block: the library would use the
    /// default stream of its own thread (NVIDIA/nccl issue 1976).
    #[error(
        "the per-thread default stream cannot be used with a communicator that does not block; create a stream, or make \
         the communicator with `blocking(true)`"
    )]
    PerThreadStream,
    /// The process was made by `fork` after the library had been loaded.
    #[error(
        "this process was made by fork after NCCL was loaded, and NCCL and CUDA do not work across a fork; load it in \
         each process, or start processes without fork"
    )]
    Forked,
    /// The operating system gave no thread.
    #[error("no thread could be started for {what}")]
    Thread {
        /// What it was for.
        what: &'static str,
    },
}

/// How to react to an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorClass {
    /// The call was wrong and had no effect; the communicator still works.
    Usage,
    /// The library or the driver cannot do it.
    Unsupported,
    /// The communicator is broken: abort it, on all ranks.
    Broken,
    /// There was no answer in time: abort the communicator, or wait longer.
    TimedOut,
}

impl Error {
    /// How to react.
    #[must_use]
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound { .. } | Self::TooOld { .. } | Self::Device { .. } | Self::Thread { .. } => {
                ErrorClass::Unsupported
            }
            Self::Nccl(error) if error.is_fatal() => ErrorClass::Broken,
            Self::Gone { .. } | Self::Forked => ErrorClass::Broken,
            Self::TimedOut { .. } => ErrorClass::TimedOut,
            _ => ErrorClass::Usage,
        }
    }
}

/// A place where a library was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// A path, or a name that the system's loader was asked for.
    pub path: PathBuf,
    /// Why it was not taken, in the loader's words if it is the one who refused.
    pub reason: String,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.path.display(), self.reason)
    }
}

fn because(cause: &Option<NcclError>) -> String {
    cause.as_ref().map_or_else(String::new, |cause| format!(": {cause}"))
}

fn list(tried: &[Tried]) -> String {
    tried.iter().map(Tried::to_string).collect::<Vec<_>>().join(", ")
}

/// What the library answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// `ncclResult_t`.
    pub code: i32,
    /// The name of the code.
    pub name: &'static str,
    /// The library's text for the code (`ncclGetErrorString`).
    pub meaning: String,
    /// What it said last (`ncclGetLastError`), if anything.
    pub last: String,
}

impl NcclError {
    /// Whether the communicator, and all that were used in the same group, are broken. An invalid argument has no
    /// effect; everything else does.
    #[must_use]
    pub const fn is_fatal(&self) -> bool {
        self.code != INVALID_ARGUMENT
    }
}

const INVALID_ARGUMENT: i32 = 4;

impl std::error::Error for NcclError {}

impl fmt::Display for NcclError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {} ({}): {}", self.call, self.code, self.name, self.meaning)?;
        if self.last.is_empty() { Ok(()) } else { write!(f, "; {}", self.last.trim_end()) }
    }
}

/// An error with its causes, where a loader's words are.
pub(crate) fn in_full(error: &dyn std::error::Error) -> String {
    match error.source() {
        None => error.to_string(),
        Some(cause) => format!("{error}: {}", in_full(cause)),
    }
}

/// The name of a code in `nccl.h`.
pub(crate) const fn name_of(code: i32) -> &'static str {
    match code {
        0 => "ncclSuccess",
        1 => "ncclUnhandledCudaError",
        2 => "ncclSystemError",
        3 => "ncclInternalError",
        INVALID_ARGUMENT => "ncclInvalidArgument",
        5 => "ncclInvalidUsage",
        6 => "ncclRemoteError",
        7 => "ncclInProgress",
        8 => "ncclTimeout",
        _ => "a code that nccl.h does not have",
    }
}
