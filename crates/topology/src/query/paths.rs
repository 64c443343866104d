//! Several paths between two nodes, cheapest first.

use std::collections::{BTreeMap, HashSet};

use warpweft_core_types::Bytes;

use crate::{NodeId, Path, PathError, Topology};

impl Topology {
    /// The `count` cheapest paths without repeated nodes, cheapest first; fewer if there are no more.
    ///
    /// Yen's algorithm (Management Science 17(11), 1971): every further path leaves an earlier one at some node.
    ///
    /// # Errors
    ///
    /// As [`best_path`](Self::best_path).
    pub fn best_paths(
        &self,
        from: NodeId,
        to: NodeId,
        bytes: Bytes,
        count: usize,
    ) -> Result<Vec<Path>, PathError> {
        let mut found = vec![self.best_path(from, to, bytes)?];
        let mut candidates: BTreeMap<(u64, usize, Vec<NodeId>), Path> = BTreeMap::new();
        while found.len() < count {
            let last = &found[found.len() - 1].nodes;
            let deviations: Vec<Path> = (0..last.len() - 1)
                .filter_map(|spur| self.deviation(&found, &last[..=spur], to, bytes))
                .collect();
            for path in deviations {
                let rank = (path.cost_ns, path.hops.len(), path.nodes.clone());
                candidates.insert(rank, path);
            }
            match candidates.pop_first() {
                Some((_, path)) => found.push(path),
                None => break,
            }
        }
        found.truncate(count);
        Ok(found)
    }

    /// The cheapest path that starts with `root` and then does what no path in `found` does.
    fn deviation(&self, found: &[Path], root: &[NodeId], to: NodeId, bytes: Bytes) -> Option<Path> {
        let (&spur, before) = root.split_last()?;
        let taken: HashSet<NodeId> = found
            .iter()
            .filter(|path| path.nodes.starts_with(root))
            .filter_map(|path| path.nodes.get(root.len()).copied())
            .collect();
        let rest = self.cheapest(spur, to, bytes, |start, end| {
            let repeats = before.contains(&end) || before.contains(&start);
            let is_taken = start == spur && taken.contains(&end);
            !repeats && !is_taken
        })?;
        let nodes = before.iter().chain(&rest.nodes).copied().collect();
        Some(self.path_along(nodes, bytes))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use warpweft_core_types::{Bandwidth, LinkClass};

    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc, Provenance};

    fn graph(count: u32, links: &[(u32, u32, f64)]) -> Topology {
        let mut builder = Topology::builder();
        for index in 0..count {
            let desc = NodeDesc::device(index.to_string(), DeviceKind::Gpu);
            builder.node(desc).unwrap();
        }
        for &(from, to, gb_per_s) in links.iter().filter(|(from, to, _)| from != to) {
            let desc = LinkDesc::new(LinkClass::Pcie, Provenance::File)
                .bandwidth(Bandwidth::from_gb_per_s(gb_per_s))
                .latency(Duration::ZERO);
            builder.link(NodeId(from), NodeId(to), desc).unwrap();
        }
        builder.build()
    }

    /// Every path without repeated nodes, by depth-first search.
    fn all_paths(topology: &Topology, to: NodeId, path: &mut Vec<NodeId>, all: &mut Vec<Vec<NodeId>>) {
        let here = path[path.len() - 1];
        if here == to {
            all.push(path.clone());
            return;
        }
        for edge in topology.edges_from(here) {
            if edge.is_usable() && !path.contains(&edge.to) {
                path.push(edge.to);
                all_paths(topology, to, path, all);
                path.pop();
            }
        }
    }

    proptest! {
        #[test]
        fn the_cheapest_of_all_paths_are_found(
            links in prop::collection::vec((0_u32..6, 0_u32..6, 0_u8..4), 0..20),
            count in 0_usize..8,
        ) {
            let links: Vec<_> = links.into_iter().map(|(a, b, rate)| (a, b, f64::from(rate))).collect();
            let topology = graph(6, &links);
            let (from, to, bytes) = (NodeId(0), NodeId(5), Bytes(600));
            let mut all = Vec::new();
            all_paths(&topology, to, &mut vec![from], &mut all);
            let mut expected: Vec<_> = all
                .into_iter()
                .map(|nodes| topology.path_along(nodes, bytes))
                .map(|path| (path.cost_ns, path.hops.len(), path.nodes))
                .collect();
            expected.sort();
            expected.truncate(count);
            let got = topology.best_paths(from, to, bytes, count).unwrap_or_default();
            let got: Vec<_> = got.into_iter().map(|path| (path.cost_ns, path.hops.len(), path.nodes)).collect();
            prop_assert_eq!(got, expected);
        }
    }
}
