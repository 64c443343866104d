//! How much can cross the worst cut through the middle.

use std::collections::BTreeMap;

use serde::Serialize;
use warpweft_core_types::{Bandwidth, LinkClass, Provenance};

use super::flow::Network;
use crate::{Edge, NodeId, NodeKind, Topology};

/// The least bandwidth between two halves of the devices.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bisection {
    /// No split into halves lets less across.
    pub lower: Bandwidth,
    /// A split exists that lets no more across.
    pub upper: Bandwidth,
    /// Whether the two are known to be one.
    pub is_exact: bool,
    /// The half that sends in the split of `upper`.
    pub sending_half: Vec<NodeId>,
    /// Whether any figure it rests on is an assumption.
    pub has_assumptions: bool,
}

impl Topology {
    /// The bisection bandwidth: the least that one half of the devices can send the other half, over all splits into halves (of sizes that differ by one if the number is odd).
    ///
    /// Dedicated links (NVLink, xGMI, Xe Link from device to device) add up.
    /// Over PCIe, a switch fabric or a network a device has one port in each direction, as fast as its fastest edge there, that all its edges share; what lies behind ports (uplinks of switches, links between processors) is not known to limit them.
    ///
    /// To 16 devices every split is tried, each with a maximum flow.
    /// Above that `lower` is the least of all cuts, balanced or not, and `upper` the best of a local search.
    ///
    /// `None` for fewer than two devices.
    pub fn bisection_bandwidth(&self) -> Option<Bisection> {
        let devices: Vec<NodeId> = self.devices().map(|device| device.id).collect();
        if devices.len() < 2 {
            return None;
        }
        let mut halves = Halves::new(self, &devices);
        let (upper, half) = if devices.len() <= EXACT_DEVICES { halves.try_all() } else { halves.search() };
        let is_small = devices.len() <= EXACT_DEVICES;
        let lower = if is_small { upper } else { halves.least_cut().min(upper) };
        Some(Bisection {
            lower: Bandwidth::from_gb_per_s(lower),
            upper: Bandwidth::from_gb_per_s(upper),
            is_exact: lower >= upper,
            sending_half: devices
                .iter()
                .zip(half)
                .filter_map(|(&device, sends)| sends.then_some(device))
                .collect(),
            has_assumptions: self
                .edges()
                .iter()
                .any(|edge| edge.bandwidth().provenance == Provenance::Assumed),
        })
    }
}

/// The network with a source and a sink that can be joined to any devices.
struct Halves {
    network: Network,
    source: usize,
    sink: usize,
    /// For each device its arcs from the source and to the sink.
    taps: Vec<(usize, usize)>,
}

impl Halves {
    fn new(topology: &Topology, devices: &[NodeId]) -> Self {
        let mut network = network(topology);
        let (source, sink) = (network.add_vertex(), network.add_vertex());
        let taps = devices
            .iter()
            .map(|device| {
                let from_source = network.add_arc(source, device.index(), 0.0);
                let to_sink = network.add_arc(device.index(), sink, 0.0);
                (from_source, to_sink)
            })
            .collect();
        Self { network, source, sink, taps }
    }

    /// What the devices marked true can send the others.
    fn across(&mut self, sends: &[bool]) -> f64 {
        for (&(from_source, to_sink), &sends) in self.taps.iter().zip(sends) {
            let (from, to) = if sends { (f64::INFINITY, 0.0) } else { (0.0, f64::INFINITY) };
            self.network.set_capacity(from_source, from);
            self.network.set_capacity(to_sink, to);
        }
        self.network.max_flow(self.source, self.sink)
    }

    fn try_all(&mut self) -> (f64, Vec<bool>) {
        let count = self.taps.len();
        let smaller = u32::try_from(count / 2).unwrap_or(u32::MAX);
        let larger = u32::try_from(count.div_ceil(2)).unwrap_or(u32::MAX);
        let mut best = (f64::INFINITY, Vec::new());
        for set in 0..1_u32 << count {
            if set.count_ones() != smaller && set.count_ones() != larger {
                continue;
            }
            let sends: Vec<bool> = (0..count).map(|device| set >> device & 1 == 1).collect();
            let across = self.across(&sends);
            if across < best.0 {
                best = (across, sends);
            }
        }
        best
    }

