//! Copies between host devices linked in every way that gives another kind of route.
#![expect(clippy::unwrap_used, reason = "a failed step fails the test")]
#![expect(clippy::cast_possible_truncation, reason = "sizes in tests are small")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use warpweft_core_types::{
    Backend, BufferDesc, BufferView, Bytes, Device, Failure, Features, LinkClass, LinkEnd, RangeError,
    SemaphorePoint, SubmitError, WaitError,
};
use warpweft_host::{HostBackend, HostBuilder, HostDeviceConfig, LinkSpec, Place};
use warpweft_transfer::{CopyOptions, RouteKind, Stop, Transfer, TransferConfig, TransferError};
use warpweft_wrappers::{FaultConfig, FaultyBackend};

const PATIENCE: Duration = Duration::from_secs(20);

/// Small chunks, so that small copies take the long way.
const CONFIG: TransferConfig =
    TransferConfig { chunk: Bytes::kib(4), slots: 2, direct_chunk: Bytes::kib(64), ahead: 4 };

struct Machine {
    devices: Vec<Arc<dyn Device>>,
    transfer: Transfer,
}

impl Machine {
    fn new(builder: HostBuilder) -> Self {
        let backend = builder.build().unwrap();
        let devices: Vec<_> = backend
            .devices()
            .unwrap()
            .iter()
            .map(|info| backend.open(info.id.ordinal, Features::empty()).unwrap())
            .collect();
        let transfer = Transfer::new(devices.clone(), CONFIG).unwrap();
        Self { devices, transfer }
    }

    fn buffer(&self, device: usize, size: usize) -> BufferView {
        let desc = BufferDesc::device(size as u64);
        BufferView::whole(self.devices[device].allocate(&desc).unwrap())
    }

    /// A buffer with known contents; the way in and out is by host-visible memory of the same device.
    fn filled(&self, device: usize, bytes: &[u8]) -> BufferView {
        let view = self.buffer(device, bytes.len());
        self.transfer.write(bytes, &view, PATIENCE).unwrap();
        view
    }

    fn contents(&self, view: &BufferView) -> Vec<u8> {
        let mut bytes = vec![0; view.size() as usize];
        self.transfer.read(view, &mut bytes, PATIENCE).unwrap();
        bytes
    }

    fn id(&self, device: usize) -> warpweft_core_types::DeviceId {
        self.devices[device].info().id
    }

    fn bytes_on_link(&self, from: usize, to: usize) -> u64 {
        let uuid = |device: usize| LinkEnd::Device(self.id(device).uuid);
        let traffic = self.devices[from].links().unwrap().traffic();
        traffic
            .iter()
            .find(|link| link.from == uuid(from) && link.to == uuid(to))
            .map_or(0, |link| link.bytes)
    }

    /// Copies a pattern from the first to the last device, checks it, and returns the kind of route.
    fn round(&self, size: usize) -> RouteKind {
        let last = self.devices.len() - 1;
        let pattern: Vec<u8> = (0..size).map(|i| (i * 7 + i / 251) as u8).collect();
        let (src, dst) = (self.filled(0, &pattern), self.buffer(last, size));
        let copy = self.transfer.copy(&src, &dst).unwrap();
        copy.wait(PATIENCE).unwrap();
        assert_eq!(copy.progress().done, Bytes(size as u64));
        assert!(self.contents(&dst) == pattern, "wrong bytes after a {} copy of {size}", copy.route().kind);
        copy.route().kind
    }
}

fn machine_of(kind: RouteKind) -> Machine {
    let plain = HostDeviceConfig::default();
    let no_import = HostDeviceConfig { host_import: false, ..plain.clone() };
    let to_host = LinkSpec::new(LinkClass::Pcie);
    let builder = HostBackend::builder();
    Machine::new(match kind {
        RouteKind::Local => builder.devices(1, &plain).link_all_to_host(to_host),
        RouteKind::Direct => {
            builder.devices(2, &plain).link_all_devices(LinkSpec::default()).link_all_to_host(to_host)
        }
        RouteKind::Shared => builder.devices(2, &plain).link_all_to_host(to_host),
        RouteKind::Staged => builder.devices(2, &no_import).link_all_to_host(to_host),
        RouteKind::Relayed => chain(4).link_all_to_host(slow()),
    })
}

