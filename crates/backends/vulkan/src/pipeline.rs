//! Pipelines: kernels as the driver has compiled them.

use std::{ffi::CString, fmt, sync::Arc};

use ash::vk;
use smallvec::SmallVec;
use warpweft_core_types::{Arg, DriverError};

use crate::{
    gpu::Gpu,
    instance::failed,
    shader::{Entry, ScalarPlace},
};

/// A compiled kernel and the layout of its arguments.
pub(crate) struct Pipeline {
    gpu: Arc<Gpu>,
    raw: vk::Pipeline,
    layout: vk::PipelineLayout,
    takes_slice: bool,
    scalars: Vec<ScalarPlace>,
    scalar_bytes: u32,
}

/// The bytes of a launch's scalars as the kernel finds them.
pub(crate) type Scalars = SmallVec<[u8; 64]>;

impl Pipeline {
    /// Compiles, on this thread: some drivers wait here for work of the device that is under way (`Gate::pass`).
    pub(crate) fn create(
        gpu: &Arc<Gpu>,
        name: &str,
        entry: &Entry,
        buffers: u32,
    ) -> Result<Arc<Self>, DriverError> {
        // Dropping it destroys what was made so far; the driver lets null handles be.
        let mut pipeline = Self {
            gpu: Arc::clone(gpu),
            raw: vk::Pipeline::null(),
            layout: vk::PipelineLayout::null(),
            takes_slice: entry.takes_slice,
            scalars: entry.scalars.clone(),
            scalar_bytes: entry.scalar_bytes,
        };
        pipeline.layout = pipeline.make_layout(buffers)?;
        pipeline.raw = pipeline.compile(name, &entry.words)?;
        Ok(Arc::new(pipeline))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn make_layout(&self, buffers: u32) -> Result<vk::PipelineLayout, DriverError> {
        let sets = [self.gpu.set_layout(buffers)?, self.gpu.set_layout(1)?];
        let sets = if self.takes_slice { &sets[..] } else { &sets[..1] };
        let ranges = [vk::PushConstantRange {
            stage_flags: vk::ShaderStageFlags::COMPUTE,
            offset: 0,
            size: self.scalar_bytes,
        }];
        let mut info = vk::PipelineLayoutCreateInfo::default().set_layouts(sets);
        if self.scalar_bytes > 0 {
            info = info.push_constant_ranges(&ranges);
        }
        // SAFETY: the set layouts are live; the range is within the device's limit (`Shader::entry`).
        let layout = unsafe { self.gpu.raw.create_pipeline_layout(&info, None) };
        layout.map_err(failed("vkCreatePipelineLayout"))
    }

    #[expect(unsafe_code, reason = "calls the driver")]
    fn compile(&self, name: &str, words: &[u32]) -> Result<vk::Pipeline, DriverError> {
        let api = "vkCreateComputePipelines";
        let device = &self.gpu.raw;
        // A name with a zero in it is no entry point of any module.
        let name = CString::new(name).map_err(|_| failed(api)(vk::Result::ERROR_UNKNOWN))?;
        let info = vk::ShaderModuleCreateInfo::default().code(words);
        // SAFETY: the words were written by naga for what this device can do.
        let module = unsafe { device.create_shader_module(&info, None) };
        let module = module.map_err(failed("vkCreateShaderModule"))?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(&name);
        let infos = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.layout)];
        // SAFETY: the module has the entry point, and uses what the layout has (`Shader::entry` compared them).
        let created = unsafe { device.create_compute_pipelines(self.gpu.pipelines, &infos, None) };
        // SAFETY: created just now; the pipeline does not need it any more.
        unsafe { device.destroy_shader_module(module, None) };
        match created {
            Ok(pipelines) => Ok(pipelines.first().copied().unwrap_or_default()),
            Err((_, error)) => Err(failed(api)(error)),
        }
    }

    pub(crate) const fn raw(&self) -> vk::Pipeline {
        self.raw
    }

    pub(crate) const fn layout(&self) -> vk::PipelineLayout {
        self.layout
    }

    /// Whether the kernel is given the words of a slice, as a second set.
    pub(crate) const fn takes_slice(&self) -> bool {
        self.takes_slice
    }

    /// The values among a launch's arguments, each in its place.
    pub(crate) fn scalars(&self, args: &[Arg<'_>]) -> Scalars {
        let mut bytes = Scalars::from_elem(0, self.scalar_bytes as usize);
        let values = args.iter().filter_map(|arg| match arg {
            Arg::Scalar(value) => Some(value),
            Arg::Buffer(_) => None,
        });
        for (place, value) in self.scalars.iter().zip(values) {
            let start = place.offset as usize;
            if let Some(target) = bytes.get_mut(start..start + value.len()) {
                target.copy_from_slice(value);
            }
        }
        bytes
    }

    /// Scalars that are all zero.
    pub(crate) fn no_scalars(&self) -> Scalars {
        Scalars::from_elem(0, self.scalar_bytes as usize)
    }
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pipeline({})", self.gpu.id)
    }
}

impl Drop for Pipeline {
    #[expect(unsafe_code, reason = "calls the driver")]
    fn drop(&mut self) {
        let (gpu, raw, layout) = (Arc::clone(&self.gpu), self.raw, self.layout);
        // Some drivers wait here for work that is under way, as in `create`, and whoever drops this may not.
        self.gpu.chores.give(move || {
            let _way = gpu.gate.open();
            // SAFETY: created by `create`, destroyed once, here; submissions held the pipeline until they were over.
            unsafe { gpu.raw.destroy_pipeline(raw, None) };
            // SAFETY: as above.
            unsafe { gpu.raw.destroy_pipeline_layout(layout, None) };
        });
    }
}
