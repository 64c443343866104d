//! Placement, service and evacuation over host devices, some of them faulty.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use proptest::prelude::*;
use warpweft_coordinator::{
    Coordinator, CoordinatorConfig, CoordinatorError, CustomStrategy, DeviceStatus, KernelId, MovePriority,
    PlacementRequest, Strategy,
};
use warpweft_core_types::{Backend, BufferDesc, Bytes, Device, DeviceId, DeviceUuid, Features, LinkClass};
use warpweft_host::{HostBackend, HostBuilder, HostDeviceConfig, LinkSpec, Place};
use warpweft_wrappers::{FaultConfig, FaultyBackend};

fn open_all(backend: &dyn Backend) -> Vec<Arc<dyn Device>> {
    let infos = backend.devices().unwrap();
    infos.iter().map(|info| backend.open(info.id.ordinal, Features::empty()).unwrap()).collect()
}

fn coordinator(backend: &dyn Backend, config: CoordinatorConfig) -> (Coordinator, Vec<DeviceId>) {
    let (coordinator, devices) = (Coordinator::new(config).unwrap(), open_all(backend));
    let ids = devices.iter().map(|device| device.info().id).collect();
    devices.into_iter().for_each(|device| coordinator.register(device).unwrap());
    (coordinator, ids)
}

fn limit(kernels_per_device: u32) -> CoordinatorConfig {
    CoordinatorConfig { kernels_per_device, ..Default::default() }
}

fn host(devices: u32, config: CoordinatorConfig) -> (Coordinator, Vec<DeviceId>) {
    coordinator(&HostBackend::with_devices(devices).unwrap(), config)
}

fn by(strategy: Strategy) -> PlacementRequest {
    PlacementRequest { strategy: Some(strategy), ..Default::default() }
}

fn ordinals(coordinator: &Coordinator, request: &PlacementRequest, count: usize) -> Vec<u32> {
    (0..count).map(|_| coordinator.place(request).unwrap().1.ordinal).collect()
}

fn plain() -> PlacementRequest {
    PlacementRequest::default()
}

#[test]
fn each_strategy_chooses_as_it_says() {
    let check = |strategy: Strategy, expected: &[u32]| {
        let (coordinator, _) = host(3, limit(2));
        assert_eq!(ordinals(&coordinator, &by(strategy.clone()), expected.len()), expected, "{strategy:?}");
    };
    check(Strategy::FirstAvailable, &[0, 0, 1, 1, 2, 2]);
    check(Strategy::LeastLoaded, &[0, 1, 2, 0, 1, 2]);
    check(Strategy::RoundRobin, &[0, 1, 2, 0, 1, 2]);
    check(Strategy::NearPeers, &[0, 1, 2, 0, 1, 2]);
    check(Strategy::Custom(CustomStrategy::new(|offered| Some(offered.len() - 1))), &[2, 2, 1, 1, 0, 0]);
}

#[test]
fn round_robin_goes_on_behind_the_last_even_where_devices_come_and_go() {
    let (coordinator, ids) = host(4, limit(10));
    assert_eq!(ordinals(&coordinator, &by(Strategy::RoundRobin), 2), [0, 1]);
    coordinator.drain(ids[2]).unwrap();
    assert_eq!(ordinals(&coordinator, &by(Strategy::RoundRobin), 3), [3, 0, 1]);
    coordinator.return_to_service(ids[2]).unwrap();
    assert_eq!(ordinals(&coordinator, &by(Strategy::RoundRobin), 2), [2, 3]);
}

#[test]
fn load_is_measured_against_the_limit() {
    let backend = HostBackend::with_devices(2).unwrap();
    let uuid = backend.devices().unwrap()[1].id.uuid;
    let config =
        CoordinatorConfig { kernels_per_device: 2, limits: [(uuid, 6)].into(), ..Default::default() };
    let (coordinator, _) = coordinator(&backend, config);
    let mut chosen = ordinals(&coordinator, &plain(), 8);
    chosen.sort_unstable();
    assert_eq!(chosen, [0, 0, 1, 1, 1, 1, 1, 1]);
}

