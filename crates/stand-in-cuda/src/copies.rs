//! Copies and fills in streams.

use std::ffi::c_uint;

use crate::{
    context::{Here, current},
    exports::{Code, Outcome, Raw, exports},
    stream::Stream,
    task::{CopyRows, Fill, Task},
};

/// Puts work on memory in a stream, if the memory is there now.
fn enqueue(here: &Here, stream: Raw, task: impl FnOnce(&Stream) -> Task) -> Outcome {
    let _turn = here.enter();
    let stream = here.stream(stream)?;
    let task = task(&stream);
    task.check(here.machine)?;
    here.give(&stream, task)
}

/// A fill as the device of a stream does it.
#[derive(Debug, Clone, Copy)]
struct Rows {
    to: u64,
    pitch: usize,
    value: c_uint,
    element: usize,
    width: usize,
    height: usize,
}

impl Rows {
    fn enqueue(self, stream: Raw) -> Outcome {
        let here = current()?;
        let Self { to, pitch, value, element, width, height } = self;
        enqueue(&here, stream, |stream| {
            Task::Fill(Fill {
                device: stream.context.device,
                to,
                pitch,
                value,
                element,
                width,
                height,
                kind: None,
            })
        })
    }
}

exports! {
    fn cuMemcpyAsync(val dst: u64, val src: u64, val size: usize, val stream: Raw) {
        let here = current()?;
        enqueue(&here, stream, |stream| Task::Copy(CopyRows::flat(stream.context.device, dst, src, size)))
    }

    fn cuMemsetD8Async(val dst: u64, val value: u8, val count: usize, val stream: Raw) {
        Rows { to: dst, pitch: 0, value: value.into(), element: 1, width: count, height: 1 }.enqueue(stream)
    }

    fn cuMemsetD32Async(val dst: u64, val value: c_uint, val count: usize, val stream: Raw) {
        current()?;
        if !dst.is_multiple_of(4) {
            return Err(Code::INVALID_VALUE);
        }
        Rows { to: dst, pitch: 0, value, element: 4, width: count, height: 1 }.enqueue(stream)
    }

    fn cuMemsetD2D8Async(
        val dst: u64, val pitch: usize, val value: u8, val width: usize, val height: usize, val stream: Raw
    ) {
        current()?;
        if width > pitch || height == 0 {
            return Err(Code::INVALID_VALUE);
        }
        Rows { to: dst, pitch, value: value.into(), element: 1, width, height }.enqueue(stream)
    }
}
