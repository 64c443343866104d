//! What a physical device can do: asked once, and honoured everywhere.

use std::{collections::HashSet, ffi::CStr, fmt};

use ash::{ext, khr, vk};
use naga::valid::Capabilities as ShaderCapabilities;
use warpweft_core_types::{DeviceKind, DeviceUuid, PciAddress};

use crate::instance::Instance;

/// At least as many bytes are mapped together on every system we run on.
pub(crate) const PAGE: u64 = 4096;

/// Queues of a device that are used: more of them than seldom run side by side.
const MOST_QUEUES: u32 = 8;

/// What a device can do, as its driver says.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The product's name.
    pub name: String,
    /// The driver's name and version.
    pub driver: String,
    /// Major and minor version of Vulkan.
    pub api: (u32, u32),
    /// The sort of silicon.
    pub kind: DeviceKind,
    /// The device is made of host threads.
    pub is_software: bool,
    /// Host and device have one memory.
    pub is_unified: bool,
    /// The silicon.
    pub device_uuid: DeviceUuid,
    /// The driver; memory passes between devices whose two ids are equal.
    pub driver_uuid: DeviceUuid,
    /// Where it sits on the PCI bus, if it says so.
    pub pci: Option<PciAddress>,
    /// 64-bit integers in shaders.
    pub int64: bool,
    /// 64-bit floats in shaders.
    pub float64: bool,
    /// 16-bit floats in shaders and buffers.
    pub float16: bool,
    /// 16-bit integers in shaders and buffers.
    pub int16: bool,
    /// 8-bit integers in shaders and buffers. WGSL has no such type.
    pub int8: bool,
    /// Atomic operations on 64-bit integers.
    pub int64_atomics: bool,
    /// Atomic addition of 32-bit floats in buffers.
    pub float32_atomics: bool,
    /// Operations across a subgroup in compute shaders.
    pub subgroups: bool,
    /// Threads of a subgroup.
    pub subgroup_size: u32,
    /// Bytes of the largest buffer that a kernel is given.
    pub binding_bytes: u64,
    /// A kernel's buffers start at multiples of this.
    pub binding_alignment: u64,
    /// Buffers of a kernel.
    pub bindings: u32,
    /// Bytes of scalar arguments (push constants).
    pub scalar_bytes: u32,
    /// Threads of a workgroup.
    pub workgroup_threads: u32,
    /// Threads of a workgroup in each dimension.
    pub workgroup_size: [u32; 3],
    /// Workgroups of a launch in each dimension.
    pub workgroups: [u32; 3],
    /// Bytes of memory that a workgroup's threads share.
    pub workgroup_bytes: u32,
    /// Bytes of the largest allocation.
    pub allocation_bytes: u64,
    /// Bytes of the largest heap of device memory.
    pub memory_bytes: u64,
    /// Memory passes to other devices of the same silicon and to other processes as a file descriptor.
    pub opaque_fd: bool,
    /// Host memory at multiples of so many bytes can be used as it is.
    pub host_import: Option<u64>,
    /// The device's clock counts nanoseconds in 64 bits.
    pub timestamps: bool,
    /// The device's clock is read without work on the device.
    pub calibrated_timestamps: bool,
    /// The driver tells how much memory is free.
    pub memory_budget: bool,
    /// Queues of the driver that are used.
    pub queues: u32,
    /// Independent processors, where the driver tells.
    pub multiprocessors: Option<u32>,
}

/// A physical device that the backend can use.
#[derive(Clone)]
pub(crate) struct Physical {
    pub(crate) raw: vk::PhysicalDevice,
    pub(crate) capabilities: Capabilities,
    pub(crate) queue_family: u32,
    pub(crate) memory: vk::PhysicalDeviceMemoryProperties,
}

