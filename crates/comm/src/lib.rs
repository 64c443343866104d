//! Collectives over devices of every backend.
#![forbid(unsafe_code)]
