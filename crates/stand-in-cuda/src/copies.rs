//! Copies and fills in streams.

use std::ffi::c_uint;

use crate::{
    context::{Here, current},
    exports::{Code, Outcome, Raw, exports},
    task::{Fill, Task},
};

fn enqueue(here: &Here, stream: Raw, task: Task) -> Outcome {
    let _turn = here.enter();
    let stream = here.stream(stream)?;
    task.check(here.machine)?;
    stream.push_task(task)
}

exports! {
    fn cuMemcpyAsync(val dst: u64, val src: u64, val size: usize, val stream: Raw) {
        enqueue(&current()?, stream, Task::Copy { to: dst, from: src, len: size })
    }

    fn cuMemsetD8Async(val dst: u64, val value: u8, val count: usize, val stream: Raw) {
        enqueue(&current()?, stream, Task::Fill(Fill::row(dst, value.into(), 1, count)))
    }

    fn cuMemsetD32Async(val dst: u64, val value: c_uint, val count: usize, val stream: Raw) {
        enqueue(&current()?, stream, Task::Fill(Fill::row(dst, value, 4, count)))
    }

    fn cuMemsetD2D8Async(
        val dst: u64, val pitch: usize, val value: u8, val width: usize, val height: usize, val stream: Raw
    ) {
        if width > pitch {
            return Err(Code::INVALID_VALUE);
        }
        let fill = Fill { to: dst, pitch, value: value.into(), element: 1, width, height };
        enqueue(&current()?, stream, Task::Fill(fill))
    }
}
