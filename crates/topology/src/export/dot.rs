//! Graphviz source.

use std::fmt::Write as _;

use warpweft_drawing::dot::quoted;

use super::colour;
use crate::{Edge, Fabric, Node, NodeId, NodeKind, Topology, import::edge_word};

impl Topology {
    /// The graph for Graphviz (`dot -Tsvg`, `neato`, `fdp`).
    ///
    /// Pairs are drawn once, coloured by medium and as thick as their bandwidth; a switch fabric is one node; machines are clusters.
    pub fn to_dot(&self) -> String {
        let fabrics = self.fabrics();
        let mut text = String::from(
            "graph topology {\n  graph [overlap=false, splines=true];\n  node [fontname=\"Helvetica\"];\n  edge [fontname=\"Helvetica\", fontsize=10];\n",
        );
        let mut hosts: Vec<&Option<String>> = Vec::new();
        for node in self.nodes() {
            if !hosts.contains(&&node.place.host) {
                hosts.push(&node.place.host);
            }
        }
        for (index, host) in hosts.into_iter().enumerate() {
            let nodes = self.nodes().iter().filter(|node| node.place.host == *host);
            let Some(name) = host else {
                nodes.for_each(|node| push_node(&mut text, node, "  "));
                continue;
            };
            let _ = writeln!(text, "  subgraph cluster_{index} {{\n    label={};", quoted(name));
            nodes.for_each(|node| push_node(&mut text, node, "    "));
            text.push_str("  }\n");
        }
        for (index, fabric) in fabrics.iter().enumerate() {
            push_fabric(&mut text, index, fabric);
        }
        for edge in self.joined_pairs() {
            if !fabrics.iter().any(|fabric| is_inside(fabric, edge)) {
                push_edge(&mut text, edge);
            }
        }
        text.push_str("}\n");
        text
    }
}

fn is_inside(fabric: &Fabric, edge: &Edge) -> bool {
    edge.class.value == fabric.class
        && fabric.members.contains(&edge.from)
        && fabric.members.contains(&edge.to)
}

fn push_node(text: &mut String, node: &Node, indent: &str) {
    let (shape, fill) = match node.kind {
        NodeKind::Device { .. } => ("box", "#e6f4ea"),
        NodeKind::Host { .. } => ("box3d", "#fdf3e1"),
        NodeKind::Switch => ("hexagon", "#e5e7eb"),
        NodeKind::Nic => ("ellipse", "#ede9fe"),
    };
    let mut label = node.name.clone();
    if let Some(model) = &node.model {
        label.push('\n');
        label.push_str(model);
    }
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{indent}{} [label={}, shape={shape}, style=filled, fillcolor=\"{fill}\"];",
        id(node.id),
        quoted(&label)
    );
}

fn push_fabric(text: &mut String, index: usize, fabric: &Fabric) {
    let colour = colour(fabric.class);
    let _ = writeln!(
        text,
        "  fabric{index} [label=\"{} fabric\", shape=hexagon, style=filled, fillcolor=\"#dcfce7\"];",
        fabric.class
    );
    let width = pen_width(fabric.port_bandwidth.value.gb_per_s);
    for member in &fabric.members {
        let _ =
            writeln!(text, "  {} -- fabric{index} [color=\"{colour}\", penwidth={width:.1}];", id(*member));
    }
}

fn push_edge(text: &mut String, edge: &Edge) {
    let count = edge.link_count.map(|count| count.value).filter(|count| *count > 1);
    let mut label = edge_word(edge);
    if let Some(count) = count {
        let _ = write!(label, " x{count}");
    }
    let (colour, style) = match &edge.veto {
        Some(reason) => {
            label.push('\n');
            label.push_str(reason);
            ("#dc2626", "dashed")
        }
        None => (colour(edge.class.value), "solid"),
    };
    let _ = writeln!(
        text,
        "  {} -- {} [label={}, color=\"{colour}\", style={style}, penwidth={:.1}];",
        id(edge.from),
        id(edge.to),
        quoted(&label),
        pen_width(edge.bandwidth().value.gb_per_s)
    );
}

/// Thickness in points: twice the bandwidth adds one.
pub(super) fn pen_width(gb_per_s: f64) -> f64 {
    (gb_per_s.max(1.0).log2() - 2.0).clamp(1.0, 9.0)
}

fn id(node: NodeId) -> String {
    format!("n{}", node.index())
}