#[test]
fn memory_decides_where_it_is_asked_for() {
    let sized = |mib| HostDeviceConfig { memory: Bytes::mib(mib), ..HostDeviceConfig::default() };
    let backend =
        HostBackend::builder().device(sized(10)).device(sized(100)).device(sized(50)).build().unwrap();
    let (coordinator, _) = coordinator(&backend, CoordinatorConfig::default());
    let want = |mib| PlacementRequest { memory: Bytes::mib(mib), ..by(Strategy::MostMemory) };
    // 100, then 100 - 60 against 50, then 50 - 30 against 40.
    assert_eq!([60, 30, 5].map(|mib| coordinator.place(&want(mib)).unwrap().1.ordinal), [1, 2, 1]);
    let error = coordinator.place(&want(40)).unwrap_err();
    let most = Bytes::mib(35);
    assert_eq!(error, CoordinatorError::OutOfMemory { devices: 3, requested: Bytes::mib(40), most });
}

#[test]
fn free_memory_is_the_drivers_not_what_was_typed_in() {
    let backend = HostBackend::with_devices(1).unwrap();
    let device = backend.open(0, Features::empty()).unwrap();
    let config = CoordinatorConfig { memory_max_age: Duration::ZERO, ..Default::default() };
    let (coordinator, _) = coordinator(&backend, config);
    let buffer = device.allocate(&BufferDesc::device(3 << 30)).unwrap();
    let request = PlacementRequest { memory: Bytes::gib(2), ..plain() };
    assert!(matches!(coordinator.place(&request), Err(CoordinatorError::OutOfMemory { .. })));
    assert_eq!(coordinator.devices_report()[0].free, Bytes::gib(1));
    drop(buffer);
    coordinator.place(&request).unwrap();
}

#[test]
fn conditions_are_met_or_the_refusal_says_so() {
    let capable =
        |capability| HostDeviceConfig { compute_capability: capability, ..HostDeviceConfig::default() };
    let backend = HostBackend::builder()
        .device(capable(None))
        .device(capable(Some((8, 0))))
        .device(capable(Some((9, 0))))
        .link_both(Place::Device(1), Place::Host, LinkSpec::default())
        .build()
        .unwrap();
    let (coordinator, _) = coordinator(&backend, CoordinatorConfig::default());
    assert_eq!(ordinals(&coordinator, &by(Strategy::ComputeCapability), 1), [2]);
    let least = |capability| PlacementRequest { compute_capability: Some(capability), ..plain() };
    assert_eq!(ordinals(&coordinator, &least((8, 0)), 1), [1]);
    assert_eq!(ordinals(&coordinator, &least((8, 6)), 2), [2, 2]);
    let featured = PlacementRequest { features: Features::HOST_VISIBLE_MEMORY, ..plain() };
    assert_eq!(ordinals(&coordinator, &featured, 2), [1, 1]);
    let foreign = PlacementRequest { backend: Some("abacus".to_owned()), ..plain() };
    for impossible in [least((10, 0)), foreign] {
        assert!(matches!(coordinator.place(&impossible), Err(CoordinatorError::NoDeviceFits { .. })));
    }
}

