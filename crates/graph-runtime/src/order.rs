//! The order in which a graph is carried out: its nodes and joins in one line, with edges from earlier to later.

use crate::{
    infer::{Inference, Step, Use},
    usage::Usage,
};

/// Nodes and joins in an order that all edges follow.
#[derive(Debug, Default)]
pub(crate) struct Dag {
    /// What stands at each position: a node's number, or nothing for a join.
    pub(crate) steps: Vec<Option<u32>>,
    starts: Vec<usize>,
    edges: Vec<u32>,
}

impl Dag {
    /// Puts what was inferred in one line. `uses_of` tells what each node uses.
    pub(crate) fn new<'a>(inference: &Inference, uses_of: impl Fn(u32) -> &'a [Use]) -> Self {
        let recorded: Vec<u32> = (0..inference.len()).collect();
        let dag = Self::lay_out(inference, &recorded);
        let is_commutative = |node: &u32| uses_of(*node).iter().any(|one| one.usage == Usage::Commutative);
        if recorded.iter().any(is_commutative) { dag.settle_commutative(uses_of) } else { dag }
    }

    /// Commutative nodes have no order yet and cannot run side by side. Whoever can start earlier goes first.
    ///
    /// Sorting by level keeps every edge's direction, so inferring again in that order gives the same edges, and
    /// those among commutative nodes besides.
    fn settle_commutative<'a>(&self, uses_of: impl Fn(u32) -> &'a [Use]) -> Self {
        let levels = self.levels();
        let mut order: Vec<(u32, u32)> =
            self.steps.iter().zip(levels).filter_map(|(node, level)| Some((level, (*node)?))).collect();
        order.sort_unstable();
        let mut inference = Inference::default();
        let mut uses = Vec::new();
        for (_, node) in &order {
            uses.clear();
            uses.extend(uses_of(*node).iter().map(|one| match one.usage {
                Usage::Commutative => Use { usage: Usage::ReadWrite, ..one.clone() },
                _ => one.clone(),
            }));
            inference.add(&uses);
        }
        let order: Vec<u32> = order.into_iter().map(|(_, node)| node).collect();
        Self::lay_out(&inference, &order)
    }

    /// `names` has the number of each of the inference's nodes.
    fn lay_out(inference: &Inference, names: &[u32]) -> Self {
        let joins = inference.joins();
        let mut dag = Self { starts: vec![0], ..Self::default() };
        let mut place_of_node = Vec::with_capacity(names.len());
        let mut place_of_join = Vec::with_capacity(joins.len());
        for (node, &name) in (0..).zip(names) {
            while let Some(join) = joins.get(place_of_join.len()).filter(|join| join.before == node) {
                let place = dag.push(None, &join.after, &place_of_node, &place_of_join);
                place_of_join.push(place);
            }
            let place = dag.push(Some(name), inference.edges(node), &place_of_node, &place_of_join);
            place_of_node.push(place);
        }
        dag
    }

    fn push(&mut self, step: Option<u32>, after: &[Step], nodes: &[u32], joins: &[u32]) -> u32 {
        let place = self.len();
        self.steps.push(step);
        let from = self.edges.len();
        self.edges.extend(after.iter().filter_map(|step| match (step.as_node(), step.as_join()) {
            (Some(node), _) => nodes.get(node as usize).copied(),
            (_, Some(join)) => joins.get(join as usize).copied(),
            _ => None,
        }));
        self.edges[from..].sort_unstable();
        self.starts.push(self.edges.len());
        place
    }

    /// How many positions there are.
    pub(crate) fn len(&self) -> u32 {
        // Nodes are fewer than 2^31, and joins fewer than nodes.
        u32::try_from(self.steps.len()).unwrap_or(u32::MAX)
    }

    /// The positions that come before one, in rising order.
    pub(crate) fn before(&self, position: u32) -> &[u32] {
        &self.edges[self.starts[position as usize]..self.starts[position as usize + 1]]
    }

    /// How many edges there are.
    pub(crate) fn edge_count(&self) -> usize {
        self.edges.len()
    }

    /// Nodes on the longest way to each position, itself not counted.
    pub(crate) fn levels(&self) -> Vec<u32> {
        let mut levels = Vec::with_capacity(self.steps.len());
        for position in 0..self.len() {
            let level =
                |&before: &u32| levels[before as usize] + u32::from(self.steps[before as usize].is_some());
            let level = self.before(position).iter().map(level).max().unwrap_or(0);
            levels.push(level);
        }
        levels
    }

    /// The positions of a longest way through the graph, where a step takes as long as `cost` says.
    pub(crate) fn critical_path(&self, cost: impl Fn(u32) -> u64) -> Vec<u32> {
        let mut longest: Vec<(u64, Option<u32>)> = Vec::with_capacity(self.steps.len());
        for position in 0..self.len() {
            let best = self.before(position).iter().map(|&before| (longest[before as usize].0, Some(before)));
            let (time, before) = best.max_by_key(|(time, _)| *time).unwrap_or((0, None));
            let own = if self.steps[position as usize].is_some() { cost(position) } else { 0 };
            longest.push((time.saturating_add(own), before));
        }
        let last = (0..self.len()).max_by_key(|&position| longest[position as usize].0);
        let mut path: Vec<u32> =
            std::iter::successors(last, |&position| longest[position as usize].1).collect();
        path.retain(|&position| self.steps[position as usize].is_some());
        path.reverse();
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dag(nodes: &[Vec<Use>]) -> Dag {
        let mut inference = Inference::default();
        nodes.iter().for_each(|uses| inference.add(uses));
        Dag::new(&inference, |node| &nodes[node as usize])
    }

    fn a_use(memory: u32, usage: Usage) -> Use {
        Use { memory, range: 0..64, usage }
    }

    #[test]
    fn commutative_nodes_run_one_at_a_time_and_the_ready_one_first() {
        // The first of two commutative nodes has to wait for a chain, the second for nobody.
        let nodes = [
            vec![a_use(1, Usage::Write)],
            vec![a_use(1, Usage::ReadWrite)],
            vec![a_use(1, Usage::Read), a_use(0, Usage::Commutative)],
            vec![a_use(0, Usage::Commutative)],
            vec![a_use(0, Usage::Read)],
        ];
        let dag = dag(&nodes);
        let order: Vec<u32> = dag.steps.iter().map(|step| step.expect("no joins here")).collect();
        let place =
            |node: u32| (0..).zip(&order).find(|(_, other)| **other == node).expect("all are there").0;
        assert!(place(3) < place(2));
        assert_eq!(dag.before(place(2)), [place(3), place(1)].tap_sorted());
        assert_eq!(dag.before(place(4)), [place(2)]);
    }

    trait Sorted {
        fn tap_sorted(self) -> Self;
    }

    impl<const N: usize> Sorted for [u32; N] {
        fn tap_sorted(mut self) -> Self {
            self.sort_unstable();
            self
        }
    }

    #[test]
    fn the_critical_path_is_the_longest_by_cost() {
        let nodes = [
            vec![a_use(0, Usage::Write)],
            vec![a_use(1, Usage::Write)],
            vec![a_use(0, Usage::Read), a_use(1, Usage::Read)],
        ];
        let dag = dag(&nodes);
        assert_eq!(dag.critical_path(|position| if position == 1 { 5 } else { 1 }), [1, 2]);
        assert_eq!(dag.critical_path(|position| if position == 0 { 5 } else { 1 }), [0, 2]);
    }
}
