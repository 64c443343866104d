//! Imports, exports and discovery through the public interface.
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may fail a test")]

#[cfg(unix)]
mod discover;
mod export;
mod fixture;
mod hostile;
mod import;
