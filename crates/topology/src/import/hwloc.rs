//! hwloc's XML, formats 1 to 3: a tree of `<object>` with PCI bridges and devices, and matrices of link bandwidths.

use std::collections::HashMap;

use warpweft_core_types::{Bandwidth, DeviceUuid, LinkClass, PathClass};

use super::{
    Fault, Format, ImportError, Imported, MAX_ENDPOINTS, Numa, Report, ReportDevice, ReportLink, ReportNic,
    Via,
    error::token,
    xml::{self, Element},
};
use crate::{
    BuildError, CpuList, DeviceKind, LinkDesc, NodeDesc, NodeId, NodeKind, Provenance, Topology,
    TopologyBuilder, builder::MAX_NUMA_NODES,
};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let root = xml::parse(text, Format::HwlocXml)?;
    if root.name != "topology" {
        return Err(damaged(&root, Fault::missing("the root element <topology>")));
    }
    let mut machine = Machine {
        version: root.attribute("version").unwrap_or("1.x (no version attribute)").to_owned(),
        ..Machine::default()
    };
    for object in root.children_named("object") {
        machine.read(object, &Context::default())?;
    }
    let mut fast = Vec::new();
    for element in &root.children {
        if element.name.starts_with("distances2")
            && let Some(class) = element.attribute("name").and_then(fast_class)
        {
            fast.push(machine.fast_matrix(element, class)?);
        }
    }
    let report = machine.report(&fast);
    let topology =
        machine.topology(&fast).map_err(|source| ImportError::Build { format: Format::HwlocXml, source })?;
    Ok(Imported { topology, report })
}

#[derive(Default)]
struct Machine {
    version: String,
    gpus: Vec<PciDevice>,
    nics: Vec<PciDevice>,
    ethernet_only: usize,
    numa_nodes: Vec<(u32, Option<CpuList>)>,
    /// What the objects of matrices are, by global index.
    roles: HashMap<u64, Role>,
    /// Bridges seen so far, to tell them apart.
    bridges: usize,
    warnings: Vec<String>,
}

#[derive(Clone, Copy)]
enum Role {
    Gpu(usize),
    NvSwitch,
    Other,
}

/// What is known from the ancestors of an object.
#[derive(Clone, Default)]
struct Context {
    /// NUMA nodes of the nearest ancestor that has any.
    numa: Vec<u32>,
    host_bridge: Option<usize>,
    /// PCI bridges above, outermost first, each with the speed of its upstream link.
    bridges: Vec<(usize, Option<f64>)>,
}

struct PciDevice {
    context: Context,
    bus_id: Option<String>,
    gb_s: f64,
    os_devices: Vec<String>,
    model: Option<String>,
    uuid: Option<DeviceUuid>,
}

/// Bandwidths over one kind of fast link, in megabytes per second.
struct FastMatrix {
    class: LinkClass,
    direct: Vec<Vec<u64>>,
    to_switch: Vec<u64>,
}

impl Machine {
    /// Recursion is bounded by the depth of the document.
    fn read(&mut self, object: &Element, above: &Context) -> Result<(), ImportError> {
        let mut context = above.clone();
        if let Some(nodes) = object.attribute("nodeset") {
            context.numa = nodeset(object, nodes)?;
        }
        self.note_role(object, Role::Other);
        match object.attribute("type") {
            Some("Bridge") => {
                self.bridges += 1;
                if object.attribute("bridge_type").is_some_and(|kind| kind.starts_with('0')) {
                    context.host_bridge = Some(self.bridges);
                    context.bridges.clear();
                } else {
                    let speed = known_speed(link_speed(object)?);
                    context.bridges.push((self.bridges, speed));
                }
            }
            Some("NUMANode") => self.add_numa_node(object)?,
            Some("PCIDev") => return self.add_pci_device(object, context),
            _ => {}
        }
        for child in object.children_named("object") {
            self.read(child, &context)?;
        }
        Ok(())
    }

    fn note_role(&mut self, object: &Element, role: Role) {
        if let Some(index) = object.attribute("gp_index").and_then(|index| index.parse().ok()) {
            self.roles.insert(index, role);
        }
    }

    fn add_numa_node(&mut self, object: &Element) -> Result<(), ImportError> {
        let index: u32 = number(object, "os_index")?
            .ok_or_else(|| damaged(object, Fault::missing("attribute os_index of a NUMANode")))?;
        if self.numa_nodes.len() == MAX_NUMA_NODES {
            return Err(too_many(object, "NUMA nodes", MAX_NUMA_NODES));
        }
        let cpus = object.attribute("cpuset").and_then(|mask| CpuList::from_mask(mask).ok());
        self.numa_nodes.push((index, cpus.filter(|cpus| !cpus.is_empty())));
        Ok(())
    }

