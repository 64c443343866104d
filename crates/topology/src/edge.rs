//! Directed links, and how several reports about one link become one.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use warpweft_core_types::{Bandwidth, ErrorClass, LinkClass, LinkFact, PathClass, Provenance};

use crate::{NodeId, cost};

/// A value and how it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known<T> {
    /// The value.
    pub value: T,
    /// The evidence for it.
    pub provenance: Provenance,
}

impl<T> Known<T> {
    /// A value with its evidence.
    pub const fn new(value: T, provenance: Provenance) -> Self {
        Self { value, provenance }
    }
}

/// One report about a link, by one source.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkDesc {
    /// The medium; [`LinkClass::Unknown`] claims nothing and yields to any other report.
    pub class: LinkClass,
    /// The way through the PCI tree.
    pub path: Option<PathClass>,
    /// Physical links bonded into this one.
    pub link_count: Option<u32>,
    /// Bytes per second of this direction: what was timed if `provenance` is [`Provenance::Measured`], else what the link is rated at.
    pub bandwidth: Option<Bandwidth>,
    /// Time of the smallest transfer.
    pub latency: Option<Duration>,
    /// How all of this is known.
    pub provenance: Provenance,
}

impl LinkDesc {
    /// A report of the medium alone.
    pub const fn new(class: LinkClass, provenance: Provenance) -> Self {
        Self { class, path: None, link_count: None, bandwidth: None, latency: None, provenance }
    }

    /// Adds the way through the PCI tree.
    pub const fn path(mut self, path: PathClass) -> Self {
        self.path = Some(path);
        self
    }

    /// Adds the number of bonded links.
    pub const fn link_count(mut self, link_count: u32) -> Self {
        self.link_count = Some(link_count);
        self
    }

    /// Adds the bytes per second of one direction.
    pub const fn bandwidth(mut self, bandwidth: Bandwidth) -> Self {
        self.bandwidth = Some(bandwidth);
        self
    }

    /// Adds the time of the smallest transfer.
    pub const fn latency(mut self, latency: Duration) -> Self {
        self.latency = Some(latency);
        self
    }

    pub(crate) fn check(&self) -> Result<(), EdgeError> {
        check_figures(self.link_count, [self.bandwidth], self.latency)
    }
}

impl From<&LinkFact> for LinkDesc {
    fn from(fact: &LinkFact) -> Self {
        Self {
            class: fact.class,
            path: fact.path,
            link_count: Some(fact.link_count),
            bandwidth: fact.bandwidth,
            latency: fact.latency,
            provenance: fact.provenance,
        }
    }
}

/// What a timed transfer over an existing edge showed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measurement {
    /// Bytes per second of a long transfer.
    pub bandwidth: Option<Bandwidth>,
    /// Time of the smallest transfer.
    pub latency: Option<Duration>,
}

/// Why a report about an edge was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EdgeError {
    /// A bandwidth must be finite and not negative.
    #[error("{gb_per_s} GB/s is not a bandwidth")]
    BadBandwidth {
        /// What was offered.
        gb_per_s: f64,
    },
    /// A latency must be below 2^64 ns, which is 584 years.
    #[error("{latency:?} is not a latency")]
    BadLatency {
        /// What was offered.
        latency: Duration,
    },
    /// A link is made of at least one physical link.
    #[error("a link of zero physical links is no link")]
    NoLinks,
    /// Both ends are one node.
    #[error("{node} cannot be linked to itself")]
    Loop {
        /// The node's name.
        node: String,
    },
    /// Nobody reported this edge, and a probe alone does not make one.
    #[error("there is no edge from {from} to {to}")]
    NoEdge {
        /// Name of the node where it would start.
        from: String,
        /// Name of the node where it would end.
        to: String,
    },
    /// The node is not in this topology.
    #[error("node {node} is not in this topology")]
    UnknownNode {
        /// The id that was used.
        node: NodeId,
    },
}

impl EdgeError {
    /// How to react: a report that cannot be true stays so.
    pub const fn class(&self) -> ErrorClass {
        ErrorClass::Usage
    }
}

