//! Every layout is read right, and every kind of damage is refused with the place named.

use warpweft_core_types::{Bandwidth, LinkClass, PathClass};
use warpweft_topology::{
    Edge, NodeKind, Provenance, Topology,
    import::{
        Format, ImportError, Imported, MAX_IMPORT, Printed, Report, Via, import, import_as, import_reader,
    },
};

use crate::fixture::{FIXTURES, fixture};

fn read(name: &str) -> Imported {
    import(fixture(name).as_bytes()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Links as `GPU0 GPU1 NV4`.
fn links(report: &Report) -> Vec<String> {
    let links = report.links.iter().flatten();
    links
        .map(|link| {
            let count = link.count.map(|count| count.to_string()).unwrap_or_default();
            format!("{} {} {}{count}", link.a, link.b, link.kind)
        })
        .collect()
}

fn edge<'t>(topology: &'t Topology, from: &str, to: &str) -> &'t Edge {
    let id = |name| topology.find(name).unwrap();
    topology.edge(id(from), id(to)).unwrap()
}

fn check_refused(text: &str, expected: &str) {
    let error = import(text.as_bytes()).unwrap_err().to_string();
    assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    assert!(error.len() < 600, "{} bytes are too many for a message", error.len());
}

fn check_damage(name: &str, good: &str, bad: &str, expected: &str) {
    let text = fixture(name);
    assert!(text.contains(good), "{name} has no {good:?}");
    check_refused(&text.replacen(good, bad, 1), expected);
}

#[test]
fn every_format_is_found_by_content_and_refused_by_every_other_importer() {
    for fixture in FIXTURES {
        assert_eq!(read(fixture.name).report.format, fixture.format, "{}", fixture.name);
        for format in Format::ALL {
            let result = import_as(format, fixture.text.as_bytes());
            assert_eq!(result.is_ok(), format == fixture.format, "{} as {format}", fixture.name);
        }
    }
}

#[test]
fn a_table_of_the_other_sort_is_named() {
    let error = import_as(Format::SmiP2p, fixture("matrix-5-switch.txt").as_bytes()).unwrap_err();
    assert_eq!(error.to_string(), "nvidia-smi topo -p2p was expected, but this is nvidia-smi topo -m");
}

#[test]
fn the_oldest_matrix_keeps_its_words() {
    let Imported { topology, report } = read("matrix-1-soc.txt");
    assert_eq!(
        links(&report),
        [
            "GPU0 GPU1 PHB",
            "GPU0 GPU2 SOC",
            "GPU1 GPU2 SOC",
            "GPU0 mlx4_0 SOC",
            "GPU1 mlx4_0 SOC",
            "GPU2 mlx4_0 PXB"
        ]
    );
    let soc = edge(&topology, "GPU0", "GPU2");
    assert_eq!(soc.path.map(|path| path.value), Some(PathClass::Sys));
    assert!(report.numa.is_none() && report.gpu_numa_id.is_none());
}

#[test]
fn cards_named_by_device_keep_their_order() {
    let report = read("matrix-2-node.txt").report;
    assert_eq!((report.gpus, report.nics), (4, Some(3)));
    let nic_links: Vec<String> =
        report.nic_links.unwrap().iter().map(|link| format!("{} {} {}", link.a, link.b, link.kind)).collect();
    assert_eq!(nic_links, ["mlx5_1 mlx5_0 SYS", "mlx5_1 hfi1_0 SYS", "mlx5_0 hfi1_0 NODE"]);
}

#[test]
fn affinity_is_kept_as_printed() {
    let report = read("matrix-3-numa.txt").report;
    let numa: Vec<Printed> = report.numa.unwrap().0.into_iter().map(|(_, value)| value).collect();
    assert_eq!(numa, [Printed::Nothing, Printed::Number(1), Printed::Text("2-3".into())]);
    let report = read("matrix-6-grace.txt").report;
    assert_eq!(report.gpu_numa_id.unwrap().find("GPU1"), Some(&Printed::Number(12)));
    assert_eq!(report.numa.unwrap().find("GPU0"), Some(&Printed::Text("0,2-5".into())));
    let report = read("matrix-10-one-gpu.txt").report;
    assert_eq!(report.cpu_affinity.unwrap().find("GPU0"), Some(&Printed::Number(5)));
}

