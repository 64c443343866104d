//! NVML by hand: what it says of a pair of devices, to compare with what the backend makes of it.

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    ptr,
};

use anyhow::{Context as _, Result, ensure};
use libloading::Library;
use warpweft_core_types::DeviceUuid;

type Init = unsafe extern "C" fn() -> c_int;
type ByUuid = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
type P2p = unsafe extern "C" fn(*mut c_void, *mut c_void, c_uint, *mut c_uint) -> c_int;

/// `NVML_P2P_CAPS_INDEX_NVLINK`, and the status that means yes.
const NVLINK: c_uint = 2;
const OK: c_uint = 0;

/// The library, started until the process ends.
pub(crate) struct Nvml {
    by_uuid: ByUuid,
    p2p: P2p,
    _library: Library,
}

#[expect(unsafe_code, reason = "calls the management library")]
impl Nvml {
    pub(crate) fn open() -> Result<Self> {
        // SAFETY: the vendor's library may be loaded by anyone.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }.context("NVML is not here")?;
        // SAFETY: the function has had this signature since there is the name.
        let init = *unsafe { library.get::<Init>(c"nvmlInit_v2") }?;
        // SAFETY: as above.
        let by_uuid = *unsafe { library.get::<ByUuid>(c"nvmlDeviceGetHandleByUUID") }?;
        // SAFETY: as above.
        let p2p = *unsafe { library.get::<P2p>(c"nvmlDeviceGetP2PStatus") }?;
        // SAFETY: it needs nothing before it and may be repeated.
        let started = unsafe { init() };
        ensure!(started == 0, "NVML does not start: it answers {started}");
        Ok(Self { by_uuid, p2p, _library: library })
    }

    /// Whether NVML says that these reach each other over NVLink.
    pub(crate) fn is_nvlink(&self, one: DeviceUuid, other: DeviceUuid) -> Result<bool> {
        let (one, other, mut status) = (self.device(one)?, self.device(other)?, OK);
        // SAFETY: both handles are of this library; one integer is written to this stack frame.
        let answered = unsafe { (self.p2p)(one, other, NVLINK, &mut status) };
        ensure!(answered == 0, "NVML says nothing of the pair: {answered}");
        Ok(status == OK)
    }

    fn device(&self, uuid: DeviceUuid) -> Result<*mut c_void> {
        let (name, mut device) = (CString::new(format!("GPU-{uuid}"))?, ptr::null_mut());
        // SAFETY: a terminated text; one handle is written to this stack frame.
        let answered = unsafe { (self.by_uuid)(name.as_ptr(), &mut device) };
        ensure!(answered == 0, "NVML does not know GPU-{uuid}: {answered}");
        Ok(device)
    }
}