/// What the driver answers to, all in one place.
#[derive(Default)]
struct Answers {
    features: vk::PhysicalDeviceFeatures,
    features11: vk::PhysicalDeviceVulkan11Features<'static>,
    features12: vk::PhysicalDeviceVulkan12Features<'static>,
    features13: vk::PhysicalDeviceVulkan13Features<'static>,
    float_atomics: vk::PhysicalDeviceShaderAtomicFloatFeaturesEXT<'static>,
    properties: vk::PhysicalDeviceProperties,
    properties11: vk::PhysicalDeviceVulkan11Properties<'static>,
    properties12: vk::PhysicalDeviceVulkan12Properties<'static>,
    properties13: vk::PhysicalDeviceVulkan13Properties<'static>,
    pci: vk::PhysicalDevicePCIBusInfoPropertiesEXT<'static>,
    host: vk::PhysicalDeviceExternalMemoryHostPropertiesEXT<'static>,
    multiprocessors: vk::PhysicalDeviceShaderSMBuiltinsPropertiesNV<'static>,
}

impl Physical {
    /// Asks the driver; the error says why the backend cannot use the device.
    pub(crate) fn ask(instance: &Instance, raw: vk::PhysicalDevice) -> Result<Self, String> {
        let extensions = extensions_of(instance, raw)?;
        let answers = ask(instance, raw, &extensions)?;
        let name = text(answers.properties.device_name_as_c_str());
        let refuse = |what: &str| Err(format!("{name}: {what}"));
        if answers.features12.timeline_semaphore == vk::FALSE {
            return refuse("it has no timeline semaphores");
        }
        if answers.features13.synchronization2 == vk::FALSE || answers.features13.maintenance4 == vk::FALSE {
            return refuse("it lacks a feature that Vulkan 1.3 demands");
        }
        let Some((queue_family, family)) = compute_family(instance, raw) else {
            return refuse("it has no queues for compute");
        };
        let memory = memory_of(instance, raw);
        let capabilities = Capabilities {
            opaque_fd: cfg!(unix)
                && extensions.contains(khr::external_memory_fd::NAME.to_bytes())
                && passes(instance, raw, vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD, true),
            host_import: (extensions.contains(ext::external_memory_host::NAME.to_bytes())
                && passes(instance, raw, vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT, false))
            .then(|| answers.host.min_imported_host_pointer_alignment.max(PAGE)),
            ..capabilities_of(&answers, &extensions, &family, &memory)
        };
        Ok(Self { raw, capabilities, queue_family, memory })
    }

    /// The extensions that the backend uses, of those that are there.
    pub(crate) fn used_extensions(&self) -> Vec<&'static CStr> {
        let capabilities = &self.capabilities;
        let mut used = Vec::new();
        if capabilities.opaque_fd {
            used.push(khr::external_memory_fd::NAME);
        }
        if capabilities.host_import.is_some() {
            used.push(ext::external_memory_host::NAME);
        }
        if capabilities.calibrated_timestamps {
            used.push(ext::calibrated_timestamps::NAME);
        }
        if capabilities.memory_budget {
            used.push(ext::memory_budget::NAME);
        }
        if capabilities.float32_atomics {
            used.push(ext::shader_atomic_float::NAME);
        }
        used
    }

    /// The first type of memory that a buffer may have (`allowed`) with all flags of an entry of `wanted`; earlier
    /// entries are preferred.
    pub(crate) fn memory_type(&self, allowed: u32, wanted: &[vk::MemoryPropertyFlags]) -> Option<u32> {
        let has = |index: u32, flags| {
            let kind = self.memory.memory_types.get(index as usize);
            allowed & (1 << index) != 0 && kind.is_some_and(|kind| kind.property_flags.contains(flags))
        };
        wanted.iter().find_map(|&flags| (0..self.memory.memory_type_count).find(|&index| has(index, flags)))
    }

    pub(crate) fn memory_flags(&self, index: u32) -> vk::MemoryPropertyFlags {
        self.memory.memory_types.get(index as usize).map_or_else(Default::default, |kind| kind.property_flags)
    }

    /// The heap that counts as the device's memory.
    pub(crate) fn device_heap(&self) -> usize {
        largest_device_heap(&self.memory)
    }
}

