//! Finds out from Linux's sysfs what this machine is made of, without any driver library.
//!
//! Everything sysfs says is marked [`Provenance::Sysfs`].
//! What it leaves open (a container without `/sys`, a firmware that assigns no NUMA node) stays unknown, or is marked [`Provenance::Assumed`] and explained in a note; nothing here fails.

use std::{
    fs, iter,
    path::{Path, PathBuf},
};

use serde::Serialize;
use warpweft_core_types::{Bandwidth, LinkClass, PathClass, PciAddress, Provenance};

use crate::{
    BuildError, CpuList, DeviceKind, LinkDesc, NodeDesc, NodeId, NodeKind, PcieLink, PcieRate, Topology,
    TopologyBuilder,
};

/// What sysfs says about a machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Discovery {
    /// Accelerators, network cards and the memory of NUMA nodes.
    pub topology: Topology,
    /// The NUMA nodes one by one.
    pub numa_nodes: Vec<NumaNode>,
    /// What was missing or left out, one sentence each.
    pub notes: Vec<String>,
}

/// A NUMA node of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    /// Its number.
    pub number: u32,
    /// Its processors; empty for memory without any.
    pub cpus: CpuList,
    /// Number of each node and the firmware's distance to it, where 10 is local (ACPI 6.5, section 5.2.17).
    pub distances: Vec<(u32, u32)>,
}

/// Reads the machine whose sysfs is at `root`, normally `/sys`.
///
/// GPUs are PCI functions of class 03 and accelerators of class 12, except displays of boards and virtual machines; network cards are of class 02.
/// They are named `GPU0`, `NPU0` and `NIC0` onwards, in the order of their PCI addresses, which is the order of `nvidia-smi`.
/// Virtual functions are left out where their physical function is there.
pub fn discover(root: &Path) -> Discovery {
    let mut notes = Vec::new();
    let numa_nodes = numa_nodes(root);
    if numa_nodes.is_empty() {
        notes.push("no NUMA nodes are listed".to_owned());
    }
    let functions = functions(root, &mut notes);
    let machine = Machine { numa_nodes, functions };
    let topology = machine.topology(&mut notes).unwrap_or_else(|error| {
        notes.push(format!("the parts do not make a topology: {error}"));
        Topology::builder().build()
    });
    Discovery { topology, numa_nodes: machine.numa_nodes, notes }
}

struct Machine {
    numa_nodes: Vec<NumaNode>,
    /// Accelerators and network cards by PCI address.
    functions: Vec<Function>,
}

/// A PCI function that is of interest.
struct Function {
    address: PciAddress,
    role: Role,
    /// The host bridge it hangs under, such as `pci0000:00`; `None` if its place in the tree is unknown.
    root: Option<String>,
    /// The bridges above it, outermost first, each with the link above it.
    bridges: Vec<(PciAddress, PcieLink)>,
    link: PcieLink,
    numa_node: Option<u32>,
    cpus: Option<CpuList>,
    model: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Device(DeviceKind),
    Nic,
}

impl Machine {
    fn topology(&self, notes: &mut Vec<String>) -> Result<Topology, BuildError> {
        let mut builder = Topology::builder();
        for node in &self.numa_nodes {
            let host = builder.host(node.number)?;
            builder.set_cpus(host, Some(node.cpus.clone()).filter(|cpus| !cpus.is_empty()));
        }
        let mut ids: Vec<NodeId> = Vec::new();
        for (function, name) in self.functions.iter().zip(names(&self.functions)) {
            ids.push(builder.node(function.describe(name))?);
        }
        for (index, a) in self.functions.iter().enumerate() {
            for (other, b) in self.functions.iter().enumerate().skip(index + 1) {
                builder.link_both(ids[index], ids[other], self.between(a, b))?;
            }
        }
        for (function, &id) in self.functions.iter().zip(&ids) {
            self.attach(&mut builder, function, id, notes)?;
        }
        builder.join_hosts(Provenance::Sysfs)?;
        Ok(builder.build())
    }

    fn between(&self, a: &Function, b: &Function) -> LinkDesc {
        LinkDesc {
            path: self.path(a, b),
            bandwidth: slowest_between(a, b),
            ..LinkDesc::new(LinkClass::Pcie, Provenance::Sysfs)
        }
    }

