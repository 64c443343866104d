//! Which libraries the backend uses.

use std::path::PathBuf;

/// The vendor's libraries by file, for machines that keep them where nobody looks. One that is named is the
/// only candidate; one that is not is looked for.
///
/// ```
/// use warpweft_cuda::{CudaBackend, CudaConfig};
///
/// let config = CudaConfig::default().with_driver("no-such-folder/libcuda.so.1");
/// let error = CudaBackend::with_config(&config).unwrap_err();
/// assert!(error.to_string().contains("no-such-folder"));
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CudaConfig {
    /// The driver, `libcuda.so.1`.
    pub driver: Option<PathBuf>,
    /// The compiler of CUDA C, `libnvrtc.so`.
    pub nvrtc: Option<PathBuf>,
    /// Collectives, `libnccl.so.2`: looked for when a program first asks for them. A driver that is named goes with an
    /// NCCL that is named.
    pub nccl: Option<PathBuf>,
    /// The management library, `libnvidia-ml.so.1`.
    #[cfg(feature = "nvml")]
    pub nvml: Option<PathBuf>,
    /// The folder where machine code of earlier runs is kept, in a folder `cubin` of its own; an empty path keeps
    /// none. By default the environment names it: `WARPWEFT_CACHE_DIR`, or `warpweft` in the user's cache. A
    /// `WARPWEFT_CACHE_DIR` that is empty or not absolute keeps none.
    pub cache: Option<PathBuf>,
}

impl CudaConfig {
    /// Names the driver.
    pub fn with_driver(mut self, path: impl Into<PathBuf>) -> Self {
        self.driver = Some(path.into());
        self
    }

    /// Names the compiler.
    pub fn with_nvrtc(mut self, path: impl Into<PathBuf>) -> Self {
        self.nvrtc = Some(path.into());
        self
    }

    /// Names the library of collectives.
    pub fn with_nccl(mut self, path: impl Into<PathBuf>) -> Self {
        self.nccl = Some(path.into());
        self
    }

    /// Names the folder for machine code of earlier runs.
    pub fn with_cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = Some(folder.into());
        self
    }

    /// Keeps no machine code: for drivers that make it for themselves alone.
    pub fn without_cache(self) -> Self {
        self.with_cache("")
    }

    /// The management library, where there may be one.
    pub(crate) fn management_library(&self) -> Option<PathBuf> {
        #[cfg(feature = "nvml")]
        return self.nvml.clone();
        #[cfg(not(feature = "nvml"))]
        None
    }

    /// Names the management library.
    #[cfg(feature = "nvml")]
    pub fn with_nvml(mut self, path: impl Into<PathBuf>) -> Self {
        self.nvml = Some(path.into());
        self
    }
}
