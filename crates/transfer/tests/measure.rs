//! Measuring links between host devices, honest ones and others.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{sync::Arc, time::Duration};

use warpweft_core_types::{
    Backend, Bytes, Device, Features, HostFunction, KernelCode, KernelContract, LinkClass, LinkEnd, Param,
    Workgroup,
};
use warpweft_host::{HostBackend, HostDeviceConfig, LinkSpec, Place};
use warpweft_topology::{NodeDesc, Provenance, Topology};
use warpweft_transfer::{MeasureCache, MeasureConfig, MeasuredLink, TransferError, apply, measure};
use warpweft_wrappers::{FaultConfig, FaultyBackend};

fn config() -> MeasureConfig {
    MeasureConfig {
        large: Bytes::kib(256),
        rounds: 3,
        timeout: Duration::from_secs(10),
        ..Default::default()
    }
}

fn open_all(backend: &dyn Backend) -> Vec<Arc<dyn Device>> {
    let infos = backend.devices().unwrap();
    infos.iter().map(|info| backend.open(info.id.ordinal, Features::empty()).unwrap()).collect()
}

fn topology_of(devices: &[Arc<dyn Device>]) -> Topology {
    let node = |device: &Arc<dyn Device>| {
        NodeDesc::device(device.info().id.to_string(), device.info().kind).uuid(device.info().id.uuid)
    };
    let facts: Vec<_> = devices.iter().flat_map(|device| device.links().unwrap().facts()).collect();
    Topology::from_facts(devices.iter().map(node).collect(), &facts).unwrap()
}

fn end(device: &Arc<dyn Device>) -> LinkEnd {
    LinkEnd::Device(device.info().id.uuid)
}

fn find(links: &[MeasuredLink], from: LinkEnd, to: LinkEnd) -> Option<&MeasuredLink> {
    links.iter().find(|link| link.from == from && link.to == to)
}

#[test]
fn every_usable_direction_is_measured_and_no_other() {
    let link = LinkSpec::default();
    let backend = HostBackend::builder()
        .devices(3, &HostDeviceConfig::default())
        .link_both(Place::Device(0), Place::Device(1), link)
        .link(Place::Device(1), Place::Device(2), link)
        .link_all_to_host(link)
        .build()
        .unwrap();
    let devices = open_all(&backend);
    let links = measure(devices.clone(), &config()).unwrap();
    let host = LinkEnd::Host { numa_node: 0 };
    let [a, b, c] = [0, 1, 2].map(|device: usize| end(&devices[device]));
    for (from, to) in [(a, b), (b, a), (b, c), (a, host), (host, a), (c, host)] {
        let link = find(&links, from, to).unwrap();
        assert!(
            link.bandwidth.gb_per_s > 0.0 && link.both_ways.gb_per_s > 0.0 && !link.latency.is_zero(),
            "{link:?}"
        );
        assert_eq!(link.wrong_bytes, 0, "{link:?}");
    }
    for (from, to) in [(c, b), (a, c), (c, a)] {
        assert_eq!(find(&links, from, to), None);
    }
    assert_eq!(links.len(), 3 + 6);
}

#[test]
fn figures_follow_the_links() {
    // 1 GB/s one way and 0.25 GB/s back, with 2 ms of latency.
    let spec = |rate| LinkSpec::new(LinkClass::Pcie).with_cost(rate, Duration::from_millis(2));
    let backend = HostBackend::builder()
        .devices(2, &HostDeviceConfig::default())
        .link(Place::Device(0), Place::Device(1), spec(1.0))
        .link(Place::Device(1), Place::Device(0), spec(0.25))
        .link_all_to_host(spec(4.0))
        .delay_links(true)
        .build()
        .unwrap();
    let devices = open_all(&backend);
    let large = MeasureConfig { large: Bytes::mib(8), ..config() };
    let links = measure(devices.clone(), &large).unwrap();
    let there = find(&links, end(&devices[0]), end(&devices[1])).unwrap();
    let back = find(&links, end(&devices[1]), end(&devices[0])).unwrap();
    // Delays are lower bounds, so that a loaded machine can only be slower.
    assert!(there.bandwidth.gb_per_s <= 1.0 && back.bandwidth.gb_per_s <= 0.25, "{there:?} {back:?}");
    assert!(there.bandwidth.gb_per_s > back.bandwidth.gb_per_s, "{there:?} {back:?}");
    assert!(there.latency >= Duration::from_millis(2) && back.latency >= Duration::from_millis(2));
}

/// A kernel that copies words; `wrap` has the last word on each.
fn copy_words(wrap: fn(u32) -> u32) -> KernelCode {
    let contract =
        KernelContract::new("copy_words", [Param::write(4), Param::read(4), Param::scalar::<u64>()]);
    let body = move |workgroup: &Workgroup<'_>| {
        let (to, from) = (workgroup.slice::<u32>(0), workgroup.slice::<u32>(1));
        assert_eq!(workgroup.scalar::<u64>(2), to.len() as u64);
        (0..to.len()).for_each(|index| to.set(index, wrap(from.get(index))));
    };
    KernelCode::new().with_function(contract, HostFunction::new(body))
}

