//! The runtime on host devices, through its public names.

mod attacks;
mod cancelling;
mod chaos;
mod failures;
mod guards;
mod rebinding;
mod recording;
mod rig;
mod running;
mod tracing;
