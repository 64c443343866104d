//! From what nodes use to who comes after whom.

use std::ops::Range;

use smallvec::SmallVec;

use crate::{
    ranges::{Order, RangeMap, User},
    usage::Usage,
};

/// A use of a range of one of a graph's memories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    /// Position among the graph's memories.
    pub(crate) memory: u32,
    pub(crate) range: Range<u64>,
    pub(crate) usage: Usage,
}

/// A node, or a join: a node without work that stands for many others.
///
/// Joins are numbered apart, since one is only found to be needed when the node behind it is being looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Step(u32);

const JOIN: u32 = 1 << 31;

impl Step {
    pub(crate) const fn node(position: u32) -> Self {
        Self(position)
    }

    const fn join(position: u32) -> Self {
        Self(position | JOIN)
    }

    /// Its position among the nodes, if it is one.
    pub(crate) const fn as_node(self) -> Option<u32> {
        if self.0 & JOIN == 0 { Some(self.0) } else { None }
    }

    /// Its position among the joins, if it is one.
    pub(crate) const fn as_join(self) -> Option<u32> {
        if self.0 & JOIN == 0 { None } else { Some(self.0 & !JOIN) }
    }
}

impl User for Step {
    const HAS_LINES: bool = false;

    fn is_behind(self, _earlier: Self) -> bool {
        false
    }
}

/// The most nodes a graph can have.
pub(crate) const MAX_NODES: usize = JOIN as usize - 1;

/// How many nodes back an ancestor is still known to be one. Edges from further away may be more than are needed.
const WINDOW: u32 = u128::BITS;

/// Finds the edges of a graph while its nodes are added in order.
///
/// Edges to the last [`WINDOW`] nodes are as few as can be: none leads from an ancestor of another.
#[derive(Debug, Default)]
pub(crate) struct Inference {
    memories: Vec<RangeMap<Step>>,
    /// Where each node's edges start, and at the end where the next one's will.
    starts: Vec<u32>,
    edges: Vec<Step>,
    joins: Vec<Join>,
    /// For each node its ancestors among those just before it: bit `k` is the one `k + 1` nodes back.
    ancestors: Vec<u128>,
    found: Found,
}

/// A node without work.
#[derive(Debug)]
pub(crate) struct Join {
    /// It comes just before this node.
    pub(crate) before: u32,
    pub(crate) after: Vec<Step>,
}

#[derive(Debug, Default)]
struct Found {
    earlier: SmallVec<[Step; 16]>,
    joins: Vec<Vec<Step>>,
    /// Joins that were made for nodes before this one.
    known_joins: u32,
}

impl Order<Step> for Found {
    fn after(&mut self, earlier: Step) {
        self.earlier.push(earlier);
    }

    fn join(&mut self, members: &[Step]) -> Option<Step> {
        let position = self.known_joins + u32::try_from(self.joins.len()).ok()?;
        self.joins.push(members.to_vec());
        Some(Step::join(position))
    }
}

impl Inference {
    /// Adds the next node.
    pub(crate) fn add(&mut self, uses: &[Use]) {
        let node = self.len();
        for one in uses {
            let memory = one.memory as usize;
            if self.memories.len() <= memory {
                self.memories.resize_with(memory + 1, RangeMap::default);
            }
            self.memories[memory].add(one.range.clone(), one.usage, Step::node(node), &mut self.found);
        }
        for after in self.found.joins.drain(..) {
            self.joins.push(Join { before: node, after });
            self.found.known_joins += 1;
        }
        self.found.earlier.retain(|earlier| *earlier != Step::node(node));
        self.settle(node);
    }

    /// Takes the edges that are needed out of those found.
    fn settle(&mut self, node: u32) {
        let earlier = &mut self.found.earlier;
        earlier.sort_unstable();
        earlier.dedup();
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        let mut reached = 0;
        // Latest first: whoever is an ancestor of a later one is reached through it.
        for &step in earlier.iter().rev() {
            let Some(position) = step.as_node() else {
                self.edges.push(step);
                continue;
            };
            let back = node - position;
            if back > WINDOW {
                self.edges.push(step);
                continue;
            }
            let bit = 1 << (back - 1);
            if reached & bit == 0 {
                self.edges.push(step);
                reached |= bit | shifted(self.ancestors[position as usize], back);
            }
        }
        earlier.clear();
        self.ancestors.push(reached);
        self.starts.push(u32::try_from(self.edges.len()).unwrap_or(u32::MAX));
    }

    /// How many nodes there are.
    pub(crate) fn len(&self) -> u32 {
        // `MAX_NODES` bounds it.
        u32::try_from(self.ancestors.len()).unwrap_or(u32::MAX)
    }

    /// Whom a node comes after: latest first among nodes, after joins.
    pub(crate) fn edges(&self, node: u32) -> &[Step] {
        let (start, end) = (self.starts[node as usize], self.starts[node as usize + 1]);
        &self.edges[start as usize..end as usize]
    }

