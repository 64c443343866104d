//! The PCI tree, as far as the paths between pairs tell it.

use warpweft_core_types::PathClass;

use crate::{Node, NodeId, Topology};

/// Endpoints that are near each other, joined by the path class that joins them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Tree {
    Leaf(NodeId),
    Join { path: PathClass, parts: Vec<Tree> },
}

impl Tree {
    /// The endpoints, from left to right.
    pub(super) fn leaves(&self) -> Vec<NodeId> {
        match self {
            Self::Leaf(node) => vec![*node],
            Self::Join { parts, .. } => parts.iter().flat_map(Self::leaves).collect(),
        }
    }

    /// Calls `visit` for the path class of every join.
    pub(super) fn visit_paths(&self, visit: &mut impl FnMut(PathClass)) {
        if let Self::Join { path, parts } = self {
            visit(*path);
            for part in parts {
                part.visit_paths(visit);
            }
        }
    }
}

/// Groups `nodes` by nearness, nearest first and no further than `farthest`.
///
/// Two groups are joined at a level if any pair across them is that near (single linkage).
/// Real PCI trees give every pair across two groups the same path, and then nothing is lost; pairs whose path is unknown just do not speak.
pub(super) fn group(topology: &Topology, nodes: &[&Node], farthest: PathClass) -> Vec<Tree> {
    let mut groups: Vec<Tree> = nodes.iter().map(|node| Tree::Leaf(node.id)).collect();
    for path in LEVELS.into_iter().take_while(|path| *path <= farthest) {
        groups = join(topology, groups, path);
    }
    groups
}

fn join(topology: &Topology, groups: Vec<Tree>, path: PathClass) -> Vec<Tree> {
    let leaves: Vec<Vec<NodeId>> = groups.iter().map(Tree::leaves).collect();
    let is_near =
        |a: &[NodeId], b: &[NodeId]| a.iter().any(|&a| b.iter().any(|&b| is_within(topology, a, b, path)));
    let mut joined: Vec<(Vec<Tree>, Vec<NodeId>)> = Vec::new();
    for (group, own) in groups.into_iter().zip(leaves) {
        let (near, far): (Vec<_>, Vec<_>) = joined.into_iter().partition(|(_, others)| is_near(others, &own));
        joined = far;
        let mut parts = Vec::new();
        let mut all = Vec::new();
        for (mut trees, mut nodes) in near {
            parts.append(&mut trees);
            all.append(&mut nodes);
        }
        parts.push(group);
        all.extend(own);
        joined.push((parts, all));
    }
    let mut trees: Vec<Tree> = joined
        .into_iter()
        .map(|(mut parts, _)| match parts.len() {
            1 => parts.remove(0),
            _ => Tree::Join { path, parts },
        })
        .collect();
    trees.sort_by_key(|tree| tree.leaves().into_iter().min());
    trees
}

fn is_within(topology: &Topology, a: NodeId, b: NodeId, path: PathClass) -> bool {
    topology.either_edge(a, b).and_then(|edge| edge.path).is_some_and(|known| known.value <= path)
}

const LEVELS: [PathClass; 5] =
    [PathClass::Pix, PathClass::Pxb, PathClass::Phb, PathClass::Node, PathClass::Sys];
