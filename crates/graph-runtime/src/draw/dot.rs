//! Graphviz source.

use std::fmt::Write as _;

use warpweft_drawing::dot::quoted;

use super::{
    CRITICAL, EDGE, colours,
    picture::{Edge, Picture, Step},
};
use crate::graph::Graph;

impl Graph {
    /// The graph for Graphviz (`dot -Tsvg`).
    ///
    /// Each node has its name, what it does, and where, coloured by device; edges say in short what both ends share
    /// (RAW: read after write, WAR: write after read, WAW: write after write, and how many bytes), and in full as
    /// their tooltip. The critical path, each node counted alike, is thick. Graphs of more than 600 nodes are drawn
    /// in part, and the picture says so.
    pub fn to_dot(&self) -> String {
        let picture = Picture::of(self);
        let mut text = String::from(
            "digraph operations {\n  graph [rankdir=LR, fontname=\"Helvetica\"];\n  node [fontname=\"Helvetica\", style=\"filled,rounded\", shape=box];\n  edge [fontname=\"Helvetica\", fontsize=10];\n",
        );
        // Writing to a string does not fail.
        let _ = writeln!(text, "  label={};", quoted(&picture.summary()));
        for (index, step) in picture.steps.iter().enumerate() {
            push_step(&mut text, index, step);
        }
        for edge in &picture.edges {
            push_edge(&mut text, edge);
        }
        text.push_str("}\n");
        text
    }
}

fn push_step(text: &mut String, index: usize, step: &Step) {
    let Some(node) = &step.node else {
        let _ = writeln!(text, "  n{index} [label=\"\", shape=point, width=0.12, tooltip=\"join\"];");
        return;
    };
    let (fill, border) = colours(node.device);
    let label = quoted(&format!("{}\n{} {}, {}", node.name, node.id, node.kind, node.place));
    let (border, width) = if node.is_critical { (CRITICAL, 2.5) } else { (border, 1.0) };
    let shape = if node.device.is_none() { ", shape=note, style=filled" } else { "" };
    let _ = writeln!(
        text,
        "  n{index} [label={label}, fillcolor=\"{fill}\", color=\"{border}\", penwidth={width}{shape}];"
    );
}

fn push_edge(text: &mut String, edge: &Edge) {
    let label = edge.label.as_ref().map(|label| format!("label={}, ", quoted(label))).unwrap_or_default();
    let (colour, width) = if edge.is_critical { (CRITICAL, 2.5) } else { (EDGE, 1.0) };
    let title = quoted(&edge.title);
    let _ = writeln!(
        text,
        "  n{} -> n{} [{label}tooltip={title}, labeltooltip={title}, color=\"{colour}\", penwidth={width}];",
        edge.from, edge.to
    );
}
