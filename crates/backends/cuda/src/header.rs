//! The header that resident kernels include, and the same structures on the host's side.

use std::ffi::CStr;

/// What `#include <..>` calls it.
pub(crate) const NAME: &CStr = c"warpweft/resident.cuh";

/// Its text. It travels with the program, since NVRTC reads no folders.
pub(crate) const TEXT: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("resident.cuh"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("the header holds no zero byte"),
    };

/// `ww_slice`: the first parameter of a resident kernel.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Slice {
    pub(crate) orders: u64,
    pub(crate) mirror: u64,
    pub(crate) blocks: u64,
    pub(crate) done: u64,
    pub(crate) shortest_ns: u64,
    pub(crate) longest_ns: u64,
    pub(crate) number: u64,
}

/// `ww_orders` in host memory, and the `ww_parting` behind it.
pub(crate) const LEAVE: usize = 0;
pub(crate) const HURRY: usize = 8;
pub(crate) const LAST_LEFT: usize = 16;
pub(crate) const OBEYED: usize = 24;

/// `ww_block`: its size, and where its words are.
pub(crate) const BLOCK_BYTES: usize = 32;
pub(crate) const ENTERED: usize = 0;
pub(crate) const LEFT: usize = 8;
pub(crate) const FINISHED: usize = 16;
