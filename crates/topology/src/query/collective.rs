//! Orders in which devices can take part in a collective: rings and broadcast trees.

use std::{cmp::Ordering, collections::BinaryHeap};

use serde::Serialize;
use warpweft_core_types::{Bandwidth, ErrorClass};

use super::widest::steps;
use crate::{NodeId, Topology};

/// Devices in a circle: each sends to the next, the last to the first.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ring {
    /// The devices, starting with the first that was asked for.
    pub order: Vec<NodeId>,
    /// Bytes per second of the slowest step; `None` for a single device.
    pub bottleneck: Option<Bandwidth>,
    /// Whether no other ring has a faster slowest step. False means that nobody knows.
    pub is_optimal: bool,
}

/// Devices that pass on what they receive, from a root.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BroadcastTree {
    /// Where the bytes start.
    pub root: NodeId,
    /// Sender and receiver of each step; a device receives before it sends.
    pub steps: Vec<(NodeId, NodeId)>,
    /// Steps from the root to the device that is farthest.
    pub depth: usize,
    /// Bytes per second of the slowest step; `None` for a root alone.
    pub bottleneck: Option<Bandwidth>,
    /// Whether no other tree of this fan-out has a faster slowest step. False means that nobody knows.
    pub is_optimal: bool,
}

/// Why devices cannot take part in one collective.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A collective needs a device.
    #[error("no devices were named")]
    NoDevices,
    /// A device was named twice.
    #[error("{device} was named twice")]
    NamedTwice {
        /// The device's name.
        device: String,
    },
    /// The node does not compute.
    #[error("{node} is not a device")]
    NotADevice {
        /// The node's name.
        node: String,
    },
    /// The node is not in this topology.
    #[error("node {node} is not in this topology")]
    UnknownNode {
        /// The id that was used.
        node: NodeId,
    },
    /// A tree in which nobody may send reaches nobody.
    #[error("a fan-out of zero reaches nobody")]
    NoFanOut,
    /// The links between the devices do not allow it.
    #[error("the links among these devices make no {shape}; {stuck} is where it ends")]
    NotConnected {
        /// `ring` or `tree`.
        shape: &'static str,
        /// Name of a device that cannot be joined.
        stuck: String,
    },
}

impl CollectiveError {
    /// How to react.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::NotConnected { .. } => ErrorClass::Unsupported,
            _ => ErrorClass::Usage,
        }
    }
}

impl Topology {
    /// The ring over `devices` whose slowest step is fastest.
    ///
    /// A step is the widest way between two devices that passes no third one.
    /// To 16 devices the answer is exact: the fastest bandwidth at which a ring exists, by dynamic programming over subsets (Held and Karp, 1962), and of those rings the first in the order of `devices`.
    /// Above that it is a greedy ring improved by exchanges, marked optimal only if it reaches a bound that no ring can pass.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] if `devices` is not a list of different devices, or no ring was found.
    pub fn ring(&self, devices: &[NodeId]) -> Result<Ring, CollectiveError> {
        self.check_devices(devices)?;
        if devices.len() == 1 {
            return Ok(Ring { order: devices.to_vec(), bottleneck: None, is_optimal: true });
        }
        let steps = steps(self, devices);
        let bound = bound(&steps);
        let order =
            if devices.len() <= EXACT_DEVICES { exact_ring(&steps) } else { greedy_ring(&steps, bound) };
        let bottleneck = order.as_deref().map_or(0.0, |order| slowest(&steps, order));
        let Some(order) = order.filter(|_| bottleneck > 0.0) else {
            return Err(self.not_connected("ring", devices, &steps));
        };
        Ok(Ring {
            order: order.into_iter().map(|index| devices[index]).collect(),
            bottleneck: Some(Bandwidth::from_gb_per_s(bottleneck)),
            is_optimal: devices.len() <= EXACT_DEVICES || bottleneck >= bound,
        })
    }

    /// A tree over `devices` from the first of them, in which nobody sends to more than `fan_out` others.
    ///
    /// Devices are added one by one, always over the widest step that is left, the sender nearest to the root among equals.
    /// It is marked optimal if its slowest step is as fast as that of a tree without a limit.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`] if `devices` is not a list of different devices, or no tree was found.
    pub fn broadcast_tree(
        &self,
        devices: &[NodeId],
        fan_out: usize,
    ) -> Result<BroadcastTree, CollectiveError> {
        self.check_devices(devices)?;
        if fan_out == 0 && devices.len() > 1 {
            return Err(CollectiveError::NoFanOut);
        }
        let steps = steps(self, devices);
        let grown = grow(&steps, fan_out);
        if grown.steps.len() + 1 < devices.len() {
            return Err(self.not_connected("tree", devices, &steps));
        }
        let best = grow(&steps, devices.len()).bottleneck;
        Ok(BroadcastTree {
            root: devices[0],
            steps: grown.steps.iter().map(|&(from, to)| (devices[from], devices[to])).collect(),
            depth: grown.depth,
            bottleneck: (devices.len() > 1).then_some(Bandwidth::from_gb_per_s(grown.bottleneck)),
            is_optimal: grown.bottleneck >= best,
        })
    }

