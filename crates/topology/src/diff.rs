//! What changed between two topologies.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};

use crate::{Edge, Node, NodeKind, Topology};

/// The difference between two topologies.
///
/// A device is the same if its UUID is, else if its name is; everything else goes by name.
/// So renumbered devices show up as renamed, not as gone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyDiff {
    /// Nodes, by the name they had or have.
    pub nodes: Vec<Change>,
    /// Edges, by the names of their ends in the later topology where they have one; `->` is one direction and `<->` both alike.
    pub edges: Vec<Change>,
}

/// What happened to one node or edge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It is new.
    Added {
        /// What it is.
        what: String,
    },
    /// It is gone.
    Removed {
        /// What it was.
        what: String,
    },
    /// It is there in both, and different.
    Changed {
        /// What it is.
        what: String,
        /// What is different about it.
        fields: Vec<FieldChange>,
    },
}

/// One property before and after.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FieldChange {
    /// The property, such as `link count`.
    pub field: String,
    /// Before; `None` if unknown.
    pub before: Option<String>,
    /// After; `None` if unknown.
    pub after: Option<String>,
}

impl TopologyDiff {
    /// What has to change in `before` to get `after`.
    pub fn between(before: &Topology, after: &Topology) -> Self {
        let names = Names::new(before, after);
        let old_nodes: Properties =
            before.nodes().iter().map(|node| (names.of(node).to_owned(), node_properties(node))).collect();
        let new_nodes: Properties =
            after.nodes().iter().map(|node| (node.name.clone(), node_properties(node))).collect();
        let old_edges = edges(before, |node| names.of(node));
        let new_edges = edges(after, |node| &node.name);
        Self { nodes: changes(&old_nodes, &new_nodes), edges: changes(&old_edges, &new_edges) }
    }

    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.edges.is_empty()
    }
}

impl fmt::Display for TopologyDiff {
    /// One line per change: `+` added, `-` removed, `~` changed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("no difference");
        }
        for (index, change) in self.nodes.iter().chain(&self.edges).enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{change}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Added { what } => write!(f, "+ {what}"),
            Self::Removed { what } => write!(f, "- {what}"),
            Self::Changed { what, fields } => {
                let fields: Vec<String> = fields.iter().map(ToString::to_string).collect();
                write!(f, "~ {what}: {}", fields.join(", "))
            }
        }
    }
}

impl fmt::Display for FieldChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_unknown = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".to_owned());
        write!(f, "{} {} -> {}", self.field, or_unknown(&self.before), or_unknown(&self.after))
    }
}

/// Properties of things, by name.
type Properties = BTreeMap<String, Vec<(&'static str, Option<String>)>>;

/// The later names of earlier nodes.
struct Names<'t>(BTreeMap<&'t str, &'t str>);

impl<'t> Names<'t> {
    fn new(before: &'t Topology, after: &'t Topology) -> Self {
        let renamed = before.nodes().iter().filter_map(|node| {
            let later = after.node(after.device(node.uuid()?)?)?;
            Some((node.name.as_str(), later.name.as_str()))
        });
        Self(renamed.collect())
    }

    fn of<'n>(&'n self, node: &'n Node) -> &'n str {
        self.0.get(node.name.as_str()).copied().unwrap_or(&node.name)
    }
}

fn node_properties(node: &Node) -> Vec<(&'static str, Option<String>)> {
    let place = &node.place;
    let text = |value: Option<&dyn ToString>| value.map(|value| value.to_string());
    vec![
        ("kind", Some(kind_word(node.kind).to_owned())),
        ("name", Some(node.name.clone())),
        ("uuid", node.uuid().map(|uuid| uuid.to_string())),
        ("model", node.model.clone()),
        ("host", place.host.clone()),
        ("pci", text(place.pci.as_ref().map(|pci| pci as _))),
        ("numa node", text(place.numa_node.as_ref().map(|numa| numa as _))),
        ("cpus", text(place.cpus.as_ref().map(|cpus| cpus as _))),
        ("pcie", place.pcie.and_then(|link| link.bandwidth()).map(|rate| rate.to_string())),
    ]
}

fn kind_word(kind: NodeKind) -> &'static str {
    match kind {
        NodeKind::Device { .. } => "device",
        NodeKind::Host { .. } => "host memory",
        NodeKind::Switch => "switch",
        NodeKind::Nic => "network card",
    }
}

