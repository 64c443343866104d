//! Communicators over host devices, in threads.

mod calls;
mod failures;
mod groups;
mod orders;
mod rig;
mod user;
