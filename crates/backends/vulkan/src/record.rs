//! Command buffers, with everything that the commands in them need: sets of descriptors and queries.

use std::{fmt, sync::Arc};

use ash::vk;
use smallvec::SmallVec;
use warpweft_core_types::DriverError;

use crate::{gpu::Gpu, instance::failed, memory::Span, pipeline::Pipeline};

/// Sets of descriptors of one pool.
const SETS: u32 = 16;

/// Queries of one pool.
const STAMPS: u32 = 64;

/// A command buffer of its own pool. It is recorded by its owner and then left alone until the device is done with it.
pub(crate) struct Recording {
    gpu: Arc<Gpu>,
    pool: vk::CommandPool,
    commands: vk::CommandBuffer,
    level: vk::CommandBufferLevel,
    sets: Vec<Sets>,
    queries: Vec<vk::QueryPool>,
    stamps: u32,
}

/// Sets for so many buffers. They are made once and written again each time: some drivers take long to make one.
#[derive(Debug, Default)]
struct Sets {
    buffers: u32,
    pools: Vec<vk::DescriptorPool>,
    sets: Vec<vk::DescriptorSet>,
    used: usize,
}

/// Stages and accesses of everything that we record.
const STAGES: vk::PipelineStageFlags2 = vk::PipelineStageFlags2::from_raw(
    vk::PipelineStageFlags2::COMPUTE_SHADER.as_raw() | vk::PipelineStageFlags2::ALL_TRANSFER.as_raw(),
);
const WRITES: vk::AccessFlags2 = vk::AccessFlags2::from_raw(
    vk::AccessFlags2::SHADER_WRITE.as_raw() | vk::AccessFlags2::TRANSFER_WRITE.as_raw(),
);
const READS: vk::AccessFlags2 = vk::AccessFlags2::from_raw(
    vk::AccessFlags2::SHADER_READ.as_raw() | vk::AccessFlags2::TRANSFER_READ.as_raw(),
);

impl Recording {
    /// One that is submitted.
    pub(crate) fn primary(gpu: &Arc<Gpu>) -> Result<Self, DriverError> {
        Self::create(gpu, vk::CommandBufferLevel::PRIMARY)
    }

    /// One that others execute, as often as they like.
    pub(crate) fn secondary(gpu: &Arc<Gpu>) -> Result<Self, DriverError> {
        Self::create(gpu, vk::CommandBufferLevel::SECONDARY)
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn create(gpu: &Arc<Gpu>, level: vk::CommandBufferLevel) -> Result<Self, DriverError> {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(gpu.physical.queue_family);
        // SAFETY: the device is live and has queues of the family.
        let pool = unsafe { gpu.raw.create_command_pool(&info, None) };
        // From here on, dropping the recording destroys the pool.
        let mut recording = Self {
            gpu: Arc::clone(gpu),
            pool: pool.map_err(failed("vkCreateCommandPool"))?,
            commands: vk::CommandBuffer::null(),
            level,
            sets: Vec::new(),
            queries: Vec::new(),
            stamps: 0,
        };
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(recording.pool)
            .level(level)
            .command_buffer_count(1);
        // SAFETY: the pool is live and this recording's alone.
        let commands = unsafe { gpu.raw.allocate_command_buffers(&info) };
        recording.commands =
            commands.map_err(failed("vkAllocateCommandBuffers"))?.first().copied().unwrap_or_default();
        Ok(recording)
    }

    pub(crate) const fn commands(&self) -> vk::CommandBuffer {
        self.commands
    }

    /// Begins anew.
    ///
    /// # Safety
    ///
    /// - Nothing that was submitted of it is under way.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn begin(&mut self) -> Result<(), DriverError> {
        let device = &self.gpu.raw;
        // SAFETY: the pool is this recording's alone, and nothing of it is under way by the caller's word.
        unsafe { device.reset_command_pool(self.pool, vk::CommandPoolResetFlags::empty()) }
            .map_err(failed("vkResetCommandPool"))?;
        self.sets.iter_mut().for_each(|sets| sets.used = 0);
        self.stamps = 0;
        let inheritance = vk::CommandBufferInheritanceInfo::default();
        let info = vk::CommandBufferBeginInfo::default().inheritance_info(&inheritance);
        let info = match self.level {
            // What runs one after the other may still be pending in two submissions.
            vk::CommandBufferLevel::SECONDARY => info.flags(vk::CommandBufferUsageFlags::SIMULTANEOUS_USE),
            _ => info,
        };
        // SAFETY: the buffer was reset with its pool just now.
        unsafe { device.begin_command_buffer(self.commands, &info) }.map_err(failed("vkBeginCommandBuffer"))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) fn end(&mut self) -> Result<(), DriverError> {
        // SAFETY: the buffer is being recorded.
        unsafe { self.gpu.raw.end_command_buffer(self.commands) }.map_err(failed("vkEndCommandBuffer"))
    }

