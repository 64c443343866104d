//! Single operations: a plan and a run of one node each, which are used again once nobody has them any more.
//!
//! A program that runs operation after operation makes a plan and a run for every one of them, and each would be ten
//! allocations. What a run leaves stays with the thread that let go of it last, emptied of everything that programs own.

use std::{cell::RefCell, mem, sync::Arc};

use warpweft_core_types::{BufferView, GraphOp, Op, OpRoom, OwnedOp};

use crate::{
    completion::Completion,
    domain::{Domain, State},
    error::{RecordError, RunError},
    graph::{Node, NodePlace, Recorded},
    infer::Use,
    node::{NodeDesc, Work, WorkDesc, check_said, own_work, usage_of},
    plan::{Plan, PlannedSegment, SegmentWork, SlotWork, Uses},
    run::Run,
    usage::Usage,
};

/// Spares that a thread keeps: as many as are under way at once, unless a runtime is made otherwise.
const KEPT: usize = 256;

thread_local! {
    static SPARES: RefCell<Spares> = const { RefCell::new(Spares { runs: Vec::new(), rooms: Vec::new() }) };
}

/// What ended runs have left.
#[derive(Debug)]
struct Spares {
    /// Runs of one node that nobody has, which does nothing.
    runs: Vec<Arc<Run>>,
    /// Room for launches of many arguments.
    rooms: Vec<OpRoom>,
}

/// What is described anew of a run.
struct Parts<'a> {
    work: &'a mut SlotWork,
    has_collective: &'a mut bool,
    recorded: &'a mut Recorded,
    segment: &'a mut PlannedSegment,
}

impl Domain {
    /// Runs one operation, behind everything before it that uses the same bytes.
    pub(crate) fn run_single(
        self: &Arc<Self>,
        desc: &NodeDesc<'_>,
        place: NodePlace,
    ) -> Result<Completion, RunError> {
        let mut run = described(desc, place);
        let mut state = self.state();
        let submitted = self.submit_single(&mut state, desc, &mut run);
        drop(state);
        // What was refused is let go of like what has ended.
        let completion = Completion::new(self, run);
        submitted.map(|()| completion)
    }

    fn submit_single(
        &self,
        state: &mut State,
        desc: &NodeDesc<'_>,
        run: &mut Arc<Run>,
    ) -> Result<(), RunError> {
        let Parts { recorded, segment, .. } = Parts::of(run);
        self.note_uses_in(state, desc, recorded)?;
        segment.uses.extend(recorded.bytes_of(0));
        self.admit_counted(state, &run.plan)?;
        self.hand_over_all(state, run)
    }

    /// Notes what the only node of a recording uses.
    fn note_uses_in(
        &self,
        state: &mut State,
        desc: &NodeDesc<'_>,
        recorded: &mut Recorded,
    ) -> Result<(), RecordError> {
        let Recorded { nodes, uses, global } = recorded;
        let node = &mut nodes[0];
        let mut note = |view: &BufferView, usage: Usage| {
            let bytes = self.bytes_in(state, view, desc.label())?;
            let known = global.iter().position(|known| *known == bytes.memory);
            let memory = known.unwrap_or_else(|| {
                global.push(bytes.memory);
                global.len() - 1
            });
            let memory = u32::try_from(memory).unwrap_or(u32::MAX);
            uses.push(Use { memory, range: bytes.range, usage });
            Ok(())
        };
        let (mut outcome, mut operand) = (Ok(()), 0);
        node.work.for_each_operand(&mut |view, usage| {
            if outcome.is_ok() {
                let usage = usage_of(&desc.usages, operand, usage, desc.label());
                outcome = usage.and_then(|usage| note(view, usage));
            }
            operand += 1;
        });
        outcome?;
        check_said(node, operand)?;
        node.beside.iter().try_for_each(|(view, usage)| note(view, *usage))?;
        node.uses = 0..u32::try_from(uses.len()).unwrap_or(u32::MAX);
        Ok(())
    }
}

