//! The crate over a stand-in for the library, whose ranks are threads of this process.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod bad_input;
mod calls;
mod faults;
mod forks;
mod groups;
mod lifecycle;
mod loading;
mod rig;
