//! NVML, the management library: what it reports of GPUs, their links and pairs of them, as plain values.
//!
//! The functions are resolved here and not taken from nvml-wrapper: that crate asks for fields without their
//! scope, which tells of link 0 alone, answers every remote device with "unknown", and has no fabric. A
//! function that an older library lacks is an answer less, not an error.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void},
    path::{Path, PathBuf},
    ptr::{self, NonNull},
};

use libloading::Library;
use warpweft_core_types::{DeviceUuid, PciAddress};

use crate::{
    driver::{candidates, load_any, resolve},
    links::{C2c, Fabric, Gpu, NvLink, P2p, Pair, Remote, Report},
};

/// The library comes with the driver; containers often have the first name only.
#[cfg(not(windows))]
const LIBRARIES: &[&str] = &["libnvidia-ml.so.1", "libnvidia-ml.so"];
#[cfg(windows)]
const LIBRARIES: &[&str] = &["nvml.dll"];

/// `NVML_ERROR_INVALID_ARGUMENT`, `NVML_ERROR_FUNCTION_NOT_FOUND`, `NVML_ERROR_LIB_RM_VERSION_MISMATCH`.
const INVALID_ARGUMENT: c_int = 2;
const FUNCTION_NOT_FOUND: c_int = 13;
const VERSION_MISMATCH: c_int = 18;

/// More than any machine or GPU has: a library that says otherwise is not believed.
const MOST_GPUS: c_uint = 256;
const MOST_LINKS: c_uint = 64;

/// `nvmlFieldValueEnums`.
const LINK_SPEED_COMMON: c_uint = 90;
const LINK_SPEED: c_uint = 164;
const LINK_STATE: c_uint = 165;
const C2C_COUNT: c_uint = 170;
const C2C_STATUS: c_uint = 171;
const C2C_BANDWIDTH: c_uint = 172;

/// `nvmlGpuP2PCapsIndex_t`.
const P2P_READ: c_uint = 0;
const P2P_WRITE: c_uint = 1;
const P2P_NVLINK: c_uint = 2;
const P2P_ATOMICS: c_uint = 3;

/// `nvmlValueType_t`.
const UNSIGNED_INT: c_uint = 1;
const UNSIGNED_LONG: c_uint = 2;
const UNSIGNED_LONG_LONG: c_uint = 3;

/// `NVML_GPU_VIRTUALIZATION_MODE_VGPU`.
const VGPU: c_uint = 2;

/// A GPU's handle: a token that came from the library and only goes back there.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
struct Device(NonNull<c_void>);

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PciInfo {
    legacy_id: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    id: [u8; 32],
}

/// `nvmlFieldValue_t`; the value is a union of 8 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency_us: i64,
    kind: c_uint,
    outcome: c_int,
    value: [u8; 8],
}

/// `nvmlGpuFabricInfo_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FabricInfo {
    version: c_uint,
    cluster: [u8; 16],
    status: c_int,
    clique: c_uint,
    state: u8,
    health: c_uint,
}

/// `NVML_STRUCT_VERSION(GpuFabricInfo, 2)`.
const FABRIC_VERSION: c_uint = 36 | 2 << 24;
const _: () = assert!(size_of::<FabricInfo>() == 36, "the version says the size");

