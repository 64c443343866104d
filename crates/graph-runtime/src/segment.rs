//! Cuts a graph into pieces that devices are handed as a whole.

use crate::order::Dag;

/// Who carries out a step, as far as cutting is concerned: steps of different places never share a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Place {
    /// A line of work of a device, by their positions.
    Lane { device: u32, lane: u32 },
    /// A processor of the host.
    Host,
}

/// Steps that a queue is given together, or one task of the host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) place: Place,
    /// Positions in the graph's order, rising.
    pub(crate) steps: Vec<u32>,
    /// Earlier segments that must have ended, rising.
    pub(crate) after: Vec<u32>,
}

/// Independent parts that cross to other places, at one distance from the graph's ends, are handed over apart, so
/// that the first can go on while the second runs, but in no more pieces than this.
const MAX_PARTS: usize = 8;

/// Cuts a graph. Segments come in an order that their edges follow.
///
/// Between places there are semaphores, which exist before and after a segment and not within. So a step that others
/// elsewhere wait for ends its segment, and one that waits for others elsewhere begins one. How many such cuts lie
/// on the longest way to a step and behind it (`depth`, `height`) says which steps can be together: along every edge
/// `depth` does not fall and `height` does not rise, and across a cut `depth - height` rises. So segments of equal
/// `(place, depth, height)` never wait for each other in a circle.
pub(crate) fn cut(dag: &Dag, place_of: &[Place]) -> Vec<Segment> {
    if let Some(&place @ Place::Lane { .. }) = place_of.first()
        && place_of.iter().all(|other| *other == place)
    {
        // Nothing crosses.
        return vec![Segment { place, steps: (0..dag.len()).collect(), after: Vec::new() }];
    }
    let keys = keys(dag, place_of);
    let mut parts = Parts::new(keys.len());
    for position in 0..dag.len() {
        for &before in dag.before(position) {
            if keys[before as usize] == keys[position as usize] && place_of[position as usize] != Place::Host
            {
                parts.unite(before, position);
            }
        }
    }
    collect(dag, &keys, &mut parts)
}

/// Where a step is, in cuts from the beginning and from the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    /// `depth - height`: segments are handed over in its order.
    potential: i64,
    depth: u32,
    place: Place,
}

fn keys(dag: &Dag, place_of: &[Place]) -> Vec<Key> {
    let count = place_of.len();
    let crosses = |before: u32, position: u32| {
        let (from, to) = (place_of[before as usize], place_of[position as usize]);
        from != to || to == Place::Host
    };
    let (mut exports, mut imports) = (vec![false; count], vec![false; count]);
    for position in 0..dag.len() {
        for &before in dag.before(position) {
            exports[before as usize] |= crosses(before, position);
            imports[position as usize] |= crosses(before, position);
        }
    }
    let weight =
        |before: u32, position: u32| u32::from(exports[before as usize] || imports[position as usize]);
    let (mut depth, mut height) = (vec![0_u32; count], vec![0_u32; count]);
    for position in 0..dag.len() {
        for &before in dag.before(position) {
            let through = depth[before as usize] + weight(before, position);
            depth[position as usize] = depth[position as usize].max(through);
        }
    }
    for position in (0..dag.len()).rev() {
        for &before in dag.before(position) {
            let through = height[position as usize] + weight(before, position);
            height[before as usize] = height[before as usize].max(through);
        }
    }
    let key = |((&depth, height), &place): ((&u32, u32), &Place)| Key {
        potential: i64::from(depth) - i64::from(height),
        depth,
        place,
    };
    depth.iter().zip(height).zip(place_of).map(key).collect()
}

fn collect(dag: &Dag, keys: &[Key], parts: &mut Parts) -> Vec<Segment> {
    let mut order: Vec<u32> = (0..dag.len()).collect();
    // Stable: within a key positions rise, and so do the first positions of its parts.
    order.sort_by_key(|&position| keys[position as usize]);
    let mut segments: Vec<Segment> = Vec::new();
    let mut segment_of = vec![0_u32; keys.len()];
    for same in order.chunk_by(|one, other| keys[*one as usize] == keys[*other as usize]) {
        let key = keys[same[0] as usize];
        let limit = match key.place {
            Place::Host => usize::MAX,
            // Nothing crosses before or behind it, so there is nobody to go ahead for.
            Place::Lane { .. } if key.depth == 0 && key.potential == 0 => 1,
            Place::Lane { .. } => MAX_PARTS,
        };
        let roots: Vec<u32> =
            same.iter().copied().filter(|&position| parts.root(position) == position).collect();
        let share = |root: u32| {
            let turn = roots.binary_search(&root).unwrap_or(0);
            if roots.len() <= limit { turn } else { turn * limit / roots.len() }
        };
        let first = segments.len();
        let empty = || Segment { place: key.place, steps: Vec::new(), after: Vec::new() };
        segments.extend(std::iter::repeat_with(empty).take(roots.len().min(limit)));
        for &position in same {
            let segment = first + share(parts.root(position));
            segments[segment].steps.push(position);
            segment_of[position as usize] = u32::try_from(segment).unwrap_or(u32::MAX);
        }
    }
    for (number, segment) in (0..).zip(&mut segments) {
        let before = segment.steps.iter().flat_map(|&position| dag.before(position));
        segment.after =
            before.map(|&before| segment_of[before as usize]).filter(|&other| other != number).collect();
        segment.after.sort_unstable();
        segment.after.dedup();
    }
    segments
}

