//! Actors on host devices: what they send and answer, where messages end that are not served, and what happens to
//! actors that are parked, moved, stopped, killed, loop, panic, or lose their device.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

mod dead;
mod faults;
mod life;
mod rig;
mod serve;
mod soak;
