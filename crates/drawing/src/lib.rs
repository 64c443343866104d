//! What pictures of machines and of graphs share: text that comes from outside is made safe here and nowhere else.
//!
//! It is for the crates that draw; programs have no use for it.
#![forbid(unsafe_code)]

pub mod dot;
pub mod svg;
