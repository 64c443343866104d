//! From what NVML reports to facts about links, without asking anybody: reported values in, facts out.
//!
//! A figure is what was reported or it is absent; nothing here is made up from a product's name or from its
//! generation.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use warpweft_core_types::{
    Bandwidth, DeviceInfo, DeviceUuid, LinkClass, LinkEnd, LinkFact, PathClass, PciAddress, Provenance,
};

use crate::fork::{self, Origin};

/// Everything NVML reported: GPUs in its own order, and what it said of each ordered pair.
#[derive(Debug, Clone, Default)]
pub(crate) struct Report {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) pairs: Vec<Vec<Pair>>,
}

/// A GPU.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gpu {
    pub(crate) uuid: Option<DeviceUuid>,
    pub(crate) pci: Option<PciAddress>,
    /// It is divided into instances, which have no NVLinks.
    pub(crate) is_mig: bool,
    /// It is a share of a GPU, in a virtual machine.
    pub(crate) is_vgpu: bool,
    /// Generation and width at most: an idle GPU runs slower.
    pub(crate) pcie: Option<(u32, u32)>,
    pub(crate) numa_node: Option<u32>,
    pub(crate) links: Vec<NvLink>,
    pub(crate) c2c: C2c,
    pub(crate) fabric: Option<Fabric>,
}

/// A physical NVLink.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NvLink {
    pub(crate) is_active: bool,
    pub(crate) remote: Remote,
    /// Where the other end is, unless that is hidden.
    pub(crate) remote_pci: Option<PciAddress>,
    /// A number that stands for a version, see [`nvlink_version`].
    pub(crate) version: Option<u32>,
    pub(crate) mb_per_s: Option<u64>,
}

/// What is at the other end of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Remote {
    Gpu,
    Switch,
    /// A processor that speaks NVLink, of IBM.
    Processor,
    #[default]
    Unknown,
}

/// Chip-to-chip links with the processor.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct C2c {
    pub(crate) active: u32,
    /// Of all that are active together.
    pub(crate) mb_per_s: Option<u64>,
}

/// How a GPU stands with its fabric of switches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fabric {
    /// 1 not started, 2 in progress, 3 completed.
    pub(crate) state: u8,
    /// How it was completed; 0 is well.
    pub(crate) status: i32,
    pub(crate) cluster: [u8; 16],
    pub(crate) clique: u32,
}

/// What was reported of two GPUs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pair {
    /// `nvmlGpuTopologyLevel_t`.
    pub(crate) ancestor: Option<u32>,
    pub(crate) p2p: P2p,
}

/// `nvmlGpuP2PStatus_t` of each capability; 0 is "yes".
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct P2p {
    pub(crate) read: Option<u32>,
    pub(crate) write: Option<u32>,
    pub(crate) nvlink: Option<u32>,
    pub(crate) atomics: Option<u32>,
}

/// `NVML_P2P_STATUS_OK`.
const OK: u32 = 0;

const COMPLETED: u8 = 3;

impl Fabric {
    /// Two GPUs of one fabric reach each other by its switches.
    fn is_shared_with(&self, other: &Self) -> bool {
        let is_ready = |fabric: &Self| fabric.state == COMPLETED && fabric.status == 0;
        is_ready(self) && is_ready(other) && (self.cluster, self.clique) == (other.cluster, other.clique)
    }
}

/// Links of one medium from one device to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Medium {
    pub(crate) class: LinkClass,
    pub(crate) path: Option<PathClass>,
    pub(crate) count: u32,
    pub(crate) bandwidth: Option<Bandwidth>,
    pub(crate) provenance: Provenance,
}

impl Medium {
    /// Two devices reach each other; how is not known.
    pub(crate) const UNKNOWN: Self = Self {
        class: LinkClass::Unknown,
        path: None,
        count: 1,
        bandwidth: None,
        provenance: Provenance::Driver,
    };

    pub(crate) const fn fact(self, from: LinkEnd, to: LinkEnd) -> LinkFact {
        LinkFact {
            from,
            to,
            class: self.class,
            path: self.path,
            link_count: self.count,
            bandwidth: self.bandwidth,
            latency: None,
            provenance: self.provenance,
        }
    }
}