#[test]
fn a_kernel_goes_near_its_peers() {
    let fast = LinkSpec::new(LinkClass::NvLink).with_cost(100.0, Duration::from_micros(1));
    let slow = LinkSpec::new(LinkClass::Pcie).with_cost(10.0, Duration::from_micros(5));
    let pair = |builder: HostBuilder, a, b, spec| builder.link_both(Place::Device(a), Place::Device(b), spec);
    let builder = HostBackend::builder().devices(4, &HostDeviceConfig::default());
    let builder = pair(pair(pair(builder, 0, 1, slow), 0, 3, fast), 1, 2, fast);
    let (coordinator, ids) = coordinator(&builder.build().unwrap(), limit(1));
    let on = |device: DeviceId| {
        let choose = move |offered: &[warpweft_coordinator::Candidate]| {
            offered.iter().position(|candidate| candidate.device == device)
        };
        coordinator.place(&by(Strategy::Custom(CustomStrategy::new(choose)))).unwrap().0
    };
    let peer = on(ids[0]);
    let near = PlacementRequest { peers: vec![peer], ..by(Strategy::NearPeers) };
    // Straight over the fast link, then the slow one, then through two devices.
    assert_eq!(ordinals(&coordinator, &near, 3), [3, 1, 2]);
    coordinator.release(peer).unwrap();
    let gone = PlacementRequest { peers: vec![peer], ..plain() };
    assert_eq!(coordinator.place(&gone).unwrap_err(), CoordinatorError::UnknownKernel { kernel: peer });
}

#[test]
fn full_devices_are_never_chosen() {
    let (coordinator, _) = host(2, limit(3));
    let kernels: Vec<_> = (0..6).map(|_| coordinator.place(&plain()).unwrap()).collect();
    assert_eq!(coordinator.place(&plain()).unwrap_err(), CoordinatorError::Full { devices: 2 });
    coordinator.release(kernels[3].0).unwrap();
    assert_eq!(coordinator.place(&plain()).unwrap().1, kernels[3].1);
    let stats = coordinator.stats();
    assert_eq!((stats.placed, stats.released, stats.refused, stats.kernels), (7, 1, 1, 6));
}

#[test]
fn devices_out_of_service_are_never_chosen() {
    let (coordinator, ids) = host(4, limit(100));
    coordinator.drain(ids[0]).unwrap();
    coordinator.quarantine(ids[1], "wrong sums").unwrap();
    coordinator.unregister(ids[2]).unwrap();
    assert_eq!(ordinals(&coordinator, &plain(), 3), [3, 3, 3]);
    assert_eq!(
        coordinator.status(ids[1]).unwrap(),
        DeviceStatus::Quarantined { reason: "wrong sums".to_owned() }
    );
    let unknown = CoordinatorError::UnknownDevice { device: ids[2] };
    assert_eq!(coordinator.status(ids[2]).unwrap_err(), unknown);
    assert_eq!(coordinator.drain(ids[2]).unwrap_err(), unknown);
    coordinator.drain(ids[3]).unwrap();
    assert!(matches!(coordinator.place(&plain()), Err(CoordinatorError::NoDeviceFits { .. })));
    coordinator.return_to_service(ids[1]).unwrap();
    assert_eq!(ordinals(&coordinator, &plain(), 1), [1]);
}

#[test]
fn a_device_is_registered_once_and_removed_empty() {
    let backend = HostBackend::with_devices(1).unwrap();
    let (coordinator, ids) = coordinator(&backend, CoordinatorConfig::default());
    let again = coordinator.register(backend.open(0, Features::empty()).unwrap());
    assert_eq!(again.unwrap_err(), CoordinatorError::AlreadyRegistered { device: ids[0] });
    let (kernel, _) = coordinator.place(&plain()).unwrap();
    let in_use = CoordinatorError::InUse { device: ids[0], kernels: 1 };
    assert_eq!(coordinator.unregister(ids[0]).unwrap_err(), in_use);
    coordinator.release(kernel).unwrap();
    assert_eq!(coordinator.unregister(ids[0]).unwrap(), []);
    coordinator.register(backend.open(0, Features::empty()).unwrap()).unwrap();
}