    /// The joins, in the order of the nodes they come before.
    pub(crate) fn joins(&self) -> &[Join] {
        &self.joins
    }
}

fn shifted(ancestors: u128, back: u32) -> u128 {
    ancestors.checked_shl(back).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn infer(nodes: &[Vec<Use>]) -> Inference {
        let mut inference = Inference::default();
        nodes.iter().for_each(|uses| inference.add(uses));
        inference
    }

    /// Direct predecessors with joins taken apart.
    fn predecessors(inference: &Inference, node: u32) -> Vec<u32> {
        let mut open = inference.edges(node).to_vec();
        let mut nodes = Vec::new();
        while let Some(step) = open.pop() {
            match (step.as_node(), step.as_join()) {
                (Some(node), _) => nodes.push(node),
                (_, Some(join)) => open.extend(&inference.joins()[join as usize].after),
                _ => {}
            }
        }
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    fn conflict(one: &[Use], other: &[Use]) -> bool {
        one.iter().any(|a| {
            other.iter().any(|b| {
                a.memory == b.memory
                    && a.range.start < b.range.end
                    && b.range.start < a.range.end
                    && a.usage.conflicts_with(b.usage)
            })
        })
    }

    /// All pairs that conflict, and what follows from them, less every edge that follows from the others.
    fn oracle(nodes: &[Vec<Use>]) -> Vec<Vec<u32>> {
        let count = nodes.len();
        let mut reaches = vec![vec![false; count]; count];
        let mut edges = vec![Vec::new(); count];
        for node in 0..count {
            for (earlier, number) in (0..node).zip(0_u32..).collect::<Vec<_>>().into_iter().rev() {
                if !reaches[node][earlier] && conflict(&nodes[earlier], &nodes[node]) {
                    edges[node].push(number);
                    let (before, at) = reaches.split_at_mut(node);
                    at[0][earlier] = true;
                    at[0].iter_mut().zip(&before[earlier]).for_each(|(to, from)| *to |= from);
                }
            }
            edges[node].reverse();
        }
        edges
    }

    fn usages() -> impl Strategy<Value = Usage> {
        prop_oneof![
            3 => Just(Usage::Read),
            2 => Just(Usage::Write),
            1 => Just(Usage::ReadWrite),
            1 => (0..2_u32).prop_map(Usage::Reduce),
            1 => Just(Usage::Commutative),
        ]
    }

    fn a_use() -> impl Strategy<Value = Use> {
        (0..3_u32, 0..64_u64, 1..9_u64, usages()).prop_map(|(memory, start, len, usage)| Use {
            memory,
            range: 4 * start..4 * (start + len),
            usage,
        })
    }

    proptest! {
        #[test]
        fn edges_are_those_of_a_quadratic_oracle(
            nodes in prop::collection::vec(prop::collection::vec(a_use(), 1..5), 1..61)
        ) {
            let inference = infer(&nodes);
            let expected = oracle(&nodes);
            for (node, expected) in (0..).zip(&expected) {
                prop_assert_eq!(&predecessors(&inference, node), expected, "node {}", node);
            }
        }
    }

    fn whole(usage: Usage) -> Vec<Use> {
        vec![Use { memory: 0, range: 0..1024, usage }]
    }

    #[test]
    fn many_readers_are_joined_before_a_writer() {
        let mut nodes = vec![whole(Usage::Read); 50_000];
        // Each writes a part, and would come after all readers by itself.
        nodes.extend(
            (0..64)
                .map(|part| vec![Use { memory: 0, range: 16 * part..16 * (part + 1), usage: Usage::Write }]),
        );
        let inference = infer(&nodes);
        assert_eq!(inference.joins().len(), 1);
        assert_eq!(inference.joins()[0].after.len(), 50_000);
        for writer in 50_000..50_064 {
            assert_eq!(inference.edges(writer).len(), 1, "{writer}");
        }
    }

    #[test]
    fn readers_of_a_thousand_memories_have_no_edges() {
        let nodes: Vec<Vec<Use>> = (0..1000)
            .map(|_| (0..1000).map(|memory| Use { memory, range: 0..64, usage: Usage::Read }).collect())
            .collect();
        let inference = infer(&nodes);
        assert!((0..1000).all(|node| inference.edges(node).is_empty()));
        assert!(inference.joins().is_empty());
    }

    #[test]
    fn independent_nodes_between_two_joins_have_no_edges_among_them() {
        let mut nodes = vec![whole(Usage::Write)];
        nodes.extend(
            (0..32).map(|part| {
                vec![Use { memory: 0, range: 32 * part..32 * (part + 1), usage: Usage::ReadWrite }]
            }),
        );
        nodes.push(whole(Usage::Read));
        let inference = infer(&nodes);
        for node in 1..33 {
            assert_eq!(inference.edges(node), [Step::node(0)]);
        }
        assert_eq!(inference.edges(33).len(), 32);
    }
}
