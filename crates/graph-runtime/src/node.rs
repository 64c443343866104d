//! What a node does, as it is recorded.

use std::{fmt, sync::Arc};

use serde::Serialize;
use smallvec::SmallVec;
use warpweft_core_types::{
    BufferView, CapturedWork, CopyRegion, DeviceId, FillRegion, GraphOp, Launch, Op, RangeError, SubmitError,
};

use crate::{
    error::RecordError,
    graph::{Node, NodePlace},
    task::{HostTask, TaskContext, TaskError},
    usage::Usage,
};

/// A node's position in its graph, from 0, in the order of recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// The position.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A node to record, or work to run at once: what to do, and what it is called.
#[derive(Debug, Clone)]
#[must_use = "a description does nothing until it is recorded or run"]
pub struct NodeDesc<'a> {
    pub(crate) work: WorkDesc<'a>,
    pub(crate) name: Option<&'a str>,
    pub(crate) device: Option<DeviceId>,
    pub(crate) lane: u32,
    pub(crate) usages: SmallVec<[(usize, Usage); 2]>,
    pub(crate) beside: &'a [(BufferView, Usage)],
}

#[derive(Debug, Clone)]
pub(crate) enum WorkDesc<'a> {
    Op(Op<'a>),
    Captured(&'a Arc<dyn CapturedWork>),
    Node(&'a GraphOp),
    Task(&'a HostTask, &'a [(BufferView, Usage)]),
}

impl<'a> NodeDesc<'a> {
    fn new(work: WorkDesc<'a>) -> Self {
        Self { work, name: None, device: None, lane: 0, usages: SmallVec::new(), beside: &[] }
    }

    /// Runs a kernel, on the kernel's device. What it does to its buffers stands in its contract.
    pub fn launch(launch: Launch<'a>) -> Self {
        Self::new(WorkDesc::Op(Op::Launch(launch)))
    }

    /// Copies all of `src` to all of `dst`, wherever they are.
    ///
    /// # Errors
    ///
    /// [`RangeError::LengthMismatch`] or [`RangeError::Overlap`].
    pub fn copy(src: &'a BufferView, dst: &'a BufferView) -> Result<Self, RangeError> {
        Ok(Self::new(WorkDesc::Op(Op::Copy(CopyRegion::new(src, dst)?))))
    }

    /// Repeats a pattern.
    pub fn fill(region: FillRegion<'a>) -> Self {
        Self::new(WorkDesc::Op(Op::Fill(region)))
    }

    /// Carries out an operation of the seam, such as a collective. A replay cannot be a node.
    pub fn op(op: Op<'a>) -> Self {
        Self::new(WorkDesc::Op(op))
    }

    /// Work of another library, see [`Interop::capture`](warpweft_core_types::Interop::capture).
    pub fn captured(work: &'a Arc<dyn CapturedWork>) -> Self {
        Self::new(WorkDesc::Captured(work))
    }

    /// What another crate makes for graphs of devices, such as the nodes of a collective.
    ///
    /// Calls of one communicator are made in one order on all ranks, also where they share no bytes: let all of them use
    /// one buffer [beside](NodeDesc::beside) their own.
    pub fn node(op: &'a GraphOp) -> Self {
        Self::new(WorkDesc::Node(op))
    }

    /// Runs a function on a processor of the host, which uses host-visible memory so.
    pub fn task(task: &'a HostTask, operands: &'a [(BufferView, Usage)]) -> Self {
        Self::new(WorkDesc::Task(task, operands))
    }

    /// The same under a name, for errors, pictures and traces; without one it goes by its kernel or its kind.
    pub const fn named(mut self, name: &'a str) -> Self {
        self.name = Some(name);
        self
    }

    /// The same, carried out by this device. Kernels and captured work run where they were made, tasks on the host, and
    /// copies that no one device can do by way of the host, whatever is said here.
    pub const fn on(mut self, device: DeviceId) -> Self {
        self.device = Some(device);
        self
    }

    /// The same in a line of its own on its device: nodes of different lanes go to the device in different
    /// submissions. Bytes are ordered across lanes as everywhere. Lane 0 is where all nodes are that say nothing;
    /// lanes beyond [`RuntimeConfig::lanes`](crate::RuntimeConfig::lanes) share queues, and tasks have none.
    pub const fn in_lane(mut self, lane: u32) -> Self {
        self.lane = lane;
        self
    }

    /// The same, where buffer `operand` (counted among buffers alone, from 0) is used in a way that the operation by
    /// itself does not say: [`Usage::Reduce`] for a kernel that adds by atomic operations, [`Usage::Commutative`] for one
    /// whose turn does not matter.
    pub fn using(mut self, operand: usize, usage: Usage) -> Self {
        self.usages.push((operand, usage));
        self
    }

    /// The same, which uses these bytes too, though its operation does not say so: memory that a kernel reaches by
    /// pointers it finds in other memory, or a buffer that stands for an order and holds nothing. They are not counted
    /// among the operands of [`NodeDesc::using`].
    pub const fn beside(mut self, uses: &'a [(BufferView, Usage)]) -> Self {
        self.beside = uses;
        self
    }

    pub(crate) fn label(&self) -> &'a str {
        match (&self.name, &self.work) {
            (Some(name), _) => name,
            (None, WorkDesc::Op(Op::Launch(launch))) => &launch.kernel().contract().name,
            (None, WorkDesc::Op(op)) => op.name(),
            (None, WorkDesc::Captured(_)) => "captured work",
            (None, WorkDesc::Node(GraphOp::Op(op))) => op.label(),
            (None, WorkDesc::Node(op)) => op.name(),
            (None, WorkDesc::Task(..)) => "task",
        }
    }
}

/// What a recorded node does.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    /// Work of a device, in the form that graphs of devices have.
    Device(Arc<GraphOp>),
    Task(OwnedTask),
}