/// A run of one operation, of which nobody has looked yet what it uses.
fn described(desc: &NodeDesc<'_>, place: NodePlace) -> Arc<Run> {
    let mut run = take(|spares| spares.runs.pop()).unwrap_or_else(|| Arc::new(nothing()));
    let Parts { work, recorded, segment, has_collective } = Parts::of(&mut run);
    let node = &mut recorded.nodes[0];
    let known = if let Work::Device(known) = &mut node.work { Arc::get_mut(known) } else { None };
    match (known, &desc.work) {
        (Some(known), WorkDesc::Op(op)) => {
            let room = if OpRoom::is_needed(op) { take(|spares| spares.rooms.pop()) } else { None };
            *known = GraphOp::Op(OwnedOp::within(op, room.unwrap_or_default()));
        }
        _ => node.work = own_work(&desc.work),
    }
    if let Work::Task(task) = &node.work {
        *work = Arc::from([SegmentWork::Task(task.clone())]);
    }
    if node.name.as_deref() != desc.name {
        node.name = desc.name.map(Into::into);
    }
    if node.said[..] != desc.usages[..] {
        node.said = desc.usages[..].into();
    }
    if !desc.beside.is_empty() {
        node.beside = desc.beside.into();
    }
    node.place = place;
    segment.place = place;
    *has_collective = matches!(desc.work, WorkDesc::Op(Op::Collective(_)));
    run
}

/// Lets go of a run; of a single operation that nobody else has, the rest is kept. The caller holds no lock.
pub(crate) fn let_go(mut run: Arc<Run>) {
    if !matches!(run.work[..], [SegmentWork::Single]) {
        return;
    }
    let Some(own) = Arc::get_mut(&mut run) else { return };
    own.forget();
    let Some(room) = Parts::of_own(own).and_then(Parts::emptied) else { return };
    // Where the thread is ending there is nobody to keep it for.
    let _kept = SPARES.try_with(|spares| {
        let Spares { runs, rooms } = &mut *spares.borrow_mut();
        if room.is_large() && rooms.len() < KEPT {
            rooms.push(room);
        }
        if runs.len() < KEPT {
            runs.push(run);
        }
    });
}

fn take<T>(what: impl FnOnce(&mut Spares) -> Option<T>) -> Option<T> {
    SPARES.try_with(|spares| what(&mut spares.borrow_mut())).ok().flatten()
}

/// A run of one node that does nothing.
fn nothing() -> Run {
    let place = NodePlace::Host;
    let node = Node {
        work: Work::Device(Arc::new(GraphOp::Join)),
        name: None,
        place,
        uses: 0..0,
        beside: Box::default(),
        said: Box::default(),
    };
    let recorded = Recorded { nodes: vec![node], ..Recorded::default() };
    let segment =
        PlannedSegment { place, after: Vec::new(), uses: Uses::new(), nodes: [0].into_iter().collect() };
    let plan = Plan {
        recorded: Arc::new(recorded),
        segments: vec![segment],
        has_collective: false,
        after: Vec::new(),
    };
    Run::new(0, Arc::new(plan), Arc::from([SegmentWork::Single]))
}

impl<'a> Parts<'a> {
    /// Those of a run that was taken just now.
    fn of(run: &'a mut Arc<Run>) -> Self {
        let own = Arc::get_mut(run).and_then(Parts::of_own);
        own.expect("who takes a run is the only one who has it, and its plan")
    }

    fn of_own(run: &'a mut Run) -> Option<Self> {
        let Plan { recorded, segments, has_collective, .. } = Arc::get_mut(&mut run.plan)?;
        Some(Parts {
            work: &mut run.work,
            has_collective,
            recorded: Arc::get_mut(recorded)?,
            segment: segments.first_mut()?,
        })
    }

    /// Lets go of everything that is not the runtime's; none if somebody else has the operation.
    fn emptied(self) -> Option<OpRoom> {
        let Recorded { nodes, uses, global } = self.recorded;
        uses.clear();
        global.clear();
        self.segment.uses.clear();
        let node = nodes.first_mut()?;
        node.uses = 0..0;
        if !node.beside.is_empty() {
            node.beside = Box::default();
        }
        let Work::Device(work) = &mut node.work else { return None };
        match mem::replace(Arc::get_mut(work)?, GraphOp::Join) {
            GraphOp::Op(op) => Some(op.into_room()),
            _ => Some(OpRoom::default()),
        }
    }
}
