//! NVIDIA GPUs for warpweft: the seam over the CUDA driver.
//!
//! Nothing is linked. The driver is loaded when [`CudaBackend::new`] is called; a machine without one gets an
//! [`OpenError::Unavailable`](warpweft_core_types::OpenError::Unavailable) that says what is missing. NVRTC is
//! looked for when CUDA C is first compiled.
//!
//! ```no_run
//! use std::time::Duration;
//! use warpweft_core_types::*;
//! use warpweft_cuda::CudaBackend;
//!
//! let backend = CudaBackend::new()?;
//! let device = backend.open(0, Features::empty())?;
//! let buffer = BufferView::whole(device.allocate(&BufferDesc::host_visible(4 * 1024))?);
//!
//! let source = r#"extern "C" __global__ void number(unsigned int* out, unsigned int first) {
//!     unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
//!     out[i] = first + i;
//! }"#;
//! let contract = KernelContract::new("number", [Param::write(4 * 1024), Param::scalar::<u32>()])
//!     .with_workgroup_size([256, 1, 1]);
//! let code = ForeignCode::Source { format: CodeFormat::CudaC, text: source.to_owned() };
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
//! A contract describes an `extern "C" __global__` function. A buffer is a pointer to the first byte of the
//! view, and nothing else; a value is a parameter of its size, in place. So `[Param::read(n), Param::scalar::<u32>()]`
//! is `(const T*, unsigned int)`. A workgroup is a block. It is given as much dynamic shared memory as the contract
//! says ([`KernelContract::shared_bytes`](warpweft_core_types::KernelContract::shared_bytes)), none by default.
//! Drivers of CUDA 12.4 and newer tell what the code declares, and code that declares something else is refused.
//!
//! A resident kernel (`KernelContract::resident`) has a `ww_slice`, by value, before all that. It comes with
//! `#include <warpweft/resident.cuh>`, whose functions tell the kernel when to return; the header's first
//! lines show how.
//!
//! # Choices
//!
//! - Contexts are the primary ones, shared with cudarc, candle, burn and the CUDA runtime. Every call leaves
//!   the thread's current context as it was.
//! - Device memory comes from a pool of our own, so that giving it back never waits for a resident kernel.
//!   Pinned memory that is given back is kept for reuse, since the driver would wait to free it.
//! - A wait for work that is under way on any CUDA device of the backend becomes an event wait. Any other wait
//!   holds the submission on the host.
//! - A thread that waits asks the driver about the event itself, for ten milliseconds; then it sleeps and one
//!   reactor thread does, which wakes futures too.
//! - Calls that wait for resident kernels are all in one module, and ask the residents to hurry.
//! - The driver tells which devices reach each other, and NVML how; it is loaded and asked when somebody first
//!   wants to know. Without it links are there all the same, of an unknown medium, and
//!   [`CudaBackend::notes`] says why.
//! - A fault of a kernel loses the device for the process, as the driver has it. Its failure is kept, and
//!   everything that comes later is refused with it.
//!
//! # Features
//!
//! - `nvml` (on by default): facts about links from NVML, which is loaded when they are first asked for. Without it
//!   links are there, of an unknown medium.
//! - `cudarc`: [`adapter`](https://docs.rs/warpweft-cuda/latest/warpweft_cuda/adapter), which makes queues and
//!   buffers of the streams and slices of cudarc's safe layer, in the version that this crate is built with. Every
//!   other version, and every other library, goes through handles as integers
//!   ([`Interop`](warpweft_core_types::Interop)).
//!
//! Collectives are NCCL's, which is loaded when somebody first asks for them
//! ([`Device::collectives`](warpweft_core_types::Device::collectives)), and their calls are operations of submissions like
//! any other.
//!
//! # What it does not do
//!
//! - Managed memory, arrays and textures: memory is a range of bytes.
//! - Clusters, cooperative launches and launches from the device: workgroups of a launch know nothing of each other,
//!   and a [resident](warpweft_core_types::Residents) is how they meet.
//! - Isolation: a fault ends every device of the process, and a process of its own is what keeps it from others.
//! - Work in a process that was forked from the one that opened the driver: everything is refused there.
//! - Counts of bytes on links: the driver has none.

#[cfg(feature = "cudarc")]
pub mod adapter;
mod backend;
mod baseline;
mod budget;
mod cache;
mod calls;
mod check;
mod clock;
mod cold;
mod collectives;
mod communicator;
mod compiler;
mod config;
mod context;
mod control;
mod device;
#[cfg_attr(not(unix), expect(dead_code, reason = "calls for memory that processes share"))]
mod driver;
mod exit;
mod factor;
mod fork;
mod graph;
mod header;
mod host_memory;
mod interop;
#[cfg_attr(not(feature = "nvml"), expect(dead_code, reason = "nobody makes a report"))]
mod links;
mod memory;
mod module;
#[cfg(feature = "nvml")]
mod nvml;
mod peer;
mod probe;
mod queue;
mod registration;
mod resident;
mod semaphore;
mod stream;
#[cfg(unix)]
mod virtual_memory;
mod work;

pub use backend::CudaBackend;
pub use baseline::Baseline;
pub use compiler::Compiler;
pub use config::CudaConfig;
pub use context::NativeContext;
pub use interop::{ADDRESS, CONTEXT, STREAM};
pub use probe::Probed;