#[test]
fn a_lost_device_is_noticed_at_the_placement_and_its_kernels_are_named() {
    // Each device dies at its second step; allocating is a step, placing is none.
    let config = FaultConfig { dies_at_step: Some(1), ..Default::default() };
    let backend = FaultyBackend::new(Arc::new(HostBackend::with_devices(2).unwrap()), config);
    let (coordinator, ids) = coordinator(&backend, CoordinatorConfig::default());
    let (kernel, device) = coordinator.place(&by(Strategy::FirstAvailable)).unwrap();
    assert_eq!(device, ids[0]);
    let first = backend.open(0, Features::empty()).unwrap();
    first.allocate(&BufferDesc::device(1)).unwrap();
    first.allocate(&BufferDesc::device(1)).unwrap_err();
    // Nobody told the coordinator, and still it does not choose the device.
    assert_eq!(coordinator.place(&by(Strategy::FirstAvailable)).unwrap().1, ids[1]);
    assert!(matches!(coordinator.status(ids[0]).unwrap(), DeviceStatus::Lost { .. }));
    assert!(matches!(coordinator.return_to_service(ids[0]), Err(CoordinatorError::WrongStatus { .. })));
    assert_eq!(coordinator.check_health(), [], "it is known already");
    assert_eq!(coordinator.kernels_on(ids[0]), [kernel]);
    assert_eq!(coordinator.unregister(ids[0]).unwrap(), [kernel]);
    assert_eq!(coordinator.device_of(kernel).unwrap_err(), CoordinatorError::UnknownKernel { kernel });
    assert!(matches!(coordinator.register(first), Err(CoordinatorError::WrongStatus { .. })));
}

#[test]
fn check_health_names_what_is_newly_lost() {
    let config = FaultConfig { dies_at_step: Some(0), ..Default::default() };
    let backend = FaultyBackend::new(Arc::new(HostBackend::with_devices(2).unwrap()), config);
    let (coordinator, ids) = coordinator(&backend, CoordinatorConfig::default());
    assert_eq!(coordinator.check_health(), []);
    backend.open(1, Features::empty()).unwrap().allocate(&BufferDesc::device(1)).unwrap_err();
    assert_eq!(coordinator.check_health(), [ids[1]]);
    assert_eq!(coordinator.check_health(), []);
}

/// Case K12.
#[test]
fn six_kernels_spread_over_two_free_devices() {
    let (coordinator, ids) = host(3, limit(10));
    coordinator.drain(ids[1]).unwrap();
    coordinator.drain(ids[2]).unwrap();
    let kernels: Vec<KernelId> = (0..6).map(|_| coordinator.place(&plain()).unwrap().0).collect();
    coordinator.return_to_service(ids[1]).unwrap();
    coordinator.return_to_service(ids[2]).unwrap();
    let plan = coordinator.evacuate(ids[0]).unwrap();
    assert!(plan.stranded.is_empty());
    let count = |device| plan.moves.iter().filter(|planned| planned.to == device).count();
    assert_eq!((count(ids[1]), count(ids[2])), (3, 3));
    assert_eq!(coordinator.device_of(kernels[0]).unwrap(), ids[0], "a plan moves nothing");
    for planned in &plan.moves {
        let id = coordinator.begin_move(planned.kernel, planned.to).unwrap();
        assert_eq!(coordinator.device_of(planned.kernel).unwrap(), ids[0], "nor does a move that has begun");
        coordinator.complete_move(id).unwrap();
        assert_eq!(coordinator.device_of(planned.kernel).unwrap(), planned.to);
    }
    coordinator.unregister(ids[0]).unwrap();
    assert_eq!(coordinator.place(&plain()).map(|(_, device)| device == ids[0]), Ok(false));
}

