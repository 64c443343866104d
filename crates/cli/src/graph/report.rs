//! What was inferred, for people and for programs.

use std::{path::Path, sync::Arc};

use serde::Serialize;
use warpweft::{
    Bytes, Device, DeviceId,
    graph_runtime::{Graph, NodeId, Reason, Segment},
};

use super::{Ran, check::Description, numbered};
use crate::output;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// The device of each number in the file.
    devices: Vec<DeviceId>,
    #[serde(skip)]
    open: usize,
    #[serde(skip)]
    buffers: (usize, u64),
    nodes: Vec<NodeReport>,
    edges: Vec<EdgeReport>,
    /// Each node counted alike.
    critical_path: Vec<NodeId>,
    segments: Vec<Segment>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<WhyReport>,
}

#[derive(Debug, Serialize)]
struct NodeReport {
    id: NodeId,
    name: String,
    kind: &'static str,
    /// None for a task of the host.
    device: Option<DeviceId>,
}

#[derive(Debug, Serialize)]
struct EdgeReport {
    from: NodeId,
    to: NodeId,
    reasons: Vec<ReasonReport>,
}

#[derive(Debug, Serialize)]
struct ReasonReport {
    #[serde(flatten)]
    reason: Reason,
    buffer_name: Option<String>,
    text: String,
}

/// What `--why` found.
pub(super) struct Why {
    pub(super) earlier: NodeId,
    pub(super) later: NodeId,
    pub(super) reasons: Vec<Reason>,
}

#[derive(Debug, Serialize)]
struct WhyReport {
    earlier: NodeId,
    later: NodeId,
    /// The links of the chain between them; empty if the later one does not wait.
    chain: Vec<ReasonReport>,
}

impl Report {
    pub(super) fn new(
        description: &Description,
        graph: &Graph,
        open: &[Arc<dyn Device>],
        why: Option<&Why>,
    ) -> Self {
        let reason = |reason: &Reason| ReasonReport {
            buffer_name: graph.buffer_name(reason.buffer).map(ToOwned::to_owned),
            text: graph.explain(reason),
            reason: reason.clone(),
        };
        let nodes = graph.ids().map(|id| NodeReport {
            id,
            name: graph.name(id).unwrap_or_default().to_owned(),
            kind: graph.kind(id).unwrap_or_default(),
            device: graph.device(id),
        });
        let before =
            graph.ids().flat_map(|to| graph.predecessors(to).into_iter().map(move |from| (from, to)));
        let edges = before.map(|(from, to)| EdgeReport {
            from,
            to,
            reasons: graph.reasons(from, to).iter().map(reason).collect(),
        });
        Self {
            devices: (0..description.devices).map(|number| numbered(open, number).info().id).collect(),
            open: open.len(),
            buffers: (description.buffers.len(), description.buffers.iter().map(|buffer| buffer.size).sum()),
            nodes: nodes.collect(),
            edges: edges.collect(),
            critical_path: graph.critical_path(|_| 1),
            segments: graph.segments(),
            why: why.map(|why| WhyReport {
                earlier: why.earlier,
                later: why.later,
                chain: why.reasons.iter().map(reason).collect(),
            }),
        }
    }

    pub(super) fn print_json(&self, ran: Option<&Ran>) -> anyhow::Result<()> {
        #[derive(Serialize)]
        struct Document<'a> {
            #[serde(flatten)]
            report: &'a Report,
            #[serde(skip_serializing_if = "Option::is_none")]
            run: Option<&'a Ran>,
        }
        output::json(&Document { report: self, run: ran })
    }

    pub(super) fn print(&self, file: &Path) {
        let (buffers, size) = self.buffers;
        output::line(format!(
            "{}: {}, {} ({}), {}, {}, {}",
            file.display(),
            count(self.devices.len(), "device"),
            count(buffers, "buffer"),
            Bytes(size),
            count(self.nodes.len(), "node"),
            count(self.edges.len(), "edge"),
            count(self.segments.len(), "segment")
        ));
        self.print_notes();
        self.print_nodes();
        self.print_edges();
        self.print_path();
        self.print_segments();
    }

    pub(super) fn print_notes(&self) {
        if self.open < self.devices.len() {
            output::note(&format!(
                "note: the file has {} and {} open, so that numbers count on from the first again",
                count(self.devices.len(), "device"),
                if self.open == 1 { "1 is".to_owned() } else { format!("{} are", self.open) }
            ));
        }
    }

    fn print_nodes(&self) {
        output::title("\nNodes");
        let width = self.nodes.iter().map(|node| node.name.chars().count()).max().unwrap_or(0);
        for node in &self.nodes {
            output::line(format!(
                "{:>5}  {:<width$}  {:<8} {}",
                node.id.index(),
                node.name,
                node.kind,
                place(node.device)
            ));
        }
    }

    fn print_edges(&self) {
        output::title("\nEdges");
        if self.edges.is_empty() {
            output::line("  none: no two nodes use the same bytes and write them");
        }
        for EdgeReport { from, to, reasons } in &self.edges {
            let mut head = format!("{:>5} -> {to}", from.to_string());
            for reason in reasons {
                let Reason { hazard, range, buffer, .. } = &reason.reason;
                let name = reason.buffer_name.as_ref();
                let name = name.map_or_else(|| format!("buffer {buffer}"), |name| format!("{name:?}"));
                let size = Bytes(range.end - range.start);
                output::line(format!("{head:<16}  {hazard}, bytes {range:?} of {name} ({size})"));
                head.clear();
            }
        }
    }

    fn print_path(&self) {
        output::title("\nCritical path, each node counted alike");
        let name = |id: &NodeId| format!("{id} {}", self.nodes[id.index()].name);
        let names: Vec<String> = self.critical_path.iter().map(name).collect();
        output::line(format!("  {}", names.join(" -> ")));
    }

    fn print_segments(&self) {
        output::title("\nSegments, as they are handed over");
        for (number, segment) in self.segments.iter().enumerate() {
            let lane = if segment.lane == 0 { String::new() } else { format!(" lane {}", segment.lane) };
            let after = if segment.after.is_empty() {
                String::new()
            } else {
                format!("  after {}", list(segment.after.iter()))
            };
            output::line(format!(
                "{number:>5}  {}{lane}: {}{after}",
                place(segment.device),
                if segment.nodes.is_empty() { "a join".to_owned() } else { list(segment.nodes.iter()) }
            ));
        }
    }

    pub(super) fn print_why(&self) {
        let Some(why) = &self.why else { return };
        if why.chain.is_empty() {
            let name = |id: NodeId| format!("node {id} ({:?})", self.nodes[id.index()].name);
            output::line(format!("{} does not wait for {}", name(why.later), name(why.earlier)));
        }
        why.chain.iter().for_each(|reason| output::line(&reason.text));
    }
}

fn place(device: Option<DeviceId>) -> String {
    device.map_or_else(|| "the host".to_owned(), |device| device.to_string())
}

fn count(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Positions, of which a long row is told by its ends.
fn list(items: impl Iterator<Item = impl ToString>) -> String {
    const SHOWN: usize = 16;
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    match items.as_slice() {
        [first @ .., last] if items.len() > SHOWN => {
            format!("{}, ... {last} ({} in all)", first[..SHOWN - 2].join(", "), items.len())
        }
        _ => items.join(", "),
    }
}