impl Report {
    /// Where the GPU of a device is in the report: by its UUID, else by its place on the bus, never by number.
    fn find(&self, info: &DeviceInfo) -> Option<usize> {
        let by_uuid = |gpu: &Gpu| gpu.uuid == Some(info.id.uuid);
        let by_place =
            |gpu: &Gpu| gpu.pci.zip(info.pci).is_some_and(|(one, other)| is_same_place(one, other));
        self.gpus.iter().position(by_uuid).or_else(|| self.gpus.iter().position(by_place))
    }

    /// What carries bytes from one device to another that it reaches.
    pub(crate) fn between(&self, from: &DeviceInfo, to: &DeviceInfo) -> Medium {
        let (Some(one), Some(other)) = (self.find(from), self.find(to)) else { return Medium::UNKNOWN };
        let (near, far) = (&self.gpus[one], &self.gpus[other]);
        // Instances of one GPU share its place and not its links, whatever is said of the whole.
        if one == other || near.is_mig || far.is_mig {
            return Medium::UNKNOWN;
        }
        let pair = self.pair(one, other);
        // What a virtual machine shows of the tree is the hypervisor's invention.
        let path = if near.is_vgpu || far.is_vgpu { None } else { pair.ancestor.and_then(path_of) };
        let by_nvlink = self.direct(near, far, pair).or_else(|| self.switched(near, far, pair));
        let medium = by_nvlink.unwrap_or_else(|| by_pcie(near, far, pair, path));
        Medium { path, ..medium }
    }

    fn pair(&self, one: usize, other: usize) -> Pair {
        self.pairs.get(one).and_then(|row| row.get(other)).copied().unwrap_or_default()
    }

    /// Links whose other end is that GPU. Where one side hides its remote ends, the other side's count.
    fn direct(&self, near: &Gpu, far: &Gpu, pair: Pair) -> Option<Medium> {
        if pair.p2p.nvlink.is_some_and(|status| status != OK) {
            return None;
        }
        let lead_to = |gpu: &Gpu, goal: &Gpu| {
            let joins = |link: &&NvLink| {
                link.remote_pci.zip(goal.pci).is_some_and(|(one, other)| is_same_place(one, other))
            };
            bundle(gpu.links.iter().filter(|link| link.is_active).filter(joins))
        };
        let (count, bandwidth) = lead_to(near, far).or_else(|| lead_to(far, near))?;
        Some(driver_says(LinkClass::NvLink, count, bandwidth))
    }

    /// Links into a fabric that both have. The switch is often hidden; then the pair's NVLink status tells
    /// that there is one.
    fn switched(&self, near: &Gpu, far: &Gpu, pair: Pair) -> Option<Medium> {
        let (near_count, near_rate) = bundle(self.fabric_links(near))?;
        let (far_count, far_rate) = bundle(self.fabric_links(far))?;
        let confirmed = match pair.p2p.nvlink {
            Some(status) => status == OK,
            None => near.fabric.zip(far.fabric).is_some_and(|(one, other)| one.is_shared_with(&other)),
        };
        if !confirmed {
            return None;
        }
        let narrower = near_rate.zip(far_rate).map(|(one, other)| one.min(other));
        Some(driver_says(LinkClass::NvSwitch, near_count.min(far_count), narrower))
    }

    /// Active links that end at none of the GPUs and at no processor.
    fn fabric_links<'a>(&'a self, gpu: &'a Gpu) -> impl Iterator<Item = &'a NvLink> {
        let ends_at_gpu = |link: &NvLink| {
            link.remote_pci.is_some_and(|remote| {
                self.gpus.iter().any(|gpu| gpu.pci.is_some_and(|pci| is_same_place(pci, remote)))
            })
        };
        gpu.links.iter().filter(|link| link.is_active).filter(move |link| match link.remote {
            Remote::Switch => true,
            Remote::Unknown => !ends_at_gpu(link),
            // One that is no GPU of this machine's, as far as anybody can see, is behind a fabric.
            Remote::Gpu => link.remote_pci.is_none(),
            Remote::Processor => false,
        })
    }