#[test]
fn a_legend_names_the_cards_it_still_lists() {
    let Imported { topology, report } = read("matrix-4-nic-legend.txt");
    let names = report.nic_names.unwrap();
    assert_eq!(names.find("NIC1").map(String::as_str), Some("mlx5_4"));
    assert_eq!(names.find("NIC2"), None);
    let nic = topology.node(topology.find("NIC0").unwrap()).unwrap();
    assert_eq!(nic.kind, NodeKind::Nic);
    assert_eq!(nic.model.as_deref(), Some("mlx5_bond_0"));
}

#[test]
fn more_links_than_ports_are_links_through_a_switch() {
    let switched = read("matrix-5-switch.txt").topology;
    assert_eq!(edge(&switched, "GPU0", "GPU7").class.value, LinkClass::NvSwitch);
    let either = read("matrix-6-grace.txt").topology;
    assert_eq!(edge(&either, "GPU0", "GPU1").class.value, LinkClass::NvLink);
}

#[test]
fn devices_are_joined_to_the_memory_of_their_numa_node() {
    let topology = read("matrix-5-switch.txt").topology;
    let host = topology.host(1).unwrap();
    let near: Vec<&str> =
        topology.edges_from(host).iter().map(|edge| topology.node(edge.to).unwrap().name.as_str()).collect();
    assert_eq!(near, ["GPU4", "GPU5", "GPU6", "GPU7", "NIC2", "NIC3", "NUMA0"]);
    assert_eq!(edge(&topology, "NUMA0", "NUMA1").class.value, LinkClass::HostMemory);
}

#[test]
fn wrapped_tables_are_joined_and_said_to_be() {
    let report = read("matrix-11-wrapped.txt").report;
    assert_eq!(
        links(&report),
        [
            "GPU0 GPU1 NV4",
            "GPU0 GPU2 SYS",
            "GPU1 GPU2 SYS",
            "GPU0 NIC0 PIX",
            "GPU1 NIC0 PIX",
            "GPU2 NIC0 SYS"
        ]
    );
    assert_eq!(report.warnings.len(), 4);
}

#[test]
fn a_missing_card_row_is_a_warning_and_the_other_row_is_used() {
    let report = read("matrix-12-missing-nic-row.txt").report;
    assert_eq!(report.warnings, ["row NIC0 is missing"]);
    assert_eq!(report.nic_links.unwrap()[0].kind, "SYS");
}

#[test]
fn a_card_row_without_a_column_is_a_warning() {
    let text = fixture("matrix-12-missing-nic-row.txt").replace("NIC1\tSYS", "NIC7\tSYS");
    let warnings = import(text.as_bytes()).unwrap().report.warnings;
    assert_eq!(
        warnings,
        ["row NIC7 has no column in the header", "row NIC0 is missing", "row NIC1 is missing"]
    );
}

#[test]
fn a_second_table_is_not_mixed_in() {
    let two = format!("{}\n{}", fixture("matrix-3-numa.txt"), fixture("matrix-1-soc.txt"));
    let report = import(two.as_bytes()).unwrap().report;
    assert_eq!(report.gpus, 3);
    assert_eq!(report.warnings, ["a second table at line 8 is ignored"]);
}

