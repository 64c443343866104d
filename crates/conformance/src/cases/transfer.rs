//! Copies through `transfer` over these devices.

use std::sync::Arc;

use warpweft_core_types::{Backend, BufferDesc, BufferView, Bytes, Device, Features};
use warpweft_host::HostBackend;
use warpweft_transfer::{RouteKind, Stop, Transfer, TransferConfig, TransferError};

use crate::{
    context::{Context, PATIENCE, allocate, pattern},
    harness::{Case, Verdict},
};

const CONFIG: TransferConfig =
    TransferConfig { chunk: Bytes::kib(64), slots: 3, direct_chunk: Bytes::mib(1), ahead: 8 };

pub(super) const CASES: &[Case] = &[
    Case::new("transfer::all_pairs_both_ways_at_once", all_pairs_both_ways_at_once)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .devices(2),
    Case::new("transfer::peers_need_no_host_memory", peers_need_no_host_memory)
        .needs(Features::PEER_ACCESS)
        .devices(2),
    Case::new("transfer::between_backends", between_backends).needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("transfer::unreachable_devices_are_named", unreachable_devices_are_named),
];

fn open_all(cx: &Context) -> Result<Vec<Arc<dyn Device>>, libtest_mimic::Failed> {
    Ok((0..cx.infos.len())
        .map(|position| cx.open_device(position, Features::empty()))
        .collect::<Result<_, _>>()?)
}

fn all_pairs_both_ways_at_once(cx: &Context) -> Verdict {
    let devices = open_all(cx)?;
    let transfer = Transfer::new(devices.clone(), CONFIG)?;
    let memory = |device: &Arc<dyn Device>, size| {
        Ok::<_, libtest_mimic::Failed>(BufferView::whole(allocate(device, BufferDesc::device(size))?))
    };
    for size in [1, 70_000, 1_500_000] {
        let mut copies = Vec::new();
        for (from, seed) in devices.iter().zip(0..) {
            let bytes = pattern(size, seed);
            let source = memory(from, size as u64)?;
            transfer.write(&bytes, &source, PATIENCE)?;
            for to in &devices {
                let target = memory(to, size as u64)?;
                copies.push((transfer.copy(&source, &target)?, target, seed));
            }
        }
        for (copy, target, seed) in copies {
            copy.wait(PATIENCE)?;
            let mut got = vec![0; size];
            transfer.read(&target, &mut got, PATIENCE)?;
            assert!(got == pattern(size, seed), "{} of {size} bytes", copy.route());
        }
    }
    Ok(())
}

/// Whether or not anybody knows what joins them.
fn peers_need_no_host_memory(cx: &Context) -> Verdict {
    let devices = open_all(cx)?;
    let transfer = Transfer::new(devices.clone(), CONFIG)?;
    for from in &devices {
        let own = from.info().id;
        for to in devices.iter().map(|to| to.info().id).filter(|&to| to != own) {
            let reaches = from.peers().is_some_and(|peers| peers.access(to).write);
            let route = transfer.route(own, to)?;
            assert!(!reaches || !route.stops.contains(&Stop::Host), "{route}");
        }
    }
    Ok(())
}

fn between_backends(cx: &Context) -> Verdict {
    let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let transfer = Transfer::new([Arc::clone(cx.device(0)), Arc::clone(&stranger)], CONFIG)?;
    let bytes = pattern(1_000_001, 77);
    let ours = cx.upload(0, &bytes)?;
    let theirs = BufferView::whole(allocate(&stranger, BufferDesc::device(ours.size()))?);
    let back = cx.memory(0, ours.size())?;
    let there = transfer.copy(&ours, &theirs)?;
    there.wait(PATIENCE)?;
    assert!(matches!(there.route().kind, RouteKind::Shared | RouteKind::Staged), "{}", there.route());
    transfer.copy(&theirs, &back)?.wait(PATIENCE)?;
    assert!(cx.download(0, &back)? == bytes);
    Ok(())
}

fn unreachable_devices_are_named(cx: &Context) -> Verdict {
    let island = HostBackend::builder().devices(1, &warpweft_host::HostDeviceConfig::default()).build()?;
    let island = island.open(0, Features::empty())?;
    let transfer = Transfer::new([Arc::clone(cx.device(0)), Arc::clone(&island)], CONFIG)?;
    let error = transfer.route(cx.infos[0].id, island.info().id).err().ok_or("there is a way")?;
    let named = matches!(error, TransferError::Unreachable { from, to }
        if from == cx.infos[0].id && to == island.info().id);
    assert!(named, "{error}");
    Ok(())
}