fn chain(devices: u32) -> HostBuilder {
    let fast = LinkSpec::new(LinkClass::NvLink).with_cost(100.0, Duration::from_micros(1));
    HostBackend::builder().devices(devices, &HostDeviceConfig::default()).link_chain(fast)
}

fn slow() -> LinkSpec {
    LinkSpec::new(LinkClass::Pcie).with_cost(0.1, Duration::from_millis(1))
}

const KINDS: [RouteKind; 5] =
    [RouteKind::Local, RouteKind::Direct, RouteKind::Shared, RouteKind::Staged, RouteKind::Relayed];

#[test]
fn every_kind_of_route_moves_every_size() {
    for kind in KINDS {
        let machine = machine_of(kind);
        // Below, at and above a chunk, the slots, what is handed over at once, and far beyond.
        for size in [1, 4095, 4096, 4097, 8192, 16384, 16385, 65536, 300_001] {
            assert_eq!(machine.round(size), kind);
        }
    }
}

#[test]
fn a_chain_of_links_relays_every_byte_over_every_link() {
    let machine = machine_of(RouteKind::Relayed);
    let route = machine.transfer.route(machine.id(0), machine.id(3)).unwrap();
    let expected: Vec<Stop> = (0..4).map(|device| Stop::Device(machine.id(device))).collect();
    assert_eq!(route.stops, expected);
    machine.round(100_000);
    for (from, to) in [(0, 1), (1, 2), (2, 3)] {
        assert_eq!(machine.bytes_on_link(from, to), 100_000, "{from} to {to}");
        assert_eq!(machine.bytes_on_link(to, from), 0, "{to} to {from}");
    }
}

#[test]
fn no_path_at_all_is_unreachable_by_name() {
    let machine = Machine::new(HostBackend::builder().devices(2, &HostDeviceConfig::default()));
    let error = machine.transfer.copy(&machine.buffer(0, 8), &machine.buffer(1, 8)).unwrap_err();
    assert!(
        matches!(&error, TransferError::Unreachable { from, to }
        if *from == machine.id(0) && *to == machine.id(1)),
        "{error}"
    );
}

#[test]
fn links_that_lead_one_way_are_used_one_way() {
    let builder = HostBackend::builder().devices(2, &HostDeviceConfig::default()).link(
        Place::Device(0),
        Place::Device(1),
        LinkSpec::default(),
    );
    let machine = Machine::new(builder);
    assert_eq!(machine.transfer.route(machine.id(0), machine.id(1)).unwrap().kind, RouteKind::Direct);
    assert!(machine.transfer.route(machine.id(1), machine.id(0)).is_err());
}

#[test]
fn foreign_and_repeated_devices_are_named() {
    let machine = machine_of(RouteKind::Direct);
    let other = machine_of(RouteKind::Direct);
    let error = machine.transfer.copy(&other.buffer(0, 8), &machine.buffer(0, 8)).unwrap_err();
    assert!(matches!(error, TransferError::UnknownDevice { device } if device == other.id(0)));
    let twice = [0, 1, 0].map(|device: usize| Arc::clone(&machine.devices[device]));
    assert!(matches!(Transfer::new(twice, CONFIG), Err(TransferError::DuplicateDevice { .. })));
}

#[test]
fn devices_of_two_backends_meet_in_host_memory() {
    let two = [HostBackend::with_devices(1).unwrap(), HostBackend::with_devices(1).unwrap()];
    let devices = two.map(|backend| backend.open(0, Features::empty()).unwrap());
    let transfer = Transfer::new(devices.clone(), CONFIG).unwrap();
    let machine = Machine { devices: devices.to_vec(), transfer };
    assert_eq!(machine.round(50_000), RouteKind::Shared);
}

