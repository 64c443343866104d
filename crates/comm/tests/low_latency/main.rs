//! The engine for few bytes on stand-ins of GPUs: ranks in threads and processes, and what becomes of ranks that wait in
//! vain.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

mod dispatch;
mod failures;
mod processes;
mod rig;
mod values;
