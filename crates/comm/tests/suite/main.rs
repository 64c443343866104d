//! Communicators over host devices, in threads.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

mod after;
mod calls;
mod failures;
mod flight;
mod groups;
mod lost;
mod orders;
mod persistent;
mod rig;
mod user;
