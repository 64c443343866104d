//! The topology XML of NCCL and RCCL: `<system>` of `<cpu>` of nested `<pci>` with `<gpu>` and `<nic>` at the leaves.

use warpweft_core_types::{Bandwidth, LinkClass, PathClass};

use super::{
    FastLink, Fault, Format, ImportError, Imported, Labelled, MAX_ENDPOINTS, Numa, Report, ReportDevice,
    ReportLink, ReportNic, Via,
    error::token,
    xml::{self, Element},
};
use crate::{
    BuildError, CpuList, DeviceKind, LinkDesc, NodeDesc, NodeId, NodeKind, PcieLink, PcieRate, Provenance,
    Topology, TopologyBuilder,
};

pub(super) fn import(text: &str) -> Result<Imported, ImportError> {
    let root = xml::parse(text, Format::NcclXml)?;
    if root.name != "system" {
        return Err(damaged(&root, Fault::missing("the root element <system>")));
    }
    let system = System::read(&root)?;
    let fast = system.fast_links()?;
    let report = system.report(&root, &fast);
    let topology =
        system.topology(&fast).map_err(|source| ImportError::Build { format: Format::NcclXml, source })?;
    Ok(Imported { topology, report })
}

/// Everything of the file that means something here.
#[derive(Default)]
struct System {
    cpus: Vec<Cpu>,
    gpus: Vec<Gpu>,
    nics: Vec<Nic>,
    /// Whether any `<gpu>` exists; hand-made files stop at `<pci>`.
    has_gpu_elements: bool,
    /// PCI functions that could be anything.
    unclassified: usize,
    /// PCI elements seen so far, to tell them apart.
    pci_count: usize,
    warnings: Vec<String>,
}

struct Cpu {
    numa_node: i64,
    mask: Option<String>,
    cpus: Option<CpuList>,
    /// Identifies the machine in files that describe several.
    host_hash: Option<String>,
    /// The machine, from 0 in the order of the file.
    host: usize,
}

/// Where a GPU or network card hangs.
#[derive(Clone, Default)]
struct Spot {
    cpu: usize,
    /// The switches above it, outermost first, each with the speed of its own upstream link.
    switches: Vec<(usize, Option<PcieRate>)>,
    bus_id: Option<String>,
    rate: Option<PcieRate>,
    speed: Option<String>,
    width: Option<u32>,
}

struct Gpu {
    label: String,
    /// The machine, from 0 in the order of the file.
    host: usize,
    dev: Option<u32>,
    spot: Spot,
    sm: Option<u32>,
    rank: Option<i64>,
    links: Vec<FastLink>,
    /// Chip-to-chip NVLink to its processor.
    c2c: Option<C2c>,
    line: usize,
}

/// The element `<c2c>`.
#[derive(Clone, Copy)]
struct C2c {
    lanes: u32,
    /// Megabytes (10^6) per second of one lane.
    mb_per_s: Option<u32>,
}

struct Nic {
    spot: Spot,
    names: Vec<String>,
    speeds: Vec<String>,
}

/// What joins two GPUs faster than PCIe.
struct Fast {
    a: usize,
    b: usize,
    class: LinkClass,
    count: u32,
}

impl System {
    fn read(root: &Element) -> Result<Self, ImportError> {
        let mut system = Self { has_gpu_elements: contains_gpu(root), ..Self::default() };
        for cpu in root.children_named("cpu") {
            system.read_cpu(cpu)?;
        }
        // A stable sort keeps devices that are known by class only in the order of the file.
        system.gpus.sort_by_key(|gpu| (gpu.host, gpu.dev));
        if system.cpus.is_empty() {
            return Err(damaged(root, Fault::missing("a <cpu> element")));
        }
        if system.unclassified > 0 {
            let count = system.unclassified;
            if system.gpus.is_empty() {
                return Err(damaged(root, Fault::Unclassified { count }));
            }
            system.warnings.push(format!("{count} <pci> nodes have no class attribute and are left out"));
        }
        Ok(system)
    }