    fn check_devices(&self, devices: &[NodeId]) -> Result<(), CollectiveError> {
        if devices.is_empty() {
            return Err(CollectiveError::NoDevices);
        }
        let mut seen = vec![false; self.nodes().len()];
        for &id in devices {
            let node = self.node(id).ok_or(CollectiveError::UnknownNode { node: id })?;
            let name = node.name.clone();
            if !node.is_device() {
                return Err(CollectiveError::NotADevice { node: name });
            }
            if std::mem::replace(&mut seen[id.index()], true) {
                return Err(CollectiveError::NamedTwice { device: name });
            }
        }
        Ok(())
    }

    /// Names the device with the fewest ways in or out.
    fn not_connected(&self, shape: &'static str, devices: &[NodeId], steps: &[Vec<f64>]) -> CollectiveError {
        let ways = |device: usize| {
            let out = steps[device].iter().filter(|width| **width > 0.0).count();
            let into = steps.iter().filter(|row| row[device] > 0.0).count();
            out.min(into)
        };
        let stuck = (0..devices.len()).rev().min_by_key(|&device| ways(device));
        CollectiveError::NotConnected {
            shape,
            stuck: self.name(devices[stuck.unwrap_or_default()]).to_owned(),
        }
    }
}

/// Every device must be entered and left, so no ring is faster than the slowest of their fastest ways.
fn bound(steps: &[Vec<f64>]) -> f64 {
    let ways_in = (0..steps.len()).map(|to| steps.iter().map(|row| row[to]).fold(0.0, f64::max));
    let ways_out = steps.iter().map(|row| row.iter().copied().fold(0.0, f64::max));
    ways_in.chain(ways_out).fold(f64::INFINITY, f64::min)
}

fn slowest(steps: &[Vec<f64>], order: &[usize]) -> f64 {
    let next = order.iter().cycle().skip(1);
    order.iter().zip(next).map(|(&from, &to)| steps[from][to]).fold(f64::INFINITY, f64::min)
}

/// The first ring at the fastest bandwidth that allows one.
fn exact_ring(steps: &[Vec<f64>]) -> Option<Vec<usize>> {
    let mut widths: Vec<f64> = steps.iter().flatten().copied().filter(|width| *width > 0.0).collect();
    widths.sort_by(f64::total_cmp);
    widths.dedup();
    // Rings exist up to some width and not beyond.
    let mut best = None;
    let (mut low, mut high) = (0, widths.len());
    while low < high {
        let middle = low.midpoint(high);
        match ring_at(steps, widths[middle]) {
            Some(ring) => {
                best = Some(ring);
                low = middle + 1;
            }
            None => high = middle,
        }
    }
    best
}

/// The first ring of which no step is slower than `width`.
fn ring_at(steps: &[Vec<f64>], width: f64) -> Option<Vec<usize>> {
    let count = steps.len();
    // Bit `to` of `next[from]` says that the step is wide enough.
    let next: Vec<u32> = steps
        .iter()
        .map(|row| (0..count).filter(|&to| row[to] >= width).fold(0, |set, to| set | 1 << to))
        .collect();
    // Bit `v` of `can[set]` says that from `v` one can visit the rest of `set` and return to device 0.
    let mut can = vec![0_u32; 1 << count];
    for set in (2..1_usize << count).step_by(2) {
        for v in (1..count).filter(|v| set >> v & 1 == 1) {
            let rest = set & !(1 << v);
            let ways = if rest == 0 { 1 } else { can[rest] };
            if next[v] & ways != 0 {
                can[set] |= 1 << v;
            }
        }
    }
    let mut order = vec![0];
    let mut left = (1_usize << count) - 2;
    let mut here = 0;
    while left != 0 {
        let ways = next[here] & can[left];
        if ways == 0 {
            return None;
        }
        here = ways.trailing_zeros() as usize;
        left &= !(1 << here);
        order.push(here);
    }
    Some(order)
}

