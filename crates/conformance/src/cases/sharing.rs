//! Memory that is passed on by descriptor.

use libtest_mimic::Failed;
use warpweft_core_types::{
    AllocError, BufferView, DeviceUuid, Features, FillRegion, Op, SharedMemory, Sharing,
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
