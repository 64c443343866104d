//! Prepared graphs.

use std::{fmt, sync::Arc};

use rustc_hash::FxHashMap;
use warpweft_core_types::{BufferView, Deadline, GraphOp};

use crate::{
    any::wait_for_any,
    completion::Completion,
    domain::{Domain, State},
    error::{BusyReason, PrepareError, RecordError, RunError},
    graph::{Graph, NodePlace},
    later::Held,
    node::{NodeDesc, NodeId},
    plan::{Layout, SegmentWork, SlotWork},
    run::Run,
    sync::{Mutex, MutexGuard},
};

/// A graph that devices have prepared, to be submitted again and again.
///
/// It has as many slots as [`RuntimeConfig::graph_slots`](crate::RuntimeConfig::graph_slots) says, each with what
/// devices prepared for it, so that one submission can be handed over while another runs.
pub struct ExecutableGraph {
    graph: Graph,
    layout: Layout,
    slots: Mutex<Vec<Slot>>,
}

struct Slot {
    work: SlotWork,
    run: Option<Arc<Run>>,
}

impl ExecutableGraph {
    pub(crate) fn new(graph: Graph, slots: usize) -> Result<Self, PrepareError> {
        if graph.is_empty() {
            return Err(PrepareError::Empty);
        }
        let layout = Layout::new(&graph);
        let slots = (0..slots).map(|_| Ok(Slot { work: layout.prepare(&graph)?, run: None }));
        let slots = slots.collect::<Result<Vec<_>, PrepareError>>()?;
        graph.domain.state().counts.graphs_prepared += 1;
        Ok(Self { graph, layout, slots: Mutex::new(slots) })
    }

    /// Hands the graph to its devices, behind everything before it that uses the same bytes. Does not block.
    ///
    /// # Errors
    ///
    /// [`RunError::Busy`] with the reason, [`RunError::Poisoned`], or what a device says.
    pub fn submit(&self) -> Result<Completion, RunError> {
        // Before the slots, so that what programs do comes when they are free.
        let _held = Held::new();
        let mut slots = self.slots();
        let count = slots.len();
        let mut state = self.graph.domain.state();
        // The one that was used longest ago is the likeliest to be free.
        slots.rotate_left(1);
        let mut free = slots.iter_mut().rev();
        let Some(slot) = free.find(|slot| slot.is_free(&self.graph.domain, &mut state)) else {
            return Err(RunError::Busy { reason: BusyReason::Slots { slots: count } });
        };
        let spare = slot.run.take();
        let run = self.graph.domain.submit(&mut state, &self.layout.plan, &slot.work, spare)?;
        slot.run = Some(Arc::clone(&run));
        drop(state);
        Ok(Completion::new(&self.graph.domain, run))
    }

    /// The same, but waits until the deadline for a slot, for room in the runtime, and for guards and hand-offs to end,
    /// a guard of the caller's own too.
    ///
    /// # Errors
    ///
    /// As [`ExecutableGraph::submit`]; [`RunError::Busy`] once the deadline has passed.
    pub fn submit_by(&self, deadline: impl Into<Deadline>) -> Result<Completion, RunError> {
        let deadline = deadline.into();
        loop {
            let busy = match self.submit() {
                Err(RunError::Busy { reason }) => reason,
                other => return other,
            };
            let waited = match busy {
                BusyReason::Slots { .. } => self.wait_for_slot(deadline),
                _ => self.graph.domain.wait_for_room(&busy, &self.layout.plan, deadline),
            };
            if !waited {
                return Err(RunError::Busy { reason: busy });
            }
        }
    }

    /// Waits until a slot may be free; whether there was time left.
    fn wait_for_slot(&self, deadline: Deadline) -> bool {
        if deadline.is_past() {
            return false;
        }
        let mut runs: Vec<Arc<Run>> = self.slots().iter().filter_map(|slot| slot.run.clone()).collect();
        runs.sort_unstable_by_key(|run| run.id);
        let points: Option<Vec<_>> = runs.iter().map(|run| run.next_point()).collect();
        // One without a point that is not past has ended.
        points.is_none_or(|points| wait_for_any(&points, deadline))
    }

