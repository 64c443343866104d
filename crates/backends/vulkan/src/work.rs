//! How operations are checked and recorded.

use std::sync::{Arc, Mutex};

use ash::vk;
use smallvec::SmallVec;
use warpweft_core_types::{
    Access, AllocError, Arg, Buffer as _, BufferDesc, BufferView, DeviceId, DriverError, FillRegion, Launch,
    Op, SubmitError,
};

use crate::{
    gpu::Gpu,
    graph::VulkanGraph,
    instance::failed,
    memory::{Arena, Span, VulkanBuffer, span_of},
    module::VulkanKernel,
    record::Recording,
};

/// Words of the palette: one for each byte, four times that byte.
const COLOURS: u64 = 256;

/// What a device's work is checked against and recorded with.
#[derive(Debug)]
pub(crate) struct Tools {
    pub(crate) gpu: Arc<Gpu>,
    /// Devices whose memory this one reaches, by their ids.
    pub(crate) within_reach: Vec<DeviceId>,
    /// Every byte there is: the driver fills whole words alone, and single bytes are copied from here.
    palette: VulkanBuffer,
    /// Held by whoever submits a replay, so that replays of a graph follow each other.
    pub(crate) replays: Mutex<()>,
}

impl Tools {
    pub(crate) fn create(
        gpu: &Arc<Gpu>,
        arena: &Arena,
        within_reach: Vec<DeviceId>,
    ) -> Result<Arc<Self>, AllocError> {
        let palette = arena.allocate(&BufferDesc::host_visible(COLOURS * 4))?;
        let words: Vec<u8> = (0..=u8::MAX).flat_map(|byte| [byte; 4]).collect();
        if let Some(mapping) = palette.mapping() {
            // The mapping is as long as the words.
            let _written = mapping.write(0, &words);
        }
        Ok(Arc::new(Self { gpu: Arc::clone(gpu), within_reach, palette, replays: Mutex::default() }))
    }

    /// Checks that a queue can carry out an operation.
    pub(crate) fn check(&self, op: &Op<'_>) -> Result<(), SubmitError> {
        let device = self.gpu.id;
        match op {
            Op::Launch(launch) if launch.kernel().contract().resident => {
                return Err(SubmitError::Sliced { kernel: launch.kernel().contract().name.clone() });
            }
            Op::Launch(launch) => return self.check_launch(launch),
            Op::Replay(graph) => {
                let ours = VulkanGraph::of(graph).is_some_and(|graph| graph.is_of(&self.gpu));
                let owner = graph.graph().device();
                // Its nodes were checked when they were set.
                return ours.then_some(()).ok_or(SubmitError::Foreign { what: "graph", owner, device });
            }
            Op::Timestamp(_) if !self.gpu.capabilities().timestamps => {
                return Err(SubmitError::Unsupported { device, what: op.name() });
            }
            Op::Copy(_) | Op::Fill(_) | Op::Timestamp(_) => {}
            _ => return Err(SubmitError::Unsupported { device, what: op.name() }),
        }
        let mut result = Ok(());
        op.for_each_access(|view, access| {
            if result.is_ok() {
                result = self.check_view(view, access);
            }
        });
        result
    }

    /// Checks that a launch's kernel and operands are of Vulkan devices, within reach of this one, and can be bound.
    pub(crate) fn check_launch(&self, launch: &Launch<'_>) -> Result<(), SubmitError> {
        let (kernel, device) = (launch.kernel(), self.gpu.id);
        if !VulkanKernel::of(kernel).is_some_and(|kernel| kernel.is_of(&self.gpu)) {
            return Err(SubmitError::Foreign { what: "kernel", owner: kernel.device(), device });
        }
        launch.buffers().zip(0_usize..).try_for_each(|((view, access), index)| {
            self.check_view(view, access)?;
            self.check_binding(view, index, &kernel.contract().name)
        })
    }

