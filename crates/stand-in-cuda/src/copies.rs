//! Copies and fills in streams.

use std::ffi::c_uint;

use crate::{
    context::{Here, current},
    exports::{Code, Outcome, Raw, exports},
    space::View,
    stream::Op,
};

/// Puts work on memory in a stream, if the memory is there now; it is looked at again when the work runs.
fn enqueue(
    here: &Here,
    stream: Raw,
    ranges: &[(u64, u64)],
    work: impl FnOnce(View<'_>) -> Outcome + Send + 'static,
) -> Outcome {
    let _turn = here.enter();
    let stream = here.stream(stream)?;
    if !ranges.iter().all(|&(address, len)| here.machine.space.holds(address, len)) {
        return Err(Code::INVALID_VALUE);
    }
    let (space, device) = (&here.machine.space, stream.context.device);
    stream.push(Op::Work(Box::new(move || work(space.seen_from(device)))));
    Ok(())
}

exports! {
    fn cuMemcpyAsync(val dst: u64, val src: u64, val size: usize, val stream: Raw) {
        let here = current()?;
        enqueue(&here, stream, &[(dst, size as u64), (src, size as u64)], move |memory| {
            memory.copy(dst, src, size)
        })
    }

    fn cuMemsetD8Async(val dst: u64, val value: u8, val count: usize, val stream: Raw) {
        let here = current()?;
        enqueue(&here, stream, &[(dst, count as u64)], move |memory| memory.set(dst, count, value))
    }

    fn cuMemsetD32Async(val dst: u64, val value: c_uint, val count: usize, val stream: Raw) {
        let here = current()?;
        if !dst.is_multiple_of(4) {
            return Err(Code::INVALID_VALUE);
        }
        enqueue(&here, stream, &[(dst, count as u64 * 4)], move |memory| {
            (0..count as u64).try_for_each(|index| memory.write(dst + index * 4, value))
        })
    }

    fn cuMemsetD2D8Async(
        val dst: u64, val pitch: usize, val value: u8, val width: usize, val height: usize, val stream: Raw
    ) {
        let here = current()?;
        let rows = height.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
        if width > pitch {
            return Err(Code::INVALID_VALUE);
        }
        enqueue(&here, stream, &[(dst, (rows * pitch + width) as u64)], move |memory| {
            (0..height).try_for_each(|row| memory.set(dst + (row * pitch) as u64, width, value))
        })
    }
}
