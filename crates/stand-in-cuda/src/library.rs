//! Kernels of a library that a test names: the very source of a CUDA kernel, compiled for the CPU.
//!
//! `int32_t name(const Turn *)` is called for a turn of a block: again and again until it returns 1. What it returns
//! below 0 is a fault of the device. It touches memory by its address, unchecked.

use std::{
    collections::BTreeMap,
    ffi::{CString, c_void},
    path::PathBuf,
    sync::{LazyLock, Mutex, PoisonError},
};

use libloading::Library;
use warpweft_stand_in as loader;

use crate::{
    control::setting,
    exports::Code,
    kernels::{Block, Step},
};

/// What a kernel is told.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Turn {
    /// The bytes of each argument.
    arguments: *const *const c_void,
    index: u64,
    blocks: u64,
    threads: u64,
}

pub(crate) type Function = unsafe extern "C" fn(*const Turn) -> i32;

/// Libraries that were named, which stay: blocks may be inside them.
static OPEN: LazyLock<Mutex<BTreeMap<PathBuf, Library>>> = LazyLock::new(Mutex::default);

/// The function of this name in the library that the setting `library` names, if there is one.
#[expect(unsafe_code, reason = "looks a symbol up")]
pub(crate) fn function(name: &str) -> Option<Function> {
    let path = PathBuf::from(setting("library")?);
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !open.contains_key(&path) {
        open.insert(path.clone(), loader::open(&path).ok()?);
    }
    let name = CString::new(name).ok()?;
    // SAFETY: whoever names a library vouches for its kernels having this type.
    unsafe { loader::symbol(open.get(&path)?, &name) }.ok()
}

/// Gives a block a turn.
#[expect(unsafe_code, reason = "calls a kernel in another language")]
pub(crate) fn call(function: Function, block: &Block<'_>) -> Result<Step, Code> {
    let arguments: Vec<*const c_void> = block.arguments.iter().map(|bytes| bytes.as_ptr().cast()).collect();
    let turn = Turn {
        arguments: arguments.as_ptr(),
        index: block.index,
        blocks: block.blocks,
        threads: block.threads,
    };
    // SAFETY: the kernel has the parameters that its entry declares, whose bytes live until the return; the rest is the
    // promise of whoever named the library.
    match unsafe { function(&turn) } {
        0 => Ok(Step::Again),
        1 => Ok(Step::Done),
        _ => Err(Code::LAUNCH_FAILED),
    }
}
