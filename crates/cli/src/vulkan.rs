//! Vulkan backends that are seen to their end.
//!
//! A process that ends while devices are let go of may crash in their driver: SwiftShader did in one of six runs.

use std::{
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use warpweft::{
    Deadline, OpenError,
    vulkan::{Messages, VulkanBackend, VulkanConfig},
};

/// A device that hangs must not hold the program for longer.
const PATIENCE: Duration = Duration::from_secs(5);

const BETWEEN: Duration = Duration::from_millis(1);

static OPENED: Mutex<Vec<Messages>> = Mutex::new(Vec::new());

/// Opens a backend that [`wait_until_closed`] knows of.
///
/// # Errors
///
/// As for [`VulkanBackend::with_config`].
pub fn open(config: &VulkanConfig) -> Result<VulkanBackend, OpenError> {
    let backend = VulkanBackend::with_config(config)?;
    OPENED.lock().unwrap_or_else(PoisonError::into_inner).push(backend.messages());
    Ok(backend)
}

/// Returns once everything of the backends that were opened is gone, or after a few seconds; a program calls it before
/// it ends.
pub fn wait_until_closed() {
    let opened = std::mem::take(&mut *OPENED.lock().unwrap_or_else(PoisonError::into_inner));
    let deadline = Deadline::within(PATIENCE);
    while !deadline.is_past() && !opened.iter().all(Messages::are_complete) {
        thread::sleep(BETWEEN);
    }
}
