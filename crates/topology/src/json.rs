//! The topology as JSON: complete, versioned, and read back exactly.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use warpweft_core_types::{Bandwidth, ErrorClass, LinkClass, PathClass};

use crate::{BuildError, Edge, Known, NodeDesc, Topology};

/// The version of the format that this crate writes, and the only one it reads.
pub const JSON_VERSION: u32 = 1;

/// Why JSON is not a topology.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// It is not JSON, or not of the right shape.
    #[error("line {line}, column {column}: {reason}")]
    Syntax {
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault, from 1.
        column: usize,
        /// What is wrong.
        reason: String,
        /// Whether the text simply stops.
        ends_early: bool,
    },
    /// It was written by a later version.
    #[error("version {found} of the format is not known, only {JSON_VERSION}")]
    Version {
        /// The version it says.
        found: u32,
    },
    /// An edge names a node that is not listed.
    #[error("an edge names node {name:?}, which is not listed")]
    UnknownName {
        /// The name.
        name: String,
    },
    /// Its parts contradict each other.
    #[error(transparent)]
    Build(#[from] BuildError),
}

impl JsonError {
    /// How to react: the text is what it is, but a later version of this crate may know a later format.
    pub const fn class(&self) -> ErrorClass {
        match self {
            Self::Version { .. } => ErrorClass::Unsupported,
            _ => ErrorClass::Usage,
        }
    }
}

impl Topology {
    /// Writes everything as JSON.
    ///
    /// The object has `format` (`warpweft-topology`), `version`, `nodes` and `edges`; edges name nodes, bandwidths are gigabytes per second, latencies nanoseconds, and every figure stands with its provenance.
    pub fn to_json(&self) -> String {
        let document = Document {
            format: Tag::Topology,
            version: JSON_VERSION,
            nodes: self.nodes().iter().map(crate::Node::to_desc).collect(),
            edges: self.edges().iter().map(|edge| EdgeRecord::of(self, edge)).collect(),
        };
        serde_json::to_string_pretty(&document)
            .expect("keys are strings and numbers finite, which is all that can fail")
    }

    /// Reads what [`to_json`](Self::to_json) wrote; the result is equal to what was written.
    ///
    /// # Errors
    ///
    /// [`JsonError`] if the text is anything else.
    pub fn from_json(text: &str) -> Result<Self, JsonError> {
        let header: Header = serde_json::from_str(text).map_err(syntax)?;
        if header.version != JSON_VERSION {
            return Err(JsonError::Version { found: header.version });
        }
        let document: Document = serde_json::from_str(text).map_err(syntax)?;
        let mut builder = Self::builder();
        for node in document.nodes {
            builder.node(node)?;
        }
        for record in document.edges {
            let named = |name: &str| {
                builder.find(name).ok_or_else(|| JsonError::UnknownName { name: name.to_owned() })
            };
            let (from, to) = (named(&record.from)?, named(&record.to)?);
            builder.whole_edge(record.into_edge(from, to))?;
        }
        Ok(builder.build())
    }
}

/// What is read first, so that a later version is told apart from damage.
#[derive(Deserialize)]
struct Header {
    #[expect(dead_code, reason = "checked by being read")]
    format: Tag,
    version: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: Tag,
    version: u32,
    nodes: Vec<NodeDesc>,
    edges: Vec<EdgeRecord>,
}

#[derive(Serialize, Deserialize)]
enum Tag {
    #[serde(rename = "warpweft-topology")]
    Topology,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EdgeRecord {
    from: String,
    to: String,
    class: Known<LinkClass>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<Known<PathClass>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    link_count: Option<Known<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nominal_gb_per_s: Option<Known<Bandwidth>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    measured_gb_per_s: Option<Bandwidth>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    latency_ns: Option<Known<u64>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    veto: Option<String>,
}

impl EdgeRecord {
    fn of(topology: &Topology, edge: &Edge) -> Self {
        Self {
            from: topology.name(edge.from).to_owned(),
            to: topology.name(edge.to).to_owned(),
            class: edge.class,
            path: edge.path,
            link_count: edge.link_count,
            nominal_gb_per_s: edge.nominal,
            measured_gb_per_s: edge.measured,
            latency_ns: edge.latency.map(|known| {
                let ns = u64::try_from(known.value.as_nanos()).unwrap_or(u64::MAX);
                Known::new(ns, known.provenance)
            }),
            veto: edge.veto.clone(),
        }
    }

    fn into_edge(self, from: crate::NodeId, to: crate::NodeId) -> Edge {
        Edge {
            from,
            to,
            class: self.class,
            path: self.path,
            link_count: self.link_count,
            nominal: self.nominal_gb_per_s,
            measured: self.measured_gb_per_s,
            latency: self
                .latency_ns
                .map(|known| Known::new(Duration::from_nanos(known.value), known.provenance)),
            veto: self.veto,
        }
    }
}

fn syntax(error: serde_json::Error) -> JsonError {
    JsonError::Syntax {
        line: error.line().max(1),
        column: error.column().max(1),
        ends_early: error.is_eof(),
        reason: error.to_string(),
    }
}
