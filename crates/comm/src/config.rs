//! How a communicator is to be.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{EngineKind, FlightConfig, TuningConfig};

/// How a communicator is to be. All ranks say the same, but for [`Self::flight`] and the folder of [`Self::tuning`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommConfig {
    /// The engine to use and no other; the best for each call if none is named. A rank that is alone copies, whatever is
    /// named.
    pub engine: Option<EngineKind>,
    /// How long a call may be under way, what it waits for included, before the communicator is aborted on all ranks.
    pub timeout: Duration,
    /// Compare every call of all ranks before it is put in a queue: a call that differs is an error on all ranks and has
    /// no effect. It costs a trip to rank 0 and back. The host engine compares calls always; calls of the planned engine
    /// that differ without this end the communicator.
    pub validate: bool,
    /// Multiprocessors that collectives may take on each device; as many as the engine likes if nothing is said. The engine
    /// [`EngineKind::LowLatency`] reserves them of what residents may have, half of what is free and 64 at most if nothing
    /// is said, so that many communicators on one device want a number here.
    pub multiprocessors: Option<u32>,
    /// Measure which engine is the best for which calls, where several serve, when the communicator is made. If not, the
    /// first of [`EngineKind::ALL`] that does a call does it, and [`EngineKind::LowLatency`] only where it is named.
    pub tuning: Option<TuningConfig>,
    /// What is remembered of calls.
    pub flight: FlightConfig,
}

impl Default for CommConfig {
    fn default() -> Self {
        Self {
            engine: None,
            timeout: Duration::from_secs(300),
            validate: false,
            multiprocessors: None,
            tuning: None,
            flight: FlightConfig::default(),
        }
    }
}

/// What ranks have to agree on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Agreed {
    engine: Option<EngineKind>,
    timeout: Duration,
    validate: bool,
    multiprocessors: Option<u32>,
    /// How long engines are measured.
    tuning: Option<Duration>,
}

impl From<&CommConfig> for Agreed {
    fn from(config: &CommConfig) -> Self {
        Self {
            engine: config.engine,
            timeout: config.timeout,
            validate: config.validate,
            multiprocessors: config.multiprocessors,
            tuning: config.tuning.as_ref().map(|tuning| tuning.budget),
        }
    }
}

impl Agreed {
    /// Whether engines that are fast for some calls only are measured.
    pub(crate) const fn is_tuned(&self) -> bool {
        self.tuning.is_some()
    }

    pub(crate) const fn engine(&self) -> Option<EngineKind> {
        self.engine
    }
}