impl Capabilities {
    /// What the checker of shaders may let pass.
    pub(crate) fn for_shaders(&self) -> ShaderCapabilities {
        let mut shaders = ShaderCapabilities::IMMEDIATES;
        shaders.set(ShaderCapabilities::SHADER_INT64, self.int64);
        shaders.set(ShaderCapabilities::FLOAT64, self.float64);
        shaders.set(ShaderCapabilities::SHADER_FLOAT16, self.float16);
        shaders.set(ShaderCapabilities::SHADER_INT16, self.int16);
        let wide =
            ShaderCapabilities::SHADER_INT64_ATOMIC_MIN_MAX | ShaderCapabilities::SHADER_INT64_ATOMIC_ALL_OPS;
        shaders.set(wide, self.int64_atomics);
        shaders.set(ShaderCapabilities::SHADER_FLOAT32_ATOMIC, self.float32_atomics);
        shaders.set(ShaderCapabilities::SUBGROUP | ShaderCapabilities::SUBGROUP_BARRIER, self.subgroups);
        shaders
    }

    /// Whether memory of the one passes to the other as a file descriptor.
    pub(crate) fn shares_silicon(&self, other: &Self) -> bool {
        self.opaque_fd
            && other.opaque_fd
            && self.device_uuid == other.device_uuid
            && self.driver_uuid == other.driver_uuid
    }
}

impl fmt::Debug for Physical {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Physical").field("capabilities", &self.capabilities).finish_non_exhaustive()
    }
}

fn capabilities_of(
    answers: &Answers,
    extensions: &HashSet<Vec<u8>>,
    family: &vk::QueueFamilyProperties,
    memory: &vk::PhysicalDeviceMemoryProperties,
) -> Capabilities {
    let (one, eleven, twelve) = (&answers.features, &answers.features11, &answers.features12);
    let limits = &answers.properties.limits;
    let on = |flags: &[vk::Bool32]| flags.iter().all(|&flag| flag == vk::TRUE);
    let has = |extension: &CStr| extensions.contains(extension.to_bytes());
    let api = answers.properties.api_version;
    let is_software = answers.properties.device_type == vk::PhysicalDeviceType::CPU;
    Capabilities {
        name: text(answers.properties.device_name_as_c_str()),
        driver: driver_text(answers),
        api: (vk::api_version_major(api), vk::api_version_minor(api)),
        kind: kind_of(answers.properties.device_type),
        is_software,
        is_unified: is_software || answers.properties.device_type == vk::PhysicalDeviceType::INTEGRATED_GPU,
        device_uuid: DeviceUuid::from_bytes(answers.properties11.device_uuid),
        driver_uuid: DeviceUuid::from_bytes(answers.properties11.driver_uuid),
        pci: has(ext::pci_bus_info::NAME).then(|| pci_of(&answers.pci)),
        int64: on(&[one.shader_int64]),
        float64: on(&[one.shader_float64]),
        float16: on(&[twelve.shader_float16, eleven.storage_buffer16_bit_access]),
        int16: on(&[one.shader_int16, eleven.storage_buffer16_bit_access]),
        int8: on(&[twelve.shader_int8, twelve.storage_buffer8_bit_access]),
        int64_atomics: on(&[one.shader_int64, twelve.shader_buffer_int64_atomics]),
        float32_atomics: has(ext::shader_atomic_float::NAME)
            && on(&[answers.float_atomics.shader_buffer_float32_atomic_add]),
        subgroups: answers.properties11.subgroup_supported_stages.contains(vk::ShaderStageFlags::COMPUTE)
            && answers.properties11.subgroup_supported_operations.contains(subgroup_operations()),
        subgroup_size: answers.properties11.subgroup_size,
        binding_bytes: u64::from(limits.max_storage_buffer_range),
        binding_alignment: limits.min_storage_buffer_offset_alignment.max(4),
        bindings: limits
            .max_per_stage_descriptor_storage_buffers
            .min(limits.max_descriptor_set_storage_buffers)
            .saturating_sub(1),
        scalar_bytes: limits.max_push_constants_size,
        workgroup_threads: limits.max_compute_work_group_invocations,
        workgroup_size: limits.max_compute_work_group_size,
        workgroups: limits.max_compute_work_group_count,
        workgroup_bytes: limits.max_compute_shared_memory_size,
        allocation_bytes: answers
            .properties11
            .max_memory_allocation_size
            .min(answers.properties13.max_buffer_size)
            // Far below where sums of sizes and places end; sizes are rounded up to words.
            .min(i64::MAX.unsigned_abs())
            / 4
            * 4,
        memory_bytes: memory.memory_heaps.get(largest_device_heap(memory)).map_or(0, |heap| heap.size),
        opaque_fd: false,
        host_import: None,
        timestamps: (limits.timestamp_period - 1.0).abs() < f32::EPSILON && family.timestamp_valid_bits == 64,
        calibrated_timestamps: has(ext::calibrated_timestamps::NAME),
        memory_budget: has(ext::memory_budget::NAME),
        queues: family.queue_count.clamp(1, MOST_QUEUES),
        multiprocessors: has(nv_multiprocessors()).then_some(answers.multiprocessors.shader_sm_count),
    }
}

