//! Memory that is passed on by descriptor.

use std::sync::Arc;

use libtest_mimic::Failed;
use warpweft_core_types::{
    AllocError, Buffer, BufferView, DeviceUuid, Features, FillRegion, Op, SharedMemory, Sharing,
};

use crate::{
    context::{Context, pattern, refusal},
    harness::{Case, Verdict},
};

const NEEDS: Features = Features::SHARED_MEMORY.union(Features::HOST_VISIBLE_MEMORY);

pub(super) const CASES: &[Case] =
    &[
        Case::new("sharing::an_import_is_the_same_memory", an_import_is_the_same_memory).needs(NEEDS).covers(
            &["Device::sharing", "Sharing::allocate_shareable", "Sharing::export", "Sharing::import_shared"],
        ),
        Case::new("sharing::an_import_outlives_its_source", an_import_outlives_its_source).needs(NEEDS),
        Case::new("sharing::what_cannot_be_shared_is_refused", what_cannot_be_shared_is_refused).needs(NEEDS),
        Case::new("sharing::a_window_shows_the_parts_it_is_made_of", a_window_shows_its_parts)
            .needs(NEEDS)
            .devices(2)
            .covers(&["Sharing::import_window"]),
    ];

fn family(cx: &Context) -> Result<&dyn Sharing, Failed> {
    Ok(cx.device(0).sharing().ok_or("the family is absent")?)
}

fn an_import_is_the_same_memory(cx: &Context) -> Verdict {
    let family = family(cx)?;
    for size in [1_u64, 4096, 100_000, 5 << 20] {
        let own = family.allocate_shareable(size)?;
        assert_eq!((own.size(), own.device()), (size, cx.infos[0].id));
        let exported = family.export(own.as_ref())?;
        assert_eq!((exported.size, exported.device), (size, cx.infos[0].id.uuid));
        let (own, import) = (BufferView::whole(own), BufferView::whole(family.import_shared(exported)?));
        assert!(cx.download(0, &import)?.iter().all(|&byte| byte == 0), "{size} bytes start zeroed");
        cx.lane(0)?.run(&[Op::Fill(FillRegion::bytes(&own, 0x42))])?;
        assert!(cx.download(0, &import)?.iter().all(|&byte| byte == 0x42), "{size} bytes there");
        cx.lane(0)?.run(&[Op::Fill(FillRegion::bytes(&import, 0x24))])?;
        assert!(cx.download(0, &own)?.iter().all(|&byte| byte == 0x24), "{size} bytes back");
    }
    Ok(())
}

fn an_import_outlives_its_source(cx: &Context) -> Verdict {
    let family = family(cx)?;
    let own = BufferView::whole(family.allocate_shareable(1 << 20)?);
    cx.lane(0)?.run(&[Op::Fill(FillRegion::bytes(&own, 7))])?;
    let exported = family.export(own.buffer().as_ref())?;
    drop(own);
    let other = BufferView::whole(family.allocate_shareable(1 << 20)?);
    cx.lane(0)?.run(&[Op::Fill(FillRegion::bytes(&other, 8))])?;
    let import = BufferView::whole(family.import_shared(exported)?);
    assert!(cx.download(0, &import)?.iter().all(|&byte| byte == 7));
    Ok(())
}

/// Memory of every device that the first one reaches, its own behind them.
fn a_window_shows_its_parts(cx: &Context) -> Verdict {
    const PART: u64 = 4 << 20;
    let family = family(cx)?;
    let reached = |at: &usize| {
        let access = cx.device(0).peers().map(|peers| peers.access(cx.infos[*at].id));
        *at == 0 || access.is_some_and(|access| access.write && cx.device(*at).sharing().is_some())
    };
    let devices: Vec<usize> = (0..2).rev().filter(reached).collect();
    let allocate =
        |at: usize, size| Ok::<_, Failed>(cx.device(at).sharing().ok_or("absent")?.allocate_shareable(size)?);
    let export = |at: usize, part: &Arc<dyn Buffer>| {
        Ok::<_, Failed>(cx.device(at).sharing().ok_or("absent")?.export(part.as_ref())?)
    };
    let parts = devices.iter().map(|at| allocate(*at, PART)).collect::<Result<Vec<_>, _>>()?;
    let exported =
        devices.iter().zip(&parts).map(|(at, part)| export(*at, part)).collect::<Result<Vec<_>, _>>()?;
    let window = match family.import_window(exported) {
        // Said at once, whatever the parts are.
        Err(AllocError::CannotImport { .. }) if cx.infos[0].id.backend != "cuda" => return Ok(()),
        window => BufferView::whole(window?),
    };
    assert_eq!((window.size(), window.device()), (PART * devices.len() as u64, cx.infos[0].id));
    for (number, (at, part)) in (0..).zip(devices.iter().zip(&parts)) {
        let (own, shown) =
            (BufferView::whole(Arc::clone(part)), window.slice(number * PART..(number + 1) * PART)?);
        cx.lane(0)?.run(&[Op::Fill(FillRegion::bytes(&shown, 0x42))])?;
        assert!(cx.download(*at, &own)?.iter().all(|&byte| byte == 0x42), "part {number} there");
        cx.lane(*at)?.run(&[Op::Fill(FillRegion::bytes(&own, 0x24))])?;
        assert!(cx.download(0, &shown)?.iter().all(|&byte| byte == 0x24), "part {number} back");
    }
    let ragged = vec![export(0, &allocate(0, 4096)?)?, export(0, &allocate(0, PART)?)?];
    let error = refusal(family.import_window(ragged))?;
    assert!(matches!(error, AllocError::CannotImport { .. }), "{error}");
    Ok(())
}

fn what_cannot_be_shared_is_refused(cx: &Context) -> Verdict {
    let family = family(cx)?;
    assert!(matches!(refusal(family.allocate_shareable(0))?, AllocError::ZeroSize { .. }));
    let plain = cx.upload(0, &pattern(4096, 1))?;
    let error = refusal(family.export(plain.buffer().as_ref()))?;
    assert!(matches!(error, AllocError::CannotExport { .. }), "{error}");
    let exported = family.export(family.allocate_shareable(4096)?.as_ref())?;
    let elsewhere = SharedMemory { device: DeviceUuid::from_bytes([0xee; 16]), ..exported };
    let error = refusal(family.import_shared(elsewhere))?;
    assert!(matches!(error, AllocError::CannotImport { .. }), "{error}");
    let exported = family.export(family.allocate_shareable(4096)?.as_ref())?;
    let error = refusal(family.import_shared(SharedMemory { size: 1 << 40, ..exported }))?;
    assert!(matches!(error, AllocError::CannotImport { .. }), "{error}");
    let null = std::fs::File::open("/dev/null")?.into();
    let wrong = SharedMemory { device: cx.infos[0].id.uuid, size: 4096, descriptor: null };
    let error = refusal(family.import_shared(wrong))?;
    assert!(matches!(error, AllocError::CannotImport { .. }), "{error}");
    Ok(())
}