    /// Gives nodes other operands, scalars, or kernels. Submissions under way keep what they had.
    ///
    /// What a description says of usages, or of bytes beside the operands, stands in the place of what was said before;
    /// the name, the device and the lane stay those of the node.
    ///
    /// Of two changes of one node the last counts. A copy over memory of the host is several nodes, each for itself.
    ///
    /// Hazards are inferred anew. Where the order stays what it was, devices only exchange operands; where it changes,
    /// they prepare the graph again.
    ///
    /// # Errors
    ///
    /// See [`PrepareError`]; the graph is as it was then.
    pub fn rebind<'a>(
        &mut self,
        changes: impl IntoIterator<Item = (NodeId, NodeDesc<'a>)>,
    ) -> Result<(), PrepareError> {
        let changes: FxHashMap<NodeId, NodeDesc<'a>> = changes.into_iter().collect();
        let node_count = self.graph.len();
        if let Some(&node) = changes.keys().find(|node| node.index() >= node_count) {
            return Err(PrepareError::NoSuchNode { node, node_count });
        }
        let graph = self.graph.rerecorded(|id, node| {
            let Some(desc) = changes.get(&id) else { return Ok(None) };
            if node.place == NodePlace::Host {
                // Such as memory that the host cannot address.
                self.graph.domain.place(desc)?;
            }
            Ok(Some(node.described(desc)))
        })?;
        self.exchange(graph)
    }

    /// Puts `to` in the place of `from`, both of one length: every view within `from` becomes the same bytes of `to`.
    /// Views that leave `from`, and views of other buffers of the same memory, stay.
    ///
    /// # Errors
    ///
    /// As [`ExecutableGraph::rebind`].
    pub fn replace(&mut self, from: &BufferView, to: &BufferView) -> Result<(), PrepareError> {
        if from.size() != to.size() {
            let source = warpweft_core_types::RangeError::LengthMismatch {
                source_bytes: from.size(),
                destination_bytes: to.size(),
            };
            return Err(RecordError::Range { node: "replace".to_owned(), source }.into());
        }
        let moved = |view: &BufferView| {
            let inside = Arc::ptr_eq(view.buffer(), from.buffer())
                && view.offset() >= from.offset()
                && view.range().end <= from.range().end;
            let start = view.offset().wrapping_sub(from.offset());
            if inside { to.slice(start..start + view.size()).ok() } else { None }
        };
        let graph = self.graph.rerecorded(|_, node| node.moved(&moved))?;
        self.exchange(graph)
    }

    /// Goes on with another recording of the same nodes.
    fn exchange(&mut self, graph: Graph) -> Result<(), PrepareError> {
        let new = Layout::new(&graph);
        let works = if new.is_like(&self.layout) { self.set_operands(&new) } else { None };
        let slots = self.slots.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let works = match works {
            Some(works) => works,
            None => (0..slots.len()).map(|_| new.prepare(&graph)).collect::<Result<_, _>>()?,
        };
        for (slot, work) in slots.iter_mut().zip(works) {
            slot.work = work;
        }
        (self.graph, self.layout) = (graph, new);
        Ok(())
    }

    /// The works with new operands in the graphs that devices have; none where a device wants to prepare it again.
    fn set_operands(&self, new: &Layout) -> Option<Vec<SlotWork>> {
        let changed: Vec<(usize, usize)> = new
            .positions()
            .into_iter()
            .filter(|&at| match (self.layout.op(at), new.op(at)) {
                (Some(old), Some(new)) => !Arc::ptr_eq(old, new),
                _ => false,
            })
            .collect();
        let mut works = Vec::new();
        for slot in self.slots().iter() {
            let mut work: Vec<SegmentWork> = slot.work.to_vec();
            for (number, segment) in work.iter_mut().enumerate() {
                let own = changed.iter().filter(|(segment, _)| *segment == number);
                let ops = own.filter_map(|&at| Some((at.1, Arc::clone(new.op(at)?))));
                match segment {
                    SegmentWork::Graph { graph, stamps } => {
                        let stamps = stamps.as_ref();
                        let place = |position: usize| match stamps {
                            Some(stamps) => stamps.positions[position],
                            None => position,
                        };
                        let ops: Vec<(usize, Arc<GraphOp>)> =
                            ops.map(|(position, op)| (place(position), op)).collect();
                        if !ops.is_empty() && graph.set_all(ops).is_err() {
                            // Such as a copy that is now from another kind of memory.
                            return None;
                        }
                    }
                    SegmentWork::Task(task) => *task = new.task_of(number),
                    SegmentWork::Ops(_) | SegmentWork::Single | SegmentWork::Mark => return None,
                }
            }
            works.push(work.into());
        }
        Some(works)
    }

    /// The graph it was made of.
    pub const fn graph(&self) -> &Graph {
        &self.graph
    }

    /// How many pieces devices are handed at each submission.
    pub fn segment_count(&self) -> usize {
        self.layout.plan.segments.len()
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        // Only this crate's own code runs under the lock.
        self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl fmt::Debug for ExecutableGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ExecutableGraph({} nodes in {} segments)",
            self.graph.len(),
            self.layout.plan.segments.len()
        )
    }
}

impl Slot {
    fn is_free(&self, domain: &Domain, state: &mut State) -> bool {
        self.run.as_ref().is_none_or(|run| domain.has_ended_in(state, run))
    }
}