#[test]
fn ranges_are_checked() {
    let machine = machine_of(RouteKind::Direct);
    let (a, b) = (machine.buffer(0, 8), machine.buffer(1, 9));
    assert!(matches!(machine.transfer.copy(&a, &b), Err(TransferError::Range(_))));
    assert!(matches!(machine.transfer.copy(&a, &a), Err(TransferError::Range(_))));
    assert!(matches!(machine.transfer.write(&[0; 7], &a, PATIENCE), Err(TransferError::Range(_))));
    let source_bytes = a.size();
    let read = machine.transfer.read(&a, &mut [0; 9], PATIENCE);
    let expected = RangeError::LengthMismatch { source_bytes, destination_bytes: 9 };
    assert!(matches!(read, Err(TransferError::Range(error)) if error == expected));
}

#[test]
fn both_directions_and_many_threads_at_once() {
    for kind in [RouteKind::Direct, RouteKind::Shared, RouteKind::Staged, RouteKind::Relayed] {
        let machine = machine_of(kind);
        let last = machine.devices.len() - 1;
        std::thread::scope(|scope| {
            for thread in 0..4_u8 {
                let machine = &machine;
                scope.spawn(move || {
                    let (from, to) = if thread % 2 == 0 { (0, last) } else { (last, 0) };
                    for round in 0..8_usize {
                        let size = 1 + round * 9_000;
                        let bytes = vec![thread * 16 + round as u8 + 1; size];
                        let (src, dst) = (machine.filled(from, &bytes), machine.buffer(to, size));
                        machine.transfer.copy(&src, &dst).unwrap().wait(PATIENCE).unwrap();
                        assert!(machine.contents(&dst) == bytes, "{kind}");
                    }
                });
            }
        });
    }
}

#[test]
fn copies_of_one_pair_run_in_order() {
    for kind in [RouteKind::Direct, RouteKind::Shared, RouteKind::Relayed] {
        let machine = machine_of(kind);
        let last = machine.devices.len() - 1;
        let dst = machine.buffer(last, 9_000);
        let sources: Vec<_> = (1..=20).map(|n| machine.filled(0, &[n; 9_000])).collect();
        let copies: Vec<_> = sources.iter().map(|src| machine.transfer.copy(src, &dst).unwrap()).collect();
        copies.last().unwrap().wait(PATIENCE).unwrap();
        assert!(machine.contents(&dst) == [20; 9_000], "{kind}");
    }
}

#[test]
fn a_short_copy_stays_behind_a_long_one() {
    for kind in
        [RouteKind::Local, RouteKind::Direct, RouteKind::Shared, RouteKind::Staged, RouteKind::Relayed]
    {
        let machine = machine_of(kind);
        let last = machine.devices.len() - 1;
        for _ in 0..10 {
            // Many more chunks than are handed over at once, then a single one into the same bytes.
            let (long, dst) = (machine.filled(0, &[1; 600_000]), machine.buffer(last, 600_000));
            let (short, end) = (machine.filled(0, &[2; 4096]), dst.slice(595_904..600_000).unwrap());
            let first = machine.transfer.copy(&long, &dst).unwrap();
            let second = machine.transfer.copy(&short, &end).unwrap();
            let third = machine.transfer.copy(&short, &dst.slice(0..4096).unwrap()).unwrap();
            [first, second, third].iter().for_each(|copy| copy.wait(PATIENCE).unwrap());
            let got = machine.contents(&dst);
            assert!(got[595_904..] == [2; 4096] && got[..4096] == [2; 4096], "{kind}: overtaken");
            assert!(got[4096..595_904].iter().all(|&byte| byte == 1), "{kind}");
        }
    }
}

