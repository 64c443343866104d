//! Copies and fills by a queue.

use warpweft_core_types::{
    Backend, BufferDesc, BufferView, CopyRegion, DeviceInfo, Features, FillRegion, Op, RangeError,
    SubmitError,
};
use warpweft_host::HostBackend;

use crate::{
    context::{Context, allocate, pattern},
    harness::{Case, Verdict},
};

pub(super) const CASES: &[Case] = &[
    Case::new("copy::within_a_device", within_a_device)
        .needs(Features::HOST_VISIBLE_MEMORY)
        .covers(&["Queue::submit"]),
    Case::new("copy::between_peers", between_peers)
        .needs(Features::HOST_VISIBLE_MEMORY.union(Features::PEER_ACCESS))
        .devices(2)
        .covers(&["Peers::access"]),
    Case::new("copy::without_a_link_is_refused", without_a_link_is_refused)
        .devices(2)
        .when(some_device_is_out_of_reach),
    Case::new("copy::bad_ranges_are_refused", bad_ranges_are_refused),
    Case::new("copy::fills_repeat_their_pattern", fills_repeat_their_pattern)
        .needs(Features::HOST_VISIBLE_MEMORY),
    Case::new("copy::foreign_buffers_are_refused", foreign_buffers_are_refused),
];

fn within_a_device(cx: &Context) -> Verdict {
    for size in [1, 2, 3, 255, 4096, 65_537, 5 << 20] {
        let bytes = pattern(size, 3);
        let source = cx.upload(0, &bytes)?;
        let target = cx.memory(0, size as u64 + 2)?;
        let inner = target.slice(1..size as u64 + 1)?;
        cx.lane(0)?.run(&[Op::Copy(CopyRegion::new(&source, &inner)?)])?;
        let got = cx.download(0, &target)?;
        assert!(got[1..=size] == bytes, "{size} bytes arrive");
        assert_eq!((got[0], got[size + 1]), (0, 0), "their neighbours stay");
    }
    Ok(())
}

/// By the queue of either side, as the devices say they can.
fn between_peers(cx: &Context) -> Verdict {
    for (own, other) in [(0, 1), (1, 0)] {
        let access = cx.device(own).peers().ok_or("the family is absent")?.access(cx.infos[other].id);
        let bytes = pattern(100_001, u8::try_from(own)? + 1);
        if access.write {
            let (source, target) = (cx.upload(own, &bytes)?, cx.memory(other, bytes.len() as u64)?);
            cx.lane(own)?.run(&[Op::Copy(CopyRegion::new(&source, &target)?)])?;
            assert!(cx.download(other, &target)? == bytes, "{own} writes to {other}");
        }
        if access.read {
            let (source, target) = (cx.upload(other, &bytes)?, cx.memory(own, bytes.len() as u64)?);
            cx.lane(own)?.run(&[Op::Copy(CopyRegion::new(&source, &target)?)])?;
            assert!(cx.download(own, &target)? == bytes, "{own} reads from {other}");
        }
    }
    Ok(())
}

/// Where in the run devices of the same backend are whose memory device 0 cannot write.
fn out_of_reach(cx: &Context) -> impl Iterator<Item = usize> {
    let writes = |info: &DeviceInfo| cx.device(0).peers().is_some_and(|family| family.access(info.id).write);
    (1..cx.infos.len()).filter(move |&other| cx.share_backend(0, other) && !writes(&cx.infos[other]))
}

fn some_device_is_out_of_reach(cx: &Context) -> Result<(), &'static str> {
    out_of_reach(cx).next().map(|_| ()).ok_or("device 0 reaches every other")
}

fn without_a_link_is_refused(cx: &Context) -> Verdict {
    for other in out_of_reach(cx) {
        let far = cx.open_device(other, Features::empty())?;
        let far = BufferView::whole(allocate(&far, BufferDesc::device(16))?);
        let near = cx.memory(0, 16)?;
        let copy = [Op::Copy(CopyRegion::new(&near, &far)?)];
        let error = cx.lane(0)?.submit(&[], &copy).err().ok_or("it was taken")?;
        let named = matches!(error, SubmitError::NoLink { from, to }
            if from == cx.infos[0].id && to == cx.infos[other].id);
        assert!(named, "{error}");
    }
    Ok(())
}

fn bad_ranges_are_refused(cx: &Context) -> Verdict {
    let memory = cx.memory(0, 100)?;
    let out_of_bounds = |range| matches!(memory.slice(range), Err(RangeError::OutOfBounds { .. }));
    assert!(out_of_bounds(0..101) && out_of_bounds(101..101) && out_of_bounds(0..u64::MAX));
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = 5..3;
    assert!(out_of_bounds(reversed));
    assert_eq!(memory.slice(7..7).err(), Some(RangeError::ZeroSize));
    let (low, high) = (memory.slice(0..60)?, memory.slice(40..100)?);
    assert_eq!(CopyRegion::new(&low, &high).err(), Some(RangeError::Overlap { bytes: 20 }));
    let short = memory.slice(0..10)?;
    assert!(matches!(CopyRegion::new(&short, &low), Err(RangeError::LengthMismatch { .. })));
    assert!(matches!(FillRegion::words(&memory.slice(0..6)?, 1), Err(RangeError::PatternMismatch { .. })));
    Ok(())
}

fn fills_repeat_their_pattern(cx: &Context) -> Verdict {
    let memory = cx.memory(0, 200_012)?;
    let (bytes, words) = (memory.slice(1..4002)?, memory.slice(4002..200_010)?);
    let ops = [Op::Fill(FillRegion::bytes(&bytes, 0xab)), Op::Fill(FillRegion::words(&words, 0x0403_0201)?)];
    cx.lane(0)?.run(&ops)?;
    let got = cx.download(0, &memory)?;
    assert!(got[1..4002].iter().all(|&byte| byte == 0xab));
    assert!(
        got[4002..200_010].chunks(4).all(|word| word == [1, 2, 3, 4]),
        "words start at the view's first byte"
    );
    assert_eq!((got[0], got[200_010]), (0, 0), "the neighbours stay");
    Ok(())
}

fn foreign_buffers_are_refused(cx: &Context) -> Verdict {
    let stranger = HostBackend::with_devices(1)?.open(0, Features::empty())?;
    let theirs = BufferView::whole(allocate(&stranger, BufferDesc::device(16))?);
    let ours = cx.memory(0, 16)?;
    for (src, dst) in [(&ours, &theirs), (&theirs, &ours)] {
        let copy = [Op::Copy(CopyRegion::new(src, dst)?)];
        let error = cx.lane(0)?.submit(&[], &copy).err().ok_or("it was taken")?;
        let named = matches!(error, SubmitError::Foreign { what: "buffer", owner, device }
            if owner == stranger.info().id && device == cx.infos[0].id);
        assert!(named, "{error}");
    }
    Ok(())
}
