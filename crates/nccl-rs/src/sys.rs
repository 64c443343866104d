//! The C interface of NCCL (`nccl.h`, 2.18 to 2.32), as far as it is used here.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr,
};

/// `ncclComm_t`.
pub(crate) type Comm = *mut c_void;
/// `ncclWindow_t`.
pub(crate) type Window = *mut c_void;
/// `cudaStream_t`.
pub(crate) type Stream = *mut c_void;

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const IN_PROGRESS: c_int = 7;

/// `NCCL_CONFIG_UNDEF_INT`: the library chooses.
pub(crate) const UNDEFINED: c_int = c_int::MIN;

/// `NCCL_SPLIT_NOCOLOR`.
pub(crate) const NO_COLOR: c_int = -1;

/// `NCCL_WIN_COLL_SYMMETRIC`.
pub(crate) const WINDOW_SYMMETRIC: c_int = 1;

/// `NCCL_SHRINK_ABORT`.
pub(crate) const SHRINK_ABORT: c_int = 1;

/// `NCCL_SUSPEND_MEM`.
pub(crate) const SUSPEND_MEMORY: c_int = 1;

/// `ncclScalarHostImmediate`: read before the call returns.
pub(crate) const SCALAR_ON_HOST: c_int = 1;

/// The size of `ncclUniqueId`.
pub(crate) const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UniqueId(pub(crate) [u8; UNIQUE_ID_BYTES]);

/// `ncclConfig_t`. A library of another version takes the fields that it knows, by `size` and `version`.
#[repr(C)]
#[derive(Debug, Clone)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    pub(crate) blocking: c_int,
    pub(crate) cga_cluster_size: c_int,
    pub(crate) min_ctas: c_int,
    pub(crate) max_ctas: c_int,
    pub(crate) net_name: *const c_char,
    pub(crate) split_share: c_int,
    pub(crate) traffic_class: c_int,
    pub(crate) comm_name: *const c_char,
    pub(crate) collnet_enable: c_int,
    pub(crate) cta_policy: c_int,
    pub(crate) shrink_share: c_int,
    pub(crate) nvls_ctas: c_int,
    pub(crate) channels_per_net_peer: c_int,
    pub(crate) nvlink_centric_sched: c_int,
    pub(crate) graph_usage_mode: c_int,
    pub(crate) rma_contexts: c_int,
    pub(crate) max_p2p_peers: c_int,
    pub(crate) graph_stream_ordering: c_int,
    pub(crate) launch_order_implicit: c_int,
    pub(crate) rma_signals: c_int,
    pub(crate) rma_eager_init: c_int,
    pub(crate) host_cft_mode: c_int,
    pub(crate) nvls_host_mode: c_int,
}

impl Default for Config {
    /// `NCCL_CONFIG_INITIALIZER`.
    fn default() -> Self {
        /// `NCCL_API_MAGIC`.
        const MAGIC: c_uint = 0xcafe_beef;
        /// The header that the fields are those of.
        const VERSION: c_uint = 23203;
        Self {
            size: size_of::<Self>(),
            magic: MAGIC,
            version: VERSION,
            blocking: UNDEFINED,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
            comm_name: ptr::null(),
            collnet_enable: UNDEFINED,
            cta_policy: UNDEFINED,
            shrink_share: UNDEFINED,
            nvls_ctas: UNDEFINED,
            channels_per_net_peer: UNDEFINED,
            nvlink_centric_sched: UNDEFINED,
            graph_usage_mode: UNDEFINED,
            rma_contexts: UNDEFINED,
            max_p2p_peers: UNDEFINED,
            graph_stream_ordering: UNDEFINED,
            launch_order_implicit: UNDEFINED,
            rma_signals: UNDEFINED,
            rma_eager_init: UNDEFINED,
            host_cft_mode: UNDEFINED,
            nvls_host_mode: UNDEFINED,
        }
    }
}

/// `ncclWaitSignalDesc_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitSignalDesc {
    pub(crate) operations: c_int,
    pub(crate) peer: c_int,
    pub(crate) signal: c_int,
    pub(crate) context: c_int,
}
