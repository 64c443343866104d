//! Made-up sysfs trees: what is there is found, and what is not there stays unknown.

use std::{fs, os::unix::fs::symlink, path::Path};

use tempfile::TempDir;
use warpweft_core_types::{LinkClass, PathClass};
use warpweft_topology::{DeviceKind, Discovery, Edge, Node, NodeKind, Provenance, Topology, discover};

/// A sysfs in a temporary folder.
struct Sysfs {
    folder: TempDir,
}

impl Sysfs {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("bus/pci/devices")).unwrap();
        Self { folder }
    }

    fn numa_node(self, number: u32, cpus: &str, distances: &str) -> Self {
        let folder = self.folder.path().join(format!("devices/system/node/node{number}"));
        write(&folder, &[("cpulist", cpus), ("distance", distances)]);
        self
    }

    /// A function at the end of a path such as `pci0000:00/0000:00:01.0/0000:01:00.0`.
    fn function(self, path: &str, class: &str, files: &[(&str, &str)]) -> Self {
        let folder = self.folder.path().join("devices").join(path);
        write(&folder, &[("class", class), ("vendor", "0x10de"), ("device", "0x2335")]);
        write(&folder, files);
        let address = path.rsplit('/').next().unwrap();
        symlink(&folder, self.folder.path().join("bus/pci/devices").join(address)).unwrap();
        self
    }

    /// Files of a bridge in a path, which is a device of its own.
    fn bridge(self, path: &str, files: &[(&str, &str)]) -> Self {
        self.function(path, "0x060400\n", files)
    }

    fn discover(&self) -> Discovery {
        discover(self.folder.path())
    }
}

fn write(folder: &Path, files: &[(&str, &str)]) {
    fs::create_dir_all(folder).unwrap();
    for (name, content) in files {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, format!("{content}\n")).unwrap();
    }
}

const GEN5: [(&str, &str); 4] = [
    ("current_link_speed", "2.5 GT/s PCIe"),
    ("current_link_width", "16"),
    ("max_link_speed", "32.0 GT/s PCIe"),
    ("max_link_width", "16"),
];

fn edge<'t>(topology: &'t Topology, from: &str, to: &str) -> &'t Edge {
    let id = |name| topology.find(name).unwrap();
    topology.edge(id(from), id(to)).unwrap()
}

fn node<'t>(topology: &'t Topology, name: &str) -> &'t Node {
    topology.node(topology.find(name).unwrap()).unwrap()
}

fn path(topology: &Topology, from: &str, to: &str) -> Option<PathClass> {
    edge(topology, from, to).path.map(|path| path.value)
}

/// Two sockets; on the first a switch with a GPU and a card, behind a second switch another GPU.
fn two_sockets() -> Sysfs {
    let on =
        |number: &'static str| [GEN5.as_slice(), &[("numa_node", number), ("local_cpulist", "0-3")]].concat();
    let switch = "pci0000:10/0000:10:01.0/0000:11:00.0";
    Sysfs::new()
        .numa_node(0, "0-3", "10 21")
        .numa_node(1, "4-7", "21 10")
        .bridge("pci0000:10/0000:10:01.0", &GEN5)
        .bridge(switch, &GEN5)
        .bridge(&format!("{switch}/0000:12:00.0"), &GEN5)
        .bridge(&format!("{switch}/0000:12:01.0"), &GEN5)
        .bridge(&format!("{switch}/0000:12:02.0"), &GEN5)
        .function(&format!("{switch}/0000:12:00.0/0000:13:00.0"), "0x030200", &on("0"))
        .function(
            &format!("{switch}/0000:12:01.0/0000:14:00.0"),
            "0x020700",
            &[
                on("0").as_slice(),
                &[("infiniband/mlx5_3/x", ""), ("net/ib0/x", ""), ("max_link_speed", "16.0 GT/s PCIe")],
            ]
            .concat(),
        )
        .function(
            &format!("{switch}/0000:12:02.0/0000:15:00.0/0000:16:00.0/0000:17:00.0"),
            "0x030200",
            &on("0"),
        )
        .function("pci0000:10/0000:10:02.0/0000:20:00.0", "0x120000", &on("0"))
        .function("pci0000:40/0000:40:01.0/0000:41:00.0", "0x030200", &on("0"))
        .function("pci0000:80/0000:80:01.0/0000:81:00.0", "0x030000", &on("1"))
}

#[test]
fn paths_follow_bridges_host_bridges_and_numa_nodes() {
    let found = two_sockets().discover();
    let topology = &found.topology;
    let path = |from, to| path(topology, from, to).unwrap();
    assert_eq!(path("GPU0", "NIC0"), PathClass::Pix);
    assert_eq!(path("GPU0", "GPU1"), PathClass::Pxb);
    assert_eq!(path("GPU0", "NPU0"), PathClass::Phb);
    assert_eq!(path("GPU0", "GPU2"), PathClass::Node);
    assert_eq!(path("GPU0", "GPU3"), PathClass::Sys);
    assert_eq!(edge(topology, "GPU3", "GPU0").class.provenance, Provenance::Sysfs);
    assert_eq!(found.notes, Vec::<String>::new());
}

