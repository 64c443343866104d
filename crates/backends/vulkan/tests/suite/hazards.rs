//! The validation layer is listened to: a hazard that is planted is told.

use std::sync::{Mutex, PoisonError};

use warpweft_core_types::{
    Arg, BufferDesc, BufferView, CopyRegion, FillRegion, GraphNode, KernelContract, Launch, Op, OwnedOp,
    Param, PreparedGraph,
};
use warpweft_vulkan::VulkanConfig;

use crate::support::{Need, Test, Verdict, kernel, memory, open, run};

pub(crate) const TESTS: &[Test] = &[
    Test { name: "hazards::two_copies_without_an_edge_are_told", body: two_copies_without_an_edge_are_told },
    Test {
        name: "hazards::two_kernels_without_an_edge_are_told",
        body: two_kernels_without_an_edge_are_told,
    },
    Test { name: "hazards::edges_are_enough", body: edges_are_enough },
];

const INCREMENT: &str = "
@group(0) @binding(0) var<storage, read_write> to: array<u32>;
@group(0) @binding(1) var<storage, read> source: array<u32>;
@compute @workgroup_size(1) fn increment() { to[0] = source[0] + 1u; }";

fn increment(
    device: &std::sync::Arc<dyn warpweft_core_types::Device>,
    from: &BufferView,
    to: &BufferView,
) -> Result<OwnedOp, Need> {
    let params = [Param::write(4).aligned(4), Param::read(4).aligned(4)];
    let kernel = kernel(device, &KernelContract::new("increment", params), INCREMENT)?;
    let args = [Arg::Buffer(to), Arg::Buffer(from)];
    Ok(OwnedOp::from(&Op::Launch(Launch::new(&kernel, [1, 1, 1], &args)?)))
}

/// What is said about a graph of two nodes, with or without an edge between them.
fn said(
    after: &[usize],
    nodes: impl FnOnce(
        &std::sync::Arc<dyn warpweft_core_types::Device>,
        [&BufferView; 3],
    ) -> Result<[OwnedOp; 2], Need>,
) -> Result<Vec<String>, Need> {
    // One instance with the layer at a time.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let (backend, device) = open(&VulkanConfig::default().with_validation())?;
    let messages = backend.messages();
    drop(backend);
    let buffers = [(); 3].map(|()| memory(&device, BufferDesc::device(256)));
    let [a, b, c] = buffers;
    let (a, b, c) = (a?, b?, c?);
    let [first, second] = nodes(&device, [&a, &b, &c])?;
    let nodes = [GraphNode::new(first, &[]), GraphNode::new(second, after)];
    let graph = PreparedGraph::new(device.as_ref(), &nodes)?;
    run(&device, Op::Replay(&graph))?;
    drop((graph, nodes, a, b, c, device));
    while !messages.are_complete() {
        std::thread::yield_now();
    }
    Ok(messages.all())
}

fn two_copies_without_an_edge_are_told() -> Verdict {
    let messages = said(&[], |_, [a, b, _]| {
        let fill = OwnedOp::from(&Op::Fill(FillRegion::bytes(a, 1)));
        Ok([fill, OwnedOp::from(&Op::Copy(CopyRegion::new(a, b)?))])
    })?;
    assert!(messages.iter().any(|message| message.contains("SYNC-HAZARD")), "{messages:?}");
    Ok(())
}

/// The layer sees what shaders write because their access chains are flat.
fn two_kernels_without_an_edge_are_told() -> Verdict {
    let messages = said(&[], |device, [a, b, c]| Ok([increment(device, a, b)?, increment(device, b, c)?]))?;
    assert!(messages.iter().any(|message| message.contains("SYNC-HAZARD")), "{messages:?}");
    Ok(())
}

fn edges_are_enough() -> Verdict {
    let messages = said(&[0], |device, [a, b, c]| Ok([increment(device, a, b)?, increment(device, b, c)?]))?;
    assert!(messages.is_empty(), "{messages:?}");
    Ok(())
}