/// Which steps hang together. The root of a part is its first step.
struct Parts(Vec<u32>);

impl Parts {
    fn new(count: usize) -> Self {
        Self((0..).take(count).collect())
    }

    fn root(&mut self, mut step: u32) -> u32 {
        while self.0[step as usize] != step {
            let above = self.0[step as usize];
            self.0[step as usize] = self.0[above as usize];
            step = self.0[step as usize];
        }
        step
    }

    fn unite(&mut self, one: u32, other: u32) {
        let (one, other) = (self.root(one), self.root(other));
        self.0[one.max(other) as usize] = one.min(other);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        infer::{Inference, Use},
        usage::Usage,
    };

    fn dag(nodes: &[Vec<Use>]) -> Dag {
        let mut inference = Inference::default();
        nodes.iter().for_each(|uses| inference.add(uses));
        Dag::new(&inference, |node| &nodes[node as usize])
    }

    fn a_use(memory: u32, usage: Usage) -> Use {
        Use { memory, range: 0..64, usage }
    }

    const fn on(device: u32) -> Place {
        Place::Lane { device, lane: 0 }
    }

    #[test]
    fn a_graph_of_one_device_is_one_segment() {
        let nodes: Vec<_> = (0..100).map(|memory| vec![a_use(memory % 7, Usage::ReadWrite)]).collect();
        let segments = cut(&dag(&nodes), &[on(0); 100]);
        assert_eq!(segments.len(), 1);
        assert_eq!(segments[0].steps.len(), 100);
    }

    #[test]
    fn chunks_of_a_pipeline_do_not_wait_for_each_other() {
        // Four chunks, each made by one device and used by another.
        let nodes: Vec<_> = (0..4)
            .flat_map(|chunk| [vec![a_use(chunk, Usage::Write)], vec![a_use(chunk, Usage::Read)]])
            .collect();
        let places: Vec<_> = (0..4).flat_map(|_| [on(0), on(1)]).collect();
        let segments = cut(&dag(&nodes), &places);
        assert_eq!(segments.len(), 8);
        for segment in &segments[4..] {
            assert_eq!(segment.after.len(), 1);
        }
    }

    #[test]
    fn what_others_wait_for_ends_its_segment() {
        // A chain on one device, whose first step feeds another device too.
        let nodes = [
            vec![a_use(0, Usage::Write), a_use(1, Usage::Write)],
            vec![a_use(0, Usage::ReadWrite)],
            vec![a_use(0, Usage::ReadWrite)],
            vec![a_use(1, Usage::Read)],
        ];
        let segments = cut(&dag(&nodes), &[on(0), on(0), on(0), on(1)]);
        let steps: Vec<_> = segments.iter().map(|segment| segment.steps.clone()).collect();
        assert_eq!(steps, [vec![0], vec![1, 2], vec![3]]);
        assert_eq!(segments[2].after, [0]);
    }

    fn random() -> impl Strategy<Value = Vec<(Vec<Use>, u32)>> {
        let usage = prop_oneof![Just(Usage::Read), Just(Usage::Write), Just(Usage::Commutative)];
        let uses =
            prop::collection::vec((0..6_u32, usage).prop_map(|(memory, usage)| a_use(memory, usage)), 1..4);
        prop::collection::vec((uses, 0..4_u32), 1..60)
    }

    proptest! {
        #[test]
        fn segments_hold_every_step_once_and_keep_every_edge(nodes in random()) {
            let uses: Vec<_> = nodes.iter().map(|(uses, _)| uses.clone()).collect();
            let dag = dag(&uses);
            let place = |step: &Option<u32>| match step.map(|node| nodes[node as usize].1) {
                Some(3) => Place::Host,
                Some(device) => on(device),
                None => on(0),
            };
            let places: Vec<_> = dag.steps.iter().map(place).collect();
            let segments = cut(&dag, &places);
            let mut segment_of = vec![None; dag.len() as usize];
            for (number, segment) in (0_u32..).zip(&segments) {
                prop_assert!(segment.steps.is_sorted() && !segment.steps.is_empty());
                prop_assert!(segment.place != Place::Host || segment.steps.len() == 1);
                prop_assert!(segment.after.iter().all(|&before| before < number));
                for &step in &segment.steps {
                    prop_assert_eq!(places[step as usize], segment.place);
                    prop_assert_eq!(segment_of[step as usize].replace(number), None);
                }
            }
            for position in 0..dag.len() {
                let own = segment_of[position as usize].expect("every step is in one");
                for &before in dag.before(position) {
                    let other = segment_of[before as usize].expect("every step is in one");
                    prop_assert!(own == other || segments[own as usize].after.contains(&other));
                }
            }
        }
    }
}
