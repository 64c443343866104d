//! Which driver stack the backend uses, and how.

use std::{
    ffi::{c_char, c_void},
    path::PathBuf,
};

/// `vkGetInstanceProcAddr`, by which a loader gives all its functions. The first argument is a `VkInstance`.
pub type EntryPoint = unsafe extern "system" fn(
    instance: *mut c_void,
    name: *const c_char,
) -> Option<unsafe extern "system" fn()>;

/// How the Vulkan backend is opened.
///
/// ```
/// use warpweft_vulkan::{VulkanBackend, VulkanConfig};
///
/// let config = VulkanConfig::default().with_loader("no-such-folder/libvulkan.so.1");
/// let error = VulkanBackend::with_config(&config).unwrap_err();
/// assert!(error.to_string().contains("no-such-folder"));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct VulkanConfig {
    /// The Vulkan loader, `libvulkan.so.1`; looked for where it is not named.
    pub loader: Option<PathBuf>,
    /// Devices of the seam for each physical device: each has a `VkDevice` of its own. At least 1.
    pub copies: u32,
    /// Whether the Khronos layer checks every call, with synchronization validation.
    pub validation: bool,
    /// Whether device memory counts as out of the host's reach where the host could write it, as it is on
    /// discrete GPUs.
    pub unmapped: bool,
    /// Instead of a loader's file.
    pub(crate) entry: Option<EntryPoint>,
}

impl Default for VulkanConfig {
    fn default() -> Self {
        Self { loader: None, copies: 1, validation: false, unmapped: false, entry: None }
    }
}

impl VulkanConfig {
    /// Whether the instance is as any other.
    pub(crate) const fn is_plain(&self) -> bool {
        self.loader.is_none() && self.entry.is_none() && !self.validation
    }

    /// Names the loader.
    #[must_use]
    pub fn with_loader(mut self, path: impl Into<PathBuf>) -> Self {
        self.loader = Some(path.into());
        self
    }

    /// Takes a loader that is in the program already, such as one that it is linked with, or functions that stand in
    /// front of a loader's.
    ///
    /// # Safety
    ///
    /// - The function does what the loader's `vkGetInstanceProcAddr` does, and so does what it gives, until the backend
    ///   and everything that was opened with it are gone.
    #[must_use]
    #[expect(unsafe_code, reason = "takes a function on the caller's word")]
    pub unsafe fn with_entry_point(mut self, entry: EntryPoint) -> Self {
        self.entry = Some(entry);
        self
    }

    /// Opens every physical device as so many devices of the seam.
    #[must_use]
    pub fn with_copies(mut self, copies: u32) -> Self {
        self.copies = copies;
        self
    }

    /// Has the Khronos layer check every call; see [`crate::VulkanBackend::messages`].
    ///
    /// One such backend at a time: the layer of 1.3.239 was seen to crash in one instance while another one was
    /// destroyed.
    #[must_use]
    pub fn with_validation(mut self) -> Self {
        self.validation = true;
        self
    }

    /// Keeps the host out of device memory, so that the ways of discrete GPUs can be tried on any device.
    #[must_use]
    pub fn with_unmapped_memory(mut self) -> Self {
        self.unmapped = true;
        self
    }
}
