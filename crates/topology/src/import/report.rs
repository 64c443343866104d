//! What a file says, in the file's own words.

use serde::{Serialize, Serializer, ser::SerializeMap};

use super::Format;
use crate::{Edge, Node, NodeId, NodeKind, Topology};
use warpweft_core_types::LinkClass;

/// What an import found, in the words of its source.
///
/// A field that is `None` has no place in the source; it is left out when the report is serialized.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What the source is.
    pub format: Format,
    /// GPUs.
    pub gpus: usize,
    /// Network cards; ports of one card count once. `None` where the source never lists any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nics: Option<usize>,
    /// Tiles of GPUs (Intel).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tiles: Option<usize>,
    /// Interface names of NICs that the table calls `NIC0` and so on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nic_names: Option<Labelled<String>>,
    /// NUMA node of each GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa: Option<Labelled<Printed>>,
    /// NUMA affinity of each GPU, where it is listed apart from the node (AMD).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_affinity: Option<Labelled<Printed>>,
    /// Processors near each GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_affinity: Option<Labelled<Printed>>,
    /// NUMA node that is each GPU's own memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_numa_id: Option<Labelled<Printed>>,
    /// Every pair of GPUs once, then GPUs with network cards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub links: Option<Vec<ReportLink>>,
    /// Pairs of network cards, where the source has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nic_links: Option<Vec<ReportLink>>,
    /// What the peer-to-peer table is about: `r`, `w`, `n`, `a`, `p`, `rw`; null if the text does not name it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capability: Option<Option<String>>,
    /// Peer-to-peer status of every pair of GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p2p: Option<Vec<P2pStatus>>,
    /// NVLinks of each GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink: Option<Labelled<NvLinkReport>>,
    /// Version of an NCCL file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_version: Option<String>,
    /// Version of an hwloc file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hwloc_xml_version: Option<String>,
    /// `<cpu>` elements of an NCCL file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<usize>,
    /// NUMA nodes, in the order of the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numa_nodes: Option<Vec<i64>>,
    /// Processor mask of each NUMA node, as written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_affinity_mask: Option<Labelled<String>>,
    /// Plain Ethernet functions, which are not counted as network cards (hwloc).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ethernet_only: Option<usize>,
    /// The GPUs one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_list: Option<Vec<ReportDevice>>,
    /// The network cards one by one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nic_list: Option<Vec<ReportNic>>,
    /// Megabytes (10^6) per second from each GPU into a switch fabric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_to_switch_mb_s: Option<Labelled<u64>>,
    /// False if the source cannot say whether fast links exist, which differs from saying that none do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvlink_stated: Option<bool>,
    /// What was left out or looks odd, one sentence each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl Report {
    pub(super) fn new(format: Format, gpus: usize) -> Self {
        Self {
            format,
            gpus,
            nics: None,
            tiles: None,
            nic_names: None,
            numa: None,
            numa_affinity: None,
            cpu_affinity: None,
            gpu_numa_id: None,
            links: None,
            nic_links: None,
            capability: None,
            p2p: None,
            nvlink: None,
            system_version: None,
            hwloc_xml_version: None,
            cpus: None,
            numa_nodes: None,
            cpu_affinity_mask: None,
            ethernet_only: None,
            gpu_list: None,
            nic_list: None,
            gpu_to_switch_mb_s: None,
            nvlink_stated: None,
            warnings: Vec::new(),
        }
    }

    /// The report of a topology that was built, discovered or read from our own format.
    ///
    /// Links are those that an edge states in either direction.
    pub fn of(topology: &Topology) -> Self {
        let nodes = topology.nodes();
        let mut report = Self::new(Format::Json, topology.devices().count());
        report.nics = Some(nodes.iter().filter(|node| is_nic(node)).count());
        let (mut among_devices, mut to_nics, mut among_nics) = (Vec::new(), Vec::new(), Vec::new());
        for edge in topology.joined_pairs() {
            let (from, to) = (&nodes[edge.from.index()], &nodes[edge.to.index()]);
            let (a, b) = if is_nic(from) && to.is_device() { (to, from) } else { (from, to) };
            let links = match (a.is_device(), b.is_device()) {
                (true, true) => &mut among_devices,
                (true, false) if is_nic(b) => &mut to_nics,
                (false, false) if is_nic(a) && is_nic(b) => &mut among_nics,
                _ => continue,
            };
            links.push(((a.id, b.id), pair_link(a, b, edge)));
        }
        let sorted = |mut links: Vec<((NodeId, NodeId), ReportLink)>| {
            links.sort_by_key(|(ends, _)| *ends);
            links.into_iter().map(|(_, link)| link)
        };
        report.links = Some(sorted(among_devices).chain(sorted(to_nics)).collect());
        report.nic_links = Some(sorted(among_nics).collect());
        report.numa = Some(
            topology.devices().map(|node| (node.name.clone(), Printed::from(node.place.numa_node))).collect(),
        );
        report
    }
}