    /// What is recorded from here on sees what was recorded or submitted to the queue before.
    pub(crate) fn barrier(&mut self) {
        self.order(vk::MemoryBarrier2 {
            src_stage_mask: STAGES,
            src_access_mask: WRITES,
            dst_stage_mask: STAGES,
            dst_access_mask: READS | WRITES,
            ..Default::default()
        });
    }

    /// The host sees what was recorded, once the submission is over.
    pub(crate) fn show_host(&mut self) {
        self.order(vk::MemoryBarrier2 {
            src_stage_mask: STAGES,
            src_access_mask: WRITES,
            dst_stage_mask: vk::PipelineStageFlags2::HOST,
            dst_access_mask: vk::AccessFlags2::HOST_READ | vk::AccessFlags2::HOST_WRITE,
            ..Default::default()
        });
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn order(&mut self, barrier: vk::MemoryBarrier2<'_>) {
        let barriers = [barrier];
        let info = vk::DependencyInfo::default().memory_barriers(&barriers);
        // SAFETY: the buffer is being recorded; the device has the feature.
        unsafe { self.gpu.raw.cmd_pipeline_barrier2(self.commands, &info) };
    }

    /// Copies between ranges of one length that share no bytes.
    ///
    /// # Safety
    ///
    /// - The ranges lie within live buffers of this device.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn copy(&mut self, from: Span, to: Span) {
        let region =
            vk::BufferCopy { src_offset: from.offset, dst_offset: to.offset, size: from.size.min(to.size) };
        // SAFETY: the region is the ranges of which the caller vouches.
        unsafe { self.copy_regions(from.buffer, to.buffer, &[region]) };
    }