/// Always on to the widest step, then improved by reversing stretches while that helps the slowest step.
fn greedy_ring(steps: &[Vec<f64>], bound: f64) -> Option<Vec<usize>> {
    let mut order = vec![0];
    let mut left: Vec<usize> = (1..steps.len()).collect();
    let mut here = 0;
    while !left.is_empty() {
        let widest = (0..left.len()).max_by(|&a, &b| {
            let width = |index: usize| steps[here][left[index]];
            width(a).total_cmp(&width(b)).then(left[b].cmp(&left[a]))
        })?;
        here = left.remove(widest);
        order.push(here);
    }
    for _ in 0..IMPROVEMENTS {
        let now = slowest(steps, &order);
        if now >= bound || !improve(steps, &mut order, now) {
            break;
        }
    }
    Some(order)
}

/// Reverses one stretch that begins or ends at the slowest step; false if none helps.
fn improve(steps: &[Vec<f64>], order: &mut [usize], now: f64) -> bool {
    let count = order.len();
    let is_slow = |at: &usize| steps[order[*at]][order[(at + 1) % count]] <= now;
    let Some(at) = (0..count).find(is_slow) else {
        return false;
    };
    for other in 0..count {
        let (start, end) = (at.min(other) + 1, at.max(other) + 1);
        if end - start < 2 || end > count {
            continue;
        }
        order[start..end].reverse();
        if slowest(steps, order) > now {
            return true;
        }
        order[start..end].reverse();
    }
    false
}

/// A tree from device 0 while it grows.
struct Grown {
    steps: Vec<(usize, usize)>,
    depth: usize,
    bottleneck: f64,
}

/// A step that could be taken next; the widest is greatest, then the one nearest to the root, then the first.
#[derive(PartialEq)]
struct Candidate {
    width: f64,
    depth: usize,
    from: usize,
    to: usize,
}

impl Eq for Candidate {}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        let place = |candidate: &Self| (candidate.depth, candidate.from, candidate.to);
        self.width.total_cmp(&other.width).then_with(|| place(other).cmp(&place(self)))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn grow(steps: &[Vec<f64>], fan_out: usize) -> Grown {
    let mut grown = Grown { steps: Vec::new(), depth: 0, bottleneck: f64::INFINITY };
    let mut joined = vec![false; steps.len()];
    let mut children = vec![0_usize; steps.len()];
    let mut queue = BinaryHeap::new();
    let mut newest = Some((0, 0));
    loop {
        if let Some((from, depth)) = newest.take() {
            joined[from] = true;
            let ways = steps[from].iter().copied().enumerate();
            queue.extend(
                ways.filter(|&(to, width)| width > 0.0 && !joined[to]).map(|(to, width)| Candidate {
                    width,
                    depth,
                    from,
                    to,
                }),
            );
        }
        let Some(Candidate { width, depth, from, to }) = queue.pop() else {
            return grown;
        };
        if joined[to] || children[from] == fan_out {
            continue;
        }
        children[from] += 1;
        grown.steps.push((from, to));
        grown.depth = grown.depth.max(depth + 1);
        grown.bottleneck = grown.bottleneck.min(width);
        newest = Some((to, depth + 1));
    }
}

/// To here a table over all subsets takes 256 KiB and some milliseconds.
const EXACT_DEVICES: usize = 16;