#[test]
fn what_finds_no_room_is_stranded_and_the_urgent_go_first() {
    let (coordinator, ids) = host(2, limit(4));
    coordinator.drain(ids[1]).unwrap();
    let priorities = [MovePriority::Low, MovePriority::Critical, MovePriority::Normal, MovePriority::High];
    let kernels =
        priorities.map(|priority| coordinator.place(&PlacementRequest { priority, ..plain() }).unwrap().0);
    coordinator.return_to_service(ids[1]).unwrap();
    coordinator.drain(ids[0]).unwrap();
    let others: Vec<_> = (0..2).map(|_| coordinator.place(&plain()).unwrap()).collect();
    let plan = coordinator.evacuate(ids[0]).unwrap();
    let moving: Vec<KernelId> = plan.moves.iter().map(|planned| planned.kernel).collect();
    assert_eq!(moving, [kernels[1], kernels[3]], "critical, then high");
    let stranded: Vec<KernelId> = plan.stranded.iter().map(|stranded| stranded.kernel).collect();
    assert_eq!(stranded, [kernels[2], kernels[0]]);
    assert!(plan.stranded.iter().all(|stranded| stranded.reason == CoordinatorError::Full { devices: 1 }));
    // Planning held nothing back.
    coordinator.release(others[0].0).unwrap();
    assert_eq!(coordinator.evacuate(ids[0]).unwrap().moves.len(), 3);
}

#[test]
fn among_equals_the_cheaper_link_is_taken() {
    let spec = |gb_per_s| LinkSpec::new(LinkClass::NvLink).with_cost(gb_per_s, Duration::from_micros(1));
    let builder = HostBackend::builder()
        .devices(3, &HostDeviceConfig::default())
        .link_both(Place::Device(0), Place::Device(1), spec(10.0))
        .link_both(Place::Device(0), Place::Device(2), spec(100.0));
    let (coordinator, ids) = coordinator(&builder.build().unwrap(), limit(10));
    coordinator.place(&PlacementRequest { memory: Bytes::mib(100), ..by(Strategy::FirstAvailable) }).unwrap();
    let plan = coordinator.evacuate(ids[0]).unwrap();
    assert_eq!(plan.moves[0].to, ids[2]);
    // 100 MiB at 100 GB/s, and a little latency.
    let expected = plan.moves[0].expected.unwrap();
    assert!((Duration::from_micros(1048)..Duration::from_micros(1200)).contains(&expected), "{expected:?}");
}

/// Case K13.
#[test]
fn a_move_is_completed_once_and_strangers_are_refused() {
    let (coordinator, ids) = host(2, limit(10));
    let (kernel, from) = coordinator.place(&plain()).unwrap();
    let to = if from == ids[0] { ids[1] } else { ids[0] };
    assert_eq!(
        coordinator.begin_move(kernel, from).unwrap_err(),
        CoordinatorError::AlreadyThere { kernel, device: from }
    );
    let id = coordinator.begin_move(kernel, to).unwrap();
    assert_eq!(coordinator.begin_move(kernel, to).unwrap_err(), CoordinatorError::AlreadyMoving { kernel });
    coordinator.complete_move(id).unwrap();
    let before = coordinator.devices_report();
    assert_eq!(coordinator.complete_move(id).unwrap_err(), CoordinatorError::UnknownMove { id });
    assert_eq!(coordinator.cancel_move(id).unwrap_err(), CoordinatorError::UnknownMove { id });
    coordinator.release(kernel).unwrap();
    assert_eq!(coordinator.begin_move(kernel, from).unwrap_err(), CoordinatorError::UnknownKernel { kernel });
    assert_eq!(coordinator.release(kernel).unwrap_err(), CoordinatorError::UnknownKernel { kernel });
    assert_eq!(before[to.ordinal as usize].kernels, 1);
    assert!(coordinator.devices_report().iter().all(|report| report.silicon_kernels == 0));
}

#[test]
fn a_move_that_is_cancelled_or_overtaken_gives_its_place_back() {
    let (coordinator, ids) = host(2, limit(2));
    let (kernel, _) = coordinator.place(&by(Strategy::FirstAvailable)).unwrap();
    let id = coordinator.begin_move(kernel, ids[1]).unwrap();
    let in_use = CoordinatorError::InUse { device: ids[1], kernels: 1 };
    assert_eq!(coordinator.unregister(ids[1]).unwrap_err(), in_use);
    coordinator.cancel_move(id).unwrap();
    assert_eq!(coordinator.device_of(kernel).unwrap(), ids[0]);
    let id = coordinator.begin_move(kernel, ids[1]).unwrap();
    coordinator.release(kernel).unwrap();
    assert_eq!(coordinator.complete_move(id).unwrap_err(), CoordinatorError::UnknownMove { id });
    assert!(coordinator.devices_report().iter().all(|report| report.silicon_kernels == 0));
    let (kernel, _) = coordinator.place(&by(Strategy::FirstAvailable)).unwrap();
    coordinator.drain(ids[1]).unwrap();
    assert!(matches!(coordinator.begin_move(kernel, ids[1]), Err(CoordinatorError::WrongStatus { .. })));
}

