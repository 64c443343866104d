//! Measurements, each beside the raw call of the same run.

pub(crate) mod copy;
pub(crate) mod launch;
