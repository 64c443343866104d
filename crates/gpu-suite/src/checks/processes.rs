//! Other processes: memory of both, devices that one does not see, surroundings.

use std::{collections::BTreeMap, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use warpweft_core_types::{Backend as _, BufferView, FillRegion, Op};

use crate::{
    process::{output_within, this_program, words},
    rig::Rig,
};

/// A process starts a driver and opens every device.
const LIMIT: Duration = Duration::from_secs(60);

/// The other process checks what is there and writes something else.
pub(super) fn shared(rig: &Rig) -> Result<()> {
    let bench = rig.first();
    let family = bench.device.sharing().context("sharing")?;
    let shared = BufferView::whole(family.allocate_shareable(1 << 20)?);
    bench.run(&[Op::Fill(FillRegion::bytes(&shared, 0x11))])?;
    let exported = family.export(shared.buffer().as_ref())?;
    let mut child = this_program(&["child", "share", &exported.size.to_string()]);
    child.stdin(Stdio::from(exported.descriptor));
    let output = output_within(&mut child, LIMIT)?;
    ensure!(output.status.success(), "the other process: {}", words(&output));
    ensure!(bench.read(&shared)?.iter().all(|&byte| byte == 0x22), "it wrote something else");
    Ok(())
}

/// Case T1: by position, reversed, by UUID, and none at all.
pub(super) fn masked(rig: &Rig) -> Result<()> {
    let infos = rig.backend.devices()?;
    let uuids: Vec<String> = infos.iter().map(|info| info.id.uuid.to_string()).collect();
    let unmasked = seen_by_a_process(None)?;
    ensure!(keys(&unmasked) == uuids, "{unmasked:?}");
    let reversed: Vec<String> = (0..infos.len()).rev().map(|position| position.to_string()).collect();
    let by_uuid: Vec<String> = uuids.iter().rev().map(|uuid| format!("GPU-{uuid}")).collect();
    let turned: Vec<String> = uuids.iter().rev().cloned().collect();
    for (mask, expected) in [
        (reversed.join(","), turned.clone()),
        (by_uuid.join(","), turned),
        ("0".to_owned(), uuids[..1].to_vec()),
    ] {
        let seen = seen_by_a_process(Some(&mask))?;
        ensure!(keys(&seen) == expected, "{mask:?} shows {seen:?}");
        let places: BTreeMap<_, _> = unmasked.iter().cloned().collect();
        ensure!(seen.iter().all(|(uuid, facts)| subset(facts, &places[uuid])), "{mask:?} changes {seen:?}");
    }
    for mask in ["", "-1"] {
        let output =
            output_within(this_program(&["child", "devices"]).env("CUDA_VISIBLE_DEVICES", mask), LIMIT)?;
        let text = words(&output);
        ensure!(!output.status.success() && text.contains("CUDA_VISIBLE_DEVICES"), "{mask:?}: {text}");
    }
    Ok(())
}

/// UUID and facts of each device, in the order in which a process with this mask sees them.
fn seen_by_a_process(mask: Option<&str>) -> Result<Vec<(String, Value)>> {
    let mut child = this_program(&["child", "devices"]);
    child.envs(mask.map(|mask| ("CUDA_VISIBLE_DEVICES", mask)));
    let output = output_within(&mut child, LIMIT)?;
    ensure!(output.status.success(), "{mask:?}: {}", words(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn keys(seen: &[(String, Value)]) -> Vec<String> {
    seen.iter().map(|(uuid, _)| uuid.clone()).collect()
}

/// Whether what is known of a device among some is known of it among all.
fn subset(some: &Value, all: &Value) -> bool {
    let links = |facts: &Value| facts["links"].as_array().cloned().unwrap_or_default();
    some["pci"] == all["pci"] && links(some).iter().all(|link| links(all).contains(link))
}

pub(super) fn hostile_surroundings(_rig: &Rig) -> Result<()> {
    for (name, value) in [("CUDA_LAUNCH_BLOCKING", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")] {
        let output = output_within(this_program(&["child", "resident"]).env(name, value), LIMIT)?;
        let text = words(&output);
        ensure!(!output.status.success() && text.contains(name), "{name}: {text}");
    }
    let output = output_within(&mut this_program(&["child", "resident"]), LIMIT)?;
    ensure!(output.status.success(), "{}", words(&output));
    Ok(())
}
