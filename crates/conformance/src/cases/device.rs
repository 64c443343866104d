//! Opening devices and asking about them.

use std::sync::Arc;

use warpweft_core_types::{Features, OpenError};

use crate::{
    context::{Context, missing},
    harness::{Case, Verdict},
};

pub(super) const CASES: &[Case] = &[
    Case::new("device::reports_who_it_is", reports_who_it_is).covers(&[
        "Backend::name",
        "Backend::devices",
        "Backend::open",
        "Device::info",
    ]),
    Case::new("device::opened_again_is_the_same", opened_again_is_the_same).covers(&["Backend::open"]),
    Case::new("device::an_unknown_ordinal_is_named", an_unknown_ordinal_is_named),
    Case::new("device::a_missing_feature_is_named", a_missing_feature_is_named).covers(&["Device::features"]),
    Case::new("device::families_match_features", families_match_features).covers(&[
        "Device::peers",
        "Device::links",
        "Device::host_import",
        "Device::residents",
    ]),
    Case::new("device::limits_are_usable", limits_are_usable).covers(&["Device::limits"]),
    Case::new("device::is_not_lost", is_not_lost).covers(&["Device::failure"]),
];

fn reports_who_it_is(cx: &Context) -> Verdict {
    for (info, ordinal) in cx.infos.iter().zip(0..) {
        assert_eq!((info.id.backend, info.id.ordinal), (cx.backend().name(), ordinal));
        assert!(!info.name.is_empty() && info.memory.0 > 0 && info.multiprocessors > 0, "{info:?}");
        assert!(!info.code_formats.is_empty(), "a device runs some form of code");
    }
    let uuids: std::collections::HashSet<_> = cx.infos.iter().map(|info| info.id.uuid).collect();
    assert_eq!(uuids.len(), cx.infos.len(), "every device has an id of its own");
    assert_eq!(cx.device(0).info(), &cx.infos[0], "a device says the same before and after it is opened");
    Ok(())
}

fn opened_again_is_the_same(cx: &Context) -> Verdict {
    assert!(Arc::ptr_eq(cx.device(0), &cx.backend().open(0, Features::empty())?));
    Ok(())
}

fn an_unknown_ordinal_is_named(cx: &Context) -> Verdict {
    let count = u32::try_from(cx.infos.len())?;
    let error = cx.backend().open(count, Features::empty()).err().ok_or("it opened")?;
    let named = matches!(error, OpenError::UnknownDevice { backend, ordinal, device_count }
        if backend == cx.backend().name() && ordinal == count && device_count == count);
    assert!(named, "{error}");
    Ok(())
}

fn a_missing_feature_is_named(cx: &Context) -> Verdict {
    let lacking = missing(cx.device(0));
    match cx.backend().open(0, Features::all()) {
        Ok(_) => assert!(lacking.is_empty(), "it opened without {lacking}"),
        Err(OpenError::Unsupported { device, missing }) => {
            assert_eq!((device, missing), (cx.infos[0].id, lacking));
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

fn families_match_features(cx: &Context) -> Verdict {
    for device in cx.devices() {
        let features = device.features();
        assert_eq!(device.peers().is_some(), features.contains(Features::PEER_ACCESS));
        assert_eq!(device.links().is_some(), features.contains(Features::LINK_FACTS));
        assert_eq!(device.host_import().is_some(), features.contains(Features::HOST_IMPORT));
        assert_eq!(device.residents().is_some(), features.contains(Features::RESIDENT_KERNELS));
    }
    Ok(())
}

fn limits_are_usable(cx: &Context) -> Verdict {
    let limits = cx.device(0).limits();
    assert!(limits.workgroup_threads >= 1 && limits.workgroups.iter().all(|&most| most >= 1), "{limits:?}");
    assert!(limits.scalar_bytes >= 16 && limits.buffer_alignment.is_power_of_two(), "{limits:?}");
    Ok(())
}

fn is_not_lost(cx: &Context) -> Verdict {
    assert!(cx.device(0).failure().is_none());
    Ok(())
}