fn is_nic(node: &Node) -> bool {
    matches!(node.kind, NodeKind::Nic)
}

fn pair_link(a: &Node, b: &Node, edge: &Edge) -> ReportLink {
    let mut link = ReportLink::new(&a.name, &b.name, edge_word(edge));
    if edge.class.value != LinkClass::Pcie {
        link.count = edge.link_count.map(|count| count.value);
    }
    link.via = match edge.class.value {
        LinkClass::NvSwitch => Some(Via::Switch),
        _ => None,
    };
    link
}

/// The short word for an edge: the path through the PCI tree for PCIe, else the medium.
pub(crate) fn edge_word(edge: &Edge) -> String {
    let path = edge.path.map(|path| path.value.to_string());
    match edge.class.value {
        LinkClass::NvLink | LinkClass::NvSwitch => "NV".to_owned(),
        LinkClass::NvLinkC2c => "C2C".to_owned(),
        LinkClass::Xgmi => "XGMI".to_owned(),
        LinkClass::XeLink => "XL".to_owned(),
        LinkClass::Network => "NET".to_owned(),
        LinkClass::HostMemory => "MEM".to_owned(),
        LinkClass::SameDevice => "MDF".to_owned(),
        LinkClass::Pcie => path.unwrap_or_else(|| "PCIE".to_owned()),
        _ => path.unwrap_or_else(|| "?".to_owned()),
    }
}

/// Values by label, in the order of the source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Labelled<T>(pub Vec<(String, T)>);

impl<T> Labelled<T> {
    /// The value under `label`.
    pub fn find(&self, label: &str) -> Option<&T> {
        self.0.iter().find(|(known, _)| known == label).map(|(_, value)| value)
    }
}

impl<T> FromIterator<(String, T)> for Labelled<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(entries: I) -> Self {
        Self(entries.into_iter().collect())
    }
}

impl<T: Serialize> Serialize for Labelled<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (label, value) in &self.0 {
            map.serialize_entry(label, value)?;
        }
        map.end()
    }
}

/// A value as a table prints it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Printed {
    /// Empty or `N/A`.
    Nothing,
    /// A single number.
    Number(i64),
    /// A range, a list, or anything else.
    Text(String),
}

impl Printed {
    /// Reads a cell.
    pub(super) fn cell(text: Option<&str>) -> Self {
        match text {
            None | Some("" | "N/A") => Self::Nothing,
            Some(text) => text.parse().map_or_else(|_| Self::Text(text.to_owned()), Self::Number),
        }
    }

    /// The number, if it is a single one that is not negative.
    pub(super) fn numa_node(&self) -> Option<u32> {
        match self {
            Self::Number(number) => u32::try_from(*number).ok(),
            _ => None,
        }
    }
}

impl From<Option<u32>> for Printed {
    fn from(number: Option<u32>) -> Self {
        number.map_or(Self::Nothing, |number| Self::Number(number.into()))
    }
}

