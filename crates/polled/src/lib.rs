//! What backends share whose drivers do not call when work is over and have to be asked.
//!
//! A [`Reactor`] is the thread that asks for those who sleep, and a [`KeepAlive`] is what a submission holds until it is
//! over. Neither knows a driver: queues come in as [`Polled`].
//!
//! It is for backends alone; programs have no use for it.
#![forbid(unsafe_code)]

mod keep_alive;
mod reactor;

pub use keep_alive::KeepAlive;
pub use reactor::{Attention, Polled, Reactor, ReactorOwner};
