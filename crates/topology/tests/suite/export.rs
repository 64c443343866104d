//! What is written can be read back, and names cannot break out of it.

use std::time::Duration;

use proptest::prelude::*;
use quick_xml::{events::Event, reader::Reader};
use warpweft_core_types::{Bandwidth, DeviceUuid, LinkClass, PathClass, Provenance};
use warpweft_topology::{
    DeviceKind, JsonError, LinkDesc, Measurement, NodeDesc, NodeId, NodeKind, Topology,
    import::{Format, Report, import, import_as},
};

use crate::fixture::{FIXTURES, fixture};

fn topology(name: &str) -> Topology {
    import(fixture(name).as_bytes()).unwrap().topology
}

/// Links as `GPU0 GPU1 NV4`, with `NV` for all NVLink and `SYS` for `SOC`; sorted.
fn links(report: &Report) -> Vec<String> {
    let links = report.links.iter().flatten();
    let mut links: Vec<String> = links
        .map(|link| {
            let kind = link.kind.replace("NVL", "NV").replace("SOC", "SYS");
            let count = link.count.map(|count| count.to_string()).unwrap_or_default();
            format!("{} {} {kind}{count}", link.a, link.b)
        })
        .collect();
    links.sort();
    links
}

fn check_well_formed(svg: &str) -> String {
    let mut reader = Reader::from_str(svg);
    let mut text = String::new();
    loop {
        match reader.read_event().unwrap() {
            Event::Start(tag) | Event::Empty(tag) => {
                for attribute in tag.attributes() {
                    let value = attribute.unwrap().value.into_owned();
                    assert!(!value.contains("NaN") && !value.contains("inf"), "{value}");
                }
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::GeneralRef(name) => text.push_str(&format!("&{};", &*name)),
            Event::Eof => return text,
            _ => {}
        }
    }
}

#[test]
fn a_matrix_is_written_as_people_know_it() {
    insta::assert_snapshot!(topology("matrix-4-nic-legend.txt").to_matrix());
}

#[test]
fn a_matrix_tells_pairs_that_must_not_be_used() {
    let matrix = topology("p2p-raw.txt").to_matrix();
    let row = |name: &str| matrix.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row("GPU0").contains('?') && row("GPU2").contains("no"), "{matrix}");
    assert!(matrix.contains("must not be used"), "{matrix}");
}

#[test]
fn a_graph_is_written_with_one_node_per_fabric() {
    insta::assert_snapshot!(topology("nccl-switch.xml").to_dot());
}

#[test]
fn matrices_are_read_back() {
    for name in
        ["matrix-2-node.txt", "matrix-4-nic-legend.txt", "matrix-5-switch.txt", "matrix-7-markdown.txt"]
    {
        let before = import(fixture(name).as_bytes()).unwrap();
        let after = import_as(Format::SmiMatrix, before.topology.to_matrix().as_bytes());
        let after = after.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(links(&before.report), links(&after.report), "{name}");
        assert_eq!(before.report.nic_names, after.report.nic_names, "{name}");
    }
}

#[test]
fn nccl_files_are_read_back() {
    for fixture in FIXTURES.iter().filter(|fixture| fixture.format == Format::NcclXml) {
        let before = import(fixture.text.as_bytes()).unwrap();
        let xml = before.topology.to_nccl_xml();
        let after = import_as(Format::NcclXml, xml.as_bytes());
        let after = after.unwrap_or_else(|error| panic!("{}: {error}\n{xml}", fixture.name));
        assert_eq!(before.report.gpus, after.report.gpus, "{}", fixture.name);
        // Cards are numbered in the order of processors, which the file may have in another order.
        let gpu_links = |report: &Report| {
            let links = links(report).into_iter();
            links.filter(|link| !link.contains("NIC")).collect::<Vec<_>>()
        };
        assert_eq!(gpu_links(&before.report), gpu_links(&after.report), "{}", fixture.name);
    }
}

#[test]
fn a_matrix_becomes_an_nccl_file() {
    let xml = topology("matrix-5-switch.txt").to_nccl_xml();
    let report = import_as(Format::NcclXml, xml.as_bytes()).unwrap().report;
    let links = links(&report);
    assert!(links.contains(&"GPU0 GPU7 NV18".to_owned()));
    // Cards are numbered in the order of the tree: what was NIC1 hangs beside GPU0 and comes first.
    assert!(links.contains(&"GPU0 NIC0 PIX".to_owned()));
    assert!(links.contains(&"GPU1 NIC0 PHB".to_owned()), "NODE is what the format cannot say");
    assert!(links.contains(&"GPU0 NIC3 SYS".to_owned()));
}