    /// What the driver allows of a buffer that a kernel is given.
    fn check_binding(&self, view: &BufferView, buffer: usize, kernel: &str) -> Result<(), SubmitError> {
        let (device, capabilities) = (self.gpu.id, self.gpu.capabilities());
        let (size_bytes, limit_bytes) = (view.size(), capabilities.binding_bytes);
        if size_bytes > limit_bytes {
            let kernel = kernel.to_owned();
            return Err(SubmitError::BindingTooLarge { device, kernel, buffer, size_bytes, limit_bytes });
        }
        let start = VulkanBuffer::of(view).map_or(0, VulkanBuffer::start) + view.offset();
        let multiple_bytes = capabilities.binding_alignment;
        if !start.is_multiple_of(multiple_bytes) {
            let (kernel, offset) = (kernel.to_owned(), view.offset());
            return Err(SubmitError::BindingMisaligned { device, kernel, buffer, offset, multiple_bytes });
        }
        Ok(())
    }

    fn check_view(&self, view: &BufferView, access: Access) -> Result<(), SubmitError> {
        let (owner, device) = (view.device(), self.gpu.id);
        let Some(buffer) = VulkanBuffer::of(view) else {
            return Err(SubmitError::Foreign { what: "buffer", owner, device });
        };
        if buffer.is_of(&self.gpu) {
            return Ok(());
        }
        // Memory of another backend value is nothing to this one, even where its devices have the same ids.
        if !Arc::ptr_eq(&buffer.gpu().instance, &self.gpu.instance) {
            return Err(SubmitError::Foreign { what: "buffer", owner, device });
        }
        if self.within_reach.contains(&owner) {
            // What was imported there by descriptor is not handed on.
            let passes = buffer.can_be_passed_on();
            return passes.then_some(()).ok_or(SubmitError::Foreign { what: "buffer", owner, device });
        }
        if owner == device {
            return Err(SubmitError::Foreign { what: "buffer", owner, device });
        }
        match access {
            Access::Read => Err(SubmitError::NoLink { from: owner, to: device }),
            Access::Write | Access::ReadWrite | Access::Accumulate => {
                Err(SubmitError::NoLink { from: device, to: owner })
            }
        }
    }

    /// Records one operation. Replays are the queue's own.
    ///
    /// # Safety
    ///
    /// - `check` took the operation.
    #[expect(unsafe_code, reason = "records commands for memory that operations name")]
    pub(crate) unsafe fn record(&self, op: &Op<'_>, recording: &mut Recording) -> Result<(), DriverError> {
        match op {
            Op::Copy(region) => {
                let (from, to) = (self.span(region.src())?, self.span(region.dst())?);
                // SAFETY: `span_of` made them of views, which lie within their buffers and hold them.
                unsafe { recording.copy(from, to) };
                Ok(())
            }
            Op::Fill(region) => self.fill(region, recording),
            // SAFETY: `check` is `check_launch` for launches.
            Op::Launch(launch) => unsafe { self.launch(launch, None, recording) },
            Op::Timestamp(region) => {
                let to = self.span(region.dst())?;
                // SAFETY: eight bytes at a multiple of eight of the buffer (`TimestampRegion`), which starts at one
                // (`ALIGNMENT`); `check` saw that there is a clock.
                unsafe { recording.stamp(to) }
            }
            _ => Err(failed("vkCmdExecuteCommands")(vk::Result::ERROR_FEATURE_NOT_PRESENT)),
        }
    }

    /// Records a launch; a resident's is given the words of its slice.
    ///
    /// # Safety
    ///
    /// - `check_launch` took the launch.
    /// - The slice lies within a live buffer of this device and has a word for each workgroup; a kernel that is resident
    ///   is given one.
    #[expect(unsafe_code, reason = "records commands for memory that operations name")]
    pub(crate) unsafe fn launch(
        &self,
        launch: &Launch<'_>,
        slice: Option<Span>,
        recording: &mut Recording,
    ) -> Result<(), DriverError> {
        let stranger = || failed("vkCmdBindPipeline")(vk::Result::ERROR_UNKNOWN);
        let kernel = VulkanKernel::of(launch.kernel()).ok_or_else(stranger)?;
        let mut buffers: SmallVec<[Span; 8]> = SmallVec::new();
        for arg in launch.args() {
            if let Arg::Buffer(view) = arg {
                buffers.push(self.span(view)?);
            }
        }
        let scalars = kernel.pipeline.scalars(launch.args());
        // SAFETY: the kernel is of this device, and takes as many buffers and scalars as the launch has by its
        // contract; `check_launch` saw that the ranges can be bound; `Launch` holds the grid to the kernel's limits.
        // Whoever added the code vouched for it.
        unsafe { recording.dispatch(&kernel.pipeline, &buffers, slice, &scalars, launch.workgroups()) }
    }