    /// The way between two functions; `None` if their place in the tree or their NUMA nodes are unknown.
    ///
    /// A switch is one bridge towards the host and one towards each device, so below a common bridge one more may follow on either side without a second switch.
    fn path(&self, a: &Function, b: &Function) -> Option<PathClass> {
        if a.root.is_some() && a.root == b.root {
            let common = common_bridges(a, b);
            let below = (a.bridges.len() - common).max(b.bridges.len() - common);
            return Some(match (common, below) {
                (0, _) => PathClass::Phb,
                (_, 0 | 1) => PathClass::Pix,
                _ => PathClass::Pxb,
            });
        }
        match (a.numa_node, b.numa_node) {
            (Some(a), Some(b)) if a == b => Some(PathClass::Node),
            (Some(_), Some(_)) => Some(PathClass::Sys),
            _ if self.numa_nodes.len() == 1 => Some(PathClass::Node),
            _ => None,
        }
    }

    /// Joins a function to the memory of its NUMA node, or to the only one there can be.
    fn attach(
        &self,
        builder: &mut TopologyBuilder,
        function: &Function,
        id: NodeId,
        notes: &mut Vec<String>,
    ) -> Result<(), BuildError> {
        let (numa_node, provenance) = match (function.numa_node, self.numa_nodes.as_slice()) {
            (Some(numa_node), _) => (numa_node, Provenance::Sysfs),
            (None, [only]) => (only.number, Provenance::Assumed),
            (None, []) => (0, Provenance::Assumed),
            (None, _) => {
                notes.push(format!(
                    "{} has no NUMA node, so its way to host memory is unknown",
                    function.address
                ));
                return Ok(());
            }
        };
        let host = builder.host(numa_node)?;
        let desc = LinkDesc { bandwidth: slowest(function, 0), ..LinkDesc::new(LinkClass::Pcie, provenance) };
        builder.link_both(id, host, desc)
    }
}

impl Function {
    fn describe(&self, name: String) -> NodeDesc {
        let kind = match self.role {
            Role::Device(kind) => NodeKind::Device { uuid: None, kind },
            Role::Nic => NodeKind::Nic,
        };
        let mut desc = NodeDesc::new(name, kind).at(self.address).model(&self.model);
        desc.place.pcie = Some(self.link).filter(|link| *link != PcieLink::default());
        desc.place.numa_node = self.numa_node;
        desc.place.cpus.clone_from(&self.cpus);
        desc
    }
}

/// `GPU0`, `NPU0`, `NIC0` and so on, each sort counted by itself.
fn names(functions: &[Function]) -> impl Iterator<Item = String> {
    functions.iter().enumerate().map(|(index, function)| {
        let before = functions[..index].iter();
        let number = before.filter(|other| word(other.role) == word(function.role)).count();
        format!("{}{number}", word(function.role))
    })
}

fn word(role: Role) -> &'static str {
    match role {
        Role::Device(DeviceKind::Gpu) => "GPU",
        Role::Device(_) => "NPU",
        Role::Nic => "NIC",
    }
}

fn numa_nodes(root: &Path) -> Vec<NumaNode> {
    let folder = root.join("devices/system/node");
    let mut nodes: Vec<(u32, PathBuf)> = entries(&folder)
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?;
            Some((name.strip_prefix("node")?.parse().ok()?, path))
        })
        .collect();
    nodes.sort();
    let numbers: Vec<u32> = nodes.iter().map(|(number, _)| *number).collect();
    nodes
        .iter()
        .map(|(number, path)| {
            let distances = text(path, "distance").unwrap_or_default();
            let distances = distances.split_whitespace().filter_map(|word| word.parse().ok());
            NumaNode {
                number: *number,
                cpus: text(path, "cpulist").and_then(|list| list.parse().ok()).unwrap_or_default(),
                distances: iter::zip(numbers.iter().copied(), distances).collect(),
            }
        })
        .collect()
}

fn functions(root: &Path, notes: &mut Vec<String>) -> Vec<Function> {
    let folder = root.join("bus/pci/devices");
    if !folder.is_dir() {
        notes.push("no PCI devices are listed".to_owned());
    }
    let mut functions: Vec<Function> = entries(&folder).filter_map(|path| function(&path, notes)).collect();
    functions.sort_by_key(|function| function.address);
    functions
}

fn function(path: &Path, notes: &mut Vec<String>) -> Option<Function> {
    let address: PciAddress = path.file_name()?.to_str()?.parse().ok()?;
    let class = hex(path, "class")?;
    let vendor = hex(path, "vendor").unwrap_or_default();
    let role = role(class, vendor)?;
    if path.join("physfn").exists() {
        return None;
    }
    if class >> 8 == 0x0300 && DISPLAY_VENDORS.contains(&vendor) {
        notes.push(format!("{address} is a display of the board and no accelerator"));
        return None;
    }
    let (root, bridges) = place(path, address);
    Some(Function {
        address,
        role,
        root,
        bridges,
        link: link(path),
        // Linux prints -1 where the firmware does not say.
        numa_node: text(path, "numa_node").and_then(|number| number.parse().ok()),
        cpus: text(path, "local_cpulist")
            .and_then(|list| list.parse().ok())
            .filter(|cpus: &CpuList| !cpus.is_empty()),
        model: model(path, vendor),
    })
}