    /// From the first half in the order of ids and from every other device, swaps pairs while that lowers the flow.
    fn search(&mut self) -> (f64, Vec<bool>) {
        let count = self.taps.len();
        let starts = [
            (0..count).map(|device| device < count / 2).collect::<Vec<bool>>(),
            (0..count).map(|device| device % 2 == 0).collect(),
        ];
        let mut best = (f64::INFINITY, Vec::new());
        for mut sends in starts {
            let mut across = self.across(&sends);
            let mut tried = 0;
            'swap: while tried < SWAPS {
                for a in 0..count {
                    for b in a + 1..count {
                        if sends[a] == sends[b] {
                            continue;
                        }
                        if tried == SWAPS {
                            break 'swap;
                        }
                        tried += 1;
                        sends.swap(a, b);
                        let swapped = self.across(&sends);
                        if swapped < across {
                            across = swapped;
                            continue 'swap;
                        }
                        sends.swap(a, b);
                    }
                }
                break;
            }
            if across < best.0 {
                best = (across, sends);
            }
        }
        best
    }

    /// The least that any non-empty set of devices can send the rest.
    ///
    /// Every cut separates device 0 from another device in one direction or the other.
    fn least_cut(&mut self) -> f64 {
        for &(from_source, to_sink) in &self.taps {
            self.network.set_capacity(from_source, 0.0);
            self.network.set_capacity(to_sink, 0.0);
        }
        let mut least = f64::INFINITY;
        for other in 1..self.taps.len() {
            for (sender, receiver) in [(0, other), (other, 0)] {
                let (from_source, to_sink) = (self.taps[sender].0, self.taps[receiver].1);
                self.network.set_capacity(from_source, f64::INFINITY);
                self.network.set_capacity(to_sink, f64::INFINITY);
                least = least.min(self.network.max_flow(self.source, self.sink));
                self.network.set_capacity(from_source, 0.0);
                self.network.set_capacity(to_sink, 0.0);
            }
        }
        least
    }
}

/// One vertex per node; nodes that share a medium hang at a hub by their ports.
fn network(topology: &Topology) -> Network {
    let mut network = Network::with_vertices(topology.nodes().len());
    for edge in usable(topology).filter(|edge| !is_shared(edge.class.value)) {
        network.add_arc(edge.from.index(), edge.to.index(), edge.bandwidth().value.gb_per_s);
    }
    for class in SHARED {
        for members in components(topology, class) {
            let hub = network.add_vertex();
            for node in members {
                let is_port =
                    matches!(topology.nodes()[node.index()].kind, NodeKind::Device { .. } | NodeKind::Nic);
                let fastest = |edges: &mut dyn Iterator<Item = &Edge>| {
                    let widths = edges.filter(|edge| edge.class.value == class && edge.is_usable());
                    widths.map(|edge| edge.bandwidth().value.gb_per_s).fold(0.0, f64::max)
                };
                let out = fastest(&mut topology.edges_from(node).iter());
                let into = fastest(&mut topology.edges_to(node));
                let width = |width: f64| {
                    if is_port || width == 0.0 { width } else { f64::INFINITY }
                };
                network.add_arc(node.index(), hub, width(out));
                network.add_arc(hub, node.index(), width(into));
            }
        }
    }
    network
}

fn usable(topology: &Topology) -> impl Iterator<Item = &Edge> {
    topology.edges().iter().filter(|edge| edge.is_usable())
}

fn is_shared(class: LinkClass) -> bool {
    SHARED.contains(&class)
}

/// The nodes that edges of one class join, in groups.
fn components(topology: &Topology, class: LinkClass) -> Vec<Vec<NodeId>> {
    let mut groups: Vec<usize> = (0..topology.nodes().len()).collect();
    fn root(groups: &mut [usize], mut node: usize) -> usize {
        while groups[node] != node {
            groups[node] = groups[groups[node]];
            node = groups[node];
        }
        node
    }
    let mut members: BTreeMap<usize, Vec<NodeId>> = BTreeMap::new();
    let of_class = || usable(topology).filter(|edge| edge.class.value == class);
    for edge in of_class() {
        let (a, b) = (root(&mut groups, edge.from.index()), root(&mut groups, edge.to.index()));
        groups[a.max(b)] = a.min(b);
    }
    let mut ends: Vec<NodeId> = of_class().flat_map(|edge| [edge.from, edge.to]).collect();
    ends.sort_unstable();
    ends.dedup();
    for node in ends {
        members.entry(root(&mut groups, node.index())).or_default().push(node);
    }
    members.into_values().collect()
}