#[test]
fn a_kernel_is_timed_where_one_is_given() {
    let devices = open_all(&HostBackend::with_devices(2).unwrap());
    // Not a whole number of words.
    for large in [Bytes::kib(256), Bytes(4099)] {
        let config = MeasureConfig { kernel: Some(copy_words(|word| word)), large, ..config() };
        let links = measure(devices.clone(), &config).unwrap();
        assert!(links.iter().all(|link| link.kernel.is_some_and(|rate| rate.gb_per_s > 0.0)), "{links:?}");
        assert!(links.iter().all(|link| link.wrong_bytes == 0), "{links:?}");
    }
}

/// Case T4 for links that kernels use directly: copies arrive, and what a kernel stores does not.
#[test]
fn a_link_that_corrupts_stores_alone_is_vetoed() {
    let devices = open_all(&HostBackend::with_devices(2).unwrap());
    let config = MeasureConfig { kernel: Some(copy_words(|word| word ^ 1)), ..config() };
    let links = measure(devices.clone(), &config).unwrap();
    // A byte in each word, and none of those that were copied.
    assert!(links.iter().all(|link| link.wrong_bytes == config.large.0 / 4), "{links:?}");
    let mut topology = topology_of(&devices);
    apply(&links, &mut topology);
    assert!(topology.edges().iter().all(|edge| edge.veto.is_some()), "{:?}", topology.edges());
}

/// Case T4: the driver says the link works, and the data says otherwise.
#[test]
fn a_link_that_corrupts_is_vetoed_and_never_used() {
    let host = HostBackend::with_devices(2).unwrap();
    let broken = FaultyBackend::new(Arc::new(host), FaultConfig { copy_corrupts: 1.0, ..Default::default() });
    let devices = open_all(&broken);
    let links = measure(devices.clone(), &config()).unwrap();
    assert!(links.iter().all(|link| link.wrong_bytes > 0), "{links:?}");
    let mut topology = topology_of(&devices);
    let (a, b) = (
        topology.device(devices[0].info().id.uuid).unwrap(),
        topology.device(devices[1].info().id.uuid).unwrap(),
    );
    topology.best_path(a, b, Bytes(1)).unwrap();
    apply(&links, &mut topology);
    assert!(topology.edge(a, b).unwrap().veto.as_deref().is_some_and(|reason| reason.contains("wrong")));
    assert!(topology.best_path(a, b, Bytes(1)).is_err(), "no way leads over vetoed edges");
}

#[test]
fn measurements_enter_the_topology_and_make_no_edges() {
    let link = LinkSpec::new(LinkClass::NvLink).with_cost(400.0, Duration::from_micros(1));
    let backend = HostBackend::builder()
        .devices(2, &HostDeviceConfig::default())
        .link_all_devices(link)
        .link_all_to_host(link)
        .build()
        .unwrap();
    let devices = open_all(&backend);
    let links = measure(devices.clone(), &config()).unwrap();
    let mut topology = topology_of(&devices);
    apply(&links, &mut topology);
    let ids = [0, 1].map(|device: usize| topology.device(devices[device].info().id.uuid).unwrap());
    let edge = topology.edge(ids[0], ids[1]).unwrap();
    assert_eq!(edge.bandwidth().provenance, Provenance::Measured);
    assert_eq!(edge.bandwidth().value, find(&links, end(&devices[0]), end(&devices[1])).unwrap().bandwidth);
    let bare = devices
        .iter()
        .map(|d| NodeDesc::device(d.info().id.to_string(), d.info().kind).uuid(d.info().id.uuid));
    let mut without_links = Topology::from_facts(bare.collect(), &[]).unwrap();
    apply(&links, &mut without_links);
    assert!(without_links.edges().is_empty());
}

#[test]
fn the_cache_answers_for_the_same_devices_in_any_order() {
    let devices = open_all(&HostBackend::with_devices(2).unwrap());
    let links = measure(devices.clone(), &config()).unwrap();
    let mut cache = MeasureCache::default();
    let config = MeasureConfig::default();
    cache.insert(&devices, &config, links.clone());
    let text = serde_json::to_string(&cache).unwrap();
    let cache: MeasureCache = serde_json::from_str(&text).unwrap();
    let reversed: Vec<_> = devices.iter().rev().cloned().collect();
    assert_eq!(cache.get(&reversed, &config), Some(links.as_slice()));
    assert_eq!(cache.get(&devices[..1], &config), None);
    assert_eq!(cache.get(&open_all(&HostBackend::with_devices(2).unwrap()), &config), None, "other devices");
    let smaller = MeasureConfig { large: Bytes::mib(1), ..config };
    assert_eq!(cache.get(&devices, &smaller), None, "other sizes");
}

#[test]
fn nothing_is_measured_with_nothing() {
    for bad in [MeasureConfig { rounds: 0, ..config() }, MeasureConfig { large: Bytes(0), ..config() }] {
        assert!(matches!(measure([], &bad), Err(TransferError::InvalidConfig { .. })));
    }
    assert_eq!(measure([], &config()).unwrap(), []);
}
