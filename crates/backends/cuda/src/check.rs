//! What is refused before a queue takes anything of a submission.

use std::sync::Arc;

use warpweft_core_types::{Access, Buffer, BufferView, Launch, Op, SubmitError};

use crate::{
    communicator, context::Context, graph::CudaGraph, memory::buffer_of, module::CudaKernel, peer::PeerTable,
};

/// Checks that a queue can carry out an operation.
pub(crate) fn check_op(context: &Context, peers: &PeerTable, op: &Op<'_>) -> Result<(), SubmitError> {
    let device = context.device;
    match op {
        Op::Launch(launch) if launch.kernel().contract().resident => {
            return Err(SubmitError::Sliced { kernel: launch.kernel().contract().name.clone() });
        }
        Op::Launch(launch) => return check_launch(context, peers, launch),
        Op::Replay(graph) => {
            let ours = CudaGraph::of(graph).is_some_and(|graph| graph.belongs_to(context));
            let owner = graph.graph().device();
            if !ours {
                return Err(SubmitError::Foreign { what: "graph", owner, device });
            }
            // Its nodes were checked when they were set; a communicator of one may have ended since.
            return communicator::check_live(op);
        }
        Op::Collective(group) => communicator::check(context, group)?,
        Op::Copy(_) | Op::Fill(_) | Op::Timestamp(_) => {}
        _ => return Err(SubmitError::Unsupported { device, what: op.name() }),
    }
    let mut result = Ok(());
    op.for_each_access(|view, access| {
        if result.is_ok() {
            result = check_view(context, peers, view, access);
        }
    });
    result
}

/// Checks that a launch's kernel and operands are of CUDA devices, within reach of this one.
pub(crate) fn check_launch(
    context: &Context,
    peers: &PeerTable,
    launch: &Launch<'_>,
) -> Result<(), SubmitError> {
    let kernel = launch.kernel();
    let ours = CudaKernel::of(kernel).is_some_and(|kernel| kernel.belongs_to(context));
    if !ours {
        let (owner, device) = (kernel.device(), context.device);
        return Err(SubmitError::Foreign { what: "kernel", owner, device });
    }
    launch.buffers().try_for_each(|(view, access)| check_view(context, peers, view, access))
}

fn check_view(
    context: &Context,
    peers: &PeerTable,
    view: &BufferView,
    access: Access,
) -> Result<(), SubmitError> {
    let (owner, device) = (view.device(), context.device);
    // Memory of another driver is nothing to this one.
    let known = buffer_of(view).filter(|buffer| Arc::ptr_eq(&buffer.context().driver, &context.driver));
    let Some(buffer) = known else {
        return Err(SubmitError::Foreign { what: "buffer", owner, device });
    };
    if std::ptr::eq(Arc::as_ptr(buffer.context()), context) || buffer.kind().is_host_visible() {
        return Ok(());
    }
    // Another context of the same device is another owner, whose memory nobody has opened to this one. What another
    // library allocated in a pool of its own was not opened by us either.
    if owner == device || !buffer.is_open_to_peers() {
        return Err(SubmitError::Foreign { what: "buffer", owner, device });
    }
    // Both devices are open, so they were introduced to each other.
    if peers.reaches(device.ordinal, owner.ordinal) {
        return Ok(());
    }
    match access {
        Access::Read => Err(SubmitError::NoLink { from: owner, to: device }),
        Access::Write | Access::ReadWrite | Access::Accumulate => {
            Err(SubmitError::NoLink { from: device, to: owner })
        }
    }
}
