//! Launches: a grid of blocks of a kernel, in a stream.

use std::{
    collections::VecDeque,
    ffi::{c_uint, c_void},
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::{
    context::{Context, current},
    exports::{Code, In, Outcome, Raw, exports},
    kernels::{Block, Step, Turn},
    machine::{Machine, running},
    module::Function,
    task::Task,
};

/// Blocks that take turns; the others come when one of them has ended.
const AT_ONCE: usize = 512;

/// A kernel that goes on for longer leaves the core to others now and then.
const BRISK: Duration = Duration::from_millis(1);
const BREATH: Duration = Duration::from_micros(20);

/// Gives the blocks turns until all have ended.
pub(crate) fn run(
    machine: &'static Machine,
    context: &Arc<Context>,
    function: &Function,
    grid: [c_uint; 3],
    arguments: &[Vec<u8>],
) -> Outcome {
    let blocks: u64 = grid.iter().map(|&n| u64::from(n)).product();
    let mut coming = 0..blocks;
    let mut active: VecDeque<(u64, Turn)> = VecDeque::new();
    let began = Instant::now();
    let memory = machine.space.seen_from(context.device);
    loop {
        let room = AT_ONCE - active.len();
        active.extend(coming.by_ref().take(room).map(|index| (index, Turn::default())));
        if active.is_empty() || context.is_dead() || machine.fault().is_some() {
            return Ok(());
        }
        for _ in 0..active.len() {
            let Some((index, mut turn)) = active.pop_front() else { break };
            let mut block = Block { memory, arguments, blocks, index, turn: &mut turn };
            if let Step::Again = (function.kernel.step)(&mut block)? {
                active.push_back((index, turn));
            }
        }
        if !active.is_empty() {
            if began.elapsed() > BRISK { thread::sleep(BREATH) } else { thread::yield_now() }
        }
    }
}

/// How a kernel is to be launched.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
}

/// A kernel with its arguments, which are copied.
pub(crate) fn kernel(
    function: Raw,
    shape: Shape,
    parameters: &In<*mut c_void>,
    extra: bool,
) -> Result<Task, Code> {
    let function = running()?.functions.get(function)?;
    let fits = |sizes: &[c_uint], most: &[c_uint]| {
        sizes.iter().zip(most).all(|(size, most)| (1..=*most).contains(size))
    };
    let threads: u64 = shape.block.iter().map(|&n| u64::from(n)).product();
    let sound = fits(&shape.grid, &[i32::MAX as u32, 65_535, 65_535])
        && fits(&shape.block, &[1024, 1024, 64])
        && threads <= 1024
        // Relaxed: set before the launch by whoever launches.
        && shape.shared_bytes <= function.most_shared.load(Ordering::Relaxed)
        && !extra;
    if !sound {
        return Err(Code::INVALID_VALUE);
    }
    let arguments = arguments_of(&function, parameters)?.into();
    Ok(Task::Kernel { function, grid: shape.grid, arguments })
}

#[expect(unsafe_code, reason = "reads the caller's memory")]
fn arguments_of(function: &Function, parameters: &In<*mut c_void>) -> Result<Vec<Vec<u8>>, Code> {
    let read = |(index, param): (usize, &crate::ptx::Param)| {
        let argument = parameters.at(index)?.cast_const().cast::<u8>();
        // SAFETY: the caller of the launch vouches that each pointer is of as many bytes as the function
        // declares for that parameter.
        let bytes = unsafe { In::from(argument) };
        (0..param.size).map(|at| bytes.at(at)).collect()
    };
    function.entry.params.iter().enumerate().map(read).collect()
}

exports! {
    fn cuLaunchKernel(
        val function: Raw,
        val grid_x: c_uint, val grid_y: c_uint, val grid_z: c_uint,
        val block_x: c_uint, val block_y: c_uint, val block_z: c_uint,
        val shared_bytes: c_uint, val stream: Raw,
        input parameters: *mut c_void, input extra: *mut c_void
    ) {
        let here = current()?;
        let _turn = here.enter();
        let stream = here.stream(stream)?;
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
        let task = kernel(function, shape, &parameters, !extra.is_null())?;
        let Task::Kernel { function, .. } = &task else { return Err(Code::UNKNOWN) };
        if !Arc::ptr_eq(&function.module.context, &stream.context) {
            return Err(Code::INVALID_HANDLE);
        }
        stream.push_task(task)
    }
}