/// Declares functions that write one value through their last argument: a field for each, and a method that
/// begins with `initial` and returns what was written.
macro_rules! nvml_functions {
    ($($symbol:ident as $name:ident($($arg:ident: $kind:ty),*) -> $value:ty;)*) => {
        struct Functions {
            /// Those of another shape, called by hand.
            init: Option<unsafe extern "C" fn() -> c_int>,
            shutdown: Option<unsafe extern "C" fn() -> c_int>,
            error_string: Option<unsafe extern "C" fn(c_int) -> *const c_char>,
            device_uuid: Option<unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int>,
            device_mig: Option<unsafe extern "C" fn(Device, *mut c_uint, *mut c_uint) -> c_int>,
            memory_affinity: Option<unsafe extern "C" fn(Device, c_uint, *mut c_ulong, c_uint) -> c_int>,
            field_values: Option<unsafe extern "C" fn(Device, c_int, *mut FieldValue) -> c_int>,
            $($name: Option<unsafe extern "C" fn($($kind,)* *mut $value) -> c_int>,)*
        }

        #[expect(unsafe_code, reason = "looks functions up by name and type")]
        impl Functions {
            fn resolve(library: &Library) -> Self {
                Self {
                    // SAFETY: here and below, the field has the type of the library's function of this name.
                    init: unsafe { resolve(library, "nvmlInit_v2") },
                    // SAFETY: as above.
                    shutdown: unsafe { resolve(library, "nvmlShutdown") },
                    // SAFETY: as above.
                    error_string: unsafe { resolve(library, "nvmlErrorString") },
                    // SAFETY: as above.
                    device_uuid: unsafe { resolve(library, "nvmlDeviceGetUUID") },
                    // SAFETY: as above.
                    device_mig: unsafe { resolve(library, "nvmlDeviceGetMigMode") },
                    // SAFETY: as above.
                    memory_affinity: unsafe { resolve(library, "nvmlDeviceGetMemoryAffinity") },
                    // SAFETY: as above.
                    field_values: unsafe { resolve(library, "nvmlDeviceGetFieldValues") },
                    // SAFETY: as above.
                    $($name: unsafe { resolve(library, stringify!($symbol)) },)*
                }
            }
        }

        #[expect(unsafe_code, reason = "the raw functions of the library")]
        impl Nvml {
            $(
                fn $name(&self, $($arg: $kind,)* initial: $value) -> Result<$value, c_int> {
                    let function = self.functions.$name.ok_or(FUNCTION_NOT_FOUND)?;
                    let mut value = initial;
                    // SAFETY: resolved from the library under this name and signature, and mapped as long as
                    // `self`. Handles came from this library (nothing else makes a `Device`); one value is
                    // written to this stack frame.
                    done(unsafe { function($($arg,)* &mut value) })?;
                    Ok(value)
                }
            )*
        }
    };
}

nvml_functions! {
    nvmlDeviceGetCount_v2 as device_count() -> c_uint;
    nvmlDeviceGetHandleByIndex_v2 as device_by_index(index: c_uint) -> *mut c_void;
    nvmlDeviceGetPciInfo_v3 as device_pci(device: Device) -> PciInfo;
    nvmlDeviceGetVirtualizationMode as virtualization(device: Device) -> c_uint;
    nvmlDeviceGetMaxPcieLinkGeneration as pcie_generation(device: Device) -> c_uint;
    nvmlDeviceGetMaxPcieLinkWidth as pcie_width(device: Device) -> c_uint;
    nvmlDeviceGetNvLinkState as link_state(device: Device, link: c_uint) -> c_uint;
    nvmlDeviceGetNvLinkVersion as link_version(device: Device, link: c_uint) -> c_uint;
    nvmlDeviceGetNvLinkRemotePciInfo_v2 as link_remote(device: Device, link: c_uint) -> PciInfo;
    nvmlDeviceGetNvLinkRemoteDeviceType as link_remote_type(device: Device, link: c_uint) -> c_uint;
    nvmlDeviceGetGpuFabricInfoV as fabric_info(device: Device) -> FabricInfo;
    nvmlDeviceGetTopologyCommonAncestor as common_ancestor(one: Device, other: Device) -> c_uint;
    nvmlDeviceGetP2PStatus as p2p_status(one: Device, other: Device, index: c_uint) -> c_uint;
}

const fn done(code: c_int) -> Result<(), c_int> {
    if code == 0 { Ok(()) } else { Err(code) }
}

/// The library, initialised.
struct Nvml {
    functions: Functions,
    /// Keeps the functions mapped.
    _library: Library,
}

/// Asks NVML for everything there is to know about links, once; in words why that is not possible.
pub(crate) fn report(named: Option<&Path>) -> Result<Report, String> {
    let names: Vec<PathBuf> = match named {
        Some(path) => vec![path.to_path_buf()],
        None => candidates(Path::new("/"), LIBRARIES),
    };
    let library = load_any(&names).map_err(|reason| format!("NVML is not here ({reason})"))?;
    let nvml = Nvml { functions: Functions::resolve(&library), _library: library };
    nvml.start()?;
    let report = nvml.report();
    nvml.stop();
    report
}

impl Nvml {
    #[expect(unsafe_code, reason = "initialises the library")]
    fn start(&self) -> Result<(), String> {
        // SAFETY: resolved under this name and signature; needs nothing before it, and may be repeated.
        let started = self.functions.init.map_or(FUNCTION_NOT_FOUND, |init| unsafe { init() });
        done(started).map_err(|code| {
            let hint = match code {
                VERSION_MISMATCH => {
                    "; the driver was updated and the old one still runs, restart the machine"
                }
                _ => "",
            };
            format!("NVML does not start: {}{hint}", self.text_of(code))
        })
    }

