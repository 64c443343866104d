//! Communicators over host devices, in threads.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

mod calls;
mod failures;
mod groups;
mod orders;
mod rig;
mod user;
