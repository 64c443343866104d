//! A `VkDevice` with its queues, and what a failed call means for it.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

#[cfg(unix)]
use ash::khr;
use ash::{ext, vk};
use smallvec::SmallVec;
use warpweft_core_types::{DeviceId, DriverError, Failure, OpenError};

use crate::{
    block::Imports,
    capability::{Capabilities, Physical},
    chores::Chores,
    gate::Gate,
    instance::{Instance, failed},
    queue::Queues,
    timeline::Ticket,
};

/// An open device of the driver's. Everything made of it holds it.
pub(crate) struct Gpu {
    pub(crate) raw: ash::Device,
    pub(crate) id: DeviceId,
    pub(crate) physical: Physical,
    #[cfg(unix)]
    pub(crate) by_descriptor: Option<khr::external_memory_fd::Device>,
    pub(crate) by_pointer: Option<ext::external_memory_host::Device>,
    pub(crate) calibrated: Option<ext::calibrated_timestamps::Device>,
    pub(crate) pipelines: vk::PipelineCache,
    /// Layouts of sets of buffers, by how many buffers they have. They live as long as the device, so that sets made
    /// with them can be written again whatever became of their kernel.
    set_layouts: Mutex<BTreeMap<u32, vk::DescriptorSetLayout>>,
    /// The driver takes one submission at a time for each.
    queues: Vec<Mutex<vk::Queue>>,
    next_queue: AtomicUsize,
    /// Calls that may wait for what runs.
    pub(crate) gate: Gate,
    pub(crate) chores: Chores,
    /// Host memory that this device uses.
    pub(crate) imports: Imports,
    /// Queues of the program that may hold work.
    pub(crate) holders: Arc<Queues>,
    failure: OnceLock<Arc<Failure>>,
    /// After the device, which is the instance's.
    pub(crate) instance: Arc<Instance>,
}

