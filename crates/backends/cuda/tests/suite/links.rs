//! Facts about links: the management library is found, joined with the driver, and done without.

use std::path::Path;

use warpweft_core_types::{
    Backend, DeviceInfo, Features, LinkClass, LinkEnd, LinkFact, PathClass, Provenance,
};
use warpweft_cuda::CudaBackend;
use warpweft_stand_in_cuda::StandIn;
use warpweft_topology::{DeviceKind, NodeDesc, Topology};

use crate::support::config;

fn open(stand_in: &StandIn, library: &Path) -> CudaBackend {
    CudaBackend::with_config(&config(stand_in).with_nvml(library)).unwrap()
}

/// What each device says of links that start there, to other devices by their ordinal and to the host.
fn facts(backend: &CudaBackend) -> Vec<LinkFact> {
    let infos = backend.devices().unwrap();
    let open = |ordinal| backend.open(ordinal, Features::empty()).unwrap();
    let reported = infos.iter().flat_map(|info| open(info.id.ordinal).links().unwrap().facts());
    reported.collect()
}

fn is_between_devices(fact: &LinkFact) -> bool {
    matches!((fact.from, fact.to), (LinkEnd::Device(_), LinkEnd::Device(_)))
}

/// Class, path and number of links of every fact between devices, which must agree.
fn check(stand_in: &StandIn, class: LinkClass, path: Option<PathClass>, count: u32) -> Vec<LinkFact> {
    let backend = open(stand_in, stand_in.path());
    let facts = facts(&backend);
    let between: Vec<&LinkFact> = facts.iter().filter(|fact| is_between_devices(fact)).collect();
    assert!(!between.is_empty());
    for fact in between {
        let found = (fact.class, fact.path, fact.link_count, fact.provenance);
        assert_eq!(found, (class, path, count, Provenance::Driver), "{:?}", backend.notes());
    }
    facts
}

#[test]
fn every_pair_is_joined_by_hidden_switches() {
    let stand_in = StandIn::load().unwrap().with("devices", "4");
    let facts = check(&stand_in, LinkClass::NvSwitch, Some(PathClass::Phb), 18);
    let backend = open(&stand_in, stand_in.path());
    let infos = backend.devices().unwrap();
    let names = ["GPU0", "GPU1", "GPU2", "GPU3"];
    let node =
        |(name, info): (&&str, &DeviceInfo)| NodeDesc::device(*name, DeviceKind::Gpu).uuid(info.id.uuid);
    let nodes: Vec<NodeDesc> = names.iter().zip(&infos).map(node).collect();
    let topology = Topology::from_facts(nodes, &facts).unwrap();
    let devices: Vec<_> = infos.iter().map(|info| topology.device(info.id.uuid).unwrap()).collect();
    for &from in &devices {
        for &to in devices.iter().filter(|&&to| to != from) {
            let edge = topology.edge(from, to).unwrap();
            assert_eq!(edge.class.value, LinkClass::NvSwitch);
            assert_eq!(edge.link_count.unwrap().value, 18);
            let rate = edge.nominal.unwrap();
            assert_eq!((rate.value.gb_per_s, rate.provenance), (478.116, Provenance::Driver));
        }
    }
}

#[test]
fn switches_bridges_and_their_absence_are_told_apart() {
    let load = |links: &str| StandIn::load().unwrap().with("links", links);
    check(&load("shown"), LinkClass::NvSwitch, Some(PathClass::Phb), 18);
    check(&load("bridge").with("link_count", "4"), LinkClass::NvLink, Some(PathClass::Phb), 4);
    check(&load("switch").with("inactive", "5"), LinkClass::NvSwitch, Some(PathClass::Phb), 13);
    let facts = check(&load("none"), LinkClass::Pcie, Some(PathClass::Phb), 1);
    assert!(facts.iter().all(|fact| fact.bandwidth.is_some_and(|rate| rate.gb_per_s == 63.015)));
}

#[test]
fn bridges_join_neighbours_only() {
    let stand_in = StandIn::load().unwrap().with("devices", "4").with("links", "bridge");
    let backend = open(&stand_in, stand_in.path());
    let infos = backend.devices().unwrap();
    let facts = facts(&backend);
    for fact in facts.iter().filter(|fact| is_between_devices(fact)) {
        let place = |end| infos.iter().position(|info| LinkEnd::Device(info.id.uuid) == end).unwrap();
        let joined = place(fact.from) ^ 1 == place(fact.to);
        assert_eq!(fact.class, if joined { LinkClass::NvLink } else { LinkClass::Pcie });
    }
}