    fn read_cpu(&mut self, element: &Element) -> Result<(), ImportError> {
        let numa_node = number(element, "numaid")?
            .ok_or_else(|| damaged(element, Fault::missing("attribute numaid of <cpu>")))?;
        let mask = element.attribute("affinity").map(str::to_owned);
        let cpus = mask
            .as_deref()
            .map(CpuList::from_mask)
            .transpose()
            .map_err(|error| damaged(element, Fault::bad_value("affinity of <cpu>", &error.text)))?;
        let host_hash = element.attribute("host_hash").map(str::to_owned);
        if self.cpus.len() == MAX_ENDPOINTS {
            return Err(too_many(element.line, "processors", MAX_ENDPOINTS));
        }
        let hosts = self.cpus.iter().map(|cpu| cpu.host + 1).max().unwrap_or_default();
        let same = self.cpus.iter().find(|cpu| cpu.host_hash == host_hash);
        let host = same.map_or(hosts, |cpu| cpu.host);
        self.cpus.push(Cpu {
            numa_node,
            mask,
            // An offset shifts the mask by an amount that is nowhere described.
            cpus: cpus.filter(|cpus| !cpus.is_empty() && element.attribute("affinity_offset").is_none()),
            host_hash,
            host,
        });
        let spot = Spot { cpu: self.cpus.len() - 1, ..Spot::default() };
        for child in &element.children {
            match child.name.as_str() {
                "pci" => self.read_pci(child, &spot)?,
                "nic" => self.add_nic(child, spot.clone())?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Recursion is bounded by the depth of the document.
    fn read_pci(&mut self, element: &Element, above: &Spot) -> Result<(), ImportError> {
        self.pci_count += 1;
        let id = self.pci_count;
        let spot = self.spot(element, above)?;
        let gpus = element.children_named("gpu").count();
        let nics = element.children_named("nic").count();
        for gpu in element.children_named("gpu") {
            self.add_gpu(Some(gpu), element.line, spot.clone())?;
        }
        for nic in element.children_named("nic") {
            self.add_nic(nic, spot.clone())?;
        }
        let mut below = spot.clone();
        below.switches.push((id, spot.rate));
        for child in element.children_named("pci") {
            self.read_pci(child, &below)?;
        }
        if gpus + nics == 0 && element.children_named("pci").next().is_none() {
            self.add_by_class(element, spot)?;
        }
        Ok(())
    }

    fn spot(&self, element: &Element, above: &Spot) -> Result<Spot, ImportError> {
        let bus_id = element
            .attribute("busid")
            .ok_or_else(|| damaged(element, Fault::missing("attribute busid of <pci>")))?;
        let speed = element.attribute("link_speed");
        let width = element.attribute("link_width");
        Ok(Spot {
            bus_id: Some(bus_id.to_owned()),
            rate: PcieRate::parse(speed.unwrap_or_default(), width.unwrap_or_default()),
            speed: speed.map(str::to_owned),
            width: number(element, "link_width")?,
            ..above.clone()
        })
    }

    /// A leaf without `<gpu>` or `<nic>`, as in files written by hand.
    fn add_by_class(&mut self, element: &Element, spot: Spot) -> Result<(), ImportError> {
        match element.attribute("class") {
            None | Some("") => self.unclassified += 1,
            Some(class) if is_gpu_class(class) && self.has_gpu_elements => {
                let bus_id = spot.bus_id.unwrap_or_default();
                self.warnings.push(format!("{bus_id} is a GPU by its class but has no <gpu>"));
            }
            Some(class) if is_gpu_class(class) => self.add_gpu(None, element.line, spot)?,
            Some(class) if class.starts_with("0x02") => self.add_nic(element, spot)?,
            Some(_) => {}
        }
        Ok(())
    }

    fn add_gpu(&mut self, gpu: Option<&Element>, line: usize, spot: Spot) -> Result<(), ImportError> {
        self.check_room(line)?;
        let Some(element) = gpu else {
            self.gpus.push(Gpu {
                label: format!("GPU{}", self.gpus.len()),
                host: 0,
                dev: None,
                spot,
                sm: None,
                rank: None,
                links: Vec::new(),
                c2c: None,
                line,
            });
            return Ok(());
        };
        let dev: u32 = number(element, "dev")?
            .ok_or_else(|| damaged(element, Fault::missing("attribute dev of <gpu>")))?;
        let host = self.cpus[spot.cpu].host;
        let label = match host {
            0 => format!("GPU{dev}"),
            _ => format!("host{host}/GPU{dev}"),
        };
        if self.gpus.iter().any(|known| known.label == label) {
            return Err(damaged(element, Fault::DoubleLabel { label }));
        }
        let mut links = Vec::new();
        for child in &element.children {
            if matches!(child.name.as_str(), "nvlink" | "xgmi") {
                links.push(read_link(child)?);
            }
        }
        let c2c = element.children_named("c2c").next();
        let c2c = c2c.map(read_c2c).transpose()?;
        self.gpus.push(Gpu {
            label,
            host,
            dev: Some(dev),
            spot,
            sm: number(element, "sm")?,
            rank: number(element, "rank")?,
            links,
            c2c,
            line: element.line,
        });
        Ok(())
    }

    fn add_nic(&mut self, element: &Element, spot: Spot) -> Result<(), ImportError> {
        self.check_room(element.line)?;
        let values = |attribute: &str| {
            element
                .children_named("net")
                .filter_map(|net| net.attribute(attribute))
                .map(str::to_owned)
                .collect()
        };
        self.nics.push(Nic { spot, names: values("name"), speeds: values("speed") });
        Ok(())
    }

    fn check_room(&self, line: usize) -> Result<(), ImportError> {
        if self.gpus.len() + self.nics.len() < MAX_ENDPOINTS {
            return Ok(());
        }
        Err(too_many(line, "GPUs and network cards", MAX_ENDPOINTS))
    }

    /// The GPU at a bus id on the same machine.
    fn peer(&self, of: &Gpu, bus_id: &str) -> Option<usize> {
        let host = |gpu: &Gpu| self.cpus[gpu.spot.cpu].host;
        self.gpus.iter().position(|gpu| {
            let own = gpu.spot.bus_id.as_deref();
            own.is_some_and(|own| own.eq_ignore_ascii_case(bus_id)) && host(gpu) == host(of)
        })
    }

    /// Direct links, and links of both ends into a switch fabric.
    fn fast_links(&self) -> Result<Vec<Fast>, ImportError> {
        let count = self.gpus.len();
        let mut direct = vec![vec![(0_u32, LinkClass::NvLink); count]; count];
        for (a, gpu) in self.gpus.iter().enumerate() {
            for link in gpu.links.iter().filter(|link| !is_switch(link)) {
                let Some(b) = self.peer(gpu, &link.target).filter(|&b| b != a) else {
                    continue;
                };
                let class = if link.kind == "xgmi" { LinkClass::Xgmi } else { LinkClass::NvLink };
                let slot = &mut direct[a][b];
                *slot = (slot.0.saturating_add(link.count), class);
            }
        }
        let mut fast = Vec::new();
        for (a, b) in (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))) {
            let (there, back) = (direct[a][b], direct[b][a]);
            if there.0 > 0 && back.0 > 0 && there != back {
                return Err(self.asymmetric(a, b, there.0, back.0));
            }
            let (links, class) = if there.0 > 0 { there } else { back };
            let switched = self.gpus[a].to_switch().min(self.gpus[b].to_switch());
            let (count, class) = match links {
                0 => (switched, LinkClass::NvSwitch),
                _ => (links, class),
            };
            if count > 0 {
                fast.push(Fast { a, b, class, count });
            }
        }
        Ok(fast)
    }

    fn asymmetric(&self, a: usize, b: usize, there: u32, back: u32) -> ImportError {
        Fault::Asymmetric {
            a: self.gpus[a].label.clone(),
            b: self.gpus[b].label.clone(),
            there: format!("{there} links"),
            back: format!("{back} links"),
        }
        .at(Format::NcclXml, self.gpus[b].line)
    }

    /// The way between two spots through the PCI tree; `None` if they are on different machines.
    fn path(&self, a: &Spot, b: &Spot) -> Option<PathClass> {
        if self.cpus[a.cpu].host != self.cpus[b.cpu].host {
            return None;
        }
        let common = common_switches(a, b);
        Some(if a.cpu != b.cpu {
            PathClass::Sys
        } else if common == 0 {
            PathClass::Phb
        } else if common == a.switches.len() && common == b.switches.len() {
            PathClass::Pix
        } else {
            PathClass::Pxb
        })
    }

    fn report(&self, root: &Element, fast: &[Fast]) -> Report {
        let mut report = Report::new(Format::NcclXml, self.gpus.len());
        report.nics = Some(self.nics.len());
        report.system_version = root.attribute("version").map(str::to_owned);
        report.cpus = Some(self.cpus.len());
        report.numa_nodes = Some(self.cpus.iter().map(|cpu| cpu.numa_node).collect());
        let masks = self.cpus.iter().filter_map(|cpu| {
            let mask = cpu.mask.clone()?;
            Some((cpu.numa_node.to_string(), mask))
        });
        report.cpu_affinity_mask = Some(masks.collect::<Labelled<_>>()).filter(|masks| !masks.0.is_empty());
        report.gpu_list = Some(self.gpus.iter().map(|gpu| self.report_gpu(gpu)).collect());
        let nics = self.nics.iter().enumerate();
        report.nic_list = Some(nics.map(|(index, nic)| self.report_nic(index, nic)).collect());
        report.links = Some(self.report_links(fast));
        report.nvlink_stated = (!self.has_gpu_elements).then_some(false);
        report.warnings.clone_from(&self.warnings);
        report
    }

    fn report_gpu(&self, gpu: &Gpu) -> ReportDevice {
        let with_peers = gpu.links.iter().map(|link| FastLink {
            peer: self.peer(gpu, &link.target).map(|peer| self.gpus[peer].label.clone()),
            ..link.clone()
        });
        let total = total(gpu.links.iter());
        ReportDevice {
            name: gpu.label.clone(),
            busid: gpu.spot.bus_id.clone(),
            numa: Numa::Node(self.cpus[gpu.spot.cpu].numa_node),
            link_speed: gpu.spot.speed.clone(),
            link_width: gpu.spot.width,
            link_gb_s: None,
            os_devices: None,
            sm: gpu.sm,
            rank: gpu.rank,
            links_out: with_peers.collect(),
            link_total: (total > 0).then_some(total),
            to_switch: Some(gpu.to_switch()).filter(|links| *links > 0),
        }
    }

    fn report_nic(&self, index: usize, nic: &Nic) -> ReportNic {
        ReportNic {
            name: format!("NIC{index}"),
            busid: nic.spot.bus_id.clone(),
            numa: Numa::Node(self.cpus[nic.spot.cpu].numa_node),
            net: Some(nic.names.clone()),
            speed: Some(nic.speeds.clone()),
            os_devices: None,
        }
    }

    fn report_links(&self, fast: &[Fast]) -> Vec<ReportLink> {
        let mut fast = fast.iter().peekable();
        let mut links = Vec::new();
        for (a, gpu) in self.gpus.iter().enumerate() {
            for (b, other) in self.gpus.iter().enumerate().skip(a + 1) {
                let path = self.path(&gpu.spot, &other.spot).map(|path| path.to_string());
                match fast.next_if(|fast| (fast.a, fast.b) == (a, b)) {
                    Some(fast) => links.push(ReportLink {
                        count: Some(fast.count),
                        via: Some(fast.via()),
                        pci: path,
                        ..ReportLink::new(&gpu.label, &other.label, fast.word())
                    }),
                    None => links.extend(path.map(|path| ReportLink::new(&gpu.label, &other.label, path))),
                }
            }
        }
        for gpu in &self.gpus {
            for (index, nic) in self.nics.iter().enumerate() {
                let path = self.path(&gpu.spot, &nic.spot);
                let link =
                    |path: PathClass| ReportLink::new(&gpu.label, &format!("NIC{index}"), path.to_string());
                links.extend(path.map(link));
            }
        }
        links
    }

    fn topology(&self, fast: &[Fast]) -> Result<Topology, BuildError> {
        let mut builder = Topology::builder();
        let mut ids: Vec<NodeId> = Vec::new();
        for gpu in &self.gpus {
            ids.push(builder.node(self.node(NodeDesc::device(&gpu.label, DeviceKind::Gpu), &gpu.spot))?);
        }
        for (index, nic) in self.nics.iter().enumerate() {
            let mut desc = NodeDesc::new(format!("NIC{index}"), NodeKind::Nic);
            desc.model = (!nic.names.is_empty()).then(|| nic.names.join(" "));
            ids.push(builder.node(self.node(desc, &nic.spot))?);
        }
        let spots: Vec<&Spot> =
            self.gpus.iter().map(|gpu| &gpu.spot).chain(self.nics.iter().map(|nic| &nic.spot)).collect();
        for a in 0..ids.len() {
            for b in a + 1..ids.len() {
                let Some(path) = self.path(spots[a], spots[b]) else {
                    continue;
                };
                let desc = LinkDesc {
                    bandwidth: slowest_between(spots[a], spots[b]),
                    ..LinkDesc::new(LinkClass::Pcie, Provenance::File).path(path)
                };
                builder.link_both(ids[a], ids[b], desc)?;
            }
        }
        for link in fast {
            let desc = LinkDesc::new(link.class, Provenance::File).link_count(link.count);
            builder.link_both(ids[link.a], ids[link.b], desc)?;
        }
        self.join_hosts(&mut builder, &ids, &spots)?;
        Ok(builder.build())
    }

    /// Several machines have the same NUMA numbers, so host memory is modelled for files about one machine only.
    fn join_hosts(
        &self,
        builder: &mut TopologyBuilder,
        ids: &[NodeId],
        spots: &[&Spot],
    ) -> Result<(), BuildError> {
        let one_machine = self.cpus.iter().all(|cpu| cpu.host == 0);
        if !one_machine {
            return Ok(());
        }
        for cpu in &self.cpus {
            if let Ok(numa_node) = u32::try_from(cpu.numa_node) {
                let host = builder.host(numa_node)?;
                builder.set_cpus(host, cpu.cpus.clone());
            }
        }
        for (&id, spot) in ids.iter().zip(spots) {
            let Some(numa_node) = builder.numa_node_of(id) else {
                continue;
            };
            let host = builder.host(numa_node)?;
            let desc =
                LinkDesc { bandwidth: slowest(spot, 0), ..LinkDesc::new(LinkClass::Pcie, Provenance::File) };
            builder.link_both(id, host, desc)?;
        }
        for (gpu, &id) in self.gpus.iter().zip(ids) {
            if let (Some(c2c), Some(numa_node)) = (gpu.c2c, builder.numa_node_of(id)) {
                let host = builder.host(numa_node)?;
                builder.link_both(id, host, c2c.describe())?;
            }
        }
        builder.join_hosts(Provenance::File)
    }

    fn node(&self, mut desc: NodeDesc, spot: &Spot) -> NodeDesc {
        let cpu = &self.cpus[spot.cpu];
        desc.place.pci = spot.bus_id.as_ref().and_then(|bus_id| bus_id.parse().ok());
        desc.place.numa_node = u32::try_from(cpu.numa_node).ok();
        desc.place.cpus.clone_from(&cpu.cpus);
        desc.place.host.clone_from(&cpu.host_hash);
        desc.place.pcie = spot.rate.map(|rate| PcieLink { current: Some(rate), max: None });
        desc
    }
}

impl Gpu {
    fn to_switch(&self) -> u32 {
        total(self.links.iter().filter(|link| is_switch(link)))
    }
}

impl C2c {
    fn describe(self) -> LinkDesc {
        let lane = self.mb_per_s.map(f64::from);
        let all = lane.map(|mb_per_s| mb_per_s * f64::from(self.lanes) / 1_000.0);
        LinkDesc {
            bandwidth: all.map(Bandwidth::from_gb_per_s),
            ..LinkDesc::new(LinkClass::NvLinkC2c, Provenance::File).link_count(self.lanes)
        }
    }
}

impl Fast {
    fn word(&self) -> &'static str {
        match self.class {
            LinkClass::Xgmi => "XGMI",
            _ => "NVL",
        }
    }

