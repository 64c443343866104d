//! Copies that no device can do alone: over memory of the host.

use warpweft_core_types::{AllocError, BufferDesc, BufferView, CopyRegion, HostMemory, RangeError};

use crate::{
    domain::Domain,
    error::RecordError,
    graph::{Graph, NodePlace, range_error},
    node::{NodeDesc, NodeId},
    task::HostTask,
    usage::Usage,
};

/// One of the nodes that such a copy is made of.
#[derive(Debug)]
pub(crate) struct Hop {
    src: BufferView,
    dst: BufferView,
    /// The device that copies, by its position; none for a processor of the host.
    device: Option<u32>,
}

impl Hop {
    pub(crate) fn record(&self, graph: &mut Graph, desc: &NodeDesc<'_>) -> Result<NodeId, RecordError> {
        let Some(device) = self.device else {
            let task = HostTask::fallible(|context| Ok(context.copy(0, 1)?));
            let operands = [(self.src.clone(), Usage::Read), (self.dst.clone(), Usage::Write)];
            let task = NodeDesc::task(&task, &operands).named(desc.label()).beside(desc.beside);
            return graph.push(&task, NodePlace::Host);
        };
        let copy =
            NodeDesc::copy(&self.src, &self.dst).map_err(|source| range_error(desc.label(), source))?;
        let copy = copy.named(desc.label()).beside(desc.beside);
        graph.push(&copy, NodePlace::Device { device, lane: desc.lane })
    }
}

/// The hops of a copy: out of the source's device, if the host does not reach its memory; then in by the
/// destination's device, which imports the host's memory where it can, or else by way of a processor.
pub(crate) fn hops(domain: &Domain, name: &str, region: CopyRegion<'_>) -> Result<Vec<Hop>, RecordError> {
    let (src, dst) = (region.src(), region.dst());
    let position = |view: &BufferView| domain.position(view.device());
    let unknown =
        |view: &BufferView| RecordError::UnknownDevice { node: name.to_owned(), device: view.device() };
    let reader = position(src).ok_or_else(|| unknown(src))?;
    let writer = position(dst).ok_or_else(|| unknown(dst))?;
    let staging = |source| RecordError::Staging { node: name.to_owned(), source: Box::new(source) };
    let mut hops = Vec::new();
    let near = if src.buffer().kind().is_host_visible() {
        src.clone()
    } else {
        let near = allocate(domain, reader, src.size()).map_err(staging)?;
        hops.push(Hop { src: src.clone(), dst: near.clone(), device: Some(reader) });
        near
    };
    if let Some(imported) = import(domain, writer, &near) {
        let imported = imported.map_err(|source| range_error(name, source))?;
        hops.push(Hop { src: imported, dst: dst.clone(), device: Some(writer) });
    } else if dst.buffer().kind().is_host_visible() {
        hops.push(Hop { src: near, dst: dst.clone(), device: None });
    } else {
        let far = allocate(domain, writer, dst.size()).map_err(staging)?;
        hops.push(Hop { src: near, dst: far.clone(), device: None });
        hops.push(Hop { src: far, dst: dst.clone(), device: Some(writer) });
    }
    domain.state().counts.staged_bytes += src.size();
    Ok(hops)
}

fn allocate(domain: &Domain, device: u32, size: u64) -> Result<BufferView, AllocError> {
    let device = &domain.devices[device as usize];
    domain.check_budget(device.id, size)?;
    Ok(BufferView::whole(device.device.allocate(&BufferDesc::host_visible(size))?))
}

/// The same bytes as another device sees them, if it can.
fn import(domain: &Domain, device: u32, view: &BufferView) -> Option<Result<BufferView, RangeError>> {
    let family = domain.devices[device as usize].device.host_import()?;
    let memory = HostMemory::of_buffer(view.buffer().clone())?;
    let buffer = family.import(memory).ok()?;
    Some(BufferView::new(buffer, view.range()))
}