#[test]
fn damaged_matrices_are_refused_with_the_place() {
    check_damage("matrix-3-numa.txt", "NV4", "NVL", "line 3: row GPU0, column GPU1: \"NVL\" is not known");
    check_damage("matrix-3-numa.txt", "NV4", "NV0", "line 3: row GPU0, column GPU1: \"NV0\"");
    check_damage(
        "matrix-3-numa.txt",
        "NV4",
        "NV8",
        "line 4: GPU0 to GPU1 is \"NV8\" but GPU1 to GPU0 is \"NV4\"",
    );
    check_damage("matrix-3-numa.txt", "NV4", "X", "line 3: row GPU0 has \"X\" under GPU1");
    check_damage(
        "matrix-3-numa.txt",
        "GPU1\tNV4\t X ",
        "GPU1\tNV4\tNV4",
        "line 4: row GPU1 has \"NV4\" under GPU1",
    );
    check_damage("matrix-3-numa.txt", "GPU2\tPHB", "GPU2", "row GPU2 has \"X\" under GPU1");
    check_damage(
        "matrix-3-numa.txt",
        "\tGPU2\tCPU",
        "\tCPU",
        "line 3: row GPU0 has 5 cells where the header has 4",
    );
    check_damage(
        "matrix-8-colour.txt",
        "GPU1\tNV12\t X ",
        "GPU2\tNV12\t X ",
        "line 3: rows GPU2 have no column",
    );
    check_damage("matrix-3-numa.txt", "0-15", "0-1x", "column CPU Affinity: \"0-1x\"");
    check_damage("matrix-3-numa.txt", "GPU0\tGPU1", "GPU0\tGPU0", "GPU0 appears twice");
    check_damage("matrix-8-colour.txt", "CPU Affinity", "Disk Affinity", "unknown column \"Disk\"");
    check_damage("matrix-8-colour.txt", "GPU1\tNV12\t X \t0-31\t0\n", "", "2 GPU columns but no rows GPU1");
    check_damage(
        "matrix-8-colour.txt",
        "GPU1\tNV12",
        "GPU0\t X \tNV12\t0-31\t0\nGPU1\tNV12",
        "GPU0 appears twice",
    );
    check_damage("matrix-11-wrapped.txt", "SYS     PIX\n", "SYS     P\n", "line 3: row GPU0");
}

#[test]
fn text_without_a_table_is_quoted() {
    check_refused("The driver could not be loaded: error 7\n", "error 7");
    check_refused("hello\n\nthe tool has failed\n", "the tool has failed");
    check_refused("", "the file is empty");
}

#[test]
fn peer_access_makes_edges_and_its_absence_forbids_them() {
    let Imported { topology, report } = read("p2p-raw.txt");
    assert_eq!(report.capability, Some(Some("rw".into())));
    let statuses: Vec<&str> = report.p2p.iter().flatten().map(|pair| pair.status.as_str()).collect();
    assert_eq!(statuses, ["OK", "CNS", "TNS", "GNS", "DR", "U"]);
    assert!(edge(&topology, "GPU0", "GPU1").is_usable());
    let vetoed = edge(&topology, "GPU2", "GPU0");
    assert_eq!(vetoed.veto.as_deref(), Some("the chipset does not support peer access"));
    let id = |name| topology.find(name).unwrap();
    assert!(topology.edge(id("GPU2"), id("GPU3")).is_none(), "unknown is neither");
    check_damage("p2p-raw.txt", "CNS", "ZNS", "row GPU0, column GPU2: \"ZNS\"");
}

#[test]
fn a_table_about_something_else_than_access_makes_no_edges() {
    assert!(read("p2p-nvlink.txt").topology.edges().is_empty());
    assert_eq!(read("p2p-markdown.txt").report.capability, Some(None));
    assert!(read("p2p-markdown.txt").topology.edges().is_empty());
}

