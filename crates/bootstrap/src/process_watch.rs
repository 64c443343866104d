//! Being told of the end of processes, where the system does that.
//!
//! A connection outlives its process if a child has inherited it (Python's `multiprocessing` forks), so the
//! end of a connection alone can come late.

use mio::{Registry, Token as Slot};

#[cfg(target_os = "linux")]
#[derive(Debug, Default)]
pub(crate) struct ProcessWatch {
    descriptors: std::collections::HashMap<Slot, std::os::fd::OwnedFd>,
}

#[cfg(target_os = "linux")]
impl ProcessWatch {
    /// Whether the end of the process will make `slot` readable.
    pub(crate) fn add(&mut self, registry: &Registry, slot: Slot, pid: u32) -> bool {
        use std::os::fd::AsRawFd as _;

        use rustix::process::{Pid, PidfdFlags, pidfd_open};

        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let descriptor = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let Some(descriptor) = descriptor else { return false };
        let raw = descriptor.as_raw_fd();
        let is_watched =
            registry.register(&mut mio::unix::SourceFd(&raw), slot, mio::Interest::READABLE).is_ok();
        if is_watched {
            self.descriptors.insert(slot, descriptor);
        }
        is_watched
    }

    pub(crate) fn remove(&mut self, registry: &Registry, slot: Slot) {
        use std::os::fd::AsRawFd as _;

        if let Some(descriptor) = self.descriptors.remove(&slot) {
            // Closing it ends the watch anyway.
            let _closed = registry.deregister(&mut mio::unix::SourceFd(&descriptor.as_raw_fd()));
        }
    }
}

#[cfg(not(target_os = "linux"))]
#[derive(Debug, Default)]
pub(crate) struct ProcessWatch;

#[cfg(not(target_os = "linux"))]
impl ProcessWatch {
    pub(crate) fn add(&mut self, _: &Registry, _: Slot, _: u32) -> bool {
        false
    }

    pub(crate) fn remove(&mut self, _: &Registry, _: Slot) {}
}