    fn add_pci_device(&mut self, object: &Element, context: Context) -> Result<(), ImportError> {
        let class = object.attribute("pci_type").and_then(|kind| kind.get(..4)).unwrap_or_default();
        let os_devices = self.os_devices(object)?;
        let named = |names: &[&str]| {
            let is_named = |device: &&OsDevice| names.iter().any(|name| device.name.starts_with(name));
            os_devices.iter().filter(is_named).count()
        };
        let has_driver = os_devices.iter().any(|device| device.is_compute) && named(&COMPUTE_NAMES) > 0;
        let is_fabric = os_devices.iter().any(|device| device.is_fabric);
        let mut device = PciDevice {
            context,
            bus_id: object.attribute("pci_busid").map(str::to_owned),
            gb_s: link_speed(object)?,
            os_devices: Vec::new(),
            model: info(object, "PCIDevice").map(str::to_owned),
            uuid: None,
        };
        if has_driver || COMPUTE_CLASSES.contains(&class) {
            if !has_driver {
                let bus_id = device.bus_id.as_deref().unwrap_or("a PCI function");
                self.warnings.push(format!("{bus_id} is taken for a GPU by its class {class} alone"));
            }
            self.check_room(object)?;
            let is_kept = |name: &&OsDevice| COMPUTE_NAMES.iter().any(|kept| name.name.starts_with(kept));
            device.os_devices = os_devices.iter().filter(is_kept).map(|os| os.name.clone()).collect();
            let uuids = object.children_named("object").filter_map(|os| info(os, "NVIDIAUUID"));
            device.uuid = uuids.filter_map(|uuid| uuid.parse().ok()).next();
            self.note_roles(object, Role::Gpu(self.gpus.len()));
            self.gpus.push(device);
        } else if is_fabric {
            self.check_room(object)?;
            device.os_devices = os_devices.into_iter().map(|os| os.name).collect();
            self.nics.push(device);
        } else if class.starts_with("02") {
            self.ethernet_only += 1;
        } else if object.attribute("subtype") == Some("NVSwitch") || class == "0680" {
            self.note_roles(object, Role::NvSwitch);
        }
        Ok(())
    }

    /// Matrices name a PCI device or one of the OS devices in it.
    fn note_roles(&mut self, object: &Element, role: Role) {
        self.note_role(object, role);
        for child in object.children_named("object") {
            self.note_role(child, role);
        }
    }

    fn check_room(&self, object: &Element) -> Result<(), ImportError> {
        if self.gpus.len() + self.nics.len() < MAX_ENDPOINTS {
            return Ok(());
        }
        Err(too_many(object, "GPUs and network cards", MAX_ENDPOINTS))
    }

    fn os_devices(&self, pci: &Element) -> Result<Vec<OsDevice>, ImportError> {
        let is_os_device = |object: &&Element| object.attribute("type") == Some("OSDev");
        pci.children_named("object")
            .filter(is_os_device)
            .map(|object| {
                let kind: u64 = number(object, "osdev_type")?.unwrap_or_default();
                let is_mask = self.version.starts_with('3');
                Ok(OsDevice {
                    name: object.attribute("name").unwrap_or_default().to_owned(),
                    is_compute: if is_mask { kind & 0b1100 != 0 } else { matches!(kind, 1 | 5) },
                    is_fabric: if is_mask { kind & 32 != 0 } else { kind == 3 },
                })
            })
            .collect()
    }

    fn fast_matrix(&self, element: &Element, class: LinkClass) -> Result<FastMatrix, ImportError> {
        let objects = self.matrix_objects(element)?;
        let values = words(element, "u64values");
        let count = objects.len();
        let expected = count.saturating_mul(count);
        if values.len() != expected {
            let fault = Fault::Announced { what: "distances", expected, found: values.len() };
            return Err(damaged(element, fault));
        }
        let mut matrix = FastMatrix {
            class,
            direct: vec![vec![0; self.gpus.len()]; self.gpus.len()],
            to_switch: vec![0; self.gpus.len()],
        };
        for (row, from) in values.chunks(count.max(1)).zip(&objects) {
            let Role::Gpu(from) = *from else { continue };
            for (text, to) in row.iter().zip(&objects) {
                let value: u64 =
                    text.parse().map_err(|_| damaged(element, Fault::bad_value("a distance", text)))?;
                match *to {
                    Role::Gpu(to) => matrix.direct[from][to] = matrix.direct[from][to].max(value),
                    Role::NvSwitch => matrix.to_switch[from] = matrix.to_switch[from].saturating_add(value),
                    Role::Other => {}
                }
            }
        }
        Ok(matrix)
    }