/// A directed link: bytes can go from `from` to `to`.
#[derive(Debug, Clone, PartialEq)]
pub struct Edge {
    /// Where bytes start.
    pub from: NodeId,
    /// Where they arrive.
    pub to: NodeId,
    /// The medium.
    pub class: Known<LinkClass>,
    /// The way through the PCI tree, also where a faster medium bypasses it.
    pub path: Option<Known<PathClass>>,
    /// Physical links bonded into this one.
    pub link_count: Option<Known<u32>>,
    /// Rated bytes per second of this direction.
    pub nominal: Option<Known<Bandwidth>>,
    /// Timed bytes per second of this direction.
    pub measured: Option<Bandwidth>,
    /// Time of the smallest transfer.
    pub latency: Option<Known<Duration>>,
    /// Why the edge must not be used, if it must not.
    pub veto: Option<String>,
}

impl Edge {
    pub(crate) fn new(from: NodeId, to: NodeId, desc: &LinkDesc) -> Self {
        let mut edge = Self {
            from,
            to,
            class: Known::new(desc.class, desc.provenance),
            path: None,
            link_count: None,
            nominal: None,
            measured: None,
            latency: None,
            veto: None,
        };
        edge.take_figures(desc);
        edge
    }

    /// Merges another report about the same pair.
    ///
    /// The medium with the stronger evidence wins, the nearer medium among equals.
    /// Figures of a losing medium are dropped, since they describe another link; only its way through the PCI tree is kept.
    /// Otherwise each figure is taken from the stronger evidence, the later report among equals.
    pub(crate) fn merge(&mut self, desc: &LinkDesc) {
        let reported = Known::new(desc.class, desc.provenance);
        if claim(reported) < claim(self.class) {
            if desc.class != self.class.value {
                self.drop_figures_up_to(desc.provenance);
            }
            self.class = reported;
        } else if !matches!(desc.class, LinkClass::Unknown) && desc.class != self.class.value {
            replace(&mut self.path, desc.path, desc.provenance);
            return;
        }
        self.take_figures(desc);
    }

    /// Bytes per second of a long transfer: timed, else rated, else a default for the class.
    pub fn bandwidth(&self) -> Known<Bandwidth> {
        self.measured
            .map(|bandwidth| Known::new(bandwidth, Provenance::Measured))
            .or(self.nominal)
            .unwrap_or_else(|| {
                let count = self.link_count.map_or(1, |count| count.value);
                let assumed = cost::assumed_bandwidth(self.class.value, count);
                Known::new(assumed, Provenance::Assumed)
            })
    }

    /// Time of the smallest transfer: as reported, else a default for the class.
    pub fn latency(&self) -> Known<Duration> {
        self.latency.unwrap_or_else(|| {
            let path = self.path.map(|path| path.value);
            let assumed = cost::assumed_latency(self.class.value, path);
            Known::new(assumed, Provenance::Assumed)
        })
    }

    /// Whether bytes may be sent over it.
    pub fn is_usable(&self) -> bool {
        self.veto.is_none() && self.bandwidth().value.gb_per_s > 0.0
    }

    pub(crate) fn check(&self) -> Result<(), EdgeError> {
        let nominal = self.nominal.map(|known| known.value);
        let link_count = self.link_count.map(|known| known.value);
        let latency = self.latency.map(|known| known.value);
        check_figures(link_count, [nominal, self.measured], latency)
    }

    pub(crate) fn measure(&mut self, measurement: &Measurement) -> Result<(), EdgeError> {
        check_figures(None, [measurement.bandwidth], measurement.latency)?;
        self.measured = measurement.bandwidth.or(self.measured);
        replace(&mut self.latency, measurement.latency, Provenance::Measured);
        Ok(())
    }

    fn take_figures(&mut self, desc: &LinkDesc) {
        let provenance = desc.provenance;
        replace(&mut self.path, desc.path, provenance);
        replace(&mut self.link_count, desc.link_count, provenance);
        replace(&mut self.latency, desc.latency, provenance);
        if provenance == Provenance::Measured {
            self.measured = desc.bandwidth.or(self.measured);
        } else {
            replace(&mut self.nominal, desc.bandwidth, provenance);
        }
    }

    /// Forgets figures that rest on evidence no stronger than `provenance`.
    fn drop_figures_up_to(&mut self, provenance: Provenance) {
        self.link_count.take_if(|known| known.provenance >= provenance);
        self.nominal.take_if(|known| known.provenance >= provenance);
        self.latency.take_if(|known| known.provenance >= provenance);
        self.measured.take_if(|_| provenance == Provenance::Measured);
    }
}

