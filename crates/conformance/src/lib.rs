//! One suite for every backend: what the seam promises, checked on every device that is present.
//!
//! A *case* says what it needs and what to do; a *provider* opens devices of one kind. The harness runs every
//! case on every provider and names the runs `[host/0+1] copy::between_peers`. A run passes, fails, or is
//! reported as not run with the reason: a need that these devices do not meet, something the provider lists
//! as unsupported for good, or an expected failure (which passing turns into a failure).
//!
//! `--require host,4` makes the absence of four host devices a failure, and `--only cuda` leaves out the other
//! backends. A backend that is not there is listed once, with the reason.
//!
//! A kernel that fails loses some devices to the process. There, the cases with such kernels run in processes of
//! their own; everywhere else they run as the others do.
//!
//! To add a case, write it in a module of `cases`; to add a backend, add a provider.

mod actors;
mod apart;
mod cases;
mod context;
mod harness;
mod kernels;
mod providers;

pub use actors::{actors_library, executor_image};
pub use harness::{main, run_suite, uncovered_methods};
