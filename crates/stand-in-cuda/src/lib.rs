//! A stand-in for the CUDA driver: the functions that the CUDA backend resolves, carried out by host threads.
//!
//! It is loaded by path in place of `libcuda.so.1`. Streams run in order and beside each other, events are
//! marks in them, contexts are stacks per thread, memory is memory of this process. Nothing is answered from
//! a script: a wrong handle, a missing context or freed memory is found because it is looked for, and answered
//! with the code of the CUDA manual. What the backend's design rests on is kept too: loading and unloading
//! code and freeing pinned memory wait for the kernels of their context and hold its lock meanwhile, a stream
//! takes about a thousand operations, and a fault of a kernel is the end of every context of the process. The
//! nodes of a graph run in another order than the usual one, if the edges allow it.
//!
//! Kernels are Rust functions, found by the name of a PTX entry (`kernels.rs`); PTX is read for its entries
//! and their parameters, and its instructions are not run. A test may name a library with more of them, which is how
//! a CUDA source that is also C++ runs here (`library.rs`). Device memory is never given out at the same
//! address twice, so that whoever uses freed memory is found out.
//!
//! [`StandIn`] loads a copy of the library with a state of its own, as if in a process of its own.
//!
//! To add a function, write it in the file of its family inside `exports!`, which counts it, lets tests make it
//! fail, and keeps panics inside; to add a family, add a file. NVML's functions are here as well (`nvml.rs`),
//! and tell of the same devices. Of NVRTC there is the version alone, as if the rest were too new for it.
//!
//! # What it does not do
//!
//! It measures nothing: times are those of host threads. The legacy default stream orders itself only. A capture
//! stays in the stream where it began, and memory is neither allocated nor freed in one. Shared memory is counted
//! and given to nobody.

mod capture;
mod context;
mod control;
mod copies;
mod device;
mod exports;
mod graph;
mod host;
mod image;
mod instance;
mod kernels;
mod launch;
mod library;
mod link;
mod low_latency;
mod machine;
mod module;
mod nvml;
mod nvrtc;
mod plain;
mod pool;
mod ptx;
mod registry;
mod space;
mod stream;
mod task;
mod virtual_memory;
mod work;

pub use instance::StandIn;
