//! Graphs and launches by hand, with the driver's own functions.

use std::{
    ffi::{c_uint, c_void},
    ptr,
};

use anyhow::{Result, ensure};
use cudarc::driver::sys;
use warpweft_core_types::NativeHandle;

use crate::{
    bench::raw::{Raw, RawKernel, RawMemory, check, stream_of},
    kernels::{CHUNK_THREADS, CHUNK_WORKGROUPS},
};

/// Parameters of a kernel, and nodes that one comes after, at most.
const MOST_PARAMETERS: usize = 4;
const MOST_BEFORE: usize = 8;

/// A node to add: a kernel of one thread whose parameters are all addresses.
pub(super) struct RawNode {
    pub(super) kernel: RawKernel,
    pub(super) operands: Vec<RawMemory>,
    /// Positions of earlier nodes.
    pub(super) after: Vec<usize>,
}

/// A graph of the driver that nobody has made executable yet.
pub(super) struct RawTemplate(sys::CUgraph);

/// A graph of the driver that can be launched.
pub(super) struct RawGraph {
    executable: sys::CUgraphExec,
    _template: RawTemplate,
}

impl RawTemplate {
    /// Adds the nodes to an empty graph. The context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(super) fn new(nodes: &[RawNode]) -> Result<Self> {
        let mut template = Self(ptr::null_mut());
        // SAFETY: the driver is initialised (there is a `Raw`); the result is written to `template`.
        check(unsafe { sys::cuGraphCreate(&mut template.0, 0) })?;
        let mut handles: Vec<sys::CUgraphNode> = Vec::with_capacity(nodes.len());
        for node in nodes {
            let added = template.add(node, &handles)?;
            handles.push(added);
        }
        Ok(template)
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn add(&self, node: &RawNode, earlier: &[sys::CUgraphNode]) -> Result<sys::CUgraphNode> {
        ensure!(node.operands.len() <= MOST_PARAMETERS && node.after.len() <= MOST_BEFORE, "too many");
        let mut addresses = [0; MOST_PARAMETERS];
        for (address, operand) in addresses.iter_mut().zip(&node.operands) {
            *address = operand.0;
        }
        let mut parameters = addresses.each_mut().map(|address| ptr::from_mut(address).cast::<c_void>());
        let mut after = [ptr::null_mut(); MOST_BEFORE];
        for (handle, &before) in after.iter_mut().zip(&node.after) {
            *handle = earlier[before];
        }
        let described = sys::CUDA_KERNEL_NODE_PARAMS {
            func: node.kernel.0,
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: parameters.as_mut_ptr(),
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        };
        let (mut added, count) = (ptr::null_mut(), node.after.len());
        // SAFETY: the graph is live; the nodes before are of it; the kernel is one of ours, whose parameters are as many
        // addresses of memory that stays allocated. The driver copies what the pointers lead to, which is this frame's.
        check(unsafe {
            sys::cuGraphAddKernelNode_v2(&mut added, self.0, after.as_ptr(), count, &described)
        })?;
        Ok(added)
    }

    /// Makes it executable. The context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(super) fn instantiate(self) -> Result<RawGraph> {
        let mut executable = ptr::null_mut();
        // SAFETY: the graph is live; the result is written to this frame.
        check(unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, self.0, 0) })?;
        Ok(RawGraph { executable, _template: self })
    }
}

impl Drop for RawTemplate {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once. What was instantiated does not need it.
        let _destroyed = unsafe { sys::cuGraphDestroy(self.0) };
    }
}

impl RawGraph {
    /// Launches it in a stream, whose context is current.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(super) fn launch(&self, raw: &Raw) -> Result<()> {
        // SAFETY: both handles are live and of one context; what the nodes touch stays allocated.
        check(unsafe { sys::cuGraphLaunch(self.executable, raw.stream()) })
    }
}

impl Drop for RawGraph {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        // SAFETY: instantiated once, destroyed once; the driver keeps it for launches under way.
        let _destroyed = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

/// Launches `visit` on two words, whose context is current.
pub(super) fn visit(raw: &Raw, kernel: RawKernel, to: RawMemory, from: RawMemory) -> Result<()> {
    let (mut to, mut from) = (to.0, from.0);
    launch(
        raw.stream(),
        kernel,
        (1, 1),
        &mut [ptr::from_mut(&mut to).cast(), ptr::from_mut(&mut from).cast()],
    )
}

/// Launches `work` on a chunk, whose context is current.
pub(super) fn work(raw: &Raw, kernel: RawKernel, chunk: RawMemory, rounds: u32) -> Result<()> {
    let (mut chunk, mut rounds) = (chunk.0, rounds);
    let shape = (CHUNK_WORKGROUPS, CHUNK_THREADS);
    launch(
        raw.stream(),
        kernel,
        shape,
        &mut [ptr::from_mut(&mut chunk).cast(), ptr::from_mut(&mut rounds).cast()],
    )
}

/// Launches `step` in any stream, whose context is current.
pub(crate) fn step(stream: NativeHandle, kernel: RawKernel, word: NativeHandle, digit: u32) -> Result<()> {
    let (mut word, mut digit) = (word.value, digit);
    let parameters = &mut [ptr::from_mut(&mut word).cast(), ptr::from_mut(&mut digit).cast()];
    launch(stream_of(stream), kernel, (1, 1), parameters)
}

#[expect(unsafe_code, reason = "calls the driver")]
fn launch(
    stream: sys::CUstream,
    kernel: RawKernel,
    (blocks, threads): (c_uint, c_uint),
    parameters: &mut [*mut c_void],
) -> Result<()> {
    let none = ptr::null_mut();
    // SAFETY: the callers above give one of our kernels its own parameters, in their order, on memory that stays
    // allocated until the stream was waited for. The driver copies them, which live until the call returns.
    check(unsafe {
        sys::cuLaunchKernel(kernel.0, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.as_mut_ptr(), none)
    })
}