#[test]
fn a_pair_of_devices_does_not_wait_for_a_third() {
    // Device 2 never ends what it is asked to do.
    let silent = FaultConfig { signal_is_lost: 1.0, ..Default::default() };
    let healthy = HostBackend::builder()
        .devices(2, &HostDeviceConfig::default())
        .link_all_to_host(LinkSpec::default())
        .build()
        .unwrap();
    let broken = HostBackend::builder()
        .devices(1, &HostDeviceConfig::default())
        .link_all_to_host(LinkSpec::default())
        .build()
        .unwrap();
    let broken = FaultyBackend::new(Arc::new(broken), silent);
    let mut devices: Vec<_> =
        (0..2).map(|ordinal| healthy.open(ordinal, Features::empty()).unwrap()).collect();
    devices.push(broken.open(0, Features::empty()).unwrap());
    let transfer = Transfer::new(devices.clone(), CONFIG).unwrap();
    let machine = Machine { devices, transfer };
    let src = machine.filled(0, &[3; 10_000]);
    let stuck = machine.transfer.copy(&src, &machine.buffer(2, 10_000)).unwrap();
    let dst = machine.buffer(1, 10_000);
    machine.transfer.copy(&src, &dst).unwrap().wait(PATIENCE).unwrap();
    assert!(machine.contents(&dst) == [3; 10_000]);
    assert!(matches!(stuck.poll(), Ok(false)));
}

#[test]
fn memory_that_can_be_imported_now_and_then_carries_every_copy() {
    // Each size has memory of its own on its way, and so a route with a hop more or less than the one before.
    let config = FaultConfig { import_fails: 0.4, ..Default::default() };
    let host = HostBackend::builder()
        .devices(2, &HostDeviceConfig::default())
        .link_all_to_host(LinkSpec::default())
        .build()
        .unwrap();
    let backend = FaultyBackend::new(Arc::new(host), config);
    let devices: Vec<_> = (0..2).map(|ordinal| backend.open(ordinal, Features::empty()).unwrap()).collect();
    let machine = Machine { transfer: Transfer::new(devices.clone(), CONFIG).unwrap(), devices };
    let kinds: Vec<_> = (1..40).map(|turn| machine.round(turn * 100)).collect();
    let came =
        |kind| kinds.array_windows().filter(|[before, after]| before != after && *after == kind).count();
    assert!(came(RouteKind::Shared) > 2 && came(RouteKind::Staged) > 2, "{kinds:?}");
}

#[test]
fn small_copies_take_little_memory_on_their_way() {
    let machine = machine_of(RouteKind::Relayed);
    let free = |device: usize| machine.devices[device].memory().unwrap().free.0;
    let before = free(1);
    machine.round(100);
    assert!(before - free(1) <= 128, "{} bytes for a copy of 100", before - free(1));
    machine.round(100_000);
    machine.round(100_000);
    let slots = CONFIG.chunk.0 * u64::from(CONFIG.slots);
    // The first copy's own memory may still be on its way back.
    assert!(before - free(1) <= slots + 128, "{} bytes are kept, {slots} are enough", before - free(1));
}

#[test]
fn dropping_a_transfer_ends_what_waits_for_others() {
    let machine = machine_of(RouteKind::Shared);
    let never = machine.devices[0].create_semaphore(0).unwrap();
    let after = vec![SemaphorePoint::new(&never, 1)];
    let options = CopyOptions { after, time_limit: None };
    let copy = machine.transfer.copy_with(&machine.buffer(0, 9), &machine.buffer(1, 9), options).unwrap();
    drop(machine);
    let error = copy.wait(PATIENCE).unwrap_err();
    assert!(
        matches!(&error, TransferError::Wait(WaitError::Failed(failure))
        if matches!(**failure, Failure::Cancelled)),
        "{error}"
    );
}