/// Media in which a device has one port for all its edges.
const SHARED: [LinkClass; 3] = [LinkClass::NvSwitch, LinkClass::Pcie, LinkClass::Network];

/// There are 12,870 splits of 16 devices.
const EXACT_DEVICES: usize = 16;

/// Bounds the local search to a few seconds for the largest machines.
const SWAPS: usize = 2_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc};

    fn machine(count: usize, class: LinkClass, pairs: impl IntoIterator<Item = (usize, usize)>) -> Topology {
        let mut builder = Topology::builder();
        let ids: Vec<NodeId> = (0..count)
            .map(|index| builder.node(NodeDesc::device(format!("GPU{index}"), DeviceKind::Gpu)).unwrap())
            .collect();
        for (a, b) in pairs {
            let desc = LinkDesc::new(class, Provenance::File).bandwidth(Bandwidth::from_gb_per_s(10.0));
            builder.link_both(ids[a], ids[b], desc).unwrap();
        }
        builder.build()
    }

    fn all_pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
    }

    fn check(topology: &Topology, lower: f64, upper: f64) {
        let bisection = topology.bisection_bandwidth().unwrap();
        let got = (bisection.lower.gb_per_s, bisection.upper.gb_per_s);
        assert_eq!(got, (lower, upper));
        assert_eq!(bisection.is_exact, lower == upper);
        assert!(!bisection.has_assumptions);
        assert!(bisection.sending_half.len().abs_diff(topology.devices().count() / 2) <= 1);
    }

    #[test]
    fn direct_links_add_up() {
        check(&machine(4, LinkClass::NvLink, [(0, 1), (1, 2), (2, 3), (3, 0)]), 20.0, 20.0);
        check(&machine(4, LinkClass::NvLink, all_pairs(4)), 40.0, 40.0);
    }

    #[test]
    fn links_into_a_fabric_are_counted_once() {
        check(&machine(8, LinkClass::NvSwitch, all_pairs(8)), 40.0, 40.0);
        check(&machine(5, LinkClass::Pcie, all_pairs(5)), 20.0, 20.0);
    }

    #[test]
    fn two_islands_have_nothing_between_them() {
        check(&machine(4, LinkClass::NvLink, [(0, 1), (2, 3)]), 0.0, 0.0);
    }

    #[test]
    fn large_machines_get_bounds() {
        // A circle of 20: any set can be cut off at two links, and so can a half.
        let circle = (0..20).map(|a| (a, (a + 1) % 20));
        check(&machine(20, LinkClass::NvLink, circle), 20.0, 20.0);
        // All to all: one device is cut off at 19 links, a half at 100.
        check(&machine(20, LinkClass::NvLink, all_pairs(20)), 190.0, 1_000.0);
    }

    #[test]
    fn one_device_has_no_halves() {
        assert_eq!(machine(1, LinkClass::Pcie, []).bisection_bandwidth(), None);
    }

    #[test]
    fn memory_of_hosts_carries_what_devices_cannot() {
        let mut builder = Topology::builder();
        let a = builder.node(NodeDesc::device("a", DeviceKind::Gpu).near(0)).unwrap();
        let b = builder.node(NodeDesc::device("b", DeviceKind::Gpu).near(1)).unwrap();
        let (left, right) = (builder.host(0).unwrap(), builder.host(1).unwrap());
        let desc =
            |class, rate| LinkDesc::new(class, Provenance::File).bandwidth(Bandwidth::from_gb_per_s(rate));
        builder.link_both(a, left, desc(LinkClass::Pcie, 30.0)).unwrap();
        builder.link_both(b, right, desc(LinkClass::Pcie, 30.0)).unwrap();
        builder.link_both(left, right, desc(LinkClass::HostMemory, 12.0)).unwrap();
        check(&builder.build(), 12.0, 12.0);
    }
}