    fn via(&self) -> Via {
        match self.class {
            LinkClass::NvSwitch => Via::Switch,
            _ => Via::Direct,
        }
    }
}

fn read_link(element: &Element) -> Result<FastLink, ImportError> {
    let missing = |name: &str| {
        let what = format!("attribute {name} of <{}>", element.name);
        damaged(element, Fault::missing(what))
    };
    let target = element.attribute("target").ok_or_else(|| missing("target"))?;
    Ok(FastLink {
        kind: element.name.clone(),
        target: target.to_owned(),
        count: number(element, "count")?.ok_or_else(|| missing("count"))?,
        tclass: element.attribute("tclass").map(str::to_owned),
        peer: None,
    })
}

fn read_c2c(element: &Element) -> Result<C2c, ImportError> {
    let lanes = number(element, "count")?.filter(|lanes| *lanes > 0);
    Ok(C2c {
        lanes: lanes.ok_or_else(|| damaged(element, Fault::missing("attribute count of <c2c>")))?,
        mb_per_s: number(element, "bw")?,
    })
}

fn contains_gpu(element: &Element) -> bool {
    element.name == "gpu" || element.children.iter().any(contains_gpu)
}

/// Display controllers and processing accelerators.
fn is_gpu_class(class: &str) -> bool {
    class.starts_with("0x03") || class.starts_with("0x12")
}