/// All that naga's subgroup operations need.
fn subgroup_operations() -> vk::SubgroupFeatureFlags {
    use vk::SubgroupFeatureFlags as Flags;
    Flags::BASIC
        | Flags::VOTE
        | Flags::ARITHMETIC
        | Flags::BALLOT
        | Flags::SHUFFLE
        | Flags::SHUFFLE_RELATIVE
        | Flags::QUAD
}

fn nv_multiprocessors() -> &'static CStr {
    ash::nv::shader_sm_builtins::NAME
}

fn kind_of(kind: vk::PhysicalDeviceType) -> DeviceKind {
    match kind {
        vk::PhysicalDeviceType::CPU => DeviceKind::Cpu,
        vk::PhysicalDeviceType::DISCRETE_GPU
        | vk::PhysicalDeviceType::INTEGRATED_GPU
        | vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceKind::Gpu,
        _ => DeviceKind::Other,
    }
}

fn driver_text(answers: &Answers) -> String {
    let name = text(answers.properties12.driver_name_as_c_str());
    let info = text(answers.properties12.driver_info_as_c_str());
    let api = answers.properties.api_version;
    let (major, minor) = (vk::api_version_major(api), vk::api_version_minor(api));
    format!("Vulkan {major}.{minor}, {name} {info}").trim_end().to_owned()
}

fn pci_of(pci: &vk::PhysicalDevicePCIBusInfoPropertiesEXT<'_>) -> PciAddress {
    let narrow = |value: u32| u8::try_from(value).unwrap_or(u8::MAX);
    PciAddress {
        domain: pci.pci_domain,
        bus: narrow(pci.pci_bus),
        device: narrow(pci.pci_device),
        function: narrow(pci.pci_function),
    }
}

/// What a driver wrote into a field of fixed length.
fn text(field: Result<&CStr, impl Sized>) -> String {
    field.map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn largest_device_heap(memory: &vk::PhysicalDeviceMemoryProperties) -> usize {
    let heaps = memory.memory_heaps.iter().take(memory.memory_heap_count as usize).enumerate();
    heaps
        .filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL))
        .max_by_key(|(_, heap)| heap.size)
        .map_or(0, |(index, _)| index)
}

#[expect(unsafe_code, reason = "asks the driver")]
fn extensions_of(instance: &Instance, device: vk::PhysicalDevice) -> Result<HashSet<Vec<u8>>, String> {
    // SAFETY: the device was enumerated by this instance.
    let extensions = unsafe { instance.raw.enumerate_device_extension_properties(device) };
    let extensions = extensions.map_err(|error| format!("its driver does not answer: {error:?}"))?;
    let name = |extension: &vk::ExtensionProperties| {
        extension.extension_name_as_c_str().ok().map(|name| name.to_bytes().to_vec())
    };
    Ok(extensions.iter().filter_map(name).collect())
}