    fn matrix_objects(&self, element: &Element) -> Result<Vec<Role>, ImportError> {
        let names = words(element, "indexes");
        let expected: usize =
            number(element, "nbobjs")?.ok_or_else(|| damaged(element, Fault::missing("attribute nbobjs")))?;
        if names.len() != expected {
            let fault = Fault::Announced { what: "objects", expected, found: names.len() };
            return Err(damaged(element, fault));
        }
        let role = |name: &&str| {
            let index = name.rsplit(':').next().unwrap_or_default();
            let index: u64 = index
                .parse()
                .map_err(|_| damaged(element, Fault::bad_value("the index of an object", name)))?;
            let known = self.roles.get(&index).copied();
            known.ok_or_else(|| damaged(element, Fault::missing(format!("object {}", token(name)))))
        };
        names.iter().map(role).collect()
    }

    /// The fast link from one GPU to another, if there is one: class, way, and megabytes per second.
    fn fast(&self, matrices: &[FastMatrix], a: usize, b: usize) -> Option<(LinkClass, Via, u64)> {
        matrices.iter().find_map(|matrix| {
            let switched = matrix.to_switch[a].min(matrix.to_switch[b]);
            match (matrix.direct[a][b], matrix.class) {
                (0, LinkClass::NvLink) if switched > 0 => Some((LinkClass::NvSwitch, Via::Switch, switched)),
                (0, _) => None,
                (direct, class) => Some((class, Via::Direct, direct)),
            }
        })
    }

    fn report(&self, fast: &[FastMatrix]) -> Report {
        let mut report = Report::new(Format::HwlocXml, self.gpus.len());
        report.hwloc_xml_version = Some(self.version.clone());
        report.nics = Some(self.nics.len());
        report.ethernet_only = Some(self.ethernet_only);
        let nodes = self.numa_nodes.iter().map(|(node, _)| i64::from(*node));
        report.numa_nodes = Some(nodes.collect());
        let gpus = self.gpus.iter().enumerate();
        report.gpu_list = Some(gpus.map(|(index, gpu)| report_gpu(index, gpu)).collect());
        let nics = self.nics.iter().enumerate();
        report.nic_list = Some(nics.map(|(index, nic)| report_nic(index, nic)).collect());
        report.links = Some(self.report_links(fast));
        report.gpu_to_switch_mb_s =
            fast.iter().find(|matrix| matrix.to_switch.iter().any(|&rate| rate > 0)).map(|matrix| {
                let rates = matrix.to_switch.iter().enumerate();
                rates.map(|(gpu, &rate)| (format!("GPU{gpu}"), rate)).collect()
            });
        report.nvlink_stated = fast.is_empty().then_some(false);
        report.warnings.clone_from(&self.warnings);
        report
    }

    fn report_links(&self, fast: &[FastMatrix]) -> Vec<ReportLink> {
        let mut links = Vec::new();
        for a in 0..self.gpus.len() {
            for b in a + 1..self.gpus.len() {
                let path = path(&self.gpus[a].context, &self.gpus[b].context).to_string();
                let (a_name, b_name) = (format!("GPU{a}"), format!("GPU{b}"));
                links.push(match self.fast(fast, a, b) {
                    Some((class, via, mb_s)) => ReportLink {
                        via: Some(via),
                        pci: Some(path),
                        mb_s: Some(mb_s),
                        ..ReportLink::new(&a_name, &b_name, fast_word(class))
                    },
                    None => ReportLink::new(&a_name, &b_name, path),
                });
            }
        }
        for (a, gpu) in self.gpus.iter().enumerate() {
            for (b, nic) in self.nics.iter().enumerate() {
                let path = path(&gpu.context, &nic.context).to_string();
                links.push(ReportLink::new(&format!("GPU{a}"), &format!("NIC{b}"), path));
            }
        }
        links
    }

