//! A tensor of cudarc's safe layer, for checks of the adapter to it.

use std::sync::Arc;

use anyhow::Result;
use cudarc::{
    driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg as _},
    nvrtc::Ptx,
};
use warpweft_core_types::{Buffer, Device, Queue, QueueDesc};
use warpweft_cuda::adapter;

use crate::kernels;

/// One word on the first device, with a stream and a kernel of cudarc's.
pub(crate) struct Tensor {
    stream: Arc<CudaStream>,
    word: Arc<CudaSlice<u32>>,
    step: CudaFunction,
}

impl Tensor {
    pub(crate) fn new() -> Result<Self> {
        let context = CudaContext::new(0)?;
        let stream = context.new_stream()?;
        let word = Arc::new(stream.alloc_zeros::<u32>(1)?);
        let step = context.load_module(Ptx::from_src(kernels::PTX))?.load_function("step")?;
        Ok(Self { stream, word, step })
    }

    pub(crate) fn import_stream(&self, device: &dyn Device, desc: &QueueDesc) -> Result<Arc<dyn Queue>> {
        Ok(adapter::import_stream(device, &self.stream, desc)?)
    }

    pub(crate) fn import(&self, device: &dyn Device) -> Result<Arc<dyn Buffer>> {
        Ok(adapter::import_slice(device, &self.word)?)
    }

    /// Launches `step` with a 1, as a program of cudarc's does.
    #[expect(unsafe_code, reason = "launches by cudarc are unsafe")]
    pub(crate) fn launch_step(&self) -> Result<()> {
        let config = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        let mut launch = self.stream.launch_builder(&self.step);
        launch.arg(self.word.as_ref()).arg(&1_u32);
        // SAFETY: the kernel has these parameters and touches the one word that the tensor has.
        unsafe { launch.launch(config) }?;
        Ok(())
    }

    /// The word, as cudarc reads it.
    pub(crate) fn read(&self) -> Result<u32> {
        Ok(self.stream.clone_dtoh(self.word.as_ref())?.first().copied().unwrap_or_default())
    }
}