#[test]
fn silicon_seen_by_two_backends_counts_once() {
    let uuid = DeviceUuid::from_bytes(*b"the same silicon");
    let same = HostDeviceConfig { uuid: Some(uuid), memory: Bytes::gib(1), ..HostDeviceConfig::default() };
    // Two backends; the second has another device first, so that the ids differ.
    let first = HostBackend::builder().devices(1, &same).build().unwrap();
    let second = HostBackend::builder().device(HostDeviceConfig::default()).device(same).build().unwrap();
    let coordinator = Coordinator::new(limit(3)).unwrap();
    coordinator.register(first.open(0, Features::empty()).unwrap()).unwrap();
    coordinator.register(second.open(1, Features::empty()).unwrap()).unwrap();
    let stats = coordinator.stats();
    assert_eq!((stats.silicon_in_service, stats.capacity_in_service), (1, Bytes::gib(1)));
    let big = PlacementRequest { memory: Bytes::mib(600), ..plain() };
    let (kernel, device) = coordinator.place(&big).unwrap();
    assert!(
        matches!(coordinator.place(&big), Err(CoordinatorError::OutOfMemory { .. })),
        "the memory is one"
    );
    let reports = coordinator.devices_report();
    assert_eq!([reports[0].silicon_kernels, reports[1].silicon_kernels], [1, 1]);
    // It can change its backend, for which nothing more is needed.
    let other = reports.iter().map(|report| report.device).find(|&id| id != device).unwrap();
    let id = coordinator.begin_move(kernel, other).unwrap();
    coordinator.complete_move(id).unwrap();
    assert_eq!(coordinator.devices_report()[0].silicon_kernels, 1);
    for _ in 0..2 {
        coordinator.place(&plain()).unwrap();
    }
    assert_eq!(coordinator.place(&plain()).unwrap_err(), CoordinatorError::Full { devices: 2 });
}

#[test]
fn a_custom_strategy_may_ask_the_coordinator_and_is_held_to_its_offer() {
    let (coordinator, ids) = host(2, limit(1));
    let coordinator = Arc::new(coordinator);
    let asked = Arc::clone(&coordinator);
    let choose = move |_: &[warpweft_coordinator::Candidate]| {
        asked.check_health();
        Some(asked.devices_report().len() - 1)
    };
    let strategy = Strategy::Custom(CustomStrategy::new(choose));
    assert_eq!(coordinator.place(&by(strategy.clone())).unwrap().1, ids[1]);
    assert_eq!(
        coordinator.place(&by(strategy)).unwrap_err(),
        CoordinatorError::BadChoice { chosen: 1, offered: 1 }
    );
    let none = by(Strategy::Custom(CustomStrategy::new(|_| None)));
    assert!(matches!(coordinator.place(&none), Err(CoordinatorError::NoDeviceFits { .. })));
    // Somebody else always takes the device first.
    let thief = Arc::clone(&coordinator);
    let robbed = by(Strategy::Custom(CustomStrategy::new(move |_| {
        let _taken = thief.place(&by(Strategy::FirstAvailable));
        Some(0)
    })));
    assert!(matches!(
        coordinator.place(&robbed),
        Err(CoordinatorError::Full { .. } | CoordinatorError::Contended { .. })
    ));
}