fn edge_properties(edge: &Edge) -> Vec<(&'static str, Option<String>)> {
    vec![
        ("medium", Some(edge.class.value.to_string())),
        ("path", edge.path.map(|path| path.value.to_string())),
        ("link count", edge.link_count.map(|count| count.value.to_string())),
        ("rated", edge.nominal.map(|rate| rate.value.to_string())),
        ("measured", edge.measured.map(|rate| rate.to_string())),
        ("latency", edge.latency.map(|latency| format!("{:?}", latency.value))),
        ("veto", edge.veto.clone()),
    ]
}

/// Both directions as one where they are alike.
fn edges<'t>(topology: &'t Topology, name: impl Fn(&'t Node) -> &'t str) -> Properties {
    let node = |id: crate::NodeId| &topology.nodes()[id.index()];
    let mut properties = Properties::new();
    for edge in topology.edges() {
        let own = edge_properties(edge);
        let back = topology.edge(edge.to, edge.from).map(edge_properties);
        let (from, to) = (name(node(edge.from)), name(node(edge.to)));
        if back.as_ref() == Some(&own) {
            let (first, second) = (from.min(to), from.max(to));
            properties.insert(format!("{first} <-> {second}"), own);
        } else {
            properties.insert(format!("{from} -> {to}"), own);
        }
    }
    properties
}

fn changes(before: &Properties, after: &Properties) -> Vec<Change> {
    let names: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    names
        .into_iter()
        .filter_map(|name| match (before.get(name), after.get(name)) {
            (None, _) => Some(Change::Added { what: name.clone() }),
            (_, None) => Some(Change::Removed { what: name.clone() }),
            (Some(before), Some(after)) => {
                let fields = field_changes(before, after);
                let what = name.clone();
                (!fields.is_empty()).then_some(Change::Changed { what, fields })
            }
        })
        .collect()
}

fn field_changes(
    before: &[(&'static str, Option<String>)],
    after: &[(&'static str, Option<String>)],
) -> Vec<FieldChange> {
    before
        .iter()
        .zip(after)
        .filter(|(before, after)| before.1 != after.1)
        .map(|(before, after)| FieldChange {
            field: before.0.to_owned(),
            before: before.1.clone(),
            after: after.1.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use warpweft_core_types::{DeviceUuid, LinkClass};

    use super::*;
    use crate::{DeviceKind, LinkDesc, NodeDesc, NodeId, Provenance};

    fn machine(names: [&str; 3], links: u32) -> Topology {
        let mut builder = Topology::builder();
        let ids: Vec<NodeId> = names
            .iter()
            .enumerate()
            .map(|(index, name)| {
                let byte = u8::try_from(index).unwrap();
                let desc = NodeDesc::device(*name, DeviceKind::Gpu).uuid(DeviceUuid::from_bytes([byte; 16]));
                builder.node(desc).unwrap()
            })
            .collect();
        let desc = LinkDesc::new(LinkClass::NvLink, Provenance::Driver);
        builder.link_both(ids[0], ids[1], desc.link_count(links)).unwrap();
        builder.link(ids[1], ids[2], desc).unwrap();
        builder.build()
    }

    fn check(before: &Topology, after: &Topology, expected: &str) {
        let diff = TopologyDiff::between(before, after);
        assert_eq!(diff.to_string(), expected);
        let json = serde_json::to_string(&diff).unwrap();
        assert_eq!(serde_json::from_str::<TopologyDiff>(&json).unwrap(), diff);
    }

    #[test]
    fn nothing_changed() {
        let machine = machine(["a", "b", "c"], 4);
        check(&machine, &machine, "no difference");
    }

    #[test]
    fn a_lost_link_is_one_line() {
        check(&machine(["a", "b", "c"], 18), &machine(["a", "b", "c"], 17), "~ a <-> b: link count 18 -> 17");
    }

    #[test]
    fn renumbered_devices_are_renamed() {
        check(
            &machine(["GPU0", "GPU1", "GPU2"], 4),
            &machine(["GPU1", "GPU0", "GPU2"], 4),
            "~ GPU0: name GPU1 -> GPU0\n~ GPU1: name GPU0 -> GPU1",
        );
    }

    #[test]
    fn new_and_gone_things_are_listed() {
        let before = machine(["a", "b", "c"], 4);
        let mut after = machine(["a", "b", "c"], 4);
        after.veto(NodeId(1), NodeId(2), "writes vanish").unwrap();
        check(&before, &after, "~ b -> c: veto unknown -> writes vanish");
        let empty = Topology::builder().build();
        check(&empty, &before, "+ a\n+ b\n+ c\n+ a <-> b\n+ b -> c");
        check(&before, &empty, "- a\n- b\n- c\n- a <-> b\n- b -> c");
    }
}