impl Gpu {
    #[expect(unsafe_code, reason = "creates the device")]
    pub(crate) fn create(
        instance: &Arc<Instance>,
        physical: &Physical,
        id: DeviceId,
    ) -> Result<Arc<Self>, OpenError> {
        let capabilities = &physical.capabilities;
        let chores = Chores::start(id)
            .map_err(|error| OpenError::NoThread { what: id.to_string(), reason: error.to_string() })?;
        let priorities = vec![1.0; capabilities.queues as usize];
        let queue_info = [vk::DeviceQueueCreateInfo::default()
            .queue_family_index(physical.queue_family)
            .queue_priorities(&priorities)];
        let extensions: Vec<_> = physical.used_extensions().into_iter().map(std::ffi::CStr::as_ptr).collect();
        let mut enabled = Enabled::of(capabilities);
        let mut features = vk::PhysicalDeviceFeatures2::default()
            .features(enabled.features)
            .push_next(&mut enabled.features11)
            .push_next(&mut enabled.features12)
            .push_next(&mut enabled.features13);
        if capabilities.float32_atomics {
            features = features.push_next(&mut enabled.float_atomics);
        }
        let info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queue_info)
            .enabled_extension_names(&extensions)
            .push_next(&mut features);
        // SAFETY: the device was enumerated by this instance, which has what is enabled (`Physical::ask`); what
        // `info` points to lives until the call returns.
        let raw = unsafe { instance.raw.create_device(physical.raw, &info, None) };
        let raw = raw.map_err(failed("vkCreateDevice")).map_err(|error| not_opened(id, error))?;
        let queues = (0..capabilities.queues)
            .map(|index| {
                // SAFETY: as many queues of the family were created with the device.
                Mutex::new(unsafe { raw.get_device_queue(physical.queue_family, index) })
            })
            .collect();
        let entry = &instance.raw;
        let mut gpu = Self {
            id,
            #[cfg(unix)]
            by_descriptor: capabilities.opaque_fd.then(|| khr::external_memory_fd::Device::new(entry, &raw)),
            by_pointer: capabilities.host_import.map(|_| ext::external_memory_host::Device::new(entry, &raw)),
            calibrated: capabilities
                .calibrated_timestamps
                .then(|| ext::calibrated_timestamps::Device::new(entry, &raw)),
            pipelines: vk::PipelineCache::null(),
            set_layouts: Mutex::default(),
            queues,
            next_queue: AtomicUsize::new(0),
            gate: Gate::default(),
            chores,
            imports: Imports::default(),
            holders: Arc::default(),
            failure: OnceLock::new(),
            physical: physical.clone(),
            instance: Arc::clone(instance),
            raw,
        };
        let cache = vk::PipelineCacheCreateInfo::default();
        // SAFETY: the device is live.
        let cache = unsafe { gpu.raw.create_pipeline_cache(&cache, None) };
        gpu.pipelines =
            cache.map_err(failed("vkCreatePipelineCache")).map_err(|error| not_opened(id, error))?;
        Ok(Arc::new(gpu))
    }

    pub(crate) const fn capabilities(&self) -> &Capabilities {
        &self.physical.capabilities
    }

    /// The layout of a set of so many buffers.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn set_layout(&self, buffers: u32) -> Result<vk::DescriptorSetLayout, DriverError> {
        // Nothing but the driver runs under the lock.
        let mut layouts = self.set_layouts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&layout) = layouts.get(&buffers) {
            return Ok(layout);
        }
        let binding = |index| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(index)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        let bindings: SmallVec<[_; 8]> = (0..buffers).map(binding).collect();
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
        // SAFETY: the device is live, and binds as many buffers (`Shader::entry`).
        let layout = unsafe { self.raw.create_descriptor_set_layout(&info, None) };
        let layout = layout.map_err(failed("vkCreateDescriptorSetLayout"))?;
        layouts.insert(buffers, layout);
        Ok(layout)
    }

    /// The queue of the driver's that a new queue of ours uses: by turns.
    pub(crate) fn pick_queue(&self) -> usize {
        // Relaxed: a number that orders nothing.
        self.next_queue.fetch_add(1, Ordering::Relaxed) % self.queues.len()
    }

    /// A queue of the driver's, for this thread alone.
    pub(crate) fn queue(&self, index: usize) -> MutexGuard<'_, vk::Queue> {
        // Nothing but the driver runs under the lock.
        self.queues[index % self.queues.len()].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a recorded command buffer to a queue: it starts when `waits` are reached, and `signal` is reached when
    /// it is over.
    ///
    /// # Safety
    ///
    /// - The command buffer was recorded to its end on this device and is in no other submission under way.
    /// - It lives until the signal is reached, with all that its commands touch and the lines of all tickets.
    /// - The tickets are of lines of this device, and the signal's value is above those that its line was given before.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn submit(
        &self,
        queue: usize,
        commands: Option<vk::CommandBuffer>,
        waits: &[Ticket],
        signal: &Ticket,
    ) -> Result<(), DriverError> {
        if let Some(failure) = self.failure.get() {
            return Err(DriverError { api: "vkQueueSubmit2", code: -4, name: failure.to_string() });
        }
        let point = |ticket: &Ticket| {
            vk::SemaphoreSubmitInfo::default()
                .semaphore(ticket.line().raw())
                .value(ticket.value())
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
        };
        let waits: SmallVec<[vk::SemaphoreSubmitInfo<'_>; 4]> = waits.iter().map(point).collect();
        let signals = [point(signal)];
        let commands: SmallVec<[vk::CommandBufferSubmitInfo<'_>; 1]> = commands
            .into_iter()
            .map(|commands| vk::CommandBufferSubmitInfo::default().command_buffer(commands))
            .collect();
        let submit = [vk::SubmitInfo2::default()
            .wait_semaphore_infos(&waits)
            .command_buffer_infos(&commands)
            .signal_semaphore_infos(&signals)];
        let queue = self.queue(queue);
        // SAFETY: the lock keeps the queue to this thread; the rest is the caller's word.
        unsafe { self.raw.queue_submit2(*queue, &submit, vk::Fence::null()) }
            .map_err(failed("vkQueueSubmit2"))
    }

    /// Why the device is lost, if it is.
    pub(crate) fn failure(&self) -> Option<Arc<Failure>> {
        self.failure.get().cloned()
    }

    /// Takes note of an error; whether the device is lost.
    pub(crate) fn is_lost_by(&self, error: &DriverError) -> bool {
        self.judge(error.clone());
        self.failure().is_some()
    }

    /// What a driver error means for the work that met it. A lost device stays lost.
    pub(crate) fn judge(&self, source: DriverError) -> Arc<Failure> {
        if let Some(failure) = self.failure() {
            return failure;
        }
        let failure = Arc::new(failure_of(self.id, source));
        if !matches!(*failure, Failure::DeviceLost { .. }) {
            return failure;
        }
        let first = self.failure.set(Arc::clone(&failure)).is_ok();
        if first {
            // Elsewhere: whoever met the error may hold the lock of a queue.
            let (holders, failure) = (Arc::clone(&self.holders), Arc::clone(&failure));
            self.chores.give(move || holders.lose(&failure));
        }
        self.failure().unwrap_or(failure)
    }

    /// An error as a failure, or as the driver's if that is all that it is.
    pub(crate) fn sort<E>(
        &self,
        error: DriverError,
        failed: impl FnOnce(Arc<Failure>) -> E,
        driver: impl FnOnce(DriverError) -> E,
    ) -> E {
        let failure = self.judge(error.clone());
        if matches!(*failure, Failure::Driver { .. }) { driver(error) } else { failed(failure) }
    }
}

fn failure_of(device: DeviceId, source: DriverError) -> Failure {
    let is = |result: vk::Result| source.code == i64::from(result.as_raw());
    if is(vk::Result::ERROR_DEVICE_LOST) {
        return Failure::DeviceLost { device, reason: source.to_string() };
    }
    let exhausted = [
        vk::Result::ERROR_OUT_OF_HOST_MEMORY,
        vk::Result::ERROR_OUT_OF_DEVICE_MEMORY,
        vk::Result::ERROR_OUT_OF_POOL_MEMORY,
        vk::Result::ERROR_FRAGMENTED_POOL,
    ];
    if exhausted.into_iter().any(is) {
        return Failure::OutOfMemory { device, source };
    }
    Failure::Driver { device, source }
}

fn not_opened(device: DeviceId, error: DriverError) -> OpenError {
    match failure_of(device, error.clone()) {
        Failure::Driver { .. } => OpenError::Driver(error),
        failure => OpenError::Failed(Arc::new(failure)),
    }
}

/// The features that a device is created with: what its capabilities say.
struct Enabled {
    features: vk::PhysicalDeviceFeatures,
    features11: vk::PhysicalDeviceVulkan11Features<'static>,
    features12: vk::PhysicalDeviceVulkan12Features<'static>,
    features13: vk::PhysicalDeviceVulkan13Features<'static>,
    float_atomics: vk::PhysicalDeviceShaderAtomicFloatFeaturesEXT<'static>,
}

impl Enabled {
    fn of(capabilities: &Capabilities) -> Self {
        let small = capabilities.float16 || capabilities.int16;
        Self {
            features: vk::PhysicalDeviceFeatures::default()
                .shader_int64(capabilities.int64)
                .shader_float64(capabilities.float64)
                .shader_int16(capabilities.int16),
            features11: vk::PhysicalDeviceVulkan11Features::default().storage_buffer16_bit_access(small),
            features12: vk::PhysicalDeviceVulkan12Features::default()
                .timeline_semaphore(true)
                .shader_float16(capabilities.float16)
                .shader_int8(capabilities.int8)
                .storage_buffer8_bit_access(capabilities.int8)
                .shader_buffer_int64_atomics(capabilities.int64_atomics),
            features13: vk::PhysicalDeviceVulkan13Features::default()
                .synchronization2(true)
                .maintenance4(true)
                .shader_zero_initialize_workgroup_memory(true),
            float_atomics: vk::PhysicalDeviceShaderAtomicFloatFeaturesEXT::default()
                .shader_buffer_float32_atomic_add(capabilities.float32_atomics)
                .shader_buffer_float32_atomics(capabilities.float32_atomics),
        }
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({})", self.id)
    }
}

impl Drop for Gpu {
    #[expect(unsafe_code, reason = "destroys the device")]
    fn drop(&mut self) {
        for layout in self.set_layouts.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            // SAFETY: created by `set_layout`, destroyed once; sets and pipelines are gone, since they held the device.
            unsafe { self.raw.destroy_descriptor_set_layout(*layout, None) };
        }
        // SAFETY: the cache is this device's and nobody's else; a null handle is let be.
        unsafe { self.raw.destroy_pipeline_cache(self.pipelines, None) };
        // SAFETY: everything made of the device holds it, so nothing is left and nothing runs: submissions are
        // held by their queues until they are over.
        unsafe { self.raw.destroy_device(None) };
    }
}
