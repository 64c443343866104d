//! CPU devices for warpweft: any number of them in one process, linked in any way.
//!
//! A host device is a real device. It has its own memory with a capacity, queues served by its own worker
//! threads, kernels (Rust functions or functions of a dynamic library), residents that park, and links to
//! its peers and to host memory; bytes that cross a link are counted, and an access over a link that does
//! not exist is refused. So a program written for other machines runs here, and every suite runs here first.
//!
//! ```
//! use std::time::Duration;
//! use warpweft_core_types::*;
//! use warpweft_host::HostBackend;
//!
//! let backend = HostBackend::with_devices(2)?;
//! let device = backend.open(0, Features::empty())?;
//! let buffer = BufferView::whole(device.allocate(&BufferDesc::host_visible(1024))?);
//!
//! // One kernel, run by four workgroups.
//! let contract = KernelContract::new("number", [Param::write(1024)]);
//! let code = KernelCode::new().with_function(contract, HostFunction::new(|workgroup: &Workgroup| {
//!     let [x, ..] = workgroup.index();
//!     workgroup.slice::<u32>(0).set(x as usize, x + 1);
//! }));
//! let kernel = device.load(&code)?.kernel("number")?;
//!
//! let queue = device.create_queue(&QueueDesc::default())?;
//! let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
//! let args = [Arg::Buffer(&buffer)];
//! let launch = Launch::new(&kernel, [4, 1, 1], &args)?;
//! queue.submit(&Submission { waits: &[], ops: &[Op::Launch(launch)], signals: &[done.clone()] })?;
//! done.wait(Duration::from_secs(1))?;
//!
//! let mut bytes = [0; 8];
//! buffer.read(&mut bytes)?;
//! assert_eq!(bytes, [1, 0, 0, 0, 2, 0, 0, 0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Choices
//!
//! - A thread that waits for a semaphore runs quick work of the device itself instead of sleeping; waking
//!   a sleeping thread costs tens of microseconds. Only copies, fills and kernels that say they are brief are
//!   taken that way, and only if they should end in a quarter of the time left.
//! - Workers spin for at most 20 us before they sleep, and only while a core would be idle.
//! - A failed submission fails its queue, not the device.
//!
//! # What it does not do
//!
//! It does not see what kernels read and write directly in a peer's memory: link counters hold copies and
//! fills. It does not isolate kernels: a host kernel that breaks memory breaks the process.

mod backend;
mod clock;
mod config;
mod device;
mod engine;
mod graph;
mod idle;
mod link;
mod memory;
mod module;
mod queue;
mod resident;
mod semaphore;
mod split;

pub use backend::HostBackend;
pub use config::{HostBuilder, HostDeviceConfig, LinkSpec, Place};
