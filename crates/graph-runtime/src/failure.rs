//! What failed work leaves behind.

use std::{ops::Range, slice::SliceIndex, sync::Arc};

use warpweft_core_types::Failure;

use crate::{
    domain::{Domain, State},
    error::{FailedNode, NodeFailure, Poison, RunError},
    graph::NodePlace,
    memory::{Bytes, Turn},
    node::NodeId,
    plan::{Plan, PlannedSegment},
    run::Run,
    usage::Usage,
};

impl Domain {
    /// A device refused a later segment of a run that has begun. What was handed over goes on; the rest never comes.
    pub(crate) fn break_off(&self, state: &mut State, run: &Run, number: usize, error: RunError) {
        let failure = Arc::new(error.into_failure(&run.plan.name_of(number)));
        let cause = self.failure_of(state, &run.plan, number, .., failure);
        for number in number..run.plan.segments.len() {
            state.poison(run, number, .., &cause);
        }
        run.state().broken = Some(cause);
    }

    /// What is told about nodes of a segment that failed, by their positions in it.
    pub(crate) fn failure_of(
        &self,
        state: &mut State,
        plan: &Plan,
        number: usize,
        nodes: impl SliceIndex<[u32], Output = [u32]>,
        reason: Arc<Failure>,
    ) -> Arc<NodeFailure> {
        let segment = &plan.segments[number];
        let nodes = segment.nodes.get(nodes).unwrap_or_default();
        let writes =
            nodes.iter().flat_map(|&node| plan.recorded.bytes_of(node)).filter(|(_, usage)| usage.writes());
        let written = writes.map(|(bytes, _)| (state.memories.at(bytes.memory).device, bytes.range));
        let written = written.collect();
        let place = match segment.place {
            NodePlace::Device { device, .. } => self.devices[device as usize].id.to_string(),
            NodePlace::Host => "the host".to_owned(),
        };
        let failed = |&node: &u32| FailedNode {
            id: NodeId(node),
            name: plan.recorded.nodes[node as usize].label().to_owned(),
        };
        Arc::new(NodeFailure { nodes: nodes.iter().map(failed).collect(), place, written, reason })
    }
}

impl State {
    /// Poisons what nodes of a segment were to write, by their positions in it.
    pub(crate) fn poison(
        &mut self,
        run: &Run,
        number: usize,
        nodes: impl SliceIndex<[u32], Output = [u32]>,
        cause: &Arc<NodeFailure>,
    ) {
        let plan = &run.plan;
        let nodes = plan.segments[number].nodes.get(nodes).unwrap_or_default();
        for (bytes, usage) in nodes.iter().flat_map(|&node| plan.recorded.bytes_of(node)) {
            if usage.writes() {
                self.memories.poison(bytes, cause, (run.id, number));
            }
        }
    }

    /// What a segment writes anew is no longer poisoned.
    pub(crate) fn heal(&mut self, run: &Run, number: usize) {
        if !self.memories.may_be_poisoned() {
            return;
        }
        let segment = &run.plan.segments[number];
        // By nodes: a segment that writes bytes and then reads them is said to do both.
        for (bytes, usage) in segment.nodes.iter().flat_map(|&node| run.plan.recorded.bytes_of(node)) {
            if usage == Usage::Write {
                self.memories.heal(&bytes, (run.id, number));
            }
        }
    }

    /// Poisoned bytes that segments read before they have written them, where they come at this turn.
    pub(crate) fn first_poison(
        &mut self,
        plan: &Plan,
        segments: impl SliceIndex<[PlannedSegment], Output = [PlannedSegment]>,
        turn: Turn,
    ) -> Option<Poison> {
        if !self.memories.may_be_poisoned() {
            return None;
        }
        let segments = plan.segments.get(segments).unwrap_or_default();
        let mut uses = segments.iter().flat_map(|segment| &segment.uses);
        if uses.all(|(bytes, _)| self.memories.at(bytes.memory).poison_in(&bytes.range, turn).is_none()) {
            return None;
        }
        let mut written: Vec<Bytes> = Vec::new();
        for &node in segments.iter().flat_map(|segment| &segment.nodes) {
            let reads = plan.recorded.bytes_of(node).filter(|(_, usage)| usage.reads());
            for (bytes, _) in reads {
                // Some of it may have been written by now, and some not.
                let mut poisons = self.memories.at(bytes.memory).poisons_in(&bytes.range, turn);
                if let Some(poison) = poisons.find(|poison| !covers(&written, &bytes, &poison.range)) {
                    return Some(poison);
                }
            }
            let writes = plan.recorded.bytes_of(node).filter(|(_, usage)| *usage == Usage::Write);
            written.extend(writes.map(|(bytes, _)| bytes));
        }
        None
    }
}

/// Whether the poisoned part of some bytes has been written.
fn covers(written: &[Bytes], bytes: &Bytes, poisoned: &Range<u64>) -> bool {
    let whole = poisoned.start.max(bytes.range.start)..poisoned.end.min(bytes.range.end);
    let mut left = Vec::from([whole]);
    for done in written.iter().filter(|done| done.memory == bytes.memory) {
        left = left.into_iter().flat_map(|range| without(range, &done.range)).collect();
    }
    left.is_empty()
}

fn without(range: Range<u64>, hole: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let (left, right) = (range.start..range.end.min(hole.start), range.start.max(hole.end)..range.end);
    [left, right].into_iter().filter(|part| !part.is_empty())
}