#[test]
fn every_fixture_makes_a_picture_with_every_name() {
    for fixture in FIXTURES {
        let topology = import(fixture.text.as_bytes()).unwrap().topology;
        let text = check_well_formed(&topology.to_svg());
        for node in topology.nodes() {
            let shown = match node.kind {
                NodeKind::Host { numa_node } => format!("NUMA {numa_node}"),
                _ => node.name.clone(),
            };
            assert!(text.contains(&shown), "{} lacks {shown}", fixture.name);
        }
    }
}

#[test]
fn names_cannot_break_out() {
    let evil = "\"/><script>&'\u{0}\n]]>--\\";
    let mut builder = Topology::builder();
    let a = builder.node(NodeDesc::device(evil, DeviceKind::Gpu).model(evil).on(evil)).unwrap();
    let b = builder.node(NodeDesc::new(format!("{evil}2"), NodeKind::Nic).model(evil).on(evil)).unwrap();
    let s = builder.node(NodeDesc::new(format!("{evil}3"), NodeKind::Switch)).unwrap();
    let desc = LinkDesc::new(LinkClass::Pcie, Provenance::File);
    builder.link_both(a, b, desc).unwrap();
    builder.link_both(a, s, desc).unwrap();
    let mut topology = builder.build();
    topology.veto(a, b, evil).unwrap();
    let svg = topology.to_svg();
    check_well_formed(&svg);
    assert!(!svg.contains("<script"));
    import_as(Format::NcclXml, topology.to_nccl_xml().as_bytes()).unwrap();
    assert_eq!(Topology::from_json(&topology.to_json()).unwrap(), topology);
    let dot = topology.to_dot();
    let unescaped = dot.replace("\\\\", "").replace("\\\"", "");
    assert!(unescaped.lines().all(|line| line.matches('"').count() % 2 == 0), "{dot}");
}

#[test]
fn several_machines_are_told_apart() {
    let mut builder = Topology::builder();
    let switch = builder.node(NodeDesc::new("leaf", NodeKind::Switch)).unwrap();
    for host in ["a", "b"] {
        let gpu = NodeDesc::device(format!("{host}/GPU0"), DeviceKind::Gpu).on(host).near(0);
        let nic = NodeDesc::new(format!("{host}/NIC0"), NodeKind::Nic).on(host).near(0);
        let (gpu, nic) = (builder.node(gpu).unwrap(), builder.node(nic).unwrap());
        let pcie = LinkDesc::new(LinkClass::Pcie, Provenance::File).path(PathClass::Pix);
        builder.link_both(gpu, nic, pcie).unwrap();
        builder.link_both(nic, switch, LinkDesc::new(LinkClass::Network, Provenance::File)).unwrap();
    }
    let topology = builder.build();
    let text = check_well_formed(&topology.to_svg());
    assert!(text.contains("2 machines") && text.contains("leaf"));
    let report = import_as(Format::NcclXml, topology.to_nccl_xml().as_bytes()).unwrap().report;
    assert_eq!(links(&report), ["GPU0 NIC0 PIX", "host1/GPU0 NIC1 PIX"]);
}

#[test]
fn json_of_another_version_or_shape_is_refused() {
    let json = topology("matrix-1-soc.txt").to_json();
    let later = json.replace("\"version\": 1", "\"version\": 2");
    assert!(matches!(Topology::from_json(&later), Err(JsonError::Version { found: 2 })));
    let stranger = json.replacen("\"from\": \"GPU0\"", "\"from\": \"GPU9\"", 1);
    assert!(matches!(Topology::from_json(&stranger), Err(JsonError::UnknownName { .. })));
    let twice = json.replacen("\"to\": \"GPU1\"", "\"to\": \"GPU2\"", 1);
    assert!(matches!(Topology::from_json(&twice), Err(JsonError::Build(_))));
    let looped = json.replacen("\"to\": \"GPU1\"", "\"to\": \"GPU0\"", 1);
    assert!(matches!(Topology::from_json(&looped), Err(JsonError::Build(_))));
    let extra = json.replacen("\"from\"", "\"frum\": 1, \"from\"", 1);
    assert!(matches!(Topology::from_json(&extra), Err(JsonError::Syntax { .. })));
    let cut = import(&json.as_bytes()[..json.len() / 2]).unwrap_err().to_string();
    assert!(cut.contains("ends early"), "{cut}");
}

