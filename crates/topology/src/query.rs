//! Questions beyond the cheapest path.

mod affinity;
mod bisection;
mod collective;
mod flow;
mod paths;
mod reach;
mod widest;

pub use affinity::NicAffinity;
pub use bisection::Bisection;
pub use collective::{BroadcastTree, CollectiveError, Ring};