/// Orders claims about the medium, the one to believe first.
fn claim(class: Known<LinkClass>) -> (bool, Provenance, LinkClass) {
    let claims_nothing = class.value == LinkClass::Unknown;
    (claims_nothing, class.provenance, class.value)
}

fn replace<T>(slot: &mut Option<Known<T>>, value: Option<T>, provenance: Provenance) {
    let Some(value) = value else { return };
    if slot.as_ref().is_none_or(|known| provenance <= known.provenance) {
        *slot = Some(Known::new(value, provenance));
    }
}

fn check_figures<const N: usize>(
    link_count: Option<u32>,
    bandwidths: [Option<Bandwidth>; N],
    latency: Option<Duration>,
) -> Result<(), EdgeError> {
    if link_count == Some(0) {
        return Err(EdgeError::NoLinks);
    }
    for Bandwidth { gb_per_s } in bandwidths.into_iter().flatten() {
        if !(gb_per_s.is_finite() && gb_per_s >= 0.0) {
            return Err(EdgeError::BadBandwidth { gb_per_s });
        }
    }
    match latency {
        Some(latency) if u64::try_from(latency.as_nanos()).is_err() => Err(EdgeError::BadLatency { latency }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: fn(f64) -> Bandwidth = Bandwidth::from_gb_per_s;

    fn desc(class: LinkClass, provenance: Provenance) -> LinkDesc {
        LinkDesc::new(class, provenance)
    }

    /// Merges the reports in every order and expects one outcome.
    fn check(reports: [LinkDesc; 3], expected: impl Fn(&Edge) -> bool) {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let mut edge = Edge::new(NodeId(0), NodeId(1), &reports[order[0]]);
            edge.merge(&reports[order[1]]);
            edge.merge(&reports[order[2]]);
            assert!(expected(&edge), "order {order:?} gives {edge:?}");
        }
    }

    #[test]
    fn stronger_evidence_wins_field_by_field() {
        let sysfs = desc(LinkClass::Pcie, Provenance::Sysfs).path(PathClass::Pix).bandwidth(RATE(31.5));
        let driver = desc(LinkClass::NvLink, Provenance::Driver).link_count(18);
        let probe = desc(LinkClass::Unknown, Provenance::Measured).bandwidth(RATE(400.0));
        check([sysfs, driver, probe], |edge| {
            edge.class == Known::new(LinkClass::NvLink, Provenance::Driver)
                && edge.path == Some(Known::new(PathClass::Pix, Provenance::Sysfs))
                && edge.link_count == Some(Known::new(18, Provenance::Driver))
                && edge.nominal.is_none()
                && edge.measured == Some(RATE(400.0))
        });
    }

    #[test]
    fn equal_evidence_prefers_the_nearer_medium() {
        let pcie = desc(LinkClass::Pcie, Provenance::Driver).bandwidth(RATE(63.0));
        let nvlink = desc(LinkClass::NvLink, Provenance::Driver);
        let silent = desc(LinkClass::Unknown, Provenance::File).path(PathClass::Sys);
        check([pcie, nvlink, silent], |edge| {
            edge.class.value == LinkClass::NvLink
                && edge.nominal.is_none()
                && edge.path == Some(Known::new(PathClass::Sys, Provenance::File))
        });
    }

    #[test]
    fn a_later_reading_replaces_an_equal_one() {
        let first = desc(LinkClass::Pcie, Provenance::Measured).bandwidth(RATE(10.0));
        let mut edge = Edge::new(NodeId(0), NodeId(1), &first);
        edge.merge(&first.bandwidth(RATE(12.0)));
        assert_eq!(edge.bandwidth(), Known::new(RATE(12.0), Provenance::Measured));
    }

    #[test]
    fn impossible_figures_are_refused() {
        let pcie = desc(LinkClass::Pcie, Provenance::File);
        assert_eq!(pcie.link_count(0).check(), Err(EdgeError::NoLinks));
        for gb_per_s in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(pcie.bandwidth(RATE(gb_per_s)).check().is_err());
        }
    }
}