#[test]
fn only_active_nvlinks_count() {
    let Imported { topology, report } = read("nvlink.txt");
    let nvlink = report.nvlink.unwrap();
    let counts: Vec<(usize, usize, f64)> =
        nvlink.0.iter().map(|(_, gpu)| (gpu.active, gpu.inactive, gpu.sum_gb_s)).collect();
    assert_eq!(counts, [(2, 1, 53.124), (1, 0, 26.562), (0, 0, 0.0)]);
    assert!(topology.devices().all(|gpu| gpu.uuid().is_some()));
    check_damage("nvlink.txt", "26.562 GB/s", "fast", "line 3: link 0 of GPU0 is \"fast\"");
    check_damage("nvlink.txt", "Link 4", "Link 0", "line 5: link 0 of GPU0 appears twice");
    check_damage("nvlink.txt", "GPU 1:", "GPU 0:", "GPU0 appears twice");
    check_refused("Link 0: 25 GB/s\n", "line 1: the GPU above this link is missing");
}

#[test]
fn weights_hops_and_types_are_read_together() {
    let Imported { topology, report } = read("rocm-pairs.txt");
    let link = &report.links.as_ref().unwrap()[1];
    assert_eq!((link.kind.as_str(), link.weight, link.hops), ("PCIE", Some(72), Some(3)));
    assert_eq!(edge(&topology, "GPU2", "GPU3").class.value, LinkClass::Xgmi);
    assert_eq!(report.numa.unwrap().find("GPU3"), Some(&Printed::Number(-1)));
    let unknown = topology.node(topology.find("GPU3").unwrap()).unwrap();
    assert_eq!(unknown.place.numa_node, None);
    check_damage(
        "rocm-pairs.txt",
        "Link Type between",
        "Link Kind between",
        "the table of link types is missing",
    );
    check_damage("rocm-pairs.txt", "XGMI", "HGMI", "\"HGMI\"");
    check_damage("rocm-pairs.txt", "GPU[2]", "GPU[9]", "GPU[9]");
}

#[test]
fn tiles_are_joined_by_lanes() {
    let Imported { topology, report } = read("xpu.txt");
    assert_eq!((report.gpus, report.tiles), (2, Some(4)));
    assert_eq!(edge(&topology, "GPU 0/0", "GPU 0/1").class.value, LinkClass::SameDevice);
    let lanes = edge(&topology, "GPU 0/0", "GPU 1/0");
    assert_eq!(lanes.link_count.map(|count| count.value), Some(8));
    let id = |name| topology.find(name).unwrap();
    assert!(topology.edge(id("GPU 0/0"), id("GPU 1/1")).is_none(), "a detour is no edge");
    check_damage("xpu.txt", "XL8", "XL0", "line 4: row GPU 0/0, column GPU 1/0: \"XL0\"");
    check_damage("xpu.txt", "GPU 1/1 |XL*", "GPU 1/1 |XL2", "line 7: GPU 0/0 to GPU 1/1 is \"XL*\"");
    check_damage("xpu.txt", "GPU 1/0 |", "GPU 2/0 |", "line 6: the label where row GPU 1/0 belongs");
}

#[test]
fn nccl_trees_give_switched_links_and_paths() {
    let Imported { topology, report } = read("nccl-switch.xml");
    assert_eq!(
        links(&report),
        [
            "GPU0 GPU1 NVL5",
            "GPU0 GPU2 NVL6",
            "GPU1 GPU2 NVL5",
            "GPU0 NIC0 SYS",
            "GPU0 NIC1 PHB",
            "GPU1 NIC0 SYS",
            "GPU1 NIC1 PHB",
            "GPU2 NIC0 PIX",
            "GPU2 NIC1 SYS"
        ]
    );
    let first = &report.links.as_ref().unwrap()[0];
    assert_eq!((first.via, first.pci.as_deref()), (Some(Via::Switch), Some("PXB")));
    assert_eq!(report.nic_list.unwrap()[0].net.as_ref().unwrap().len(), 2);
    let to_card = edge(&topology, "GPU2", "NIC0");
    let slower = to_card.nominal.unwrap().value.gb_per_s;
    assert!((slower - 31.5).abs() < 0.1, "the card's 16 GT/s limit the pair: {slower}");
}