/// A task with its views.
#[derive(Debug, Clone)]
pub(crate) struct OwnedTask {
    pub(crate) task: HostTask,
    pub(crate) operands: Arc<[(BufferView, Usage)]>,
}

impl OwnedTask {
    pub(crate) fn nothing() -> Self {
        Self { task: HostTask::new(|_| {}).brief(), operands: Arc::default() }
    }

    pub(crate) fn call(&self) -> Result<(), TaskError> {
        self.task.call(&TaskContext::new(&self.operands))
    }
}

impl Work {
    /// What it is called unless it is said otherwise.
    pub(crate) fn label(&self) -> &str {
        match self {
            Self::Device(op) => match op.as_ref() {
                GraphOp::Op(op) => op.label(),
                op => op.name(),
            },
            Self::Task(_) => "task",
        }
    }

    /// What it is, in a word or two.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Device(op) => op.name(),
            Self::Task(_) => "task",
        }
    }

    /// The same with other views in the place of some; nothing if it uses none of those.
    fn moved(
        &self,
        name: &str,
        moved: &impl Fn(&BufferView) -> Option<BufferView>,
    ) -> Result<Option<Self>, RecordError> {
        let refused = |source| RecordError::Operand { node: name.to_owned(), source: Box::new(source) };
        match self {
            Self::Device(op) => match op.as_ref() {
                GraphOp::Op(op) => {
                    let op = op.with_views(moved).map_err(refused)?;
                    Ok(op.map(|op| Self::Device(Arc::new(GraphOp::Op(op)))))
                }
                GraphOp::Captured(work) if work.accesses().iter().any(|(view, _)| moved(view).is_some()) => {
                    let reason = "captured work keeps its operands: capture it again".to_owned();
                    Err(refused(SubmitError::Invalid { reason }))
                }
                _ => Ok(None),
            },
            Self::Task(task) => {
                if task.operands.iter().all(|(view, _)| moved(view).is_none()) {
                    return Ok(None);
                }
                let operand = |(view, usage): &(BufferView, Usage)| {
                    (moved(view).unwrap_or_else(|| view.clone()), *usage)
                };
                let operands = task.operands.iter().map(operand).collect();
                Ok(Some(Self::Task(OwnedTask { task: task.task.clone(), operands })))
            }
        }
    }

    /// Everything it touches, in the order of its operands.
    pub(crate) fn for_each_operand<'a>(&'a self, visit: &mut dyn FnMut(&'a BufferView, Usage)) {
        match self {
            Self::Device(op) => op.for_each_access(&mut |view, access| visit(view, access.into())),
            Self::Task(task) => task.operands.iter().for_each(|(view, usage)| visit(view, *usage)),
        }
    }
}