#[test]
fn bad_configurations_are_refused() {
    assert!(matches!(Coordinator::new(limit(0)), Err(CoordinatorError::InvalidConfig { .. })));
    let (coordinator, _) = host(1, CoordinatorConfig { limits: HashMap::new(), ..limit(1) });
    coordinator.place(&plain()).unwrap();
}

/// Case K17, and what holds whatever happens: no device above its limit, counts that add up.
#[test]
fn threads_that_do_everything_at_once_neither_deadlock_nor_lose_count() {
    // Longer by hand, see docs/testing.md.
    let seconds = std::env::var("WARPWEFT_SOAK_SECONDS").map_or(2, |seconds| seconds.parse().unwrap());
    soak(Duration::from_secs(seconds), 7);
}

fn soak(time: Duration, seed: u64) {
    let backend = HostBackend::with_devices(6).unwrap();
    let config = CoordinatorConfig { memory_max_age: Duration::ZERO, ..limit(8) };
    let (coordinator, ids) = coordinator(&backend, config);
    let (end, stop) = (Instant::now() + time, AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (coordinator, ids, stop, backend) = (&coordinator, &ids, &stop, &backend);
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed ^ (thread << 32));
                let mut mine: Vec<KernelId> = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let device = ids[rng.usize(..ids.len())];
                    match rng.u8(..10) {
                        0..=3 => mine.extend(coordinator.place(&plain()).ok().map(|(kernel, _)| kernel)),
                        4 | 5 if !mine.is_empty() => {
                            // Another thread may have removed the device the kernel was lost with.
                            let _released = coordinator.release(mine.swap_remove(rng.usize(..mine.len())));
                        }
                        6 => coordinator.refresh_memory(),
                        7 => {
                            let _drained = coordinator
                                .drain(device)
                                .and_then(|()| coordinator.return_to_service(device));
                        }
                        8 => {
                            let _removed = coordinator.unregister(device);
                            let _back = coordinator
                                .register(backend.open(device.ordinal, Features::empty()).unwrap());
                        }
                        _ => {
                            if let Some(&kernel) = mine.first()
                                && let Ok(id) = coordinator.begin_move(kernel, device)
                            {
                                let ended = if rng.bool() {
                                    coordinator.complete_move(id)
                                } else {
                                    coordinator.cancel_move(id)
                                };
                                assert_eq!(ended, Ok(kernel));
                            }
                        }
                    }
                }
                mine.into_iter().for_each(|kernel| drop(coordinator.release(kernel)));
            });
        }
        while Instant::now() < end {
            for report in coordinator.devices_report() {
                assert!(report.silicon_kernels <= report.limit, "{report:?}");
                assert!(report.kernels <= report.silicon_kernels, "{report:?}");
            }
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
    });
    let stats = coordinator.stats();
    assert_eq!((stats.kernels, stats.placed), (0, stats.released), "{stats:?}");
    assert_eq!(stats.moves_begun, stats.moves_completed + stats.moves_cancelled, "{stats:?}");
    assert!(
        coordinator
            .devices_report()
            .iter()
            .all(|report| report.silicon_kernels == 0 && report.promised.0 == 0)
    );
    assert!(stats.placed > 100, "{stats:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// However kernels come and go, load stays balanced as long as nothing is drained.
    #[test]
    fn least_loaded_keeps_devices_level(steps in prop::collection::vec(any::<bool>(), 1..200)) {
        let (coordinator, _) = host(5, limit(1000));
        let mut kernels = Vec::new();
        for grow in steps {
            if grow || kernels.is_empty() {
                let before: Vec<u32> = coordinator.devices_report().iter().map(|report| report.kernels).collect();
                let (kernel, device) = coordinator.place(&plain()).unwrap();
                let chosen = before[device.ordinal as usize];
                prop_assert_eq!(Some(chosen), before.iter().copied().min());
                prop_assert!(before[..device.ordinal as usize].iter().all(|&other| other > chosen), "ties go to the first");
                kernels.push(kernel);
            } else {
                coordinator.release(kernels.swap_remove(0)).unwrap();
            }
        }
    }
}