#[test]
fn nccl_direct_links_and_unknown_speeds() {
    let Imported { topology, report } = read("nccl-direct.xml");
    assert_eq!(links(&report), ["GPU0 GPU1 NVL4"]);
    assert_eq!(report.links.unwrap()[0].via, Some(Via::Direct));
    let host = edge(&topology, "GPU0", "NUMA0");
    assert_eq!(host.nominal, None, "an empty speed is unknown, not zero");
    assert_eq!(host.bandwidth().provenance, Provenance::Assumed);
    check_damage(
        "nccl-direct.xml",
        "\"4\"",
        "\"3\"",
        "GPU0 to GPU1 is \"3 links\" but GPU1 to GPU0 is \"4 links\"",
    );
}

#[test]
fn chips_on_one_module_are_joined_to_their_processor() {
    let topology = read("nccl-c2c.xml").topology;
    let link = edge(&topology, "GPU0", "NUMA0");
    assert_eq!(link.class.value, LinkClass::NvLinkC2c);
    let rate = link.nominal.map(|known| known.value);
    assert_eq!(rate, Some(Bandwidth::from_gb_per_s(400.0)));
    check_damage("nccl-c2c.xml", " count=\"10\"", "", "line 6: attribute count of <c2c> is missing");
}

#[test]
fn rccl_is_the_same_with_xgmi() {
    let Imported { topology, report } = read("rccl.xml");
    assert_eq!(links(&report), ["GPU0 GPU1 XGMI2", "GPU0 GPU2 PHB", "GPU1 GPU2 PIX"]);
    let fast = edge(&topology, "GPU1", "GPU0");
    assert_eq!((fast.class.value, fast.path.map(|path| path.value)), (LinkClass::Xgmi, Some(PathClass::Phb)));
}

#[test]
fn files_by_hand_are_read_by_class() {
    let report = read("nccl-by-class.xml").report;
    assert_eq!((report.gpus, report.nics, report.nvlink_stated), (2, Some(1), Some(false)));
    assert_eq!(report.warnings, ["1 <pci> nodes have no class attribute and are left out"]);
    let nameless = "<system version='1'><cpu numaid='0'><pci busid='0000:01:00.0'/><pci busid='0000:02:00.0'/></cpu></system>";
    check_refused(nameless, "2 <pci> nodes have no class attribute");
}

#[test]
fn damaged_nccl_files_are_refused_with_the_place() {
    check_damage("nccl-switch.xml", " numaid=\"1\"", "", "line 3: attribute numaid of <cpu> is missing");
    check_damage("nccl-switch.xml", "numaid=\"1\"", "numaid=\"one\"", "attribute numaid of <cpu> is \"one\"");
    check_damage(
        "nccl-switch.xml",
        "affinity=\"ffff0000\"",
        "affinity=\"ghij\"",
        "affinity of <cpu> is \"ghij\"",
    );
    check_damage("nccl-switch.xml", "dev=\"2\"", "dev=\"1\"", "GPU1 appears twice");
    check_damage(
        "nccl-switch.xml",
        "busid=\"0000:a1:00.0\" ",
        "",
        "line 5: attribute busid of <pci> is missing",
    );
    check_damage("nccl-switch.xml", "count=\"3\"", "count=\"-3\"", "attribute count of <nvlink> is \"-3\"");
    check_damage("nccl-switch.xml", "</system>", "", "the document inside <system> is not closed");
    check_damage("nccl-switch.xml", "</cpu>", "</pci>", "not well-formed");
}