/// A pair as the source describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportLink {
    /// Label of the end that comes first.
    pub a: String,
    /// Label of the other end.
    pub b: String,
    /// The source's word: `NV`, `NVL`, `XGMI`, `PCIE`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`, `SOC`, `MDF`, `XL`.
    pub kind: String,
    /// Links bonded into this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Whether a fast link goes through a switch fabric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// The way through the PCI tree beside a fast link.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci: Option<String>,
    /// Megabytes (10^6) per second of one direction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mb_s: Option<u64>,
    /// AMD's weight: 15 per xGMI hop, more over PCIe.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// AMD's hops.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hops: Option<u32>,
}

impl ReportLink {
    pub(super) fn new(a: &str, b: &str, kind: impl Into<String>) -> Self {
        Self {
            a: a.to_owned(),
            b: b.to_owned(),
            kind: kind.into(),
            count: None,
            via: None,
            pci: None,
            mb_s: None,
            weight: None,
            hops: None,
        }
    }
}

/// How a fast link gets to its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Via {
    /// From device to device.
    Direct,
    /// Through a switch fabric.
    Switch,
}

/// Whether one GPU can reach the memory of another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct P2pStatus {
    /// Label of the end that comes first.
    pub a: String,
    /// Label of the other end.
    pub b: String,
    /// `OK`, or why not: `CNS`, `GNS`, `TNS`, `NS`, `DR`, `U`.
    pub status: String,
}

/// The NVLinks of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NvLinkReport {
    /// The GPU's product name.
    pub name: String,
    /// Links that carry data.
    pub active: usize,
    /// Links listed as inactive.
    pub inactive: usize,
    /// Gigabytes (10^9) per second of one direction over all active links.
    pub sum_gb_s: f64,
    /// Gigabytes per second of one direction by link number.
    pub links: Labelled<f64>,
}

/// One GPU of a file that describes them one by one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReportDevice {
    /// Its label.
    pub name: String,
    /// Its PCI bus id, as written.
    pub busid: Option<String>,
    /// Its NUMA node (NCCL: a number; hwloc: a list).
    pub numa: Numa,
    /// PCIe speed, as written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_speed: Option<String>,
    /// PCIe lanes; 0 is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_width: Option<u32>,
    /// PCIe gigabytes per second (hwloc); 0 is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_gb_s: Option<f64>,
    /// Names the operating system and driver libraries give it (hwloc).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os_devices: Option<Vec<String>>,
    /// Compute capability times ten, or AMD's counterpart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm: Option<u32>,
    /// Rank in the job that wrote the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<i64>,
    /// Fast links, as listed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub links_out: Vec<FastLink>,
    /// Fast links over all targets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_total: Option<u32>,
    /// Fast links into a switch fabric.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_switch: Option<u32>,
}

/// Where a device of a file is attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Numa {
    /// One node, as written; -1 is unknown.
    Node(i64),
    /// All nodes of its locality.
    Nodes(Vec<u32>),
}

/// A fast link of one GPU, as an NCCL file lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FastLink {
    /// `nvlink` or `xgmi`.
    #[serde(rename = "type")]
    pub kind: String,
    /// PCI bus id of the far end.
    pub target: String,
    /// Links bonded into it.
    pub count: u32,
    /// PCI class of the far end.
    pub tclass: Option<String>,
    /// Label of the far end, if it is a GPU of this file.
    pub peer: Option<String>,
}

/// One network card of a file that describes them one by one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportNic {
    /// Its label.
    pub name: String,
    /// Its PCI bus id, as written.
    pub busid: Option<String>,
    /// Its NUMA node.
    pub numa: Numa,
    /// Network interfaces on it (NCCL).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net: Option<Vec<String>>,
    /// Megabits per second of each interface, as written (NCCL).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<Vec<String>>,
    /// Names the operating system gives it (hwloc).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub os_devices: Option<Vec<String>>,
}
