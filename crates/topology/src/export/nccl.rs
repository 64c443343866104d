//! An `NCCL_TOPO_FILE` for the devices of one machine.

use std::{collections::BTreeSet, fmt::Write as _};

use quick_xml::escape::escape;
use warpweft_core_types::{LinkClass, PathClass};

use super::tree::{self, Tree};
use crate::{CpuList, DeviceKind, Node, NodeId, NodeKind, PcieRate, Topology};

impl Topology {
    /// The topology as NCCL and RCCL read it from `NCCL_TOPO_FILE`.
    ///
    /// GPUs and network cards hang below the processor of their NUMA node, with a switch where pairs are `PIX` or `PXB` apart.
    /// What the format cannot say is lost: `NODE` becomes `PHB`, and figures other than PCIe speeds and link counts are left out.
    /// A device whose PCI function is unknown gets one in the unused domain `fffe`, by its position.
    /// NUMA nodes without devices are left out; a device whose NUMA node is unknown is put under processor -1.
    /// Machines are told apart by `host_hash` if there are several.
    pub fn to_nccl_xml(&self) -> String {
        let endpoints: Vec<&Node> = self.endpoints().into_iter().filter(|node| is_exported(node)).collect();
        let places: BTreeSet<(Option<&str>, Option<u32>)> =
            endpoints.iter().map(|node| place(node)).collect();
        let hosts: BTreeSet<Option<&str>> = places.iter().map(|(host, _)| *host).collect();
        let mut writer = Writer { topology: self, text: String::from("<system version=\"1\">\n"), nets: 0 };
        for wanted in places {
            let near: Vec<&Node> = endpoints.iter().copied().filter(|node| place(node) == wanted).collect();
            let host = match hosts.iter().position(|host| *host == wanted.0) {
                Some(index) if hosts.len() > 1 => format!(" host_hash=\"{:#x}\"", index + 1),
                _ => String::new(),
            };
            writer.cpu(wanted.1, &host, &near);
        }
        writer.text.push_str("</system>\n");
        writer.text
    }

    /// `n` of `GPUn` if every GPU of the machine is named like that, else the position among them.
    fn device_number(&self, node: &Node) -> usize {
        let on_machine = |other: &Node| is_exported_gpu(other) && other.place.host == node.place.host;
        let number = |node: &Node| node.name.strip_prefix("GPU")?.parse().ok();
        let all_numbered =
            self.nodes().iter().filter(|other| on_machine(other)).all(|other| number(other).is_some());
        number(node).filter(|_| all_numbered).unwrap_or_else(|| self.rank_among(node, on_machine))
    }

    /// How many nodes of a sort come before one.
    fn rank_among(&self, node: &Node, is_of_sort: impl Fn(&Node) -> bool) -> usize {
        let before = &self.nodes()[..node.id.index()];
        before.iter().filter(|other| is_of_sort(other)).count()
    }
}

struct Writer<'t> {
    topology: &'t Topology,
    text: String,
    /// Network interfaces written so far.
    nets: usize,
}