fn any_class() -> impl Strategy<Value = LinkClass> {
    proptest::sample::select(vec![
        LinkClass::SameDevice,
        LinkClass::HostMemory,
        LinkClass::NvLink,
        LinkClass::NvSwitch,
        LinkClass::Xgmi,
        LinkClass::Pcie,
        LinkClass::Network,
        LinkClass::Unknown,
    ])
}

fn any_desc() -> impl Strategy<Value = LinkDesc> {
    let path =
        proptest::option::of(proptest::sample::select(vec![PathClass::Pix, PathClass::Node, PathClass::Sys]));
    let provenance = proptest::sample::select(vec![
        Provenance::Measured,
        Provenance::Driver,
        Provenance::Sysfs,
        Provenance::File,
        Provenance::Assumed,
    ]);
    let figures = (
        proptest::option::of(1_u32..20),
        proptest::option::of(0.0_f64..1e6),
        proptest::option::of(any::<u64>()),
    );
    (any_class(), path, provenance, figures).prop_map(|(class, path, provenance, (count, rate, ns))| {
        LinkDesc {
            class,
            path,
            link_count: count,
            bandwidth: rate.map(Bandwidth::from_gb_per_s),
            latency: ns.map(Duration::from_nanos),
            provenance,
        }
    })
}

prop_compose! {
    fn any_topology()(
        places in prop::collection::vec((0_u8..4, proptest::option::of(0_u32..3), "[a-zA-Z0-9 <&\"'é]{0,8}"), 1..9),
        links in prop::collection::vec((any::<proptest::sample::Index>(), any::<proptest::sample::Index>(), any_desc()), 0..40),
        vetoed in any::<proptest::sample::Index>(),
        measured in proptest::option::of(0.0_f64..1e6),
    ) -> Topology {
        let mut builder = Topology::builder();
        let mut ids: Vec<NodeId> = Vec::new();
        for (index, (kind, numa, text)) in places.iter().enumerate() {
            let byte = u8::try_from(index).unwrap();
            let name = format!("{text}{index}");
            let mut desc = match kind {
                0 => NodeDesc::device(name, DeviceKind::Gpu).uuid(DeviceUuid::from_bytes([byte; 16])),
                1 => NodeDesc::new(name, NodeKind::Nic).model(text.clone()),
                2 => NodeDesc::new(name, NodeKind::Switch),
                _ => NodeDesc::device(name, DeviceKind::Npu).on(text.clone()),
            };
            desc.place.numa_node = *numa;
            desc.place.cpus = numa.map(|numa| [numa, numa + 7].into_iter().collect());
            ids.push(builder.node(desc).unwrap());
        }
        let count = places.len();
        for (from, to, desc) in &links {
            let (from, to) = (ids[from.index(count)], ids[to.index(count)]);
            if from != to {
                builder.link(from, to, *desc).unwrap();
            }
        }
        let mut topology = builder.build();
        if !topology.edges().is_empty() {
            let edge = &topology.edges()[vetoed.index(topology.edges().len())];
            let (from, to) = (edge.from, edge.to);
            topology.veto(from, to, "a probe lost data").unwrap();
            let measurement = Measurement { bandwidth: measured.map(Bandwidth::from_gb_per_s), latency: None };
            topology.measure(from, to, &measurement).unwrap();
        }
        topology
    }
}

proptest! {
    #[test]
    fn json_is_read_back_exactly(topology in any_topology()) {
        let json = topology.to_json();
        let back = Topology::from_json(&json).unwrap();
        prop_assert_eq!(&back, &topology);
        prop_assert_eq!(back.to_json(), json);
    }

    #[test]
    fn anything_can_be_drawn(topology in any_topology()) {
        check_well_formed(&topology.to_svg());
        topology.to_dot();
        topology.to_matrix();
        let xml = topology.to_nccl_xml();
        let has_endpoints = topology.nodes().iter().any(|node| {
            matches!(node.kind, NodeKind::Nic | NodeKind::Device { kind: DeviceKind::Gpu, .. })
        });
        prop_assert_eq!(import_as(Format::NcclXml, xml.as_bytes()).is_ok(), has_endpoints, "{}", xml);
    }
}