#[test]
fn a_copy_waits_for_what_it_was_told_to_wait_for() {
    let machine = machine_of(RouteKind::Shared);
    let gate = machine.devices[0].create_semaphore(0).unwrap();
    let (src, dst) = (machine.filled(0, &[5; 100]), machine.buffer(1, 100));
    let after = vec![SemaphorePoint::new(&gate, 1)];
    let copy = machine.transfer.copy_with(&src, &dst, CopyOptions { after, ..Default::default() }).unwrap();
    // A later copy of the same pair is not held up.
    machine.transfer.copy(&src, &machine.buffer(1, 100)).unwrap().wait(PATIENCE).unwrap();
    assert_eq!(copy.progress().done, Bytes(0));
    assert!(matches!(copy.wait(Duration::ZERO), Err(TransferError::Wait(WaitError::Timeout { .. }))));
    gate.signal(1).unwrap();
    copy.wait(PATIENCE).unwrap();
    assert_eq!(machine.contents(&dst), [5; 100]);
}

#[test]
fn a_time_limit_ends_a_copy_that_cannot_go_on() {
    let machine = machine_of(RouteKind::Shared);
    let never = machine.devices[0].create_semaphore(0).unwrap();
    let options = CopyOptions {
        after: vec![SemaphorePoint::new(&never, 1)],
        time_limit: Some(Duration::from_millis(20)),
    };
    let started = Instant::now();
    let copy = machine
        .transfer
        .copy_with(&machine.buffer(0, 100_000), &machine.buffer(1, 100_000), options)
        .unwrap();
    let error = copy.wait(PATIENCE).unwrap_err();
    assert!(
        matches!(&error, TransferError::Wait(WaitError::Failed(failure))
        if matches!(**failure, Failure::DeadlineExceeded { .. })),
        "{error}"
    );
    assert!(started.elapsed() < PATIENCE / 2);
    // The next copy of the pair works.
    machine.round(100_000);
}

#[test]
fn nothing_of_a_copy_arrives_after_it_has_failed() {
    // More chunks than are handed over at once, on any route.
    const LARGE: usize = 400_000;
    for kind in KINDS {
        for cancelled in [true, false] {
            let machine = machine_of(kind);
            let last = machine.devices.len() - 1;
            let gate = SemaphorePoint::new(&machine.devices[0].create_semaphore(0).unwrap(), 1);
            let (src, dst) = (machine.filled(0, &[7; LARGE]), machine.buffer(last, LARGE));
            let time_limit = (!cancelled).then_some(Duration::from_millis(5));
            let options = CopyOptions { after: vec![gate.clone()], time_limit };
            let copy = machine.transfer.copy_with(&src, &dst, options).unwrap();
            if cancelled {
                // What was handed over waits for the gate, and so does the end of the copy.
                assert!(copy.cancel());
                gate.semaphore.signal(1).unwrap();
            }
            let error = copy.wait(PATIENCE).unwrap_err();
            assert!(
                matches!(&error, TransferError::Wait(WaitError::Failed(failure))
                if matches!(**failure, Failure::Cancelled | Failure::DeadlineExceeded { .. })),
                "{kind}: {error}"
            );
            machine.transfer.write(&[1; LARGE], &dst, PATIENCE).unwrap();
            let _signalled_before = gate.semaphore.signal(1);
            machine.round(5000);
            assert!(machine.contents(&dst) == [1; LARGE], "{kind}: bytes arrived late");
        }
    }
}