/// Each exchange costs time quadratic in the number of devices.
const IMPROVEMENTS: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warpweft_core_types::LinkClass;

    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc, Provenance};

    fn devices(
        count: usize,
        links: impl IntoIterator<Item = (usize, usize, f64)>,
    ) -> (Topology, Vec<NodeId>) {
        let mut builder = Topology::builder();
        let ids: Vec<NodeId> = (0..count)
            .map(|index| builder.node(NodeDesc::device(format!("GPU{index}"), DeviceKind::Gpu)).unwrap())
            .collect();
        for (a, b, gb_per_s) in links {
            let desc = LinkDesc::new(LinkClass::NvLink, Provenance::File)
                .bandwidth(Bandwidth::from_gb_per_s(gb_per_s));
            builder.link(ids[a], ids[b], desc).unwrap();
        }
        (builder.build(), ids)
    }

    fn both(links: &[(usize, usize, f64)]) -> Vec<(usize, usize, f64)> {
        links.iter().flat_map(|&(a, b, rate)| [(a, b, rate), (b, a, rate)]).collect()
    }

    /// The double links of an eight-GPU cube mesh make a ring, and the single ones are left out.
    #[test]
    fn a_cube_mesh_has_a_ring_of_double_links() {
        let double = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
        let single = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)];
        let links: Vec<_> = double
            .iter()
            .map(|&(a, b)| (a, b, 50.0))
            .chain(single.iter().map(|&(a, b)| (a, b, 25.0)))
            .collect();
        let (topology, ids) = devices(8, both(&links));
        let ring = topology.ring(&ids).unwrap();
        let order: Vec<usize> = ring.order.iter().map(|id| id.index()).collect();
        assert_eq!(order, [0, 3, 2, 1, 5, 6, 7, 4]);
        assert_eq!(ring.bottleneck, Some(Bandwidth::from_gb_per_s(50.0)));
        assert!(ring.is_optimal);
    }

    #[test]
    fn a_chain_has_a_tree_but_no_ring() {
        let (topology, ids) = devices(3, both(&[(0, 1, 10.0), (1, 2, 20.0)]));
        let error = topology.ring(&ids).unwrap_err();
        assert_eq!(error, CollectiveError::NotConnected { shape: "ring", stuck: "GPU2".into() });
        let tree = topology.broadcast_tree(&ids, 2).unwrap();
        assert_eq!(tree.steps, [(ids[0], ids[1]), (ids[1], ids[2])]);
        assert_eq!((tree.depth, tree.bottleneck), (2, Some(Bandwidth::from_gb_per_s(10.0))));
    }

    #[test]
    fn a_fan_out_of_two_makes_a_binary_tree() {
        let pairs = (0..7).flat_map(|a| (0..7).filter(move |b| *b != a).map(move |b| (a, b, 5.0)));
        let (topology, ids) = devices(7, pairs);
        let tree = topology.broadcast_tree(&ids, 2).unwrap();
        assert_eq!((tree.depth, tree.is_optimal), (2, true));
        for id in &ids {
            assert!(tree.steps.iter().filter(|(from, _)| from == id).count() <= 2);
        }
    }

    #[test]
    fn a_large_ring_is_optimal_only_if_it_reaches_the_bound() {
        let pairs = (0..40_usize).flat_map(|a| (0..40).filter(move |b| *b != a).map(move |b| (a, b, 5.0)));
        let (topology, ids) = devices(40, pairs);
        assert!(topology.ring(&ids).unwrap().is_optimal);
        let circle: Vec<_> = (0..40).map(|a| (a, (a * 7 + 1) % 40, 5.0)).filter(|(a, b, _)| a != b).collect();
        let (sparse, ids) = devices(40, circle);
        assert!(sparse.ring(&ids).is_err());
    }

    #[test]
    fn lists_that_are_not_different_devices_are_refused() {
        let (topology, ids) = devices(2, both(&[(0, 1, 1.0)]));
        assert_eq!(topology.ring(&[]), Err(CollectiveError::NoDevices));
        assert!(matches!(topology.ring(&[ids[0], ids[0]]), Err(CollectiveError::NamedTwice { .. })));
        assert!(matches!(topology.ring(&[NodeId(9)]), Err(CollectiveError::UnknownNode { .. })));
        assert_eq!(topology.broadcast_tree(&ids, 0), Err(CollectiveError::NoFanOut));
        assert_eq!(topology.ring(&ids[..1]).unwrap().bottleneck, None);
    }

    #[test]
    fn host_memory_joins_devices_without_direct_links() {
        let mut builder = Topology::builder();
        let a = builder.node(NodeDesc::device("a", DeviceKind::Gpu).near(0)).unwrap();
        let b = builder.node(NodeDesc::device("b", DeviceKind::Gpu).near(0)).unwrap();
        builder.attach_to_hosts(&[a, b], Provenance::File).unwrap();
        assert!(builder.build().ring(&[a, b]).is_ok());
    }

    fn permutations(left: &mut Vec<usize>, order: &mut Vec<usize>, visit: &mut impl FnMut(&[usize])) {
        if left.is_empty() {
            visit(order);
        }
        for index in 0..left.len() {
            let next = left.remove(index);
            order.push(next);
            permutations(left, order, visit);
            order.pop();
            left.insert(index, next);
        }
    }

    proptest! {
        #[test]
        fn exact_rings_agree_with_trying_all(rates in prop::collection::vec(0_u8..5, 36)) {
            let rate = |a: usize, b: usize| f64::from(rates[a * 6 + b]);
            let pairs = (0..6).flat_map(|a| (0..6).filter(move |b| *b != a).map(move |b| (a, b)));
            let (topology, ids) = devices(6, pairs.map(|(a, b)| (a, b, rate(a, b))));
            let steps = steps(&topology, &ids);
            let (mut best, mut first) = (0.0, Vec::new());
            permutations(&mut (1..6).collect(), &mut vec![0], &mut |order| {
                if slowest(&steps, order) > best {
                    best = slowest(&steps, order);
                    first = order.to_vec();
                }
            });
            let got = topology.ring(&ids).ok();
            let order: Vec<usize> = got.iter().flat_map(|ring| &ring.order).map(|id| id.index()).collect();
            prop_assert_eq!(order, first);
        }
    }
}