/// By the class codes of the PCI Code and ID Assignment Specification, revision 1.16.
fn role(class: u32, vendor: u32) -> Option<Role> {
    match class >> 16 {
        0x02 => Some(Role::Nic),
        0x03 => Some(Role::Device(DeviceKind::Gpu)),
        // AMD's data centre GPUs are "processing accelerators", as others' NPUs are.
        0x12 if vendor == AMD => Some(Role::Device(DeviceKind::Gpu)),
        0x12 => Some(Role::Device(DeviceKind::Npu)),
        _ => None,
    }
}

/// Network interfaces where there are any, else vendor and device number.
fn model(path: &Path, vendor: u32) -> String {
    let mut names: Vec<String> = ["infiniband", "net"]
        .iter()
        .flat_map(|folder| entries(&path.join(folder)))
        .filter_map(|entry| Some(entry.file_name()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    if names.is_empty() {
        let device = hex(path, "device").unwrap_or_default();
        return format!("{vendor:04x}:{device:04x}");
    }
    names.join(" ")
}

/// The host bridge and the bridges above a function, from where its folder really is.
fn place(path: &Path, address: PciAddress) -> (Option<String>, Vec<(PciAddress, PcieLink)>) {
    let Ok(real) = fs::canonicalize(path) else {
        return (None, Vec::new());
    };
    let mut root = None;
    let mut bridges = Vec::new();
    let mut folder = PathBuf::new();
    for component in real.components() {
        folder.push(component);
        let Some(name) = component.as_os_str().to_str() else {
            continue;
        };
        if is_host_bridge(name) {
            root = Some(name.to_owned());
            bridges.clear();
        } else if let (Some(_), Ok(bridge)) = (&root, name.parse::<PciAddress>())
            && bridge != address
        {
            bridges.push((bridge, link(&folder)));
        }
    }
    (root, bridges)
}

/// `pci0000:00`.
fn is_host_bridge(name: &str) -> bool {
    name.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| [domain, bus].iter().all(|part| u32::from_str_radix(part, 16).is_ok()))
}

fn link(path: &Path) -> PcieLink {
    let rate = |speed: &str, width: &str| PcieRate::parse(&text(path, speed)?, &text(path, width)?);
    PcieLink {
        current: rate("current_link_speed", "current_link_width"),
        max: rate("max_link_speed", "max_link_width"),
    }
}

fn common_bridges(a: &Function, b: &Function) -> usize {
    if a.root != b.root {
        return 0;
    }
    let pairs = a.bridges.iter().zip(&b.bridges);
    pairs.take_while(|(a, b)| a.0 == b.0).count()
}

fn slowest_between(a: &Function, b: &Function) -> Option<Bandwidth> {
    let common = common_bridges(a, b);
    let (a, b) = (slowest(a, common)?, slowest(b, common)?);
    Some(if a.gb_per_s < b.gb_per_s { a } else { b })
}

/// The slowest link from a function up to the bridge at `depth`; `None` if any is unknown.
///
/// A port of a switch tells the rate of the link it is an end of, so every link is looked at from both ends.
fn slowest(function: &Function, depth: usize) -> Option<Bandwidth> {
    let above = function.bridges.get(depth..)?;
    let links = above.iter().map(|(_, link)| link).chain([&function.link]);
    links.map(PcieLink::bandwidth).reduce(|slowest, next| {
        let (slowest, next) = (slowest?, next?);
        Some(if next.gb_per_s < slowest.gb_per_s { next } else { slowest })
    })?
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| Some(entry.ok()?.path()))
}

fn text(folder: &Path, file: &str) -> Option<String> {
    let text = fs::read_to_string(folder.join(file)).ok()?;
    Some(text.trim().to_owned())
}

fn hex(folder: &Path, file: &str) -> Option<u32> {
    let text = text(folder, file)?;
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

const AMD: u32 = 0x1002;

/// Makers of displays for servers' management and for virtual machines: ASPEED, Matrox, Cirrus, Bochs, QXL, VMware, virtio, Hyper-V.
const DISPLAY_VENDORS: [u32; 8] = [0x1a03, 0x102b, 0x1013, 0x1234, 0x1b36, 0x15ad, 0x1af4, 0x1414];
