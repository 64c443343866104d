//! Vulkan devices for warpweft: the seam over any driver that the Vulkan loader finds.
//!
//! Nothing is linked. The loader is opened when [`VulkanBackend::new`] is called; a machine without one, or without a
//! driver, gets an [`OpenError::Unavailable`](warpweft_core_types::OpenError::Unavailable) that says what is missing.
//! A driver of Vulkan 1.3 is needed, software drivers (lavapipe, SwiftShader) included.
//!
//! ```no_run
//! use std::time::Duration;
//! use warpweft_core_types::*;
//! use warpweft_vulkan::VulkanBackend;
//!
//! let backend = VulkanBackend::new()?;
//! let device = backend.open(0, Features::empty())?;
//! let buffer = BufferView::whole(device.allocate(&BufferDesc::host_visible(4 * 1024))?);
//!
//! let source = r#"
//!     struct Scalars { first: u32 }
//!     var<immediate> scalars: Scalars;
//!     @group(0) @binding(0) var<storage, read_write> out: array<u32>;
//!     @compute @workgroup_size(256) fn number(@builtin(global_invocation_id) id: vec3<u32>) {
//!         out[id.x] = scalars.first + id.x;
//!     }"#;
//! let contract = KernelContract::new("number", [Param::write(4 * 1024).aligned(4), Param::scalar::<u32>()])
//!     .with_workgroup_size([256, 1, 1]);
//! let code = ForeignCode::Source { format: CodeFormat::Wgsl, text: source.to_owned() };
//! // SAFETY: the kernel writes 4 * 256 words for a grid of 4, which the contract's least size holds, and
//! // reads no memory.
//! let code = unsafe { KernelCode::new().with_foreign([contract], code) };
//! let kernel = device.load(&code)?.kernel("number")?;
//!
//! let queue = device.create_queue(&QueueDesc::default())?;
//! let done = SemaphorePoint::new(&device.create_semaphore(0)?, 1);
//! let first = 7_u32.to_le_bytes();
//! let args = [Arg::Buffer(&buffer), Arg::Scalar(&first)];
//! let launch = Launch::new(&kernel, [4, 1, 1], &args)?;
//! queue.submit(&Submission { waits: &[], ops: &[Op::Launch(launch)], signals: &[done.clone()] })?;
//! done.wait(Duration::from_secs(1))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Kernels
//!
//! A contract describes an entry point for compute, in WGSL or SPIR-V; both take the same way, through naga. The name is
//! the contract's, and so is the workgroup size.
//!
//! - The i-th **buffer** of the contract, counted among the buffers alone, is the storage buffer `@group(0)
//!   @binding(i)`. What the kernel does to it may be less than the contract says and not more; a `read_write` variable
//!   that is only read (an atomic, which WGSL does not take as `read`) counts as read.
//! - The **scalars** are the members of one `var<immediate>` (push constants) of a structure type, in order, where
//!   WGSL's layout puts them. A kernel that looks at none of them may leave it out.
//! - Memory that a workgroup shares is declared in the code (`var<workgroup>`); none is given beside it.
//!
//! Code that declares something else is refused when it is loaded, with line and column where it is text. Types that the
//! device lacks are refused too. A launch binds each view as it is: it must start at a multiple of
//! [`Capabilities::binding_alignment`] and have no more than [`Capabilities::binding_bytes`]; views of whole buffers
//! always start well, and larger ones are given in parts.
//!
//! No bounds are checked in kernels, and loops are not bounded: adding foreign code is the step where its author vouches
//! for it.
//!
//! # Residents
//!
//! A resident kernel (`KernelContract::resident`) is launched batch after batch: it takes as many turns as it is given and
//! returns, and keeps everything it needs again in its buffers. Behind its source in WGSL these functions are found:
//!
//! ```text
//! fn ww_begin(workgroup: u32) -> u32                         // says "I have begun"; how many turns there are
//! fn ww_should_yield(turns: ptr<function, u32>) -> bool      // takes one; whether to return
//! fn ww_end(workgroup: u32, progress: u32)                   // WW_BUSY, WW_IDLE, WW_FINISHED, WW_FAILED + code
//! ```
//!
//! `workgroup` is the position in the grid, counted along x, then y, then z, and one invocation of each workgroup calls
//! them:
//!
//! ```text
//! @compute @workgroup_size(1) fn counter(@builtin(workgroup_id) id: vec3<u32>) {
//!     var turns = ww_begin(id.x);
//!     while !ww_should_yield(&turns) { counts[id.x] = counts[id.x] + 1u; }
//!     ww_end(id.x, WW_BUSY);
//! }
//! ```
//!
//! What the host wrote before a batch began is seen by it. Code in SPIR-V declares the buffer behind these functions
//! itself: group 1, binding 0, with the words `turns`, `leave`, two that are reserved, and one for each workgroup.
//!
//! # Choices
//!
//! - Each queue counts its submissions on a timeline semaphore of its own. A wait for work that the same device already
//!   has becomes the driver's; any other wait holds the submission on the host.
//! - Queues share the driver's queues by turns. Where the driver has one queue, as software drivers do, work of
//!   different queues runs one after the other, in the order in which it was handed over.
//! - A full barrier stands in front of every operation, so that a queue is in order. Graphs have barriers where their
//!   edges need them.
//! - Small buffers are parts of larger allocations. Device memory is zeroed by the host where it reaches it, else by the
//!   device, and the first work that uses it waits for that.
//! - Loading compiles, and launches the new kernel with no workgroups: drivers that compile at the first launch have
//!   then done so.
//! - Mesa 25 makes and destroys pipelines only between two submissions. Before one is made, each resident shows that it
//!   returns; one that does not within a second has the load refused with its name
//!   ([`LoadError::Unparkable`](warpweft_core_types::LoadError::Unparkable)). Pipelines are destroyed, and devices let
//!   go of, on a thread of their own. Other work of the device that takes long does hold a load up.
//! - A process that ends while a device is let go of may crash in its driver (SwiftShader does);
//!   [`Messages::are_complete`] says when nothing is left.
//! - A buffer, a kernel and a graph keep their device open, so that a device that is opened again is the same one.
//! - Host memory is imported once for each device; what is imported again is a part of that.
//! - Opening a device tries a loop of 70,000 rounds, because lavapipe of Mesa 22.3 ends those early and says nothing.
//! - [`VulkanConfig::with_copies`] opens one physical device as several of the seam, which share memory by file
//!   descriptor.
//!
//! # What is not here
//!
//! Facts about links, and handles of other libraries. A shader cannot fail: it has no traps, and an access out of bounds
//! may do anything.

mod backend;
mod baseline;
mod block;
mod capability;
mod chores;
mod clock;
mod config;
mod device;
mod flatten;
mod gate;
mod gpu;
mod graph;
mod instance;
mod memory;
mod module;
mod pages;
mod pipeline;
mod probe;
mod queue;
mod ranges;
mod record;
mod resident;
mod semaphore;
mod service;
mod shader;
mod timeline;
mod work;

pub use backend::VulkanBackend;
pub use baseline::{Baseline, Prerecorded};
pub use capability::Capabilities;
pub use config::{EntryPoint, VulkanConfig};
pub use instance::{Messages, loader_version};
