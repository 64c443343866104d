//! Ranks that are threads of this process.
#![expect(clippy::panic, clippy::unwrap_used, clippy::cast_possible_truncation, reason = "these are tests")]

mod failures;
mod operations;
mod oracle;
mod pairs;
mod rig;