/// NVSwitches are bridges of the class "other"; processors with NVLink have the next code.
fn is_switch(link: &FastLink) -> bool {
    link.tclass.as_deref().is_some_and(|class| class.starts_with("0x068000"))
}

fn total<'a>(links: impl Iterator<Item = &'a FastLink>) -> u32 {
    links.fold(0, |sum, link| sum.saturating_add(link.count))
}

fn common_switches(a: &Spot, b: &Spot) -> usize {
    if a.cpu != b.cpu {
        return 0;
    }
    let pairs = a.switches.iter().zip(&b.switches);
    pairs.take_while(|(a, b)| a.0 == b.0).count()
}

/// The slowest PCIe link between two spots; `None` if any is unknown.
fn slowest_between(a: &Spot, b: &Spot) -> Option<Bandwidth> {
    let common = common_switches(a, b);
    let (a, b) = (slowest(a, common)?, slowest(b, common)?);
    Some(if a.gb_per_s < b.gb_per_s { a } else { b })
}

/// The slowest PCIe link from a spot up to the switch at `depth`.
fn slowest(spot: &Spot, depth: usize) -> Option<Bandwidth> {
    let above = spot.switches[depth..].iter().map(|(_, rate)| *rate);
    above.chain([spot.rate]).map(|rate| rate.map(PcieRate::bandwidth)).reduce(|slowest, next| {
        let (slowest, next) = (slowest?, next?);
        Some(if next.gb_per_s < slowest.gb_per_s { next } else { slowest })
    })?
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

fn too_many(line: usize, what: &'static str, limit: usize) -> ImportError {
    ImportError::TooMany { format: Format::NcclXml, line, what, limit }
}

fn damaged(element: &Element, fault: Fault) -> ImportError {
    fault.at(Format::NcclXml, element.line)
}