    fn topology(&self, fast: &[FastMatrix]) -> Result<Topology, BuildError> {
        let mut builder = Topology::builder();
        for (node, cpus) in &self.numa_nodes {
            let host = builder.host(*node)?;
            builder.set_cpus(host, cpus.clone());
        }
        let mut ids = Vec::new();
        for (index, gpu) in self.gpus.iter().enumerate() {
            let desc = NodeDesc::device(format!("GPU{index}"), DeviceKind::Gpu);
            ids.push(builder.node(gpu.describe(desc))?);
        }
        for (index, nic) in self.nics.iter().enumerate() {
            let mut desc = nic.describe(NodeDesc::new(format!("NIC{index}"), NodeKind::Nic));
            desc.model = Some(nic.os_devices.join(" "));
            ids.push(builder.node(desc)?);
        }
        let all: Vec<&PciDevice> = self.gpus.iter().chain(&self.nics).collect();
        for a in 0..all.len() {
            for b in a + 1..all.len() {
                let desc = LinkDesc {
                    bandwidth: slowest_between(all[a], all[b]),
                    ..LinkDesc::new(LinkClass::Pcie, Provenance::File)
                        .path(path(&all[a].context, &all[b].context))
                };
                builder.link_both(ids[a], ids[b], desc)?;
            }
        }
        self.add_fast_links(&mut builder, &ids, fast)?;
        for (&id, device) in ids.iter().zip(&all) {
            let Some(numa_node) = builder.numa_node_of(id) else {
                continue;
            };
            let host = builder.host(numa_node)?;
            let desc = LinkDesc {
                bandwidth: slowest(device, 0),
                ..LinkDesc::new(LinkClass::Pcie, Provenance::File)
            };
            builder.link_both(id, host, desc)?;
        }
        builder.join_hosts(Provenance::File)?;
        Ok(builder.build())
    }

    fn add_fast_links(
        &self,
        builder: &mut TopologyBuilder,
        ids: &[NodeId],
        fast: &[FastMatrix],
    ) -> Result<(), BuildError> {
        let count = self.gpus.len();
        for (a, b) in (0..count).flat_map(|a| (0..count).map(move |b| (a, b))) {
            if a == b {
                continue;
            }
            if let Some((class, _, mb_s)) = self.fast(fast, a, b) {
                let desc = LinkDesc::new(class, Provenance::File).bandwidth(from_mb_per_s(mb_s));
                builder.link(ids[a], ids[b], desc)?;
            }
        }
        Ok(())
    }
}

impl PciDevice {
    fn describe(&self, mut desc: NodeDesc) -> NodeDesc {
        desc.model.clone_from(&self.model);
        desc.place.pci = self.bus_id.as_ref().and_then(|bus_id| bus_id.parse().ok());
        desc.place.numa_node = match self.context.numa.as_slice() {
            [node] => Some(*node),
            _ => None,
        };
        match self.uuid {
            Some(uuid) => desc.uuid(uuid),
            None => desc,
        }
    }
}

struct OsDevice {
    name: String,
    /// A GPU or coprocessor.
    is_compute: bool,
    /// InfiniBand and its relatives.
    is_fabric: bool,
}

/// The way between two devices through the PCI tree.
///
/// A switch is one bridge towards the host and one towards each device, so below a common bridge one more may follow on either side without a second switch.
/// Devices whose ancestors have the same set of NUMA nodes are taken to be in one.
fn path(a: &Context, b: &Context) -> PathClass {
    if a.host_bridge.is_some() && a.host_bridge == b.host_bridge {
        let common = common_bridges(a, b);
        let below = (a.bridges.len() - common).max(b.bridges.len() - common);
        return match (common, below) {
            (0, _) => PathClass::Phb,
            (_, 0 | 1) => PathClass::Pix,
            _ => PathClass::Pxb,
        };
    }
    if a.numa == b.numa { PathClass::Node } else { PathClass::Sys }
}

fn common_bridges(a: &Context, b: &Context) -> usize {
    if a.host_bridge != b.host_bridge {
        return 0;
    }
    let pairs = a.bridges.iter().zip(&b.bridges);
    pairs.take_while(|(a, b)| a.0 == b.0).count()
}

fn slowest_between(a: &PciDevice, b: &PciDevice) -> Option<Bandwidth> {
    let common = common_bridges(&a.context, &b.context);
    let (a, b) = (slowest(a, common)?, slowest(b, common)?);
    Some(if a.gb_per_s < b.gb_per_s { a } else { b })
}

/// The slowest PCIe link from a device up to the bridge at `depth`; `None` if any is unknown.
fn slowest(device: &PciDevice, depth: usize) -> Option<Bandwidth> {
    let above = device.context.bridges[depth..].iter().map(|(_, speed)| *speed);
    let all = above.chain([known_speed(device.gb_s)]);
    let slowest = all.reduce(|slowest, next| Some(slowest?.min(next?)))??;
    Some(Bandwidth::from_gb_per_s(slowest))
}

