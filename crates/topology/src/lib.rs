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
//! # Where a topology comes from
//!
//! * Backends: [`Topology::from_facts`] merges what they report about links.
//! * Files: [`import::import`] reads what `nvidia-smi`, `rocm-smi`, `xpu-smi`, NCCL, RCCL and hwloc write, and our own JSON.
//! * This machine: [`discover`] reads Linux's sysfs without any driver library.
//! * Code: [`TopologyBuilder`].
//!
//! # What it answers
//!
//! * [`best_path`](Topology::best_path), [`best_paths`](Topology::best_paths), [`reachable`](Topology::reachable), [`nearest_devices`](Topology::nearest_devices), [`nearest_nics`](Topology::nearest_nics).
//! * [`ring`](Topology::ring) and [`broadcast_tree`](Topology::broadcast_tree) for collectives, [`bisection_bandwidth`](Topology::bisection_bandwidth), [`fabrics`](Topology::fabrics).
//! * [`TopologyDiff`] between two of them.
//! * [`to_svg`](Topology::to_svg), [`to_matrix`](Topology::to_matrix), [`to_dot`](Topology::to_dot), [`to_nccl_xml`](Topology::to_nccl_xml), [`to_json`](Topology::to_json).
//!
//! ```
//! use warpweft_topology::import::import;
//!
//! let text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-15\nGPU1\tNV4\t X \t0-15\n";
//! let imported = import(text.as_bytes())?;
//! assert_eq!(imported.report.gpus, 2);
//! assert!(imported.topology.to_svg().starts_with("<svg"));
//! # Ok::<(), warpweft_topology::import::ImportError>(())
//! ```
//!
//! # Design
//!
//! * One edge per ordered pair of nodes. Several reports about a pair are merged field by field, stronger evidence first.
//! * An edge can be vetoed, by a probe that lost data for example. No probe makes an edge that nobody reported, and none lifts a veto.
//! * Nothing is guessed while reading: a default for an unknown figure appears only in an answer, and is marked [`Provenance::Assumed`] there.
//! * Answers are the same every time: ties are broken by hops and then by node ids.
//!
//! # What it does not do
//!
//! It moves no bytes, runs no probe and asks no driver; who does reports with [`LinkDesc`], [`Topology::measure`] and [`Topology::veto`].
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
pub use node::{Node, NodeDesc, NodeId, NodeKind, Place};
pub use pcie::{PcieLink, PcieRate};
pub use query::{Bisection, BroadcastTree, CollectiveError, NicAffinity, Ring};
pub use route::{Hop, Path, PathError};
pub use warpweft_core_types::{DeviceKind, Provenance};