// Writing to a string does not fail, so the results below are dropped.
impl Writer<'_> {
    fn cpu(&mut self, numa_node: Option<u32>, host: &str, near: &[&Node]) {
        let numa_id = numa_node.map_or(-1, i64::from);
        let mask = self.mask(numa_node, near);
        let _ = writeln!(self.text, "  <cpu{host} numaid=\"{numa_id}\"{mask}>");
        for tree in tree::group(self.topology, near, PathClass::Pxb) {
            self.tree(&tree, 4);
        }
        self.text.push_str("  </cpu>\n");
    }

    fn mask(&self, numa_node: Option<u32>, near: &[&Node]) -> String {
        let of_host = numa_node
            .and_then(|numa_node| self.topology.host(numa_node))
            .and_then(|host| self.topology.node(host)?.place.cpus.as_ref());
        let cpus = of_host.or_else(|| near.iter().find_map(|node| node.place.cpus.as_ref()));
        cpus.map_or_else(String::new, |cpus| format!(" affinity=\"{}\"", hex_mask(cpus)))
    }

    fn tree(&mut self, tree: &Tree, indent: usize) {
        let (path, parts) = match tree {
            Tree::Leaf(node) => return self.leaf(&self.topology.nodes()[node.index()], indent),
            Tree::Join { path, parts } => (*path, parts),
        };
        self.open_switch(tree, indent);
        for part in parts {
            // Devices below one switch are PIX apart; a switch each makes them PXB.
            let is_alone = path == PathClass::Pxb && matches!(part, Tree::Leaf(_));
            if is_alone {
                self.open_switch(part, indent + 2);
                self.tree(part, indent + 4);
                self.close("pci", indent + 2);
            } else {
                self.tree(part, indent + 2);
            }
        }
        self.close("pci", indent);
    }

    /// A switch is written as fast as its fastest device, so that it limits none.
    fn open_switch(&mut self, tree: &Tree, indent: usize) {
        let leaves = tree.leaves();
        let first = leaves.first().map_or(0, |node| node.index());
        // Several levels can share their first leaf; the indent tells them apart.
        let bus_id = format!("ffff:{:02x}:{:02x}.{}", first / 8 % 256, indent / 2 % 32, first % 8);
        let rates = leaves.into_iter().filter_map(|node| rate(&self.topology.nodes()[node.index()]));
        let fastest = rates.max_by(|a, b| a.bandwidth().gb_per_s.total_cmp(&b.bandwidth().gb_per_s));
        let rate = rate_attributes(fastest);
        let _ = writeln!(self.text, "{:indent$}<pci busid=\"{bus_id}\" class=\"0x060400\"{rate}>", "");
    }

    fn close(&mut self, element: &str, indent: usize) {
        let _ = writeln!(self.text, "{:indent$}</{element}>", "");
    }

    fn leaf(&mut self, node: &Node, indent: usize) {
        let class = if node.is_device() { "0x030200" } else { "0x020700" };
        let rate = rate_attributes(rate(node));
        let bus_id = bus_id(node);
        let _ = writeln!(self.text, "{:indent$}<pci busid=\"{bus_id}\" class=\"{class}\"{rate}>", "");
        if node.is_device() {
            self.gpu(node, indent + 2);
        } else {
            self.nic(node, indent + 2);
        }
        self.close("pci", indent);
    }

    fn nic(&mut self, node: &Node, indent: usize) {
        let _ = writeln!(self.text, "{:indent$}<nic>", "");
        let names = node.model.as_ref().unwrap_or(&node.name);
        for name in names.split_whitespace() {
            let (name, dev) = (escape(name), self.nets);
            let _ = writeln!(self.text, "{:indent$}  <net name=\"{name}\" dev=\"{dev}\"/>", "");
            self.nets += 1;
        }
        self.close("nic", indent);
    }

    fn gpu(&mut self, node: &Node, indent: usize) {
        let dev = self.topology.device_number(node);
        let _ = writeln!(self.text, "{:indent$}<gpu dev=\"{dev}\" rank=\"{dev}\">", "");
        let mut to_switch = 0;
        for other in self.topology.nodes().iter().filter(|other| is_exported_gpu(other)) {
            // One edge speaks for both directions, since readers expect both ends to say the same.
            let (a, b) = (node.id.min(other.id), node.id.max(other.id));
            let Some(edge) = self.topology.either_edge(a, b).filter(|edge| edge.veto.is_none()) else {
                continue;
            };
            let count = edge.link_count.map_or(1, |count| count.value);
            match edge.class.value {
                LinkClass::NvSwitch => to_switch = count.max(to_switch),
                LinkClass::NvLink => self.fast_link("nvlink", indent, &bus_id(other), count, "0x030200"),
                LinkClass::Xgmi => self.fast_link("xgmi", indent, &bus_id(other), count, "0x030200"),
                _ => {}
            }
        }
        if to_switch > 0 {
            self.fast_link("nvlink", indent, "fffd:00:00.0", to_switch, "0x068000");
        }
        self.close("gpu", indent);
    }

    fn fast_link(&mut self, element: &str, indent: usize, target: &str, count: u32, class: &str) {
        let _ = writeln!(
            self.text,
            "{:indent$}  <{element} target=\"{target}\" count=\"{count}\" tclass=\"{class}\"/>",
            ""
        );
    }
}

fn place(node: &Node) -> (Option<&str>, Option<u32>) {
    (node.place.host.as_deref(), node.place.numa_node)
}

fn is_exported(node: &Node) -> bool {
    is_exported_gpu(node) || matches!(node.kind, NodeKind::Nic)
}

fn is_exported_gpu(node: &Node) -> bool {
    matches!(node.kind, NodeKind::Device { kind: DeviceKind::Gpu, .. })
}

fn bus_id(node: &Node) -> String {
    let unknown = |id: NodeId| {
        let index = id.index();
        format!("fffe:{:02x}:{:02x}.{}", index / 256 % 256, index / 8 % 32, index % 8)
    };
    node.place.pci.map_or_else(|| unknown(node.id), |pci| pci.to_string())
}

fn rate(node: &Node) -> Option<PcieRate> {
    node.place.pcie.and_then(|link| link.max.or(link.current))
}

/// An empty speed is how the format says that it is unknown.
fn rate_attributes(rate: Option<PcieRate>) -> String {
    match rate {
        Some(rate) => {
            let gt_per_s = f64::from(rate.mt_per_s) / 1_000.0;
            format!(" link_speed=\"{gt_per_s:.1} GT/s PCIe\" link_width=\"{}\"", rate.lanes)
        }
        None => " link_speed=\"\" link_width=\"0\"".to_owned(),
    }
}

/// 32-bit words, highest first; numbers beyond what a mask can hold are left out.
fn hex_mask(cpus: &CpuList) -> String {
    let mut words: Vec<u32> = Vec::new();
    for cpu in cpus.iter().take_while(|cpu| *cpu < 65_536) {
        let word = (cpu / 32) as usize;
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        words[word] |= 1 << (cpu % 32);
    }
    let words: Vec<String> = words.iter().rev().map(|word| format!("{word:08x}")).collect();
    words.join(",")
}
