//! What moving bytes over one edge costs, and the defaults where nobody measured.
//!
//! The model is `latency + bytes / bandwidth` per hop, hops one after the other.
//! A relay through host memory or another device is exactly that; for a switch that forwards while it receives it is an upper bound.

use std::time::Duration;

use warpweft_core_types::{Bandwidth, Bytes, LinkClass, PathClass};

use crate::{Edge, NodeId};

/// What Dijkstra's algorithm needs of an edge and nothing else, since it walks tens of thousands of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost {
    pub(crate) from: NodeId,
    pub(crate) to: NodeId,
    latency_ns: u64,
    /// 0 if the edge must not or cannot be used.
    gb_per_s: f64,
}

impl Cost {
    pub(crate) fn of(edge: &Edge) -> Self {
        let latency = edge.latency().value.as_nanos();
        Self {
            from: edge.from,
            to: edge.to,
            latency_ns: u64::try_from(latency).unwrap_or(u64::MAX),
            gb_per_s: if edge.is_usable() { edge.bandwidth().value.gb_per_s } else { 0.0 },
        }
    }

    /// Nanoseconds to move `bytes`, rounded up; `None` if the edge must not or cannot be used.
    pub(crate) fn hop_ns(&self, bytes: Bytes) -> Option<u64> {
        if self.gb_per_s <= 0.0 {
            return None;
        }
        let transfer = Bandwidth::from_gb_per_s(self.gb_per_s).transfer_ns(bytes);
        Some(self.latency_ns.saturating_add(rounded_up(transfer)))
    }
}

/// A whole number of nanoseconds, rounded up; written without `ceil`, which is a function call on many processors.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the value is not negative, a cast saturates, and a lost bit below 2^-52 does not matter"
)]
fn rounded_up(ns: f64) -> u64 {
    let whole = ns as u64;
    whole.saturating_add(u64::from((whole as f64) < ns))
}

/// Bytes per second of one direction where nothing is known but the class and the number of links.
///
/// These are planning figures for slow members of each family, so that an edge somebody vouched for wins over one we know nothing about:
/// 25 GB/s per NVLink (second to fourth generation), 24 per xGMI link and 5 per Xe Link lane, 12 for PCIe 3.0 x16, 100 Gbit/s of network, and host memory as one thread copies it.
pub(crate) fn assumed_bandwidth(class: LinkClass, link_count: u32) -> Bandwidth {
    let links = f64::from(link_count.max(1));
    Bandwidth::from_gb_per_s(match class {
        LinkClass::SameDevice => 500.0,
        // Lanes of one link, whose sum is the same on all chips so far.
        LinkClass::NvLinkC2c => 300.0,
        LinkClass::NvLink | LinkClass::NvSwitch => 25.0 * links,
        LinkClass::Xgmi => 24.0 * links,
        LinkClass::XeLink => 5.0 * links,
        LinkClass::Network => 12.5 * links,
        LinkClass::Pcie => 12.0 * links,
        LinkClass::HostMemory => 10.0 * links,
        _ => links,
    })
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