fn report_gpu(index: usize, gpu: &PciDevice) -> ReportDevice {
    ReportDevice {
        name: format!("GPU{index}"),
        busid: gpu.bus_id.clone(),
        numa: Numa::Nodes(gpu.context.numa.clone()),
        link_speed: None,
        link_width: None,
        link_gb_s: Some(gpu.gb_s),
        os_devices: Some(gpu.os_devices.clone()),
        sm: None,
        rank: None,
        links_out: Vec::new(),
        link_total: None,
        to_switch: None,
    }
}

fn report_nic(index: usize, nic: &PciDevice) -> ReportNic {
    ReportNic {
        name: format!("NIC{index}"),
        busid: nic.bus_id.clone(),
        numa: Numa::Nodes(nic.context.numa.clone()),
        net: None,
        speed: None,
        os_devices: Some(nic.os_devices.clone()),
    }
}

fn fast_class(name: &str) -> Option<LinkClass> {
    Some(match name {
        "NVLinkBandwidth" => LinkClass::NvLink,
        "XGMIBandwidth" => LinkClass::Xgmi,
        "XeLinkBandwidth" => LinkClass::XeLink,
        _ => return None,
    })
}

fn fast_word(class: LinkClass) -> &'static str {
    match class {
        LinkClass::Xgmi => "XGMI",
        LinkClass::XeLink => "XL",
        _ => "NVL",
    }
}

/// The words of all children with this name, in order: long lists are split over several.
fn words<'e>(element: &'e Element, name: &'e str) -> Vec<&'e str> {
    element.children_named(name).flat_map(|child| child.text.split_whitespace()).collect()
}

fn info<'e>(object: &'e Element, name: &str) -> Option<&'e str> {
    object
        .children_named("info")
        .find(|info| info.attribute("name") == Some(name))
        .and_then(|info| info.attribute("value"))
}

/// The NUMA nodes of a mask; none for the infinite set, which says nothing.
fn nodeset(object: &Element, mask: &str) -> Result<Vec<u32>, ImportError> {
    if mask.contains("...") {
        return Ok(Vec::new());
    }
    let nodes =
        CpuList::from_mask(mask).map_err(|_| damaged(object, Fault::bad_value("attribute nodeset", mask)))?;
    if nodes.count() > MAX_NUMA_NODES as u64 {
        return Err(too_many(object, "NUMA nodes", MAX_NUMA_NODES));
    }
    Ok(nodes.iter().collect())
}

/// Gigabytes per second; 0 is unknown.
fn link_speed(object: &Element) -> Result<f64, ImportError> {
    let speed: f64 = number(object, "pci_link_speed")?.unwrap_or_default();
    if (0.0..=10_000.0).contains(&speed) {
        Ok(speed)
    } else {
        let what = "attribute pci_link_speed";
        Err(damaged(object, Fault::bad_value(what, &speed.to_string())))
    }
}

fn known_speed(gb_s: f64) -> Option<f64> {
    (gb_s > 0.0).then_some(gb_s)
}

#[expect(clippy::cast_precision_loss, reason = "no link comes near 2^53 megabytes per second")]
fn from_mb_per_s(mb_s: u64) -> Bandwidth {
    Bandwidth::from_gb_per_s(mb_s as f64 / 1_000.0)
}

fn number<T: std::str::FromStr>(element: &Element, name: &str) -> Result<Option<T>, ImportError> {
    let Some(text) = element.attribute(name) else {
        return Ok(None);
    };
    text.trim().parse().map(Some).map_err(|_| {
        let what = format!("attribute {name} of <{}>", token(&element.name));
        damaged(element, Fault::bad_value(what, text))
    })
}

fn too_many(object: &Element, what: &'static str, limit: usize) -> ImportError {
    ImportError::TooMany { format: Format::HwlocXml, line: object.line, what, limit }
}

fn damaged(element: &Element, fault: Fault) -> ImportError {
    fault.at(Format::HwlocXml, element.line)
}

/// How driver libraries name their devices; plain `card0` and `renderD128` are any display.
const COMPUTE_NAMES: [&str; 5] = ["cuda", "nvml", "rsmi", "opencl", "ze"];

/// 3D controllers and processing accelerators; boards' own displays are of class 0300.
const COMPUTE_CLASSES: [&str; 2] = ["0302", "1200"];