    #[expect(unsafe_code, reason = "ends the use of the library")]
    fn stop(&self) {
        // SAFETY: resolved under this name and signature; undoes the one `start` that succeeded.
        let _stopped = self.functions.shutdown.map(|shutdown| unsafe { shutdown() });
    }

    #[expect(unsafe_code, reason = "asks the library for a text")]
    fn text_of(&self, code: c_int) -> String {
        // SAFETY: resolved under this name and signature; any code may be asked about.
        let text = self.functions.error_string.map_or(ptr::null(), |get| unsafe { get(code) });
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: the library answers with a static, terminated text.
        let words = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        format!("{words} ({code})")
    }

    fn report(&self) -> Result<Report, String> {
        let count = self
            .device_count(0)
            .map_err(|code| format!("NVML does not list its GPUs: {}", self.text_of(code)))?;
        // One that cannot be opened, because it is lost or not ours to see, is left out.
        let devices: Vec<Device> = (0..count.min(MOST_GPUS))
            .filter_map(|index| self.device_by_index(index, ptr::null_mut()).ok())
            .filter_map(|device| NonNull::new(device).map(Device))
            .collect();
        let gpus = devices.iter().map(|&device| self.gpu(device)).collect();
        let pairs_of = |&one: &Device| devices.iter().map(|&other| self.pair(one, other)).collect();
        Ok(Report { gpus, pairs: devices.iter().map(pairs_of).collect() })
    }

    fn gpu(&self, device: Device) -> Gpu {
        Gpu {
            uuid: self.uuid(device),
            pci: self.device_pci(device, PciInfo::EMPTY).ok().and_then(|info| info.address()),
            is_mig: self.is_mig(device),
            is_vgpu: self.virtualization(device, 0) == Ok(VGPU),
            pcie: self.pcie_generation(device, 0).ok().zip(self.pcie_width(device, 0).ok()),
            numa_node: self.numa_node(device),
            links: self.links(device),
            c2c: self.c2c(device),
            fabric: self.fabric(device),
        }
    }

    /// Its UUID; instances of a GPU have others.
    #[expect(unsafe_code, reason = "asks the library for a text")]
    fn uuid(&self, device: Device) -> Option<DeviceUuid> {
        let get = self.functions.device_uuid?;
        let mut text = [0_u8; 96];
        // SAFETY: resolved under this name and signature; at most as many bytes as are given, a zero among
        // them, are written to this stack frame.
        done(unsafe { get(device, text.as_mut_ptr().cast(), 96) }).ok()?;
        let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
        text.parse().ok()
    }

    #[expect(unsafe_code, reason = "asks the library")]
    fn is_mig(&self, device: Device) -> bool {
        let Some(get) = self.functions.device_mig else { return false };
        let (mut current, mut pending) = (0, 0);
        // SAFETY: resolved under this name and signature; two integers are written to this stack frame.
        let answer = unsafe { get(device, &mut current, &mut pending) };
        answer == 0 && current == 1
    }

    /// The only NUMA node whose memory is near, if it is one.
    #[expect(unsafe_code, reason = "asks the library")]
    fn numa_node(&self, device: Device) -> Option<u32> {
        let mut nodes: [c_ulong; 16] = [0; 16];
        let get = self.functions.memory_affinity?;
        // SAFETY: resolved under this name and signature; as many words as are named are written to this
        // stack frame. The last argument asks for nodes and not for sockets.
        done(unsafe { get(device, 16, nodes.as_mut_ptr(), 0) }).ok()?;
        let mut near = (0..).zip(nodes).filter(|(_, word)| *word != 0);
        let (index, word) = near.next()?;
        let alone = near.next().is_none() && word.count_ones() == 1;
        alone.then_some(index * c_ulong::BITS + word.trailing_zeros())
    }

