//! Kernels in a dynamic library, for the suite to load: C entry points over `RawWorkgroup`.
#![expect(unsafe_code, reason = "the entry points of a library are C functions")]

use warpweft_core_types::{RawWorkgroup, WORKGROUP_ABI, Workgroup};

/// Writes each workgroup's number along x, doubled, into its word of argument 0.
///
/// # Safety
///
/// - `raw` points to a workgroup prepared as [`RawWorkgroup`] documents.
// SAFETY: nothing else in the library has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn double(raw: *const RawWorkgroup) -> i32 {
    // SAFETY: the caller's duty.
    let raw = unsafe { &*raw };
    if raw.abi != WORKGROUP_ABI {
        return -1;
    }
    // SAFETY: as the caller prepared it.
    let workgroup = unsafe { Workgroup::from_raw(raw) };
    let [x, ..] = workgroup.index();
    workgroup.slice::<u32>(0).set(x as usize, x * 2);
    0
}

/// Fails with a code of its own.
///
/// # Safety
///
/// - None: the argument is not looked at.
// SAFETY: nothing else in the library has this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fails(_: *const RawWorkgroup) -> i32 {
    -7
}
