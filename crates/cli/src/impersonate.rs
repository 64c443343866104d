//! Host devices that stand in for those of another machine.

use warpweft::{
    LinkClass,
    host::{HostBackend, HostBuilder, HostDeviceConfig, LinkSpec, Place},
    topology::{Edge, Node, NodeId, NodeKind, Topology},
};

use crate::output::WrongCall;

/// Host devices with the names, places and links of a topology's devices.
///
/// A link is what joins two devices directly, or through nothing but switches. Every device also reaches host
/// memory, as slowly as the file says.
pub(crate) fn builder(topology: &Topology) -> Result<HostBuilder, WrongCall> {
    let devices: Vec<&Node> = topology.devices().collect();
    if devices.is_empty() {
        return Err(WrongCall("the file has no devices to impersonate".to_owned()));
    }
    let mut builder = HostBackend::builder();
    for device in &devices {
        builder = builder.device(config(device));
    }
    for (from, place) in devices.iter().zip((0..).map(Place::Device)) {
        for (to, other) in devices.iter().zip((0..).map(Place::Device)) {
            if let Some(spec) = link(topology, from.id, to.id) {
                builder = builder.link(place, other, spec);
            }
        }
        let (up, down) = host_links(topology, from.id);
        builder = builder.link(place, Place::Host, up).link(Place::Host, place, down);
    }
    Ok(builder)
}

fn config(node: &Node) -> HostDeviceConfig {
    let name = match &node.model {
        Some(model) => format!("{} ({model})", node.name),
        None => node.name.clone(),
    };
    let kind = match node.kind {
        NodeKind::Device { kind, .. } => kind,
        _ => HostDeviceConfig::default().kind,
    };
    HostDeviceConfig {
        name,
        kind,
        numa_node: node.place.numa_node,
        pci: node.place.pci,
        ..HostDeviceConfig::default()
    }
}

fn link(topology: &Topology, from: NodeId, to: NodeId) -> Option<LinkSpec> {
    if from == to {
        return None;
    }
    match topology.edge(from, to) {
        Some(edge) if edge.veto.is_none() => Some(spec(edge)),
        Some(_) => None,
        None => through_switches(topology, from, to),
    }
}

fn spec(edge: &Edge) -> LinkSpec {
    LinkSpec {
        class: edge.class.value,
        path: edge.path.map(|path| path.value),
        link_count: edge.link_count.map_or(1, |count| count.value),
        bandwidth: Some(edge.bandwidth().value),
        latency: Some(edge.latency().value),
    }
}

fn through_switches(topology: &Topology, from: NodeId, to: NodeId) -> Option<LinkSpec> {
    let path = topology.best_path(from, to, warpweft::transfer::Route::PLANNED).ok()?;
    let [_, between @ .., _] = path.nodes.as_slice() else { return None };
    let is_switch = |id: &NodeId| topology.node(*id).is_some_and(|node| node.kind == NodeKind::Switch);
    if !between.iter().all(is_switch) {
        return None;
    }
    let first = path.hops.first()?;
    Some(LinkSpec {
        class: first.class,
        path: first.path,
        link_count: 1,
        bandwidth: path.bottleneck,
        latency: Some(path.hops.iter().map(|hop| hop.latency.value).sum()),
    })
}

/// The links with host memory, both ways; where the file has none, PCI Express of unknown speed.
fn host_links(topology: &Topology, device: NodeId) -> (LinkSpec, LinkSpec) {
    let unknown = LinkSpec::new(LinkClass::Pcie).with_cost(12.0, std::time::Duration::from_micros(2));
    let host = topology.nearest_host(device);
    let edge = |from, to| topology.edge(from, to).map_or(unknown, spec);
    host.map_or((unknown, unknown), |host| (edge(device, host), edge(host, device)))
}