#[test]
fn places_models_and_kinds_are_read() {
    let topology = two_sockets().discover().topology;
    let gpu = node(&topology, "GPU0");
    assert_eq!(gpu.place.pci.unwrap().to_string(), "0000:13:00.0");
    assert_eq!(gpu.place.cpus.as_ref().unwrap().to_string(), "0-3");
    let link = gpu.place.pcie.unwrap();
    assert_eq!((link.current.unwrap().mt_per_s, link.max.unwrap().mt_per_s), (2_500, 32_000));
    assert_eq!(gpu.model.as_deref(), Some("10de:2335"));
    let nic = node(&topology, "NIC0");
    assert_eq!((nic.kind, nic.model.as_deref()), (NodeKind::Nic, Some("ib0 mlx5_3")));
    let npu = node(&topology, "NPU0");
    assert!(matches!(npu.kind, NodeKind::Device { kind: DeviceKind::Npu, .. }));
}

#[test]
fn figures_are_those_of_the_slowest_link_when_awake() {
    let topology = two_sockets().discover().topology;
    let rate = |from, to| edge(&topology, from, to).nominal.map(|known| known.value.gb_per_s.round());
    assert_eq!(rate("GPU0", "NUMA0"), Some(63.0));
    assert_eq!(rate("GPU0", "NIC0"), Some(32.0));
    assert_eq!(rate("GPU0", "GPU1"), None, "a bridge on the way does not say");
}

#[test]
fn numa_nodes_come_with_processors_and_distances() {
    let found = two_sockets().discover();
    assert_eq!(found.numa_nodes[1].cpus.to_string(), "4-7");
    assert_eq!(found.numa_nodes[1].distances, [(0, 21), (1, 10)]);
    let memory = edge(&found.topology, "NUMA0", "NUMA1");
    assert_eq!((memory.class.value, memory.path.unwrap().value), (LinkClass::HostMemory, PathClass::Sys));
}

#[test]
fn a_virtual_machine_is_flat_and_has_one_host_bridge() {
    let found = Sysfs::new()
        .numa_node(0, "0-95", "10")
        .function(
            "pci0000:00/0000:00:05.0",
            "0x030200",
            &[("numa_node", "-1"), ("max_link_speed", "Unknown"), ("max_link_width", "0")],
        )
        .function("pci0000:00/0000:00:06.0", "0x030200", &[("numa_node", "-1")])
        .function("pci0000:00/0000:00:02.0", "0x030000", &[("vendor", "0x1234")])
        .discover();
    assert_eq!(path(&found.topology, "GPU0", "GPU1"), Some(PathClass::Phb));
    assert_eq!(node(&found.topology, "GPU0").place.numa_node, None);
    let host = edge(&found.topology, "GPU0", "NUMA0");
    assert_eq!(host.class.provenance, Provenance::Assumed, "the only node there is, but nobody said so");
    assert_eq!(found.notes, ["0000:00:02.0 is a display of the board and no accelerator"]);
}

#[test]
fn a_function_without_a_numa_node_among_several_stays_unattached() {
    let found = Sysfs::new()
        .numa_node(0, "0-3", "10 20")
        .numa_node(1, "4-7", "20 10")
        .function("pci0000:00/0000:01:00.0", "0x030200", &[("numa_node", "-1")])
        .function("pci0000:80/0000:81:00.0", "0x030200", &[])
        .discover();
    assert_eq!(path(&found.topology, "GPU0", "GPU1"), None);
    assert_eq!(found.notes.len(), 2);
    let gpu = found.topology.find("GPU0").unwrap();
    assert!(found.topology.edge(gpu, found.topology.host(0).unwrap()).is_none());
}

#[test]
fn virtual_functions_go_with_their_physical_one() {
    let found = Sysfs::new()
        .function("pci0000:00/0000:01:00.0", "0x020000", &[])
        .function("pci0000:00/0000:01:00.1", "0x020000", &[("physfn/class", "0x020000")])
        .discover();
    assert_eq!(found.topology.nodes().iter().filter(|node| node.kind == NodeKind::Nic).count(), 1);
}

#[test]
fn a_container_without_sysfs_has_nothing_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let found = discover(&folder.path().join("missing"));
    assert!(found.topology.nodes().is_empty());
    assert_eq!(found.notes, ["no NUMA nodes are listed", "no PCI devices are listed"]);
}

#[test]
fn garbage_in_files_is_as_good_as_none() {
    let found = Sysfs::new()
        .numa_node(0, "many", "near far")
        .function(
            "pci0000:00/0000:01:00.0",
            "0x030200",
            &[("numa_node", "x"), ("local_cpulist", "?"), ("vendor", "nobody")],
        )
        .function("pci0000:00/0000:02:00.0", "display", &[])
        .function("pci0000:00/0000:03:00.0", "0xfffffffff", &[])
        .discover();
    assert_eq!(found.topology.devices().count(), 1);
    assert!(found.numa_nodes[0].cpus.is_empty() && found.numa_nodes[0].distances.is_empty());
}

#[test]
fn the_machine_these_tests_run_on_can_be_read() {
    let found = discover("/sys".as_ref());
    found.topology.to_svg();
    assert_eq!(Topology::from_json(&found.topology.to_json()).unwrap(), found.topology);
}