    /// What carries bytes between a device and the host, as far as it is reported.
    pub(crate) fn to_host(&self, info: &DeviceInfo, coherent: bool) -> Option<Medium> {
        let gpu = &self.gpus[self.find(info)?];
        if coherent {
            // Joined by more than its PCI function, so that the figures of that say nothing.
            let known = gpu.c2c.active > 0 && !gpu.is_mig;
            return known.then(|| driver_says(LinkClass::NvLinkC2c, gpu.c2c.active, gpu.c2c.mb_per_s));
        }
        let mb_per_s = pcie_mb_per_s(gpu.pcie?)?;
        Some(driver_says(LinkClass::Pcie, 1, Some(mb_per_s)))
    }

    /// The NUMA node that NVML names for a device.
    pub(crate) fn numa_node(&self, info: &DeviceInfo) -> Option<u32> {
        self.gpus[self.find(info)?].numa_node
    }

    /// What a person who wonders about a figure should know, a line for each device.
    pub(crate) fn notes(&self, infos: &[DeviceInfo]) -> Vec<String> {
        infos.iter().map(|info| format!("{}: {}", info.id, self.note(info))).collect()
    }

    fn note(&self, info: &DeviceInfo) -> String {
        let Some(position) = self.find(info) else {
            return "NVML does not show this GPU, so nothing is known of its links".to_owned();
        };
        let gpu = &self.gpus[position];
        let mut text = match gpu.links.iter().filter(|link| link.is_active).count() {
            0 => "no NVLink is active".to_owned(),
            active => format!("{active} of {} NVLinks are active", gpu.links.len()),
        };
        if let Some(first) = gpu.links.iter().find(|link| link.is_active) {
            // Writing to a text does not fail.
            let _written = write!(text, ", {}", nvlink_version(first.version));
            if let Some(speed) = first.mb_per_s {
                let _written = write!(text, " of {:.2} GB/s each", gb_per_s(speed));
            }
        }
        match gpu.fabric {
            Some(Fabric { state: COMPLETED, status: 0, .. }) => text.push_str("; its fabric is ready"),
            Some(Fabric { state: COMPLETED, status, .. }) => {
                let _written = write!(text, "; its fabric failed with {status}");
            }
            Some(_) => text.push_str("; its fabric is not ready: does the fabric manager run?"),
            None => {}
        }
        if gpu.is_mig {
            text.push_str("; MIG divides it, and instances have no NVLinks");
        }
        if gpu.is_vgpu {
            text.push_str("; it is a vGPU, so its place in the PCI tree is not known");
        }
        let others = self.gpus.iter().enumerate().filter(|(other, _)| *other != position);
        let refused = others.filter(|(other, _)| self.pair(position, *other).p2p.is_refused()).count();
        if refused > 0 {
            let _written = write!(text, "; {refused} other GPUs are refused to it as peers");
        }
        let others = (0..self.gpus.len()).filter(|&other| other != position);
        let lacking = others.filter(|&other| self.pair(position, other).p2p.lacks_atomics()).count();
        if lacking > 0 {
            let _written = write!(text, "; its atomics do not reach {lacking} of its peers");
        }
        text
    }
}

impl P2p {
    fn is_refused(&self) -> bool {
        [self.read, self.write].into_iter().flatten().any(|status| status != OK)
    }

    fn lacks_atomics(&self) -> bool {
        !self.is_refused() && self.atomics.is_some_and(|status| status != OK)
    }
}

fn is_same_place(one: PciAddress, other: PciAddress) -> bool {
    (one.domain, one.bus, one.device) == (other.domain, other.bus, other.device)
}

/// How many links, and what they carry together if each tells; `None` if there are none.
fn bundle<'a>(links: impl Iterator<Item = &'a NvLink>) -> Option<(u32, Option<u64>)> {
    let rates: Vec<Option<u64>> = links.map(|link| link.mb_per_s).collect();
    let count = u32::try_from(rates.len()).ok().filter(|&count| count > 0)?;
    Some((count, rates.into_iter().sum()))
}

