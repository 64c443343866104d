//! Recording a description on open devices.

use std::{collections::HashMap, sync::Arc};

use anyhow::Context as _;
use warpweft::{
    Arg, BufferView, Device, DeviceId, FillRegion, Kernel, KernelCode, Launch,
    graph_runtime::{
        Buffer, Graph, HostTask, MemoryPlacement, NodeDesc, Runtime, RuntimeConfig, TaskError, Usage,
    },
};

use super::{
    check::{Description, Node, Span},
    file::{Placement, Work},
    numbered,
};
use crate::kernels;

/// A graph that has been recorded, and what it uses.
pub(crate) struct Recorded {
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) graph: Graph,
}

/// Records a description. Its device numbers count on from the first again where there are fewer devices.
pub(crate) fn record(description: &Description, devices: &[Arc<dyn Device>]) -> anyhow::Result<Recorded> {
    let runtime = Runtime::new(devices.iter().cloned(), RuntimeConfig::default())?;
    let mut recorder = Recorder { devices, kernels: HashMap::new() };
    let mut buffers = Vec::with_capacity(description.buffers.len());
    let mut graph = runtime.graph();
    for buffer in &description.buffers {
        let memory = runtime.allocate(&recorder.placement(&buffer.placement), buffer.size);
        let memory = memory.with_context(|| format!("buffer {:?} cannot be had", buffer.name))?;
        graph.name_buffer(memory.view(), &buffer.name)?;
        buffers.push(memory);
    }
    for (number, node) in description.nodes.iter().enumerate() {
        let recorded = recorder.record(&mut graph, &buffers, node);
        recorded.with_context(|| format!("nodes[{number}] ({:?})", node.name))?;
    }
    Ok(Recorded { buffers, graph })
}

struct Recorder<'a> {
    devices: &'a [Arc<dyn Device>],
    kernels: HashMap<(DeviceId, &'static str), Arc<dyn Kernel>>,
}

impl Recorder<'_> {
    fn id(&self, number: u32) -> DeviceId {
        numbered(self.devices, number).info().id
    }

    fn placement(&self, placement: &Placement) -> MemoryPlacement {
        match placement {
            Placement::Device(device) => MemoryPlacement::Device(self.id(*device)),
            Placement::HostVisible(device) => MemoryPlacement::HostVisible(self.id(*device)),
            Placement::Shared(devices) => {
                let mut ids: Vec<DeviceId> = Vec::new();
                for device in devices {
                    let id = self.id(*device);
                    if !ids.contains(&id) {
                        ids.push(id);
                    }
                }
                MemoryPlacement::Shared(ids)
            }
        }
    }

    fn record(&mut self, graph: &mut Graph, buffers: &[Buffer], node: &Node) -> anyhow::Result<()> {
        let device = node.device.map(|device| self.id(device));
        // Shared memory is used as the device that works on it sees it.
        let view = |span: &Span| -> anyhow::Result<BufferView> {
            let buffer = &buffers[span.buffer];
            let whole = device.and_then(|device| buffer.on(device)).unwrap_or_else(|| buffer.view());
            Ok(whole.slice(span.range.clone())?)
        };
        match &node.work {
            Work::Fill { dst, byte } => {
                let dst = view(dst)?;
                graph.add(placed(NodeDesc::fill(FillRegion::bytes(&dst, *byte)), node, device))?;
            }
            Work::Copy { src, dst } => {
                let (src, dst) = (view(src)?, view(dst)?);
                graph.add(placed(NodeDesc::copy(&src, &dst)?, node, device))?;
            }
            Work::Scale { dst, factor } => {
                let words = (dst.size() / 4).to_le_bytes();
                let (dst, factor) = (view(dst)?, factor.to_le_bytes());
                let args = [Arg::Buffer(&dst), Arg::Scalar(&words), Arg::Scalar(&factor)];
                self.launch(graph, node, ("scale", kernels::scale), &args)?;
            }
            Work::Add { src, dst } | Work::Stencil { src, dst } => {
                let words = (dst.size() / 4).to_le_bytes();
                let (src, dst) = (view(src)?, view(dst)?);
                let args = [Arg::Buffer(&dst), Arg::Buffer(&src), Arg::Scalar(&words)];
                let kernel: (_, fn() -> KernelCode) = match node.work {
                    Work::Add { .. } => ("add", kernels::add),
                    _ => ("stencil", kernels::stencil),
                };
                self.launch(graph, node, kernel, &args)?;
            }
            Work::Sum { src, dst } | Work::Reverse { src, dst } => {
                let operands = [(view(src)?, Usage::Read), (view(dst)?, Usage::Write)];
                let task = match node.work {
                    Work::Sum { .. } => HostTask::fallible(|context| through(context, sum)),
                    _ => HostTask::fallible(|context| through(context, reverse)),
                };
                graph.add(NodeDesc::task(&task, &operands).named(&node.name))?;
            }
        }
        Ok(())
    }

    fn launch(
        &mut self,
        graph: &mut Graph,
        node: &Node,
        (name, code): (&'static str, fn() -> KernelCode),
        args: &[Arg<'_>],
    ) -> anyhow::Result<()> {
        let device = numbered(self.devices, node.device.unwrap_or(0));
        let kernel = match self.kernels.entry((device.info().id, name)) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(free) => {
                free.insert(device.load(&code())?.kernel(name)?)
            }
        };
        let (_, dst) = node.work.operands();
        let groups = kernels::workgroups(dst.size())?;
        let launch = Launch::new(kernel, [groups, 1, 1], args)?;
        graph.add(NodeDesc::launch(launch).named(&node.name).in_lane(node.lane))?;
        Ok(())
    }
}

/// The same with a node's name, lane and device.
fn placed<'a>(desc: NodeDesc<'a>, node: &'a Node, device: Option<DeviceId>) -> NodeDesc<'a> {
    let desc = desc.named(&node.name).in_lane(node.lane);
    match device {
        Some(device) => desc.on(device),
        None => desc,
    }
}

/// Has a task read its first view and write what comes of it to its second.
fn through(
    context: &warpweft::graph_runtime::TaskContext<'_>,
    work: fn(&[u8]) -> Vec<u8>,
) -> Result<(), TaskError> {
    Ok(context.write(1, 0, &work(&context.bytes(0)?))?)
}

/// The sum of all words.
pub(crate) fn sum(bytes: &[u8]) -> Vec<u8> {
    let words = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
    words.fold(0, u32::wrapping_add).to_le_bytes().to_vec()
}

/// The words, last first.
pub(crate) fn reverse(bytes: &[u8]) -> Vec<u8> {
    bytes.as_chunks::<4>().0.iter().rev().flatten().copied().collect()
}
