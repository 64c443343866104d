//! What moving bytes over one edge costs, and the defaults where nobody measured.
//!
//! The model is `latency + bytes / bandwidth` per hop, hops one after the other.
//! A relay through host memory or another device is exactly that; for a switch that forwards while it receives it is an upper bound.

use std::time::Duration;

use warpweft_core_types::{Bandwidth, Bytes, LinkClass, PathClass};

use crate::Edge;

/// Nanoseconds to move `bytes` over `edge`, rounded up; `None` if the edge must not or cannot be used.
pub(crate) fn hop_ns(edge: &Edge, bytes: Bytes) -> Option<u64> {
    if !edge.is_usable() {
        return None;
    }
    let transfer = edge.bandwidth().value.transfer_ns(bytes).ceil();
    let latency = u64::try_from(edge.latency().value.as_nanos()).unwrap_or(u64::MAX);
    Some(latency.saturating_add(saturating_ns(transfer)))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the value is whole and not negative, and a float cast saturates"
)]
fn saturating_ns(ns: f64) -> u64 {
    ns as u64
}

/// Bytes per second of one direction where nothing is known but the class and the number of links.
///
/// These are planning figures for slow members of each family, so that an edge somebody vouched for wins over one we know nothing about:
/// 18 GB/s per NVLink (first generation, achievable), 24 per xGMI link and 5 per Xe Link lane, 12 for PCIe 3.0 x16, 100 Gbit/s of network, and host memory as one thread copies it.
pub(crate) fn assumed_bandwidth(class: LinkClass, link_count: u32) -> Bandwidth {
    let per_link = match class {
        LinkClass::SameDevice => 500.0,
        LinkClass::NvLinkC2c => 300.0,
        LinkClass::NvLink | LinkClass::NvSwitch => 18.0,
        LinkClass::Xgmi => 24.0,
        LinkClass::XeLink => 5.0,
        LinkClass::Network => 12.5,
        LinkClass::Pcie => 12.0,
        LinkClass::HostMemory => 10.0,
        _ => 1.0,
    };
    Bandwidth::from_gb_per_s(per_link * f64::from(link_count.max(1)))
}

/// Time of the smallest transfer where nothing is known but the class and the way through the PCI tree.
///
/// A device-to-device store crosses NVLink in about a microsecond and a PCIe host bridge in about two; each step outwards adds to that.
pub(crate) fn assumed_latency(class: LinkClass, path: Option<PathClass>) -> Duration {
    Duration::from_nanos(match class {
        LinkClass::SameDevice | LinkClass::HostMemory => 500,
        LinkClass::NvLink | LinkClass::NvLinkC2c | LinkClass::Xgmi | LinkClass::XeLink => 1_000,
        LinkClass::NvSwitch => 1_200,
        LinkClass::Pcie => match path {
            Some(PathClass::Pix) => 1_500,
            Some(PathClass::Pxb) => 1_700,
            Some(PathClass::Phb) | None => 2_000,
            Some(PathClass::Node) => 2_300,
            Some(PathClass::Sys) => 3_000,
        },
        LinkClass::Network => 5_000,
        _ => 10_000,
    })
}