/// By the PCI functions of both, if nothing better joins them and the driver does not deny it.
fn by_pcie(near: &Gpu, far: &Gpu, pair: Pair, path: Option<PathClass>) -> Medium {
    // Without a word about NVLink, links that are active may well carry the bytes.
    let has_nvlink = |gpu: &Gpu| gpu.links.iter().any(|link| link.is_active);
    if pair.p2p.nvlink.is_none() && has_nvlink(near) && has_nvlink(far) {
        return Medium::UNKNOWN;
    }
    let rate = |gpu: &Gpu| gpu.pcie.and_then(pcie_mb_per_s);
    // Beyond one host bridge it is what joins the bridges that limits, and nobody tells what that carries.
    let is_local = matches!(path, Some(PathClass::Pix | PathClass::Pxb | PathClass::Phb));
    let narrower = rate(near).zip(rate(far)).map(|(one, other)| one.min(other));
    driver_says(LinkClass::Pcie, 1, narrower.filter(|_| is_local))
}

fn driver_says(class: LinkClass, count: u32, mb_per_s: Option<u64>) -> Medium {
    let bandwidth = mb_per_s.map(|rate| Bandwidth::from_gb_per_s(gb_per_s(rate)));
    Medium { class, path: None, count, bandwidth, provenance: Provenance::Driver }
}

fn gb_per_s(mb_per_s: u64) -> f64 {
    mb_per_s as f64 / 1000.0
}

/// Bytes per second of one direction, from the transfers of a lane and what their encoding leaves.
fn pcie_mb_per_s((generation, width): (u32, u32)) -> Option<u64> {
    // Millions of transfers a second; 8 of 10 bits carry data, then 128 of 130, then 242 of 256 bytes.
    let (rate, data, of) = match generation {
        1 => (2_500, 8, 10),
        2 => (5_000, 8, 10),
        3 => (8_000, 128, 130),
        4 => (16_000, 128, 130),
        5 => (32_000, 128, 130),
        6 => (64_000, 242, 256),
        _ => return None,
    };
    matches!(width, 1..=32).then(|| rate * u64::from(width) * data / of / 8)
}

/// `nvmlGpuTopologyLevel_t`. Two chips of one board are nearer than any path there is a word for.
const fn path_of(ancestor: u32) -> Option<PathClass> {
    match ancestor {
        0 | 10 => Some(PathClass::Pix),
        20 => Some(PathClass::Pxb),
        30 => Some(PathClass::Phb),
        40 => Some(PathClass::Node),
        50 => Some(PathClass::Sys),
        _ => None,
    }
}

/// NVML numbers the versions it knows: 6 stands for NVLink 4.0.
fn nvlink_version(number: Option<u32>) -> String {
    let version = match number {
        Some(1) => "1.0",
        Some(2) => "2.0",
        Some(3) => "2.2",
        Some(4) => "3.0",
        Some(5) => "3.1",
        Some(6) => "4.0",
        Some(7) => "5.0",
        Some(other) => return format!("NVLink of a version that NVML numbers {other}"),
        None => return "NVLink of an unknown version".to_owned(),
    };
    format!("NVLink {version}")
}

/// The report, asked for when somebody first wants to know: that can take as long as opening the driver.
#[derive(Debug, Default)]
pub(crate) struct LinkReport {
    /// The only library that is asked, if one is named.
    library: Option<PathBuf>,
    asked: OnceLock<Result<Report, String>>,
}

impl LinkReport {
    pub(crate) fn new(library: Option<PathBuf>) -> Self {
        Self { library, ..Self::default() }
    }

    /// The report; in words why there is none.
    pub(crate) fn get(&self, origin: Origin) -> Result<&Report, &str> {
        // In a forked process the library may not be called, nor be waited for.
        let asked = match origin.is_left() {
            true => self.asked.get().ok_or(fork::CAUSE)?,
            false => self.asked.get_or_init(|| ask(self.library.as_deref())),
        };
        asked.as_ref().map_err(String::as_str)
    }
}

#[cfg(feature = "nvml")]
fn ask(library: Option<&Path>) -> Result<Report, String> {
    crate::nvml::report(library)
}