    /// One field of a scope, such as a link: an unsigned number, of whichever width.
    #[expect(unsafe_code, reason = "asks the library")]
    fn field(&self, device: Device, field: c_uint, scope: c_uint) -> Option<u64> {
        let get = self.functions.field_values?;
        let mut value =
            FieldValue { field, scope, timestamp: 0, latency_us: 0, kind: 0, outcome: 0, value: [0; 8] };
        // SAFETY: resolved under this name and signature; one field is read from and written to this frame.
        done(unsafe { get(device, 1, &mut value) }).ok()?;
        let [a, b, c, d, ..] = value.value;
        match (value.outcome, value.kind) {
            (0, UNSIGNED_INT) => Some(u32::from_ne_bytes([a, b, c, d]).into()),
            (0, UNSIGNED_LONG | UNSIGNED_LONG_LONG) => Some(u64::from_ne_bytes(value.value)),
            _ => None,
        }
    }

    fn links(&self, device: Device) -> Vec<NvLink> {
        let mut links = Vec::new();
        for link in 0..MOST_LINKS {
            // The field is what newer GPUs answer best; the function tells where the links end.
            let by_field = self.field(device, LINK_STATE, link).map(|state| state == 1);
            let is_active = match (by_field, self.link_state(device, link, 0)) {
                (_, Err(INVALID_ARGUMENT)) => break,
                (Some(active), _) => active,
                (None, Ok(state)) => state == 1,
                (None, Err(_)) => false,
            };
            links.push(if is_active { self.active_link(device, link) } else { NvLink::default() });
        }
        links
    }

    fn active_link(&self, device: Device, link: c_uint) -> NvLink {
        let speed = self.field(device, LINK_SPEED, link).or_else(|| self.field(device, LINK_SPEED_COMMON, 0));
        NvLink {
            is_active: true,
            remote: match self.link_remote_type(device, link, 0) {
                Ok(0) => Remote::Gpu,
                Ok(1) => Remote::Processor,
                Ok(2) => Remote::Switch,
                _ => Remote::Unknown,
            },
            remote_pci: self.link_remote(device, link, PciInfo::EMPTY).ok().and_then(|info| info.address()),
            version: self.link_version(device, link, 0).ok(),
            mb_per_s: speed.filter(|&speed| speed > 0),
        }
    }

    fn c2c(&self, device: Device) -> C2c {
        let count = self.field(device, C2C_COUNT, 0).unwrap_or(0).min(MOST_LINKS.into());
        let links = (0..MOST_LINKS).take(usize::try_from(count).unwrap_or(0));
        let active = links.filter(|&link| self.field(device, C2C_STATUS, link) == Some(1));
        let mb_per_s: Vec<Option<u64>> = active.map(|link| self.field(device, C2C_BANDWIDTH, link)).collect();
        C2c {
            active: u32::try_from(mb_per_s.len()).unwrap_or(0),
            mb_per_s: mb_per_s.into_iter().sum::<Option<u64>>().filter(|&speed| speed > 0),
        }
    }

    fn fabric(&self, device: Device) -> Option<Fabric> {
        let empty = FabricInfo {
            version: FABRIC_VERSION,
            cluster: [0; 16],
            status: 0,
            clique: 0,
            state: 0,
            health: 0,
        };
        let info = self.fabric_info(device, empty).ok().filter(|info| info.state != 0)?;
        Some(Fabric { state: info.state, status: info.status, cluster: info.cluster, clique: info.clique })
    }

    fn pair(&self, one: Device, other: Device) -> Pair {
        // The library answers "yes" or refuses where a GPU is asked about itself; nobody reads that.
        let status = |index| self.p2p_status(one, other, index, 0).ok();
        Pair {
            ancestor: self.common_ancestor(one, other, 0).ok(),
            p2p: P2p {
                read: status(P2P_READ),
                write: status(P2P_WRITE),
                nvlink: status(P2P_NVLINK),
                atomics: status(P2P_ATOMICS),
            },
        }
    }
}

impl PciInfo {
    const EMPTY: Self = Self {
        legacy_id: [0; 16],
        domain: c_uint::MAX,
        bus: c_uint::MAX,
        device: c_uint::MAX,
        device_id: 0,
        subsystem_id: 0,
        id: [0; 32],
    };

    /// `None` where the library hides it: machines that are virtual show `FFFFFFFF:FF:FF.0`.
    fn address(&self) -> Option<PciAddress> {
        let (bus, device) = (u8::try_from(self.bus).ok()?, u8::try_from(self.device).ok()?);
        let is_hidden = self.domain == c_uint::MAX || (bus, device) == (0xff, 0xff);
        (!is_hidden).then_some(PciAddress { domain: self.domain, bus, device, function: 0 })
    }
}
