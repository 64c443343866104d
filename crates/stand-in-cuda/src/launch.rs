//! Launches of kernels in streams, and what a launch may ask for.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::Arc,
};

use crate::{
    context::{Here, current},
    control::setting,
    exports::{Code, In, Raw, exports},
    machine::SHARED_BYTES_OF_MULTIPROCESSOR,
    module::Function,
    task::{Call, Task},
};

/// What a multiprocessor holds at once.
const THREADS: u32 = 2048;
const BLOCKS: u32 = 32;

/// Shared memory that the system takes of each block.
const RESERVED: u64 = 1024;

/// How a launch is asked for, by itself or as a node of a graph.
#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
}

impl Here {
    /// A call with arguments as they are now, if the device can do it.
    pub(crate) fn call(
        &self,
        function: Raw,
        shape: &Shape,
        parameters: &In<*mut c_void>,
    ) -> Result<Call, Code> {
        let function = self.machine.functions.get(function)?;
        let fits = |sizes: &[c_uint], most: &[c_uint]| {
            sizes.iter().zip(most).all(|(size, most)| (1..=*most).contains(size))
        };
        let threads = |sizes: &[c_uint]| sizes.iter().map(|&n| u64::from(n)).product::<u64>();
        // The product is made of sizes that fit, so that it fits too.
        let sound = fits(&shape.grid, &[i32::MAX as u32, 65_535, 65_535])
            && fits(&shape.block, &[1024, 1024, 64])
            && threads(&shape.block) <= 1024
            && shape.shared_bytes <= function.most_shared();
        if !sound {
            return Err(Code::INVALID_VALUE);
        }
        let arguments = arguments_of(&function, parameters)?;
        let context = Arc::clone(&function.module.context);
        Ok(Call { context, function, grid: shape.grid, block: shape.block, arguments })
    }
}

#[expect(unsafe_code, reason = "reads the caller's memory")]
fn arguments_of(function: &Function, parameters: &In<*mut c_void>) -> Result<Vec<Vec<u8>>, Code> {
    let read = |(index, param): (usize, &crate::ptx::Param)| {
        let argument = parameters.at(index)?.cast_const().cast::<u8>();
        // SAFETY: the caller vouches that each argument is as long as the code declares.
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
        let shape =
            Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z], shared_bytes };
        let call = here.call(function, &shape, &parameters)?;
        if !Arc::ptr_eq(&call.context, &stream.context) {
            return Err(Code::INVALID_HANDLE);
        }
        if !extra.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        here.give(&stream, Task::Kernel(call))?;
        // As under a debugger.
        if setting("blocking").as_deref() == Some("1") {
            stream.drain(here.machine);
        }
        Ok(())
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        out count: c_int, val function: Raw, val block_size: c_int, val shared_bytes: usize
    ) {
        let here = current()?;
        let function = here.machine.functions.get(function)?;
        let threads = u32::try_from(block_size).ok().filter(|size| (1..=1024).contains(size));
        let threads = threads.ok_or(Code::INVALID_VALUE)?;
        let shared = shared_bytes as u64;
        if shared > u64::from(function.most_shared()) {
            return count.set(0);
        }
        let by_threads = THREADS / threads.next_multiple_of(32);
        let by_shared = u64::from(SHARED_BYTES_OF_MULTIPROCESSOR) / (shared + RESERVED);
        let most = u64::from(by_threads.min(BLOCKS)).min(by_shared);
        count.set(c_int::try_from(most).unwrap_or(0))
    }
}