#[cfg(not(feature = "nvml"))]
fn ask(_library: Option<&Path>) -> Result<Report, String> {
    Err("this program was built without the feature `nvml`".to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use warpweft_core_types::{Bytes, DeviceId, DeviceKind};

    use super::*;

    fn place(bus: u8) -> PciAddress {
        PciAddress { domain: 0, bus, device: 0, function: 0 }
    }

    fn info(ordinal: u32, silicon: u8) -> DeviceInfo {
        let uuid = DeviceUuid::from_bytes([silicon; 16]);
        DeviceInfo {
            id: DeviceId { backend: "cuda", ordinal, uuid },
            name: String::new(),
            kind: DeviceKind::Gpu,
            driver: String::new(),
            memory: Bytes(1),
            multiprocessors: 1,
            compute_capability: None,
            pci: Some(place(silicon)),
            numa_node: None,
            code_formats: Vec::new(),
        }
    }

    /// As NVML in the virtual machine with H200s has it: 18 links a GPU, the switches hidden.
    const HIDDEN: NvLink = NvLink {
        is_active: true,
        remote: Remote::Unknown,
        remote_pci: None,
        version: Some(6),
        mb_per_s: Some(26_562),
    };

    const YES: P2p = P2p { read: Some(0), write: Some(0), nvlink: Some(0), atomics: Some(0) };

    fn gpu(silicon: u8, links: &[NvLink]) -> Gpu {
        Gpu {
            uuid: Some(DeviceUuid::from_bytes([silicon; 16])),
            pci: Some(place(silicon)),
            pcie: Some((5, 16)),
            links: links.to_vec(),
            ..Gpu::default()
        }
    }

    fn report(gpus: Vec<Gpu>, pair: Pair) -> Report {
        let pairs = vec![vec![pair; gpus.len()]; gpus.len()];
        Report { gpus, pairs }
    }

    fn h200(count: u8) -> Report {
        let gpus = (1..=count).map(|silicon| gpu(silicon, &[HIDDEN; 18])).collect();
        report(gpus, Pair { ancestor: Some(30), p2p: YES })
    }

    /// Class, links and GB/s from the first GPU to the second.
    fn between(report: &Report) -> (LinkClass, u32, Option<f64>) {
        let medium = report.between(&info(0, 1), &info(1, 2));
        (medium.class, medium.count, medium.bandwidth.map(|rate| rate.gb_per_s))
    }

    #[test]
    fn hidden_switches_are_found_by_the_status_of_the_pair() {
        let report = h200(4);
        for (from, to) in [(1, 2), (2, 1), (1, 4), (3, 2)] {
            let medium = report.between(&info(0, from), &info(1, to));
            assert_eq!((medium.class, medium.count), (LinkClass::NvSwitch, 18));
            assert_eq!((medium.path, medium.provenance), (Some(PathClass::Phb), Provenance::Driver));
            let rate = medium.bandwidth.unwrap().gb_per_s;
            assert!((rate - 478.116).abs() < 1e-9, "{rate}");
        }
        let note = report.notes(&[info(0, 1)]).remove(0);
        assert_eq!(note, "cuda:0: 18 of 18 NVLinks are active, NVLink 4.0 of 26.56 GB/s each");
    }

    #[test]
    fn switches_that_show_themselves_are_believed() {
        let link = NvLink { remote: Remote::Switch, remote_pci: Some(place(0xc0)), ..HIDDEN };
        let switched =
            report(vec![gpu(1, &[link; 18]), gpu(2, &[link; 18])], Pair { ancestor: None, p2p: YES });
        assert_eq!(between(&switched).0, LinkClass::NvSwitch);
    }

    #[test]
    fn only_active_links_count() {
        let mut report = h200(2);
        report.gpus[0].links[3..].fill(NvLink::default());
        report.gpus[1].links[..4].fill(NvLink::default());
        assert_eq!(between(&report), (LinkClass::NvSwitch, 3, Some(3.0 * 26.562)));
        report.gpus[0].links.fill(NvLink::default());
        assert_eq!(between(&report).0, LinkClass::Pcie);
    }

    #[test]
    fn bridged_pairs_are_joined_with_each_other_only() {
        let to = |silicon| NvLink { remote: Remote::Gpu, remote_pci: Some(place(silicon)), ..HIDDEN };
        let gpus = vec![gpu(1, &[to(2); 4]), gpu(2, &[to(1); 4]), gpu(3, &[to(4); 4]), gpu(4, &[to(3); 4])];
        let mut bridged = report(gpus, Pair { ancestor: Some(50), p2p: P2p { nvlink: Some(5), ..YES } });
        for (one, other) in [(0, 1), (1, 0), (2, 3), (3, 2)] {
            bridged.pairs[one][other].p2p = YES;
        }
        assert_eq!(between(&bridged), (LinkClass::NvLink, 4, Some(4.0 * 26.562)));
        let apart = bridged.between(&info(0, 1), &info(1, 3));
        assert_eq!((apart.class, apart.path, apart.bandwidth), (LinkClass::Pcie, Some(PathClass::Sys), None));
        // One side hides where its links go; the other side tells.
        bridged.gpus[0].links.fill(NvLink { remote_pci: None, ..to(2) });
        assert_eq!(between(&bridged), (LinkClass::NvLink, 4, Some(4.0 * 26.562)));
    }

    #[test]
    fn links_with_a_processor_join_no_gpus() {
        let link = NvLink { remote: Remote::Processor, remote_pci: Some(place(9)), ..HIDDEN };
        let power = report(
            vec![gpu(1, &[link; 3]), gpu(2, &[link; 3])],
            Pair { ancestor: Some(20), p2p: P2p { nvlink: Some(5), ..YES } },
        );
        assert_eq!(between(&power), (LinkClass::Pcie, 1, Some(63.015)));
    }

    #[test]
    fn a_pair_that_is_denied_nvlink_has_none() {
        let mut report = h200(2);
        report.pairs[0][1].p2p.nvlink = Some(5);
        assert_eq!(between(&report).0, LinkClass::Pcie);
    }

    #[test]
    fn a_status_that_is_not_told_leaves_it_open() {
        let mut report = h200(2);
        report.pairs[0][1].p2p = P2p::default();
        assert_eq!(between(&report), (LinkClass::Unknown, 1, None));
        // Unless both are of one fabric that is ready.
        let fabric = Fabric { state: 3, status: 0, cluster: [7; 16], clique: 1 };
        report.gpus.iter_mut().for_each(|gpu| gpu.fabric = Some(fabric));
        assert_eq!(between(&report).0, LinkClass::NvSwitch);
        report.gpus[1].fabric = Some(Fabric { clique: 2, ..fabric });
        assert_eq!(between(&report).0, LinkClass::Unknown);
    }

    #[test]
    fn a_speed_that_is_not_told_is_not_made_up() {
        let mut report = h200(2);
        report.gpus[1].links[5].mb_per_s = None;
        assert_eq!(between(&report), (LinkClass::NvSwitch, 18, None));
        report.gpus[0].pcie = Some((9, 16));
        assert_eq!(report.to_host(&info(0, 1), false), None);
    }

    #[test]
    fn gpus_are_joined_by_who_they_are() {
        let mut report = h200(3);
        report.gpus[2].links.truncate(2);
        // Ordinal 0 is the last in NVML's order.
        assert_eq!(report.between(&info(0, 3), &info(1, 1)).count, 2);
        // A UUID that differs, as that of an instance, leaves the place on the bus.
        report.gpus[2].uuid = None;
        assert_eq!(report.between(&info(0, 3), &info(1, 1)).count, 2);
        assert_eq!(report.between(&info(0, 7), &info(1, 1)), Medium::UNKNOWN);
        assert!(report.notes(&[info(0, 7)])[0].contains("does not show"));
    }

    #[test]
    fn instances_and_shares_are_degraded_and_say_why() {
        let mut report = h200(2);
        report.gpus[0].is_mig = true;
        assert_eq!(report.between(&info(0, 1), &info(1, 2)), Medium::UNKNOWN);
        assert!(report.notes(&[info(0, 1)])[0].contains("MIG"));
        let mut report = h200(2);
        report.gpus[1].is_vgpu = true;
        assert_eq!(report.between(&info(0, 1), &info(1, 2)).path, None);
        assert!(report.notes(&[info(1, 2)])[0].contains("vGPU"));
    }

    #[test]
    fn host_links_are_as_wide_as_the_slot() {
        let check = |pcie, expected: Option<f64>| {
            let mut report = h200(1);
            report.gpus[0].pcie = pcie;
            let medium = report.to_host(&info(0, 1), false);
            assert_eq!(medium.and_then(|medium| medium.bandwidth).map(|rate| rate.gb_per_s), expected);
        };
        check(Some((1, 16)), Some(4.0));
        check(Some((3, 16)), Some(15.753));
        check(Some((4, 8)), Some(15.753));
        check(Some((5, 16)), Some(63.015));
        check(Some((6, 16)), Some(121.0));
        check(Some((5, 0)), None);
        check(None, None);
        let mut report = h200(1);
        assert_eq!(report.to_host(&info(0, 1), true), None);
        report.gpus[0].c2c = C2c { active: 10, mb_per_s: Some(450_000) };
        let medium = report.to_host(&info(0, 1), true).unwrap();
        assert_eq!((medium.class, medium.count), (LinkClass::NvLinkC2c, 10));
    }

    fn any_link() -> impl Strategy<Value = NvLink> {
        let remote = prop_oneof![
            Just(Remote::Gpu),
            Just(Remote::Switch),
            Just(Remote::Processor),
            Just(Remote::Unknown)
        ];
        let pci = proptest::option::of((1_u8..6).prop_map(place));
        (any::<bool>(), remote, pci, any::<Option<u32>>(), any::<Option<u64>>()).prop_map(
            |(is_active, remote, remote_pci, version, mb_per_s)| NvLink {
                is_active,
                remote,
                remote_pci,
                version,
                // As it is read: a speed of nothing is none, and a field has 32 bits.
                mb_per_s: mb_per_s.map(|speed| speed % (1 << 32)).filter(|&speed| speed > 0),
            },
        )
    }

    fn any_gpu() -> impl Strategy<Value = Gpu> {
        let ids = (proptest::option::of(1_u8..4), proptest::option::of((1_u8..4).prop_map(place)));
        let links = proptest::collection::vec(any_link(), 0..20);
        let pcie = proptest::option::of((0_u32..9, 0_u32..40));
        (ids, any::<(bool, bool)>(), links, pcie, any::<Option<(u8, u32)>>()).prop_map(
            |((uuid, pci), (is_mig, is_vgpu), links, pcie, fabric)| Gpu {
                uuid: uuid.map(|byte| DeviceUuid::from_bytes([byte; 16])),
                pci,
                is_mig,
                is_vgpu,
                pcie,
                links,
                fabric: fabric.map(|(state, clique)| Fabric { state, status: 0, cluster: [0; 16], clique }),
                ..Gpu::default()
            },
        )
    }

    proptest! {
        #[test]
        fn whatever_is_reported_nothing_is_made_up(
            gpus in proptest::collection::vec(any_gpu(), 0..4),
            ancestor in proptest::option::of(0_u32..60),
            nvlink in proptest::option::of(0_u32..7),
        ) {
            let report = report(gpus, Pair { ancestor, p2p: P2p { nvlink, ..P2p::default() } });
            let infos = [info(0, 1), info(1, 2)];
            let medium = report.between(&infos[0], &infos[1]);
            prop_assert!(medium.count >= 1);
            prop_assert!(medium.bandwidth.is_none_or(|rate| rate.gb_per_s.is_finite() && rate.gb_per_s > 0.0));
            let links = |gpu: &Gpu| gpu.links.iter().filter(|link| link.is_active).count();
            let most = report.gpus.iter().map(links).max().unwrap_or(0);
            let is_nvlink = matches!(medium.class, LinkClass::NvLink | LinkClass::NvSwitch);
            prop_assert!(!is_nvlink || (medium.count as usize <= most && nvlink.is_none_or(|status| status == 0)));
            prop_assert!(!matches!(medium.class, LinkClass::NvLinkC2c));
            prop_assert_eq!(report.notes(&infos).len(), 2);
            report.to_host(&infos[0], true);
        }
    }

    #[test]
    fn an_empty_report_says_nothing() {
        assert_eq!(Report::default().between(&info(0, 1), &info(1, 2)), Medium::UNKNOWN);
        assert_eq!(Report::default().to_host(&info(0, 1), false), None);
    }
}