    /// Copies several ranges.
    ///
    /// # Safety
    ///
    /// - The buffers are of this device and live, and each region lies within both.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn copy_regions(
        &mut self,
        from: vk::Buffer,
        to: vk::Buffer,
        regions: &[vk::BufferCopy],
    ) {
        // SAFETY: the commands are being recorded by their only owner; the caller vouches for the regions. That the
        // buffers outlive the work is the word of whoever submits (`Gpu::submit`), here and below.
        unsafe { self.gpu.raw.cmd_copy_buffer(self.commands, from, to, regions) };
    }

    /// Fills words.
    ///
    /// # Safety
    ///
    /// - The buffer is of this device and live.
    /// - Place and size are multiples of four, the size is not zero, and the range lies within the buffer.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn fill_words(&mut self, buffer: vk::Buffer, offset: u64, size: u64, word: u32) {
        // SAFETY: the commands are being recorded; the caller vouches for the range.
        unsafe { self.gpu.raw.cmd_fill_buffer(self.commands, buffer, offset, size, word) };
    }

    /// Writes the device's time, once everything before is over.
    ///
    /// # Safety
    ///
    /// - The place is a multiple of eight, with eight bytes behind it in a live buffer of this device.
    /// - The family's clock has 64 bits (`Capabilities::timestamps`).
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn stamp(&mut self, to: Span) -> Result<(), DriverError> {
        let (pool, index) = self.next_query()?;
        let (device, commands) = (&self.gpu.raw, self.commands);
        let stage = vk::PipelineStageFlags2::ALL_COMMANDS;
        // SAFETY: the query is this recording's and used once in it.
        unsafe { device.cmd_reset_query_pool(commands, pool, index, 1) };
        // SAFETY: it was reset just now; the family has a clock by the caller's word.
        unsafe { device.cmd_write_timestamp2(commands, stage, pool, index) };
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: the caller vouches for the eight bytes.
        unsafe {
            device.cmd_copy_query_pool_results(commands, pool, index, 1, to.buffer, to.offset, 8, flags);
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn next_query(&mut self) -> Result<(vk::QueryPool, u32), DriverError> {
        let (pool, index) = ((self.stamps / STAMPS) as usize, self.stamps % STAMPS);
        if pool == self.queries.len() {
            let info =
                vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(STAMPS);
            // SAFETY: the device is live.
            let created = unsafe { self.gpu.raw.create_query_pool(&info, None) };
            self.queries.push(created.map_err(failed("vkCreateQueryPool"))?);
        }
        self.stamps += 1;
        Ok((self.queries[pool], index))
    }

    /// Runs a kernel.
    ///
    /// # Safety
    ///
    /// - The pipeline is of this device, and was made for as many buffers and bytes of scalars; it is given a slice if
    ///   it takes one.
    /// - The ranges lie within live buffers of this device, start where it binds them and are no larger than it binds.
    /// - The grid is within the device's limits, and the kernel may be run with these arguments.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn dispatch(
        &mut self,
        pipeline: &Pipeline,
        buffers: &[Span],
        slice: Option<Span>,
        scalars: &[u8],
        workgroups: [u32; 3],
    ) -> Result<(), DriverError> {
        // An empty set is not bound: the kernel looks at nothing of it.
        let first = u32::from(buffers.is_empty());
        let mut sets: SmallVec<[vk::DescriptorSet; 2]> = SmallVec::new();
        if !buffers.is_empty() {
            // SAFETY: the caller vouches for the ranges.
            sets.push(unsafe { self.set(buffers) }?);
        }
        if let Some(slice) = slice.filter(|_| pipeline.takes_slice()) {
            // SAFETY: as above.
            sets.push(unsafe { self.set(&[slice]) }?);
        }
        let (device, commands, layout) = (&self.gpu.raw, self.commands, pipeline.layout());
        let point = vk::PipelineBindPoint::COMPUTE;
        // SAFETY: the commands are being recorded; the pipeline is live, since it is borrowed, and of this device.
        unsafe { device.cmd_bind_pipeline(commands, point, pipeline.raw()) };
        if !sets.is_empty() {
            // SAFETY: the sets were allocated with the layouts that the pipeline's was made of.
            unsafe { device.cmd_bind_descriptor_sets(commands, point, layout, first, &sets, &[]) };
        }
        if !scalars.is_empty() {
            let stage = vk::ShaderStageFlags::COMPUTE;
            // SAFETY: the layout has a range of as many bytes from 0 on, by the caller's word.
            unsafe { device.cmd_push_constants(commands, layout, stage, 0, scalars) };
        }
        let [x, y, z] = workgroups;
        // SAFETY: everything that the pipeline uses was bound above; the caller vouches for the grid.
        unsafe { device.cmd_dispatch(commands, x, y, z) };
        Ok(())
    }

    /// Executes what a secondary recording holds.
    ///
    /// # Safety
    ///
    /// - The other is a secondary of this device that was recorded to its end.
    #[expect(unsafe_code, reason = "calls the driver")]
    pub(crate) unsafe fn execute(&mut self, other: &Self) {
        // SAFETY: the commands are being recorded; the caller vouches for the other, which was begun such that it may
        // be pending several times (`begin`).
        unsafe { self.gpu.raw.cmd_execute_commands(self.commands, &[other.commands]) };
    }

    /// A set of descriptors for these buffers.
    ///
    /// # Safety
    ///
    /// - As for the buffers of `dispatch`.
    #[expect(unsafe_code, reason = "calls the driver")]
    unsafe fn set(&mut self, buffers: &[Span]) -> Result<vk::DescriptorSet, DriverError> {
        let set = self.next_set(u32::try_from(buffers.len()).unwrap_or(u32::MAX))?;
        let infos: SmallVec<[[vk::DescriptorBufferInfo; 1]; 8]> = buffers
            .iter()
            .map(|span| {
                [vk::DescriptorBufferInfo { buffer: span.buffer, offset: span.offset, range: span.size }]
            })
            .collect();
        let writes: SmallVec<[vk::WriteDescriptorSet<'_>; 8]> = infos
            .iter()
            .zip(0..)
            .map(|(info, binding)| {
                vk::WriteDescriptorSet::default()
                    .dst_set(set)
                    .dst_binding(binding)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .buffer_info(info)
            })
            .collect();
        // SAFETY: the set is this recording's, of which nothing is under way (`begin`), and no command of it uses the
        // set yet (`next_set`); the caller vouches for the ranges.
        unsafe { self.gpu.raw.update_descriptor_sets(&writes, &[]) };
        Ok(set)
    }

    /// A set for so many buffers that is not used in this recording yet.
    fn next_set(&mut self, buffers: u32) -> Result<vk::DescriptorSet, DriverError> {
        let known = self.sets.iter().position(|sets| sets.buffers == buffers);
        let position = known.unwrap_or(self.sets.len());
        if known.is_none() {
            self.sets.push(Sets { buffers, ..Sets::default() });
        }
        let sets = &mut self.sets[position];
        if sets.used == sets.sets.len() {
            sets.grow(&self.gpu)?;
        }
        sets.used += 1;
        Ok(sets.sets[sets.used - 1])
    }
}

impl Sets {
    /// Makes a pool of more sets.
    #[expect(unsafe_code, reason = "calls the driver")]
    fn grow(&mut self, gpu: &Gpu) -> Result<(), DriverError> {
        let sizes = [vk::DescriptorPoolSize {
            ty: vk::DescriptorType::STORAGE_BUFFER,
            descriptor_count: SETS * self.buffers,
        }];
        let info = vk::DescriptorPoolCreateInfo::default().max_sets(SETS).pool_sizes(&sizes);
        // SAFETY: the device is live.
        let pool = unsafe { gpu.raw.create_descriptor_pool(&info, None) };
        let pool = pool.map_err(failed("vkCreateDescriptorPool"))?;
        self.pools.push(pool);
        let layouts = [gpu.set_layout(self.buffers)?; SETS as usize];
        let info = vk::DescriptorSetAllocateInfo::default().descriptor_pool(pool).set_layouts(&layouts);
        // SAFETY: the pool is new and has room for as many sets of this layout, which lives as long as the device.
        let sets = unsafe { gpu.raw.allocate_descriptor_sets(&info) };
        self.sets.extend(sets.map_err(failed("vkAllocateDescriptorSets"))?);
        Ok(())
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Recording({})", self.gpu.id)
    }
}

impl Drop for Recording {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let device = &self.gpu.raw;
        // SAFETY: whoever submits a recording holds it until the work is over; the pools are its alone.
        unsafe { device.destroy_command_pool(self.pool, None) };
        for pool in self.sets.iter().flat_map(|sets| &sets.pools) {
            // SAFETY: as above.
            unsafe { device.destroy_descriptor_pool(*pool, None) };
        }
        for pool in &self.queries {
            // SAFETY: as above.
            unsafe { device.destroy_query_pool(*pool, None) };
        }
    }
}
