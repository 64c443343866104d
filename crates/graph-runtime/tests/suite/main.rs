//! The runtime on host devices, through its public names.

mod cancelling;
mod failures;
mod guards;
mod rebinding;
mod recording;
mod rig;
mod running;
mod tracing;