#[test]
fn hwloc_2_joins_devices_by_bridges_and_matrices() {
    let Imported { topology, report } = read("hwloc-2.xml");
    assert_eq!((report.gpus, report.nics, report.ethernet_only), (3, Some(1), Some(1)));
    assert_eq!(
        links(&report),
        [
            "GPU0 GPU1 NVL",
            "GPU0 GPU2 SYS",
            "GPU1 GPU2 SYS",
            "GPU0 NIC0 SYS",
            "GPU1 NIC0 SYS",
            "GPU2 NIC0 PHB"
        ]
    );
    let fast = edge(&topology, "GPU0", "GPU1");
    assert_eq!(fast.nominal.map(|known| known.value), Some(Bandwidth::from_gb_per_s(50.0)));
    assert_eq!(fast.path.map(|path| path.value), Some(PathClass::Pix));
    let gpu = topology.node(topology.find("GPU0").unwrap()).unwrap();
    assert_eq!(gpu.uuid().unwrap().to_string(), "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeee0");
    assert_eq!(gpu.model.as_deref(), Some("Example 9000"));
    let host = edge(&topology, "GPU1", "NUMA0");
    assert_eq!(host.nominal.map(|known| known.value), Some(Bandwidth::from_gb_per_s(7.88)));
}

#[test]
fn hwloc_3_reads_device_types_as_bits_and_finds_switches() {
    let report = read("hwloc-3.xml").report;
    let link = &report.links.as_ref().unwrap()[0];
    assert_eq!((link.kind.as_str(), link.via, link.mb_s), ("NVL", Some(Via::Switch), Some(125_000)));
    assert_eq!(report.nics, Some(1));
    assert_eq!(report.gpu_to_switch_mb_s.unwrap().find("GPU0"), Some(&150_000));
}

#[test]
fn hwloc_1_needs_no_version_and_counts_devices_with_a_driver() {
    let report = read("hwloc-1.xml").report;
    assert_eq!(report.nvlink_stated, Some(false));
    assert_eq!(links(&report), ["GPU0 GPU1 NODE", "GPU0 NIC0 SYS", "GPU1 NIC0 SYS"]);
    assert_eq!(report.warnings, ["0000:11:00.0 is taken for a GPU by its class 0302 alone"]);
}

#[test]
fn damaged_hwloc_files_are_refused_with_the_place() {
    check_damage("hwloc-2.xml", "nbobjs=\"3\"", "nbobjs=\"4\"", "line 49: 3 objects where 4 were announced");
    check_damage(
        "hwloc-2.xml",
        "50000 0 50000",
        "50000 50000",
        "line 49: 8 distances where 9 were announced",
    );
    check_damage("hwloc-2.xml", "0 50000 0", "0 fast 0", "line 49: a distance is \"fast\"");
    check_damage("hwloc-2.xml", ">35 <", ">99 <", "line 49: object 99 is missing");
    check_damage(
        "hwloc-2.xml",
        "nodeset=\"0x00000101\"",
        "nodeset=\"none\"",
        "line 4: attribute nodeset is \"none\"",
    );
    check_damage("hwloc-2.xml", "pci_link_speed=\"15.75\"", "pci_link_speed=\"-1\"", "pci_link_speed");
}

#[test]
fn long_and_unreadable_input_is_refused() {
    let long = vec![b' '; usize::try_from(MAX_IMPORT.0).unwrap() + 1];
    assert!(matches!(import(&long), Err(ImportError::TooLong { .. })));
    assert!(matches!(import_reader(std::io::repeat(b'x')), Err(ImportError::TooLong { .. })));
    assert!(matches!(import(b"GPU0\n\tGPU\xff"), Err(ImportError::NotText { line: 2, column: 5 })));
}

#[test]
fn ten_thousand_columns_are_too_many() {
    let header: String = (0..10_000).map(|index| format!("\tGPU{index}")).collect();
    check_refused(&header, "line 1: more than 1024 columns");
    let tiles: String = (0..10_000).map(|index| format!("GPU {index}/0|")).collect();
    check_refused(&tiles, "more than 1024 columns");
    let gpus: String =
        (0..10_000).map(|index| format!("<pci busid='0000:00:00.0'><gpu dev='{index}'/></pci>")).collect();
    let system = format!("<system version='1'><cpu numaid='0'>{gpus}</cpu></system>");
    check_refused(&system, "more than 1024 GPUs and network cards");
}