    fn span(&self, view: &BufferView) -> Result<Span, DriverError> {
        span_of(view, &self.gpu)
    }

    /// Fills whole words where there are some, and copies the bytes before and after them.
    #[expect(unsafe_code, reason = "records commands for memory that operations name")]
    fn fill(&self, region: &FillRegion<'_>, recording: &mut Recording) -> Result<(), DriverError> {
        let to = self.span(region.dst())?;
        let fill = Fill::of(to.offset, to.size, region.pattern());
        if fill.words > 0 {
            // SAFETY: whole words of the view (`Fill`), which lies within its buffer and holds it.
            unsafe { recording.fill_words(to.buffer, fill.start, fill.words, fill.word) };
        }
        let palette = self.palette.span();
        let bytes: SmallVec<[vk::BufferCopy; 6]> = fill
            .bytes
            .iter()
            .map(|&(at, byte)| vk::BufferCopy {
                src_offset: palette.offset + u64::from(byte) * 4,
                dst_offset: at,
                size: 1,
            })
            .collect();
        if !bytes.is_empty() {
            // SAFETY: single bytes of the view, and of the palette, which has a word for each value and lives as long
            // as the device.
            unsafe { recording.copy_regions(palette.buffer, to.buffer, &bytes) };
        }
        Ok(())
    }
}

/// A fill as the driver can do it.
#[derive(Debug, PartialEq, Eq)]
struct Fill {
    /// Where whole words begin, at a multiple of four, and how many bytes they are.
    start: u64,
    words: u64,
    word: u32,
    /// Single bytes and their places.
    bytes: SmallVec<[(u64, u8); 6]>,
}

impl Fill {
    fn of(offset: u64, size: u64, pattern: u32) -> Self {
        let end = offset + size;
        let start = offset.next_multiple_of(4).min(end);
        let words = (end - start) / 4 * 4;
        let pattern = pattern.to_ne_bytes();
        // The pattern starts with the range, not with the word.
        let byte_at = |at: u64| pattern[((at - offset) % 4) as usize];
        let outside = (offset..start).chain(start + words..end);
        Self {
            start,
            words,
            word: u32::from_ne_bytes([0, 1, 2, 3].map(|step| byte_at(start + step))),
            bytes: outside.map(|at| (at, byte_at(at))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the bytes from `offset` on would hold.
    fn carried_out(fill: &Fill, offset: u64, size: usize) -> Vec<Option<u8>> {
        let mut bytes = vec![None; size];
        let mut put = |at: u64, byte| bytes[usize::try_from(at - offset).unwrap()] = Some(byte);
        (0..fill.words).for_each(|at| put(fill.start + at, fill.word.to_ne_bytes()[(at % 4) as usize]));
        fill.bytes.iter().for_each(|&(at, byte)| put(at, byte));
        bytes
    }

    #[test]
    fn every_byte_is_filled_with_its_part_of_the_pattern() {
        for offset in 0..9_u64 {
            for size in 1..20_usize {
                let fill = Fill::of(offset, size as u64, u32::from_ne_bytes([1, 2, 3, 4]));
                assert!(fill.start.is_multiple_of(4) || fill.words == 0, "{fill:?}");
                let expected: Vec<_> = [1, 2, 3, 4].into_iter().cycle().take(size).map(Some).collect();
                assert_eq!(carried_out(&fill, offset, size), expected, "{offset} {size}");
            }
        }
    }
}