#[test]
fn a_copy_that_does_not_fit_the_lanes_is_refused_whole() {
    let machine = machine_of(RouteKind::Direct);
    let gate = machine.devices[0].create_semaphore(0).unwrap();
    // The lane is busy until the gate opens; its own queue takes 1,024 chunks.
    let held = CopyOptions { after: vec![SemaphorePoint::new(&gate, 1)], time_limit: None };
    let (src, dst) = (machine.buffer(0, 64), machine.buffer(1, 64));
    machine.transfer.copy_with(&src, &dst, held).unwrap();
    let large = (machine.buffer(0, 4 << 16), machine.buffer(1, 4 << 16));
    let mut copies = Vec::new();
    let refused = loop {
        match machine.transfer.copy(&large.0, &large.1) {
            Ok(copy) => copies.push(copy),
            Err(error) => break error,
        }
        if copies.len() > 100_000 {
            // The device is as fast as this thread.
            return;
        }
    };
    assert!(matches!(refused, TransferError::Submit(SubmitError::QueueFull { .. })), "{refused}");
    for copy in copies {
        copy.wait(PATIENCE).unwrap();
    }
    machine.transfer.copy(&large.0, &large.1).unwrap().wait(PATIENCE).unwrap();
}

#[test]
fn dropping_everything_cancels_nothing() {
    let machine = machine_of(RouteKind::Relayed);
    let (src, dst) = (machine.filled(0, &[9; 200_000]), machine.buffer(3, 200_000));
    let done = machine.transfer.copy(&src, &dst).unwrap().done();
    drop(src);
    let Machine { devices, transfer } = machine;
    drop(transfer);
    done.wait(PATIENCE).unwrap();
    let transfer = Transfer::new(devices.clone(), CONFIG).unwrap();
    assert!(Machine { devices, transfer }.contents(&dst) == [9; 200_000]);
}

#[test]
fn out_of_memory_in_between_is_an_error_and_leaves_nothing_behind() {
    let tiny = HostDeviceConfig { memory: Bytes::kib(8), ..HostDeviceConfig::default() };
    let fast = LinkSpec::default();
    let builder = HostBackend::builder()
        .devices(1, &HostDeviceConfig::default())
        .device(HostDeviceConfig { memory: Bytes::kib(4), ..tiny })
        .devices(1, &HostDeviceConfig::default())
        .link_chain(fast);
    let machine = Machine::new(builder);
    let error = machine.transfer.copy(&machine.buffer(0, 8000), &machine.buffer(2, 8000)).err().unwrap();
    assert!(matches!(error, TransferError::Alloc(_)), "{error}");
    assert_eq!(machine.devices[1].memory().unwrap().free, Bytes::kib(4));
}

#[test]
fn bad_configurations_are_refused() {
    let refuse = |config| {
        let error = Transfer::new([], config).unwrap_err();
        assert!(matches!(error, TransferError::InvalidConfig { .. }), "{error}");
    };
    refuse(TransferConfig { chunk: Bytes(0), ..CONFIG });
    refuse(TransferConfig { direct_chunk: Bytes(0), ..CONFIG });
    refuse(TransferConfig { chunk: Bytes(u64::MAX), ..CONFIG });
    refuse(TransferConfig { slots: 0, ..CONFIG });
    refuse(TransferConfig { ahead: 1, ..CONFIG });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn views_anywhere_in_their_buffers(offsets in (0_u64..5000, 0_u64..5000), size in 1_u64..40_000, kind in 0_usize..5) {
        let machine = machine_of(KINDS[kind]);
        let last = machine.devices.len() - 1;
        let bytes: Vec<u8> = (0..size + offsets.0).map(|i| (i % 253) as u8).collect();
        let whole = machine.filled(0, &bytes);
        let into = machine.buffer(last, (size + offsets.1 + 1) as usize);
        let src = whole.slice(offsets.0..offsets.0 + size).unwrap();
        let dst = into.slice(offsets.1..offsets.1 + size).unwrap();
        machine.transfer.copy(&src, &dst).unwrap().wait(PATIENCE).unwrap();
        let got = machine.contents(&into);
        let (start, end) = (offsets.1 as usize, (offsets.1 + size) as usize);
        prop_assert!(got[..start].iter().all(|&byte| byte == 0), "bytes before were touched");
        prop_assert!(got[start..end] == bytes[offsets.0 as usize..], "wrong bytes");
        prop_assert!(got[end..].iter().all(|&byte| byte == 0), "bytes behind were touched");
    }
}
