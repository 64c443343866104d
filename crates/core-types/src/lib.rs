//! The words every warpweft crate shares.
#![forbid(unsafe_code)]

mod id;
mod link;
mod unit;

pub use id::{DeviceId, DeviceUuid, ParseIdError, PciAddress, SubmissionId};
pub use link::{LinkClass, LinkEnd, LinkFact, LinkTraffic, PathClass, Provenance};
pub use unit::{Bandwidth, Bytes};
