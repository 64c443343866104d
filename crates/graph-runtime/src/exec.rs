//! Prepared graphs.

use std::{fmt, sync::Arc};

use warpweft_core_types::{Deadline, WaitError};

use crate::{
    completion::Completion,
    error::{BusyReason, PrepareError, RunError},
    graph::{Graph, NodePlace},
    node::Work,
    plan::{self, Plan, SegmentWork, SlotWork},
    run::{Look, Run},
    sync::{Mutex, MutexGuard},
};

/// A graph that devices have prepared, to be submitted again and again.
///
/// It has as many slots as [`RuntimeConfig::graph_slots`](crate::RuntimeConfig::graph_slots) says, each with what
/// devices prepared for it, so that one submission can be handed over while another runs.
pub struct ExecutableGraph {
    graph: Graph,
    plan: Arc<Plan>,
    slots: Mutex<Vec<Slot>>,
}

struct Slot {
    work: SlotWork,
    run: Option<Arc<Run>>,
}

impl ExecutableGraph {
    pub(crate) fn new(graph: Graph) -> Result<Self, PrepareError> {
        if graph.is_empty() {
            return Err(PrepareError::Empty);
        }
        let (plan, slots) = prepare(&graph)?;
        graph.domain.state().counts.graphs_prepared += 1;
        Ok(Self { graph, plan: Arc::new(plan), slots: Mutex::new(slots) })
    }

    /// Hands the graph to its devices, behind everything before it that uses the same bytes. Does not block.
    ///
    /// # Errors
    ///
    /// [`RunError::Busy`] with the reason, [`RunError::Poisoned`], or what a device says.
    pub fn submit(&self) -> Result<Completion, RunError> {
        let mut slots = self.slots();
        let count = slots.len();
        let Some(slot) = slots.iter_mut().find(|slot| slot.is_free()) else {
            return Err(RunError::Busy { reason: BusyReason::Slots { slots: count } });
        };
        let run = self.graph.domain.submit(&self.plan, &slot.work)?;
        slot.run = Some(Arc::clone(&run));
        Ok(Completion { domain: Arc::clone(&self.graph.domain), run })
    }

    /// The same, but waits for a slot, or for room in the runtime, until the deadline.
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
                _ => self.graph.domain.wait_for_room(deadline),
            };
            if !waited {
                return Err(RunError::Busy { reason: busy });
            }
        }
    }

    /// Waits until a slot may be free.
    fn wait_for_slot(&self, deadline: Deadline) -> bool {
        let under_way =
            |slot: &Slot| slot.run.as_ref().and_then(|run| run.next_point().map(|point| (run.id, point)));
        let oldest = self.slots().iter().filter_map(under_way).min_by_key(|(id, _)| *id);
        match oldest {
            Some((_, point)) => !matches!(point.wait(deadline), Err(WaitError::Timeout { .. })),
            None => true,
        }
    }

    /// The graph it was made of.
    pub const fn graph(&self) -> &Graph {
        &self.graph
    }

    /// How many pieces devices are handed at each submission.
    pub fn segment_count(&self) -> usize {
        self.plan.segments.len()
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        // Only this crate's own code runs under the lock.
        self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl fmt::Debug for ExecutableGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExecutableGraph({} nodes in {} segments)", self.graph.len(), self.plan.segments.len())
    }
}

impl Slot {
    fn is_free(&self) -> bool {
        self.run.as_ref().is_none_or(|run| run.look() == Look::Ended)
    }
}

fn prepare(graph: &Graph) -> Result<(Plan, Vec<Slot>), PrepareError> {
    let (plan, dag, steps) = Plan::new(graph);
    let slots = (0..graph.domain.config.graph_slots).map(|_| {
        let works = plan.segments.iter().zip(&steps).map(|(segment, steps)| match segment.place {
            NodePlace::Device { device, .. } => {
                let device = graph.domain.devices[device as usize].device.as_ref();
                plan::prepare(graph, &dag, steps, device)
            }
            NodePlace::Host => {
                let node = segment.nodes.first().map(|node| &graph.nodes[node.id.index()].work);
                match node {
                    Some(Work::Task(task)) => Ok(SegmentWork::Task(task.clone())),
                    _ => Ok(SegmentWork::Task(plan::nothing())),
                }
            }
        });
        let work: Vec<SegmentWork> = works.collect::<Result<_, PrepareError>>()?;
        Ok(Slot { work: work.into(), run: None })
    });
    let slots = slots.collect::<Result<Vec<_>, PrepareError>>()?;
    Ok((plan, slots))
}