#[test]
fn a_masked_order_tells_the_same_links() {
    // The last two of three have links; the first bridge leads nowhere that is shown.
    let told = |list: &str, stealthy: bool| {
        let mut stand_in = StandIn::load().unwrap().with("devices", "4").with("links", "bridge");
        stand_in = stand_in.with("CUDA_VISIBLE_DEVICES", list);
        if stealthy {
            stand_in = stand_in.with("stealthy", "1");
        }
        let facts = facts(&open(&stand_in, stand_in.path()));
        let ends =
            |fact: LinkFact| format!("{:?} {:?} {} {}", fact.from, fact.to, fact.class, fact.link_count);
        let mut lines: Vec<String> = facts.into_iter().map(ends).collect();
        lines.sort();
        lines
    };
    let plain = told("0,2,3", false);
    assert!(
        plain.iter().any(|line| line.contains("NVLink")) && plain.iter().any(|line| line.contains("PCIe"))
    );
    assert_eq!(plain, told("3,0,2", false));
    // Without UUIDs, by the place on the bus.
    assert_eq!(plain, told("2,3,0", true));
}

/// Facts without a word from the library, and a note that says why.
fn degraded(stand_in: &StandIn, library: &Path, word: &str) {
    let backend = open(stand_in, library);
    let facts = facts(&backend);
    for fact in &facts {
        let known = (fact.class, fact.bandwidth, fact.provenance);
        let expected = match is_between_devices(fact) {
            true => (LinkClass::Unknown, None, Provenance::Driver),
            false => (LinkClass::Pcie, None, Provenance::Assumed),
        };
        assert_eq!(known, expected);
    }
    let notes = backend.notes();
    assert!(notes.iter().any(|note| note.contains(word)), "{word:?} is not in {notes:?}");
}

#[test]
fn without_the_library_links_are_there_and_unknown() {
    let stand_in = StandIn::load().unwrap();
    degraded(&stand_in, Path::new("libnvidia-ml-of-nobody.so"), "libnvidia-ml-of-nobody.so");
}

#[test]
fn a_library_of_another_version_is_named() {
    let stand_in = StandIn::load().unwrap().with("nvml", "18");
    degraded(&stand_in, stand_in.path(), "restart the machine");
    let lacking = StandIn::without(&["nvmlInit_v2"]).unwrap();
    degraded(&StandIn::load().unwrap(), &lacking.1, "does not start");
    let lacking = StandIn::without(&["nvmlDeviceGetCount_v2"]).unwrap();
    degraded(&StandIn::load().unwrap(), &lacking.1, "does not list");
}

#[test]
fn a_library_that_lacks_functions_tells_what_it_can() {
    let functions =
        ["nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMigMode"];
    let (_folder, path) = StandIn::without(&functions).unwrap();
    let facts = facts(&open(&StandIn::load().unwrap(), &path));
    let between: Vec<_> = facts.into_iter().filter(is_between_devices).collect();
    assert!(between.iter().all(|fact| (fact.class, fact.link_count) == (LinkClass::NvSwitch, 18)));
    assert!(between.iter().all(|fact| fact.bandwidth.is_none()), "nobody told a speed");
}

#[test]
fn instances_and_shares_are_degraded() {
    let stand_in = StandIn::load().unwrap().with("mig", "1");
    check(&stand_in, LinkClass::Unknown, None, 1);
    assert!(open(&stand_in, stand_in.path()).notes()[0].contains("MIG"));
    check(&StandIn::load().unwrap().with("vgpu", "1"), LinkClass::NvSwitch, None, 18);
}

#[test]
fn a_library_that_refuses_everything_is_survived() {
    let stand_in = StandIn::load().unwrap();
    let names = stand_in.path().to_path_buf();
    drop(facts(&open(&stand_in, &names)));
    for function in stand_in.called().into_iter().filter(|name| name.starts_with("nvml")) {
        for code in [1, 3, 15, 999] {
            stand_in.fail(&function, 0, code);
            let backend = open(&stand_in, &names);
            assert!(facts(&backend).iter().all(|fact| fact.link_count >= 1));
            assert!(!backend.notes().is_empty());
            assert_eq!(stand_in.failed().as_deref(), Some(function.as_str()));
        }
    }
}

#[test]
fn nothing_is_asked_before_somebody_wants_to_know() {
    let stand_in = StandIn::load().unwrap();
    let config = config(&stand_in).with_nvml(stand_in.path());
    let backend = CudaBackend::with_config(&config).unwrap();
    backend.open(0, Features::empty()).unwrap();
    assert_eq!(stand_in.calls("nvmlInit_v2"), 0);
    backend.notes();
    facts(&backend);
    assert_eq!((stand_in.calls("nvmlInit_v2"), stand_in.calls("nvmlShutdown")), (1, 1));
}
