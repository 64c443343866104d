//! What is linked to what, how we know, and the best way from here to there.
//!
//! A [`Topology`] is a directed graph.
//! Its [`Node`]s are devices, the memories of hosts, switches and network cards; its [`Edge`]s say that bytes can go from one to the other.
//! Every figure on an edge carries its [`Provenance`]: measured, said by a driver, by the operating system, by a file, or assumed because nobody said anything.
//!
//! ```
//! use warpweft_core_types::{Bytes, LinkClass, Provenance};
//! use warpweft_topology::{DeviceKind, LinkDesc, NodeDesc, Topology};
//!
//! let mut builder = Topology::builder();
//! let mut chain = Vec::new();
//! for name in ["GPU0", "GPU1", "GPU2"] {
//!     chain.push(builder.node(NodeDesc::device(name, DeviceKind::Gpu))?);
//! }
//! for pair in chain.windows(2) {
//!     builder.link_both(pair[0], pair[1], LinkDesc::new(LinkClass::NvLink, Provenance::File))?;
//! }
//! let topology = builder.build();
//! let path = topology.best_path(chain[0], chain[2], Bytes::mib(1))?;
//! assert_eq!(path.nodes, chain);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Design
//!
//! * One edge per ordered pair of nodes. Several reports about a pair are merged field by field, stronger evidence first.
//! * An edge can be vetoed, by a probe that lost data for example. No probe makes an edge that nobody reported, and none lifts a veto.
//! * Nothing is guessed while reading: a default for an unknown figure appears only in an answer, and is marked [`Provenance::Assumed`] there.
#![forbid(unsafe_code)]

mod builder;
mod cost;
mod cpulist;
mod diff;
mod discover;
mod edge;
mod export;
mod fabric;
mod graph;
pub mod import;
mod json;
mod node;
mod pcie;
mod query;
mod route;

pub use builder::{BuildError, TopologyBuilder};
pub use cpulist::{CpuList, ParseCpuListError};
pub use diff::{Change, FieldChange, TopologyDiff};
pub use discover::{Discovery, NumaNode, discover};
pub use edge::{Edge, EdgeError, Known, LinkDesc, Measurement};
pub use fabric::Fabric;
pub use graph::Topology;
pub use json::{JSON_VERSION, JsonError};
pub use node::{DeviceKind, Node, NodeDesc, NodeId, NodeKind, Place};
pub use pcie::{PcieLink, PcieRate};
pub use query::{Bisection, BroadcastTree, CollectiveError, NicAffinity, Ring};
pub use route::{Hop, Path, PathError};
pub use warpweft_core_types::Provenance;