#[expect(unsafe_code, reason = "asks the driver")]
fn ask(
    instance: &Instance,
    device: vk::PhysicalDevice,
    extensions: &HashSet<Vec<u8>>,
) -> Result<Answers, String> {
    // SAFETY: the device was enumerated by this instance.
    let properties = unsafe { instance.raw.get_physical_device_properties(device) };
    let api = properties.api_version;
    let mut answers = Answers { properties, ..Answers::default() };
    if api < vk::API_VERSION_1_3 {
        let name = text(answers.properties.device_name_as_c_str());
        let (major, minor) = (vk::api_version_major(api), vk::api_version_minor(api));
        return Err(format!("{name}: its driver has Vulkan {major}.{minor}, and 1.3 is needed"));
    }
    let has = |extension: &CStr| extensions.contains(extension.to_bytes());
    let mut features = vk::PhysicalDeviceFeatures2::default()
        .push_next(&mut answers.features11)
        .push_next(&mut answers.features12)
        .push_next(&mut answers.features13);
    if has(ext::shader_atomic_float::NAME) {
        features = features.push_next(&mut answers.float_atomics);
    }
    // SAFETY: as above; the structures of the chain live in `answers`, are each of a version or an extension that
    // the device has, and are written in place.
    unsafe { instance.raw.get_physical_device_features2(device, &mut features) };
    answers.features = features.features;
    let mut properties = vk::PhysicalDeviceProperties2::default()
        .push_next(&mut answers.properties11)
        .push_next(&mut answers.properties12)
        .push_next(&mut answers.properties13);
    if has(ext::pci_bus_info::NAME) {
        properties = properties.push_next(&mut answers.pci);
    }
    if has(ext::external_memory_host::NAME) {
        properties = properties.push_next(&mut answers.host);
    }
    if has(nv_multiprocessors()) {
        properties = properties.push_next(&mut answers.multiprocessors);
    }
    // SAFETY: as above.
    unsafe { instance.raw.get_physical_device_properties2(device, &mut properties) };
    Ok(answers)
}

/// The family with the most queues that compute, and read the clock best.
#[expect(unsafe_code, reason = "asks the driver")]
fn compute_family(
    instance: &Instance,
    device: vk::PhysicalDevice,
) -> Option<(u32, vk::QueueFamilyProperties)> {
    // SAFETY: the device was enumerated by this instance.
    let families = unsafe { instance.raw.get_physical_device_queue_family_properties(device) };
    (0..)
        .zip(families)
        .filter(|(_, family)| family.queue_flags.contains(vk::QueueFlags::COMPUTE) && family.queue_count > 0)
        .max_by_key(|(index, family)| {
            (family.timestamp_valid_bits, family.queue_count.min(MOST_QUEUES), std::cmp::Reverse(*index))
        })
}

#[expect(unsafe_code, reason = "asks the driver")]
fn memory_of(instance: &Instance, device: vk::PhysicalDevice) -> vk::PhysicalDeviceMemoryProperties {
    // SAFETY: the device was enumerated by this instance.
    unsafe { instance.raw.get_physical_device_memory_properties(device) }
}

/// What all our buffers are for.
pub(crate) fn buffer_usage() -> vk::BufferUsageFlags {
    vk::BufferUsageFlags::STORAGE_BUFFER
        | vk::BufferUsageFlags::TRANSFER_SRC
        | vk::BufferUsageFlags::TRANSFER_DST
}

/// Whether memory of our buffers can be had from handles of this kind, and be exported as such if `both`.
#[expect(unsafe_code, reason = "asks the driver")]
fn passes(
    instance: &Instance,
    device: vk::PhysicalDevice,
    handle: vk::ExternalMemoryHandleTypeFlags,
    both: bool,
) -> bool {
    let info = vk::PhysicalDeviceExternalBufferInfo::default().usage(buffer_usage()).handle_type(handle);
    let mut answer = vk::ExternalBufferProperties::default();
    // SAFETY: the device was enumerated by this instance; the answer is written to this stack frame.
    unsafe { instance.raw.get_physical_device_external_buffer_properties(device, &info, &mut answer) };
    let features = answer.external_memory_properties.external_memory_features;
    let wanted = match both {
        true => vk::ExternalMemoryFeatureFlags::IMPORTABLE | vk::ExternalMemoryFeatureFlags::EXPORTABLE,
        false => vk::ExternalMemoryFeatureFlags::IMPORTABLE,
    };
    features.contains(wanted)
}
