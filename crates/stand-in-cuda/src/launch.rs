//! Launches: a grid of blocks of a kernel, in a stream.

use std::{
    collections::VecDeque,
    ffi::{c_uint, c_void},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    context::{Context, Ticket, current},
    exports::{Code, In, Outcome, Raw, exports},
    kernels::{Block, Step, Turn},
    machine::Machine,
    module::Function,
    stream::Op,
};

/// Blocks that take turns; the others come when one of them has ended.
const AT_ONCE: usize = 512;

/// A kernel that goes on for longer leaves the core to others now and then.
const BRISK: Duration = Duration::from_millis(1);
const BREATH: Duration = Duration::from_micros(20);

/// A kernel that was launched.
struct Launch {
    machine: &'static Machine,
    context: Arc<Context>,
    function: Arc<Function>,
    grid: [c_uint; 3],
    /// The bytes of each parameter.
    arguments: Vec<Vec<u8>>,
    _ticket: Ticket,
}

impl Launch {
    /// Gives the blocks turns until all have ended.
    fn run(self) -> Outcome {
        let count: u64 = self.grid.iter().map(|&n| u64::from(n)).product();
        let mut coming = 0..count;
        let mut active: VecDeque<(u64, Turn)> = VecDeque::new();
        let began = Instant::now();
        let memory = self.machine.space.seen_from(self.context.device);
        loop {
            let room = AT_ONCE - active.len();
            active.extend(coming.by_ref().take(room).map(|index| (index, Turn::default())));
            if active.is_empty() || self.context.is_dead() || self.machine.fault().is_some() {
                return Ok(());
            }
            for _ in 0..active.len() {
                let Some((index, mut turn)) = active.pop_front() else { break };
                let mut block = Block { memory, arguments: &self.arguments, index, turn: &mut turn };
                if let Step::Again = (self.function.kernel.step)(&mut block)? {
                    active.push_back((index, turn));
                }
            }
            if !active.is_empty() {
                if began.elapsed() > BRISK { thread::sleep(BREATH) } else { thread::yield_now() }
            }
        }
    }
}

#[expect(unsafe_code, reason = "reads the caller's memory")]
fn arguments_of(function: &Function, parameters: &In<*mut c_void>) -> Result<Vec<Vec<u8>>, Code> {
    let read = |(index, param): (usize, &crate::ptx::Param)| {
        let argument = parameters.at(index)?.cast_const().cast::<u8>();
        // SAFETY: the caller of `cuLaunchKernel` vouches that each pointer is of as many bytes as the function
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
        let function = here.machine.functions.get(function)?;
        let stream = here.stream(stream)?;
        if !Arc::ptr_eq(&function.module.context, &stream.context) {
            return Err(Code::INVALID_HANDLE);
        }
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        let fits = |sizes: &[c_uint], most: &[c_uint]| {
            sizes.iter().zip(most).all(|(size, most)| (1..=*most).contains(size))
        };
        let threads: u64 = block.iter().map(|&n| u64::from(n)).product();
        let sound = fits(&grid, &[i32::MAX as u32, 65_535, 65_535])
            && fits(&block, &[1024, 1024, 64])
            && threads <= 1024
            && shared_bytes <= 49_152
            && extra.is_null();
        if !sound {
            return Err(Code::INVALID_VALUE);
        }
        let arguments = arguments_of(&function, &parameters)?;
        let context = Arc::clone(&stream.context);
        let ticket = context.admit_kernel();
        let launch = Launch { machine: here.machine, context, function, grid, arguments, _ticket: ticket };
        stream.push(Op::Work(Box::new(move || launch.run())));
        Ok(())
    }
}