/// Keeps what a description borrows.
pub(crate) fn own(desc: &NodeDesc<'_>, place: NodePlace) -> Node {
    Node {
        work: own_work(&desc.work),
        name: desc.name.map(Into::into),
        place,
        uses: 0..0,
        beside: desc.beside.into(),
        said: desc.usages[..].into(),
    }
}

impl Node {
    /// What is in its place once it is described so: at the same place under the same name, and with what was said of
    /// usages, and beside its operands, unless something else is said.
    pub(crate) fn described(&self, desc: &NodeDesc<'_>) -> Self {
        let new = own(desc, self.place);
        Self {
            work: new.work,
            beside: if new.beside.is_empty() { self.beside.clone() } else { new.beside },
            said: if new.said.is_empty() { self.said.clone() } else { new.said },
            ..self.clone()
        }
    }

    /// The same with other views in the place of some; nothing if it uses none of those.
    pub(crate) fn moved(
        &self,
        moved: &impl Fn(&BufferView) -> Option<BufferView>,
    ) -> Result<Option<Self>, RecordError> {
        let work = self.work.moved(self.label(), moved)?;
        if work.is_none() && self.beside.iter().all(|(view, _)| moved(view).is_none()) {
            return Ok(None);
        }
        let beside =
            |(view, usage): &(BufferView, Usage)| (moved(view).unwrap_or_else(|| view.clone()), *usage);
        let work = work.unwrap_or_else(|| self.work.clone());
        Ok(Some(Self { work, beside: self.beside.iter().map(beside).collect(), ..self.clone() }))
    }
}

pub(crate) fn own_work(work: &WorkDesc<'_>) -> Work {
    match work {
        WorkDesc::Op(op) => Work::Device(Arc::new(GraphOp::from(op))),
        WorkDesc::Captured(work) => Work::Device(Arc::new(GraphOp::Captured(Arc::clone(work)))),
        WorkDesc::Node(op) => Work::Device(Arc::new((*op).clone())),
        WorkDesc::Task(task, operands) => {
            Work::Task(OwnedTask { task: (*task).clone(), operands: (*operands).into() })
        }
    }
}

/// What a node does to an operand: what the operation says, or what it was said to do instead.
pub(crate) fn usage_of(
    usages: &[(usize, Usage)],
    operand: usize,
    usage: Usage,
    name: &str,
) -> Result<Usage, RecordError> {
    let Some(&(_, asked)) = usages.iter().find(|(index, _)| *index == operand) else { return Ok(usage) };
    // Nobody becomes a reader who writes, or the other way round.
    if usage.writes() == asked.writes() {
        return Ok(asked);
    }
    Err(RecordError::Usage { node: name.to_owned(), operand, actual: Some(usage), asked })
}

/// Whether everything that was said of usages is about one of a node's operands.
pub(crate) fn check_said(node: &Node, operands: usize) -> Result<(), RecordError> {
    match node.said.iter().find(|(asked, _)| *asked >= operands) {
        Some(&(operand, asked)) => {
            let node = node.label().to_owned();
            Err(RecordError::Usage { node, operand, actual: None, asked })
        }
        None => Ok(()),
    }
}
