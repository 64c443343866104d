//! Maximum flow by Dinic's algorithm, for repeated questions about one network.

use std::collections::VecDeque;

/// A network of directed arcs with capacities.
#[derive(Debug, Clone, Default)]
pub(super) struct Network {
    /// Positions in `arcs` by the vertex they leave.
    leaving: Vec<Vec<usize>>,
    /// Every arc stands before its reverse.
    arcs: Vec<Arc>,
}

#[derive(Debug, Clone)]
struct Arc {
    to: usize,
    capacity: f64,
    left: f64,
}

impl Network {
    pub(super) fn with_vertices(count: usize) -> Self {
        Self { leaving: vec![Vec::new(); count], arcs: Vec::new() }
    }

    pub(super) fn add_vertex(&mut self) -> usize {
        self.leaving.push(Vec::new());
        self.leaving.len() - 1
    }

    /// Adds an arc; the result names it.
    pub(super) fn add_arc(&mut self, from: usize, to: usize, capacity: f64) -> usize {
        let arc = self.arcs.len();
        for (from, to, capacity) in [(from, to, capacity), (to, from, 0.0)] {
            self.leaving[from].push(self.arcs.len());
            self.arcs.push(Arc { to, capacity, left: capacity });
        }
        arc
    }

    pub(super) fn set_capacity(&mut self, arc: usize, capacity: f64) {
        self.arcs[arc].capacity = capacity;
    }

    /// The most that can flow; forgets earlier flows.
    pub(super) fn max_flow(&mut self, source: usize, sink: usize) -> f64 {
        for arc in &mut self.arcs {
            arc.left = arc.capacity;
        }
        let mut total = 0.0;
        while let Some(levels) = self.levels(source, sink) {
            let mut next = vec![0; self.leaving.len()];
            loop {
                let pushed = self.push(source, sink, &levels, &mut next);
                if pushed <= NOTHING {
                    break;
                }
                total += pushed;
            }
        }
        total
    }

    /// Distances from the source over arcs with room; `None` if the sink is not reached.
    fn levels(&self, source: usize, sink: usize) -> Option<Vec<u32>> {
        let mut levels = vec![u32::MAX; self.leaving.len()];
        let mut queue = VecDeque::from([source]);
        levels[source] = 0;
        while let Some(vertex) = queue.pop_front() {
            for &arc in &self.leaving[vertex] {
                let Arc { to, left, .. } = self.arcs[arc];
                if left > NOTHING && levels[to] == u32::MAX {
                    levels[to] = levels[vertex] + 1;
                    queue.push_back(to);
                }
            }
        }
        (levels[sink] != u32::MAX).then_some(levels)
    }

    /// Pushes along one path of rising levels; 0 if there is none left.
    ///
    /// The path is a list and not a recursion, since a network can be a long chain.
    fn push(&mut self, source: usize, sink: usize, levels: &[u32], next: &mut [usize]) -> f64 {
        let mut path: Vec<usize> = Vec::new();
        let mut vertex = source;
        while vertex != sink {
            match self.leaving[vertex].get(next[vertex]) {
                Some(&arc) if self.rises(arc, vertex, levels) => {
                    path.push(arc);
                    vertex = self.arcs[arc].to;
                }
                Some(_) => next[vertex] += 1,
                None => {
                    let Some(arc) = path.pop() else { return 0.0 };
                    vertex = self.arcs[arc ^ 1].to;
                    next[vertex] += 1;
                }
            }
        }
        let room = path.iter().map(|&arc| self.arcs[arc].left);
        let pushed = room.fold(f64::INFINITY, f64::min);
        for arc in path {
            self.arcs[arc].left -= pushed;
            self.arcs[arc ^ 1].left += pushed;
        }
        pushed
    }

    fn rises(&self, arc: usize, from: usize, levels: &[u32]) -> bool {
        let Arc { to, left, .. } = self.arcs[arc];
        left > NOTHING && levels[to] == levels[from] + 1
    }
}

/// Less than a kilobyte per second is rounding.
const NOTHING: f64 = 1e-6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_split_and_join() {
        let mut network = Network::with_vertices(4);
        network.add_arc(0, 1, 3.0);
        let narrow = network.add_arc(0, 2, 2.0);
        network.add_arc(1, 2, 5.0);
        network.add_arc(1, 3, 2.0);
        network.add_arc(2, 3, 3.0);
        assert_eq!(network.max_flow(0, 3), 5.0);
        network.set_capacity(narrow, 0.0);
        assert_eq!(network.max_flow(0, 3), 3.0);
        assert_eq!(network.max_flow(3, 0), 0.0);
    }

    #[test]
    fn a_long_chain_needs_no_deep_stack() {
        let length = 200_000;
        let mut network = Network::with_vertices(length + 1);
        for vertex in 0..length {
            network.add_arc(vertex, vertex + 1, 1.0);
        }
        assert_eq!(network.max_flow(0, length), 1.0);
    }

    #[test]
    fn unlimited_arcs_are_limited_by_the_others() {
        let mut network = Network::with_vertices(2);
        let middle = network.add_vertex();
        network.add_arc(0, middle, f64::INFINITY);
        network.add_arc(middle, 1, 7.0);
        assert_eq!(network.max_flow(0, 1), 7.0);
    }
}
